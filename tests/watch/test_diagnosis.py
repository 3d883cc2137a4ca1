"""Restart or stop: the decisions on two sets of failures, and what they take from a run's events."""

import json
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from helpers.whole_runs import ROOT
from moe_exp.cli import main
from moe_exp.runs.records import event_record
from moe_exp.watch.blame import recognised_lines
from moe_exp.watch.diagnosis import (
    DECISIONS,
    PROVED_ITERATIONS,
    REPEATS,
    Diagnosis,
    Situation,
    diagnose_failures,
    diagnose_logs,
    situation_of,
)
from moe_exp.watch.known_errors import CAUSES

sys.path.insert(0, str(Path(ROOT) / "bench"))
from bench_diagnosis import ACTIONS, decision, read_failures

# Shares of right decisions.
LEAST = {"rules": 0.95, "held_out": 0.95}
OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


@cache
def decisions(half: str) -> list[tuple[dict, Diagnosis]]:
    return [(one, decision(one)) for one in read_failures(half)]


@pytest.mark.parametrize("half", ["rules", "held_out"])
def test_score(half):
    found = decisions(half)
    right = sum(one["action"] == said.action for one, said in found)
    assert right >= LEAST[half] * len(found)
    # a night is lost if a run that could go on is stopped
    assert sum(said.action == "stop" != one["action"] for one, said in found) <= 0.04 * len(found)


def test_sets_of_failures():
    rules, held_out = read_failures("rules"), read_failures("held_out")
    ids = [one["id"] for one in rules + held_out]
    assert len(set(ids)) == len(ids) >= 200 and len(held_out) >= 100
    for one in rules + held_out:
        assert one["action"] in ACTIONS and one["reason"] and one["source"]
        assert all(file["lines"] for file in one["files"])
    assert min(Counter(one["action"] for one in held_out).values()) >= 15


def test_every_cause_has_a_decision():
    assert set(CAUSES) | {"node"} == set(DECISIONS)


def diagnosed(folder: Path, *lines: str, **situation) -> Diagnosis:
    log = folder / "job1.node-a01.log"
    log.write_text("\n".join(lines) + "\n")
    return diagnose_logs([log], **situation)


@pytest.mark.parametrize(
    ("line", "action"),
    [
        ("[rank0]: FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'", "stop"),
        ("moe-exp: TP=3: must divide NUM_HEADS=8. Fix: set TP=2.", "stop"),
        (f"[rank3]: {OUT_OF_MEMORY}", "stop"),
        ("OSError: [Errno 28] No space left on device: '/scratch/ckpt/model.pt'", "wait"),
        ("train.py: error: unrecognized arguments: --lrr", "stop"),
    ],
)
def test_no_restart_repeats_what_must_fail_again(line, action, tmp_path):
    assert diagnosed(tmp_path, line, iterations=0).action == action


def test_memory_that_was_enough_is_worth_a_restart(tmp_path):
    for situation, action in (
        ({"iterations": PROVED_ITERATIONS - 1}, "stop"),
        ({"iterations": PROVED_ITERATIONS}, "restart"),
        ({"iterations": 0, "trained_before": True}, "restart"),
    ):
        assert diagnosed(tmp_path, OUT_OF_MEMORY, **situation).action == action


def test_iterations_come_from_the_log(tmp_path):
    lines = [
        f"[2026-11-03 02:07:08] iteration {number:8d}/   90000 | lm loss 2.1" for number in (10, 20, 5010)
    ]
    assert diagnosed(tmp_path, *lines, OUT_OF_MEMORY).action == "restart"
    assert diagnosed(tmp_path, *lines[:2], OUT_OF_MEMORY).action == "stop"


def test_what_recovered_is_not_the_cause(tmp_path):
    silent, back = ("nfs: server 10.0.0.1 not responding, still trying", "nfs: server 10.0.0.1 OK")
    timeout = "[rank3]: Watchdog caught collective operation timeout: WorkNCCL(OpType=ALLREDUCE)"
    assert diagnosed(tmp_path, silent, timeout, iterations=9).action == "wait"
    assert diagnosed(tmp_path, silent, back, timeout, iterations=9).action == "restart"
    assert diagnosed(tmp_path, back, silent, timeout, iterations=9).action == "wait"


