"""Lines in the formats that torch, NCCL, CUDA, the driver, the kernel and SLURM print."""

import json
import re
import subprocess
import sys

import pytest

from moe_exp.cli import main
from moe_exp.runs.records import append_event
from moe_exp.watch.blame import Origin, blame, hosts_to_exclude, log_files, origin, origin_of_file
from moe_exp.watch.known_errors import CAUSES, XIDS, Fault, recognised

WATCHDOG = "[rank4]:[E321 02:07:08.41 ProcessGroupNCCL.cpp:607] Watchdog caught collective operation timeout"

# Each line, and below it: what, cause, host, rank, device, time.
LINES = f"""\
Nov  3 02:06:59 gpu-b07 kernel: [1843.308145] NVRM: Xid (PCI:0000:c1:00): 79, pid=77181, GPU has fallen off
    Xid 79: GPU has fallen off the bus|hardware|gpu-b07||0000:c1:00|11-03 02:06:59
[Mon Nov  3 02:06:59 2026] NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error
    Xid 94: memory error contained to one program (ECC)|hardware|||0000:9b:00|11-03 02:06:59
[24128.834365] NVRM: Xid (PCI:0000:01:00): 31, Ch 00000003, engmask 00000101, intr 10000000
    Xid 31: kernel accessed an unmapped address|kernel|||0000:01:00|24128.8 s
2026-11-03T02:06:59+01:00 gpu-b07 kernel: NVRM: Xid (PCI:0000:dc:00): 45, pid=1818990, name=python3
    Xid 45: program's channels were cleaned up|consequence|gpu-b07||0000:dc:00|11-03 02:06:59
NVRM: Xid (PCI:0000:00:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 00
    Xid 149: NVLink 5 error|hardware|||0000:00:00|
Nov 22 03:00:01 gpu-b07 kernel: NVRM: The NVIDIA GPU 0000:b3:00.0 (PCI ID: 10de:26b5) has fallen off the bus
    GPU has fallen off the bus|hardware|gpu-b07||0000:b3:00.0|11-22 03:00:01
[rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered
    uncorrectable memory error (ECC)|hardware||3||
moe-exp: rank 11 on gpu-b07 (cuda:3) failed: AcceleratorError: CUDA error: uncorrectable ECC error encountered
    uncorrectable memory error (ECC)|hardware|gpu-b07|11|cuda:3|
moe-exp: rank 1 on laptop (cpu) failed: RuntimeError: the disk is on fire
    exception of an unknown kind|crash|laptop|1|cpu|
[2026-11-03 02:07:08] WARNING gpu-b07 rank 9 cuda:1 moe_exp.training: CUDA error: unspecified launch failure
    kernel failed|kernel|gpu-b07|9|cuda:1|11-03 02:07:08
RuntimeError: CUDA error: device-side assert triggered
    assertion failed in a kernel|program||||
[rank0]: torch.AcceleratorError: CUDA error: an illegal memory access was encountered
    kernel accessed an invalid address|kernel||0||
RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`
    CUDA error|kernel||||
torch.OutOfMemoryError: CUDA out of memory. GPU 5 has a total capacity of 79.11 GiB
    GPU memory is full|memory|||cuda:5|
{WATCHDOG}
    NCCL timed out waiting for another rank|consequence||4||03-21 02:07:08
node201:127799:127863 [2] transport/net_ib.cc:101 NCCL WARN NET/IB : mlx5_0:1 Got async event : port error
    network card failed|network|node201||cuda:2|
kp-worker-0:3468:3905 [4] NCCL WARN NET/IB : Got completion from peer 10.2.0.6<54862> with status=12
    InfiniBand transfer failed at either end or in between|network|kp-worker-0||cuda:4|
[2026-11-09 07:39:30] h100-28:238:1219 [0] net_ib.cc NCCL WARN NET/IB : mlx5_ib0:1 async fatal event on QP
    InfiniBand transfer failed at either end or in between|network|h100-28||cuda:0|11-09 07:39:30
algo-1:462:462 [0] ofi_process_cq:1100 NCCL WARN NET/OFI Request completed with error.
    EFA transfer failed at either end or in between|network|algo-1||cuda:0|
Feb 14 05:03:41 gpu-1 kernel: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link DOWN
    network card's link was down|network|gpu-1|||02-14 05:03:41
DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:2251, unhandled system error
    NCCL failed|consequence||||
slurmstepd: error: Detected 1 oom_kill event in StepId=440575.0.
    out of memory: the operating system killed a process|memory||||
srun: error: nid001277: tasks 1-3: Out Of Memory
    out of memory: the operating system killed a process|memory|nid001277|||
May 15 23:09:27 worker-3 kernel: [  514.682838] Memory cgroup out of memory: Killed process 15617 (python3)
    out of memory: the operating system killed a process|memory|worker-3|||05-15 23:09:27
srun: error: Orion-18-69: task 289: Bus error
    bus error (usually /dev/shm is full)|limit|Orion-18-69|||
OSError: [Errno 28] No space left on device: '/scratch/runs/a/checkpoints/.tmp'
    disk is full|storage||||
[rank2]: RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:4218
    another rank disconnected|consequence||2||
gpu-a02: RuntimeError: CUDA error: uncorrectable NVLink error detected during the execution
    uncorrectable NVLink error|hardware|gpu-a02|||
3: [rank3]: RuntimeError: CUDA error: uncorrectable ECC error encountered
    uncorrectable memory error (ECC)|hardware||3||
ERROR: CUDA error: uncorrectable ECC error encountered
    uncorrectable memory error (ECC)|hardware||||
moe-exp: rank 5 on gpu-b07 (cuda:1) has failed after iteration 700: SIGSEGV
    rank crashed|crash|gpu-b07|5|cuda:1|
moe-exp: rank 5 on gpu-b07 (cuda:1) has failed after iteration 700: SIGKILL
    rank was terminated by a signal|consequence|gpu-b07|5|cuda:1|
nvidia-nvswitch2: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up
    NVSwitch error (SXid)|hardware|||0000:c4:00.0|
[ 99.1] EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0
    uncorrectable CPU or memory error|hardware||||99.1 s
[ 99.1] mce: [Hardware Error]: CPU 24: Machine Check Exception: 5 Bank 7: be00000000800400
    uncorrectable CPU or memory error|hardware||||99.1 s
""".splitlines()


