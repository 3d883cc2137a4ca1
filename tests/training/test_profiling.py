"""Traces and memory snapshots of chosen iterations and ranks, and what is refused."""

import gzip
import json
import pickle
from types import SimpleNamespace

import pytest
import torch

from helpers.checkpoint.file_limit import no_file_over
from helpers.checkpoint.small_job import records, run_to_end, small_settings, write_tokens
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.launch.machine_checks import check_machine
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.dumps import is_dumped
from moe_exp.training.profiling import Recorder


def trained(tmp_path, name: str, **changes):
    """A small run to its end: its folder."""
    settings = small_settings(tmp_path, name, train_iters=4, save_at_end=False, mbsz=1, **changes)
    code, printed = run_to_end(settings)
    assert code == 0, printed
    return tmp_path / name


def test_trace_of_two_iterations_of_one_rank(tmp_path):
    write_tokens(tmp_path)
    plain = trained(tmp_path, "plain", gpus_per_node=2)
    run = trained(tmp_path, "run", gpus_per_node=2, profile_iters="2-3", profile_ranks="1")
    (trace,) = (run / "profile").iterdir()
    assert trace.name == "trace_rank_1_iter_2-3.json.gz"
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    assert names.count("aten::embedding") == 2 * 2  # iterations of two micro-batches
    assert "[memory]" in names
    assert any(event.get("args", {}).get("Input Dims") for event in events)
    losses = [[record["lm_loss"] for record in records(folder, "train")] for folder in (plain, run)]
    assert losses[0] == losses[1]
    assert not (plain / "profile").exists()


def recorder(folder, device: str = "cpu", **settings):
    rank = SimpleNamespace(rank=0, device=torch.device(device))
    return Recorder(load_config(settings, {}), rank, RunFolder(folder))


def record(recorder, *iterations: int) -> None:
    for iteration in iterations:
        recorder.begin(iteration)
        recorder.end(iteration)


def test_range_that_a_resume_has_begun_or_passed(tmp_path):
    settings = {"profile_iters": "10-12", "train_iters": 11}
    record(recorder(tmp_path, **settings), 11, 12)
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["trace_rank_0_iter_11-11.json.gz"]
    record(recorder(tmp_path / "none", **settings), 13)
    assert not (tmp_path / "none").exists()


def test_full_disk_does_not_end_the_run(tmp_path, caplog):
    recording = recorder(tmp_path, profile_iters="1,3", train_iters=5)
    with no_file_over(100):
        record(recording, 1)
    assert "no recording in" in caplog.text
    record(recording, 2, 3, 4)
    assert "trace_rank_0_iter_3-3.json.gz" in [path.name for path in (tmp_path / "profile").iterdir()]


def test_iteration_range():
    assert [iteration_ranges(text) for text in ("", "7", "5,10-12")] == [(), ((7, 7),), ((5, 5), (10, 12))]
    config = load_config({"dump_iters": "3, 10-12"}, {})
    assert [number for number in range(20) if is_dumped(config, number)] == [3, 10, 11, 12]


@pytest.mark.parametrize("text", ["0", "3-2", "x", "1-", "-3", "1,", "3,2", "2,2", "1-3,3"])
def test_iterations_that_cannot_be_read(text):
    with pytest.raises(ConfigError) as refused:
        load_config({"profile_iters": text, "profile_ranks": "1,"}, {})
    first, second = refused.value.problems
    assert first.startswith(
        f"PROFILE_ITERS={text}: must be an iteration from 1 on, the first and the last such"
    )
    assert second.startswith("PROFILE_RANKS=1,: must be ranks with commas such as 0,3, or all. Fix: ")


def test_what_cannot_be_profiled_is_refused_before_the_start(monkeypatch):
    def problems(**changes) -> list[str]:
        config = load_config({"preset": "cpu", "gpus_per_node": 2, "train_iters": 200} | changes, {})
        return list(config.problems())

    assert problems(profile_iters="200", profile_ranks="0,1") == []
    assert problems(profile_iters="201-202", profile_ranks="0,2") == [
        "PROFILE_ITERS=201-202: is after TRAIN_ITERS=200. Fix: name iterations up to 200.",
        "PROFILE_RANKS=0,2: there is no rank 2, the run has 2. Fix: name ranks from 0 to 1, or all.",
    ]
    assert problems(memory_snapshot="1-101") == [
        "MEMORY_SNAPSHOT=1-101: are 101 iterations, more than a viewer can load. Fix: name at most 100."
    ]
    config = Config(memory_snapshot="1", num_workers=0)
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 0)
    (line,) = (line for line in check_machine(config) if "MEMORY" in line)
    assert line.startswith(
        "MEMORY_SNAPSHOT=1: records the allocations on a CUDA device, this host has none. Fix: "
    )
    monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda: 8)
    assert [line for line in check_machine(config) if "MEMORY" in line] == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_snapshot_of_a_gpus_memory(tmp_path):
    recording = recorder(tmp_path, "cuda", memory_snapshot="2-3", profile_iters="3", train_iters=5)
    kept = []
    for iteration in range(1, 6):
        recording.begin(iteration)
        kept.append(torch.ones(iteration * 2**20, device="cuda"))
        recording.end(iteration)
    names = sorted(path.name for path in (tmp_path / "profile").iterdir())
    assert names == ["memory_rank_0_iter_2-3.pickle", "trace_rank_0_iter_3-3.json.gz"]
    snapshot = pickle.loads((tmp_path / "profile" / names[0]).read_bytes())
    sizes = [event["size"] for event in snapshot["device_traces"][0] if event["action"] == "alloc"]
    assert sizes == [2 * 4 * 2**20, 3 * 4 * 2**20]
    frames = [frame for event in snapshot["device_traces"][0] for frame in event["frames"]]
    assert any(frame["filename"] == __file__ for frame in frames)
    events = json.loads(gzip.decompress((tmp_path / "profile" / names[1]).read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
