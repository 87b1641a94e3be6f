"""The loop's order of effects, with a policy and a conductor that only write down what is asked of them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from broker.messages import Frontier
from learners.checkpoint import Checkpoints
from learners.conductor import END
from learners.config import CheckpointConfig, EvalConfig, LearnerConfig
from learners.exchange import Exchange, MiniBatch, Plan, Rows, encode
from learners.loop import learn
from learners.saving import Saved, Saver
from learners.stats import StepStats

_NO_NUMBERS = ("version", "applied", "parts")
NUMBERS = dict.fromkeys((name for name in StepStats.__dataclass_fields__ if name not in _NO_NUMBERS), 0.0)


PLAN: Plan[Rows] = Plan(mini_batches=[MiniBatch(denominator=3, micro_batches=[[]])], order=[0], completions=0)
"""Of one rank, in one micro-batch without rows."""


SYNCHRONOUS = CheckpointConfig(every_steps=1, background=False)


class Scribe:
    """Policy and conductor in one. ``skips``: the calls of ``step`` that find no finite gradients."""

    device = "cpu"
    frontier = Frontier(base=5)

    def __init__(self, *, version: int = 0, skips: tuple[int, ...] = (), end_at: int = 1000) -> None:
        self.version, self._skips, self._end_at, self._steps = version, skips, end_at, 0
        self.seen: list[str] = []
        self.kl: NDArray[np.float64] | None = None

    def step(self, share: Plan[Rows], revalue: Callable[..., Any]) -> StepStats:
        assert share == PLAN
        if self.kl is not None:
            self.seen.append(f"worth {revalue(self.kl).tolist()}")
        self._steps += 1
        applied = self._steps not in self._skips
        self.version += applied
        self.seen.append(f"step {self.version}" if applied else "skip")
        return StepStats(version=self.version, applied=applied, **NUMBERS)

    def parts(self) -> Iterator[Any]:
        return iter(())

    def capture(self, directory: Path, *, background: bool) -> Callable[[], None]:
        assert not background or self.version < self._end_at
        text = str(self.version)
        return lambda: self.write(directory / "state", text)

    def write(self, path: Path, text: str) -> None:
        path.write_text(text)

    def next_plan(self, version: int) -> Callable[[float], bytes | None]:
        polls = iter(
            [
                None,
                END
                if version == self._end_at
                else encode(replace(PLAN, mini_batches=[MiniBatch(denominator=3, micro_batches=[[[]]])])),
            ]
        )
        return lambda wait_s: next(polls)

    def advantages(self, kl_N: NDArray[np.float64]) -> Callable[[float], bytes]:
        return lambda wait_s: (1.0 - kl_N).tobytes()

    def evaluate(self, version: int) -> Callable[[float], bytes | None]:
        self.seen.append(f"eval {version}")
        return lambda wait_s: b"over"

    def reserve(self, wait_s: float) -> bytes:
        return b"\0"

    def offer(self, version: int, tensors: Iterator[Any], slot: int) -> None:
        self.seen.append(f"offer {version}")

    def stepped(self, stats: StepStats, watch: object) -> None:
        self.seen.append(f"book {stats.version}" if stats.applied else "log skip")

    def saved(self, saved: Saved | None) -> None:
        if saved is not None:
            assert saved.frontier == self.frontier
            self.seen.append(f"durable {saved.version}")


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., list[str]]:
    def run(scribe: Scribe, **changes: Any) -> list[str]:
        learn(
            policy=scribe,  # type: ignore[arg-type]
            exchange=Exchange(rank=0, world=1, timeout_s=1.0),
            conductor=scribe,  # type: ignore[arg-type]
            sender=None,
            saver=Saver(Checkpoints(tmp_path, keep=2)),
            config=LearnerConfig(ranks=1, **changes),
            rank=0,
        )
        return scribe.seen

    return run


def test_a_version_is_offered_then_booked_and_the_last_one_is_saved(run: Callable[..., list[str]]) -> None:
    assert run(Scribe(), total_steps=2) == [
        "offer 0", "step 1", "offer 1", "book 1", "step 2", "offer 2", "book 2", "durable 2",
    ]  # fmt: skip


def test_the_advantages_that_wait_for_a_divergence_come_from_rank_0_within_the_step(
    run: Callable[..., list[str]],
) -> None:
    scribe = Scribe()
    scribe.kl = np.array([0.25, -1.0])
    assert run(scribe, total_steps=1)[:3] == ["offer 0", "worth [0.75, 2.0]", "step 1"]


def test_c99_a_skipped_step_is_logged_and_neither_offered_nor_booked_nor_saved(run: Callable[..., list[str]]) -> None:
    seen = run(Scribe(skips=(2,)), total_steps=2, checkpoint=SYNCHRONOUS)
    assert seen == [
        "offer 0", "step 1", "offer 1", "book 1", "durable 1", "skip", "log skip",
        "step 2", "offer 2", "book 2", "durable 2",
    ]  # fmt: skip


def test_evaluations_stand_at_the_start_in_between_and_at_the_end_each_once(run: Callable[..., list[str]]) -> None:
    seen = run(Scribe(), total_steps=4, eval=EvalConfig(every_steps=2, at_start=True, at_end=True))
    assert [line for line in seen if line.startswith("eval")] == ["eval 0", "eval 2", "eval 4"]
    assert seen.index("offer 0") < seen.index("eval 0") < seen.index("step 1")


def test_the_end_of_the_data_ends_the_loop_with_a_checkpoint(run: Callable[..., list[str]]) -> None:
    assert run(Scribe(end_at=1), total_steps=9)[-2:] == ["book 1", "durable 1"]


def test_c68_a_finished_run_does_nothing_more_and_a_longer_one_exactly_the_rest(run: Callable[..., list[str]]) -> None:
    assert run(Scribe(version=60), total_steps=60) == ["offer 60"]
    steps = [line for line in run(Scribe(version=60), total_steps=120) if line.startswith("step")]
    assert (len(steps), steps[-1]) == (60, "step 120")


def test_steps_go_on_while_a_checkpoint_is_written_and_the_next_save_waits_for_it(
    run: Callable[..., list[str]], tmp_path: Path
) -> None:
    class Slow(Scribe):
        def write(self, path: Path, text: str) -> None:
            assert enough.wait(10)
            super().write(path, text)

        def step(self, share: Plan[Rows], revalue: Callable[..., Any]) -> StepStats:
            if self.version == 3:
                assert not list(tmp_path.glob("step_*")), "the first save is over before it may be"
                enough.set()
            return super().step(share, revalue)

    enough = threading.Event()
    seen = run(Slow(), total_steps=4, checkpoint=CheckpointConfig(every_steps=2))
    assert seen.index("book 2") < seen.index("step 3") < seen.index("step 4") < seen.index("durable 2")
    assert seen[-1] == "durable 4"
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["step_000002", "step_000004"]
    assert (tmp_path / "step_000002" / "state").read_text() == "2"


def test_what_stops_the_writing_ends_the_run_with_that_error(run: Callable[..., list[str]]) -> None:
    class Full(Scribe):
        def write(self, path: Path, text: str) -> None:
            raise OSError(28, "No space left on device", str(path))

    with pytest.raises(OSError, match="No space left"):
        run(Full(), total_steps=20, checkpoint=CheckpointConfig(every_steps=2))
