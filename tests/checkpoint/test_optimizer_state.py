"""Each rank writes the optimizer's state that it owns: Megatron's to the bit, nothing gathered or copied."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from helpers.checkpoint.legs import Leg, run_legs, start_job, write_data
from helpers.checkpoint.saving import save
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint import optimizer_state
from moe_exp.checkpoint import save as save_module
from moe_exp.checkpoint import state as state_module
from moe_exp.checkpoint.format.keys import model_state
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.load import load
from moe_exp.checkpoint.optimizer_state import owned_state
from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.checkpoint.state import Progress, sharding_metadata, unwrapped, whole_state
from moe_exp.engine import runtime
from moe_exp.training import loop
from moe_exp.training.interval import Interval

from megatron.core import dist_checkpointing

PREFIX = "optimizer.state."
SLOW = pytest.mark.slow


def _trained(settings: dict[str, Any], port: int, *, steps: int = 2) -> tuple[Any, Any]:
    """A job after some steps, and its progress."""
    job = start_job({"mbsz": 4} | settings, port)
    progress = Progress()
    interval = Interval(job.config, job.runtime, job.trained.model)
    for _ in range(steps):
        loop.train_step(job, progress, interval, count_zeros=False)
    return job, progress


def _values(job: Any) -> list[torch.Tensor]:
    """Every parameter and its state, in place."""
    owned = owned_state(job.trained.optimizer)
    return [value for one in owned for value in (one.parameter.detach(), *one.values.values())]


def _state(job: Any) -> list[torch.Tensor]:
    return [value.clone() for value in _values(job)]


def _equal(values: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(value, right) for value, right in zip(values, expected, strict=True))


def _as_megatron_asks(job: Any, **options: Any) -> Any:
    """Megatron's sharded state of the optimizer."""
    weights = state_module.weights_state(job.runtime, job.trained.model, None)
    chunks = weights if len(weights) > 1 else weights["model0"]
    metadata = sharding_metadata(job.runtime)
    return job.trained.optimizer.sharded_state_dict(chunks, metadata=metadata, **options)


def _save_as_megatron_does(job: Any, progress: Any, folder: Path) -> None:
    state = whole_state(job.config, job.runtime, job.trained, progress)
    del state["optimizer_shards"]
    state["optimizer"] = _as_megatron_asks(job)
    if job.runtime.is_first:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(progress.iteration))
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata=state_module.CONTENT)


def _load_as_megatron_does(job: Any, folder: Path) -> None:
    """The optimizer alone; the model's weights follow from it at the next step."""
    asked = {"optimizer": _as_megatron_asks(job, is_loading=True)}
    job.trained.optimizer.load_state_dict(dist_checkpointing.load(asked, str(folder))["optimizer"])


def both_formats(settings: dict[str, Any], ports: list[int], folder: str) -> tuple[bool, bool]:
    """On one rank, writing both: whether we read Megatron's state, and Megatron ours, without a change."""
    job, progress = _trained(settings, ports[0])
    expected = _state(job)
    save(job.config, job.runtime, Path(folder) / "ours", job.trained, progress)
    _save_as_megatron_does(job, progress, Path(folder) / "theirs" / "iter_0000002")
    runtime.stop()
    fresh, _ = _trained(settings | {"seed": 1}, ports[1], steps=0)
    load(fresh.config, fresh.runtime, Path(folder) / "theirs", fresh.trained)
    by_us = _equal(_state(fresh), expected)
    runtime.stop()
    fresh, _ = _trained(settings | {"seed": 1}, ports[2], steps=0)
    _load_as_megatron_does(fresh, Path(folder) / "ours" / "iter_0000002")
    # every fourth is a weight, which follows from the main weights at the next step
    pairs = zip(_state(fresh), expected, strict=True)
    by_megatron = all(torch.equal(*pair) for index, pair in enumerate(pairs) if index % 4)
    runtime.stop()
    return by_us, by_megatron


LAYOUTS: dict[str, dict[str, Any]] = {
    # Halves of gated experts, of a gated dense layer and of the shared expert, and ranges over two data
    # parallel ranks.
    "TP2_EP2_ETP2": {
        "gpus_per_node": 4, "tp": 2, "ep": 2, "etp": 2, "moe_layer_freq": "0,1,1,1", "shared_expert_size": 16,
    },
    "DP2": {"gpus_per_node": 2},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=SLOW)])
