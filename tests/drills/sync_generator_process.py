"""Generators without a model, forked one by one: ``python -m tests.drills.sync_generator_process DIRECTORY``.

The product's loop and receiver; the engine samples like generators.fake_engine and writes down what it holds.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from broker.connect import connect
from broker.lifetime import die_with
from broker.messages import Publication
from generators.config import GeneratorConfig
from generators.fake_engine import FakeEngine
from generators.loop import generate
from generators.scoring import Scorer
from tasks.config import TaskConfig
from tests.drills.setting import Setting, read, talk
from tests.drills.sync_generator import LEFT
from tests.drills.sync_setting import SYNC, digests_of, held_file
from weights_sync.errors import SyncFailed
from weights_sync.manifest import Manifest, check_names
from weights_sync.receiver import Receiver

TOKEN_S = 0.01
GROUPS_IN_FLIGHT = 2
NICE = 10  # below the learner, which elsewhere has processors of its own


class SyncEngine(FakeEngine):
    """generators.engine.Engine whose weights are bytes of its own, copied from staging as a real engine's are."""

    def __init__(self, setting: Setting, member_id: str) -> None:
        super().__init__(step_s=TOKEN_S)
        self._settled: dict[int, Callable[[str], None]] = {}
        self._live: dict[str, Tensor] = {}
        path = held_file(setting, os.getpid())
        path.parent.mkdir(exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._receiver = Receiver(
            config=SYNC,
            member_id=member_id,
            on_settled=lambda attempt, error: self._settled.pop(attempt)(error),
            check=self._check,
        )

    async def stage(self, publication: Publication, *, member_id: str) -> None:
        """Receives into staging. Raises SyncFailed."""
        loop = asyncio.get_running_loop()
        settled: asyncio.Future[str] = loop.create_future()

        def settle(error: str) -> None:
            loop.call_soon_threadsafe(settled.set_result, error)

        self._settled[publication.attempt] = settle
        self._receiver.receive(publication)
        if error := await settled:
            raise SyncFailed(error)

    async def swap(self, publication: Publication) -> None:
        """Copies, digests the copy, writes that down; then the next token is the new version's."""
        staged = self._receiver.take(publication.attempt)
        for name, view in staged.staging.views.items():
            if name in self._live:
                self._live[name].copy_(view)
            else:
                self._live[name] = view.clone()
        line = {"version": publication.version, "digests": digests_of(self._live)}
        os.write(self._file, (json.dumps(line) + "\n").encode())  # one call: a kill leaves the line or nothing
        await super().swap(publication)

    async def close(self) -> None:
        """Leaves an attempt under way."""
        await super().close()
        await asyncio.to_thread(self._receiver.close)

    def _check(self, manifest: Manifest) -> None:
        if self._live:
            check_names(wanted=self._live, got=[entry.name for entry in manifest.entries], who="this engine")


async def serve(setting: Setting, member_id: str) -> None:
    """Until it is killed, or told to leave by SIGTERM."""
    config, stop = setting.config(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await generate(
        broker=lambda: connect(config, setting.url),
        engine=SyncEngine(setting, member_id),
        score=Scorer(TaskConfig(rewards={"one": "tests.drills.sync_setting:reward"}), timeout_s=10.0),
        decode=lambda sample: "",
        config=GeneratorConfig(groups_in_flight=GROUPS_IN_FLIGHT),
        broker_config=config,
        group_timeout_s=60.0,
        member_id=member_id,
        stop=stop,
        grace_s=SYNC.grace_s,
    )


def main() -> None:
    """Forks one generator for each name that comes in, and answers with its pid; the kernel reaps them."""
    setting = read(sys.argv[1])
    die_with(setting.driver_pid)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ours = os.getpid()
    for line in sys.stdin:
        pid = os.fork()
        if not pid:
            become(setting, line.strip(), parent=ours)
        print(pid, flush=True)


def become(setting: Setting, name: str, *, parent: int) -> NoReturn:
    """[in the new process] Its whole life; what it says goes to its log."""
    try:
        die_with(parent)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.nice(NICE)
        log = os.open(Path(setting.directory, f"{name}.log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        for stream, target in ((0, os.open(os.devnull, os.O_RDONLY)), (1, log), (2, log)):
            os.dup2(target, stream)
        talk()
        torch.set_num_threads(1)
        asyncio.run(serve(setting, name))
        print(LEFT, flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
