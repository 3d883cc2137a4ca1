"""How a case ended, read from what it left."""

import json
from pathlib import Path

import pytest

from moe_exp.config import load_config
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies import child_runs
from moe_exp.studies.child_runs import Case, why_it_failed
from moe_exp.studies.sweep.table import Result, result_of

TORCHRUN_KILLED = """
E1121 api.py:882] failed (exitcode: -9) local_rank: 1 (pid: 7) of binary: python
Failures:
[1]:
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 6)
  traceback : Signal 15 (SIGTERM) received by PID 6
Root Cause (first observed failure):
[0]:
  rank      : 1 (local_rank: 1)
  exitcode  : -9 (pid: 7)
  traceback : Signal 9 (SIGKILL) received by PID 7
Run failed: 0 of 10 iterations in 0:00:05
  the same command again continues
"""
TORCHRUN_ERROR = """
moe-exp: warning: MBSZS is not a setting; did you mean MBSZ?
moe-exp: rank 1 on node0 failed: RuntimeError: shapes do not match
Traceback (most recent call last):
RuntimeError: shapes do not match
moe-exp: rank 0 on node0 failed: RuntimeError: Connection closed by peer
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Run failed: 0 of 10 iterations in 0:00:05
"""


@pytest.mark.parametrize(
    "line",
    [
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.",
        "moe-exp: rank 0 on vm failed: RuntimeError: [enforce] DefaultCPUAllocator: can't allocate memory: 9",
        "torch.distributed.DistBackendError: NCCL error: unhandled, Cuda failure 2 'out of memory'",
        "MemoryError",
        "terminate called after throwing an instance of 'std::bad_alloc'",
        "slurmstepd: error: Detected 1 oom_kill event in StepId=5.0.",
        "OSError: [Errno 12] Cannot allocate memory",
    ],
)
def test_out_of_memory(line):
    status, reason = why_it_failed(f"starting\n{line}\nRun failed: 0 of 10 iterations\n", 1)
    assert (status, reason) == ("oom", line.removeprefix("moe-exp: ")[:300])


def test_a_killed_rank_counts_as_out_of_memory():
    assert why_it_failed(TORCHRUN_KILLED, 1)[0] == "oom"
    status, reason = why_it_failed("starting", 137)
    assert status == "oom" and reason.endswith("for lack of memory: starting")
    assert why_it_failed("starting", -9)[0] == "oom"


def test_the_error_of_the_rank_that_failed_first_is_the_reason():
    reason = "rank 1 on node0 failed: RuntimeError: shapes do not match"
    assert why_it_failed(TORCHRUN_ERROR, 1) == ("failed", reason)
    # Others that torchrun has had to kill since are no sign of anything.
    assert why_it_failed(TORCHRUN_ERROR + TORCHRUN_KILLED, 1)[0] == "failed"
    # A signal is the reason where ranks have only lost a peer.
    lost = "moe-exp: rank 0 on node0 failed: RuntimeError: [1] Connection closed by peer\n"
    assert why_it_failed(lost + TORCHRUN_KILLED, 1)[0] == "oom"
    # One that torchrun has killed because it did not end by itself.
    other = TORCHRUN_KILLED.replace("-15", "-9").replace("-9 (pid: 7)", "1 (pid: 7)").replace("Signal 9", "")
    assert why_it_failed(other, 1)[0] == "failed"
    aborted = TORCHRUN_KILLED.replace("-9", "-6").replace("9 (SIGKILL)", "6 (SIGABRT)")
    assert why_it_failed(lost + aborted, 1) == ("failed", "Signal 6 (SIGABRT) received by PID 7")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("moe-exp: EP=3: must divide NUM_EXPERTS. Fix: 2\nbye\n", "EP=3: must divide NUM_EXPERTS. Fix: 2"),
        ("moe-exp: stopping: the run saves\nKeyError: 'x'\nlast\n", "KeyError: 'x'"),
        ("srun: error: node3: task 1: Exited\nbye\n", "srun: error: node3: task 1: Exited"),
        ("one\n\n  two  \n\n", "two"),
        ("", "exit code 3 without any output"),
    ],
)
def test_the_most_useful_line(text, reason):
    assert why_it_failed(text, 3) == ("failed", reason)


