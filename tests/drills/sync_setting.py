"""What the processes of the weight sync's kill drill share, beside tests.drills.setting.

held/PID.jsonl    one line for each version that generator process PID has put into use: version, digests
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from broker.messages import Rules
from tests.drills.setting import Setting
from weights_sync.config import WeightsSyncConfig
from weights_sync.manifest import digest

SYNC = WeightsSyncConfig(bucket_bytes=256 << 10, sync_timeout_s=2.0, no_generator_timeout_s=20.0)
LEASE_TIMEOUT_S, MEMBER_TIMEOUT_S, HEARTBEAT_S = 3.0, 5.0, 0.5
MAX_STALENESS = 32  # steps, which are short here: a fault takes some twenty of them
LAYERS, WIDTH, HEIGHT = 8, 512, 1024  # 2 MiB each

Digests = Mapping[str, str]


class Policy(nn.Module):
    """17 MB of parameters, one of them under two names, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, HEIGHT) for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, HEIGHT)
        self.head.weight = next(self.layers.parameters())
        self.steps: Tensor
        self.register_buffer("steps", torch.zeros(1, dtype=torch.int64))


def digests_of(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """By name; of the bytes as they are, which are those on the wire."""
    return {name: digest(one.detach().reshape(-1).view(torch.uint8).numpy().data) for name, one in tensors.items()}


def held_file(setting: Setting, pid: int) -> Path:
    """Of one generator process."""
    return Path(setting.directory, "held", f"{pid}.jsonl")


def read_held(path: Path) -> dict[int, Digests]:
    """The versions that a process has put into use, with what it then held; a line cut off by a kill is not there."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").split("\n")[:-1]
    return {one["version"]: one["digests"] for one in map(json.loads, lines)}


def rules(setting: Setting) -> Rules:
    """What the learner opens the run with: a batch is one group."""
    return replace(setting.rules(1, "sync-drill"), max_staleness=MAX_STALENESS)


async def reward(text: str, answer: str, reference: str) -> float:
    """Of the drill's answers, which are not looked at."""
    return 1.0
