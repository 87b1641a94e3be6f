"""The learner under drill: real work, changed weights, the product's publisher; it trains what the generators answer.

batch ─► labels checked ─► step: matrix products, weights changed ─► digests kept ─► offer ─► trained
"""

from __future__ import annotations

import random
import threading
import time
from collections import defaultdict

import numpy as np
import torch

from broker.connect import connect
from broker.messages import Batch, Frontier
from generators.fake_engine import fake_logprob
from tests.drills.setting import Setting
from tests.drills.sync_setting import SYNC, Digests, Policy, digests_of, rules
from weights_sync.errors import NoReceiver
from weights_sync.publisher import Publisher
from weights_sync.staging import declare

STEP_S = 0.075  # of matrix products, on an idle machine
SIDE = 640
AHEAD = 200  # prompts fed beyond the one in training
FLIP = 0.04  # chance that steps begin, or stop, changing everything
WAIT_S = 0.2


class Learner:
    """A thread of its own. ``phase``: what the driver calls this time; steps are told apart by it.

    Attributes:
        digests: of every version ever offered.
        sampled: versions whose tokens came in, by generator.
        trained: positions, in the order in which they were trained.
        times: (phase, seconds) of each step that was all in one phase.
    """

    def __init__(self, setting: Setting, *, step_s: float = STEP_S) -> None:
        self._step_s, self.trained = step_s, list[int]()
        self._setting, self._rng = setting, random.Random(f"{setting.seed}.learner")
        self.model, self._work = Policy(), torch.randn(SIDE, SIDE)
        declaration = declare(self.model)
        live = {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}
        self._tensors = {spec.name: live[spec.name] for spec in declaration.specs}
        self._broker = connect(setting.config(), setting.url)
        incarnation = self._broker.open_run(rules=rules(setting), version=0, frontier=Frontier())
        self.products = self._calibrated()
        self.publisher = Publisher(
            config=SYNC,
            connect=lambda: connect(setting.config(), setting.url),
            declaration=declaration,
            incarnation=incarnation,
        )
        self.version, self.phase = 0, "start"
        self.digests: dict[int, Digests] = {}
        self.sampled: defaultdict[str, set[int]] = defaultdict(set)
        self.times: list[tuple[str, float]] = []
        self.wrong: list[str] = []
        self.failure: BaseException | None = None
        self._all, self._fed = True, 0
        self._go, self._idle, self._stop = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="learner", daemon=True)

    @property
    def gave_up(self) -> bool:
        """Whether the publisher has found nobody for too long."""
        return isinstance(self.failure, NoReceiver)

    def start(self) -> None:
        """Offers version 0 and trains from there on."""
        self._go.set()
        self._thread.start()

    def pause(self, limit_s: float) -> bool:
        """No step from here on; false if it was still in one after ``limit_s``."""
        self._go.clear()
        return self._idle.wait(limit_s)

    def resume(self) -> None:
        """Goes on."""
        self._idle.clear()
        self._go.set()

    def close(self) -> None:
        """Ends it, and the publisher."""
        self._stop.set()
        self._go.set()
        if self._thread.ident is not None:
            self._thread.join(10.0)
        self.publisher.close()

    def _run(self) -> None:
        try:
            self._offer()
            while not self._stop.is_set():
                if not self._go.is_set():
                    self._idle.set()
                    self._go.wait()
                self._train()
        except BaseException as error:
            self.failure = error
        self._idle.set()

    def _train(self) -> None:
        if self._fed < self.version + AHEAD:
            prompts = [self._setting.prompt(self._fed + place) for place in range(AHEAD)]
            self._broker.feed(prompts)
            self._fed += AHEAD
        batch = self._broker.take_batch(version=self.version, wait_s=WAIT_S)
        if batch is None:
            self.publisher.check()
            return
        self._check(batch)
        phase, seconds = self.phase, self._step()
        if self.phase == phase:
            self.times.append((phase, seconds))
        self._broker.trained(batch_id=batch.batch_id, version=self.version)
        self.trained += [group.prompt.position for group in batch.groups]
        if self.version % 50 == 0:
            self._broker.durable(version=self.version)

    def _step(self) -> float:
        """One more version. Returns what the work and the offer took; the drill's own digests do not count."""
        began = time.perf_counter()
        self._multiply(self.products)
        self._change()
        took = time.perf_counter() - began
        self.version += 1
        return took + self._offer()

    def _offer(self) -> float:
        self.digests[self.version] = digests_of(self._tensors)
        began = time.perf_counter()
        self.publisher.offer(self.version, self._tensors.items())
        return time.perf_counter() - began

    def _multiply(self, times: int) -> None:
        for _ in range(times):
            torch.mm(self._work, self._work)

    def _calibrated(self) -> int:
        """Products that fill a step now, with nothing else running; as many in every step."""
        self._multiply(5)
        began = time.perf_counter()
        self._multiply(20)
        return max(1, round(self._step_s / ((time.perf_counter() - began) / 20)))

    def _change(self) -> None:
        """A few elements, or all of them; in runs, or there would always be a whole one among what is sent at once."""
        if self._rng.random() < FLIP:
            self._all = not self._all
        parameters = list(self.model.parameters())
        with torch.no_grad():
            self.model.steps += 1
            if self._all:
                for parameter in parameters:
                    parameter.add_(self._rng.uniform(-0.1, 0.1))
            else:
                for parameter in self._rng.sample(parameters, 3):
                    flat = parameter.view(-1)
                    flat[torch.randint(flat.numel(), (self._rng.randint(1, 500),))] += 1.0

    def _check(self, batch: Batch) -> None:
        """Each token's log-probability is that of the version on its label."""
        for group in batch.groups:
            for completion in group.completions:
                versions = completion.versions().tolist()
                told = [fake_logprob(v, t) for v, t in zip(versions, completion.token_ids.tolist(), strict=True)]
                if not np.array_equal(completion.behavior_logprobs, np.array(told, np.float32)):
                    self.wrong.append(f"item {group.prompt.item} of {group.generator}: labels {versions} are wrong")
                self.sampled[group.generator].update(versions)
