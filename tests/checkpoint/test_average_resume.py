"""EMA_DECAY averages the weights of all iterations, and a resume continues the average in any layout."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.checkpoint.legs import LAYOUTS, Leg, run_legs, write_data
from helpers.relative_error import relative_error
from moe_exp.checkpoint.format.naming import KEEP_BYTES, logical_tensors
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.integrity import Verification
from moe_exp.checkpoint.load import resumed_progress
from moe_exp.checkpoint.state import Progress
from moe_exp.checkpoint.tools.diff import compare
from moe_exp.checkpoint.tools.reshape import Reshaping, reshape
from moe_exp.launch.machine_checks import bitsandbytes_problem
from moe_exp.planner.costs.params import checkpoint_bytes
from moe_exp.training import step as one_iteration

STEPS, SAVED, DECAY = 4, 2, 0.7
SLOW = pytest.mark.slow


def read(checkpoints: Path, iteration: int, state: str = "ema") -> dict[str, Tensor]:
    reader = CheckpointReader(checkpoints / f"iter_{iteration:07d}", keep_bytes=KEEP_BYTES)
    return {name: tensor.read() for name, tensor in logical_tensors(reader, state).items()}


def deviation(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of a tensor."""
    assert found.keys() == expected.keys() and len(found) > 30
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    return max(relative_error(found[name], expected[name]) for name in found)


def averaged(checkpoints: Path, iterations: list[int]) -> dict[str, Tensor]:
    """By the formula, from the fp32 weights of every iteration that is averaged."""
    weights = [read(checkpoints, iteration, "param") for iteration in iterations]
    shares = DECAY ** torch.arange(len(weights) - 1, -1, -1, dtype=torch.float64)
    shares /= shares.sum()
    return {
        name: sum(share * one[name].double() for share, one in zip(shares, weights, strict=True))
        for name in weights[0]
    }


def num_averaged(checkpoints: Path, iteration: int) -> int:
    return CheckpointReader(checkpoints / f"iter_{iteration:07d}").common()["progress"]["num_averaged"]


def settings_of(folder: Path, layout: str, **changes: Any) -> dict[str, Any]:
    return {"train_data": str(write_data(folder)), "ema_decay": DECAY, **LAYOUTS[layout], **changes}


def test_resumed_and_reshaped(tmp_path):
    settings = settings_of(tmp_path, "DP2", gbsz=4)
    whole = tmp_path / "whole"
    run_legs([Leg(settings, None, STEPS, dict.fromkeys(range(1, STEPS + 1), whole))])
    for iteration in (1, STEPS):
        found = read(whole, iteration)
        assert deviation(found, averaged(whole, list(range(1, iteration + 1)))) < 1e-6
        assert num_averaged(whole, iteration) == iteration
    assert deviation(found, read(whole, STEPS, "param")) > 1e-4
    source = whole / f"iter_{SAVED:07d}"
    assert list(Verification(source).findings()) == []
    other = reshape(source, tmp_path / "reshaped", Reshaping(experts="single")).folder
    same = compare(source, other, optimizer=True)
    assert same.is_within(0.0)
    assert sum(tensor.name.startswith("ema of ") for tensor in same.tensors) > 30
    again = Leg(settings, source, STEPS - SAVED, {STEPS: tmp_path / "again"})
    moved = settings_of(tmp_path, "TP2_ETP2", gbsz=4)
    run_legs([again, Leg(moved, other, STEPS - SAVED, {STEPS: tmp_path / "moved"})])
    assert deviation(read(tmp_path / "again", STEPS), read(whole, STEPS)) == 0
    assert deviation(read(tmp_path / "moved", STEPS), read(whole, STEPS)) < 1e-6


@SLOW
@pytest.mark.parametrize(
    ("saved_at", "loaded_at"),
    [
        ("one", ["one", "DP2", "EP2", "EP4", "TP2_EP2_ETP2"]),
        ("TP2_EP2_ETP2", ["one", "PP2_VPP2", "PP2_EP2", "TP2_EP2_ETP2"]),
        ("PP2_EP2", ["TP2_ETP2", "DP2 whole", "EP4", "PP2_EP2"]),
        ("DP2 whole", ["DP2 whole", "DP2", "EP4"]),
        ("PP2_VPP2", ["one", "EP2", "PP2_VPP2"]),
    ],
)
def test_every_layout(saved_at, loaded_at, tmp_path, record_property):
    settings = settings_of(tmp_path, saved_at)
    whole = tmp_path / "whole"
    run_legs([Leg(settings, None, STEPS, dict.fromkeys((SAVED, STEPS), whole))])
    given = (whole / f"iter_{SAVED:07d}", STEPS - SAVED)
    run_legs([Leg(settings_of(tmp_path, name), *given, {STEPS: tmp_path / name}) for name in loaded_at])
    for name in loaded_at:
        found = deviation(read(tmp_path / name, STEPS), read(whole, STEPS))
        record_property(name, found)
        assert found == 0 if name == saved_at else found < 1e-6


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "bf16 moments": {"dtype": "bf16", "optimizer_state_dtype": "bf16"},
    "sgd": {"optimizer": "sgd", "lr": 0.5},
    "sgd without momentum": {"optimizer": "sgd", "lr": 0.5, "sgd_momentum": 0.0, "dtype": "bf16"},
    "muon": {"optimizer": "muon", "distributed_optimizer": False},
    # wide enough for tensors of more than 4096 values, which have codes
    "adam8bit": {"optimizer": "adam8bit", "hidden_size": 64, "ffn_hidden_size": 96},
}


