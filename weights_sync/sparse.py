"""Sparse, lossless updates: what has changed of a tensor since a version that the receivers hold, bit for bit.

    (base, new) --changes--> positions --plan--> Encoding --encode--> bytes --apply--> base becomes new

A step of 1e-6 leaves most bfloat16 weights as they are, so the positions are most of an update and are kept short: as
the gaps between them, one, two or four bytes wide. Where a gap does not fit, an unchanged element in between is sent
as well (a filler), which is still lossless. Whole tensors are sent where that is cheaper.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weights_sync.encoding import GAP_WIDTHS, Encoding
from weights_sync.errors import SyncFailed

_GAP_TYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's elements as integers of the same width, flat: two are equal if their bits are, NaNs included."""
    return tensor.reshape(-1).view(_BITS[tensor.element_size()])


def changes(base: Tensor, new: Tensor) -> Tensor:
    """[k] int64, ascending: the flat positions at which two tensors of one shape and type differ in their bits."""
    return (bits(base) != bits(new)).nonzero().reshape(-1)


def gaps_of(positions: Tensor) -> Tensor:
    """[k] int64, each at least 1: from one position to the next, the first counted from -1."""
    return torch.diff(positions, prepend=positions.new_full((1,), -1))


def fillers(gaps: Tensor, width: int) -> int:
    """Elements to send in between so that every gap fits ``width`` bytes."""
    most = largest_gap(width)
    return int(((gaps - 1) // most).sum()) if gaps.numel() else 0


def largest_gap(width: int) -> int:
    """That ``width`` bytes hold."""
    return min((1 << 8 * width) - 1, (1 << 31) - 1)


def plan(gaps: Tensor, *, elements: int, item_bytes: int) -> Encoding:
    """The cheapest encoding of a tensor of ``elements`` of which those at these gaps have changed."""
    options = [Encoding(kind="whole", count=elements, gap_bytes=0, nbytes=elements * item_bytes)]
    for width in GAP_WIDTHS:
        count = gaps.numel() + fillers(gaps, width)
        options.append(Encoding(kind="sparse", count=count, gap_bytes=width, nbytes=count * (width + item_bytes)))
    return min(options, key=lambda option: option.nbytes)


def filled(gaps: Tensor, width: int) -> Tensor:
    """Gaps that all fit ``width`` bytes, with the fillers' among them; their sum is unchanged."""
    most = largest_gap(width)
    extra = (gaps - 1) // most
    if not int(extra.sum()):
        return gaps
    ends = torch.cumsum(extra + 1, 0)
    split = gaps.new_full((int(ends[-1]),), most)
    split[ends - 1] = gaps - extra * most
    return split


def encode(new: Tensor, gaps: Tensor, encoding: Encoding, out: Tensor) -> None:
    """Writes a sparse encoding into ``out`` (uint8, [encoding.nbytes]): the values, then the gaps."""
    fitted = filled(gaps, encoding.gap_bytes)
    values = bits(new)[torch.cumsum(fitted, 0) - 1]
    split = values.numel() * new.element_size()
    out[:split].copy_(values.view(torch.uint8))
    out[split:].copy_(fitted.to(_GAP_TYPES[encoding.gap_bytes]).view(torch.uint8))


def apply(data: Tensor, encoding: Encoding, target: Tensor, *, name: str) -> None:
    """Makes ``target``, which holds the base, the new version. Raises SyncFailed for positions outside of it."""
    item_bytes = target.element_size()
    split = encoding.count * item_bytes
    if encoding.nbytes != encoding.count * (item_bytes + encoding.gap_bytes) or data.numel() != encoding.nbytes:
        raise SyncFailed(f"{name}: {data.numel()} bytes are not {encoding.count} changes of {item_bytes} bytes each")
    if not encoding.count:
        return
    # A clone starts at an address that any type may be viewed at.
    values = data[:split].clone().view(_BITS[item_bytes])
    gaps = data[split:].clone().view(_GAP_TYPES[encoding.gap_bytes]).to(torch.int64)
    positions = torch.cumsum(gaps, 0) - 1
    flat = bits(target)
    if int(gaps.min()) < 1 or int(positions[-1]) >= flat.numel():
        raise SyncFailed(f"{name}: changes at positions outside of its {flat.numel()} elements")
    flat[positions] = values
