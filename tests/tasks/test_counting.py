from __future__ import annotations

import pytest

from tasks.counting import prompts, reward
from tasks.loading import TaskError


def test_every_run_of_digits_asks_for_the_next_ones() -> None:
    items = {item.text: item.reference for item in prompts("train", 0, {})}
    assert len(items) == 10
    assert items["67"] == "8901"
    assert items["90"] == "1234"


@pytest.mark.parametrize(("answer", "expected"), [("8901", 1.0), ("89", 0.5), ("", 0.0), ("9901", 0.75), ("xxxx", 0.0)])
def test_the_reward_is_the_share_of_right_places(answer: str, expected: float) -> None:
    assert reward("67", answer, "8901") == expected


def test_an_option_out_of_range_is_named() -> None:
    with pytest.raises(TaskError, match=r"task\.options"):
        prompts("train", 0, {"digits": 0})
