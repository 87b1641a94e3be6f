"""A learner that was killed goes on as if it had not been, on as many ranks as before or on others."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from learners.checkpoint import MARKER, read_checkpoint
from telemetry.sink import read_jsonl

pytestmark = pytest.mark.slow  # real ranks are started

TIMES = ("time", "_s", "idle_share", "rss_bytes", "incarnation", "tokens_per_s")  # parts of names of what may differ


@pytest.fixture(scope="module")
def ran(run_ranks: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 steps straight; and 12, kill -9, and on from the checkpoint of 10: two ranks, ZeRO-3."""
    directory = tmp_path_factory.mktemp("resume")
    for name, given, dies in (
        ("straight", {"run": "straight", "total_steps": 20}, False),
        ("killed", {"run": "again", "total_steps": 20, "kill_at": 12}, True),
        ("again", {"run": "again", "total_steps": 20}, False),
    ):
        (directory / f"{name}.json").write_text(json.dumps(given))
        run_ranks(name, world=2, directory=directory, script="scripted.py", dies=dies)
    return directory


def checkpoint(directory: Path, run: str) -> Path:
    return directory / run / "checkpoints" / "step_000020"


def test_c69_c106_a_killed_run_ends_with_the_same_bits_as_one_that_was_not(ran: Path) -> None:
    one, other = checkpoint(ran, "straight"), checkpoint(ran, "again")
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    for name in ("model.safetensors", "optimizer.safetensors", "policy.json", "rng-00000.safetensors",
                 "rng-00001.safetensors", MARKER):  # fmt: skip
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_c64_the_data_comes_in_the_same_order_and_nothing_of_it_twice(ran: Path) -> None:
    straight, killed, again = (
        (ran / f"{name}-positions.txt").read_text().splitlines() for name in ("straight", "killed", "again")
    )
    assert killed == straight[:12]
    assert again == straight[10:]
    positions = [int(place) for line in straight for place in line.split()[1:]]
    assert len(set(positions)) == len(positions) == 60
    assert positions != sorted(positions)
    _, frontier = read_checkpoint(checkpoint(ran, "again"))
    assert frontier.beyond, "nothing is open behind the frontier: its second half is not tested"


def test_every_number_of_every_step_is_the_same(ran: Path) -> None:
    one, other = (read_jsonl(ran / run / "logs" / "metrics.jsonl") for run in ("straight", "again"))
    assert [line["step"] for line in other] == list(range(1, 21))
    assert len({line["lr"] for line in one}) > 15  # a schedule that moves
    for a, b in zip(one, other, strict=True):
        names = [name for name in a if not any(part in name for part in TIMES)]
        assert len(names) > 20
        assert {name: a[name] for name in names} == {name: b[name] for name in names}


def test_c110_the_resumed_run_says_where_it_stands(ran: Path) -> None:
    said = (ran / "again-0.log").read_text()
    _, frontier = read_checkpoint(ran / "again" / "checkpoints" / "step_000015")
    assert frontier.size == 45
    lr = read_jsonl(ran / "again" / "logs" / "metrics.jsonl")[10]["lr"]
    assert "checkpoints/step_000010" in said
    assert "policy version 10 of 20, data position" in said
    assert f"learning rate {lr:g}" in said


def test_c71_on_two_ranks_then_one_then_two_the_losses_are_those_of_two(
    run_ranks: Callable[..., None], ran: Path
) -> None:
    for name, world, kill_at in (("first", 2, 6), ("second", 1, 11), ("third", 2, 0)):
        given: dict[str, Any] = {"run": "ranks", "total_steps": 20, "kill_at": kill_at or -1}
        given["learner"] = {"zero_stage": 3 if world == 2 else 1}
        (ran / f"{name}.json").write_text(json.dumps(given))
        run_ranks(name, world=world, directory=ran, script="scripted.py", dies=bool(kill_at))
    one, other = (read_jsonl(ran / run / "logs" / "metrics.jsonl") for run in ("straight", "ranks"))
    assert [line["step"] for line in other] == list(range(1, 21))
    losses = [[line["loss"] for line in lines] for lines in (one, other)]
    assert max(map(abs, losses[0])) > 1e-3
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    assert [line["grad_norm"] for line in other] == pytest.approx([line["grad_norm"] for line in one], rel=1e-3)
