"""nvidia-smi is a program of the test, which prints what the real one does."""

import os
import re

import pytest

from moe_exp.launch.preflight.host_facts import FIELDS, gpu_findings, query_gpus

GOOD = (
    "{i}, NVIDIA H100 80GB HBM3, 00000000:{b}:00.0, 535.161.08, 34, 118.23, 0, 0, No, No, [N/A],"
    " 0x0000000000000001, 16, 16"
)


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Makes an nvidia-smi: lines of output, exit code, and a field that it does not know."""

    def make(lines: list[str], code: int = 0, unknown: str = "") -> None:
        said = f"echo 'Field \"{unknown}\" is not a valid field to query.'; echo; exit 2"
        refuse = f'case "$*" in *{unknown}*) {said};; esac' if unknown else ""
        script = ["#!/bin/sh", refuse, "cat <<END", *lines, "END", f"exit {code}", ""]
        (tmp_path / "nvidia-smi").write_text("\n".join(script))
        (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    return make


def row(text: str) -> list[dict[str, str]]:
    return [dict(zip(FIELDS, text.split(", "), strict=True))]


def test_healthy_gpus(smi):
    smi([GOOD.format(i=0, b="0F"), GOOD.format(i=1, b="2D")])
    gpus, problem = query_gpus()
    assert problem == ""
    assert [gpu["pci.bus_id"] for gpu in gpus] == ["00000000:0F:00.0", "00000000:2D:00.0"]
    assert list(gpu_findings(gpus)) == []


def test_older_driver_is_asked_by_its_names(smi):
    hot = GOOD.format(i=0, b="0F").replace("0x0000000000000001", "0x0000000000000040")
    smi([hot], unknown="clocks_event_reasons.active")
    gpus, problem = query_gpus()
    assert problem == ""
    assert gpus[0]["clocks_event_reasons.active"] == "0x0000000000000040"
    ((grade, line),) = gpu_findings(gpus)
    assert grade == "slow" and "too hot (hardware), 34 C" in line
    without = GOOD.format(i=0, b="0F").replace(" No, No, [N/A],", " No, [N/A],")
    smi([without], unknown="remapped_rows.failure")
    gpus, problem = query_gpus()
    assert problem == "" and "remapped_rows.failure" not in gpus[0] and gpus[0]["pcie.link.width.max"] == "16"


def test_a_driver_that_does_not_answer(smi):
    text = "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."
    smi([text], code=9)
    assert query_gpus() == ([], f"nvidia-smi: {text}")


def test_no_nvidia_smi(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert query_gpus() == ([], "")


@pytest.mark.parametrize(
    ("changes", "grade", "text"),
    [
        ({"ecc.errors.uncorrected.volatile.total": "2"}, "failed", "2 uncorrectable .* since the driver"),
        ({"ecc.errors.uncorrected.aggregate.total": "5"}, "warning", "5 uncorrectable .* over its lifetime"),
        ({"remapped_rows.failure": "Yes"}, "failed", "a memory row could not be remapped"),
        ({"remapped_rows.failure": "1"}, "failed", "a memory row could not be remapped"),
        ({"remapped_rows.pending": "Yes"}, "warning", "reset required"),
        ({"retired_pages.pending": "Yes"}, "warning", "reset required"),
        ({"clocks_event_reasons.active": "0x0000000000000088"}, "slow", ".*slowdown, power brake, 34 C"),
        ({"pcie.link.width.current": "8"}, "warning", "PCIe link uses 8 of 16 lanes"),
    ],
)
def test_what_is_wrong_with_a_gpu(changes, grade, text):
    gpus = row(GOOD.format(i=3, b="9B"))
    gpus[0] |= changes
    ((found, line),) = gpu_findings(gpus)
    assert found == grade and re.match(rf"GPU 3 \(00000000:9B:00\.0\): {text}", line), line


def test_what_a_driver_cannot_say_is_no_finding():
    gpus = row(GOOD.format(i=0, b="01"))
    gpus[0] |= {name: "[N/A]" for name in FIELDS if name not in ("index", "pci.bus_id")}
    assert list(gpu_findings(gpus)) == []
    gpus[0]["ecc.errors.uncorrected.volatile.total"] = "[Not Supported]"
    gpus[0]["clocks_event_reasons.active"] = "[Unknown Error]"
    assert list(gpu_findings(gpus)) == list(gpu_findings([{}])) == []
