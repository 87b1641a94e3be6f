"""A receiver in a process of its own: publications in as JSON lines, outcomes out. Killed by itself on demand.

Arguments: its settings, its name, at which broadcast or bucket it dies; the broker's settings and url if it has one.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
from collections.abc import Callable
from typing import Any

from broker.config import BrokerConfig
from broker.connect import connect
from broker.messages import Publication
from weights_sync.config import WeightsSyncConfig
from weights_sync.disk import Disk
from weights_sync.groups import Group
from weights_sync.receiver import Receiver
from weights_sync.relay import Relay


def main() -> None:
    config, member_id, die_at = WeightsSyncConfig.model_validate_json(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    pieces = 0

    def counted(receive: Callable[..., None]) -> Any:
        def receive_or_die(*arguments: Any) -> None:
            nonlocal pieces
            pieces += 1
            if pieces == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            receive(*arguments)

        return receive_or_die

    Group.broadcast = counted(Group.broadcast)  # type: ignore[method-assign]
    Disk.read_into = counted(Disk.read_into)  # type: ignore[method-assign]
    Relay.read_into = counted(Relay.read_into)  # type: ignore[method-assign]
    settled: queue.Queue[tuple[int, str]] = queue.Queue()
    receiver = Receiver(
        config=config,
        member_id=member_id,
        on_settled=lambda *end: settled.put(end),
        check=lambda manifest: None,
        connect=(lambda: connect(BrokerConfig.model_validate_json(sys.argv[4]), sys.argv[5])) if sys.argv[4:] else None,
    )
    print("ready", flush=True)
    for line in sys.stdin:
        fields = json.loads(line)
        receiver.receive(Publication(**{**fields, "receivers": tuple(fields["receivers"])}))
        attempt, error = settled.get()
        if not error:
            receiver.take(attempt)
        print(json.dumps({"attempt": attempt, "error": error}), flush=True)


if __name__ == "__main__":
    main()
