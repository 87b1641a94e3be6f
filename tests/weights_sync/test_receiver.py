import queue
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.control import ABANDONED, SENT, STAGED, here_key, settled_key, verdict_key
from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.groups import group_name, host_store, make_group
from weights_sync.manifest import Manifest, TensorSpec
from weights_sync.receiver import Receiver
from weights_sync.staging import Declaration, Staging
from weights_sync.transfer import send
from weights_sync.updates import since, whole

CONFIG = WeightsSyncConfig(sync_timeout_s=20.0, bucket_bytes=1024)
DECLARATION = Declaration(specs=(TensorSpec(name="a", shape=(40, 40)), TensorSpec(name="b", shape=(3,))), tied={})


class Root:
    """The learner's side of transfers, one call at a time."""

    def __init__(self) -> None:
        self.store, self.address = host_store("127.0.0.1", 0, CONFIG.sync_timeout_s)
        self.group = None

    def publication(self, attempt: int, version: int) -> Publication:
        return Publication(
            version=version, incarnation=0, attempt=attempt, epoch=1, store=self.address, receivers=("g0",)
        )

    def staging(self, value: float) -> Staging:
        staging = Staging.planned(DECLARATION, wire_dtype="float32")
        staging.fill([("a", torch.full((40, 40), value)), ("b", torch.full((3,), value))])
        return staging

    def form(self) -> None:
        if self.group is None:
            self.group = make_group(
                backend="gloo",
                store=self.store,
                prefix=group_name(1, 0),
                rank=0,
                size=2,
                timeout_s=CONFIG.sync_timeout_s,
                address="127.0.0.1",
            )

    def send(self, publication: Publication, staging: Staging, manifest: Manifest) -> None:
        self.form()
        assert self.group is not None
        send(self.group, publication, whole(manifest, staging), bucket_bytes=CONFIG.bucket_bytes)


@pytest.fixture
def root() -> Root:
    return Root()


@pytest.fixture
def receiver_of() -> Callable[..., tuple[Receiver, queue.Queue[tuple[int, str]]]]:
    def make(
        check: Callable[[Manifest], None] = lambda manifest: None, config: WeightsSyncConfig = CONFIG
    ) -> tuple[Receiver, queue.Queue[tuple[int, str]]]:
        settled: queue.Queue[tuple[int, str]] = queue.Queue()
        receiver = Receiver(config=config, member_id="g0", on_settled=lambda *end: settled.put(end), check=check)
        return receiver, settled

    return make


Make = Callable[..., tuple[Receiver, "queue.Queue[tuple[int, str]]"]]


def test_a_sent_version_is_staged_whole_and_taken_once(root: Root, receiver_of: Make) -> None:
    receiver, settled = receiver_of()
    publication, staging = root.publication(1, 5), root.staging(2.5)
    receiver.receive(publication)
    root.send(publication, staging, staging.sealed(version=5, incarnation=0, declaration=DECLARATION))
    assert settled.get(timeout=10) == (1, "")
    staged = receiver.take(1)
    assert staged.manifest.version == 5
    assert torch.equal(staged.staging.views["a"], torch.full((40, 40), 2.5))
    assert root.store.get(settled_key(1, 1)).decode() == STAGED
    with pytest.raises(SyncFailed, match="attempt 1 is not staged"):
        receiver.take(1)


@pytest.mark.parametrize("flipped", [0, 4], ids=["value", "place"])
def test_c10_a_byte_changed_in_an_update_is_refused_and_the_version_held_stays(
    root: Root, receiver_of: Make, flipped: int
) -> None:
    receiver, settled = receiver_of()
    versions = {5: root.staging(2.5), 6: root.staging(2.5)}
    versions[6].views["a"][3, 3] = 7.0
    manifests = {
        version: staging.sealed(version=version, incarnation=0, declaration=DECLARATION)
        for version, staging in versions.items()
    }
    receiver.receive(first := root.publication(1, 5))
    root.send(first, versions[5], manifests[5])
    assert settled.get(timeout=10) == (1, "")
    held = receiver.take(1).staging
    payload = since(5, versions[5], manifests[6], versions[6])
    assert payload.manifest.base == 5 and payload.data.numel() == 5
    broken = payload.data.clone()
    broken[flipped] ^= 8
    receiver.receive(publication := root.publication(2, 6))
    assert root.group is not None
    send(root.group, publication, replace(payload, data=broken), bucket_bytes=CONFIG.bucket_bytes)
    assert "bytes of a differ from their digest" in settled.get(timeout=10)[1]
    held.verify(manifests[5])


