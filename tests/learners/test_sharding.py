"""Shards and whole tensors of one rank; several ranks are in test_policy.py."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from learners.sharding import Sharding, local_shard, whole_shape


def test_the_shards_of_all_ranks_make_up_the_tensor_with_zeros_where_it_is_padded() -> None:
    whole = torch.arange(1.0, 8.0).view(7, 1)
    shards = [Sharding(partitioned=True, rank=rank, world=3, device="cpu").mine(whole, 3) for rank in range(3)]
    assert torch.cat(shards).tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 0]


@pytest.mark.parametrize("partitioned", [False, True])
def test_one_rank_has_everything(partitioned: bool) -> None:
    sharding = Sharding(partitioned=partitioned, rank=0, world=1, device="cpu")
    tensors = {"a": torch.rand(2, 3), "b": torch.rand(5)}
    whole = dict(sharding.whole((name, tuple(t.shape), t) for name, t in tensors.items()))
    assert all(torch.equal(whole[name], tensor) for name, tensor in tensors.items())


def test_c4_a_partitioned_parameter_shows_its_whole_shape_and_its_shard_never_the_empty_tensor() -> None:
    parameter = nn.Parameter(torch.empty(0))
    parameter.ds_shape, parameter.ds_tensor = torch.Size((4, 4)), torch.arange(8.0)  # type: ignore[attr-defined]
    assert whole_shape(parameter) == (4, 4)
    assert local_shard(parameter).numel() == 8
