"""Generators that stand still, come and go while the learner trains: real processes, the fake engine."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from broker.connect import connect
from tests.drills.sync_fleet import Fleet
from tests.drills.sync_kills import prepare
from tests.drills.sync_learner import STEP_S, Learner
from tests.drills.sync_rounds import SERVED_S, TAKEN_S
from tests.drills.sync_setting import MAX_STALENESS, MEMBER_TIMEOUT_S

CYCLES, JOIN_AT, LEAVE_AT, CYCLE_STEPS = 10, 5, 8, 9
LEAVE_S = 8.0  # leave_grace_s and what closing may take


@contextmanager
def fleet_of(directory: Path, *, step_s: float = STEP_S) -> Iterator[tuple[Fleet, Learner]]:
    """Broker, learner, audit; afterwards every version that was ever in use is compared with what the learner made."""
    fleet = Fleet(prepare(3, directory), step_s=step_s)
    try:
        fleet.open()
        assert fleet.learner is not None and fleet.audit is not None
        yield fleet, fleet.learner
    finally:
        fleet.close()
    fleet.audit.everything(fleet.names)
    assert [*fleet.learner.wrong, *fleet.audit.wrong] == []


@pytest.mark.slow
def test_a_stopped_process_is_suspect_then_gone_and_when_it_wakes_stale_and_serves_again(tmp_path: Path) -> None:
    with fleet_of(tmp_path) as (fleet, learner):
        other, victim = fleet.spawn(), fleet.spawn()
        for one in (other, victim):
            fleet.wait(lambda one=one: fleet.serves(one, 0), SERVED_S, f"{one.name} does not serve")  # type: ignore[misc]
        assert fleet.audit is not None
        states = fleet.audit.states[victim.pid]
        held = learner.version
        victim.signal(signal.SIGSTOP)
        fleet.wait(lambda: states[-2:] == ["suspect", "gone"], MEMBER_TIMEOUT_S + 5.0, f"it is shown as {states}")
        too_old = held + MAX_STALENESS + 2
        fleet.wait(lambda: fleet.uses(other, too_old), SERVED_S, "the run does not go on without it")
        missed = learner.version
        victim.signal(signal.SIGCONT)
        fleet.wait(lambda: fleet.serves(victim, missed), SERVED_S, "it woke and does not serve")
        assert victim.running()
        after = states[states.index("gone") + 1 :]
        assert after[0] == "stale" and "serving" in after


@pytest.mark.slow
def test_c60_ten_times_one_joins_at_step_5_and_leaves_at_step_8_and_no_request_is_lost(tmp_path: Path) -> None:
    with fleet_of(tmp_path, step_s=0.3) as (fleet, learner):
        host = fleet.spawn()
        fleet.wait(lambda: fleet.serves(host, 0), SERVED_S, "nobody serves")
        served = 0
        for _ in range(CYCLES):
            began = learner.version

            def at(step: int, began: int = began) -> None:
                fleet.wait(lambda: learner.version >= began + step, SERVED_S, f"no step {began + step}")

            at(JOIN_AT)
            guest = fleet.spawn()
            at(LEAVE_AT)
            served += bool(learner.sampled[guest.name]) or fleet.uses(guest, began + JOIN_AT)
            fleet.dismiss(guest, LEAVE_S)
            at(CYCLE_STEPS)
        newest = max(learner.trained)
        wanted = set(range(newest + 1))
        fleet.wait(lambda: wanted <= set(learner.trained), TAKEN_S, "a prompt is lost")
        client = connect(fleet.setting.config(), fleet.setting.url)
        counts = client.state().counts
        client.close()
    assert served > CYCLES / 2
    assert len(learner.trained) == len(set(learner.trained))
    assert counts.balanced()
    assert not {"failed", "expired", "members_lost"} & set(counts.events)
