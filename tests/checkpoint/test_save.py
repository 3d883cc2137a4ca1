"""Saving: in the background as in the foreground; a save that fails leaves what was there; what is kept."""

import math
import re
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist

from helpers.checkpoint import small_job
from helpers.checkpoint.file_limit import no_file_over
from helpers.checkpoint.saving import save
from helpers.checkpoint.small_job import files_of, records, run_to_end, small_settings, write_tokens
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint import save as save_module
from moe_exp.checkpoint.format.folders import Manifest, damages, latest_iteration
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.config import load_config
from moe_exp.planner.costs.params import checkpoint_bytes
from moe_exp.runs.run_folder import iterations
from moe_exp.training import loop
from moe_exp.training.interval import Interval


def names_of(iterations: list[int]) -> list[str]:
    return [f"iter_{iteration:07d}" for iteration in iterations]


def assert_whole(checkpoints: Path, expected: list[int]) -> None:
    assert iterations(checkpoints) == expected
    assert latest_iteration(checkpoints) == expected[-1]
    assert sorted(path.name for path in checkpoints.iterdir() if path.is_dir()) == names_of(expected)
    for name in names_of(expected):
        written = Manifest.read(checkpoints / name).files
        assert {path.name for path in (checkpoints / name).iterdir()} == {*written, "manifest.json"}
        assert list(damages(checkpoints / name, written)) == []


