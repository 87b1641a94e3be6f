from __future__ import annotations

import pytest

from tasks.counting import prompts, reward
from tasks.loading import TaskError


def test_every_run_of_digits_asks_for_the_next_ones() -> None:
    items = {item.text: item.reference for split in ("train", "eval") for item in prompts(split, 0, {})}
    assert len(items) == 30
    assert items["567"] == "8901"
    assert items["9"] == "0123"


def test_training_and_evaluation_share_no_prompt() -> None:
    train, held_out = ({item.text for item in prompts(split, 0, {})} for split in ("train", "eval"))
    assert train and held_out and not train & held_out


@pytest.mark.parametrize(("answer", "expected"), [("8901", 1.0), ("89", 0.5), ("", 0.0), ("9901", 0.75), ("xxxx", 0.0)])
def test_the_reward_is_the_share_of_right_places(answer: str, expected: float) -> None:
    assert reward("567", answer, "8901") == expected


def test_an_option_out_of_range_is_named() -> None:
    with pytest.raises(TaskError, match=r"task\.options"):
        prompts("train", 0, {"digits": 0})
