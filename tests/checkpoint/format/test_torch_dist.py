"""The files of a checkpoint, read and written piece by piece; what is damaged or hostile is not run."""

import os
import pickle
import shutil
from enum import Enum
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorProperties, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as torch_load
from torch.distributed.checkpoint.state_dict_saver import save as torch_save

from helpers.checkpoint.ckpt_files import add_tensor, flip_bit
from moe_exp.checkpoint.format.torch_dist import CheckpointReader, read_metadata
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter

SHAPE = (4, 6, 5)
# ranges in memory order, as data parallel ranks own them
BOXES = ((0, 0, 1, 4), (3, 5, 1, 1), (0, 4, 1, 2), (1, 0, 2, 6), (3, 0, 1, 5))


def values(seed: int = 0) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed))


def write(folder: Path) -> dict[str, torch.Tensor]:
    """A checkpoint of a tensor in boxes, one of bf16, one of no dimension, and an object."""
    tensors = {"boxes": values(), "half": values(1).bfloat16(), "number": torch.tensor(3.5)}
    writer = TorchDistWriter(folder, file_bytes=300)
    for row, column, rows, columns in BOXES:
        box = tensors["boxes"][row : row + rows, column : column + columns]
        writer.add_chunk("boxes", box, shape=SHAPE, offsets=(row, column, 0))
    add_tensor(writer, "half", tensors["half"])
    add_tensor(writer, "number", tensors["number"])
    writer.add_object("state/shard_0_1", {"step": 7})
    writer.finish({"progress": {"iteration": 7}})
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "a")
    return tmp_path / "a"


def test_what_was_written_is_read(tmp_path):
    tensors, reader = write(tmp_path / "a"), CheckpointReader(tmp_path / "a")
    assert reader.tensors.keys() == tensors.keys()
    for key, tensor in tensors.items():
        stored = reader.tensors[key]
        assert (stored.shape, stored.dtype) == (tuple(tensor.shape), tensor.dtype)
        assert torch.equal(reader.read(key), tensor)
        assert stored.num_bytes == tensor.numel() * tensor.element_size()
    assert reader.read_object("state/shard_0_1") == [{"step": 7}]
    assert reader.common() == {"progress": {"iteration": 7}}
    assert len(list((tmp_path / "a").glob("*.distcp"))) > 1


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_box_is_read(data, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp() / "boxes"
    if not folder.exists():
        write(folder)
    offsets = [data.draw(st.integers(0, size - 1)) for size in SHAPE]
    sizes = [data.draw(st.integers(1, size - offset)) for size, offset in zip(SHAPE, offsets, strict=True)]
    box = tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))
    assert torch.equal(CheckpointReader(folder).read("boxes", offsets, sizes), values()[box])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_is_written_here_and_the_other_way_round(folder, tmp_path):
    state = {"boxes": torch.zeros(SHAPE), "half": torch.zeros(SHAPE, dtype=torch.bfloat16)}
    torch_load(state, storage_reader=FileSystemReader(folder), no_dist=True)
    assert torch.equal(state["boxes"], values())
    assert torch.equal(state["half"], values(1).bfloat16())
    torch_save({"x": values(2)}, storage_writer=FileSystemWriter(tmp_path / "torch"), no_dist=True)
    assert torch.equal(CheckpointReader(tmp_path / "torch").read("x"), values(2))
    # Python 3.13 writes paths by another name than the others.
    path = tmp_path / "torch/.metadata"
    data = pickle.dumps(pickle.loads(path.read_bytes()), protocol=2)
    data = data.replace(b"cpathlib._local\n", b"cpathlib\n")
    assert b"cpathlib\nPosixPath\n" in data
    for module in (b"pathlib", b"pathlib._local"):
        path.write_bytes(data.replace(b"cpathlib\n", b"c%s\n" % module))
        assert torch.equal(CheckpointReader(tmp_path / "torch").read("x"), values(2))


def test_views_are_written_without_the_rest_of_their_storage(tmp_path):
    with TorchDistWriter(tmp_path / "a") as writer:
        add_tensor(writer, "x", torch.randn(1000, 1000)[:2])
        writer.finish({})
    assert sum(path.stat().st_size for path in (tmp_path / "a").glob("*.distcp")) < 2 * 1000 * 4 + 2000


def test_a_tensor_that_is_not_filled_is_no_checkpoint(tmp_path):
    writer = TorchDistWriter(tmp_path / "a")
    writer.add_chunk("x", torch.zeros(2, 3), shape=(4, 3), offsets=(0, 0))
    with pytest.raises(ValueError, match="x: only 6 of 12 values were written"):
        writer.finish({})
    assert not (tmp_path / "a" / "metadata.json").exists()
    with pytest.raises(ValueError, match="chunks must have the same tensor shape and dtype"):
        writer.add_chunk("x", torch.zeros(2, 3), shape=(5, 3), offsets=(2, 0))


def test_a_tensor_that_lacks_values_is_not_read(folder):
    """A box that no file has: what is in memory would be taken for weights."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    stored = metadata.state_dict_metadata["boxes"]
    stored.chunks = [chunk for chunk in stored.chunks if tuple(chunk.offsets) != (3, 5, 0)]
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    reader = CheckpointReader(folder)
    with pytest.raises(ValueError, match=r"only has 115 of 120 values of boxes\. Fix: "):
        reader.read("boxes")
    assert torch.equal(reader.read("boxes", (0, 0, 0), (3, 6, 5)), values()[:3])


@pytest.mark.parametrize("damage", ["cut", "flip", "missing"])
@pytest.mark.parametrize("name", [".metadata", "common.pt", "__0_0.distcp"])
def test_damage_is_named(name, damage, folder):
    path = folder / name
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        os.truncate(path, path.stat().st_size // 2)
    else:
        flip_bit(path, 2)  # in the head: what a checksum alone finds is another matter
    with pytest.raises(ValueError, match=rf"{name}: cannot be used .* Fix: use another checkpoint\."):
        reader = CheckpointReader(folder)
        reader.common()
        reader.read("boxes")


def test_tensor_in_the_place_of_another(folder, tmp_path):
    with TorchDistWriter(tmp_path / "other", file_bytes=300) as writer:
        add_tensor(writer, "boxes", torch.zeros(3))
        writer.finish({})
    shutil.copy(tmp_path / "other/__0_0.distcp", folder)
    with pytest.raises(ValueError, match=r"__0_0.distcp: (does not contain boxes|cannot be used)"):
        CheckpointReader(folder).read("boxes")


def test_enums_as_python_3_11_0_to_3_11_3_pickles_them(tmp_path):
    class Old(pickle.Pickler):
        def reducer_override(self, value):
            return (getattr, (type(value), value.name)) if isinstance(value, Enum) else NotImplemented

    properties = TensorProperties(dtype=torch.float32, memory_format=torch.contiguous_format)
    whole = TensorStorageMetadata(properties, torch.Size([2]), [])
    with (tmp_path / ".metadata").open("wb") as file:
        Old(file).dump(Metadata({"x": whole}))
    assert read_metadata(tmp_path).state_dict_metadata["x"].size == torch.Size([2])
