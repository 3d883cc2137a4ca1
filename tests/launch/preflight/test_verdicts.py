"""From numbers to names, on reports as nodes make them."""

import copy
import json
import random
import re

import pytest

from moe_exp.cli import main
from moe_exp.config import load_config
from moe_exp.launch.preflight.node import verdict_without
from moe_exp.launch.preflight.verdicts import (
    Verdict,
    add_to_list,
    findings_lines,
    judge,
    print_report,
    rounds_of_pairs,
)
from moe_exp.watch.excluded_nodes import read_excluded


def reports(num_nodes: int, num_ranks: int = 2, *, noise: float = 0.03) -> dict[int, dict]:
    """Healthy nodes; numbers scatter by `noise`."""
    draw = random.Random(num_nodes)

    def about(value: float) -> float:
        return value * (1 + noise * draw.uniform(-1, 1))

    def rank(node: int, number: int) -> dict:
        partners = [found[node] for found in rounds_of_pairs(num_nodes) if node in found]
        rates = ("point_to_point", "all_reduce", "all_to_all")
        return {
            "rank": node * num_ranks + number, "host": f"n{node}", "device": f"cuda:{number}", "step": "done",
            "matmul": {"wrong": 0, "teraflops": about(700.0)},
            "memory": {"wrong": 0, "gigabytes_per_second": about(2500.0)},
            "node": {"latency_us": about(20.0), "all_reduce": about(400.0), "all_to_all": about(300.0)},
            "pairs": [
                {"partner": partner, "latency_us": about(30.0)}
                | {name: about(45.0) for name in rates}
                for partner in partners
            ],
        }  # fmt: skip

    places = ("RUN_DIR", "temporary folder", "/dev/shm")
    return {
        node: {
            "host": f"n{node}", "clock": [0.001, 0.0005], "gpus": [], "gpu_problem": "", "kernel_faults": [],
            "versions": {"torch": "2.13.0", "driver": "570.1"},
            "disks": {name: {"path": f"/{name}", "free_bytes": 10**12, "problem": ""} for name in places},
            "ranks": [rank(node, number) for number in range(num_ranks)],
        }
        for node in range(num_nodes)
    }  # fmt: skip


def verdict_on(found: dict[int, dict], *, slow: float = 0.7, needed_bytes: int = 10**9) -> Verdict:
    return judge(found, slow=slow, needed_bytes=needed_bytes)


def pairs_with(found: dict[int, dict], node: int) -> list[dict]:
    """What both ends say of the pairs of `node`."""
    ranks = [rank for report in found.values() for rank in report["ranks"]]
    ends = [(pair, rank["host"]) for rank in ranks for pair in rank["pairs"]]
    return [pair for pair, host in ends if pair["partner"] == node or host == f"n{node}"]


def slow_link(found: dict[int, dict], node: int, factor: float = 0.3) -> None:
    for pair in pairs_with(found, node):
        for name in ("point_to_point", "all_reduce", "all_to_all"):
            pair[name] *= factor


@pytest.mark.parametrize(("num_nodes", "noise"), [(1, 0.03), (2, 0.03), (3, 0.03), (17, 0.03), (8, 0.45)])
def test_healthy_nodes(num_nodes, noise):
    """Where all scatter, nobody is named."""
    verdict = verdict_on(reports(num_nodes, noise=noise))
    assert (verdict.grade, verdict.to_exclude()) == ("ok", []), findings_lines(verdict)


@pytest.mark.parametrize("num_nodes", [3, 4, 9])
def test_a_slow_link_is_its_nodes_and_not_the_partners(num_nodes):
    for bad in range(num_nodes):
        found = reports(num_nodes)
        slow_link(found, bad)
        verdict = verdict_on(found)
        assert [node.host for node in verdict.nodes if node.grade != "ok"] == [f"n{bad}"]
        assert [node.host for node in verdict.to_exclude()] == [f"n{bad}"]
        first = verdict.nodes[bad].findings[0].text
        assert re.match(rf"rank {2 * bad} \(cuda:0\): point-to-point 13.*30% of the others'", first), first
    if num_nodes == 9:  # two, with a node between them
        slow_link(found, 6)
        assert [node.host for node in verdict_on(found).to_exclude()] == ["n6", "n8"]


def test_one_slow_gpu_is_named_with_rank_and_device():
    found = reports(4)
    found[2]["ranks"][1]["matmul"]["teraflops"] = 350.0
    verdict = verdict_on(found)
    (line,) = findings_lines(verdict)
    assert line.startswith("slow: n2 (node 2): rank 5 (cuda:1): matmul 350 TFLOP/s, 50% of the others' ")
    assert verdict_on(found, slow=0.45).grade == "ok"