def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Holds the thread that writes files of a checkpoint until the event is set."""
    is_open, write = threading.Event(), save_module.write_rank_files

    def wait_and_write(*arguments: Any) -> save_module.Written:
        assert threading.current_thread().name.startswith("checkpoint")
        assert is_open.wait(60)
        return write(*arguments)

    monkeypatch.setattr(save_module, "write_rank_files", wait_and_write)
    return is_open


def weights_of(job: Any) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in job.trained.model[0].parameters()])


def save_with(saver: Any, job: Any, progress: Any, **options: Any) -> Any:
    """The result of a save."""
    saver.begin(job.trained, progress, **options)
    return saver.finish()


def background(settings: dict[str, Any], port: int) -> list[float]:
    """On each of two ranks: the same state saved at once, and in the background while training continues."""
    job, progress = small_job.build_small(settings, port)
    checkpoints, interval = job.folder.checkpoints, Interval(job.config, job.runtime, job.trained.model)

    def step() -> torch.Tensor:
        loop.train_step(job, progress, interval, count_zeros=False)
        return weights_of(job)

    step()
    save(job.config, job.runtime, checkpoints / "at_once", job.trained, progress)
    saver = CheckpointWriter(job.config, job.runtime, checkpoints)
    with pytest.MonkeyPatch.context() as monkeypatch:
        is_open = gate(monkeypatch)
        saver.begin(job.trained, progress)
        for _ in range(2):
            step()
            assert saver.is_writing
        is_open.set()
        saved = saver.finish()
    assert (saved.iteration, saved.error) == (1, "")
    assert not saver.is_pending
    one, other = checkpoints / "at_once" / "iter_0000001", checkpoints / "iter_0000001"
    assert files_of(one) == files_of(other)
    assert len(files_of(one)) == 2
    assert (one / ".metadata").read_bytes() == (other / ".metadata").read_bytes()
    assert read_common(one) == read_common(other)
    assert read_common(one)["progress"]["iteration"] == 1

    # One rank cannot write: all hear of it, also where the error comes in the thread.
    with no_file_over(20_000 if dist.get_rank() == 1 else 1 << 30):
        saver.begin(job.trained, progress)
        step()
        saved = saver.finish()
    assert re.fullmatch(r"rank 1 on .*File too large.*", saved.error), saved.error
    dist.barrier()
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == ["iter_0000001"]
    dist.barrier()
    # Nor has one memory for a copy.
    with pytest.MonkeyPatch.context() as monkeypatch:
        if dist.get_rank() == 1:
            no_memory = RuntimeError("you tried to allocate 8 bytes")
            monkeypatch.setattr(save_module.CheckpointPlan, "staged", Mock(side_effect=no_memory))
        error = save_with(saver, job, progress).error
    assert re.fullmatch(r"rank 1 on .*: you tried to allocate 8 bytes", error), error
    # Nor where there can be no folder.
    nowhere = CheckpointWriter(job.config, job.runtime, Path("/proc/checkpoints"))
    error = save_with(nowhere, job, progress).error
    assert re.fullmatch(r"rank 0 on .*: No such file or directory: /proc/checkpoints.*", error), error
    assert save_with(saver, job, progress).error == ""
    return step().tolist()[:100]


def at_once(settings: dict[str, Any], port: int) -> list[float]:
    """The same steps without any save."""
    job, progress = small_job.build_small(settings, port)
    interval = Interval(job.config, job.runtime, job.trained.model)
    for _ in range(5):
        loop.train_step(job, progress, interval, count_zeros=False)
    return weights_of(job).tolist()[:100]


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_the_background_as_at_once(distributed, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "async", gpus_per_node=2, ep=2, async_save=True)
    settings["distributed_optimizer"] = distributed
    weights = run_on_ranks(2, background, settings, free_port(), join=False)
    assert weights == run_on_ranks(2, at_once, settings | {"run_name": "plain"}, free_port(), join=False)
    assert latest_iteration(tmp_path / "async" / "checkpoints") == 4


@pytest.mark.slow
def test_whole_run_in_the_background(tmp_path):
    """Training under way, two saves and the end wait for the one before."""
    write_tokens(tmp_path)
    for name, asynchronous in (("at_once", False), ("background", True)):
        settings = small_settings(tmp_path, name, async_save=asynchronous, save_interval=2, train_iters=7)
        assert run_to_end(settings)[0] == 0
        assert_whole(tmp_path / name / "checkpoints", [2, 4, 6, 7])
        events = [(event["event"], event["iteration"]) for event in records(tmp_path / name, "event")]
        assert events == [("start", 0), *(("checkpoint", i) for i in (2, 4, 6, 7)), ("end", 7)]
    for name in names_of([2, 4, 6, 7]):
        one, other = (files_of(tmp_path / run / "checkpoints" / name) for run in ("at_once", "background"))
        assert one == other


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_full_disk_costs_the_checkpoint_and_not_the_run(asynchronous, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "full", async_save=asynchronous, save_interval=2, train_iters=7)
    out, checkpoints = tmp_path / "out", tmp_path / "full" / "checkpoints"
    assert run_to_end(settings | {"train_iters": 3, "exit_interval": 2})[0] == 0
    before = files_of(checkpoints / "iter_0000002")
    assert small_job.end_run(small_job.start_run(settings, out, file_limit=100_000), out) == [1]
    assert [record["iteration"] for record in records(tmp_path / "full", "train")] == [1, 2, 3, 4, 5, 6, 7]
    events = [(event["event"], event["iteration"]) for event in records(tmp_path / "full", "event")]
    events = [event for event in events if event[0].startswith("checkpoint")]
    assert events == [("checkpoint", 2), *(("checkpoint_failed", i) for i in (4, 6, 7))]
    (line,) = [line for line in out.read_text().splitlines() if line.startswith("moe-exp: ")]
    assert re.match(r"moe-exp: .* last checkpoint, at iteration 7 .*rank 0 on .*File too large", line), line
    assert "Traceback" not in out.read_text()
    assert_whole(checkpoints, [2])
    assert files_of(checkpoints / "iter_0000002") == before
    assert run_to_end(settings)[0] == 0
    assert_whole(checkpoints, [2, 4, 6, 7])


def retained(settings: dict[str, Any], port: int) -> dict[int, list[int]]:
    """The checkpoints after each save, with a validation loss that falls until iteration 30, then rises."""
    job, progress = small_job.build_small(settings, port)
    checkpoints = job.folder.checkpoints
    saver, found = CheckpointWriter(job.config, job.runtime, checkpoints, loaded=20), {}
    for progress.iteration in (10, 20, 30, 40, 50, 60, 60):
        loss = 2.0 + abs(progress.iteration - 30) / 10
        loss = math.nan if progress.iteration == 20 else loss
        assert save_with(saver, job, progress, valid_loss=loss).error == ""
        found[progress.iteration] = iterations(checkpoints)
    # What a killed run leaves behind is gone after the next save, and what it had put aside is back.
    for name in ("iter_0000070.partial", "iter_0000005.removed", "iter_0000060.replaced"):
        (checkpoints / name).mkdir()
    (checkpoints / "iter_0000050").rename(checkpoints / "iter_0000050.replaced")
    progress.iteration = 70
    assert save_with(saver, job, progress).error == ""
    found[70] = iterations(checkpoints)
    saver._thread.shutdown()
    # A start that continues from 60 and not from 70, which is damaged, or was given up, does not count it,
    # and removes it once it is passed.
    saver = CheckpointWriter(job.config, job.runtime, checkpoints, loaded=60)
    for progress.iteration in (65, 75):
        assert save_with(saver, job, progress).error == ""
        found[progress.iteration] = iterations(checkpoints)
    saver._thread.shutdown()
    return found


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_kept(async_save, tmp_path):
    write_tokens(tmp_path)
    kept = {"keep_last": 2, "keep_best": 1, "keep_every": 40}
    settings = small_settings(tmp_path, "kept", async_save=async_save, **kept)
    (found,) = run_on_ranks(1, retained, settings, free_port(), join=False)
    assert found == {
        10: [10], 20: [10, 20], 30: [20, 30], 40: [20, 30, 40], 50: [20, 30, 40, 50],
        60: [20, 30, 40, 50, 60], 70: [20, 30, 40, 60, 70], 65: [30, 40, 60, 65, 70],
        75: [30, 40, 60, 65, 75],
    }  # fmt: skip
    assert_whole(tmp_path / "kept" / "checkpoints", [30, 40, 60, 65, 75])


def save_once(settings: dict[str, Any], port: int) -> int:
    job, progress = small_job.build_small(settings, port)
    saver = CheckpointWriter(job.config, job.runtime, job.folder.checkpoints)
    return int(save_with(saver, job, progress).num_bytes)


@pytest.mark.parametrize(("dtype", "ep"), [pytest.param("fp32", 1, marks=pytest.mark.slow), ("bf16", 2)])
def test_bytes_on_disk_are_those_of_the_parameters_and_the_optimizer(dtype, ep, tmp_path):
    write_tokens(tmp_path)
    sizes = {"hidden_size": 128, "moe_ffn_hidden_size": 192, "num_experts": 16}
    settings = small_settings(tmp_path, "size", dtype=dtype, gpus_per_node=2, ep=ep, **sizes)
    computed = checkpoint_bytes(load_config(settings, {}))
    assert computed > 30e6
    one, other = run_on_ranks(2, save_once, settings, free_port(), join=False)
    assert one == other == pytest.approx(computed, rel=0.02)
    folder = tmp_path / "size" / "checkpoints" / "iter_0000000"
    on_disk = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert sum(on_disk.values()) == pytest.approx(computed, rel=0.02)
    shares = [size for name, size in on_disk.items() if name.endswith(".distcp")]
    assert max(shares) < 0.55 * computed  # either rank wrote its part


@pytest.mark.parametrize(
    ("changes", "kept", "code"),
    [
        ({}, [], 0),
        ({"save_interval": 2, "async_save": True}, [2], 0),
        ({"exit_interval": 2, "save_interval": 1}, [1, 2], 0),
        ({"exit_interval": 2}, [], 1),  # stopped, and the same command would begin anew
    ],
)
def test_nothing_is_saved_at_the_end_where_that_is_asked(changes, kept, code, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run", train_iters=3, save_at_end=False, **changes)
    assert run_to_end(settings)[0] == code
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("iter_*"))
    assert folders == names_of(kept)
    memory = [record["peak_memory_bytes"] for record in records(tmp_path / "run", "train")]
    # Resident, so all of the model is in it; and a peak never gets less.
    assert memory == sorted(memory)
    assert memory[0] > 100 * 2**20
