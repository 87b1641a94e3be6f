"""What a person sees of a run."""

import io

from rich.console import Console

from broker.messages import Counts, Member, MemberState, Rules, RunState
from telemetry.live import LiveView, PlainView, Progress, screen, sparkline

LINE = {
    "step": 12,
    "reward_mean": 0.25,
    "loss": -0.125,
    "staleness_max": 1,
    "staleness_mean": 0.4,
    "masked_share": 0.02,
    "train_tokens_per_s": 4321.0,
    "step_s": 1.5,
    "idle_share": 0.3,
}


def counts(**changes: int) -> Counts:
    books = {"fed": 40, "queued": 12, "leased": 7, "buffered": 5, "training": 4, "trained": 8, "durable": 4, **changes}
    return Counts(**books, filtered={}, dead={}, events={})  # type: ignore[arg-type]


def member(name: str, state: MemberState, version: int) -> Member:
    return Member(
        member_id=name,
        role="generator",
        state=state,
        policy_version=version,
        incarnation=0,
        host="h",
        pid=1,
        stats={"tokens_per_s": 600.0},
    )


def state_of(*members: Member) -> RunState:
    rules = Rules(
        max_staleness=1,
        on_stale="mask",
        groups_per_step=8,
        max_attempts=3,
        lease_timeout_s=30.0,
        member_timeout_s=10.0,
    )
    return RunState(
        revision=3,
        incarnation=0,
        version=12,
        finished="",
        rules=rules,
        counts=counts(),
        members=members,
        publication=None,
        buffered_bytes=0,
    )


def progress() -> Progress:
    shown = Progress(title="p/e", total_steps=50, max_staleness=1, note="")
    shown.add([{"step": step, "reward_mean": step / 50} for step in range(1, 12)])
    shown.add([LINE])
    shown.state = state_of(
        member("gen0", MemberState.SERVING, 12),
        member("gen1", MemberState.SYNCING, 11),
        member("gen2", MemberState.GONE, 3),
    )
    return shown


def drawn(shown: Progress) -> str:
    console = Console(file=io.StringIO(), width=110, force_terminal=False)
    console.print(screen(shown))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_the_screen_shows_what_one_asks_first() -> None:
    text = drawn(progress())
    for part in (
        "step 12/50",
        "0.250",
        "generation 1,200",
        "training 4,321",
        "max 1 of 1",
        "mean 0.40",
        "masked 2.0%",
        "outstanding 16 of 16",
        "leased 7",
        "waits 30%",
        "version 12",
        "version 11",
    ):
        assert part in text
    assert "gen2" not in text  # it has left


def test_the_screen_can_be_drawn_before_anything_is_known() -> None:
    assert "starting" in drawn(Progress(title="p/e", total_steps=50, max_staleness=1))


def test_a_terminal_is_drawn_in_place() -> None:
    console = Console(file=io.StringIO(), width=110, force_terminal=True)
    with LiveView(console) as view:
        view.show(progress())
    assert "step 12/50" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_a_terminal_there_is_one_line_a_step() -> None:
    console = Console(file=io.StringIO(), width=40)
    shown = progress()
    with PlainView(console) as view:
        view.show(shown)
        shown.add([])
        view.show(shown)
        shown.add([{**LINE, "step": 13}])
        view.show(shown)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == ["12/50", "13/50"]
    assert "staleness 1 (mean 0.40)" in lines[0]
    assert "generators 2" in lines[0]


def test_several_steps_between_two_looks_all_get_their_line() -> None:
    console = Console(file=io.StringIO())
    shown = Progress(title="p/e", total_steps=50, max_staleness=1, note="")
    with PlainView(console) as view:
        shown.add([{**LINE, "step": 1}, {**LINE, "step": 2}, {**LINE, "step": 3}])
        view.show(shown)
    assert len(console.file.getvalue().splitlines()) == 3  # type: ignore[attr-defined]


def test_c110_a_resumed_run_goes_on_at_its_step() -> None:
    shown = progress()
    shown.add([{"step": 5, "reward_mean": 0.1}])
    assert "step 5/50" in drawn(shown)
    assert list(shown.rewards) == [0.1]


def test_a_sparkline_fits_its_width_and_spans_its_range() -> None:
    assert sparkline([0.0, 0.5, 1.0], 10) == "▁▅█" or sparkline([0.0, 0.5, 1.0], 10) == "▁▄█"
    assert sparkline([0.3] * 5, 10) == "▁▁▁▁▁"
    assert len(sparkline([float(i) for i in range(1000)], 40)) == 40
    assert sparkline([], 10) == ""


def test_steps_of_an_earlier_session_are_known_and_not_told_again() -> None:
    console = Console(file=io.StringIO(), width=40)
    shown = Progress(title="p/e", total_steps=50, max_staleness=1, note="", since=1000.0)
    with PlainView(console) as view:
        shown.add([{**LINE, "step": 11, "time": 990.0}, {**LINE, "step": 12, "time": 999.0}])
        view.show(shown)
        shown.add([{**LINE, "step": 13, "time": 1001.0}])
        view.show(shown)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line.split()[1] for line in lines] == ["13/50"]
    assert len(shown.rewards) == 3
