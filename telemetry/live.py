"""What a person sees while a run goes on: a live screen on a terminal, else one line a step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from broker.messages import Member, MemberState, RunState
from telemetry.plain import plain

_BARS = "▁▂▃▄▅▆▇█"


@dataclass(kw_only=True)
class Progress:
    """What is known of a run: its newest metrics line, its rewards so far, and the broker's state.

    ``since``: steps from before this time (seconds since 1970) are of an earlier session, and no news.
    """

    title: str
    total_steps: int
    max_staleness: int
    since: float = 0.0
    started: float = field(default_factory=time.monotonic)
    state: RunState | None = None
    last: Mapping[str, object] = field(default_factory=dict)
    fresh: Sequence[Mapping[str, object]] = ()
    rewards: deque[float] = field(default_factory=lambda: deque(maxlen=400))
    note: str = "starting"

    def add(self, records: Sequence[Mapping[str, object]]) -> None:
        """Takes new metrics lines in; going back to an earlier step forgets what followed it."""
        self.fresh = [record for record in records if number(record, "time") >= self.since]
        for record in records:
            if number(record, "step") < number(self.last, "step"):  # a skipped step keeps its number
                self.rewards.clear()
            self.last = record
            self.rewards.append(number(record, "reward_mean"))

    @property
    def generators(self) -> tuple[Member, ...]:
        """Generators that are members now."""
        members = self.state.members if self.state else ()
        return tuple(m for m in members if m.role == "generator" and m.state is not MemberState.GONE)


class View(Protocol):
    """Shows a run's progress."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show(self, progress: Progress) -> None:
        """Shows the newest state; cheap enough to be called as often as there is news."""


class LiveView:
    """A screen that is drawn anew in place."""

    def __init__(self, console: Console) -> None:
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> LiveView:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show(self, progress: Progress) -> None:
        """Draws the screen."""
        self._live.update(screen(progress), refresh=True)


class PlainView:
    """One line a step, for logs and pipes."""

    def __init__(self, console: Console, *, every_steps: int = 1) -> None:
        self._console = console
        self._every_steps = every_steps
        self._note = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def show(self, progress: Progress) -> None:
        """Prints the steps that are new, and before the first one what the run is doing."""
        if progress.note and progress.note != self._note and not progress.last:
            self._note = progress.note
            self._print(plain(progress.note))
        for record in progress.fresh:
            if number(record, "step") % self._every_steps == 0:
                self._print(step_line(record, progress))

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)


def step_line(last: Mapping[str, object], progress: Progress) -> str:
    """One step on one line."""
    generation = sum(member.stats.get("tokens_per_s", 0.0) for member in progress.generators)
    return (
        f"step {number(last, 'step'):.0f}/{progress.total_steps}"
        f"  reward {number(last, 'reward_mean'):.3f}"
        f"  loss {number(last, 'loss'):.4f}"
        f"  staleness {number(last, 'staleness_max'):.0f} (mean {number(last, 'staleness_mean'):.2f})"
        f"  masked {number(last, 'masked_share'):.1%}"
        f"  tok/s gen {generation:.0f} train {number(last, 'train_tokens_per_s'):.0f}"
        f"  step {number(last, 'step_s'):.2f}s idle {number(last, 'idle_share'):.0%}"
        f"  generators {len(progress.generators)}"
    )


def screen(progress: Progress) -> RenderableType:
    """The live screen."""
    step = number(progress.last, "step")
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1)
    head.add_column(justify="right", no_wrap=True)
    elapsed = time.strftime("%H:%M:%S", time.gmtime(time.monotonic() - progress.started))
    bar = ProgressBar(total=progress.total_steps, completed=step)
    head.add_row(bar, f"step {step:.0f}/{progress.total_steps}  {elapsed}")
    parts: list[RenderableType] = [head, _numbers(progress), _generators(progress)]
    if progress.note:
        parts.append(Text(plain(progress.note), style="dim"))
    return Panel(Group(*parts), title=progress.title, expand=True)


def _numbers(progress: Progress) -> Table:
    last, table = progress.last, Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    generation = sum(member.stats.get("tokens_per_s", 0.0) for member in progress.generators)
    rewards = list(progress.rewards)
    reward = f"{rewards[-1]:.3f}  {sparkline(rewards, 40)}" if rewards else "-"
    table.add_row("reward", reward)
    table.add_row("tokens/s", f"generation {generation:,.0f}   training {number(last, 'train_tokens_per_s'):,.0f}")
    bound = f"max {number(last, 'staleness_max'):.0f} of {progress.max_staleness}"
    mean, masked = number(last, "staleness_mean"), number(last, "masked_share")
    table.add_row("staleness", f"{bound}   mean {mean:.2f}   masked {masked:.1%}")
    table.add_row("learner", f"step {number(last, 'step_s'):.2f} s   waits {number(last, 'idle_share'):.0%}")
    if progress.state:
        counts, rules = progress.state.counts, progress.state.rules
        window = f" of {rules.window}" if rules else ""
        outstanding = counts.leased + counts.buffered + counts.training
        table.add_row(
            "groups",
            f"outstanding {outstanding}{window}: leased {counts.leased}, buffered {counts.buffered},"
            f" training {counts.training}   trained {counts.trained + counts.durable}"
            f"   filtered {sum(counts.filtered.values())}   dead {sum(counts.dead.values())}"
            f"   stale {counts.thrown_away()}",
        )
    return table


def _generators(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 2))
    for member in progress.generators:
        lag = "" if member.policy_version < 0 else f"version {member.policy_version}"
        rate = member.stats.get("tokens_per_s", 0.0)
        name, error = Text(plain(member.member_id), style="bold"), Text(plain(member.error[:60]))
        table.add_row(name, member.state.value, lag, f"{rate:,.0f} tok/s", error)
    return table


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as bars, the mean of neighbours where there are more values than ``width``."""
    if not values:
        return ""
    step = max(1, -(-len(values) // width))
    means = [sum(values[i : i + step]) / len(values[i : i + step]) for i in range(0, len(values), step)]
    low, high = min(means), max(means)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((mean - low) * scale)] for mean in means)


def number(record: Mapping[str, object], key: str) -> float:
    """A number of a metrics line; 0 where there is none."""
    value = record.get(key)
    return float(value) if isinstance(value, (int, float)) else 0.0
