"""What of a broker's answers can be compared with another's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from broker.codec import encode
from broker.errors import BrokerError
from broker.messages import Batch, Group, Lease, RunState


def lasting(state: RunState) -> Any:
    return replace(state, members=(), revision=0, counts=replace(state.counts, events=without_members(state)))


def without_members(state: RunState) -> dict[str, int]:
    return {name: count for name, count in state.counts.events.items() if name != "members_lost"}


def outcome(call: Callable[[Any], Any], broker: Any) -> Any:
    try:
        return call(broker)
    except BrokerError as error:
        return type(error)


def plain(result: Any) -> Any:
    """Something that compares, which messages with arrays do not."""
    if isinstance(result, Batch | Group | Lease):
        return encode(result)
    return [plain(one) for one in result] if isinstance(result, tuple | list) else result
