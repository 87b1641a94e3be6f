"""Which rows a rank computes, and in which micro-batch.

Every rank gets the same number of micro-batches, because a ZeRO-3 rank that has fewer leaves the others waiting in a
gather (C100); what is missing is filled with micro-batches without loss. The i-th micro-batches of all ranks cost about
the same, because the ranks wait for each other in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

Plan = list[list[list[int]]]
"""[rank][micro-batch][row] indices into the lengths."""

# In tokens: where a row's attention costs as much as its matrices, for a hidden size of 1024. A layer's matrices are
# 24 H² operations a token and its causal attention 2 H L, so that the two are equal at L = 12 H.
EQUAL_AT = 12 * 1024


def plan(lengths: Sequence[int], *, ranks: int, token_budget: int, packed: bool = False) -> Plan:
    """Equally many micro-batches on every rank, as few as the budget of tokens allows, and as even as they can be.

    A row over the budget is alone. ``packed``: rows lie one after the other; else they are padded to the longest of
    their micro-batch, and the padding counts in the budget.
    """
    if packed:
        return _packed([[i] for i in range(len(lengths))], lengths, ranks=ranks, token_budget=token_budget)
    return _padded(lengths, ranks=ranks, token_budget=token_budget)


def plan_pairs(lengths: Sequence[int], *, ranks: int, token_budget: int, packed: bool = False) -> Plan:
    """``plan`` where rows 2 i and 2 i + 1 stay together, in this order."""
    pairs = [[i, i + 1] for i in range(0, len(lengths), 2)]
    if packed:
        return _packed(pairs, lengths, ranks=ranks, token_budget=token_budget)
    longest = [max(lengths[i] for i in pair) for pair in pairs]
    planned = _padded(longest, ranks=ranks, token_budget=max(1, token_budget // 2))
    return [[[row for i in rows for row in pairs[i]] for rows in mine] for mine in planned]


def padding_share(planned: Plan, lengths: Sequence[int], *, packed: bool = False) -> float:
    """Share of the computed tokens that are padding."""
    padded = sum(_size(rows, lengths) for mine in planned for rows in mine)
    return 1 - sum(lengths) / padded if padded and not packed else 0.0


def cost(length: int) -> float:
    """Estimated cost of a row, in tokens of a row so short that its attention costs nothing."""
    return length * (1 + length / EQUAL_AT)


def _packed(units: Sequence[list[int]], lengths: Sequence[int], *, ranks: int, token_budget: int) -> Plan:
    """``units`` of rows that stay together: largest cost first, each into the cheapest micro-batch with room for it."""
    tokens = [sum(lengths[i] for i in unit) for unit in units]
    costs = [sum(cost(lengths[i]) for i in unit) for unit in units]
    ceiling = max(token_budget, max(tokens, default=0))
    order = sorted(range(len(units)), key=lambda u: -costs[u])
    for per_rank in count(max(1, -(-sum(tokens) // (ceiling * ranks)))):
        room, spent = [ceiling] * (per_rank * ranks), [0.0] * (per_rank * ranks)
        bins: list[list[int]] = [[] for _ in room]
        for u in order:
            free = [b for b in range(len(room)) if room[b] >= tokens[u]]
            if not free:
                break
            best = min(free, key=lambda b: spent[b])
            room[best], spent[best] = room[best] - tokens[u], spent[best] + costs[u]
            bins[best] += units[u]
        else:
            return _dealt(bins, [sum(cost(lengths[i]) for i in rows) for rows in bins], ranks)
    raise AssertionError("with a micro-batch for every row there is room")


def _padded(lengths: Sequence[int], *, ranks: int, token_budget: int) -> Plan:
    """Rows of like length together, cut where the largest micro-batch is as small as possible."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    sizes = [lengths[i] for i in order]
    ceiling = max(token_budget, max(sizes, default=0))
    per_rank = max(1, -(-len(_cut(sizes, ceiling)) // ranks))
    bins = [[order[i] for i in part] for part in _cut(sizes, _smallest_cap(sizes, per_rank * ranks))]
    bins += [[] for _ in range(per_rank * ranks - len(bins))]
    return _dealt(bins, [len(rows) * cost(max((lengths[i] for i in rows), default=0)) for rows in bins], ranks)


def _dealt(bins: Sequence[list[int]], costs: Sequence[float], ranks: int) -> Plan:
    """The i-th micro-batches of every rank are of like cost; who gets the dearest alternates."""
    order = sorted(range(len(bins)), key=lambda b: -costs[b])
    planned: list[tuple[float, list[list[int]]]] = [(0.0, []) for _ in range(ranks)]
    for start in range(0, len(order), ranks):
        planned.sort(key=lambda mine: mine[0])
        for rank, b in enumerate(order[start : start + ranks]):
            spent, mine = planned[rank]
            planned[rank] = (spent + costs[b], [*mine, bins[b]])
    return [mine for _, mine in planned]


def _size(rows: list[int], lengths: Sequence[int]) -> int:
    return len(rows) * max((lengths[i] for i in rows), default=0)


def _cut(sizes: Sequence[int], cap: int) -> list[range]:
    """Cuts descending sizes into runs of at most ``cap`` padded tokens each, as few as possible."""
    runs, start = [], 0
    while start < len(sizes):
        stop = min(len(sizes), start + max(1, cap // sizes[start]))
        runs.append(range(start, stop))
        start = stop
    return runs


def _smallest_cap(sizes: Sequence[int], most_runs: int) -> int:
    """The smallest cap under which ``_cut`` needs at most ``most_runs`` runs."""
    low, high = 1, max(1, len(sizes) * max(sizes, default=1))
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_cut(sizes, middle)) <= most_runs else (middle + 1, high)
    return low
