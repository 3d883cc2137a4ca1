"""The latest function calls of a process: chosen modules only, a file of fixed size, there after a kill."""

import os
import signal
import subprocess
import sys

import pytest

from moe_exp.watch.hangs.call_trace import latest_calls
from moe_exp.watch.hangs.heartbeat import rank_file

PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from moe_exp.config import load_config
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs.call_trace import trace_calls
sys.path.insert(0, sys.argv[1])
import traced.inner, untraced
config = load_config({"trace_calls_from": 5, "trace_calls_mb": 1, "trace_calls_in": "traced, other"}, {})
trace_calls(config, RunFolder(Path(sys.argv[1])), 3, 4)
traced.inner.too_early()
trace_calls(config, RunFolder(Path(sys.argv[1])), 3, 5)
for number in range(int(sys.argv[2])):
    traced.inner.Layer().forward()
    untraced.helper()
if (child := os.fork()) == 0:
    traced.inner.only_in_the_child()
    os._exit(0)
os.waitpid(child, 0)
thread = threading.Thread(target=traced.inner.in_a_thread)
thread.start()
thread.join()
os.kill(os.getpid(), signal.SIGKILL)
"""
INNER = """
class Layer:
    def forward(self):
        return len("x")
def too_early(): ...
def only_in_the_child(): ...
def in_a_thread(): ...
"""


@pytest.mark.parametrize("num_calls", [3, 20000])  # the second more than the file has room for
def test_end_of_the_trace_survives_a_kill(num_calls, tmp_path):
    (tmp_path / "traced").mkdir()
    (tmp_path / "traced" / "__init__.py").touch()
    (tmp_path / "traced" / "inner.py").write_text(INNER)
    (tmp_path / "untraced.py").write_text("def helper():\n    pass\n")
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), str(num_calls)]
    assert subprocess.run(command, env=environ, timeout=60).returncode == -signal.SIGKILL
    path = rank_file(tmp_path / "hang" / "calls", 3, "txt")
    assert latest_calls(path.with_name("none.txt"), 3) == []
    assert path.stat().st_size <= 1_000_000
    calls = latest_calls(path, 3)
    names = [call.split()[1].rpartition(".")[2].partition(":")[0] for call in calls]
    assert names == ["forward", "forward", "in_a_thread"]
    times = [float(call.split()[0]) for call in calls]
    assert times == sorted(times)
    text = path.read_text().rstrip("\0")
    assert all(len(line) == 127 for line in text.splitlines())
    assert not any(name in text for name in ("helper", "only_in_the_child", "too_early"))
    assert f"{num_calls:012d} " in text  # the number of the thread's call
