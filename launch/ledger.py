"""``slipstream ledger``: where every prompt is, and whether the books balance."""

from __future__ import annotations

import argparse

from rich.console import Console
from rich.table import Table

from broker.connect import connect
from broker.messages import Counts, RunState
from configs.load import load
from launch.environment import broker_url, placed


def run(args: argparse.Namespace) -> int:
    """Prints the counts; exit code 1 when they do not add up to what was fed."""
    config = load(args.config, args.overrides)
    client = connect(placed(config), broker_url(args, config))
    try:
        state = client.state()
    finally:
        client.close()
    Console().print(table(state))
    print(verdict(state.counts))
    return 0 if state.counts.balanced() else 1


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
            rows.add_row(f"{name} ({reason})", str(count))
    rows.add_section()
    rows.add_row("sum", str(counts.total()))
    rows.add_row("fed", str(counts.fed))
    for name, count in sorted(counts.events.items()):
        rows.add_row(name, str(count), style="dim")
    return rows


def verdict(counts: Counts) -> str:
    """Whether the books add up, in words."""
    if counts.balanced():
        return f"balanced: every one of {counts.fed} prompts is in exactly one state"
    return f"NOT balanced: the states add up to {counts.total()}, fed were {counts.fed}"
