import pytest
import torch
from torch import nn

from weights_sync.errors import LayoutRefused, SyncFailed
from weights_sync.manifest import TensorSpec
from weights_sync.staging import Declaration, Staging, declare


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.register_buffer("root_size", torch.tensor([0.5]), persistent=False)


class Headed(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        else:
            self.head.weight.data.copy_(self.embed.weight.data)  # equal values do not make them tied


def test_a_staged_version_reads_back_in_the_wire_type() -> None:
    declaration = Declaration(specs=(TensorSpec(name="a", shape=(3, 5)), TensorSpec(name="b", shape=())), tied={})
    staging = Staging.planned(declaration, wire_dtype="bfloat16")
    a, b = torch.randn(3, 5), torch.tensor(1.5)
    staging.fill([("a", a), ("b", b)])
    assert torch.equal(staging.views["a"], a.bfloat16()) and torch.equal(staging.views["b"], b.bfloat16())


def test_c10_one_changed_byte_is_found_by_its_digest() -> None:
    model = nn.Linear(8, 8)
    declaration = declare(model)
    staging = Staging.planned(declaration, wire_dtype="float32")
    staging.fill(model.named_parameters())
    manifest = staging.sealed(version=1, incarnation=0, declaration=declaration)
    staging.verify(manifest)
    staging.buffer[manifest.entries[1].offset] ^= 1
    with pytest.raises(SyncFailed, match="bytes of bias differ"):
        staging.verify(manifest)


def test_c4_a_partitioned_parameter_is_declared_whole_and_refused_while_it_is_a_shard() -> None:
    model = nn.Linear(4, 4, bias=False)
    model.weight.ds_shape = torch.Size((4, 4))  # type: ignore[assignment]
    model.weight.data = torch.empty(0)
    declaration = declare(model)
    assert declaration.specs[0].shape == (4, 4)
    staging = Staging.planned(declaration, wire_dtype="float32")
    with pytest.raises(LayoutRefused, match=r"weight: got shape \(0,\), declared \(4, 4\); gather"):
        staging.fill(model.named_parameters())


def test_an_incomplete_version_is_refused_with_the_missing_name() -> None:
    model = nn.Linear(4, 4)
    staging = Staging.planned(declare(model), wire_dtype="float32")
    with pytest.raises(LayoutRefused, match="missing: bias"):
        staging.fill([("weight", model.weight)])


def test_c11_persistent_buffers_are_declared_and_others_left_alone() -> None:
    declaration = declare(Buffered())
    assert declaration.buffers == ("scale",)
    assert "root_size" not in [spec.name for spec in declaration.specs]


def test_c12_tied_parameters_are_declared_once() -> None:
    declaration = declare(Headed(tied=True))
    assert [spec.name for spec in declaration.specs] == ["embed.weight"]
    assert declaration.tied == {"head.weight": "embed.weight"}


def test_c13_equal_but_untied_parameters_are_both_declared() -> None:
    declaration = declare(Headed(tied=False))
    assert [spec.name for spec in declaration.specs] == ["embed.weight", "head.weight"]
    assert declaration.tied == {}


def test_tensors_on_the_list_travel_in_float32() -> None:
    model = nn.ModuleDict({"norm": nn.LayerNorm(4), "proj": nn.Linear(4, 4)})
    staging = Staging.planned(declare(model), wire_dtype="bfloat16", keep_fp32=["norm.*", "proj.bia?"])
    assert {entry.name: entry.dtype for entry in staging.entries} == {
        "norm.weight": "float32",
        "norm.bias": "float32",
        "proj.weight": "bfloat16",
        "proj.bias": "float32",
    }
