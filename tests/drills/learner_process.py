"""A learner whose weights are the list of what it has trained: ``python -m tests.drills.learner_process DIRECTORY``.

    newest checkpoint -> learners.feed.BatchFeed -> bound checked -> history, publish, trained -> checkpoint, durable

Broker side, lineage and checkpoints are the product's own. Three runs, one after the other: whole batches; the groups
that do not fill a batch, one by one; the last item, which waits for the last kill and brings the news of late deaths.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from broker.connect import connect
from broker.contract import Broker
from broker.errors import NoOpenRun
from broker.messages import Batch, Completion, Frontier, Prompt, Publication
from learners.checkpoint import Checkpoints
from learners.feed import BatchFeed, EndOfData
from learners.lineage import keep, take_up
from learners.staleness import apply_bound
from tests.drills.history import newest
from tests.drills.setting import GROUPS_PER_STEP, MAX_STALENESS, SILENCE_S, Setting, enter

log = logging.getLogger(__name__)

TRAIN_S = 0.015
EVERY_STEPS = 5
KEEP = 2


class Learner:
    """One life, from the newest checkpoint to the end of the data or the next kill."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._checkpoints = Checkpoints(Path(setting.directory, "checkpoints"), keep=KEEP)
        self._version, self._frontier, self._history = newest(self._checkpoints)
        self._saved = self._version
        self._life = _next_life(Path(setting.directory, "lives"))
        self._history.lives.append((self._life, self._version))
        self._broker = self._connect()
        self._offers = itertools.count()
        self._fed: set[int] = set()
        log.info("life %d starts from version %d, %s", self._life, self._version, self._frontier)

    def live(self) -> None:
        """All three runs, then the end of the whole."""
        total = self._setting.total
        self._train(GROUPS_PER_STEP, total - 1)
        self._train(1, total - 1)
        deadline = time.monotonic() + 10 * SILENCE_S  # the driver gives up sooner
        while not self._setting.all_killed.exists():
            assert time.monotonic() < deadline, "the driver never made its last kill"
            time.sleep(0.05)
        feed = self._train(1, total)
        feed.finish("all trained")
        log.info("all trained: version %d, %s", self._version, self._frontier)

    def _train(self, groups_per_step: int, upto: int) -> BatchFeed:
        """Trains what there is below position ``upto``; returns the feed, closed but for its ``finish``."""
        directory = Path(self._setting.directory)
        lineage = take_up(directory, "auto")
        feed = BatchFeed(
            connect=self._connect,
            prompts=lambda frontier: self._prompts(frontier, upto),
            rules=self._setting.rules(groups_per_step, lineage.run),
            version=self._version,
            frontier=self._frontier,
            total_steps=2**31,
            watchdog_s=SILENCE_S,
            after=lineage.incarnation,
        )
        keep(directory, replace(lineage, incarnation=feed.incarnation))
        log.info("incarnation %d: batches of %d below position %d", feed.incarnation, groups_per_step, upto)
        self._offer(feed)
        try:
            while True:
                batch = feed.take(self._version, 0.2)
                if batch is not None:
                    self._step(batch, feed)
                elif self._broker.state().publication != self._offered:
                    self._offer(feed)
        except EndOfData as end:
            log.info("%s", end)
        self._save(feed)
        if upto < self._setting.total:
            feed.close()
        return feed

    def _step(self, batch: Batch, feed: BatchFeed) -> None:
        assert batch.version == self._version, (batch.version, self._version)
        self._check(batch)
        time.sleep(TRAIN_S)
        self._version += 1
        self._history.add(batch, self._version)
        self._offer(feed)  # before the ledger hears of it, as learners.loop does
        feed.trained(self._version)
        self._frontier = feed.frontier
        if self._version % EVERY_STEPS == 0:
            self._save(feed)

    def _check(self, batch: Batch) -> None:
        """The bound for every token that carries loss, and who made its policy. SystemExit names the token."""
        bounded, _ = apply_bound(batch, version=batch.version, max_staleness=MAX_STALENESS, on_stale="mask")
        for before, group in zip(batch.groups, bounded.groups, strict=True):
            carrying = [_carrying(completion) for completion in group.completions]
            for version in {version for _, versions in carrying for version in versions}:
                if not batch.version - MAX_STALENESS <= version <= batch.version:
                    raise SystemExit(f"STALE: item {group.prompt.item} has a token of {version} at {batch.version}")
            if not any(versions for _, versions in carrying):
                raise SystemExit(f"STALE: item {group.prompt.item} has nothing to train at {batch.version}: {before}")
            for life, version in {pair for lives, versions in carrying for pair in zip(lives, versions, strict=True)}:
                if life != self._history.maker(version):
                    raise SystemExit(
                        f"GIVEN UP: item {group.prompt.item} at version {batch.version} of incarnation "
                        f"{batch.incarnation} has a token of version {version} of life {life}, which made another "
                        f"{version} than life {self._history.maker(version)} of this lineage"
                    )

    def _offer(self, feed: BatchFeed) -> None:
        """Announces the present version; ``epoch`` says which life made it."""
        self._offered = Publication(
            version=self._version,
            incarnation=feed.incarnation,
            attempt=1_000_000 * self._life + next(self._offers),
            epoch=self._history.maker(self._version),
            store="",
            receivers=(),
        )
        try:
            self._broker.publish(self._offered)
        except NoOpenRun:
            log.info("no run is open: version %d will be offered again", self._version)

    def _save(self, feed: BatchFeed) -> None:
        if self._version > self._saved:
            self._checkpoints.save(self._version, self._frontier, self._history.write)
            self._saved = self._version
        feed.durable(self._version, self._frontier)

    def _prompts(self, frontier: Frontier, upto: int) -> Iterator[Prompt]:
        """What comes after ``frontier``; says what this life has fed before."""
        again = sorted(position for position in self._fed if not frontier.has(position))
        if again:
            log.info("%d items that have not ended are fed again: positions %d to %d", len(again), again[0], again[-1])
        for position in range(frontier.base, upto):
            if not frontier.has(position):
                self._fed.add(position)
                yield self._setting.prompt(position)

    def _connect(self) -> Broker:
        return connect(self._setting.config(), self._setting.url)


def _carrying(completion: Completion) -> tuple[list[int], list[int]]:
    """Life and version of the tokens that carry loss."""
    carries = completion.loss_mask.astype(np.bool_)
    return completion.token_ids[carries].tolist(), completion.versions()[carries].tolist()


def _next_life(directory: Path) -> int:
    """A number that no earlier start of the learner had."""
    directory.mkdir(exist_ok=True)
    number = len(list(directory.iterdir()))
    (directory / str(number)).touch(exist_ok=False)
    return number


def main() -> None:
    Learner(enter()).live()


if __name__ == "__main__":
    main()
