"""Saving: in the background as in the foreground; a save that fails leaves what was there; what is kept."""

from __future__ import annotations

import math
import os
import re
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from helpers.checkpoint.file_limit import no_file_over
from helpers.checkpoint.small_job import (
    build_small,
    end_run,
    files_of,
    records,
    small_settings,
    start_run,
    write_tokens,
)
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint import save as save_module
from moe_exp.checkpoint.format.folders import (
    Manifest,
    damages,
    iteration_folder,
    iterations,
    latest_iteration,
)
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.config import load_config
from moe_exp.planner.costs.params import checkpoint_bytes


def assert_whole(checkpoints: Path, expected: list[int]) -> None:
    assert iterations(checkpoints) == expected
    assert latest_iteration(checkpoints) == expected[-1]
    assert [iteration_folder(checkpoints, one).name for one in iterations(checkpoints)] == [
        f"iter_{i:07d}" for i in expected
    ]
    for iteration in expected:
        folder = checkpoints / f"iter_{iteration:07d}"
        manifest = Manifest.read(folder)
        assert manifest is not None
        assert set(manifest.files) == {path.name for path in folder.iterdir()} - {"manifest.json"}
        assert list(damages(folder, manifest.files)) == []


class Gate:
    """Holds the thread that writes files of a checkpoint until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self._open = threading.Event()
        write = save_module._write

        def wait_and_write(file: Any, data: Any) -> None:
            assert threading.current_thread().name.startswith("checkpoint")
            assert self._open.wait(60)
            write(file, data)

        monkeypatch.setattr(save_module, "_write", wait_and_write)

    def open(self) -> None:
        self._open.set()


def no_memory(data: Any) -> Any:
    raise RuntimeError("you tried to allocate 8 bytes")


def background(settings: dict[str, Any], port: int) -> list[float]:
    """On each of two ranks: the same state saved at once, and in the background while training continues."""
    from moe_exp import train
    from moe_exp.checkpoint import plan
    from moe_exp.checkpoint.save import CheckpointWriter, save
    from moe_exp.training.interval import Interval

    job, progress = build_small(settings, port)
    checkpoints, interval = job.folder.checkpoints, Interval(job.config, job.runtime, job.trained.model)

    def step() -> torch.Tensor:
        train.train_step(job, progress, interval, count_zeros=False)
        return torch.cat([parameter.detach().flatten() for parameter in job.trained.model[0].parameters()])

    step()
    save(job.config, job.runtime, checkpoints / "at_once", job.trained, progress)
    saver = CheckpointWriter(job.config, job.runtime, checkpoints)
    with pytest.MonkeyPatch.context() as monkeypatch:
        gate = Gate(monkeypatch)
        saver.begin(job.trained, progress)
        for _ in range(2):
            step()
            assert saver.is_writing
        gate.open()
        saved = saver.finish()
    assert saved is not None
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
    assert saved is not None
    assert saved.error.startswith("rank 1 on ")
    assert "File too large" in saved.error
    dist.barrier()
    assert sorted(path.name for path in checkpoints.glob("iter_*")) == ["iter_0000001"]
    dist.barrier()
    # Nor has one memory for a copy.
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(plan, "_copied", no_memory if dist.get_rank() == 1 else plan._copied)
        saver.begin(job.trained, progress)
        saved = saver.finish()
    assert saved is not None
    assert re.fullmatch(r"rank 1 on .*: you tried to allocate 8 bytes", saved.error), saved.error
    # Nor where there can be no folder.
    nowhere = CheckpointWriter(job.config, job.runtime, Path("/proc/checkpoints"))
    nowhere.begin(job.trained, progress)
    error = nowhere.finish().error
    assert re.fullmatch(r"rank 0 on .*: No such file or directory: /proc/checkpoints.*", error), error
    saver.begin(job.trained, progress)
    assert saver.finish().error == ""
    return step().tolist()[:100]


def at_once(settings: dict[str, Any], port: int) -> list[float]:
    """The same steps without any save."""
    from moe_exp import train
    from moe_exp.training.interval import Interval

    job, progress = build_small(settings, port)
    interval = Interval(job.config, job.runtime, job.trained.model)
    for _ in range(5):
        train.train_step(job, progress, interval, count_zeros=False)
    return torch.cat(
        [parameter.detach().flatten() for parameter in job.trained.model[0].parameters()]
    ).tolist()[:100]


@pytest.mark.parametrize("distributed", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_in_the_background_as_at_once(distributed, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(
        tmp_path, "async", gpus_per_node=2, ep=2, async_save=True, distributed_optimizer=distributed
    )
    weights = run_on_ranks(2, background, settings, free_port(), join=False)
    assert weights == run_on_ranks(2, at_once, settings | {"run_name": "plain"}, free_port(), join=False)
    assert latest_iteration(tmp_path / "async" / "checkpoints") == 4


def test_whole_run_in_the_background(tmp_path):
    """Training under way, two saves and the end wait for the one before; a rank's file that is not to be
    written becomes an event.
    """
    write_tokens(tmp_path)
    for name, asynchronous in (("at_once", False), ("background", True)):
        settings = small_settings(tmp_path, name, async_save=asynchronous, save_interval=2, train_iters=7)
        assert end_run(start_run(settings, tmp_path / f"{name}.out"), tmp_path / f"{name}.out") == [0]
        assert_whole(tmp_path / name / "checkpoints", [2, 4, 6, 7])
        events = [(event["event"], event["iteration"]) for event in records(tmp_path / name, "event")]
        assert events == [("start", 0), *(("checkpoint", i) for i in (2, 4, 6, 7)), ("end", 7)]
    for key in ("lm_loss", "grad_norm", "params_norm"):
        curves = [
            [record[key] for record in records(tmp_path / name, "train")]
            for name in ("at_once", "background")
        ]
        assert curves[0] == curves[1]
        assert len(curves[0]) == 7
    for iteration in (2, 4, 6, 7):
        one, other = (
            files_of(tmp_path / name / "checkpoints" / f"iter_{iteration:07d}")
            for name in ("at_once", "background")
        )
        assert one == other


@pytest.mark.parametrize("asynchronous", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_full_disk_costs_the_checkpoint_and_not_the_run(asynchronous, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(
        tmp_path, "full", async_save=asynchronous, save_interval=2, train_iters=3, exit_interval=2
    )
    out = tmp_path / "out"
    assert end_run(start_run(settings, out), out) == [0]
    before = files_of(tmp_path / "full" / "checkpoints" / "iter_0000002")
    settings |= {"train_iters": 7, "exit_interval": 0}
    assert end_run(start_run(settings, out, file_limit=100_000), out) == [1]
    assert [record["iteration"] for record in records(tmp_path / "full", "train")] == [1, 2, 3, 4, 5, 6, 7]
    events = [
        event for event in records(tmp_path / "full", "event") if event["event"].startswith("checkpoint")
    ]
    assert [(event["event"], event["iteration"]) for event in events] == [
        ("checkpoint", 2),
        *(("checkpoint_failed", i) for i in (4, 6, 7)),
    ]
    assert "File too large" in events[1]["reason"]
    (line,) = [line for line in out.read_text().splitlines() if line.startswith("moe-exp: ")]
    assert line.startswith("moe-exp: the last checkpoint, of iteration 7, was not written (rank 0 on ")
    assert "Traceback" not in out.read_text()
    assert_whole(tmp_path / "full" / "checkpoints", [2])
    assert files_of(tmp_path / "full" / "checkpoints" / "iter_0000002") == before
    assert end_run(start_run(settings, out), out) == [0]
    assert_whole(tmp_path / "full" / "checkpoints", [2, 4, 6, 7])


def on_a_full_disk(settings: dict[str, Any], port: int, disk: str) -> None:
    from moe_exp.checkpoint.save import CheckpointWriter, save

    job, progress = build_small(settings, port)
    save(job.config, job.runtime, Path(disk), job.trained, progress)
    free = os.statvfs(disk)
    (Path(disk) / "filler").write_bytes(bytes(free.f_bavail * free.f_frsize - 100_000))
    progress.iteration = 1
    saver = CheckpointWriter(job.config, job.runtime, Path(disk))
    saver.begin(job.trained, progress)
    saved = saver.finish()
    assert saved is not None
    assert "No space left on device" in saved.error
    assert_whole(Path(disk), [0])


def test_disk_that_is_really_full(tmp_path):
    write_tokens(tmp_path)
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "none", disk], capture_output=True
    ).returncode:
        pytest.skip("may not mount a file system")
    try:
        run_on_ranks(1, on_a_full_disk, small_settings(tmp_path, "run"), free_port(), str(disk), join=False)
    finally:
        subprocess.run(["umount", disk], check=True)


def retained(settings: dict[str, Any], port: int) -> dict[int, list[str]]:
    """Names in the checkpoints folder after each save, with a validation loss that falls until iteration 30
    and rises again.
    """
    from moe_exp.checkpoint.save import CheckpointWriter

    job, progress = build_small(settings, port)
    checkpoints = job.folder.checkpoints
    saver, names = CheckpointWriter(job.config, job.runtime, checkpoints, loaded=20), {}
    for progress.iteration in (10, 20, 30, 40, 50, 60, 60):
        loss = 2.0 + abs(progress.iteration - 30) / 10
        saver.begin(job.trained, progress, valid_loss=math.nan if progress.iteration == 20 else loss)
        assert saver.finish().error == ""
        names[progress.iteration] = [
            iteration_folder(checkpoints, one).name for one in iterations(checkpoints)
        ]
    # What a killed run leaves behind is gone after the next save, and what it had put aside is back.
    for name in ("iter_0000070.partial", "iter_0000005.removed", "iter_0000060.replaced"):
        (checkpoints / name).mkdir()
    (checkpoints / "iter_0000050").rename(checkpoints / "iter_0000050.replaced")
    progress.iteration = 70
    saver.begin(job.trained, progress)
    assert saver.finish().error == ""
    names[70] = [iteration_folder(checkpoints, one).name for one in iterations(checkpoints)]
    saver._thread.shutdown()
    # A start that continues from 60 and not from 70, which is damaged, or was given up, does not count it,
    # and removes it once it is passed.
    saver = CheckpointWriter(job.config, job.runtime, checkpoints, loaded=60)
    for progress.iteration in (65, 75):
        saver.begin(job.trained, progress)
        assert saver.finish().error == ""
        names[progress.iteration] = [
            iteration_folder(checkpoints, one).name for one in iterations(checkpoints)
        ]
    saver._thread.shutdown()
    return names


@pytest.mark.parametrize("async_save", [False, True])
def test_what_is_kept(async_save, tmp_path):
    write_tokens(tmp_path)
    kept = {"keep_last": 2, "keep_best": 1, "keep_every": 40}
    settings = small_settings(tmp_path, "kept", async_save=async_save, **kept)
    (names,) = run_on_ranks(1, retained, settings, free_port(), join=False)
    kept = {
        10: [10],
        20: [10, 20],
        30: [20, 30],
        40: [20, 30, 40],
        50: [20, 30, 40, 50],
        60: [20, 30, 40, 50, 60],
    }
    kept |= {70: [20, 30, 40, 60, 70], 65: [30, 40, 60, 65, 70], 75: [30, 40, 60, 65, 75]}
    assert names == {i: [f"iter_{j:07d}" for j in js] for i, js in kept.items()}
    checkpoints = tmp_path / "kept" / "checkpoints"
    assert_whole(checkpoints, [30, 40, 60, 65, 75])
    assert len([path for path in checkpoints.iterdir() if path.is_dir()]) == 5


def save_once(settings: dict[str, Any], port: int) -> int:
    from moe_exp.checkpoint.save import CheckpointWriter

    job, progress = build_small(settings, port)
    saver = CheckpointWriter(job.config, job.runtime, job.folder.checkpoints)
    saver.begin(job.trained, progress)
    return int(saver.finish().num_bytes)


@pytest.mark.parametrize(
    ("dtype", "layout"),
    [
        pytest.param("fp32", {"gpus_per_node": 2}, marks=pytest.mark.slow),
        ("bf16", {"gpus_per_node": 2, "ep": 2}),
    ],
)
def test_bytes_on_disk_are_those_of_the_parameters_and_the_optimizer(dtype, layout, tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(
        tmp_path, "size", dtype=dtype, hidden_size=128, moe_ffn_hidden_size=192, num_experts=16, **layout
    )
    computed = checkpoint_bytes(load_config(settings, {}))
    assert computed > 30e6
    sizes = run_on_ranks(2, save_once, settings, free_port(), join=False)
    assert sizes[0] == sizes[1]
    assert sizes[0] == pytest.approx(computed, rel=0.02)
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
    assert end_run(start_run(settings, tmp_path / "out"), tmp_path / "out") == [code]
    folders = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("iter_*"))
    assert folders == [f"iter_{iteration:07d}" for iteration in kept]
    memory = [record["peak_memory_bytes"] for record in records(tmp_path / "run", "train")]
    # Resident, so all of the model is in it; and a peak never gets less.
    assert memory == sorted(memory)
    assert memory[0] > 100 * 2**20