@SLOW
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer(name, tmp_path):
    """What a moved run has is the average of the weights before and of its own after."""
    if name == "adam8bit" and (reason := bitsandbytes_problem("CPU")):
        pytest.skip(reason)
    # fp16 begins with steps that are skipped, until the loss scale fits
    first = 24 if name == "fp16" else 0
    changes = {"warmup_iters": 0} | OPTIMIZERS[name]
    settings = settings_of(tmp_path, "DP2", **changes)
    whole, moved = tmp_path / "whole", tmp_path / "moved"
    end, saved = first + STEPS, first + SAVED
    run_legs([Leg(settings, None, end, dict.fromkeys(range(end + 1), whole))])
    source = whole / f"iter_{saved:07d}"
    assert list(Verification(source).findings()) == []
    run_legs([
        Leg(settings, source, STEPS - SAVED, {end: tmp_path / "again"}),
        Leg(settings_of(tmp_path, "TP2_ETP2", **changes), source, STEPS - SAVED,
            dict.fromkeys(range(saved + 1, end + 1), moved)),
    ])  # fmt: skip
    counts = [num_averaged(whole, iteration) for iteration in range(end + 1)]
    steps = [iteration for iteration in range(1, end + 1) if counts[iteration] > counts[iteration - 1]]
    assert counts[-1] == len(steps) and len(steps) >= STEPS
    assert (len(steps) < end) == (name == "fp16")
    assert deviation(read(whole, end), averaged(whole, steps)) < 1e-6
    # scales of 8-bit moments are found again but for rounding
    assert deviation(read(tmp_path / "again", end), read(whole, end)) <= 1e-6 * (name == "adam8bit")
    before = averaged(whole, [iteration for iteration in steps if iteration <= saved])
    share = sum(DECAY**n for n in range(SAVED, len(steps))) / sum(DECAY**n for n in range(len(steps)))
    after = averaged(moved, list(range(saved + 1, end + 1)))
    expected = {key: share * before[key] + (1 - share) * after[key] for key in after}
    assert deviation(read(moved, end), expected) < 1e-6


@pytest.mark.slow
def test_newly_set_and_dropped(tmp_path):
    """A new average starts with the loaded weights; EMA_DECAY=0 drops it; another optimizer keeps it."""
    settings = settings_of(tmp_path, "one", gbsz=2)
    plain = settings | {"ema_decay": 0.0}
    other = settings | {"optimizer": "sgd", "allow_other_optimizer": True}
    folders = {name: tmp_path / name for name in ("before", "set", "dropped", "other")}
    run_legs([
        Leg(plain, None, 2, {2: folders["before"]}),
        Leg(settings, folders["before"], 2, dict.fromkeys((2, 3, 4), folders["set"])),
        Leg(plain, folders["set"], 0, {4: folders["dropped"]}),
        Leg(other, folders["set"], 0, {4: folders["other"]}),
    ])  # fmt: skip
    assert num_averaged(folders["before"], 2) == 0
    assert deviation(read(folders["set"], 2), read(folders["before"], 2, "param")) == 0
    assert deviation(read(folders["set"], 4), averaged(folders["set"], [2, 3, 4])) < 1e-6
    assert num_averaged(folders["set"], 4) == 3
    assert read(folders["dropped"], 4) == {} and num_averaged(folders["dropped"], 4) == 0
    assert deviation(read(folders["other"], 4), read(folders["set"], 4)) == 0
    assert num_averaged(folders["other"], 4) == 3
    for name, of in (("set", settings), ("dropped", plain)):
        tensors = CheckpointReader(folders[name] / "iter_0000004").tensors.items()
        num_bytes = sum(one.num_bytes for key, one in tensors if "rng_state" not in key)
        assert num_bytes == checkpoint_bytes(Leg(of).config)


@pytest.mark.parametrize(
    ("decay", "has_average", "line", "number"),
    [
        (0.9, False, "EMA_DECAY=0.9: the moving average starts from the checkpoint's weights", 1),
        (0.0, True, "EMA_DECAY=0: the checkpoint's moving average of the weights is discarded", 0),
        (0.9, True, None, 7),
        (0.0, False, None, 7),
    ],
)
def test_one_line_says_so(decay, has_average, line, number, caplog):
    config = Leg({"ema_decay": decay, "gpus_per_node": 1}).config
    with caplog.at_level(logging.INFO):
        found = resumed_progress(config, {"progress": {"num_averaged": 7}}, has_average=has_average)
    assert found.num_averaged == number
    assert caplog.messages == ([line] if line else [])


def test_every_second_step_is_averaged_and_skipped_ones_do_not_count(monkeypatch):
    """The second step is at iteration 3, and the fourth at 5."""
    numbers = []
    monkeypatch.setattr(one_iteration, "update_average", lambda optimizer, **given: numbers.append(given))
    config = Leg({"ema_decay": 0.5, "average_every": 2, "gpus_per_node": 1}).config
    job = SimpleNamespace(config=config, trained=SimpleNamespace(optimizer=None))
    progress, averaged_at = Progress(), []
    for iteration in range(1, 7):
        progress.add(config, 8, flops=1)
        progress.skipped_iterations += iteration == 2
        if iteration != 2:
            one_iteration.average_weights(job, progress, SimpleNamespace(timers=None))
            averaged_at += [iteration] if len(numbers) > len(averaged_at) else []
    assert averaged_at == [3, 5] and progress.num_averaged == 2
    assert numbers == [{"decay": 0.5, "number": 1}, {"decay": 0.5, "number": 2}]
