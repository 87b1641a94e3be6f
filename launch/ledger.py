"""``slipstream ledger`` and ``slipstream requeue``: where every prompt is, and what to do about those given up."""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console, Group, RenderableType
from rich.filesize import decimal as size
from rich.live import Live
from rich.table import Table
from rich.text import Text

from broker.address import unknown_host
from broker.connect import connect
from broker.contract import Broker
from broker.errors import BrokerError
from broker.messages import Counts, DeadItem, RunState
from configs.load import ConfigError, load
from launch.environment import asking, broker_url, placed
from telemetry.plain import plain

_WATCH_S = 1.0


def run(args: argparse.Namespace) -> int:
    """Prints the counts, once or until Ctrl-C; exit code 1 when they do not add up to what was fed."""
    with _client(args, patient=args.watch) as client:
        if args.dead:
            dead = client.dead_items()
            Console().print(graves(dead, client.state().counts))
            return 0
        state = client.state()
        if args.watch:
            with Live(_look(state), refresh_per_second=4) as live:
                while not state.finished:
                    time.sleep(_WATCH_S)
                    state = client.state()
                    live.update(_look(state))
        else:
            Console().print(_look(state))
    return 0 if state.counts.balanced() else 1


def requeue(args: argparse.Namespace) -> int:
    """Queues dead prompts again; exit code 1 when one that was named is not among them."""
    if bool(args.items) == args.all_dead:
        raise ConfigError("name the items to queue again, or give --all-dead (slipstream ledger --dead lists them)")
    if strange := [item for item in args.items if not re.fullmatch("[0-9]+", item)]:
        raise ConfigError(f"{plain(', '.join(strange))}: not an item number (slipstream ledger --dead lists them)")
    with _client(args) as client:
        items = [one.item for one in client.dead_items()] if args.all_dead else list(dict.fromkeys(args.items))
        known = {one.item for one in client.dead_items()}
        count = client.requeue(items)
    print(f"{count} prompts are queued again")
    unknown = [item for item in items if item not in known]
    if unknown:
        print(f"slipstream: not dead, or not known any more: {', '.join(unknown)}", file=sys.stderr)
    return 1 if unknown else 0


@contextmanager
def _client(args: argparse.Namespace, *, patient: bool = False) -> Iterator[Broker]:
    config = load(args.config, args.overrides)
    url = broker_url(args, config)
    if unknown := unknown_host(url):  # a person waits, so not for the name to become known, as a role would
        raise BrokerError(unknown)
    client = connect(placed(config) if patient else asking(args, config), url)
    try:
        yield client
    finally:
        client.close()


def _look(state: RunState) -> RenderableType:
    return Group(table(state), verdict(state.counts), *_course(state), *([members(state)] if state.members else []))


def _course(state: RunState) -> list[str | Text]:
    if state.finished:
        return [Text(f"the run has finished: {plain(state.finished)}")]
    return ["no run is open yet"] if state.incarnation < 0 else []


def table(state: RunState) -> Table:
    """One row a state of the ledger."""
    counts = state.counts
    rows = Table(title=f"ledger at version {state.version},\nincarnation {state.incarnation}")
    rows.add_column("state")
    rows.add_column("prompts", justify="right")
    for name in ("queued", "leased", "buffered", "training", "trained", "durable"):
        rows.add_row(name, str(getattr(counts, name)))
    for name, reasons in (("filtered", counts.filtered), ("dead", counts.dead)):
        for reason, count in sorted(reasons.items()):
            rows.add_row(_cell(f"{name} ({reason})"), str(count))
    rows.add_section()
    rows.add_row("sum", str(counts.total()))
    rows.add_row("fed", str(counts.fed))
    rows.add_section()
    rows.add_row("held, of at most", _fill(state), style="dim")
    for name, count in sorted(counts.events.items()):
        rows.add_row(_cell(name), str(count), style="dim")
    return rows


def members(state: RunState) -> Table:
    """One row a member, in the state that the broker shows (broker/standing.py)."""
    rows = Table(title="members")
    for name in ("member", "state", "version", "leases", "last error"):
        rows.add_column(name)
    for one in state.members:
        version = str(one.policy_version) if one.policy_version >= 0 else ""
        rows.add_row(_cell(one.member_id), one.state.value, version, str(len(one.leases)), _cell(one.error[:80]))
    return rows


def graves(dead: tuple[DeadItem, ...], counts: Counts) -> RenderableType:
    """One row a prompt given up, with its last error."""
    rows = Table(title="dead prompts")
    for name in ("item", "attempts", "last error"):
        rows.add_column(name)
    for one in dead:
        rows.add_row(_cell(one.item), str(one.attempts), _cell(one.error))
    older = sum(counts.dead.values()) - len(dead)
    note = f"and {older} older ones, whose prompts are not kept" if older > 0 else ""
    return Group(rows, note) if note else rows


def _cell(text: str) -> Text:
    """Not a plain str, in which rich would obey what stands in brackets."""
    return Text(plain(text))


def verdict(counts: Counts) -> str:
    """Whether the books add up, in words."""
    if counts.balanced():
        return f"balanced: every one of {counts.fed} prompts is in exactly one state"
    return f"NOT balanced: the states add up to {counts.total()}, fed were {counts.fed}"


def _fill(state: RunState) -> str:
    limit = state.rules.max_buffer_bytes if state.rules else 0
    return f"{size(state.buffered_bytes)} of {size(limit)}"
