"""Versions as files of a shared folder: what lies there when, what readers see, and what is wrong with the folder."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from broker.local import LocalBroker
from broker.messages import Frontier
from tests.weights_sync.conftest import RULES, Follower
from weights_sync.config import WeightsSyncConfig
from weights_sync.deposit import MOST
from weights_sync.disk import Disk
from weights_sync.errors import NoReceiver, SyncFailed
from weights_sync.publisher import Publisher
from weights_sync.staging import declare


@pytest.fixture
def sync(tmp_path: Path) -> WeightsSyncConfig:
    return WeightsSyncConfig(transport="disk", dir=str(tmp_path), sync_timeout_s=10.0, bucket_bytes=1024)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))


@pytest.fixture
def publish(run: LocalBroker, model: nn.Module, sync: WeightsSyncConfig):
    started: list[Publisher] = []

    def start(config: WeightsSyncConfig = sync, incarnation: int = 0) -> Publisher:
        publisher = Publisher(config=config, connect=run.client, declaration=declare(model), incarnation=incarnation)
        started.append(publisher)
        return publisher

    yield start
    for publisher in started:
        publisher.close()


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def until(publisher: Publisher, condition: Callable[[], bool]) -> None:
    pause, tries = threading.Event(), 400
    while not condition() and tries:
        tries -= 1
        pause.wait(0.05)
    assert condition(), (publisher.stats, publisher._failure)


def change(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, :3] += 1


def test_c22_what_every_reader_has_confirmed_is_deleted_and_nothing_before(
    model, publish, follow, run, sync, tmp_path
) -> None:
    gate, seen = threading.Event(), []
    _, quick = follow("g1", sync)

    def hold(manifest: object) -> None:
        seen.append(files(tmp_path))
        gate.wait(20)
        seen.append(files(tmp_path))

    _, slow = follow("g2", sync, hold)
    publisher = publish()
    publisher.offer(0, model.named_parameters())
    until(publisher, lambda: len(seen) == 1 and 0 in quick.versions)
    gate.set()
    publisher.flush(20)
    assert slow.versions.keys() == {0}
    assert seen[0] == seen[1], "whole, as long as one still reads"
    assert {name.split("/")[-1] for name in seen[0]} == {"0.manifest", "0.0", "0.1", "0.2", "0.3"}
    until(publisher, lambda: files(tmp_path) == [])


def test_a_byte_that_rots_on_the_disk_is_told_by_its_tensor_and_the_version_is_sent_again(
    model, publish, follow, sync, tmp_path, monkeypatch
) -> None:
    put, broken = Disk.put, []

    def rotting(disk: Disk, name: str, data: object) -> None:
        put(disk, name, data)
        if name.endswith("/0.0") and "/2/" in name and not broken:
            path = tmp_path / name
            rotten = bytearray(path.read_bytes())
            rotten[0] ^= 1
            path.write_bytes(rotten)
            broken.append(name)

    monkeypatch.setattr(Disk, "put", rotting)
    errors: list[str] = []
    follower, receiver = follow("g1", sync)
    report = follower._report
    monkeypatch.setattr(follower, "_report", lambda *a, error="": (errors.append(error), report(*a, error=error)))
    publisher = publish()
    for version in (0, 1):
        change(model)
        publisher.offer(version, model.named_parameters())
        publisher.flush(20)
    assert broken and publisher.stats.failed_attempts == 1
    assert [error for error in errors if error] == [
        "attempt 2: SyncFailed: version 1: bytes of 0.weight differ from their digest"
    ]
    assert publisher.stats.wire_bytes == publisher.stats.payload_bytes, "whole, after an update that failed"
    assert torch.equal(receiver.versions[1]["0.weight"], model[0].weight)


def test_a_restarted_learner_removes_what_older_incarnations_left_and_nothing_of_other_runs(
    model, publish, follow, run, sync, tmp_path
) -> None:
    for left in ("run/0/7/0.0", "run/0/7/0.manifest", "run/0/8/.0.1.4711", "another/0/7/0.0"):
        (tmp_path / left).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / left).write_bytes(b"old")
    run.open_run(rules=RULES, version=3, frontier=Frontier())
    _, receiver = follow("g1", sync)
    publisher = publish(incarnation=1)
    assert files(tmp_path) == ["another/0/7/0.0"]
    publisher.offer(3, model.named_parameters())
    publisher.flush(20)
    assert 3 in receiver.versions


def test_two_runs_in_one_folder_do_not_meet(model, publish, follow, sync, tmp_path) -> None:
    other = LocalBroker()
    other.open_run(rules=replace(RULES, run="b"), version=0, frontier=Frontier())
    _, receiver = follow("g1", sync)
    first = publish()
    second = Publisher(config=sync, connect=other.client, declaration=declare(model), incarnation=0)
    first.offer(0, model.named_parameters())
    first.flush(20)
    assert 0 in receiver.versions and first.stats.failed_attempts == 0
    assert second._carrier.address == "disk:b/0" and first._carrier.address == "disk:run/0"
    second.close()


def test_a_folder_that_is_not_there_is_named_with_its_setting(publish, sync, tmp_path) -> None:
    with pytest.raises(SyncFailed, match=r"weights_sync\.dir = .*/none is no directory here: create it, or mount"):
        publish(sync.model_copy(update={"dir": str(tmp_path / "none")}))


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_folder_that_cannot_be_written_is_named_with_its_setting(publish, tmp_path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(SyncFailed, match=r"weights_sync\.dir = .* cannot be written: Permission denied"):
        publish()
    tmp_path.chmod(0o700)


def test_a_full_disk_fails_the_attempt_with_the_setting_and_leaves_no_part_of_a_file(sync, tmp_path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    disk = Disk(tmp_path, "run")
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))  # as good as full: write(2) fails half-way
    try:
        with pytest.raises(SyncFailed, match=r"weights_sync\.dir = .* cannot be written: File too large"):
            disk.put("run/0/1/0.0", bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files(tmp_path) == []


def test_files_that_are_gone_or_cut_short_settle_the_attempt(sync, tmp_path) -> None:
    disk = Disk(tmp_path, "run")
    disk.put("run/0/1/0.0", bytes(100))
    with pytest.raises(SyncFailed, match="has 100 bytes where 101 were announced"):
        disk.read_into("run/0/1/0.0", memoryview(bytearray(101)))
    disk.sweep([])
    with pytest.raises(SyncFailed, match=r"weights_sync\.dir = .* cannot be read: No such file"):
        disk.read("run/0/1/0.0")
    assert list(tmp_path.iterdir()) == []


def test_a_reader_that_never_says_anything_bounds_what_lies_there(model, publish, run, sync, tmp_path) -> None:
    config = sync.model_copy(update={"sync_timeout_s": 0.05, "no_generator_timeout_s": 2.0})
    Follower(run, "g1", lambda publication: "", pid=1).stop()  # a member, and silent
    publisher = publish(config)
    folders: set[int] = set()
    for version in range(20):
        if publisher._failure is not None:
            break
        publisher.offer(version, model.named_parameters())
        folders.add(len(list((tmp_path / "run" / "0").glob("*"))) if (tmp_path / "run" / "0").is_dir() else 0)
        threading.Event().wait(0.05)
    assert max(folders) <= MOST
    until(publisher, lambda: publisher._failure is not None)
    with pytest.raises(NoReceiver, match=r"g1: rank 1, version .* does not report"):
        publisher.check()
    assert files(tmp_path) == []


def test_a_generator_of_another_transport_is_told_the_setting(model, publish, follow, sync) -> None:
    follow("g1", WeightsSyncConfig(transport="collective", sync_timeout_s=5.0))
    publisher = publish(sync.model_copy(update={"no_generator_timeout_s": 2.0}))
    publisher.offer(0, model.named_parameters())
    until(publisher, lambda: publisher._failure is not None)
    with pytest.raises(NoReceiver, match=r"sends by disk, this generator receives by collective: give both"):
        publisher.check()