@pytest.mark.parametrize(("line", "expected"), list(zip(LINES[::2], LINES[1::2], strict=True)))
def test_known_lines(line, expected):
    fault, where = recognised(line), origin(line)
    assert fault is not None
    found = (fault.name, fault.cause, where.host, where.rank, where.device, where.time)
    assert "|".join(found) == expected.strip()


HARMLESS = """
[2024-10-24 21:02:27] iteration       40/   40000 | consumed samples:         2560 | lm loss: 1.081154E+01 |
node201:127799:127863 [0] NCCL INFO Bootstrap : Using eth0:10.200.5.135<0>
resuming from iteration 1000
[1843.439669] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  570.158.01  Release Build
Feb 14 05:03:41 gpu-1 kernel: mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE
[   16.580293] IPv6: ADDRCONF(NETDEV_UP): ens32: link is not ready
[   38.178720] nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Non-fatal, Link 44 Minion Link DLREQ
[   38.180708] nvidia-nvswitch3: SXid (PCI:0000:04:00.0): 22013, Severity 0 Engine instance 44
mce: [Hardware Error]: Machine check events logged
[ 9.1] [Hardware Error]: Corrected error, no action required.
EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0
""".splitlines()
# The last two appear on every host of a job that asked for no GPU, and while a host starts.
SURVIVED = """\
NVRM: Xid (PCI:0018:01:00): 145, RLW_RXPIPE Nonfatal XC0 i0 Link 13 (0x0409a0c2 0x00000008 0x00000001)
NVRM: Xid (PCI:0000:1b:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)
RuntimeError: No CUDA GPUs are available
[   15.1] mlx5_core 0000:3b:00.0 ens1f0: Link down
""".splitlines()


@pytest.mark.parametrize("line", HARMLESS)
def test_lines_that_say_nothing_bad(line):
    assert recognised(line) is None


@pytest.mark.parametrize("line", SURVIVED)
def test_lines_that_no_host_is_left_out_for(line):
    assert not recognised(line).excludes