def test_an_upload_that_was_tried_again_is_not_the_cause(tmp_path):
    line = "WARNING: 503 Service Unavailable, retrying (attempt 2 of 5)"
    assert [fault for fault, _, _ in recognised_lines([line])] == []
    assert diagnosed(tmp_path, line, "KeyError: 'lr'", iterations=50).category == "code"


def test_only_the_host_that_lost_a_file_is_excluded(tmp_path):
    missing = "[rank{}]: FileNotFoundError: [Errno 2] No such file or directory: '/data/a.bin'"
    lost = "[rank{}]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    for second, action, host in ((lost, "exclude", "node-a01"), (missing, "stop", "node-a01")):
        logs = []
        for number, line in enumerate((missing, second)):
            logs.append(tmp_path / f"job1.node-a0{number + 1}.log")
            logs[-1].write_text(line.format(8 * number) + "\n")
        found = diagnose_logs(logs, iterations=500)
        assert (found.action, found.host) == (action, host)


def events(*names: tuple[str, int], cause: str = "SIGSEGV") -> list[dict]:
    return [
        {"kind": "train", "iteration": number} if name == "train"
        else event_record(name, number, **({"cause": cause} if name == "rank_failed" else {}))
        for name, number in names
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([("start", 0), ("train", 10), ("train", 20)], Situation(20, False, 0)),
        ([], Situation(0, False, 0)),
        ([("start", 0)], Situation(0, False, 0)),
        ([("start", 0), ("train", 10), ("rank_failed", 10), ("restart", 10), ("resume", 5), ("train", 10)],
         Situation(5, True, 1)),
        # failed while it loaded
        ([("start", 0), ("train", 10), ("rank_failed", 10), ("restart", 10)], Situation(0, True, 0)),
        ([("start", 0), ("train", 10), ("end", 10), ("changed_settings", 5), ("resume", 5)],
         Situation(0, False, 0)),
    ],
)  # fmt: skip
def test_situation_by_the_events_of_a_run(names, expected):
    assert situation_of(events(*names), [{"cause": "SIGSEGV"}]) == expected


def test_a_crash_that_returns_at_the_same_iteration_is_not_chance():
    failure = {"rank": 3, "host": "node-a01", "device": "cpu", "cause": "SIGSEGV"}
    once = [("resume", 5), ("train", 10), ("rank_failed", 10), ("restart", 10)]
    records = events(("start", 0), ("train", 10), *once * (REPEATS - 2), ("resume", 5), ("train", 10))
    assert diagnose_failures(records, [failure]).action == "restart"
    records = events(("start", 0), ("train", 10), *once * (REPEATS - 1), ("resume", 5), ("train", 10))
    found = diagnose_failures(records, [failure])
    assert found.action == "stop" and f"{REPEATS} times after the same iteration" in found.reason


def test_command(tmp_path, capsys):
    log = tmp_path / "job1.node-a01.log"
    log.write_text("[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n")
    assert not main(["watch", "diagnose", str(log), "--iterations", "700"])
    first, line = capsys.readouterr().out.splitlines()
    assert first.startswith("exclude: uncorrectable memory error (ECC) on node-a01; take the node out")
    assert "ECC error encountered" in line
    assert not main(["watch", "diagnose", str(log), "--json", "--trained-before"])
    found = json.loads(capsys.readouterr().out)
    assert (found["action"], found["category"], found["host"]) == ("exclude", "node", "node-a01")


def test_command_for_a_run_folder_knows_its_events(tmp_path, capsys):
    """The same crash after the same iteration is no chance the third time; the log has all three."""
    failed = ("train", 10), ("rank_failed", 10), ("diagnosis", 10), ("restart", 10), ("resume", 5)
    line = "moe-exp: rank 3 on node-a01 (cpu) has failed after iteration 10: SIGSEGV\n"
    for number, action in ((1, "restart"), (REPEATS, "stop")):
        run = tmp_path / str(number)
        run.mkdir()
        names = [("start", 0), *failed * (number - 1), *failed[:3]]
        (run / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in events(*names)))
        (run / "train.log").write_text(line * number)
        assert not main(["watch", "diagnose", str(run)])
        assert capsys.readouterr().out.startswith(f"{action}: ")
