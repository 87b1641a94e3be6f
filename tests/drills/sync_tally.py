"""What a kill drill of the weight sync has seen, and how it tells."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.drills.sync_learner import Learner
from tests.drills.sync_tap import Shot, Tap

SHOWN = 10
QUIET, FAULT, STARTING, OTHER = "quiet", "fault", "starting", "other"  # phases; see the driver


@dataclass(kw_only=True)
class Tally:
    """Counts and times of the rounds.

    Attributes:
        survivors_s: from a kill until both others used a version made after it.
        served_s: from the start of a replacement until a group that it sampled under a new version was trained.
        resumed_s: the same from SIGCONT.
        newcomers: kills of one that was to come in another's place; it is replaced in its turn.
        settled: rounds after which all three held the learner's newest version.
    """

    kills: list[Shot] = field(default_factory=list)
    stops: list[Shot] = field(default_factory=list)
    survivors_s: list[float] = field(default_factory=list)
    stops_survivors_s: list[float] = field(default_factory=list)
    served_s: list[float] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    same_name: int = 0
    newcomers: int = 0
    settled: int = 0
    notes: list[str] = field(default_factory=list)

    def lines(self, learner: Learner, tap: Tap, checked: int) -> list[str]:
        """The summary."""
        stats = learner.publisher.stats
        return [
            f"{len(self.kills)} kills, {self.newcomers} of newcomers in their first transfer; {_hits(self.kills)}",
            f"both survivors took a version made after the kill: {len(self.survivors_s)} of {len(self.kills)}; "
            f"seconds: {spread(self.survivors_s)}",
            f"replacements that served: {len(self.served_s)} of {len(self.kills) - self.newcomers} "
            f"({self.same_name} under the killed one's name); seconds from their start: {spread(self.served_s)}",
            f"{len(self.stops)} times SIGSTOP, {_hits(self.stops)}; recovered in the same process: "
            f"{len(self.resumed_s)}; seconds from SIGCONT: {spread(self.resumed_s)}",
            f"both others took a version made after the SIGSTOP: {len(self.stops_survivors_s)} of {len(self.stops)}; "
            f"seconds: {spread(self.stops_survivors_s)}",
            f"all three held the newest version after {self.settled} rounds",
            *self.notes,
            f"versions in use compared with the learner's, digest by digest: {checked}",
            f"{learner.version} versions made; transfers begun: {tap.sent[False]} whole, {tap.sent[True]} updates; "
            f"attempts: {stats.attempts}, failed: {stats.failed_attempts}",
            *self._steps(learner),
        ]

    def _steps(self, learner: Learner) -> list[str]:
        times = {
            phase: [took for when, took in learner.times if when == phase] for phase in (QUIET, FAULT, STARTING, OTHER)
        }
        quiet = statistics.median(times[QUIET]) if times[QUIET] else float("nan")
        titles = {
            QUIET: "without a fault",
            FAULT: "during a fault",
            STARTING: "while a process starts",
            OTHER: "at other times",
        }
        return [
            f"step time {titles[phase]}: median {1e3 * statistics.median(took):.1f} ms over {len(took)} steps, "
            f"ratio {statistics.median(took) / quiet:.3f}"
            for phase, took in times.items()
            if took
        ]


def spread(seconds: Sequence[float]) -> str:
    """Median and largest."""
    return f"median {statistics.median(seconds):.2f}, max {max(seconds):.2f}" if seconds else "none"


def _hits(shots: Sequence[Shot]) -> str:
    hit = [shot for shot in shots if shot.hit]
    return f"{len(hit)} of them hit a transfer to the victim ({sum(shot.update for shot in hit)} an update)"