def test_c10_a_byte_changed_in_flight_is_refused_and_the_next_attempt_succeeds(root: Root, receiver_of: Make) -> None:
    receiver, settled = receiver_of()
    first, staging = root.publication(1, 5), root.staging(2.5)
    manifest = staging.sealed(version=5, incarnation=0, declaration=DECLARATION)
    staging.buffer[-64] ^= 1
    receiver.receive(first)
    root.send(first, staging, manifest)
    attempt, error = settled.get(timeout=10)
    assert attempt == 1 and "bytes of b differ from their digest" in error
    assert "differ from their digest" in root.store.get(settled_key(1, 1)).decode()
    with pytest.raises(SyncFailed):
        receiver.take(1)


def test_another_version_than_announced_is_refused(root: Root, receiver_of: Make) -> None:
    receiver, settled = receiver_of()
    staging = root.staging(1.0)
    receiver.receive(root.publication(1, 5))
    root.send(root.publication(1, 6), staging, staging.sealed(version=6, incarnation=0, declaration=DECLARATION))
    attempt, error = settled.get(timeout=10)
    assert attempt == 1 and "was announced" in error


def test_c23_a_manifest_that_does_not_fit_is_refused_after_the_others_got_theirs(root: Root, receiver_of: Make) -> None:
    def check(manifest: Manifest) -> None:
        raise LayoutRefused("unknown: a")

    receiver, settled = receiver_of(check)
    publication, staging = root.publication(1, 5), root.staging(1.0)
    receiver.receive(publication)
    root.send(publication, staging, staging.sealed(version=5, incarnation=0, declaration=DECLARATION))
    assert settled.get(timeout=10) == (1, "LayoutRefused: unknown: a")


def test_an_abandoned_attempt_settles_long_before_its_operation_times_out(root: Root, receiver_of: Make) -> None:
    receiver, settled = receiver_of()
    receiver.receive(root.publication(1, 5))
    root.form()  # the receiver now waits for a header that will not come
    root.store.set(verdict_key(1, 1), ABANDONED)
    attempt, error = settled.get(timeout=CONFIG.sync_timeout_s / 4)
    assert attempt == 1 and "abandoned by the learner" in error


def test_a_learner_that_dies_settles_the_attempt(receiver_of: Make) -> None:
    receiver, settled = receiver_of()
    publication = Publication(
        version=1, incarnation=0, attempt=1, epoch=1, store="127.0.0.1:9", receivers=("g0",)
    )  # nobody listens on the discard port
    threading.Thread(target=receiver.receive, args=(publication,)).start()
    attempt, error = settled.get(timeout=CONFIG.sync_timeout_s + 5)
    assert attempt == 1 and "does not answer" in error


def test_a_publication_for_others_is_refused(root: Root, receiver_of: Make) -> None:
    receiver, _ = receiver_of()
    with pytest.raises(SyncFailed, match="g0 is not among the receivers"):
        receiver.receive(
            Publication(version=1, incarnation=0, attempt=1, epoch=1, store=root.address, receivers=("g9",))
        )


def test_a_newcomer_under_an_old_name_does_not_join_an_attempt_that_is_over(root: Root, receiver_of: Make) -> None:
    first, settled = receiver_of()
    publication, staging = root.publication(1, 5), root.staging(1.0)
    first.receive(publication)
    root.send(publication, staging, staging.sealed(version=5, incarnation=0, declaration=DECLARATION))
    assert settled.get(timeout=10) == (1, "")
    root.store.set(verdict_key(1, 1), SENT)
    second, settled = receiver_of()
    second.receive(publication)
    attempt, error = settled.get(timeout=CONFIG.sync_timeout_s / 4)
    assert attempt == 1 and "attempt 1 is over" in error


def test_what_was_sent_but_never_arrives_settles_at_the_deadline(root: Root, receiver_of: Make) -> None:
    receiver, settled = receiver_of(config=CONFIG.model_copy(update={"sync_timeout_s": 1.0}))
    publication = root.publication(1, 5)
    receiver.receive(publication)  # nobody forms the group with it: gloo alone would wait for ever
    root.store.wait([here_key(1, 1)])
    root.store.set(verdict_key(1, 1), SENT)
    attempt, error = settled.get(timeout=10)
    assert attempt == 1 and "sync_timeout_s" in error
