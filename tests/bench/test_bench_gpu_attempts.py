"""What the GPU benchmarks share: attempts that may fail, a device that may be lost, processes that compile
ahead.
"""

from __future__ import annotations

import gc
import sys
import weakref

import pytest
import torch

from helpers import ROOT

BENCH = ROOT / "bench/gpu"
sys.path.append(str(BENCH))  # the modules of the command import each other by name

import gpu_attempts  # noqa: E402
import gpu_warm  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def fail(error):
    raise error


def test_what_may_fail_and_what_may_not(capsys):
    attempts = gpu_attempts.Attempts(CPU)
    assert attempts.run("a", lambda: 7, may_fail=False) == 7
    assert attempts.run("b", lambda: fail(KeyError("x")), may_fail=True) is None
    assert attempts.run("c", lambda: fail(gpu_attempts.LeftOut("slow")), may_fail=False) is None
    assert capsys.readouterr().err == ""
    assert attempts.run("d", lambda: fail(Exception("first\nsecond")), may_fail=False) is None
    assert "Traceback" in capsys.readouterr().err
    assert attempts.left_out == {"b": "KeyError: 'x'", "c": "slow", "d": "Exception: first"}
    assert attempts.report()[0] == "Left out: b: KeyError: 'x'"
    with pytest.raises(SystemExit, match=r"^not measured: c, d; and more$"):
        attempts.exit("and more")


def test_the_exit_code_is_0_where_only_others_failed():
    attempts = gpu_attempts.Attempts(CPU)
    attempts.run("b", lambda: fail(KeyError("x")), may_fail=True)
    with pytest.raises(SystemExit) as end:
        attempts.exit()
    assert end.value.code == 0


def test_ctrl_c_is_no_failure():
    with pytest.raises(KeyboardInterrupt):
        gpu_attempts.Attempts(CPU).run("a", lambda: fail(KeyboardInterrupt()), may_fail=True)


def test_the_memory_of_what_failed_is_free_when_the_next_begins(monkeypatch):
    held, alive = [], []

    def work():
        tensor = torch.ones(4)
        held.append(weakref.ref(tensor))
        raise RuntimeError("out of memory")

    monkeypatch.setattr(gpu_attempts, "free", lambda device: alive.append(held[0]() is not None))
    gc.disable()
    try:
        gpu_attempts.Attempts(CPU).run("a", work, may_fail=True)
    finally:
        gc.enable()
    assert alive == [False]


@pytest.mark.parametrize(("num_errors", "is_lost"), [(0, False), (1, False), (2, True)])
def test_a_device_is_lost_when_it_answers_with_the_error_again(monkeypatch, num_errors, is_lost):
    answers = [torch.AcceleratorError("unspecified launch failure\nmore")] * num_errors + [None] * 2

    def synchronize(device):
        if (answer := answers.pop(0)) is not None:
            raise answer

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(gpu_attempts, "free", lambda device: None)
    attempts = gpu_attempts.Attempts(CUDA)
    if not is_lost:
        assert attempts.run("a", lambda: fail(KeyError("x")), may_fail=True) is None
        return
    with pytest.raises(gpu_attempts.DeviceLost, match=r"^a: AcceleratorError: unspecified launch failure$"):
        attempts.run("a", lambda: fail(KeyError("x")), may_fail=True)


def test_a_lost_device_is_not_caught_again():
    with pytest.raises(gpu_attempts.DeviceLost):
        gpu_attempts.Attempts(CPU).run("a", lambda: fail(gpu_attempts.DeviceLost("b")), may_fail=True)


def python(program: str) -> list[str]:
    return [sys.executable, "-S", "-c", program]


def test_commands_run_at_once(tmp_path):
    # Each waits for the file of the other: one after the other they would never end.
    meet = (
        "import pathlib, sys, time\npathlib.Path({0!r}).touch()\nwhile not pathlib.Path({1!r}).exists():"
        " time.sleep(0.01)"
    )
    one, other = str(tmp_path / "one"), str(tmp_path / "other")
    commands = {"one": python(meet.format(one, other)), "other": python(meet.format(other, one))}
    assert gpu_warm.run_at_once(commands, seconds=60, workers=2) == {}


def test_commands_that_do_not_end_well():
    commands = {
        "good": python("print(1)"),
        "bad": python("raise KeyError('x')"),
        "quiet": python("raise SystemExit(3)"),
    }
    assert gpu_warm.run_at_once(commands, seconds=60, workers=1) == {
        "bad": "exit code 1: KeyError: 'x'",
        "quiet": "exit code 3: ",
    }
    assert gpu_warm.run_at_once(
        {"a": ["sleep", "60"], "b": ["sleep", "60"]}, seconds=0.1, workers=1
    ) == dict.fromkeys("ab", "not done after 0 s")
