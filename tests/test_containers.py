"""containers/: the recipes name files that exist, and the script that they run keeps the image's torch."""

import os
import re
import subprocess

import pytest

from helpers import ROOT

RECIPES = ("Dockerfile", "moe_exp.def")
STUB = """#!/bin/bash
case "$*" in
    *'version("torch")'*) echo "${TORCH?}" ;;
    *"pip install"*) words="$*" && echo "${words#*pip install }" >>"$CALLS" ;;
    *--missing*) exit "${LACKS:-0}" ;;
esac
"""


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_copy_what_exists_and_run_the_script(name):
    text = (ROOT / "containers" / name).read_text()
    copied = re.findall(r"^(?:COPY |    (?!bash))(.*) (/opt/moe_exp/\S*)$", text, re.MULTILINE)
    sources = {source for line, _ in copied for source in line.split()}
    assert {"setup.py", "moe_exp", "containers/install.sh", "README.md", "LICENSE"} <= sources
    assert all((ROOT / source).exists() for source in sources)
    assert "bash /opt/moe_exp/containers/install.sh" in text
    texts = [(ROOT / "containers" / each).read_text() for each in RECIPES]
    assert len({re.search(r"nvcr.io/nvidia/pytorch:\S+", each)[0] for each in texts}) == 1


def test_the_script_keeps_the_torch_of_the_image(tmp_path):
    python = tmp_path / "python3"
    python.write_text(STUB)
    python.chmod(0o755)

    def install(**environ):
        words = {"PYTHON": str(python), "CALLS": str(tmp_path / "calls"), **environ}
        script = ["bash", str(ROOT / "containers" / "install.sh")]
        return subprocess.run(script, env=os.environ | words, capture_output=True, text=True)

    torch = "2.8.0a0+5228986c39.nv25.06"
    done = install(TORCH=torch)
    assert done.returncode == 0 and done.stdout == f"moe_exp is installed with torch {torch}\n"
    calls = (tmp_path / "calls").read_text().splitlines()
    assert all(f"torch=={torch}" in line for line in calls)
    assert calls[-1].endswith(f" {ROOT}[train,data]") and "--no-build-isolation" in calls[-1]
    assert install(TORCH=torch, LACKS="1").returncode == 1
    done = install()
    assert done.returncode == 1 and "has no torch. Fix: " in done.stderr
