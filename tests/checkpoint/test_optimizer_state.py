"""Each rank writes the optimizer's state that it owns: the tensors are Megatron's to the bit, and nothing is
gathered or copied.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.checkpoint.legs import MODEL, build_job, write_data
from helpers.ranks import RankError, free_port, run_on_ranks
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.config import load_config

PREFIX = "optimizer.state."
SLOW = pytest.mark.slow


def _trained(settings: dict[str, Any], port: int, *, steps: int = 2) -> tuple[Any, Any, Any]:
    """A job after some steps, and its progress."""
    from moe_exp import train
    from moe_exp.checkpoint.state import Progress
    from moe_exp.engine import runtime
    from moe_exp.training.interval import Interval

    config = load_config(MODEL | {"mbsz": 4} | settings, {})
    os.environ["MASTER_PORT"] = str(port)
    job = build_job(config, runtime.start(config))
    progress = Progress()
    interval = Interval(config, job.runtime, job.trained.model)
    for _ in range(steps):
        train.train_step(job, progress, interval, count_zeros=False)
    return job, progress, interval


def _state(job: Any) -> list[torch.Tensor]:
    from moe_exp.checkpoint.optimizer_state import owned_state

    return [
        value.clone()
        for owned in owned_state(job.trained.optimizer)
        for value in (owned.parameter.detach(), *owned.values.values())
    ]


def _without_weights(state: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value for index, value in enumerate(state) if index % 4]


def _equal(values: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(torch.equal(value, right) for value, right in zip(values, expected, strict=True))


def _save_as_megatron_does(job: Any, progress: Any, folder: Path) -> None:
    from moe_exp.checkpoint.state import CONTENT, sharding_metadata, weights_state, whole_state

    from megatron.core import dist_checkpointing

    weights = weights_state(job.runtime, job.trained.model, None)
    state = whole_state(job.config, job.runtime, job.trained, progress)
    del state["optimizer_shards"]
    chunks = weights if len(weights) > 1 else weights["model0"]
    state["optimizer"] = job.trained.optimizer.sharded_state_dict(
        chunks, metadata=sharding_metadata(job.runtime)
    )
    if job.runtime.is_first:
        folder.mkdir(parents=True)
        (folder.parent / "latest_checkpointed_iteration.txt").write_text(str(progress.iteration))
    torch.distributed.barrier()
    dist_checkpointing.save(state, str(folder), content_metadata=CONTENT)


def _load_as_megatron_does(job: Any, folder: Path) -> None:
    """The optimizer alone; the model's weights follow from it at the next step."""
    from moe_exp.checkpoint.state import sharding_metadata, weights_state

    from megatron.core import dist_checkpointing

    weights = weights_state(job.runtime, job.trained.model, None)
    chunks = weights if len(weights) > 1 else weights["model0"]
    asked = job.trained.optimizer.sharded_state_dict(
        chunks, is_loading=True, metadata=sharding_metadata(job.runtime)
    )
    job.trained.optimizer.load_state_dict(
        dist_checkpointing.load({"optimizer": asked}, str(folder))["optimizer"]
    )


def both_formats(settings: dict[str, Any], ports: list[int], folder: str) -> tuple[bool, bool]:
    """On one rank: writes both; whether a fresh job that reads Megatron's, and one of Megatron's that reads
    ours, has the same state.
    """
    from moe_exp.checkpoint.load import load
    from moe_exp.checkpoint.save import save
    from moe_exp.engine import runtime

    job, progress, _ = _trained(settings, ports[0])
    expected = _state(job)
    save(job.config, job.runtime, Path(folder) / "ours", job.trained, progress)
    _save_as_megatron_does(job, progress, Path(folder) / "theirs" / "iter_0000002")
    runtime.stop()
    fresh, _, _ = _trained(settings | {"seed": 1}, ports[1], steps=0)
    load(fresh.config, fresh.runtime, Path(folder) / "theirs", fresh.trained)
    by_us = _equal(_state(fresh), expected)
    runtime.stop()
    fresh, _, _ = _trained(settings | {"seed": 1}, ports[2], steps=0)
    _load_as_megatron_does(fresh, Path(folder) / "ours" / "iter_0000002")
    by_megatron = _equal(_without_weights(_state(fresh)), _without_weights(expected))
    runtime.stop()
    return by_us, by_megatron


