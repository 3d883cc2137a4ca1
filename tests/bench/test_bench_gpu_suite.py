"""The benchmark of one layer continues where somebody fails: who is left out, what is saved, and the exit
code.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys
import threading
import types
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from helpers import ROOT

BENCH = ROOT / "bench/gpu"
sys.path.append(str(BENCH))  # the modules of the command import each other by name

import bench_gpu_layer  # noqa: E402
import gpu_attempts  # noqa: E402
import gpu_peers  # noqa: E402
from gpu_clock import TooSlow  # noqa: E402

PLAIN = gpu_peers.PROVIDERS["grouped_mm, 2 products"]


class PTXASError(Exception):
    """As Triton has them: of no kind but Exception."""


def failing(error, *, after):
    """A provider whose layer raises from the call after so many on."""

    def build(shape, parameters):
        layer, calls = PLAIN.build(shape, parameters), []

        def forward(x_TD, routing):
            calls.append(1)
            if len(calls) > after:
                raise error
            return layer(x_TD, routing)

        return forward

    return replace(PLAIN, build=build)


def spinning(shape, parameters):
    while True:
        torch.ones(1)


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """Runs the command with providers by name; the exit code, the JSON and both outputs."""

    def call(providers, *arguments, ours=PLAIN):
        for name, provider in {gpu_peers.OURS: ours, gpu_peers.OURS_SORTING: ours, **providers}.items():
            monkeypatch.setitem(gpu_peers.PROVIDERS, name, provider)
        monkeypatch.setattr(bench_gpu_layer, "PEERS", list(providers))
        path = tmp_path / "layer.json"
        monkeypatch.setattr(
            sys,
            "argv",
            ["bench_gpu_layer.py", "--device", "cpu", "--dtype", "fp32", "--json", str(path), *arguments],
        )
        with pytest.raises(SystemExit) as end:
            bench_gpu_layer.main()
        return (
            end.value.code or 0,
            json.loads(path.read_text()) if path.exists() else None,
            capsys.readouterr(),
        )

    return call


def rows(result):
    return [(row["shape"], row["provider"]) for row in result["rows"]]


# Warm-up and check are 1 + 2 * 2 calls, the count of bytes one more (no peak on a CPU), a turn 2 + 2.
@pytest.mark.parametrize(
    ("error", "after"),
    [
        (PTXASError("no"), 0),
        (KeyError("shape"), 3),
        (OSError("no file\nsecond line"), 5),
        (torch.OutOfMemoryError("full"), 8),
    ],
)
def test_a_peer_that_fails_costs_its_own_row(run, error, after):
    code, result, out = run(
        {"bad": failing(error, after=after), "good": PLAIN},
        "--shape",
        "tiny",
        "--routing",
        "zipf",
        "--rounds",
        "2",
    )
    assert code == 0
    assert rows(result) == [("tiny", "ours"), ("tiny", "good")]
    reason = f"{type(error).__name__}: {error}".splitlines()[0]
    assert result["left_out"] == {"bad, shape tiny, zipf": reason}
    assert f"Left out: bad, shape tiny, zipf: {reason}" in out.out
    assert "Traceback" not in out.err


def test_a_peer_that_fails_while_it_is_built_or_profiled(run):
    def build(shape, parameters):
        raise ImportError("symbol not found")

    peers = {"bad": replace(PLAIN, build=build), "late": failing(PTXASError("late"), after=10)}
    code, result, out = run(peers, "--shape", "tiny", "--routing", "zipf", "--rounds", "1", "--profile")
    assert code == 0
    assert rows(result) == [("tiny", "ours"), ("tiny", "late")]
    assert result["left_out"] == {
        "bad, shape tiny, zipf": "ImportError: symbol not found",
        "profile of late, shape tiny, zipf": "PTXASError: late",
    }
    assert "Left out: profile of late, shape tiny, zipf: PTXASError: late" in out.out
    assert "aten::" in out.out


def test_ours_fails(run):
    code, result, out = run(
        {"good": PLAIN}, "--shape", "tiny", "--rounds", "1", ours=failing(PTXASError("no"), after=6)
    )
    assert code == "not measured: ours, shape tiny, balanced, ours, shape tiny, zipf"
    assert rows(result) == [("tiny", "good")] * 2
    assert all(row["theirs_over_ours"] is None for row in result["rows"])
    assert "Traceback" in out.err  # a fault of ours is looked for


def test_a_lost_device_ends_the_suite(run, monkeypatch):
    bad = failing(PTXASError("illegal memory access"), after=12)
    monkeypatch.setattr(gpu_attempts, "lost", lambda device: "AcceleratorError: unspecified launch failure")
    code, result, _ = run({"bad": bad, "good": PLAIN}, "--rounds", "20")
    assert code == "not measured: all that would follow"
    assert set(rows(result)) == {("tiny", "ours"), ("tiny", "good")}  # of the turns before
    assert result["left_out"] == {
        "bad, shape tiny, balanced": "PTXASError: illegal memory access",
        "all that would follow": (
            "the device answers no more since bad, shape tiny, balanced: AcceleratorError: unspecified launch"
            " failure"
        ),
    }


def test_a_slow_start(run):
    def slow(shape, parameters):
        for _ in range(3000):  # longer than a peer may take
            torch.ones(64, 64) @ torch.ones(64, 64)
        return PLAIN.build(shape, parameters)

    arguments = ["--shape", "tiny", "--routing", "zipf", "--rounds", "1", "--start-seconds", "0.001"]
    code, result, _ = run(
        {"slow": replace(PLAIN, build=spinning)}, *arguments, ours=replace(PLAIN, build=slow)
    )
    assert code == 0
    assert rows(result) == [("tiny", "ours")]
    assert result["left_out"] == {"slow, shape tiny, zipf": "took over 0 s"}


def test_ours_has_the_budget_and_no_longer(run, monkeypatch):
    now, given = [0.0], []

    def at_most(seconds):
        given.append(seconds)
        return contextlib.nullcontext()

    def build(shape, parameters):
        now[0] += given[-1]
        raise TooSlow(f"took over {given[-1]:.0f} s")

    monkeypatch.setattr(bench_gpu_layer, "at_most", at_most)
    monkeypatch.setattr(bench_gpu_layer, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    code, result, out = run(
        {"peer": PLAIN}, "--shape", "tiny", "--budget", "100", ours=replace(PLAIN, build=build)
    )
    assert given == [160, 0]  # the shape that was begun may take a minute more
    assert code == "not measured: ours, shape tiny, balanced, shape tiny, zipf"
    assert result["left_out"] == {
        "ours, shape tiny, balanced": "took over 160 s",
        "shape tiny, zipf": "not begun within 100 s",
    }
    assert "Traceback" not in out.err


def test_no_budget_is_said_and_saved(run):
    code, result, _ = run({}, "--shape", "tiny-rows", "--routing", "zipf", "--budget", "0")
    assert code == "not measured: shape tiny-rows, zipf"
    assert result["left_out"] == {"shape tiny-rows, zipf": "not begun within 0 s"}
    assert result["rows"] == []
    assert result["machine"]["versions"]["torch"] == importlib.metadata.version("torch")


def test_backward_runs_where_it_can_be_stopped(run):
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            seen.append(
                (torch._C._is_multithreading_enabled(), threading.current_thread() is threading.main_thread())
            )
            return grad

    def build(shape, parameters):
        layer = PLAIN.build(shape, parameters)
        return lambda x_TD, routing: Look.apply(layer(x_TD, routing))

    code, _, _ = run(
        {"looks": replace(PLAIN, build=build)}, "--shape", "tiny", "--routing", "zipf", "--rounds", "1"
    )
    assert code == 0
    assert set(seen) == {(False, True)}
    assert torch._C._is_multithreading_enabled()  # as before


def test_a_peer_may_be_further_off_in_the_router_weights(run):
    def build(shape, parameters):
        layer = PLAIN.build(shape, parameters)

        def forward(x_TD, routing):
            weights_TK = routing.weights_TK
            off = weights_TK * (1 + share) - weights_TK.detach() * share  # the same value, another gradient
            return layer(x_TD, replace(routing, weights_TK=off))

        return forward

    off, arguments = replace(PLAIN, build=build), ["--shape", "tiny", "--routing", "zipf", "--rounds", "1"]
    share = 2e-5
    code, result, _ = run({"off": off}, *arguments)
    (row,) = [row for row in result["rows"] if row["provider"] == "off"]
    assert row["largest_error"] == row["errors"]["router weights"] == pytest.approx(2e-5, rel=0.1)
    code, result, _ = run({}, *arguments, ours=off)
    assert result["left_out"] == {
        "ours, shape tiny, zipf": "wrong: router weights is 2.0e-05 off, over 1e-05"
    }
    assert code == "not measured: ours, shape tiny, zipf"
    share = 4e-5
    code, result, _ = run({"off": off}, *arguments)
    assert (code, result["left_out"]) == (
        0,
        {"off, shape tiny, zipf": "wrong: router weights is 4.0e-05 off, over 3e-05"},
    )


def test_who_sorts_arriving_rows_is_compared_with_ours_sorting(run):
    peers = {"sorts": replace(PLAIN, sorts=True), "takes them": PLAIN}
    code, result, out = run(peers, "--routing", "zipf", "--rounds", "1", ours=replace(PLAIN, sorts=False))
    assert code == 0
    assert [(row["shape"], row["provider"], row["compared_with"]) for row in result["rows"]] == [
        ("tiny", "ours", "ours"),
        ("tiny", "sorts", "ours"),
        ("tiny", "takes them", "ours"),
        ("tiny-rows", "ours", "ours"),
        ("tiny-rows", "ours, sorting", "ours"),  # the stand-in of this test takes them as they are
        ("tiny-rows", "sorts", "ours, sorting"),
        ("tiny-rows", "takes them", "ours"),
    ]
    assert "sorts: rows that arrive sorted are sorted again; compared with `ours, sorting` there" in out.out
    assert gpu_peers.OURS_SORTING not in [
        name for _, name in rows(run({"takes them": PLAIN}, "--rounds", "1")[1])
    ]


# Compiling ahead


def test_compile_only_runs_everybody_once_per_shape(run):
    built = []

    def build(shape, parameters):
        built.append(shape.model)
        return failing(PTXASError("called again"), after=1).build(shape, parameters)

    once = replace(PLAIN, build=build)
    code, result, out = run(
        {"peer": once, "bad": failing(PTXASError("no"), after=0)}, "--compile-only", ours=once
    )
    assert code == 0
    assert len(built) == 4
    assert "bad, shape tiny, balanced: PTXASError: no" in out.out
    assert result is None


def test_every_shape_is_compiled_ahead_by_a_process_of_its_own(run, monkeypatch):
    started = {}

    def run_at_once(commands, *, seconds, workers):
        started.update(commands)
        assert (seconds, 1 <= workers <= 2) == (9, True)
        return {"shape tiny": "not done after 9 s"}

    monkeypatch.setattr(bench_gpu_layer, "run_at_once", run_at_once)
    code, result, out = run({"a peer": PLAIN}, "--rounds", "1", "--routing", "zipf", "--warm-seconds", "9")
    assert code == 0
    assert result["compiled_ahead"]["undone"] == {"shape tiny": "not done after 9 s"}
    assert " s; shape tiny: not done after 9 s\n" in out.out
    assert list(started) == ["shape tiny", "shape tiny-rows"]
    for name, (python, file, *rest) in started.items():
        assert [python, Path(file).name] == [sys.executable, "bench_gpu_layer.py"]
        monkeypatch.setattr(sys, "argv", [file, *rest])
        arguments = bench_gpu_layer.parse_arguments()
        assert (arguments.compile_only, arguments.warm_seconds, arguments.budget) == (True, 0, 9)
        assert (arguments.shape, arguments.peers, arguments.dtype, str(arguments.device)) == (
            [name[6:]],
            ["a peer"],
            "fp32",
            "cpu",
        )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--rounds", "0"], "--rounds: 0: has to be a whole number from 1 on. Fix: give such as 11"),
        (["--rounds", "1.5"], "--rounds: 1.5: has to be a whole number from 1 on."),
        (["--budget", "-1"], "--budget: -1: has to be a number from 0.0 on."),
        (["--budget", "nan"], "--budget: nan: has to be a number from 0.0 on."),
        (["--device", "cuda:99"], "--device: cuda:99: torch sees "),
        (
            ["--device", "gpu"],
            "--device: gpu: is no device of these benchmarks. Fix: give cpu, cuda, or such as cuda:1",
        ),
        (
            ["--json", "/nonexistent/x.json"],
            (
                "--json: /nonexistent/x.json: there is no folder /nonexistent. Fix: make it, or give another"
                " file"
            ),
        ),
        (["--json", "/"], "--json: /: is a folder. Fix: give a file in it"),
    ],
)
def test_what_cannot_be_is_said_before_any_work(run, capsys, arguments, text):
    code, result, out = run({}, *arguments)
    assert (code, result) == (2, None)
    assert f"error: argument {text}" in out.err
    assert out.out == ""
