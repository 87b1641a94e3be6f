"""The learner's store over a run in which generators come and go all the time."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from broker.local import LocalBroker
from broker.messages import MemberState
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import Control, here_key, settled_key, verdict_key
from weights_sync.groups import host_store
from weights_sync.publisher import Publisher
from weights_sync.staging import declare

CHANGES = 50


def test_fifty_changes_of_membership_leave_no_more_keys_than_ten(run: LocalBroker, follow: Callable) -> None:
    config = WeightsSyncConfig(sync_timeout_s=10.0)
    model = nn.Linear(4, 4)
    follow("g1", config)
    coming, _ = follow("g2", config)
    publisher = Publisher(config=config, connect=run.client, declaration=declare(model), incarnation=0)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    counts = []
    for _ in range(CHANGES):
        attempts = publisher.stats.attempts
        coming._pid += 1  # another process in its place, which shares nothing with the one before
        coming._report(MemberState.SYNCING, -1, -1)
        with publisher._changed:
            booked = publisher._changed.wait_for(lambda: publisher.stats.attempts > attempts, timeout=20)  # noqa: B023
        assert booked and publisher.stats.failed_attempts == 0
        counts.append(publisher._store.num_keys())
    assert publisher._numbers[1] >= CHANGES, "each was an epoch of its own"
    publisher.close()
    early, late = max(counts[:20]), max(counts[-20:])
    assert late <= early <= 20, (early, late)


def test_keys_of_who_comes_late_to_an_attempt_are_swept_as_well() -> None:
    store, _ = host_store("127.0.0.1", 0, 10.0)
    control = Control(store, parts=2)
    for attempt in (3, 4, 10):
        for key in (here_key(attempt, 1), verdict_key(attempt, 1), settled_key(attempt, 1), f"ready/{attempt}/1"):
            store.set(key, "1")
    for key in ("epoch1.0/0/1", "epoch10.1/0/1", "beat/1", "order/newest", "order/9"):
        store.set(key, "1")
    control.sweep(attempt=10, epoch=10)
    left = {"here/10.0/1", "verdict/10/1", "settled/10/1", "ready/10/1"}
    assert set(store.list_keys()) == left | {"epoch10.1/0/1", "beat/1", "order/newest", "order/9"}
