"""A learner rank other than 0 in a process of its own, which can be stopped: "VERSION SLOT" in as lines, "offered" out.

Arguments: its settings, the address of rank 0's store, how many ranks there are.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from weights_sync.config import WeightsSyncConfig
from weights_sync.part_sender import PartSender
from weights_sync.staging import declare, shard_of


def model_of(version: int) -> nn.Module:
    """The same on every rank, and another one for every version."""
    torch.manual_seed(version)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))


def part_of(model: nn.Module, rank: int, ranks: int) -> list[tuple[str, Tensor]]:
    """What a rank has of the model."""
    shards = [(name, one.detach().reshape(-1), shard_of(one.numel(), rank, ranks)) for name, one in _named(model)]
    return [(name, flat[start : start + count]) for name, flat, (start, count) in shards if count]


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def main() -> None:
    config, address, ranks = WeightsSyncConfig.model_validate_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    declaration = declare(model_of(0), part=1, parts=ranks)
    sender = PartSender(config=config, address=address, declaration=declaration, incarnation=0)
    print("ready", flush=True)
    for line in sys.stdin:
        version, slot = map(int, line.split())
        sender.offer(version, part_of(model_of(version), 1, ranks), slot)
        print("offered", flush=True)


if __name__ == "__main__":
    main()