LAYOUTS: dict[str, dict[str, Any]] = {
    # Halves of gated experts, of a gated dense layer and of the shared expert, and ranges over two data
    # parallel ranks.
    "TP2_EP2_ETP2": {
        "gpus_per_node": 4,
        "tp": 2,
        "ep": 2,
        "etp": 2,
        "moe_layer_freq": "0,1,1,1",
        "shared_expert_size": 16,
    },
    "DP2": {"gpus_per_node": 2},
}


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        ("DP2", "fp32"),
        *(
            pytest.param(*case, marks=SLOW)
            for case in [("DP2", "bf16"), ("TP2_EP2_ETP2", "fp32"), ("TP2_EP2_ETP2", "bf16")]
        ),
    ],
)
def test_same_tensors_as_megatrons_gathered_ones(layout, dtype, tmp_path):
    settings = LAYOUTS[layout] | {"dtype": dtype, "train_data": str(write_data(tmp_path))}
    ports = [free_port() for _ in range(3)]
    found = run_on_ranks(settings["gpus_per_node"], both_formats, settings, ports, str(tmp_path), join=False)
    assert set(found) == {(True, True)}
    ours, theirs = (CheckpointReader(tmp_path / name / "iter_0000002") for name in ("ours", "theirs"))
    assert {key: value.shape for key, value in ours.tensors.items()} == {
        key: value.shape for key, value in theirs.tensors.items()
    }
    assert all(torch.equal(ours.read(key), theirs.read(key)) for key in ours.tensors)
    # A rank's range cuts few parameters.
    num_chunks = [sum(len(value.chunks) for value in reader.tensors.values()) for reader in (ours, theirs)]
    assert num_chunks[0] < num_chunks[1] + 3 * 5 * 4 * settings["gpus_per_node"]


def counted_save(settings: dict[str, Any], port: int, folder: str) -> tuple[int, int]:
    """On one rank: bytes of optimizer state that it writes, and those of them that are not in the optimizer's
    own memory.
    """
    from moe_exp.checkpoint.optimizer_state import owned_state
    from moe_exp.checkpoint.save import save
    from moe_exp.checkpoint.state import whole_state

    job, progress, _ = _trained(settings, port, steps=1)
    own = {
        value.untyped_storage().data_ptr()
        for owned in owned_state(job.trained.optimizer)
        for value in owned.values.values()
    }
    shards = whole_state(job.config, job.runtime, job.trained, progress)["optimizer_shards"].values()
    foreign = [shard.data.nbytes for shard in shards if shard.data.untyped_storage().data_ptr() not in own]
    save(job.config, job.runtime, Path(folder), job.trained, progress)
    return sum(shard.data.nbytes for shard in shards), sum(foreign)


def test_nothing_is_gathered_or_copied(tmp_path):
    settings = {"gpus_per_node": 2, "train_data": str(write_data(tmp_path))}
    found = run_on_ranks(2, counted_save, settings, free_port(), str(tmp_path / "checkpoints"), join=False)
    reader = CheckpointReader(tmp_path / "checkpoints" / "iter_0000001")
    whole = sum(tensor.num_bytes for key, tensor in reader.tensors.items() if key.startswith(PREFIX))
    assert sum(num_bytes for num_bytes, _ in found) == whole
    # Ranges are even but for the alignment of buckets.
    assert all(0.45 < num_bytes / whole < 0.55 for num_bytes, _ in found)
    assert all(foreign == 0 for _, foreign in found)


def loaded_as(settings: dict[str, Any], port: int, source: str, again: str) -> None:
    """On one rank: loads, and saves what it has then."""
    from moe_exp.checkpoint.load import load
    from moe_exp.checkpoint.save import save

    job, _, _ = _trained(settings | {"seed": 1}, port, steps=0)
    progress = load(job.config, job.runtime, Path(source), job.trained)
    save(job.config, job.runtime, Path(again), job.trained, progress)


def saved_after_two_steps(settings: dict[str, Any], port: int, folder: str) -> None:
    from moe_exp.checkpoint.save import save

    job, progress, _ = _trained(settings, port)
    save(job.config, job.runtime, Path(folder), job.trained, progress)


DTYPES = [
    ("fp32", "bf16", True),
    ("fp32", "bf16", False),
    ("bf16", "fp32", False),
    ("bf16", "fp16", True),
    ("bf16", "fp16", False),
]


@pytest.mark.parametrize(
    ("before", "after", "distributed"),
    [("bf16", "fp32", True), *(pytest.param(*case, marks=SLOW) for case in DTYPES)],
)
def test_main_weights_and_moments_go_over_to_another_dtype(before, after, distributed, tmp_path):
    """To the bit, and the model's weights are those of the optimizer in the new dtype, on every data parallel
    rank.
    """
    settings = {
        "gpus_per_node": 2,
        "train_data": str(write_data(tmp_path)),
        "distributed_optimizer": distributed,
    }
    source, again = str(tmp_path / "source"), str(tmp_path / "again")
    run_on_ranks(2, saved_after_two_steps, settings | {"dtype": before}, free_port(), source, join=False)
    run_on_ranks(2, loaded_as, settings | {"dtype": after}, free_port(), source, again, join=False)
    first, second = (CheckpointReader(Path(name) / "iter_0000002") for name in (source, again))
    weights = [key for key in second.tensors if not key.startswith(PREFIX)]
    assert len(weights) == 10
    for key in weights:
        for name in ("param", "exp_avg", "exp_avg_sq"):
            assert torch.equal(second.read(f"{PREFIX}{name}.{key}"), first.read(f"{PREFIX}{name}.{key}")), key
        value = second.read(key)
        assert value.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[after]
        assert torch.equal(value, first.read(f"{PREFIX}param.{key}").to(value.dtype)), key


