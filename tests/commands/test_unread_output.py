"""What a command does when nobody reads its output any more, as in `moe-exp ... | head`."""

import os
import subprocess
import sys

import pytest

from helpers.whole_runs import ROOT, clean_environ
from moe_exp.cli import main
from moe_exp.commands.guard import ended_quietly, guarded


@pytest.mark.parametrize(
    ("command", "unbuffered"),
    [
        (["-m", "moe_exp", "--help"], ""),  # fails at the interpreter's end, if not before
        pytest.param(["-m", "moe_exp", "sweep", "--dry-run", "--preset=cpu"], "1", marks=pytest.mark.slow),
        (["-m", "moe_exp", "train", "--dry-run", "--preset=cpu"], "1"),
        ([str(ROOT / "moe_exp" / "scripts" / "merge_jsonl_files.py"), "--help"], ""),
    ],
)
def test_a_command_whose_reader_has_gone_ends_quietly(command, unbuffered, tmp_path):
    reader, writer = os.pipe()
    os.close(reader)
    place = {"env": clean_environ(PYTHONPATH=ROOT, PYTHONUNBUFFERED=unbuffered), "cwd": tmp_path}
    with os.fdopen(writer, "w") as output:
        streams = {"stdout": output, "stderr": subprocess.PIPE}
        done = subprocess.run([sys.executable, *command], **streams, **place, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")


def test_other_broken_pipes_are_errors(capsys):
    def work() -> int:
        raise BrokenPipeError(32, "Broken pipe", "to a server")

    assert ended_quietly(lambda: guarded(work, "moe-exp x")) == 1
    assert capsys.readouterr().err == "moe-exp x: to a server: Broken pipe\n"
    with pytest.raises(BrokenPipeError):
        ended_quietly(work)


def test_a_file_name_in_an_error_cannot_write_to_the_terminal(tmp_path, capsys):
    assert main(["watch", "blame", str(tmp_path / "a\x1b[2Jb")]) == 1
    assert f"{tmp_path}/a\\x1b[2Jb: not found." in capsys.readouterr().err
