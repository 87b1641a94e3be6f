"""The JSON-lines file of a run, and whoever follows it."""

import json
from pathlib import Path

from telemetry.sink import JsonlSink, read_jsonl
from telemetry.tail import Tail


def steps(path: Path) -> list[object]:
    return [record["step"] for record in read_jsonl(path)]


def test_a_record_is_in_the_file_when_write_returns(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "logs" / "metrics.jsonl")
    sink.write({"step": 1, "reward_parts": {"exact": 0.5}})
    assert read_jsonl(tmp_path / "logs" / "metrics.jsonl") == [{"step": 1, "reward_parts": {"exact": 0.5}}]


def test_what_is_not_finite_becomes_null_so_that_any_reader_can_parse_it(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    sink.write({"step": 1, "loss": float("nan"), "parts": {"a": [float("inf"), 1.0]}})
    assert json.loads((tmp_path / "m.jsonl").read_text(), parse_constant=lambda name: 1 / 0) == {
        "step": 1,
        "loss": None,
        "parts": {"a": [None, 1.0]},
    }


def test_c106_a_resumed_learner_leaves_every_step_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    first = JsonlSink(path)
    for step in range(1, 9):
        first.write({"step": step})
    first.close()
    resumed = JsonlSink(path)
    resumed.truncate_after(5)
    for step in range(6, 11):
        resumed.write({"step": step})
    assert steps(path) == list(range(1, 11))


def test_a_line_cut_off_by_a_crash_does_not_hurt(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n{"step": 2, "rew')
    assert steps(path) == [1]
    sink = JsonlSink(path)
    sink.truncate_after(1)
    sink.write({"step": 2})
    assert steps(path) == [1, 2]


def test_c78_a_text_with_unicode_line_ends_stays_one_record(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "m.jsonl")
    text = "a\u2028b\u2029c\u0085d"
    sink.write({"step": 1, "text": text})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"step": 1, "text": text}]


def test_a_tail_gives_each_complete_record_once(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    with path.open("a") as file:
        file.write('{"step": 1}\n{"st')
        file.flush()
        assert tail.read() == [{"step": 1}]
        file.write('ep": 2}\n')
    assert tail.read() == [{"step": 2}]
    assert tail.read() == []


def test_a_tail_starts_over_when_a_learner_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    sink, tail = JsonlSink(path), Tail(path)
    for step in (1, 2, 3):
        sink.write({"step": step})
    assert len(tail.read()) == 3
    sink.truncate_after(1)
    sink.write({"step": 2})
    assert tail.read() == [{"step": 1}, {"step": 2}]
