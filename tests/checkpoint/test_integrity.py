"""Which checkpoint is used when files are damaged, foreign or hostile, and what is said about the others."""

import json
import os
import pickle
import re
import shutil
import signal
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.ckpt_files import add_tensor, entries_of
from helpers.checkpoint.small_job import files_of, records, run_to_end, small_settings, write_tokens
from helpers.ranks import RankError, run_on_ranks
from moe_exp.checkpoint import integrity
from moe_exp.checkpoint.format import folders
from moe_exp.checkpoint.format.folders import Manifest, one_checkpoint, recover, usable
from moe_exp.checkpoint.format.keys import read_state
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.integrity import Source, Verification, find_source
from moe_exp.checkpoint.load import load, resumed_progress
from moe_exp.config import ConfigError, load_config
from moe_exp.runs.run_folder import hold_run_folder, release_run_folders

from megatron.core.dist_checkpointing import ShardedObject, ShardedTensor
from megatron.core.transformer.enums import AttnBackend


def write_checkpoint(checkpoints: Path, iteration: int, *, manifest: bool = True) -> Path:
    """A checkpoint of two files, one of them with an object."""
    folder = checkpoints / f"iter_{iteration:07d}"
    writer = TorchDistWriter(folder)
    add_tensor(writer, "weight", torch.full((50, 20), float(iteration)))
    writer.next_file()
    writer.add_object("rng_state/shard_0.0_1.1", {"cpu": torch.arange(5)})
    writer.finish({"progress": {"iteration": iteration}} | ({"versions": {}} if manifest else {}))
    if manifest:
        Manifest(iteration, entries_of(folder), {}).write(folder)
    return folder


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    for iteration in (10, 20, 30):
        write_checkpoint(folder, iteration)
    (folder / "latest_checkpointed_iteration.txt").write_text("30")
    return folder


def all_files(folder: Path) -> dict[str, tuple[bytes, int]]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path): (path.read_bytes(), path.stat().st_mtime_ns) for path in files}


def find(path: Path, checksums: bool) -> Source | None:
    return find_source(path, checksums=checksums)


def found(path: Path, checksums: bool = True) -> Source | None:
    """Of two ranks, which agree; writes nothing."""
    before = all_files(path)
    first, second = run_on_ranks(2, find, path, checksums)
    assert first == second and all_files(path) == before
    return first


def refused(path: Path, text: str, num_ranks: int = 1) -> None:
    """On every rank, and nothing is written."""
    before = all_files(path)
    with pytest.raises(RankError, match=text):
        run_on_ranks(num_ranks, find, path, True)
    assert all_files(path) == before


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 7)


def flip_in_a_name(path: Path) -> None:
    path.write_text(path.read_text().replace('"bytes"', '"bytds"', 1))


DAMAGES: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "missing": (Path.unlink, "__0_1.distcp", "is missing"),
    "truncated": (cut, "__0_0.distcp", "has .* bytes instead of "),
    "bit flip": (flip, "__0_0.distcp", r"has changed since it was written \(xxh3 "),
    "no manifest": (Path.unlink, "manifest.json", "is missing"),
    "cut manifest": (cut, "manifest.json", "cannot be read"),
    "flip in manifest": (flip_in_a_name, "manifest.json", "cannot be read"),
    "cut metadata": (cut, ".metadata", r"cannot be used"),
    "flip in metadata": (flip, ".metadata", ""),
    "no metadata": (Path.unlink, ".metadata", r"cannot be used \(it is missing\)"),
    "cut common": (cut, "common.pt", "cannot be used"),
    "no backend": (
        Path.unlink,
        "metadata.json",
        r"is not a distributed checkpoint \(metadata\.json not found\)",
    ),
    "no folder": (shutil.rmtree, ".", r"does not exist"),
}


def test_a_whole_one_is_taken(checkpoints):
    write_checkpoint(checkpoints, 40)  # left by an attempt that was given up: `latest` says 30
    for path in (checkpoints, checkpoints.parent, checkpoints / "iter_0000030"):
        assert found(path) == Source(checkpoints / "iter_0000030")


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_damaged_newest_is_named_and_the_one_before_is_taken(damage, checkpoints):
    act, name, text = DAMAGES[damage]
    act((checkpoints / "iter_0000030" / name).resolve())
    source = found(checkpoints)
    assert source is not None and source.folder == checkpoints / "iter_0000020"
    (line,) = source.damages
    assert "iter_0000030" in line and line.isprintable()
    assert re.search(text, line), line


def test_sizes_alone_where_checksums_are_off(checkpoints):
    flip(checkpoints / "iter_0000030" / "__0_0.distcp")
    assert found(checkpoints, checksums=False) == Source(checkpoints / "iter_0000030")
    cut(checkpoints / "iter_0000030" / "__0_0.distcp")
    assert found(checkpoints, checksums=False).folder == checkpoints / "iter_0000020"


def test_none_is_whole(checkpoints):
    for path in checkpoints.glob("iter_*/__0_0.distcp"):
        cut(path)
    place = checkpoints / "iter_0000030" / "__0_0.distcp"
    refused(checkpoints, rf"checkpoint={checkpoints}: no .* can be used, {place}: has .*2 older.*Fix: ", 2)