def test_one_node_compares_its_ranks_and_is_not_excluded_for_that():
    """Ranks that share the cores of a node are not even slow."""
    found = reports(1, 4)
    found[0]["ranks"][3]["matmul"]["teraflops"] = 100.0
    for device, grade in (("cpu", "warning"), ("cuda:3", "slow")):
        for rank in found[0]["ranks"]:
            rank["device"] = device
        verdict = verdict_on(found)
        assert f"rank 3 ({device}): matmul 100 TFLOP/s" in verdict.nodes[0].findings[0].text
        assert (verdict.grade, verdict.to_exclude()) == (grade, [])
    found[0]["ranks"][3]["matmul"]["wrong"] = 3
    verdict = verdict_on(found)
    assert verdict.grade == "failed" and [node.host for node in verdict.to_exclude()] == ["n0"]
    assert verdict.nodes[0].reason == "rank 3 (cuda:3): 3 wrong elements in matrix products"


def test_a_link_a_hundred_times_slower_shows_also_where_the_others_differ():
    found = reports(3, 1)
    for node, rate in enumerate((0.59, 0.0047, 0.27)):
        for pair in found[node]["ranks"][0]["pairs"]:
            pair["point_to_point"] = rate
    assert [node.grade for node in verdict_on(found).nodes] == ["ok", "slow", "ok"]


@pytest.mark.parametrize(
    ("change", "grade", "text", "excluded"),
    [
        (lambda n: n["ranks"][0]["memory"].update(wrong=7), "failed",
         "rank 2 (cuda:0): 7 words of memory differ from what was written", True),
        (lambda n: n["ranks"][1].update(step="memory", error="ended there", died=True), "failed",
         "rank 3 (cuda:1): step memory: ended", True),
        (lambda n: n["ranks"][0].update(node={"error": "timeout"}), "failed",
         "ranks of the node cannot reach each other: timeout", True),
        (lambda n: n["disks"]["RUN_DIR"].update(free_bytes=10), "failed",
         "RUN_DIR /RUN_DIR: 10 bytes free, but 1 GB needed", False),
        (lambda n: n["disks"]["RUN_DIR"].update(problem="read-only file system"), "failed",
         "RUN_DIR /RUN_DIR: read-only file system", False),
        (lambda n: n["disks"]["temporary folder"].update(free_bytes=10), "warning",
         "temporary folder /temporary folder: 10 bytes", False),
        (lambda n: n["disks"]["temporary folder"].update(problem="permission denied"), "failed",
         "permission denied", True),
        (lambda n: n.update(clock=[-42.0, 0.01]), "warning", "clock is 42.0 s ahead of node 0's", False),
        (lambda n: n.update(clock=[3.5, 0.01]), "warning", "clock is 3.5 s behind node 0's", False),
        (lambda n: n.update(clock=[3.0, 2.5]), "ok", "", False),  # over a bad connection
        (lambda n: [pair.update(latency_us=900.0) for rank in n["ranks"] for pair in rank["pairs"]], "slow",
         "latency 900 us, median of the others 30", True),
        (lambda n: n["versions"].update(driver="535.2"), "warning", "driver 535.2, most nodes have 570.1",
         False),
        (lambda n: n["versions"].pop("torch"), "warning", "torch missing, most nodes have 2.13.0", False),
        (lambda n: n.update(kernel_faults=["Xid 79: GPU has fallen off the bus, once"]), "warning",
         "kernel: Xid 79", False),
        (lambda n: n.update(gpus=[{}]), "failed", "nvidia-smi lists 1 GPUs, but GPUS_PER_NODE=2", True),
        (lambda n: n.update(gpu_problem="nvidia-smi: no answer"), "failed", "nvidia-smi: no answer", True),
        (lambda n: [rank.update(device="cpu") for rank in n["ranks"]], "failed",
         "has no usable GPU, unlike other nodes", True),
        (lambda n: n["disks"]["/dev/shm"].update(free_bytes=60 << 20), "failed",
         "/dev/shm: 62.9 MB free, but 67.1 MB needed", True),
    ],
)  # fmt: skip
def test_findings_of_one_node_of_three(change, grade, text, excluded):
    found = reports(3)
    change(found[1])
    verdict = verdict_on(found)
    assert [node.grade for node in verdict.nodes] == ["ok", grade, "ok"], findings_lines(verdict)
    of_node = [line for line in findings_lines(verdict) if line.startswith(f"{grade}: n1 (node 1): ")]
    assert any(text in line for line in of_node) == bool(text), findings_lines(verdict)
    assert [node.host for node in verdict.to_exclude()] == (["n1"] if excluded else [])


