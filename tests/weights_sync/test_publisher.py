import os
import re
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from broker.local import LocalBroker
from broker.messages import Publication
from tests.weights_sync.conftest import Follower, ThreadReceiver
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import LayoutRefused, NoReceiver, SyncFailed
from weights_sync.groups import Group
from weights_sync.manifest import Manifest
from weights_sync.publisher import Publisher
from weights_sync.staging import declare

DIE_AT = {"collective": 4, "disk": 2}  # at the second bucket
over_groups = pytest.mark.parametrize("sync", ["collective"], indirect=True)  # what no transport has a part in


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))


@pytest.fixture
def publish(run: LocalBroker) -> Iterator[Callable[..., Publisher]]:
    started: list[Publisher] = []

    def start(model: nn.Module, config: WeightsSyncConfig) -> Publisher:
        started.append(Publisher(config=config, connect=run.client, declaration=declare(model), incarnation=0))
        return started[-1]

    yield start
    for publisher in started:
        publisher.close()


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    """Changes the model as a learner's step would and returns what it is now."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_equal(got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


def test_every_version_reaches_every_generator_over_one_group(model, publish, follow, sync) -> None:
    (one, first), (_, second) = follow("g1", sync), follow("g2", sync)
    publisher = publish(model, sync)
    for version in range(3):
        wanted = step(model)
        publisher.offer(version, model.named_parameters())
        publisher.flush(20)
        assert_equal(first.versions[version], wanted)
        assert_equal(second.versions[version], wanted)
    joint = [publication for publication in one.attempts if len(publication.receivers) == 2]
    assert len({publication.epoch for publication in joint}) == 1
    assert publisher.stats.version == 2 and publisher.stats.failed_attempts == 0


@over_groups
def test_a_generator_that_drains_has_its_time_and_a_slower_one_fails_by_the_settings_name(
    model, publish, run, sync
) -> None:
    config = sync.model_copy(update={"on_update": "drain", "sync_timeout_s": 1.0, "drain_timeout_s": 1.5})
    pauses = iter([1.5, 4.0])
    receiver = ThreadReceiver(config, "g1", lambda manifest: None)

    def take(publication: Publication) -> str:
        error = receiver.take(publication)
        time.sleep(next(pauses, 0.0))
        return error

    follower = Follower(run, "g1", take, pid=os.getpid())
    publisher = publish(model, config)
    publisher.offer(0, step(model).items())
    publisher.flush(20)
    assert publisher.stats.failed_attempts == 0
    publisher.offer(1, step(model).items())
    with pytest.raises(SyncFailed, match=r"does not report .*weights_sync.sync_timeout_s \+ drain_timeout_s"):
        publisher.flush(3.5)
    follower.leave()


def nudge(model: nn.Module, count: int = 5) -> dict[str, torch.Tensor]:
    """Changes a few elements, as a small step does in bfloat16, and returns what the model is now."""
    with torch.no_grad():
        for parameter in list(model.parameters())[::2]:
            parameter.view(-1)[:count] += 1
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_what_has_changed_is_all_that_is_sent_to_those_who_hold_the_version_before(
    model, publish, follow, sync
) -> None:
    (_, first), (_, second) = follow("g1", sync), follow("g2", sync)
    publisher = publish(model, sync)
    sent = []
    for version in range(4):
        wanted = nudge(model)
        publisher.offer(version, model.named_parameters())
        publisher.flush(20)
        assert_equal(first.versions[version], wanted)
        assert_equal(second.versions[version], wanted)
        sent.append(publisher.stats.wire_bytes)
    assert sent[0] == publisher.stats.payload_bytes
    assert sent[1:] == [6 * 5 * (4 + 1)] * 3, "six weights of twelve parameters, five floats and their gaps each"
    assert publisher.stats.failed_attempts == 0


def test_a_newcomer_gets_the_version_whole_and_then_updates_like_the_others(model, publish, follow, sync) -> None:
    _, first = follow("g1", sync)
    publisher = publish(model, sync)
    for version in range(2):
        nudge(model)
        publisher.offer(version, model.named_parameters())
        publisher.flush(20)
    _, second = follow("g2", sync)
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: 1 in second.versions, timeout=20)
    assert publisher.stats.failed_attempts == 0
    publisher.flush(20)
    for version in (2, 3):
        wanted = nudge(model)
        publisher.offer(version, model.named_parameters())
        publisher.flush(20)
        assert_equal(first.versions[version], wanted)
        assert_equal(second.versions[version], wanted)
    assert publisher.stats.wire_bytes < publisher.stats.payload_bytes / 10
    assert publisher.stats.failed_attempts == 0


def test_one_who_lost_its_base_gets_the_version_whole_at_the_second_attempt(model, publish, follow, sync) -> None:
    _, receiver = follow("g1", sync)
    publisher = publish(model, sync)
    nudge(model)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    receiver._receiver._held._versions.clear()
    wanted = nudge(model)
    publisher.offer(1, model.named_parameters())
    publisher.flush(20)
    assert_equal(receiver.versions[1], wanted)
    assert (publisher.stats.failed_attempts, publisher.stats.wire_bytes) == (1, publisher.stats.payload_bytes)
    nudge(model)
    publisher.offer(2, model.named_parameters())
    publisher.flush(20)
    assert (publisher.stats.failed_attempts, publisher.stats.wire_bytes) == (1, 150)


def test_a_version_with_a_nan_ends_the_publisher_and_the_one_before_stays(model, publish, follow, sync) -> None:
    _, receiver = follow("g1", sync)
    publisher = publish(model, sync)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    with torch.no_grad():
        next(model.parameters())[3, 3] = float("nan")
    publisher.offer(1, model.named_parameters())
    with pytest.raises(LayoutRefused, match=r"version 1 is not sent: 0\.weight not finite"):
        publisher.flush(20)
    assert list(receiver.versions) == [0]


def test_c60_a_late_joiner_gets_the_current_version_whole_and_alone(model, publish, follow, sync) -> None:
    early, _ = follow("g1", sync)
    publisher = publish(model, sync)
    wanted = step(model)
    publisher.offer(4, model.named_parameters())
    publisher.flush(20)
    late, receiver = follow("g2", sync)
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: 4 in receiver.versions, timeout=20)
    assert_equal(receiver.versions[4], wanted)
    assert [publication.receivers for publication in late.attempts] == [("g2",)]
    publisher.offer(5, model.named_parameters())
    publisher.flush(20)
    assert set(early.attempts[-1].receivers) == {"g1", "g2"}


def test_a_generator_that_is_replaced_under_its_old_name_gets_the_version_at_once(model, publish, run, sync) -> None:
    publisher = publish(model, sync)
    wanted = step(model)
    publisher.offer(0, model.named_parameters())
    for pid in (1001, 1002):  # the second process first reads the announcement to the first
        receiver = ThreadReceiver(sync, "g1", lambda manifest: None, run.client)
        follower = Follower(run, "g1", receiver.take, pid=pid)
        with publisher._changed:
            in_use = lambda: any(m.pid == pid and m.policy_version == 0 for m in publisher._members)  # noqa: B023, E731
            assert publisher._changed.wait_for(in_use, timeout=sync.sync_timeout_s / 2)
        assert_equal(receiver.versions[0], wanted)
        follower.stop()
    follower.leave()


def test_c116_three_hundred_tensors_take_one_announcement_and_three_broadcasts(
    publish, follow, run, monkeypatch
) -> None:
    model = nn.ParameterDict({f"p{i}": nn.Parameter(torch.randn(5)) for i in range(300)})
    sent: list[int] = []
    broadcast = Group.broadcast

    def counted(group: Group, tensor: torch.Tensor) -> None:
        if group.rank == 0:
            sent.append(tensor.nbytes)
        broadcast(group, tensor)

    monkeypatch.setattr(Group, "broadcast", counted)
    config = WeightsSyncConfig(sync_timeout_s=10.0)
    follower, receiver = follow("g1", config)
    publisher = publish(model, config)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    assert len(receiver.versions[0]) == 300
    assert len(follower.attempts) == 1
    assert len(sent) == 3  # header, manifest, payload


def test_c9_a_version_that_one_receiver_refused_is_not_published_until_a_whole_resend(
    model, publish, follow, sync
) -> None:
    refusals = iter(["version 1 does not fit"])

    def refuse_once(manifest: Manifest) -> None:
        if manifest.version == 1 and (reason := next(refusals, "")):
            raise LayoutRefused(reason)

    follow("g1", sync)
    follower, receiver = follow("g2", sync, refuse_once)
    publisher = publish(model, sync)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    wanted = step(model)
    publisher.offer(1, model.named_parameters())
    publisher.flush(20)
    assert publisher.stats.failed_attempts == 1 and publisher.stats.version == 1
    assert_equal(receiver.versions[1], wanted)
    assert [publication.version for publication in follower.attempts] == [0, 1, 1]


@over_groups
def test_c4_a_shard_is_refused_at_the_offer_and_nothing_is_sent(model, publish, follow, sync) -> None:
    _, receiver = follow("g1", sync)
    publisher = publish(model, sync)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    parts = [(name, torch.empty(0) if name == "5.bias" else p) for name, p in model.named_parameters()]
    with pytest.raises(LayoutRefused, match=r"5\.bias: got shape \(0,\)"):
        publisher.offer(1, parts)
    publisher.flush(20)
    assert publisher.stats.version == 0 and set(receiver.versions) == {0}


def test_c1_no_generator_for_too_long_ends_the_publisher_with_the_last_error(model, publish, follow, sync) -> None:
    def refuse(manifest: Manifest) -> None:
        raise LayoutRefused("names do not fit")

    config = sync.model_copy(update={"no_generator_timeout_s": 1.0})
    follow("g1", config, refuse)
    publisher = publish(model, config)
    publisher.offer(3, model.named_parameters())
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._failure is not None, timeout=20)
    with pytest.raises(NoReceiver, match=r"version 3 .*no_generator_timeout_s = 1 s.*g1: rank 1.*names do not fit"):
        publisher.offer(4, model.named_parameters())


def uses(publisher: Publisher, member_id: str, version: int) -> bool:
    """Waits until the member reports the version."""
    with publisher._changed:
        return publisher._changed.wait_for(
            lambda: any(m.member_id == member_id and m.policy_version == version for m in publisher._members),
            timeout=20,
        )


@over_groups
def test_c1_without_a_generator_the_learner_says_that_it_waits_and_goes_on_when_one_comes(
    model, publish, follow, caplog, sync
) -> None:
    caplog.set_level("INFO", logger="weights_sync")
    first, _ = follow("g1", sync)
    publisher = publish(model, sync)
    publisher.offer(0, model.named_parameters())
    publisher.flush(20)
    first.leave()
    publisher.offer(1, model.named_parameters())
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: "no_generator_timeout_s = 300" in caplog.text, timeout=20)
    _, receiver = follow("g2", sync)
    assert uses(publisher, "g2", 1) and 1 in receiver.versions
    said = [one.getMessage() for one in caplog.records if "waits" in one.getMessage() and one.levelname == "WARNING"]
    (line,) = said  # of the version that it had when it saw that g1 was gone, or that it had begun to send to it
    assert re.fullmatch(
        r"version [01] waits for a generator, up to weights_sync\.no_generator_timeout_s = 300; "
        r"(none is alive|g1: rank 1, version 1: .*gone)",
        line,
    )


def test_a_generator_that_stands_still_holds_up_the_others_only_once(model, publish, follow, run, sync) -> None:
    config = sync.model_copy(update={"sync_timeout_s": 1.0})
    follow("g1", config)
    Follower(run, "g2", lambda publication: "", pid=1).stop()  # a member until broker.member_timeout_s, and silent
    publisher = publish(model, config)
    for version in range(5):
        step(model)
        publisher.offer(version, model.named_parameters())
        assert uses(publisher, "g1", version)
    assert publisher.stats.failed_attempts <= 1


@over_groups
def test_flush_names_who_does_not_use_the_version(model, publish, follow, sync) -> None:
    def hang(manifest: Manifest) -> None:
        raise LayoutRefused("never")

    follow("g1", sync, hang)
    publisher = publish(model, sync)
    publisher.offer(0, model.named_parameters())
    with pytest.raises(SyncFailed, match=r"version 0 is not in use after 0\.05 s at g1"):
        publisher.flush(0.05)


@over_groups
def test_offers_never_wait_for_the_network(model, publish, follow, sync) -> None:
    follow("g1", sync)
    publisher = publish(model, sync)
    longest = 0.0
    for version in range(50):
        began = time.perf_counter()
        publisher.offer(version, model.named_parameters())
        longest = max(longest, time.perf_counter() - began)
    publisher.flush(20)
    assert publisher.stats.version == 49
    assert publisher.stats.attempts < 50  # a version that still waited was replaced by the next
    assert longest < 1.0


@pytest.mark.parametrize("sync", ["collective", "disk"], indirect=True)
def test_c1_a_generator_killed_in_mid_transfer_does_not_keep_the_other_from_the_version(
    model, publish, spawn, sync
) -> None:
    config = sync.model_copy(update={"sync_timeout_s": 3.0})
    spawn("g1", config)
    doomed = spawn("g2", config, die_at=DIE_AT[sync.transport])
    publisher = publish(model, config)
    step(model)
    began = time.monotonic()
    publisher.offer(0, model.named_parameters())
    assert time.monotonic() - began < 1.0
    assert doomed.process.wait(timeout=20) == -9
    killed = time.monotonic()

    def in_use() -> bool:
        return any(m.member_id == "g1" and m.policy_version == 0 for m in publisher._members)

    with publisher._changed:
        assert publisher._changed.wait_for(in_use, timeout=20)
    assert time.monotonic() - killed < 2 * config.sync_timeout_s + 4


@pytest.mark.parametrize("sync", ["collective", "disk"], indirect=True)
def test_c1_when_every_generator_is_killed_the_error_names_rank_and_version(model, publish, spawn, sync) -> None:
    config = sync.model_copy(update={"sync_timeout_s": 1.0, "no_generator_timeout_s": 4.0})
    spawn("g1", config, die_at=DIE_AT[sync.transport])
    spawn("g2", config, die_at=DIE_AT[sync.transport])
    publisher = publish(model, config)
    publisher.offer(7, model.named_parameters())
    with publisher._changed:
        assert publisher._changed.wait_for(lambda: publisher._failure is not None, timeout=30)
    with pytest.raises(NoReceiver, match=r"version 7.*g1: rank 1, version 7.*g2: rank 2, version 7"):
        publisher.flush(1)
