"""`bench/gpu/one_call.py --tiny`: every part runs without a GPU and appends its lines."""

import json
import os
import subprocess
import sys

import pytest

from helpers import ROOT

# with Triton's interpreter, the kernels' self-test takes minutes
ENVIRON = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}

# what each part must have measured, and values that must be there
EXPECTED = {
    "machine": {"ceilings": "matmul_tflops", "host": "us"},
    "correct": {"kernels": "failed", "ten steps": "waits", "graph is eager": "equal"},
    "micro": {"AdamW": "gb_per_second", "grouped GEMM": "ours_ms", "router backward": "bf16_ms"},
    "step": {"step": "host_ms"},
    "layers": {"layers": "graph_ms"},
    "peers": {"peers": "ms"},
    "profile": {"profile": "products"},
    "compile": {"compile": "seconds"},
    "keep": {"keep": "mib"},
}


@pytest.mark.slow
@pytest.mark.parametrize("parts", [["correct"], []])
def test_parts_append_their_lines(parts, tmp_path):
    path = tmp_path / "lines.jsonl"
    command = [sys.executable, str(ROOT / "bench/gpu/one_call.py"), "--tiny", "--json", str(path)]
    command += ["--part", *parts] if parts else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=ENVIRON)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for part in parts or EXPECTED:
        found = {line["what"]: line for line in lines if line["part"] == part}
        assert found["end"]["end"] == "ok"
        assert all(value in found[what] for what, value in EXPECTED[part].items()), found
    assert all(line["equal"] for line in lines if line["what"] == "graph is eager")
    assert f"| {(parts or list(EXPECTED))[0]} |" in done.stdout


def test_a_part_without_time_is_skipped(tmp_path):
    path = tmp_path / "lines.jsonl"
    command = [sys.executable, str(ROOT / "bench/gpu/one_call.py"), "--tiny", "--json", str(path)]
    done = subprocess.run(
        [*command, "--part", "keep", "--total", "1"], capture_output=True, text=True, env=ENVIRON
    )
    assert done.returncode == 1
    assert json.loads(path.read_text())["end"] == "skipped: no time left"