def test_ranks_that_wait_in_vain_are_not_at_fault():
    found = reports(3)
    found[1]["ranks"][0].update(step="matmul", error="ended there (Killed)", died=True)
    for node in (0, 2):
        for rank in found[node]["ranks"]:
            rank.update(step="pairs 1", error="RuntimeError: wait timeout")
    verdict = verdict_on(found)
    assert [node.host for node in verdict.to_exclude()] == ["n1"]


def test_pairs_that_failed():
    found = reports(4)
    for pair in pairs_with(found, 2):
        partner = pair["partner"]
        pair.clear()
        pair.update(partner=partner, error="Timed out waiting 10000ms")
    verdict = verdict_on(found)
    (line,) = (line for line in findings_lines(verdict) if line.startswith("failed"))
    assert line.startswith("failed: n2 (node 2): cannot exchange correct data with n0, n1, n3 (Timed out")
    found = reports(4)
    found[0]["ranks"][0]["pairs"][0] = {"partner": 1, "wrong": "all-to-all: 3 words"}
    verdict = verdict_on(found)
    (line,) = findings_lines(verdict)
    assert line.startswith("failed: link: n0 cannot exchange correct data with n1 (all-to-all")
    assert verdict.to_exclude() == []


@pytest.mark.parametrize("kind", ["wrong", "error"])
def test_what_fails_only_with_all_ranks_together_is_no_nodes_fault(kind):
    found = reports(3)
    for report in found.values():
        for rank in report["ranks"]:
            rank["all_ranks"] = {"latency_us": 50.0}
    found[1]["ranks"][0]["all_ranks"] = {kind: "all-reduce: 3 sums are wrong"}
    verdict = verdict_on(found)
    assert verdict.grade == "failed" and verdict.to_exclude() == []
    assert "failed: link: all ranks together: all-reduce: 3 sums are wrong" in findings_lines(verdict)
    assert verdict.all_ranks == {"latency_us": 50.0}


def test_what_most_nodes_have_is_no_nodes_fault():
    found = reports(3)
    for node in (0, 1):
        found[node]["disks"]["/dev/shm"]["problem"] = "read-only file system"
    verdict = verdict_on(found)
    assert verdict.grade == "failed" and verdict.to_exclude() == []


def test_report_for_people_programs_and_the_list(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")  # a pipe: the table has the width that it wants
    found = reports(3)
    slow_link(found, 2, 0.1)
    found[0]["ranks"][0]["all_ranks"] = {"latency_us": 50.0, "all_reduce": 4.2, "all_to_all": 5.1}
    verdict = verdict_on(copy.deepcopy(found))
    print_report(verdict, num_ranks=6)
    printed = capsys.readouterr().out
    rows = [line.split()[:3] for line in printed.splitlines()]
    assert all(row in rows for row in (["0", "n0", "ok"], ["1", "n1", "ok"], ["2", "n2", "slow"]))
    assert "All 6 ranks together: all-reduce 4.2 GB/s, all-to-all 5.1 GB/s, latency 50 us" in printed
    assert "slow: n2 (node 2): rank 4 (cuda:0): point-to-point 4." in printed
    shown = json.loads(json.dumps(verdict.as_json()))
    assert (shown["grade"], shown["exclude"], shown["nodes"][2]["grade"]) == ("slow", ["n2"], "slow")
    assert add_to_list(verdict, tmp_path / "list") == ["n2"]
    assert add_to_list(verdict, tmp_path / "list") == []
    assert "preflight: rank 4 (cuda:0): point-to-point" in read_excluded(tmp_path / "list")["n2"]


def test_a_node_rank_that_is_none_is_refused_before_anybody_waits(capsys, monkeypatch):
    monkeypatch.setenv("PRESET", "cpu")
    assert main(["watch", "preflight", "--nnodes", "2", "--node-rank", "5"]) == 1
    assert capsys.readouterr().err.startswith("moe-exp watch: NODE_RANK=5: must be less than NNODES=2. Fix: ")


@pytest.mark.parametrize(
    ("num_nodes", "num_missing", "num_excluded"), [(2, 1, 1), (16, 2, 2), (16, 3, 0), (64, 30, 0)]
)
def test_one_node_may_be_dead_and_many_missing_are_something_else(num_nodes, num_missing, num_excluded):
    config = load_config({"preset": "cpu", "nnodes": str(num_nodes)}, {})
    names = [f"n{number}" for number in range(num_nodes)]
    came = {number: {"host": names[number]} for number in range(num_nodes - num_missing)}
    verdict = verdict_without(config, came, names)
    assert verdict.grade == "failed"
    assert [node.host for node in verdict.to_exclude()] == names[num_nodes - num_excluded :]
