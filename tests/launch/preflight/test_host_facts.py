import os
import socket
import subprocess

import pytest

from moe_exp.launch.preflight import host_facts
from moe_exp.launch.preflight.host_facts import disk, planned_hosts

DMESG = """\
2026-11-22T03:13:58,104212+01:00 nvidia-nvlink: Nvlink Core is being initialized, major device number 510
2026-11-22T03:14:07,123456+01:00 NVRM: Xid (PCI:0000:c1:00): 79, pid=77181, \
name=python3, GPU has fallen off the bus.
2026-11-22T03:14:07,123999+01:00 NVRM: Xid (PCI:0000:41:00): 31, pid=2218, \
name=python3, Ch 00000008, intr 00000000. MMU Fault
"""


def test_facts_of_this_host(tmp_path):
    facts = host_facts.host_facts(tmp_path / "not" / "there" / "yet")
    place = facts["disks"]["RUN_DIR"]
    assert (place["path"], place["problem"]) == (str(tmp_path), "") and place["free_bytes"] > 0
    assert {"python", "torch", "megatron-core", "kernel"} <= set(facts["versions"])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_cannot_be_written(tmp_path):
    assert disk(tmp_path / "gone")["problem"] == "not found"
    if os.geteuid():
        pytest.skip("needs root for a file system of its own")
    mount = ["mount", "-t", "tmpfs", "-o", "size=16k", "none", str(tmp_path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        assert disk(tmp_path)["problem"] == "no space left on device"
        subprocess.run(["mount", "-o", "remount,ro", str(tmp_path)], check=True)
        assert disk(tmp_path)["problem"] == "read-only file system"
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_faults_of_the_hardware_in_the_kernels_messages(tmp_path, monkeypatch):
    (tmp_path / "dmesg").write_text(f"#!/bin/sh\ncat <<'END'\n{DMESG}END\n")
    (tmp_path / "dmesg").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert host_facts.kernel_faults() == [
        "Xid 79: GPU has fallen off the bus on 0000:c1:00, once, last 11-22 03:14:07"
    ]
    (tmp_path / "dmesg").write_text("#!/bin/sh\necho 'dmesg: Operation not permitted' >&2; exit 1\n")
    assert host_facts.kernel_faults() == []


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("", []),
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("node[01-03,07],login", ["node01", "node02", "node03", "node07", "login"]),
        ("gpu[8-11]x,gpu[099-100]", ["gpu8x", "gpu9x", "gpu10x", "gpu11x", "gpu099", "gpu100"]),
    ],
)
def test_host_lists_of_slurm(text, hosts):
    assert host_facts.expanded_hosts(text) == hosts


def test_hosts_that_are_expected():
    environ = {"SLURM_JOB_NODELIST": "n[1-3]"}
    assert planned_hosts(3, "", environ) == ["n1", "n2", "n3"]
    assert planned_hosts(2, "", environ) == []  # some of them only: who has which number is not known
    assert planned_hosts(2, "x,y", environ) == ["x", "y"]


def test_a_node_has_slurms_name():
    assert host_facts.own_name({"SLURMD_NODENAME": "gpu-07"}) == "gpu-07"
    assert host_facts.own_name({}) == socket.gethostname()
