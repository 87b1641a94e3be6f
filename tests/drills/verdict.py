"""Whether every item was trained exactly once, or ended with a reason: the learner's lineage and the broker's books."""

from __future__ import annotations

import itertools
from collections import Counter

from broker.messages import Counts, Frontier
from tests.drills.history import History
from tests.drills.setting import Setting

SHOWN = 10


def wrong_items(setting: Setting, version: int, frontier: Frontier, history: History) -> tuple[list[str], list[int]]:
    """What is wrong with the final checkpoint's lineage, and the positions that it has no news of."""
    trained = Counter(position for step in history.steps for position in step.trained)
    ended = Counter(position for step in history.steps for position, state, reason in step.ended if state and reason)
    silent = [p for step in history.steps for p, state, reason in step.ended if not (state and reason)]
    everything = set(range(setting.total))
    found = {
        "trained more than once": [p for p, times in trained.items() if times > 1],
        "told as ended more than once": [p for p, times in ended.items() if times > 1],
        "both trained and ended": sorted(trained.keys() & ended.keys()),
        "ended without a reason": silent,
        "not in the data": sorted((trained.keys() | ended.keys()) - everything),
        "trained though hopeless": [p for p in trained if setting.hopeless(p)],
        "in the history but not in the frontier": [p for p in trained | ended if not frontier.has(p)],
    }
    missing = sorted(everything - trained.keys() - ended.keys())
    found["in the frontier but not in the history"] = [p for p in missing if frontier.has(p)]
    wrong = [f"{len(items)} items {what}: {items[:SHOWN]}" for what, items in found.items() if items]
    versions = [step.version for step in history.steps]
    if versions != list(range(1, version + 1)):
        gaps = [(a, b) for a, b in itertools.pairwise(versions) if b != a + 1]
        wrong.append(f"the lineage of version {version} is not 1 to {version}: {gaps[:SHOWN]}")
    return wrong, missing


def wrong_books(setting: Setting, counts: Counts, history: History, missing: list[int]) -> list[str]:
    """What is wrong with the broker's final ledger.

    A broker without its memory has been told the frontier, in which trained and dead positions look alike. Items that
    died after the last batch are in the ledger alone; the lineage has no news of them.
    """
    wrong = []
    dead, ended = sum(counts.dead.values()), counts.durable + sum(counts.dead.values())
    if not counts.balanced():
        wrong.append(f"the books do not balance: {counts.total()} in {counts}")
    if not counts.fed == ended == setting.total:
        wrong.append(f"durable + dead = {ended}, fed = {counts.fed}, but there were {setting.total} items")
    if missing and (ended != setting.total or dead < len(missing)):
        wrong.append(f"{len(missing)} items are missing: {missing[:SHOWN]}")
    if setting.disk:
        trained = sum(len(step.trained) for step in history.steps)
        told = sum(len(step.ended) for step in history.steps)
        if (counts.durable, dead) != (trained, told + len(missing)):
            wrong.append(
                f"the broker has {counts.durable} durable and {dead} dead; the learner has trained {trained}, "
                f"knows of {told} dead and has no news of {len(missing)}"
            )
    return wrong
