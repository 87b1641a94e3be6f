"""The last screen of a run."""

from pathlib import Path

from broker.messages import Counts
from telemetry.sink import JsonlSink
from telemetry.summary import summarize


def write_run(run_dir: Path) -> None:
    sink = JsonlSink(run_dir / "logs" / "metrics.jsonl")
    for step in range(1, 41):
        sink.write(
            {
                "step": step,
                "reward_mean": 0.1 if step <= 20 else 0.9,
                "trained_tokens": 100,
                "staleness_max": 1 if step == 7 else 0,
                "masked_share": 0.05,
                "idle_share": 0.25,
                "sync_stall_s": 0.03 if step <= 20 else 0.01,
                "step_s": 4.0,
            }
        )
    JsonlSink(run_dir / "logs" / "eval.jsonl").write({"eval": True, "policy_version": 40, "reward_mean": 0.93})


def books(fed: int) -> Counts:
    return Counts(
        fed=fed, queued=10, leased=0, buffered=0, training=0, trained=0, durable=30, filtered={}, dead={}, events={}
    )


def test_it_says_what_came_of_the_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    text = summarize(tmp_path, total_steps=40, max_staleness=1, wall_s=65.0, counts=books(40))
    for part in (
        "40 of 40",
        "0.100 -> 0.900",
        "4,000",
        "max 1, bound 1",
        "5.00%",
        "25%",
        "65.0 s",
        "0.930",
        "20.0 ms an update, 0.50% of",
    ):
        assert part in text
    assert "40 prompts fed, balanced" in text
    assert str(tmp_path / "logs") in text


def test_books_that_do_not_add_up_are_told(tmp_path: Path) -> None:
    text = summarize(tmp_path, total_steps=40, max_staleness=1, wall_s=1.0, counts=books(41))
    assert "NOT balanced: the states add up to 40" in text
    assert "0 of 40" in text


def test_a_run_that_went_on_is_summed_up_by_what_this_session_did(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "metrics.jsonl")
    for step in range(1, 41):
        line = {"step": step, "time": 1000.0 + step, "reward_mean": 0.9 if step > 30 else 0.1, "trained_tokens": 100}
        sink.write({**line, "staleness_max": 2 if step < 30 else 0, "masked_share": 0.05, "idle_share": 0.25})
    evals = JsonlSink(tmp_path / "logs" / "eval.jsonl")
    for version, at in ((0, 1000.0), (40, 1040.5), (40, 1041.0)):
        evals.write({"eval": True, "policy_version": version, "time": at, "reward_mean": at / 10000})
    text = summarize(tmp_path, total_steps=40, max_staleness=1, wall_s=1.0, counts=None, since=1030.5, resumed=True)
    assert "40 of 40, 10 steps in this session" in text
    for part in ("0.900 -> 0.900", "1,000", "max 0, bound 1"):
        assert part in text
    assert "version 0" not in text
    assert text.count("eval at version 40") == 1, "an evaluation that was made again is the last one"


def test_groups_thrown_away_whole_are_told_beside_the_masked_tokens(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "metrics.jsonl")
    for step, stale in ((1, 0), (2, 3), (3, 1)):
        sink.write({"step": step, "groups": 4, "stale_groups": stale, "masked_share": 0.05})
    text = summarize(tmp_path, total_steps=3, max_staleness=1, wall_s=1.0, counts=None)
    assert "4 thrown away whole, 25.00% of those delivered" in text
