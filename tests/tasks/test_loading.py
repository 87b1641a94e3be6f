from __future__ import annotations

from pathlib import Path

import pytest

from tasks.loading import TaskError, load_function

FILE = """
calls = []
def prompts(split, seed, options):
    calls.append(split)
    return []
def seen(text, answer, reference):
    return float(len(calls))
"""


def test_a_function_of_a_module_and_of_a_file_are_found(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    assert load_function("tasks.digits:reward", setting="x")("", "1", "1") == 1.0
    assert load_function(f"{file}:prompts", setting="x")("train", 0, {}) == []


def test_prompts_and_rewards_of_one_file_share_its_state(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    load_function(f"{file}:prompts", setting="x")("train", 0, {})
    assert load_function(f"{file}:seen", setting="x")("", "", "") == 1.0


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("tasks.digits", "not of the form"),
        ("tasks.digits:promts", "did you mean 'prompts'"),
        ("tasks.digit:prompts", "did you mean 'tasks.digits'"),
        ("no_such_package.at_all:prompts", "no module"),
        ("nowhere/mine.py:prompts", "no file"),
        ("tasks.digits:ANSWERS", "no function 'ANSWERS'"),
        ("tasks.digits:prompts()", "not of the form"),
    ],
)
def test_a_wrong_reference_names_the_setting_and_what_is_near(reference: str, message: str) -> None:
    with pytest.raises(TaskError, match=r"^task\.prompts: ") as caught:
        load_function(reference, setting="task.prompts")
    assert message in str(caught.value)


def test_a_file_next_to_a_wrong_name_is_suggested(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(FILE)
    with pytest.raises(TaskError, match=r"did you mean '.*rewards\.py'"):
        load_function(f"{tmp_path}/reward.py:prompts", setting="task.rewards.x")


def test_an_import_that_fails_inside_the_named_file_is_its_own_error(tmp_path: Path) -> None:
    file = tmp_path / "broken.py"
    file.write_text("import no_such_thing_at_all\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_thing_at_all"):
        load_function(f"{file}:prompts", setting="task.prompts")
