"""What the multi-rank tests run in processes of their own: ``python ranks.py CASE RANK WORLD PORT DIRECTORY``.

Each case writes what it saw into DIRECTORY; the tests judge it.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from broker.errors import SlipstreamError
from learners import sharding
from learners.batching import TrainSequence
from learners.config import AlgorithmConfig, LearnerConfig, OptimConfig
from learners.engine import Engine
from learners.exchange import Exchange, MiniBatch, Plan, RootFailed
from learners.losses import PAIRED
from learners.packing import packs
from learners.planning import plan, plan_pairs
from learners.policy import Policy
from learners.recipes import RECIPES
from learners.stats import NonFiniteGradients

# eps is large, so that a gradient that is zero but for rounding does not become a step of full size.
OPTIM = {"lr": 1e-2, "max_grad_norm": 0.5, "weight_decay": 0.01, "eps": 1e-3}
TEMPERATURE = 0.7
REWARDS = np.linspace(1.0, -1.0, 12)


def rows(seed: int) -> list[TrainSequence]:
    """Eleven sequences of uneven lengths, two of their tokens masked."""
    rng = np.random.default_rng(seed)
    made: list[TrainSequence] = []
    for i in range(11):
        P, L = int(rng.integers(1, 9)), int(rng.integers(1, 12))
        mask = np.ones(L, np.uint8)
        mask[: i % 3] = 0
        if not mask.any():
            mask[-1] = 1
        made.append(
            TrainSequence(
                prompt_ids=rng.integers(0, 64, P).astype(np.int32),
                completion_ids=rng.integers(0, 64, L).astype(np.int32),
                loss_mask=mask,
                behavior_logprobs=rng.uniform(-5, -3.5, L).astype(np.float32),
                staleness=rng.integers(0, 4, L).astype(np.int32),
                advantage=float(rng.normal()),
                weight=0.0,
                index=i,
            )
        )
    return weighted(made)


def weighted(made: list[TrainSequence]) -> list[TrainSequence]:
    """With the weights of a mean over the tokens of the step."""
    return [replace(row, weight=1 / sum(one.loss_tokens for one in made)) for row in made]


def config(world: int, **changes: object) -> LearnerConfig:
    settings: dict[str, object] = {
        "ranks": world,
        "total_steps": 100,
        "optim": OptimConfig(**OPTIM),
        "collective_timeout_s": 60.0,
    }
    return LearnerConfig(**(settings | changes))  # type: ignore[arg-type]


def recipe_rows() -> list[TrainSequence]:
    """Ten sequences, which are five pairs, with weights of no mean in particular."""
    return [replace(row, weight=0.004 * (i + 1)) for i, row in enumerate(rows(5)[:10])]


def policy(
    directory: Path,
    rank: int,
    world: int,
    *,
    resume: Path | None = None,
    model: str = "model",
    algorithm: AlgorithmConfig | None = None,
    **changes: object,
) -> Policy:
    return Policy(
        model_dir=directory / model,
        config=config(world, **changes),
        algorithm=algorithm or AlgorithmConfig(),
        temperature=TEMPERATURE,
        seed=3,
        rank=rank,
        world=world,
        local_rank=rank,
        resume=resume,
    )


def train(
    one: Policy, sequences: list[TrainSequence], rank: int, world: int, *, budget: int, paired: bool = False
) -> dict[str, float]:
    return train_parts(one, [sequences], rank, world, budget=budget, paired=paired)


def train_parts(
    one: Policy,
    parts: list[list[TrainSequence]],
    rank: int,
    world: int,
    *,
    budget: int,
    paired: bool = False,
    order: list[int] | None = None,
) -> dict[str, float]:
    """A step of these mini-batches in this order. Where the KL acts on rewards, those are of ``REWARDS``."""
    make = plan_pairs if paired else plan
    mini_batches = []
    for rows in parts:
        mine = make([len(row) for row in rows], ranks=world, token_budget=budget, packed=packs(one.module))[rank]
        micro_batches = [[rows[i] for i in part] for part in mine]
        mini_batches.append(MiniBatch(denominator=sum(row.loss_tokens for row in rows), micro_batches=micro_batches))
    share = Plan(mini_batches=mini_batches, order=order or [*range(len(parts))], completions=len(REWARDS))
    stats = one.step(share, lambda kl_N: REWARDS - 0.2 * kl_N)
    numbers = {name: getattr(stats, name) for name in stats.__dataclass_fields__ if name != "parts"}
    micro = sum(len(mini_batch.micro_batches) for mini_batch in mini_batches)
    return {name: float(value) for name, value in {**numbers, **stats.parts}.items()} | {"micro": micro}


def dump(one: Policy, path: Path, rank: int) -> None:
    tensors = {name: tensor.clone() for name, tensor in one.weights()}
    if rank == 0:
        save_file(tensors, path)
    else:
        assert not tensors


def case_steps(directory: Path, rank: int, world: int) -> None:
    """Two steps at every ZeRO stage; then save, a third step, and the same from disk."""
    seen: dict[str, dict[str, float]] = {}
    for stage in (0, 1, 2, 3):
        one, tag = policy(directory, rank, world, zero_stage=stage), f"z{stage}"
        for seed in (1, 2):
            seen[f"{tag}-{seed}"] = train(one, rows(seed), rank, world, budget=100_000)
        dump(one, directory / f"{tag}-second.safetensors", rank)
        saved = directory / f"saved-{tag}"
        if rank == 0:
            saved.mkdir()
        if world > 1:
            dist.barrier()
        torch.rand(rank + 3)
        one.save(saved)
        random = torch.rand(4)
        train(one, rows(3), rank, world, budget=100_000)
        dump(one, directory / f"{tag}-third.safetensors", rank)
        again = policy(directory, rank, world, zero_stage=stage, resume=saved)
        assert again.version == 2
        assert torch.equal(torch.rand(4), random), "the random numbers are not resumed"
        train(again, rows(3), rank, world, budget=100_000)
        dump(again, directory / f"{tag}-resumed.safetensors", rank)
    if rank == 0:
        (directory / "stats.json").write_text(json.dumps(seen))


def case_missing(directory: Path, rank: int, world: int) -> None:
    """Goes on from what ``case_steps`` has saved at stage 3, each time without one of its files."""
    seen: dict[str, str] = {}
    for name in ("model.safetensors", "optimizer.safetensors", "policy.json", "rng-00000.safetensors", "fresh"):
        broken = directory / f"without-{name}"
        if rank == 0:
            shutil.copytree(directory / "saved-z3", broken)
            if name == "fresh":  # the optimizer's state of a run that has not begun, beside weights of one that has
                state = json.loads((broken / "policy.json").read_text()) | {"optimizer_steps": 0}
                (broken / "policy.json").write_text(json.dumps(state))
            else:
                (broken / name).unlink()
        dist.barrier()
        try:
            policy(directory, rank, world, resume=broken)
            seen[name] = ""
        except (SlipstreamError, OSError) as error:
            seen[name] = f"{type(error).__name__}: {error}"
    (directory / f"missing-{rank}.json").write_text(json.dumps(seen))


def case_micro_batches(directory: Path, rank: int, world: int) -> None:
    """The same two steps in many micro-batches, packed and padded, with gradient checkpointing and with offloading."""
    variants: dict[str, dict[str, object]] = {
        "z2": {"zero_stage": 2},
        "padded": {"packing": "off"},
        "checkpointing": {"gradient_checkpointing": True},
        "padded-checkpointing": {"gradient_checkpointing": True, "packing": "off"},
        "offload": {"offload_optimizer": "cpu", "offload_param": "cpu"},
    }
    for tag, changes in variants.items():
        one = policy(directory, rank, world, **changes)
        for seed in (1, 2):
            stats = train(one, rows(seed), rank, world, budget=24)
        assert stats["micro"] > 2
        assert packs(one.module) == (changes.get("packing") != "off")
        dump(one, directory / f"many-{tag}.safetensors", rank)


def case_elsewhere(directory: Path, rank: int, world: int) -> None:
    """Goes on from what two ranks have saved, on another number of ranks and at other stages."""
    for stage in (0, 3):
        one = policy(directory, rank, world, zero_stage=3 - stage, resume=directory / f"saved-z{stage}")
        train(one, rows(3), rank, world, budget=100_000)
        dump(one, directory / f"elsewhere-z{stage}.safetensors", rank)


def case_order(directory: Path, rank: int, world: int) -> None:
    """Records every collective of steps, publications, a save and an export; the second step has one sequence only."""
    calls: list[list[object]] = []

    def recorded(name: str) -> None:
        plain = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            sizes = [arg.numel() for arg in args if isinstance(arg, torch.Tensor)]
            calls.append([name, *sizes])
            return plain(*args, **kwargs)

        setattr(dist, name, call)

    sharding._BUCKET_BYTES = 1 << 14
    one = policy(directory, rank, world)
    for name in ("gather", "all_gather", "all_reduce", "barrier", "broadcast"):
        recorded(name)
    for sequences in (rows(1), weighted(rows(2)[:1]), rows(3)):
        train(one, sequences, rank, world, budget=24)
        dump(one, directory / f"order-{one.version}.safetensors", rank)
    one.export(directory / "actor")
    untied = policy(directory, rank, world, model="untied")
    train(untied, rows(1), rank, world, budget=100_000)
    dump(untied, directory / "untied-1.safetensors", rank)
    (directory / f"order-{rank}.json").write_text(json.dumps(calls))


BAD = ((0, "float32"), (1, "float32"), (2, "float32"), (3, "float32"), (3, "bfloat16"))


def case_bad_gradients(directory: Path, rank: int, world: int) -> None:
    """A good step, one without finite gradients, a good one; then three bad ones in a row."""
    seen: dict[str, object] = {}
    for stage, dtype in BAD:
        one, tag = policy(directory, rank, world, zero_stage=stage, dtype=dtype), f"{stage}-{dtype}"
        good = [train(one, rows(1), rank, world, budget=100_000)]
        dump(one, directory / f"before-{tag}.safetensors", rank)
        spoilt = rows(2)  # of one rank only
        spoilt[4].behavior_logprobs[-1] = np.nan
        bad = train(one, spoilt, rank, world, budget=100_000)
        dump(one, directory / f"after-{tag}.safetensors", rank)
        good.append(train(one, rows(2), rank, world, budget=100_000))
        dump(one, directory / f"next-{tag}.safetensors", rank)
        error = ""
        try:
            for _ in range(5):
                train(one, spoilt, rank, world, budget=100_000)
        except NonFiniteGradients as raised:
            error = str(raised)
        seen[tag] = {"good": good, "bad": bad, "error": error}
    if rank == 0:
        (directory / "bad.json").write_text(json.dumps(seen))


def case_sgd(directory: Path, rank: int, world: int) -> None:
    """As ``case_steps``, with another optimizer, at the stages that keep its state in three ways."""
    optim = OptimConfig(optimizer="sgd", momentum=0.9, lr=0.1, max_grad_norm=0.5, weight_decay=0.01)
    for stage in (0, 2, 3):
        one = policy(directory, rank, world, zero_stage=stage, optim=optim)
        for seed in (1, 2):
            train(one, rows(seed), rank, world, budget=100_000)
        dump(one, directory / f"sgd-z{stage}-second.safetensors", rank)
        saved = directory / f"saved-sgd-z{stage}"
        if rank == 0:
            saved.mkdir()
        if world > 1:
            dist.barrier()
        one.save(saved)
        train(one, rows(3), rank, world, budget=100_000)
        dump(one, directory / f"sgd-z{stage}-third.safetensors", rank)
        again = policy(directory, rank, world, zero_stage=stage, optim=optim, resume=saved)
        train(again, rows(3), rank, world, budget=100_000)
        dump(again, directory / f"sgd-z{stage}-resumed.safetensors", rank)


def case_small_updates(directory: Path, rank: int, world: int) -> None:
    """C101: a hundred steps of 1e-6 from weights of 1, computed in bfloat16, whose numbers beside 1 are 0.004 apart."""
    seen: dict[str, dict[str, float]] = {}
    for stage in (0, 1, 2, 3):
        module = torch.nn.Linear(8, 8, bias=False)
        torch.nn.init.ones_(module.weight)
        given = config(world, zero_stage=stage, dtype="bfloat16", optim=OptimConfig(lr=1e-6))
        engine = Engine(module, config=given, optim=given.optim, rank=rank, world=world, local_rank=rank)
        for _ in range(100):
            output = engine(input=torch.ones(2, 8))
            assert output.dtype == torch.bfloat16
            engine.backward(output.float().sum())
            engine.apply()
        for _, weight in engine.weights():
            seen[str(stage)] = {"dtype": str(weight.dtype), "delta": float((1 - weight).mean())}  # type: ignore[dict-item]
    if rank == 0:
        (directory / "small.json").write_text(json.dumps(seen))


def case_bfloat16(directory: Path, rank: int, world: int) -> None:
    """One step in either arithmetic."""
    seen = {}
    for dtype in ("float32", "bfloat16"):
        one = policy(directory, rank, world, dtype=dtype, gradient_checkpointing=True)
        seen[dtype] = train(one, rows(1), rank, world, budget=24)
    if rank == 0:
        (directory / "dtype.json").write_text(json.dumps(seen))


def case_recipes(directory: Path, rank: int, world: int) -> None:
    """A step of every recipe, in micro-batches that shrink as ranks grow."""
    for recipe in RECIPES:
        if recipe == "ppo":  # its critic is in rank_passes.py
            continue
        algorithm = AlgorithmConfig(recipe=recipe)  # type: ignore[arg-type]
        one = policy(directory, rank, world, algorithm=algorithm)
        budget, paired = 100_000 if world == 1 else 40, algorithm.loss in PAIRED
        stats = train(one, recipe_rows(), rank, world, budget=budget, paired=paired)
        assert stats["micro"] == 1 if world == 1 else stats["micro"] > 1
        dump(one, directory / f"{recipe}-{world}.safetensors", rank)


def case_exchange(directory: Path, rank: int, world: int) -> None:
    """Frames of many sizes with waits between them, then the end of rank 0."""
    exchange = Exchange(rank=rank, world=world, timeout_s=30.0)
    frames = [None, None, b"", b"x" * 100, None, b"y" * 300_000, b"z" * ((64 << 10) - 9)]
    produced = iter(frames)

    def produce(wait_s: float) -> bytes | None:
        try:
            return next(produced)
        except StopIteration:
            raise ValueError("out of frames") from None

    got = [exchange.share(produce if rank == 0 else None) for _ in range(4)]
    error = ""
    try:
        exchange.share(produce if rank == 0 else None)
    except (ValueError, RootFailed) as raised:
        error = f"{type(raised).__name__}: {raised}"
    seen = {"sizes": [len(frame) for frame in got], "letters": [sorted(set(frame.decode())) for frame in got]}
    (directory / f"exchange-{rank}.json").write_text(json.dumps(seen | {"error": error}))


def main(cases: Mapping[str, Any]) -> None:
    """Runs the cases that the command line names."""
    case, rank, world, port, directory = sys.argv[1], *map(int, sys.argv[2:5]), Path(sys.argv[5])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=60), wait_for_workers=False)
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(case, store), rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    for name in case.split("+"):
        cases[f"case_{name}"](directory, rank, world)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(globals())
