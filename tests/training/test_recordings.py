"""Recordings of chosen iterations and ranks: traces, memory snapshots, what is refused of them; dumps of live
ranks, and `moe-exp watch diff` of dumps and of checkpoints.
"""

import gzip
import json
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.checkpoint.file_limit import no_file_over
from helpers.checkpoint.small_job import records, run_to_end, small_settings, write_tokens
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.cli import main
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.config.setting_types import iteration_ranges
from moe_exp.launch.machine_checks import check_machine
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.recordings import Recorder, dump_file, is_dumped

ROUTER = "decoder.layers.1.mlp.router.weight"


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


def test_trace_on_a_full_disk_does_not_end_the_run(tmp_path, caplog):
    recording = recorder(tmp_path, profile_iters="1,3", train_iters=5)
    with no_file_over(100):
        record(recording, 1)
    assert "could not write a recording to" in caplog.text
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
    assert first.startswith(f"PROFILE_ITERS={text}: must be comma-separated iterations (1 or higher)")
    assert second.startswith("PROFILE_RANKS=1,: must be ")


def test_what_cannot_be_profiled_is_refused_before_the_start(monkeypatch):
    def problems(**changes) -> list[str]:
        config = load_config({"preset": "cpu", "gpus_per_node": 2, "train_iters": 200} | changes, {})
        return list(config.problems())

    assert problems(profile_iters="200", profile_ranks="0,1") == []
    iterations, ranks = problems(profile_iters="201-202", profile_ranks="0,2")
    assert iterations.startswith("PROFILE_ITERS=201-202: must not exceed TRAIN_ITERS=200. Fix: ")
    assert ranks.startswith("PROFILE_RANKS=0,2: rank 2 does not exist") and "from 0 to 1" in ranks
    (line,) = problems(memory_snapshot="1-101")
    assert line.startswith("MEMORY_SNAPSHOT=1-101: has a range of 101 iterations") and "to 100" in line
    config = Config(memory_snapshot="1", num_workers=0)
    for num_gpus in (0, 8):
        monkeypatch.setattr("moe_exp.launch.machine_checks.count_gpus", lambda found=num_gpus: found)
        refused = any(line.startswith("MEMORY_SNAPSHOT=1: ") for line in check_machine(config))
        assert refused == (num_gpus == 0)


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


