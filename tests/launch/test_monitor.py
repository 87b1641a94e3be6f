"""What the launcher knows of a run from beside it."""

import io
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from broker.errors import BrokerUnreachable
from broker.local import LocalBroker
from broker.messages import Frontier, Member, MemberState, Rules
from launch.monitor import Monitor
from telemetry.live import PlainView, Progress, screen
from telemetry.sink import JsonlSink

RULES = Rules(
    max_staleness=1, on_stale="mask", groups_per_step=4, max_attempts=3, lease_timeout_s=30.0, member_timeout_s=10.0
)


class Seen(PlainView):
    """A view that lets the test wait for what has been shown."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.progress: Progress | None = None

    def show(self, progress: Progress) -> None:
        with self.changed:
            self.progress = progress
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[Progress], bool]) -> Progress:
        with self.changed:
            assert self.changed.wait_for(lambda: self.progress is not None and condition(self.progress), timeout=10.0)
            assert self.progress is not None
            return self.progress


def monitor_of(broker: LocalBroker, logs: Path, view: Seen) -> Monitor:
    progress = Progress(title="p/e", total_steps=10, max_staleness=1)
    return Monitor(broker.client, logs, progress, view, refresh_s=0.02)


def member(version: int) -> Member:
    return Member(
        member_id="gen0",
        role="generator",
        state=MemberState.SERVING,
        policy_version=version,
        incarnation=0,
        host="h",
        pid=1,
        error="out of memory",
    )


def test_it_shows_members_and_new_steps(tmp_path: Path) -> None:
    broker, view = LocalBroker(), Seen()
    with monitor_of(broker, tmp_path, view) as monitor:
        broker.open_run(rules=RULES, version=0, frontier=Frontier())
        broker.report(member(0))
        JsonlSink(tmp_path / "metrics.jsonl").write({"step": 1, "reward_mean": 0.5})
        shown = view.wait_for(lambda p: bool(p.last) and bool(p.generators))
    assert shown.last["step"] == 1
    assert [m.member_id for m in shown.generators] == ["gen0"]
    assert monitor.state is not None
    assert "gen0 serving at version 0 (out of memory)" in monitor.obstacle()


def test_a_new_version_or_a_new_line_is_progress_and_a_heartbeat_is_not(tmp_path: Path) -> None:
    broker, view = LocalBroker(), Seen()
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with monitor_of(broker, tmp_path, view) as monitor:
        broker.report(member(0))
        view.wait_for(lambda p: bool(p.generators))
        before = monitor.last_progress()
        broker.report(member(0))
        looks = iter(range(4))
        view.wait_for(lambda p: next(looks) == 3)
        assert monitor.last_progress() == before
        broker.report(member(1))
        view.wait_for(lambda p: monitor.last_progress() > before)
        before = monitor.last_progress()
        sink.write({"step": 1})
        view.wait_for(lambda p: monitor.last_progress() > before)


def test_the_last_state_is_the_one_at_the_end(tmp_path: Path) -> None:
    broker, view = LocalBroker(), Seen()
    with monitor_of(broker, tmp_path, view) as monitor:
        view.wait_for(lambda p: p.state is not None)
        broker.finish("done")
    assert monitor.state is not None
    assert monitor.state.finished == "done"


def test_a_broker_that_cannot_be_reached_stops_the_view_and_not_the_run(tmp_path: Path) -> None:
    def connect() -> LocalBroker:
        raise BrokerUnreachable("nobody answers")

    progress = Progress(title="p/e", total_steps=10, max_staleness=1)
    with Monitor(connect, tmp_path, progress, Seen(), refresh_s=0.02) as monitor:
        pass
    assert monitor.obstacle() == "the broker has not been heard of"


def test_what_a_member_says_of_itself_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    broker, view = LocalBroker(), Seen()
    with monitor_of(broker, tmp_path, view) as monitor:
        broker.open_run(rules=RULES, version=0, frontier=Frontier())
        broker.report(replace(member(0), member_id="gen\x1b[2J", error="[/b] \udc00"))
        shown = view.wait_for(lambda p: bool(p.generators))
    console = Console(width=200, file=io.StringIO())
    console.print(screen(shown))
    assert isinstance(console.file, io.StringIO)
    for text in (console.file.getvalue(), monitor.obstacle()):
        assert r"gen\x1b[2J" in text and r"[/b] \udc00" in text
        assert "\x1b" not in text and "\udc00" not in text