@pytest.mark.parametrize("layout", ["DP2", pytest.param("TP2_EP2_ETP2", marks=SLOW)])
def test_same_tensors_as_megatrons_gathered_ones(layout, dtype, tmp_path):
    settings = LAYOUTS[layout] | {"dtype": dtype, "train_data": str(write_data(tmp_path))}
    ports = [free_port() for _ in range(3)]
    found = run_on_ranks(settings["gpus_per_node"], both_formats, settings, ports, str(tmp_path), join=False)
    assert set(found) == {(True, True)}
    ours, theirs = (CheckpointReader(tmp_path / name / "iter_0000002") for name in ("ours", "theirs"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    assert all(torch.equal(ours.read(key), theirs.read(key)) for key in ours.tensors)
    # A rank's range cuts few parameters.
    num_chunks = [sum(len(value.chunks) for value in reader.tensors.values()) for reader in (ours, theirs)]
    assert num_chunks[0] < num_chunks[1] + 3 * 5 * 4 * settings["gpus_per_node"]


def counted_save(settings: dict[str, Any], port: int, folder: str) -> tuple[int, int]:
    """On one rank: bytes of optimizer state that it writes, and those not in the optimizer's own memory."""
    job, progress = _trained(settings, port, steps=1)
    own = {
        value.untyped_storage().data_ptr()
        for owned in owned_state(job.trained.optimizer)
        for value in owned.values.values()
    }
    shards = whole_state(job.config, job.runtime, job.trained, progress)["optimizer_shards"]
    foreign = [shard.data.nbytes for shard in shards if shard.data.untyped_storage().data_ptr() not in own]
    save(job.config, job.runtime, Path(folder), job.trained, progress)
    return sum(shard.data.nbytes for shard in shards), sum(foreign)


def test_nothing_is_gathered_or_copied(tmp_path):
    settings = {"gpus_per_node": 2, "train_data": str(write_data(tmp_path))}
    found = run_on_ranks(2, counted_save, settings, free_port(), str(tmp_path / "checkpoints"), join=False)
    sizes, foreign = zip(*found, strict=True)
    tensors = CheckpointReader(tmp_path / "checkpoints" / "iter_0000001").tensors
    whole = sum(tensor.num_bytes for key, tensor in tensors.items() if key.startswith(PREFIX))
    assert sum(sizes) == whole and foreign == (0, 0)
    # Ranges are even but for the alignment of buckets.
    assert all(0.45 < num_bytes / whole < 0.55 for num_bytes in sizes)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize(
    ("before", "after"),
    [("bf16", "fp32"), *(pytest.param(*case, marks=SLOW) for case in (("fp32", "bf16"), ("bf16", "fp16")))],
)
def test_main_weights_and_moments_go_over_to_another_dtype(before, after, distributed, tmp_path):
    """To the bit, and the model's weights are those of the optimizer, on every data parallel rank."""
    settings = {"gpus_per_node": 2, "distributed_optimizer": distributed}
    settings["train_data"] = str(write_data(tmp_path))
    source, again = tmp_path / "source", tmp_path / "again"
    first = Leg(settings | {"dtype": before}, None, 2, {2: source})
    run_legs([first, Leg(settings | {"dtype": after, "seed": 1}, source, 0, {2: again})])
    first, second = (CheckpointReader(folder / "iter_0000002") for folder in (source, again))
    weights = [key for key in second.tensors if not key.startswith(PREFIX)]
    assert len(weights) == 10
    for key in weights:
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(second.read(f"{PREFIX}{name}.{key}"), first.read(f"{PREFIX}{name}.{key}")), key
        value = second.read(key)
        assert value.dtype == DTYPES[after]
        assert torch.equal(value, first.read(f"{PREFIX}param.{key}").to(value.dtype)), key


def one_key_for_every_expert(settings: dict[str, Any], port: int, folder: str) -> bool:
    """On one rank: writes the state under the keys of `singleton_local_shards`, and reads it back."""
    job, _ = _trained(settings, port)
    trained, expected = job.trained, _state(job)
    metadata = sharding_metadata(job.runtime) | {"singleton_local_shards": True}
    weights = {"model0": model_state(unwrapped(trained.model[0]), metadata)}
    groups = optimizer_state.optimizer_groups(trained.optimizer)
    shards = list(optimizer_state.shards_of(owned_state(trained.optimizer), weights))
    dist_checkpointing.save(weights | {"shards": shards}, folder)
    for value in _values(job):
        value.zero_()
    reader = CheckpointReader(Path(folder))
    weights = {"model0": model_state(unwrapped(trained.model[0]), metadata, reader)}
    request = optimizer_state.OptimizerRequest(trained.optimizer, weights, reader)
    dist_checkpointing.load(weights | {"shards": request.shards}, folder)
    request.finish(groups, trained.model)
    return _equal(_state(job), expected)


def test_one_key_for_every_expert(tmp_path):
    folder = tmp_path / "singleton"
    folder.mkdir()
    settings = {"gpus_per_node": 2, "tp": 2, "etp": 2, "train_data": str(write_data(tmp_path))}
    args = (one_key_for_every_expert, settings, free_port(), str(folder))
    assert run_on_ranks(2, *args, join=False) == [True, True]
    key = f"{PREFIX}exp_avg.decoder.layers.1.mlp.experts.experts.5.linear_fc1.weight_w"
    assert CheckpointReader(folder).tensors[key].shape == (24, 32)


def save_without_a_shard(settings: dict[str, Any], port: int, folder: str) -> str:
    """The error of a save in which rank 1 forgets a piece."""
    job, progress = _trained(settings, port, steps=0)

    def without_a_shard(*arguments: Any) -> dict[str, Any]:
        state = whole_state(*arguments)
        if torch.distributed.get_rank():
            state["optimizer_shards"].pop(0)
        return state

    writer = CheckpointWriter(job.config, job.runtime, Path(folder))
    with patch.object(save_module, "whole_state", without_a_shard):
        writer.begin(job.trained, progress)
    return writer.finish().error


def test_values_that_nobody_writes_are_noticed(tmp_path):
    settings = {"gpus_per_node": 2, "train_data": str(write_data(tmp_path))}
    args = (save_without_a_shard, settings, free_port(), str(tmp_path / "checkpoints"))
    for error in run_on_ranks(2, *args, join=False):
        assert re.search(r"optimizer\.state\.\S+: only \d+ of \d+ values were written", error), error
    assert list((tmp_path / "checkpoints").glob("iter_*")) == []


def _sorted(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat, in an order that does not depend on that of the optimizer."""
    flat = (value.flatten() for value in state)
    return sorted(flat, key=lambda value: (str(value.dtype), value.numel(), value.tolist()))


def of_an_older_version(settings: dict[str, Any], ports: list[int], folder: str) -> bool:
    """On one rank: what Megatron's other optimizer writes, as this package did before 2026-12, is read."""
    job, progress = _trained(settings | {"distributed_optimizer": False}, ports[0])
    expected = _state(job)
    _save_as_megatron_does(job, progress, Path(folder) / "iter_0000002")
    steps = [group["step"] for group in job.trained.optimizer.param_groups]
    runtime.stop()
    fresh, _ = _trained(settings | {"seed": 1}, ports[1], steps=0)
    load(fresh.config, fresh.runtime, Path(folder), fresh.trained)
    assert [group["step"] for group in fresh.trained.optimizer.param_groups] == steps
    return _equal(_sorted(_state(fresh)), _sorted(expected))


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_checkpoint_of_an_older_version_without_the_distributed_optimizer(dtype, tmp_path):
    settings = {"gpus_per_node": 1, "dtype": dtype, "train_data": str(write_data(tmp_path))}
    ports = [free_port(), free_port()]
    assert run_on_ranks(1, of_an_older_version, settings, ports, str(tmp_path / "old"), join=False) == [True]
    tensors = CheckpointReader(tmp_path / "old" / "iter_0000002").tensors
    assert not any(key.startswith(f"{PREFIX}param.") for key in tensors)
