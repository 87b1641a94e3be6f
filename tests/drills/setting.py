"""What every process of a kill drill knows: one file in the drill's directory, written before the first of them starts.

    setting.json    this                      checkpoints/    the learner's (learners.checkpoint)
    NAME.log        what NAME has said        lineage.json    the learner's (learners.lineage)
    url             of the broker             lives/          one empty file for each start of the learner
    data/           the broker's              all-killed      the learner may now train the last item

The broker's first start tells its url, and the later ones must come back there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from broker.config import BrokerConfig
from broker.lifetime import die_with
from broker.messages import Prompt, Rules, Split

ROOT = Path(__file__).resolve().parents[2]
EPOCHS = 3
GROUPS_PER_STEP, MAX_STALENESS = 4, 2
SILENCE_S = 60.0  # whoever waits longer than this without any progress fails
LEASE_TIMEOUT_S, MEMBER_TIMEOUT_S, HEARTBEAT_S = 2.0, 4.0, 0.4
UP = "up"  # first word of the first line of a started process


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One drill.

    Attributes:
        broker: the fields of a BrokerConfig that are not its defaults.
        password: of a Redis server that keeps none itself.
        size: prompts an epoch.
    """

    driver_pid: int
    directory: str
    broker: dict[str, object]
    password: str
    size: int
    seed: int

    @property
    def total(self) -> int:
        """Positions over all epochs."""
        return EPOCHS * self.size

    @property
    def disk(self) -> bool:
        """Whether a killed broker remembers."""
        return self.broker.get("durability") == "disk"

    @property
    def url_file(self) -> Path:
        """Written by the broker's first start; the later ones must come back there."""
        return Path(self.directory, "url")

    @property
    def url(self) -> str:
        """Of the broker."""
        return self.url_file.read_text(encoding="utf-8")

    @property
    def all_killed(self) -> Path:
        """There once the last kill was made."""
        return Path(self.directory, "all-killed")

    def config(self, **changes: object) -> BrokerConfig:
        """From JSON, in which a path is a text and an integer may be a float."""
        return BrokerConfig.model_validate_json(json.dumps(self.broker | changes))

    def rules(self, groups_per_step: int, run: str) -> Rules:
        """What the learner opens the run with."""
        config = self.config()
        return Rules(
            max_staleness=MAX_STALENESS,
            on_stale="mask",
            groups_per_step=groups_per_step,
            max_attempts=config.max_attempts,
            lease_timeout_s=config.lease_timeout_s,
            member_timeout_s=config.member_timeout_s,
            max_buffer_bytes=config.max_buffer_bytes,
            run=run,
        )

    def prompt(self, position: int) -> Prompt:
        """The item at this place in the feed."""
        return Prompt(
            item=str(position),
            position=position,
            epoch=position // self.size,
            split=Split.TRAIN,
            token_ids=np.array([1, position % self.size], np.int32),
            text="",
            reference="",
            n=2,
            temperature=1.0,
            max_tokens=8,
            seed=position,
        )

    def hopeless(self, position: int) -> bool:
        """Whether every attempt at this item fails; never the last item, which is there to bring the last news."""
        return position % 23 == 5 and position != self.total - 1

    def write(self) -> None:
        """Leaves it for ``read``."""
        Path(self.directory, "setting.json").write_text(json.dumps(asdict(self)), encoding="utf-8")


def read(directory: str) -> Setting:
    """What ``write`` has left."""
    return Setting(**json.loads(Path(directory, "setting.json").read_text(encoding="utf-8")))


def talk() -> None:
    """Says that the process is up, and logs from here on."""
    logging.basicConfig(level="INFO", stream=sys.stdout, format="%(relativeCreated)6d %(levelname)s %(message)s")
    print(f"{UP} {os.getpid()}", flush=True)


def enter() -> Setting:
    """Called first by every process under drill: dies with the driver, and says that it is up."""
    setting = read(sys.argv[1])
    die_with(setting.driver_pid)
    talk()
    return setting