def one_key_for_every_expert(settings: dict[str, Any], port: int, folder: str) -> bool:
    """On one rank: writes the state under the keys of `singleton_local_shards`, and reads it back."""
    from moe_exp.checkpoint.format.keys import CheckpointKeys, model_state
    from moe_exp.checkpoint.optimizer_state import (
        OptimizerRequest,
        optimizer_groups,
        optimizer_shards,
        owned_state,
    )
    from moe_exp.checkpoint.state import sharding_metadata, unwrapped

    from megatron.core import dist_checkpointing

    job, _, _ = _trained(settings, port)
    trained, expected = job.trained, _state(job)
    metadata = sharding_metadata(job.runtime) | {"singleton_local_shards": True}
    weights = {"model0": model_state(unwrapped(trained.model[0]), metadata)}
    groups = optimizer_groups(trained.optimizer)
    dist_checkpointing.save(weights | {"shards": optimizer_shards(trained.optimizer, weights)}, folder)
    for owned in owned_state(trained.optimizer):
        for value in (owned.parameter.detach(), *owned.values.values()):
            value.zero_()
    keys = CheckpointKeys.read(Path(folder))
    weights = {"model0": model_state(unwrapped(trained.model[0]), metadata, keys)}
    request = OptimizerRequest(trained.optimizer, weights, keys)
    dist_checkpointing.load(weights | {"shards": request.shards}, folder)
    request.finish(groups, trained.model)
    return _equal(_state(job), expected)


def test_one_key_for_every_expert(tmp_path):
    folder = tmp_path / "singleton"
    folder.mkdir()
    settings = {"gpus_per_node": 2, "tp": 2, "etp": 2, "train_data": str(write_data(tmp_path))}
    assert run_on_ranks(2, one_key_for_every_expert, settings, free_port(), str(folder), join=False) == [
        True,
        True,
    ]
    reader = CheckpointReader(folder)
    assert reader.tensors[
        f"{PREFIX}exp_avg.decoder.layers.1.mlp.experts.experts.5.linear_fc1.weight_w"
    ].shape == (24, 32)


def overlapping_save(settings: dict[str, Any], port: int, folder: str) -> None:
    from moe_exp.checkpoint.state import Progress, whole_state

    from megatron.core import dist_checkpointing

    job, _, _ = _trained(settings, port, steps=0)
    state = whole_state(job.config, job.runtime, job.trained, Progress())
    if torch.distributed.get_rank():
        state["optimizer_shards"].pop("0")
    dist_checkpointing.save(state, folder)


def test_values_that_nobody_writes_are_noticed(tmp_path):
    settings = {"gpus_per_node": 2, "train_data": str(write_data(tmp_path))}
    (tmp_path / "folder").mkdir()
    with pytest.raises(RankError, match="Failed to validate global plan"):
        run_on_ranks(2, overlapping_save, settings, free_port(), str(tmp_path / "folder"), join=False)


def of_an_older_version(settings: dict[str, Any], ports: list[int], folder: str) -> bool:
    """On one rank: what Megatron writes without its distributed optimizer, as this package did before
    2026-12, is read into it.
    """
    from moe_exp.checkpoint.load import load
    from moe_exp.engine import runtime

    job, progress, _ = _trained(settings | {"distributed_optimizer": False}, ports[0])
    expected = _state(job)
    _save_as_megatron_does(job, progress, Path(folder) / "iter_0000002")
    steps = [group["step"] for group in job.trained.optimizer.param_groups]
    runtime.stop()
    fresh, _, _ = _trained(settings | {"seed": 1}, ports[1], steps=0)
    load(fresh.config, fresh.runtime, Path(folder), fresh.trained)
    return (
        _equal(_sorted(_state(fresh)), _sorted(expected))
        and [group["step"] for group in fresh.trained.optimizer.param_groups] == steps
    )


def _sorted(state: list[torch.Tensor]) -> list[torch.Tensor]:
    """Flat, in an order that does not depend on that of the optimizer."""
    return sorted(
        (value.flatten() for value in state),
        key=lambda value: (str(value.dtype), value.numel(), value.tolist()),
    )


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=SLOW)])
def test_checkpoint_of_an_older_version_without_the_distributed_optimizer(dtype, tmp_path):
    settings = {"gpus_per_node": 1, "dtype": dtype, "train_data": str(write_data(tmp_path))}
    ports = [free_port(), free_port()]
    assert run_on_ranks(1, of_an_older_version, settings, ports, str(tmp_path / "old"), join=False) == [True]
    assert not any(
        key.startswith(f"{PREFIX}param.")
        for key in CheckpointReader(tmp_path / "old" / "iter_0000002").tensors
    )