def test_newer_format_is_not_passed_over(checkpoints):
    path = checkpoints / "iter_0000030" / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format_version": 99}))
    with pytest.raises(RankError, match=r"has format version 99, .* supports only up to 1") as caught:
        run_on_ranks(2, find, checkpoints, True)
    assert isinstance(caught.value.error, folders.NewerFormatError)


def test_foreign_and_partial_folders_by_name(checkpoints):
    (checkpoints / "iter_0000030").rename(checkpoints / "iter_0000030.partial")
    with pytest.raises(ValueError, match=r"^checkpoint=\S+30\.partial: is incomplete.* Fix: specify another"):
        one_checkpoint(checkpoints / "iter_0000030.partial")
    refused(checkpoints / "iter_0000030.partial", r"can be used, checkpoint=\S+30\.partial: is incomp")
    legacy = checkpoints / "iter_0000005"
    (legacy / "mp_rank_00").mkdir(parents=True)
    refused(legacy, r"no checkpoint can be used, checkpoint=\S+05: is not a distributed checkpoint \(meta")
    assert usable(checkpoints / "nowhere") == []


def test_without_manifest_the_files_have_to_be_long_enough(tmp_path):
    """As Megatron-LM writes them."""
    folder = write_checkpoint(tmp_path, 7, manifest=False)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("7")
    assert found(tmp_path) == Source(folder)
    cut(folder / "__0_0.distcp")
    refused(tmp_path, r"__0_0\.distcp: has \d+ bytes, expected at least \d+", 2)


def test_a_file_in_the_place_of_a_folder_has_no_checkpoints(checkpoints):
    assert found(checkpoints / "iter_0000030" / "common.pt") is None


def test_killed_before_the_first_latest_and_while_one_takes_another_place(checkpoints):
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    (checkpoints / "iter_0000030").rename(checkpoints / "iter_0000030.replaced")
    shutil.copytree(checkpoints / "iter_0000020", checkpoints / "iter_0000030.partial")
    (checkpoints / "iter_0000010").rename(checkpoints / "iter_0000010.removed")
    assert usable(checkpoints) == [checkpoints / "iter_0000020"]
    recover(checkpoints)
    assert sorted(path.name for path in checkpoints.iterdir()) == ["iter_0000020", "iter_0000030"]
    assert found(checkpoints) == Source(checkpoints / "iter_0000030")


def megatrons_arguments(folder: Path, version: str) -> list[Any]:
    """As that version of Megatron-Core writes them: in common.pt, or as an object of the checkpoint."""
    arguments = Namespace(params_dtype=torch.bfloat16, backend=AttnBackend.fused, exit_signal=signal.SIGTERM)
    if version == "0.16":
        torch.save({"args": arguments, "iteration": 30}, folder / "common.pt")
    else:
        with TorchDistWriter(folder) as writer:
            add_tensor(writer, "weight", torch.ones(50, 20))
            writer.add_object("common_state/shard_0_1", {"args": arguments, "iteration": 30})
            writer.finish({})
        (folder / "common.pt").unlink()
    (folder / "manifest.json").unlink()
    assert list(Verification(folder).findings()) == []
    assert find_source(folder, checksums=True) == Source(folder)
    common = CheckpointReader(folder).common()
    assert common["args"] == arguments
    return common["iteration"]


@pytest.mark.parametrize("version", ["0.16", "0.19"])
def test_arguments_of_megatron_lm_are_plain_values(checkpoints, version):
    assert run_on_ranks(1, megatrons_arguments, checkpoints / "iter_0000030", version) == [30]


def one_rank_cannot_read(folder: Path) -> str:
    """Rank 1 finds another folder, as on a node whose file system is not the others'."""
    place = torch.distributed.get_rank()
    piece = ShardedTensor.from_rank_offsets("weight", torch.zeros(25, 20), (0, place, 2))
    with pytest.raises(ValueError, match="cannot be used") as raised:
        read_state({"w": piece}, CheckpointReader(folder / str(place)))
    return str(raised.value)


def one_rank_cannot_load(folder: Path) -> str:
    with pytest.raises(ValueError, match="cannot be used") as raised:
        load(None, None, folder / str(torch.distributed.get_rank()), None)  # type: ignore[arg-type]
    return str(raised.value)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("__0_0.distcp", one_rank_cannot_read),
        ("common.pt", one_rank_cannot_load),
        (".metadata", one_rank_cannot_load),
    ],
)
def test_what_one_rank_cannot_read_ends_all_with_the_same_words(name, read, tmp_path):
    for rank in ("0", "1"):
        write_checkpoint(tmp_path / "new", 1).rename(tmp_path / rank)
    cut(tmp_path / "1" / name)
    assert len(set(run_on_ranks(2, read, tmp_path))) == 1


@dataclass
class Payload:
    """Unpickled, it makes a file."""

    path: Path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.path), "w")


