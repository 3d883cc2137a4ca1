"""The benchmark of collectives: results are checked, sizes read, and a run of two ranks gives what the
planner reads.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import sys
from pathlib import Path

import pytest
import torch

from helpers import ROOT
from helpers.ranks import program, run_script_on_ranks

BENCH = ROOT / "bench/gpu"
sys.path.append(str(BENCH))  # the modules of the command import each other by name

import bench_comm  # noqa: E402

from moe_exp.planner.hardware import load_hardware  # noqa: E402


@pytest.mark.parametrize(("text", "expected"), [("512", 512), ("4K", 4096), ("1m", 2**20), ("2G", 2**31)])
def test_sizes(text, expected):
    assert bench_comm.bytes_of(text) == expected


@pytest.mark.parametrize("text", ["", "K", "0", "-1M", "1.5M"])
def test_what_is_no_size(text):
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no size\. Fix: give bytes"):
        bench_comm.bytes_of(text)


@pytest.mark.parametrize("name", bench_comm.COLLECTIVES)
def test_a_wrong_result_is_seen(monkeypatch, name):
    monkeypatch.setattr(bench_comm.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(bench_comm.dist, "get_world_size", lambda: 2)
    collective = bench_comm.COLLECTIVES[name]

    def run(output, given):
        expected = collective.expected(
            [bench_comm.values(rank, len(given), given.device) for rank in range(2)], 0
        )
        target = given if name == "all-reduce" else output
        target.copy_(expected)
        target[-1] += off

    monkeypatch.setitem(bench_comm.COLLECTIVES, name, collective._replace(run=run))
    off = 0
    bench_comm.check(name, 16, torch.device("cpu"))
    off = 1
    with pytest.raises(SystemExit, match=f"{name} of 64 bytes: wrong result on rank 0"):
        bench_comm.check(name, 16, torch.device("cpu"))


def test_bus_bandwidth_goes_into_a_profile():
    rows = [
        {"collective": "all-reduce", "bytes": 4096, "ms": 0.02, "bus_bytes_per_second": 1e8},
        {"collective": "all-reduce", "bytes": 2**28, "ms": 1.5, "bus_bytes_per_second": 3e11},
        {"collective": "all-gather", "bytes": 2**28, "ms": 1.0, "bus_bytes_per_second": 2e11},
    ]
    for num_hosts, link in ((1, "node"), (2, "network")):
        entries = bench_comm.profile_entries(rows, num_hosts, "here")
        assert entries == {
            f"{link}_bytes_per_second": {"value": 3e11, "source": "here"},
            f"{link}_latency_seconds": {"value": 2e-5, "source": "here"},
        }


@pytest.mark.parametrize(
    ("environ", "arguments", "text"),
    [
        ({}, [], "RANK is not set. Fix: start it with torchrun"),
        (
            {"RANK": "0", "WORLD_SIZE": "1"},
            [],
            "WORLD_SIZE=1: one rank sends nothing to anybody. Fix: torchrun --nproc-per-node 2 or more.",
        ),
        (
            {"RANK": "0", "WORLD_SIZE": "2"},
            ["--json", "/nonexistent/x.json"],
            "there is no folder /nonexistent.",
        ),
    ],
)
def test_what_cannot_be_is_said_before_any_work(monkeypatch, capsys, environ, arguments, text):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["bench_comm.py", *arguments])
    with pytest.raises(SystemExit) as end:
        bench_comm.main()
    assert end.value.code == 2
    assert text in capsys.readouterr().err


def test_other_hosts_need_no_folder_for_the_results(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(sys, "argv", ["bench_comm.py", "--json", "/nonexistent/x.json"])
    assert bench_comm.parse_arguments().json == Path("/nonexistent/x.json")


@pytest.mark.slow
def test_two_ranks(tmp_path):
    command = [
        str(ROOT / "bench/gpu/bench_comm.py"),
        "--sizes",
        "4K",
        "64K",
        "--json",
        str(tmp_path / "comm.json"),
    ]
    codes, printed = run_script_on_ranks(2, program, *command, CUDA_VISIBLE_DEVICES="")
    assert codes == [0, 0], printed
    result = json.loads((tmp_path / "comm.json").read_text())
    assert [(row["collective"], row["bytes"]) for row in result["rows"]] == [
        (name, size) for name in bench_comm.COLLECTIVES for size in (4096, 65536)
    ]
    assert result["date"].startswith("20")
    assert result["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    sent = {row["collective"]: row["sent_bytes"] for row in result["rows"] if row["bytes"] == 4096}
    assert sent == {"all-reduce": 4096, "all-gather": 2048, "reduce-scatter": 2048, "all-to-all": 2048}
    # The planner takes the entries in the place of its own.
    profile = json.loads((ROOT / "moe_exp/planner/profiles/CPU.json").read_text()) | result["profile"]
    (tmp_path / "mine.json").write_text(json.dumps(profile))
    assert (
        load_hardware(str(tmp_path / "mine.json")).node_latency_seconds
        == result["profile"]["node_latency_seconds"]["value"]
    )
