from __future__ import annotations

import json
from pathlib import Path

import pytest

from tasks.gsm8k import format_reward, number_in, prompts, read_jsonl, reward
from tasks.loading import TaskError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("so it is #### 1,234", "1234"),
        ("#### $1234.00", "1234"),
        ("#### -7", "-7"),
        ("#### 3 and later 9", "3"),
        ("#### 3\n#### 4", "4"),
        ("first 3, then 12 apples.", "12"),
        ("0.50", "0.5"),
        ("-0", "0"),
        ("12345678901234567891", "12345678901234567891"),
        ("1,2", "2"),
        ("10-3", "3"),
        ("no number", None),
        ("", None),
        ("#### none, but 5", "5"),
    ],
)
def test_the_number_an_answer_ends_on(text: str, expected: str | None) -> None:
    assert number_in(text) == expected


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("… #### 1,200", 1.0),
        ("it is 1200.", 1.0),
        ("1200 dollars? no, 1300", 0.0),
        ("#### 12000", 0.0),
        ("", 0.0),
        ("__import__('os').system('touch owned') 9", 0.0),
    ],
)
def test_c123_an_answer_is_compared_and_never_run(
    answer: str, expected: float, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reward("question", answer, "3 * 400 = 1200\n#### 1200") == expected
    assert list(tmp_path.iterdir()) == []


def test_the_format_wants_one_marked_number() -> None:
    assert format_reward("", "steps\n#### 5", "") == 1.0
    assert format_reward("", "#### 5 #### 6", "") == 0.0
    assert format_reward("", "5", "") == 0.0


def write(directory: Path, name: str, *rows: dict[str, str]) -> None:
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    (directory / name).write_text(text, encoding="utf-8")


def test_c78_only_line_feeds_end_a_row(tmp_path: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d"
    write(tmp_path, "train.jsonl", {"question": odd, "answer": "#### 1"}, {"question": "q", "answer": "#### 2"})
    rows = read_jsonl(tmp_path / "train.jsonl")
    assert [row["question"] for row in rows] == [odd, "q"]


def test_the_two_files_are_training_and_evaluation(tmp_path: Path) -> None:
    write(tmp_path, "train.jsonl", {"question": "train?", "answer": "#### 1"})
    write(tmp_path, "test.jsonl", {"question": "test?", "answer": "#### 2"})
    options = {"path": str(tmp_path), "instruction": "!"}
    assert [item.text for item in prompts("train", 0, options)] == ["train?!"]
    assert [(item.text, item.reference) for item in prompts("eval", 0, options)] == [("test?!", "#### 2")]


def test_a_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path, "train.jsonl", {"question": "q", "answer": "#### 1"})
    assert len(prompts("train", 0, {"path": "~"})) == 1


def test_missing_data_and_a_broken_row_name_the_setting(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"task\.options\.path: not set"):
        prompts("train", 0, {})
    with pytest.raises(TaskError, match=r"task\.options\.path: there is no train\.jsonl"):
        prompts("train", 0, {"path": str(tmp_path)})
    (tmp_path / "train.jsonl").write_text('{"question": "q", "answer": "a"}\n{"question": 1\n')
    with pytest.raises(TaskError, match=r"task\.options\.path: .*line 2"):
        prompts("train", 0, {"path": str(tmp_path)})