def hostile(kind: str, folder: Path, mark: Path) -> None:
    if kind == "metadata":
        (folder / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    elif kind == "common":
        torch.save({"progress": Payload(mark)}, folder / "common.pt")
    else:
        with TorchDistWriter(folder) as writer:
            add_tensor(writer, "weight", torch.ones(50, 20))
            writer.add_object("rng_state/shard_0.0_1.1", Payload(mark))
            writer.finish({})
    (folder / "manifest.json").unlink()


def load_hostile(folder: Path) -> None:
    """Everything that this package reads of a checkpoint."""
    weight = torch.zeros(50, 20)
    state = {"weight": ShardedTensor.from_rank_offsets("weight", weight)}
    state["rng"] = ShardedObject("rng_state", None, (1, 1), (0, 0))
    with pytest.raises(ValueError, match=rf"{folder}.*cannot be used \(.*\)\. Fix: use another"):
        reader = CheckpointReader(folder)
        reader.common()
        read_state(state, reader)


@pytest.mark.parametrize("kind", ["metadata", "common", "object"])
def test_no_code_of_a_file_is_run(kind, checkpoints, tmp_path):
    folder = checkpoints / "iter_0000030"
    hostile(kind, folder, tmp_path / "mark")
    run_on_ranks(1, load_hostile, folder)
    assert not (tmp_path / "mark").exists()
    # The payload is a real one.
    pickle.loads(pickle.dumps(Payload(tmp_path / "mark"))).close()
    assert (tmp_path / "mark").exists()


@pytest.mark.slow
def test_whole_run_goes_on_from_the_one_before(tmp_path):
    """Reported, `latest` set back, records after it removed, and in the end the same numbers."""
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run", save_interval=2, exit_interval=4)
    checkpoints = tmp_path / "run" / "checkpoints"
    assert run_to_end(settings)[0] == 0
    shutil.copytree(tmp_path / "run", tmp_path / "whole")
    assert run_to_end(settings | {"run_name": "whole"})[0] == 0
    damaged = checkpoints / "iter_0000004" / "__0_0.distcp"
    flip(damaged)

    # A run that starts from it elsewhere writes nothing here.
    before = all_files(tmp_path / "run")
    elsewhere = {"run_name": "elsewhere", "load_dir": str(checkpoints), "exit_interval": 3}
    assert run_to_end(settings | elsewhere)[0] == 0
    assert all_files(tmp_path / "run") == before
    assert [record["iteration"] for record in records(tmp_path / "elsewhere", "train")] == [3]

    code, printed = run_to_end(settings | {"exit_interval": 3})
    assert code == 0 and f"damaged checkpoint: {damaged}: has changed since it was written" in printed
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "3"
    events = [event for event in records(tmp_path / "run", "event") if event["event"] == "damaged_checkpoint"]
    assert [event["iteration"] for event in events] == [2]
    assert events[0]["reason"].startswith(f"{damaged}: has changed since it was written")
    assert damaged.exists()
    for _ in range(2):  # to 4, which takes the place of the damaged one, and to 8
        assert run_to_end(settings)[0] == 0
    assert [record["iteration"] for record in records(tmp_path / "run", "train")] == list(range(1, 9))
    for name in ("iter_0000004", "iter_0000006", "iter_0000008"):
        assert files_of(checkpoints / name) == files_of(tmp_path / "whole" / "checkpoints" / name)


def test_two_runs_cannot_write_one_folder_under_two_names(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "other_name").symlink_to(tmp_path / "run")
    hold_run_folder(load_config(small_settings(tmp_path, "run"), {}))
    for folder, name in ((tmp_path, "run"), (tmp_path / "link", "run"), (tmp_path, "other_name")):
        with pytest.raises(ConfigError, match="another run is writing"):
            hold_run_folder(load_config(small_settings(folder, name), {}))
    assert release_run_folders() == 1


def test_the_newest_that_is_allowed_is_allowed(tmp_path, monkeypatch):
    there = {iteration: tmp_path / f"iter_{iteration:07d}" for iteration in (9, 6, 3)}
    monkeypatch.setattr("moe_exp.engine.runtime.from_first_rank", lambda make: make())
    monkeypatch.setattr(integrity, "usable", lambda path: list(there.values()))
    first = lambda path, there, damage_of: Source(there[0]) if there else None  # noqa: E731
    monkeypatch.setattr(integrity, "_first_whole", first)
    for newest, expected in ((None, 9), (10, 9), (9, 9), (8, 6), (6, 6), (3, 3)):
        assert find_source(tmp_path, checksums=False, newest=newest) == Source(there[expected]), newest
    assert find_source(tmp_path, checksums=False, newest=2) is None


def test_tokens_of_a_checkpoint_that_did_not_count_them():
    """They are those of its own SEQ_LEN, whatever that of the run that continues."""
    config = load_config({"preset": "cpu", "gpus_per_node": 1, "seq_len": 64}, {})
    common = {"progress": {"iteration": 3, "consumed_samples": 24}, "config": {"seq_len": 32}}
    assert resumed_progress(config, common, has_average=False).consumed_tokens == 24 * 32
    counted = common | {"progress": common["progress"] | {"consumed_tokens": 500}}
    assert resumed_progress(config, counted, has_average=False).consumed_tokens == 500
