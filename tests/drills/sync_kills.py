"""The kill drill of weight sync: ``python -m tests.drills.sync_kills --kills 50 [--seed N]``.

    learner thread ─offer─► Publisher ══gloo══► three generator processes      (the product's, but for the model)
    tap ─SIGKILL, SIGSTOP─► one of them, at its n-th broadcast or at any moment
    audit ─state()─► broker process; compares the digests of every version that is reported in use with the learner's

Every round ends with all three generators holding the newest version. Then all are killed: the learner waits, and goes
on when one comes; all are killed again, and the learner gives up in time. The last line says ``exact: true``, or
``exact: false`` and what was wrong, and the exit status is 0 or 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import tempfile
import time
from pathlib import Path

import torch

from tests.drills.setting import SILENCE_S, Setting
from tests.drills.sync_fleet import Stuck
from tests.drills.sync_rounds import Drill
from tests.drills.sync_setting import HEARTBEAT_S, LEASE_TIMEOUT_S, MEMBER_TIMEOUT_S
from tests.drills.sync_tally import SHOWN

PROMPTS_AN_EPOCH = 1000


def prepare(seed: int, directory: Path) -> Setting:
    """Leaves the setting for the processes."""
    broker: dict[str, object] = {
        "port": _free_port(),
        "lease_timeout_s": LEASE_TIMEOUT_S,
        "member_timeout_s": MEMBER_TIMEOUT_S,
        "heartbeat_s": HEARTBEAT_S,
        "reconnect_timeout_s": SILENCE_S,
        "max_attempts": 1000,  # no prompt is to die of the kills
    }
    setting = Setting(
        driver_pid=os.getpid(),
        directory=str(directory),
        broker={"backend": "zmq", **broker},
        password="",
        size=PROMPTS_AN_EPOCH,
        seed=seed,
    )
    setting.write()
    return setting


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    directory = Path(tempfile.mkdtemp(prefix="slipstream-sync-drill-"))
    began, wrong = time.monotonic(), []
    drill = Drill(prepare(args.seed, directory), args.kills)
    try:
        drill.run()
    except Stuck as stuck:
        wrong.append(str(stuck))
    finally:
        drill.close()
    wrong += drill.findings()
    for line in drill.summary():
        print(line)
    print(f"seed {args.seed}, {time.monotonic() - began:.0f} s")
    for text in wrong[:SHOWN]:
        print(f"wrong: {text}")
    if wrong:
        print(f"logs: {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    print("exact: true" if not wrong else f"exact: false: {len(wrong)} findings; first: {wrong[0].splitlines()[0]}")
    return 1 if wrong else 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
