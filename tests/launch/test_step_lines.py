"""The steps of a learner that nobody watches, and silence beside a launcher."""

from pathlib import Path

import pytest

from broker.local import LocalBroker
from broker.messages import Member, MemberState
from configs.load import load
from launch import learner_role
from launch.step_lines import SHOWN, StepLines
from telemetry.live import Progress, step_line

LINE = {"step": 3, "reward_mean": 0.25, "loss": 0.5, "step_s": 1.5, "idle_share": 0.3, "train_tokens_per_s": 40.0}


def member(name: str) -> Member:
    return Member(
        member_id=name, role="generator", state=MemberState.SERVING, policy_version=2, incarnation=0, host="h", pid=1,
        stats={"tokens_per_s": 100.0},
    )  # fmt: skip


def test_every_nth_step_is_one_line_in_the_words_of_the_plain_view() -> None:
    config = load("quickstart", ["telemetry.log_every_steps=3", "learner.total_steps=9"])
    broker, told = LocalBroker(), list[str]()
    broker.report(member("a"))
    broker.report(member("b"))
    lines = StepLines(config, tell=told.append)
    for step in range(1, 8):
        lines({**LINE, "step": step}, broker.state())
    progress = Progress(title="", total_steps=9, max_staleness=1, state=broker.state())
    assert told == [step_line({**LINE, "step": step}, progress) for step in (3, 6)]
    assert told[0].startswith("step 3/9  reward 0.250")
    assert "gen 200 train 40" in told[0]


def test_by_hand_the_learner_logs_them_and_beside_a_launcher_it_does_not(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, state = load("quickstart"), LocalBroker().state()
    caplog.set_level("INFO")
    monkeypatch.delenv(SHOWN, raising=False)
    learner_role._steps(config)(LINE, state)
    assert [record.getMessage()[:10] for record in caplog.records] == ["step 3/200"]
    monkeypatch.setenv(SHOWN, "1")
    learner_role._steps(config)(LINE, state)
    assert len(caplog.records) == 1
