"""A receiver in a process of its own: publications in as JSON lines, outcomes out. Killed by itself on demand."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys

from torch import Tensor

from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.groups import Group
from weights_sync.receiver import Receiver


def main() -> None:
    config, member_id, die_at = WeightsSyncConfig.model_validate_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    broadcasts = 0
    broadcast = Group.broadcast

    def counted(group: Group, tensor: Tensor) -> None:
        nonlocal broadcasts
        broadcasts += 1
        if broadcasts == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(group, tensor)

    Group.broadcast = counted  # type: ignore[method-assign]
    settled: queue.Queue[tuple[int, str]] = queue.Queue()
    receiver = Receiver(
        config=config, member_id=member_id, on_settled=lambda *end: settled.put(end), check=lambda manifest: None
    )
    print("ready", flush=True)
    for line in sys.stdin:
        fields = json.loads(line)
        receiver.receive(Publication(**{**fields, "receivers": tuple(fields["receivers"])}))
        attempt, error = settled.get()
        print(json.dumps({"attempt": attempt, "error": error}), flush=True)


if __name__ == "__main__":
    main()
