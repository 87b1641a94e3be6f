"""Sparse updates: what arrives is what was sent, bit for bit, and never costs more than the whole."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from weights_sync import sparse
from weights_sync.encoding import GAP_WIDTHS, Encoding
from weights_sync.errors import SyncFailed

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float64, torch.bool]


def changed(elements: int, places: list[int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(base, new) that differ at just these places."""
    base = (torch.arange(elements) % 2 == 0).to(dtype)
    new = base.clone()
    new[places] = (~base[places].bool()).to(dtype)
    return base, new


def trip(base: torch.Tensor, new: torch.Tensor) -> Encoding:
    gaps = sparse.gaps_of(sparse.changes(base, new))
    encoding = sparse.plan(gaps, elements=new.numel(), item_bytes=new.element_size())
    if encoding.kind == "sparse":
        out = torch.empty(encoding.nbytes, dtype=torch.uint8)
        sparse.encode(new, gaps, encoding, out)
        target = base.clone()
        sparse.apply(out, encoding, target, name="w")
        assert torch.equal(sparse.bits(target), sparse.bits(new))
    return encoding


@given(data=st.data(), elements=st.integers(1, 3000), dtype=st.sampled_from(DTYPES))
@settings(max_examples=200, deadline=None)
def test_what_arrives_is_what_was_sent_and_is_never_larger_than_the_whole(data, elements, dtype) -> None:
    places = data.draw(st.lists(st.integers(0, elements - 1), max_size=60, unique=True))
    encoding = trip(*changed(elements, places, dtype))
    assert encoding.nbytes <= elements * torch.empty(0, dtype=dtype).element_size()
    if encoding.kind == "sparse":
        assert len(places) <= encoding.count


@pytest.mark.parametrize("width", GAP_WIDTHS)
def test_gaps_at_the_edge_of_a_width_are_bridged_by_fillers(width: int) -> None:
    most = sparse.largest_gap(width)
    gaps = torch.tensor([1, most, most + 1, 2 * most, 2 * most + 1, 3])
    fitted = sparse.filled(gaps, width)
    assert int(fitted.max()) <= most and int(fitted.min()) >= 1
    assert len(fitted) == len(gaps) + sparse.fillers(gaps, width) == len(gaps) + 0 + 0 + 1 + 1 + 2 + 0
    ends = torch.cumsum(fitted, 0)
    assert set(torch.cumsum(gaps, 0).tolist()) <= set(ends.tolist())


def test_the_cheapest_width_is_taken() -> None:
    dense, thin = list(range(0, 100_000, 20)), list(range(0, 100_000, 5_000))
    assert trip(*changed(100_000, dense, torch.bfloat16)) == Encoding(
        kind="sparse", count=5_000, gap_bytes=1, nbytes=15_000
    )
    assert trip(*changed(100_000, thin, torch.bfloat16)) == Encoding(kind="sparse", count=20, gap_bytes=2, nbytes=80)
    assert trip(*changed(100, list(range(100)), torch.bfloat16)).kind == "whole"
    assert trip(*changed(100, [], torch.bfloat16)).nbytes == 0


def test_bits_decide_not_numbers() -> None:
    base = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    assert sparse.changes(base, new).tolist() == [0], "-0.0 is another number to the receiver, the same NaN is not"


@pytest.mark.parametrize(
    ("gaps", "complaint"),
    [([200], "outside of its 100"), ([0], "outside of its 100"), ([60, 41], "outside of its 100")],
)
def test_positions_outside_of_the_tensor_are_refused(gaps: list[int], complaint: str) -> None:
    encoding = Encoding(kind="sparse", count=len(gaps), gap_bytes=1, nbytes=3 * len(gaps))
    data = torch.cat([torch.zeros(2 * len(gaps), dtype=torch.uint8), torch.tensor(gaps, dtype=torch.uint8)])
    with pytest.raises(SyncFailed, match=complaint):
        sparse.apply(data, encoding, torch.zeros(100, dtype=torch.bfloat16), name="w")


def test_bytes_that_do_not_fit_the_encoding_are_refused() -> None:
    encoding = Encoding(kind="sparse", count=4, gap_bytes=1, nbytes=12)
    with pytest.raises(SyncFailed, match="w: 11 bytes are not 4 changes of 2 bytes each"):
        sparse.apply(torch.zeros(11, dtype=torch.uint8), encoding, torch.zeros(100, dtype=torch.bfloat16), name="w")
