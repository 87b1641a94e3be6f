from __future__ import annotations

import pytest

from tasks.digits import prompts, reward
from tasks.loading import TaskError


@pytest.mark.parametrize(
    ("kind", "row", "expected"),
    [("reverse", "407", "704"), ("copy", "407", "407"), ("successor", "409", "510"), ("sort", "407", "047")],
)
def test_each_kind_asks_for_its_answer(kind: str, row: str, expected: str) -> None:
    items = [*prompts("train", 0, {"kind": kind}), *prompts("eval", 0, {"kind": kind})]
    assert [item.reference for item in items if item.text == f"{row}>"] == [expected]


@pytest.mark.parametrize("options", [{}, {"digits": 1, "alphabet": 2}, {"digits": 6, "size": 1}, {"size": 100}])
def test_training_and_evaluation_share_no_row_and_repeat_none(options: dict[str, int]) -> None:
    train = [item.text for item in prompts("train", 0, options)]
    held_out = [item.text for item in prompts("eval", 0, options)]
    assert train
    assert held_out
    assert len({*train, *held_out}) == len(train) + len(held_out)


def test_a_seed_means_the_same_items_and_another_seed_others() -> None:
    assert prompts("train", 1, {}) == prompts("train", 1, {})
    assert prompts("train", 1, {}) != prompts("train", 2, {})


def test_the_alphabet_bounds_the_digits() -> None:
    assert {c for item in prompts("train", 0, {"alphabet": 3}) for c in item.reference} == set("012")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [("704", 1.0), ("70", 0.5), ("7049", 0.75), ("", 0.0), ("xxx", 0.25), ("70449999999", 0.75), ("<pad>704", 0.0)],
)
def test_the_reward_is_the_share_of_right_places_and_the_stop(answer: str, expected: float) -> None:
    assert reward("407>", answer, "704") == expected


def test_an_option_out_of_range_is_named() -> None:
    with pytest.raises(TaskError, match=r"task\.options\.kind: 'revers'"):
        prompts("train", 0, {"kind": "revers"})
    with pytest.raises(TaskError, match=r"task\.options"):
        prompts("train", 0, {"digits": 0})