# Dumps


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of two iterations on two data parallel ranks: `a`, and `b` with another learning rate."""
    folder = tmp_path_factory.mktemp("dumps")
    write_tokens(folder)
    dumping_run(folder, "a")
    dumping_run(folder, "b", lr=0.002)
    return folder


def dumping_run(folder: Path, name: str, **changes: Any) -> None:
    values = {"gpus_per_node": 2, "train_iters": 2, "dump_iters": "1,2", "distributed_optimizer": False}
    code, printed = run_to_end(small_settings(folder, name, **values | changes))
    assert code == 0, printed


def diff(a: Path, b: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, list[str]]:
    code = main(["watch", "diff", str(a), str(b), *flags])
    return code, capsys.readouterr().out.splitlines()


def test_what_a_dump_holds(runs):
    found = load_file(dump_file(runs / "a", 2, 1))
    reader = CheckpointReader(runs / "a" / "checkpoints" / "iter_0000002")
    assert torch.equal(found[ROUTER], reader.read("decoder.layers.mlp.router.weight")[1])
    exp_avg = reader.read("optimizer.state.exp_avg.decoder.layers.mlp.router.weight")[1]
    assert torch.equal(found[f"exp_avg of {ROUTER}"], exp_avg)
    before = load_file(dump_file(runs / "a", 1, 1))
    moment = 0.9 * before[f"exp_avg of {ROUTER}"] + 0.1 * found[f"gradient of {ROUTER}"]
    torch.testing.assert_close(found[f"exp_avg of {ROUTER}"], moment, rtol=1e-5, atol=1e-9)
    assert not any(name.startswith("main weights") for name in found)  # fp32: they are the parameters
    kinds = [
        {name for name in found if (" of " in name) == bool(kind) and name.startswith(kind)}
        for kind in ("", "gradient", "exp_avg_sq")
    ]
    assert len(set(map(len, kinds))) == 1
    assert not list(runs.rglob("*.partial"))


def test_two_ranks_and_two_runs(runs, capsys):
    ranks = [dump_file(runs / "a", 2, rank) for rank in (0, 1)]
    code, lines = diff(*ranks, capsys)
    assert (code, lines[-1]) == (0, "THE SAME, in every value of every tensor")
    code, lines = diff(ranks[0].parent, dump_file(runs / "b", 2, 0).parent, capsys, "--top", "3")
    assert code == 1 and lines[-1].startswith("DIFFERENT: most in rank ")
    differing = [line for line in lines if line.startswith("differs: ")]
    shown = [float(line.partition("relative ")[2].split()[0]) for line in differing]
    assert len(shown) == 3 and shown == sorted(shown, reverse=True)


def test_one_value_by_hand(runs, capsys, tmp_path):
    ours = dump_file(runs / "a", 2, 0)
    tensors = load_file(ours)
    value = tensors[ROUTER].view(-1)[5]
    norm = float(tensors[ROUTER].double().norm())
    value += 0.5
    save_file(tensors, tmp_path / "other.safetensors")
    code, lines = diff(tmp_path / "other.safetensors", ours, capsys, "--json")
    found = json.loads(lines[0])
    (one,) = found["tensors"]
    assert (code, found["ok"], one["name"]) == (1, False, ROUTER)
    assert one["max_abs"] == pytest.approx(0.5, rel=1e-6)
    assert one["relative"] == pytest.approx(0.5 / norm, rel=1e-6)
    code, lines = diff(tmp_path / "other.safetensors", ours, capsys, "--rtol", "3")
    assert (code, lines[-1]) == (0, "THE SAME, up to relative errors of 3")


@pytest.mark.slow
def test_distributed_ranks_hold_ranges(runs, capsys):
    dumping_run(runs, "c", distributed_optimizer=True)
    dumps = [load_file(dump_file(runs / "c", 1, rank)) for rank in (0, 1)]
    states = [{name for name in dump if " of " in name} for dump in dumps]
    assert all(states) and not states[0] & states[1]
    code, lines = diff(dump_file(runs / "c", 1, 0), dump_file(runs / "a", 1, 0), capsys)
    assert code == 1 and lines[-1].startswith("DIFFERENT: ")
    assert any(line.startswith("only in B: ") for line in lines)
    code, lines = diff(runs / "a", runs / "c", capsys)
    assert (code, lines[-1]) == (0, "THE SAME, in every value of every tensor")


def test_checkpoints_with_their_optimizer(runs, capsys):
    assert diff(runs / "a", runs / "a", capsys)[1][-1] == "THE SAME, in every value of every tensor"
    code, lines = diff(runs / "a", runs / "b", capsys)
    assert code == 1
    settings = [line for line in lines if line.startswith(("setting: ", "progress: "))]
    assert settings == ["setting: lr 0.001 and 0.002"]
    assert any(" of decoder.layers." in line for line in lines if line.startswith("differs: "))
    code, lines = diff(runs / "a", runs / "b", capsys, "--weights-only")
    assert not any(" of decoder.layers." in line for line in lines if line.startswith("differs: "))


def test_what_cannot_be_compared_is_a_line(runs, capsys, tmp_path):
    ours, broken, other = dump_file(runs / "a", 1, 0), tmp_path / "broken.safetensors", tmp_path / "folder"
    broken.write_bytes(b"no dump")
    other.mkdir()
    for a, b, text in (
        (ours, tmp_path / "gone", "not found. Fix: "),
        (ours, broken, "cannot read the dump"),
        (ours.parent, ours, "is a folder, but B="),
        (ours.parent, other, "has no rank in common with B="),
        (ours.parent.parent, other, f"specify one iteration, such as {dump_file(runs / 'a', 2, 0).parent}."),
    ):
        assert main(["watch", "diff", str(a), str(b)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("moe-exp watch: ") and text in line


def test_dump_on_a_full_disk_does_not_end_the_run(tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "full", train_iters=2, dump_iters="1", dump_ranks="0")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "dumps").write_text("a file in the place of the folder")
    code, printed = run_to_end(settings)
    assert code == 0 and "could not dump the tensors of rank 0 at iteration 1: " in printed