def test_xids():
    def xid(number: int) -> Fault:
        return recognised(f"NVRM: Xid (PCI:0000:c1:00): {number}, pid=1234")

    # memory errors of two bits, page retirement, lost from the bus, NVLink: the hardware must be checked
    assert all(xid(number).excludes for number in (48, 62, 64, 74, 79, 94, 95, 119, 140, 145, 154))
    assert not any(xid(number).excludes for number in (13, 31, 43, 45, 63))
    assert xid(999).name == "Xid 999" and not xid(999).excludes
    assert all(
        fault.name.startswith(f"Xid {number}: ") and fault.cause in CAUSES and fault.advice
        for number, fault in XIDS.items()
    )


@pytest.mark.parametrize(
    ("name", "host", "rank"),
    [
        ("123_4.node17.out", "node17", ""), ("slurm-1234_gpu-a07.log", "gpu-a07", ""),
        ("dmesg.gpu-c01.txt", "gpu-c01", ""), ("job1234.node17.log", "node17", ""),
        ("slurm-1234.out", "", ""), ("train.log", "", ""), ("rank_3.log", "", "3"),
        ("gpu-b02.rank11.err", "gpu-b02", "11"), ("attempt_0/3/stderr.log", "", "3"),
        ("logs/node-a.out", "node-a", ""),
    ],
)  # fmt: skip
def test_what_file_names_say(tmp_path, name, host, rank):
    assert origin_of_file(tmp_path / name) == Origin(host=host, rank=rank)


ERROR = "[rank9]: RuntimeError: CUDA error: uncorrectable ECC error encountered\n"
REASON = "uncorrectable memory error (ECC) on cuda:1, 2 times, last 03-21 01:57:02"


@pytest.fixture
def job(tmp_path):
    """Logs of a job whose rank 9 had a memory error; the others waited for it."""
    logs = tmp_path / "job"
    (logs / "checkpoints").mkdir(parents=True)
    (logs / "checkpoints" / "notes.txt").write_text("CUDA error: uncorrectable ECC error encountered\n")
    (logs / "77_0.gpu-a01.out").write_text(f"{WATCHDOG}\n{WATCHDOG.replace('02:07', '02:17')}\n")
    lines = "[2026-03-21 01:57:02] WARNING gpu-b07 rank 9 cuda:1 moe_exp.train: careful\n" + ERROR
    lines += "moe-exp: rank 9 on gpu-b07 (cuda:1) failed: RuntimeError: CUDA error: uncorrectable ECC error\n"
    (logs / "77_0.gpu-b07.out").write_text(lines)
    return logs


def test_causes_come_before_consequences(job):
    found = blame(log_files([job]))
    places = [(one.fault.cause, one.where.host, one.where.rank, one.where.device, one.count) for one in found]
    assert places == [("hardware", "gpu-b07", "9", "cuda:1", 2), ("consequence", "gpu-a01", "4", "", 2)]
    assert found[0].where.time == "03-21 01:57:02"  # of the last line before it that has one
    assert (found[1].where.time, found[1].last) == ("03-21 02:07:08", "03-21 02:17:08")
    assert hosts_to_exclude(found) == {"gpu-b07": REASON}


def test_a_ranks_own_host_counts_more_than_the_name_of_a_common_log(tmp_path):
    own = "moe-exp: rank 9 on gpu-b07 (cuda:1) failed: RuntimeError: something\n"
    (tmp_path / "all.login1.log").write_text(ERROR + own)
    assert set(hosts_to_exclude(blame([tmp_path / "all.login1.log"]))) == {"gpu-b07"}


