"""Which run is going on, and which number its next incarnation may have."""

from __future__ import annotations

from pathlib import Path

import pytest

from learners.lineage import Lineage, keep, take_up


def test_a_restart_goes_on_under_the_same_name_with_the_next_number(tmp_path: Path) -> None:
    first = take_up(tmp_path, "auto")
    assert first.incarnation == -1
    assert take_up(tmp_path, "auto") == Lineage(run=first.run, incarnation=0)
    keep(tmp_path, Lineage(run=first.run, incarnation=7))  # the broker knew of more
    assert take_up(tmp_path, str(tmp_path / "step_000010")) == Lineage(run=first.run, incarnation=7)


def test_a_start_that_dies_half_way_leaves_its_number_to_nobody(tmp_path: Path) -> None:
    taken = [take_up(tmp_path, "auto").incarnation for _ in range(3)]
    assert taken == [-1, 0, 1]


def test_a_run_begun_anew_has_another_name_but_no_number_of_the_old_one(tmp_path: Path) -> None:
    first = take_up(tmp_path, "auto")
    again = take_up(tmp_path, "never")
    assert again.run != first.run
    assert again.incarnation == 0


def test_a_damaged_file_is_an_error_and_not_a_new_run(tmp_path: Path) -> None:
    take_up(tmp_path, "auto")
    (tmp_path / "lineage.json").write_text("{")
    with pytest.raises(ValueError):
        take_up(tmp_path, "auto")
