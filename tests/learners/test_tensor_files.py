"""Tensors on disk: what was written is there, and what is not there is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from learners.tensor_files import TensorsMissing, check_tensors, read_tensors, write_tensors

TENSORS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(5), "c": torch.tensor([7], dtype=torch.int32)}
SHAPES = {"a": (2, 3), "b": (5,), "c": (1,)}


@pytest.mark.parametrize("file_bytes", [8, 30, 1 << 20])
def test_tensors_come_back_equal_from_one_file_or_from_many(tmp_path: Path, file_bytes: int) -> None:
    write_tensors(tmp_path, "model", TENSORS.items(), file_bytes=file_bytes)
    check_tensors(tmp_path, "model", SHAPES)
    back = dict(read_tensors(tmp_path, "model"))
    assert back.keys() == TENSORS.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in TENSORS.items())
    assert (tmp_path / "model.safetensors").is_file() == (file_bytes == 1 << 20)


def test_views_of_one_buffer_are_written_as_they_were_when_they_came(tmp_path: Path) -> None:
    buffer = torch.zeros(3)

    def stream():  # type: ignore[no-untyped-def]
        for i in range(3):
            yield f"t{i}", buffer.fill_(i)

    write_tensors(tmp_path, "model", stream())
    assert {name: tensor[0].item() for name, tensor in read_tensors(tmp_path, "model")} == {"t0": 0, "t1": 1, "t2": 2}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        (SHAPES | {"d": (1,)}, "d is absent"),
        ({name: shape for name, shape in SHAPES.items() if name != "b"}, "b is.*nothing belongs"),
        (SHAPES | {"a": (3, 2)}, r"a is \(2, 3\).*\(3, 2\)"),
        (SHAPES | {"b": (0,)}, r"b is \(5,\)"),
    ],
)
def test_c125_names_and_shapes_must_be_those_wanted(
    tmp_path: Path, wanted: dict[str, tuple[int, ...]], said: str
) -> None:
    write_tensors(tmp_path, "model", TENSORS.items())
    with pytest.raises(TensorsMissing, match=said):
        check_tensors(tmp_path, "model", wanted)


def test_c128_a_lost_part_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    write_tensors(tmp_path, "model", TENSORS.items(), file_bytes=8)
    (tmp_path / "model-00002.safetensors").unlink()
    with pytest.raises(TensorsMissing, match="model-00002"):
        check_tensors(tmp_path, "model", SHAPES)
    with pytest.raises(TensorsMissing, match="model-00002"):
        list(read_tensors(tmp_path, "model"))