def written_run(path: Path, times: list[float], memory: list[int]) -> RunFolder:
    folder = RunFolder(path)
    path.mkdir()
    records = [
        {"kind": "train", "iteration": number, "elapsed_time_per_iteration_ms": ms, "peak_memory_bytes": peak}
        for number, (ms, peak) in enumerate(zip(times, memory, strict=True), start=1)
    ]
    start = {"kind": "event", "iteration": 0, "event": "start"}
    folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in [start, *records]))
    starts = [{"device": "old"}, {"device": "NVIDIA H100 80GB HBM3"}]
    folder.provenance.write_text(json.dumps({"starts": starts}))
    return folder


def result(folder: RunFolder, log: Path, **more) -> Result:
    place = {"run_dir": str(folder.path.parent), "run_name": folder.path.name}
    config = load_config({"preset": "cpu", **place}, {})
    case = Case("case", {"tp": "2"}, config, log)
    return result_of(case, **{"code": 0, "timeout": 0, "num_warmup": 2, "num_iterations": 5} | more)


def test_the_median_after_the_warm_up(tmp_path):
    folder = written_run(tmp_path / "run", [9000, 8000, 100, 400, 200], [5, 6, 7, 8, 8])
    assert result(folder, tmp_path / "log") == Result("ok", "", 0.2, 8, "NVIDIA H100 80GB HBM3", {"tp": "2"})


def test_a_run_that_ends_early_is_no_measurement(tmp_path):
    folder = written_run(tmp_path / "run", [9000, 8000, 100, 400], [5, 6, 7, 8])
    found = result(folder, tmp_path / "log")
    assert (found.status, found.seconds) == ("failed", None)
    assert found.reason == "ended after 4 of 5 iterations"
    found = result(RunFolder(tmp_path / "none"), tmp_path / "log", code=2)
    assert found == Result("failed", "exit code 2 without any output", flags={"tp": "2"})


def test_a_time_out_has_the_last_line(tmp_path):
    (tmp_path / "log").write_text("iteration 1\niteration 2\n\n")
    folder = written_run(tmp_path / "run", [9000, 8000, 100, 400], [5, 6, 7, 8])
    found = result(folder, tmp_path / "log", code=None, timeout=7)
    reason = "exceeded CASE_TIMEOUT=7 s; last line of its log: iteration 2"
    assert (found.status, found.reason) == ("timeout", reason)
    (tmp_path / "log").write_text("slurmstepd: error: *** JOB 5 ON n1 CANCELLED DUE TO TIME LIMIT ***\n")
    assert result(folder, tmp_path / "log", code=None).status == "timeout"
    # A job that has gone without its last line has failed, however far it was.
    (tmp_path / "log").write_text("iteration 2\n")
    assert result(folder, tmp_path / "log", code=None).status == "failed"


def test_results_are_kept_whole(tmp_path):
    path = tmp_path / "results" / "case.json"
    one = Result("oom", "why", None, None, "CPU", {"ep": "2"})
    one.write(path)
    assert Result.read(path) == one
    assert [other.name for other in path.parent.iterdir()] == ["case.json"]
    path.write_text("{")
    with pytest.raises(ValueError, match=r"case\.json: must be the result of a case\. Fix: delete this file"):
        Result.read(path)


def test_slurm_may_be_silent_for_a_while(monkeypatch):
    answers = [["7"], ValueError("squeue: exit code 1."), ValueError("squeue: exit code 1."), []]

    def answer(ids):
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(child_runs, "still_there", answer)
    monkeypatch.setattr(child_runs, "POLL_SECONDS", 0.0)
    assert list(child_runs.ended_jobs({"case": "7"})) == ["case"] and not answers
    answers = [ValueError("squeue: exit code 1.")]
    monkeypatch.setattr(child_runs, "_PATIENCE_SECONDS", -1.0)
    with pytest.raises(ValueError, match="squeue"):
        list(child_runs.ended_jobs({"case": "7"}))
