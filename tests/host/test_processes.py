"""How a process ends."""

import subprocess
import sys

import pytest

PROGRAM = """
import atexit, gc, os, sys, threading, time
from moe_exp.host.processes import QuickExit
ending = QuickExit()
atexit.register(print, "handler")
class Freed:
    def __del__(self):
        os.write(1, b"freed")
kept = Freed()
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
sys.stdout.write("written ")
{end}
"""


@pytest.mark.parametrize(
    ("end", "code", "printed"),
    [
        ("ending.code = 75", 75, ["written", "thread", "handler"]),
        ("ending.code = 0; sys.stderr.close(); sys.stderr = None", 0, ["written", "thread", "handler"]),
        ("sys.exit(3)", 3, ["written", "thread", "handler", "freed"]),
        ("raise RuntimeError('why')", 1, ["written", "thread", "handler", "freed"]),
    ],
)
def test_a_quick_exit_runs_handlers_and_keeps_the_code(end, code, printed):
    command = [sys.executable, "-c", PROGRAM.format(end=end)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (code, printed)
    assert ("why" in done.stderr) == ("why" in end)
