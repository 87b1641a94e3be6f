"""vLLM fed over a shared folder and over the broker: versions follow, and what breaks costs an attempt."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from broker.config import BrokerConfig
from broker.connect import Access
from broker.messages import Publication
from broker.server import BrokerServer
from generators.engine import EngineDead
from tests.generators.learner_end import greedy, logprobs, prompt
from tests.generators.vllm_setting import PROMPTS, Setup, cores
from weights_sync.config import WeightsSyncConfig
from weights_sync.errors import SyncFailed

pytestmark = pytest.mark.slow
TIMEOUT_S = 3.0  # of a read that stands still


@pytest.fixture(scope="module", params=["disk", "relay"])
def vllm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    with ExitStack() as stack:
        server, stop = BrokerServer(BrokerConfig()), threading.Event()
        thread = threading.Thread(target=server.run, args=(stop,))
        thread.start()
        stack.callback(thread.join, 10)
        stack.callback(stop.set)
        sync = WeightsSyncConfig(
            transport=request.param,
            dir=str(tmp_path_factory.mktemp("weights")),
            sync_timeout_s=TIMEOUT_S,
            verify_load="always",
            bucket_bytes=16384,
        )
        access = Access(config=BrokerConfig(), url=server.url)
        setup = Setup(tmp_path_factory.mktemp("model"), tied=True, sync=sync, access=access)
        stack.callback(setup.close)
        yield setup


@pytest.fixture
def disk(vllm: Setup) -> Path:
    """The folder of the versions; tests that do something to files are for it alone."""
    if vllm.sync.transport != "disk":
        pytest.skip("there are no files")
    return Path(vllm.sync.dir)


def test_three_versions_follow_and_are_what_was_sent(vllm: Setup) -> None:
    async def over_a_swap() -> Any:
        long = prompt(PROMPTS[0], n=8, max_tokens=250)
        answer = asyncio.create_task(vllm.engine.generate(long, request_id="long", attempt=1))
        await vllm.engine.generate(prompt(PROMPTS[1], max_tokens=2), request_id="short", attempt=1)
        vllm.learner.step()
        await vllm.learner.publish(vllm.engine)
        return await answer

    for _ in range(2):
        vllm.publish()
        assert [sample.token_ids.tolist() for sample in vllm.ask_all()] == greedy(vllm.model, PROMPTS, 32)
    versions = {tuple(sample.version_runs[:, 0]) for sample in vllm.run(over_a_swap())}
    assert (vllm.learner.version - 1, vllm.learner.version) in versions
    (sample,) = vllm.ask(PROMPTS[0])
    wanted = logprobs(vllm.model, PROMPTS[0], sample.token_ids.tolist(), 1.0)
    np.testing.assert_allclose(sample.behavior_logprobs, wanted, atol=1e-5)


def test_a_version_that_comes_while_the_one_before_is_staged_follows_it(vllm: Setup) -> None:
    async def two() -> None:
        vllm.learner.step()
        first = await vllm.learner.staged(vllm.engine)
        before = vllm.learner.version
        vllm.learner.step()
        vllm.learner.version += 1
        vllm.learner.publisher.offer(vllm.learner.version, vllm.model.named_parameters())
        await vllm.engine.swap(first)
        assert vllm.engine.policy_version == before
        vllm.learner.uses(before)
        second = await vllm.learner.announced(vllm.learner.version)
        await vllm.engine.stage(second, member_id="g1")
        await vllm.engine.swap(second)
        await vllm.learner.in_use()

    vllm.run(two())
    assert vllm.engine.policy_version == vllm.learner.version
    assert [sample.token_ids.tolist() for sample in vllm.ask_all()] == greedy(vllm.model, PROMPTS, 32)


def test_an_outcome_whose_notice_is_lost_is_found_all_the_same(vllm: Setup) -> None:
    reader = vllm.engine._reader
    assert reader is not None
    reader.cancel()
    vllm.publish()
    assert vllm.engine.policy_version == vllm.learner.version

    async def read_again() -> None:
        vllm.engine._reader = asyncio.create_task(vllm.engine._read_notices())

    vllm.run(read_again())
    vllm.publish()
    assert [path.name for path in vllm.engine._directory.iterdir()] == ["notices"]


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-64 - len(data) % 64] ^= 8  # inside a tensor, wherever its padding is
    path.write_bytes(data)


def stand_still(path: Path) -> None:
    """As on a file server that does not answer: nobody writes to a pipe."""
    path.unlink()
    os.mkfifo(path)


def broken(vllm: Setup, folder: Path, harm: Callable[[Path], None]) -> Any:
    """A publication of the next version with one of its files harmed."""

    async def offered() -> Publication:
        vllm.learner.step()
        vllm.learner.version += 1
        vllm.learner.publisher.offer(vllm.learner.version, vllm.model.named_parameters())
        publication = await vllm.learner.announced(vllm.learner.version)
        harm(next(folder.glob(f"*/*/{publication.attempt}/0.0")))
        return publication

    return offered()


@pytest.mark.parametrize(
    ("harm", "said"),
    [(flip, r"bytes of model\.[\w.]+ differ from their digest"), (stand_still, "nothing came for weights_sync.sync")],
)
def test_a_file_that_is_not_what_was_written_costs_an_attempt_while_the_old_version_serves(
    vllm: Setup, disk: Path, harm: Callable[[Path], None], said: str
) -> None:
    before, version = vllm.checksums(), vllm.engine.policy_version

    async def refused() -> None:
        publication = await broken(vllm, disk, harm)
        with pytest.raises(SyncFailed, match=said) as failed:
            await vllm.engine.stage(publication, member_id="g1")
        vllm.learner.refused(failed.value)

    async def again() -> None:
        publication = await vllm.learner.announced(vllm.learner.version)
        await vllm.engine.stage(publication, member_id="g1")
        await vllm.engine.swap(publication)
        await vllm.learner.in_use()

    vllm.run(refused())
    assert vllm.checksums() == before
    assert vllm.ask(PROMPTS[0])[0].version_runs[0, 0] == version
    vllm.run(again())
    assert vllm.engine.policy_version == vllm.learner.version
    assert [sample.token_ids.tolist() for sample in vllm.ask_all()] == greedy(vllm.model, PROMPTS, 32)


def test_a_core_that_no_longer_answers_is_dead_at_the_deadline_and_a_swap_does_not_hang(vllm: Setup) -> None:
    if vllm.sync.transport != "relay":
        pytest.skip("the other engine ends in another way")
    (core,) = cores()

    async def hung() -> None:
        vllm.learner.step()
        publication = await vllm.learner.staged(vllm.engine)
        core.suspend()
        with pytest.raises(EngineDead, match=r"did not answer within weights_sync\.sync_timeout_s = 3 s"):
            await asyncio.wait_for(vllm.engine.swap(publication), 5 * TIMEOUT_S)

    vllm.run(hung())
    core.kill()


@pytest.mark.parametrize("end", ["kill"])
def test_c56_an_engine_that_ends_in_the_middle_of_staging_is_not_waited_for(vllm: Setup, disk: Path, end: str) -> None:
    (core,) = cores()

    async def ended() -> None:
        publication = await broken(vllm, disk, stand_still)
        staging = asyncio.create_task(vllm.engine.stage(publication, member_id="g1"))
        await asyncio.sleep(TIMEOUT_S / 3)
        assert not staging.done()
        if end == "kill":
            core.kill()
        else:
            await vllm.engine.close()
        with pytest.raises(EngineDead):
            await asyncio.wait_for(staging, 2 * TIMEOUT_S)

    vllm.run(ended())
    assert not cores()
