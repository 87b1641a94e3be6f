"""Cases like those of ranks.py, of steps that take passes of a reference or a critic, or several optimizer steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from learners.batching import TrainSequence
from learners.config import AlgorithmConfig
from learners.policy import Policy
from learners.stats import NonFiniteGradients
from learners.tensor_files import TensorsMissing
from tests.learners.ranks import dump, main, policy, rows, train_parts, weighted
from weights_sync.manifest import digest

ORDER = [1, 0, 0, 1]
STEPS: dict[str, dict[str, Any]] = {
    "plain": {"mini_batches": 2, "epochs": 2},
    "recomputed": {"proximal": "recomputed"},
    "from_behavior": {"mini_batches": 2, "epochs": 2, "correction": {"kind": "none"}},
    "kl_loss": {"mini_batches": 2, "epochs": 2, "kl_coef": 0.2, "kl_estimator": "k3"},
    "kl_loss_once": {"kl_coef": 0.2, "kl_estimator": "k2"},
    "kl_reward": {"mini_batches": 2, "epochs": 2, "kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k1"},
    "kl_reward_once": {"kl_coef": 0.2, "kl_in": "reward", "kl_estimator": "k3"},
}
"""Settings of AlgorithmConfig; two steps of each."""
CRITICS: dict[str, dict[str, Any]] = {
    "ppo": {"recipe": "ppo", "critic": {"enabled": True, "gae_lambda": 0.9, "gamma": 0.95, "lr": 2e-2}},
    "ppo_kl": {"recipe": "ppo", "kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"},
    "ppo_warm": {"recipe": "ppo", "critic": {"enabled": True, "warmup_steps": 1, "value_clip": 0.02}},
}


def parts_of(algorithm: AlgorithmConfig, seed: int) -> tuple[list[list[TrainSequence]], list[int]]:
    """Eleven rows in as many mini-batches as the algorithm has, and the order of the optimizer steps."""
    made = rows(seed)
    if algorithm.mini_batches == 1:
        return [made], [0] * algorithm.epochs
    return [weighted(made[:6]), weighted(made[6:])], ORDER


def two_steps(one: Policy, algorithm: AlgorithmConfig, rank: int, world: int) -> list[dict[str, float]]:
    """In small micro-batches where there are two ranks."""
    budget, seen = 100_000 if world == 1 else 24, []
    for seed in (1, 2):
        parts, order = parts_of(algorithm, seed)
        seen.append(train_parts(one, parts, rank, world, budget=budget, order=order))
    return seen


def case_steps(directory: Path, rank: int, world: int) -> None:
    """Two steps of every kind."""
    seen = {}
    for tag, settings in STEPS.items():
        algorithm = AlgorithmConfig(**settings)
        one = policy(directory, rank, world, algorithm=algorithm)
        seen[tag] = two_steps(one, algorithm, rank, world)
        dump(one, directory / f"{tag}-{world}.safetensors", rank)
    if rank == 0:
        (directory / f"steps-{world}.json").write_text(json.dumps(seen))


def digests(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    return [digest(memoryview(tensor.contiguous().numpy()).cast("B")) for _, tensor in tensors]


def case_reference(directory: Path, rank: int, world: int) -> None:
    """What a reference is after steps, where it is kept, when it is reset, and what a checkpoint has of it."""
    seen: dict[str, Any] = {}
    algorithm = AlgorithmConfig(kl_coef=0.2)
    for tag, changes in {"z0": {"zero_stage": 0}, "z3": {}, "offload": {"offload_reference": "cpu"}}.items():
        one = policy(directory, rank, world, algorithm=algorithm, **changes)
        assert one.reference is not None
        before = digests(one.reference.engine.weights())
        seen[tag] = two_steps(one, algorithm, rank, world)
        seen[f"{tag}-same"] = before == digests(one.reference.engine.weights())
        seen[f"{tag}-devices"] = sorted({str(p.device) for p in one.reference.engine.module.parameters()})
        seen[f"{tag}-elements"] = sum(part.numel() for _, part in one.reference.engine.parts())
        dump(one, directory / f"reference-{tag}.safetensors", rank)
    resetting = AlgorithmConfig(kl_coef=0.2, reference_reset_steps=2)
    one = policy(directory, rank, world, algorithm=resetting)
    seen["reset"] = two_steps(one, resetting, rank, world)
    seen["reset-is-policy"] = digests(one.weights()) == digests(reference_of(one).engine.weights())
    train_parts(one, [rows(3)], rank, world, budget=100_000)
    seen["then-not"] = digests(one.weights()) == digests(reference_of(one).engine.weights())
    saved = directory / f"with-reference-{world}"
    save(one, saved, rank, world)
    again = policy(directory, rank, world, algorithm=resetting, resume=saved)
    seen["resumed"] = digests(again.reference.engine.weights()) == digests(reference_of(one).engine.weights())
    for each, name in ((one, "straight"), (again, "again")):
        seen[name] = train_parts(each, [rows(4)], rank, world, budget=100_000)
        dump(each, directory / f"reference-{name}.safetensors", rank)
    without = directory / f"without-{world}"
    plain = policy(directory, rank, world)
    seen["unused"] = plain.reference is None and plain.critic is None
    save(plain, without, rank, world)
    for name, settings in {"reference": resetting, "critic": AlgorithmConfig(recipe="ppo")}.items():
        try:
            policy(directory, rank, world, algorithm=settings, resume=without)
        except TensorsMissing as error:
            seen[f"{name}-missing"] = str(error)
    if rank == 0:
        (directory / "reference.json").write_text(json.dumps(seen))


def reference_of(one: Policy) -> Any:
    assert one.reference is not None
    return one.reference


def save(one: Policy, directory: Path, rank: int, world: int) -> None:
    if rank == 0:
        directory.mkdir()
    if world > 1:
        dist.barrier()
    one.save(directory)
    if world > 1:
        dist.barrier()


def case_bad_updates(directory: Path, rank: int, world: int) -> None:
    """A step whose first mini-batch is spoilt, one without, one in which both are; then until it gives up."""
    algorithm = AlgorithmConfig(mini_batches=2, epochs=2)
    one = policy(directory, rank, world, algorithm=algorithm)

    def spoilt(*which: int) -> list[list[TrainSequence]]:
        parts, _ = parts_of(algorithm, 2)
        for k in which:
            parts[k][1] = replace(parts[k][1], advantage=np.nan)
        return parts

    seen = [train_parts(one, spoilt(*bad), rank, world, budget=24, order=[0, 1, 1, 0]) for bad in ((0,), ())]
    dump(one, directory / "bad-before.safetensors", rank)
    seen.append(train_parts(one, spoilt(0, 1), rank, world, budget=24, order=[0, 1]))
    dump(one, directory / "bad-after.safetensors", rank)
    error = ""
    try:
        train_parts(one, spoilt(0, 1), rank, world, budget=24, order=[0, 1])
    except NonFiniteGradients as raised:
        error = str(raised)
    if rank == 0:
        (directory / "bad_updates.json").write_text(json.dumps({"seen": seen, "error": error}))


def dump_critic(one: Policy, path: Path, rank: int) -> None:
    assert one.critic is not None
    tensors = {name: tensor.clone() for name, tensor in one.critic.engine.weights()}
    if rank == 0:
        save_file(tensors, path)


def case_critics(directory: Path, rank: int, world: int) -> None:
    """Two steps of each; a checkpoint, a third step, and the same from disk."""
    seen = {}
    for tag, settings in CRITICS.items():
        algorithm = AlgorithmConfig(**settings)
        one = policy(directory, rank, world, algorithm=algorithm)
        seen[tag] = two_steps(one, algorithm, rank, world)
        assert not {name for name, _ in one.parts()} & {"lm_head.weight", "lm_head.bias"}, "the critic's head is sent"
        dump(one, directory / f"{tag}-{world}.safetensors", rank)
        dump_critic(one, directory / f"{tag}-critic-{world}.safetensors", rank)
    if world > 1:
        saved = directory / "with-critic"
        save(one, saved, rank, world)
        third(one, directory, rank, world, "straight")
        third(policy(directory, rank, world, algorithm=algorithm, resume=saved), directory, rank, world, "resumed")
    if rank == 0:
        (directory / f"critics-{world}.json").write_text(json.dumps(seen))


def third(one: Policy, directory: Path, rank: int, world: int, tag: str) -> None:
    parts, order = parts_of(AlgorithmConfig(recipe="ppo"), 3)
    train_parts(one, parts, rank, world, budget=24, order=order)
    dump(one, directory / f"third-{tag}.safetensors", rank)
    dump_critic(one, directory / f"third-critic-{tag}.safetensors", rank)


def case_critic_elsewhere(directory: Path, rank: int, world: int) -> None:
    """One rank goes on from what two have saved."""
    algorithm = AlgorithmConfig(**CRITICS["ppo_warm"])
    third(
        policy(directory, rank, world, algorithm=algorithm, resume=directory / "with-critic"),
        directory,
        rank,
        world,
        "elsewhere",
    )


if __name__ == "__main__":
    main(globals())