def test_in_each_job_of_a_chain_a_rank_is_on_another_host(tmp_path):
    warning = "[2026-03-20 01:00:00] WARNING gpu-a01 rank 9 cuda:1 moe_exp.train: careful\n"
    (tmp_path / "job4711.gpu-a01.log").write_text(warning)
    (tmp_path / "job4712.gpu-b07.log").write_text(ERROR)
    assert set(hosts_to_exclude(blame(log_files([tmp_path])))) == {"gpu-b07"}
    moved = "moe-exp: rank 9 on gpu-{} (cuda:1) failed: RuntimeError: something\n"
    (tmp_path / "all.log").write_text(moved.format("c01") + ERROR + moved.format("c02"))
    assert set(hosts_to_exclude(blame([tmp_path / "all.log"]))) == {"gpu-c01"}
    (tmp_path / "train.log").write_text(ERROR)
    files = [tmp_path / "train.log", tmp_path / "all.log"]
    assert "" in [one.where.host for one in blame(files) if one.fault.excludes]  # c01 or c02: nobody knows


def test_command(job, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    excluded = tmp_path / "list"
    assert main(["watch", "blame", str(job), "--exclude", str(excluded)]) == 0
    out = capsys.readouterr().out
    (row,) = (line for line in out.splitlines() if "take the node out of service" in line)
    assert "gpu-b07" in row  # not wrapped
    assert out.index("uncorrectable memory error") < out.index("NCCL timed out")
    assert f"gpu-b07 should get no jobs: {REASON}; added to {excluded}" in out
    assert excluded.read_text().startswith("gpu-b07 ")
    assert main(["watch", "blame", str(job / "77_0.gpu-b07.out"), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["exclude"] == ["gpu-b07"] and shown["added"] == []
    assert [fault["rank"] for fault in shown["faults"]] == [9]


def test_logs_that_are_not_there_or_too_many(tmp_path, capsys, monkeypatch):
    assert main(["watch", "blame", str(tmp_path / "gone")]) == 1
    assert "not found. Fix: give log files" in capsys.readouterr().err
    assert main(["watch", "blame", str(tmp_path)]) == 1
    assert "has no logs" in capsys.readouterr().err
    for number in range(4):  # as in a folder with far more files than a run has
        (tmp_path / f"{number}.log").write_text("all is well\n")
    monkeypatch.setattr("moe_exp.watch.blame._MOST_ENTRIES", 3)
    assert main(["watch", "blame", str(tmp_path)]) == 1
    assert f"{tmp_path}: has more than 3 files. Fix: give log files" in capsys.readouterr().err


def test_what_a_run_knows_of_hangs_and_kills_is_no_line_of_a_log(tmp_path, capsys):
    (tmp_path / "train.log").write_text("all is well\n")
    append_event(tmp_path / "metrics.jsonl", "hang", 4, ranks=[2], hosts=["node-b"], folder="hang/NOW")
    killed = {"rank": 1, "host": "node-a", "device": "cpu", "cause": "SIGKILL"}
    append_event(tmp_path / "metrics.jsonl", "rank_failed", 7, **killed)
    assert main(["watch", "blame", str(tmp_path)]) == 0
    none, hang, killed = capsys.readouterr().out.splitlines()
    assert none == "No known error in these logs."
    assert hang.startswith(f"{tmp_path}: hang at iteration 4, ")
    assert hang.endswith(f": rank 2 on node-b differs from the others; see {tmp_path}/hang/NOW/summary.txt")
    assert killed.endswith(": rank 1 on node-a (cpu): SIGKILL")


FULL = """
import torch
from moe_exp.config import load_config
from functools import partial
from moe_exp.engine import faults
from moe_exp.training import interval

interval.device_name = lambda: "NVIDIA H100 80GB HBM3"
config = load_config({"preset": "qwen3-30b-a3b", "gpus_per_node": 8, "ep": 8, "gbsz": 64}, {})
kept = torch.empty(3, 2**28)
parts = [kept[0], kept[1]]
with faults.named_by_rank(faults.StopSignal(), partial(interval.out_of_memory_text, config)):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.32 GiB. GPU 0 has a total capacity")
"""


def test_full_memory_ends_in_one_line():
    ended = subprocess.run([sys.executable, "-c", FULL], capture_output=True, text=True)
    (line,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and recognised(line).name == "GPU memory is full"
    assert re.search(r"no room for 2.32 GiB; planned peak 9.* of 79.6 GiB; ", line)
    assert "; largest tensors: 3.00 GiB (float32, [3, 268435456])" in line
    assert "; to save memory: " in line and "RECOMPUTE=full (20.8 GiB less, +32% time, enough)" in line
