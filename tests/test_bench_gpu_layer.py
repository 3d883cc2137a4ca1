"""The benchmark of one layer on a GPU, as far as a CPU can run it: floors, the reference, the comparison, the command end to end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from relative_error import relative_error

BENCH = Path(__file__).resolve().parent.parent / "bench"
sys.path.append(str(BENCH))  # the modules of the command import each other by name

import gpu_clock  # noqa: E402
import gpu_floors  # noqa: E402
import gpu_inputs  # noqa: E402
import gpu_peers  # noqa: E402

CPU = torch.device("cpu")
TINY = gpu_floors.TINY["tiny"]


# shape: (forward ms, backward ms, kept naive MiB, kept minimal MiB) on an H200, computed by hand elsewhere
KNOWN = {
    "A": (0.117, 0.228, 272, 128),
    "B": (4.175, 8.351, 4224, 1152),
    "C": (7.307, 14.614, 2112, 960),
    "D": (1.566, 3.132, 1856, 448),
    "E": (1.827, 3.653, 928, 352),
}


@pytest.mark.parametrize("name", KNOWN)
def test_floors(name):
    floor = gpu_floors.floor_of(gpu_floors.SHAPES[name])
    assert [floor.forward_ms, floor.backward_ms] == pytest.approx(KNOWN[name][:2], abs=6e-4)
    assert [floor.naive_bytes / 2**20, floor.minimal_bytes / 2**20] == list(KNOWN[name][2:])


def test_only_the_first_shape_is_bound_by_memory():
    bound = {name: gpu_floors.floor_of(shape).forward_by for name, shape in gpu_floors.SHAPES.items()}
    assert bound == dict.fromkeys("BCDEFG", "FLOPs") | {"A": "bytes"}


def test_the_document_has_the_table_of_floors():
    document = (BENCH.parent / "docs/performance.md").read_text()
    assert gpu_floors.floors_table() in document


def inputs(shape, routing="balanced", dtype=torch.float64):
    return gpu_inputs.draw_weights(shape, dtype=dtype, device=CPU), gpu_inputs.draw_inputs(shape, routing, dtype=dtype, device=CPU, seed=3)


@pytest.mark.parametrize("name", gpu_floors.SHAPES)
def test_balanced_routing(name):
    shape = gpu_floors.SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    expert_TK = gpu_inputs.draw_experts(shape, "balanced", device=CPU, generator=generator)
    assert expert_TK.shape == (shape.tokens, shape.topk)
    assert expert_TK.sort(dim=1).values.diff(dim=1).ne(0).all()  # K different ones
    assert torch.bincount(expert_TK.flatten()).tolist() == [shape.rows // shape.experts] * shape.experts


def test_zipf_routing_is_skewed_and_differs_between_input_sets():
    one, other = (inputs(TINY, "zipf")[1].routing, gpu_inputs.draw_inputs(TINY, "zipf", dtype=torch.float32, device=CPU, seed=4).routing)
    assert one.counts_E[0] > 2 * one.counts_E[-1]
    assert not torch.equal(one.expert_TK, other.expert_TK)


def test_rows_arrive_sorted():
    shape = gpu_floors.TINY["tiny-rows"]
    routing = inputs(shape)[1].routing
    assert routing.expert_TK.flatten().diff().ge(0).all()
    assert routing.splits == tuple(routing.counts_E.tolist()) == (24,) * 4


def test_reference_against_autograd():
    weights, given = inputs(TINY, "zipf")
    routing, leaves = given.routing, [given.x_TD, weights.weight1_LWD, weights.weight2_LDF, given.routing.weights_TK]
    y_TD = torch.zeros_like(given.x_TD)
    for k in range(TINY.topk):
        weight1, weight2 = weights.weight1_LWD[routing.expert_TK[:, k]], weights.weight2_LDF[routing.expert_TK[:, k]]
        gate, up = torch.einsum("twd,td->tw", weight1, given.x_TD).chunk(2, dim=1)
        y_TD = y_TD + routing.weights_TK[:, k, None] * torch.einsum("tdf,tf->td", weight2, torch.nn.functional.silu(gate) * up)
    expected = [y_TD, *torch.autograd.grad(y_TD, leaves, given.dy_TD)]
    for one, other in zip(gpu_inputs.reference(given, weights), expected, strict=True):
        assert relative_error(one, other) < 1e-6


@pytest.mark.parametrize("name", ["ours, torch", "loop", "grouped_mm, 2 products", "grouped_mm, 3 products", "transformers"])
@pytest.mark.parametrize("shape", gpu_floors.TINY.values(), ids=list(gpu_floors.TINY))
def test_providers_on_a_cpu(name, shape):
    if name == "transformers":
        pytest.importorskip("transformers")
    weights, given = inputs(shape, "zipf", torch.float32)
    layer = gpu_peers.PROVIDERS[name].build(shape, weights)
    y_TD = layer(given.x_TD, given.routing)
    leaves = [given.x_TD, *gpu_peers.parameters(weights), given.routing.weights_TK]
    results = [y_TD, *torch.autograd.grad(y_TD, leaves, given.dy_TD)]
    found = gpu_inputs.errors(results, gpu_inputs.reference(given, weights))
    assert max(found.values()) < gpu_inputs.TOLERANCE[torch.float32], found


def test_what_is_wrong_is_seen():
    expected = [torch.ones(100, 2) for _ in gpu_inputs.RESULTS]
    wrong = [x.clone() for x in expected]
    wrong[1][70] = 1.2  # 0.2 * sqrt(2) / sqrt(200)
    wrong[2][0, 0] = float("nan")
    wrong[3] = torch.ones(1, 2)
    assert gpu_inputs.errors(wrong, expected) == pytest.approx(
        {"output": 0, "x": 0.02, "weight1": float("inf"), "weight2": float("inf"), "router weights": 0}
    )


def test_plain_torch_keeps_what_the_naive_formula_says():
    shape = gpu_floors.Shape(64, 48, 8, 2, 4096, "")  # so many tokens that expert numbers hardly count
    weights, given = inputs(shape, dtype=torch.float32)
    layer = gpu_peers.PROVIDERS["grouped_mm, 2 products"].build(shape, weights)
    saved = gpu_clock.saved_bytes(partial(layer, given.x_TD, given.routing), gpu_peers.parameters(weights), given.x_TD)
    assert saved == pytest.approx(gpu_floors.naive_kept_bytes(shape, itemsize=4), rel=0.05)


def test_a_provider_that_takes_too_long():
    with pytest.raises(gpu_clock.TooSlow, match="took over 0 s"), gpu_clock.at_most(0.05):
        while True:
            torch.ones(1)


def test_the_command(tmp_path):
    command = [sys.executable, str(BENCH / "bench_gpu_layer.py"), "--rounds", "1", "--json", str(tmp_path / "layer.json"), "--profile"]
    peers = ["loop", "grouped_mm, 2 products", "liger", "sonic-moe", "te", "grouped_gemm"]
    environ = os.environ | {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([*command, "--peers", *peers], env=environ, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "layer.json").read_text())
    timed = {(row["shape"], row["routing"], row["provider"]) for row in result["rows"]}
    names = [gpu_peers.OURS, *peers[:2]]
    assert timed == {(shape, routing, name) for shape in gpu_floors.TINY for routing in gpu_inputs.ROUTINGS for name in names}
    ours = [row for row in result["rows"] if row["provider"] == gpu_peers.OURS]
    assert all(1 <= row["saved_over_minimal"] < 1.05 and row["theirs_over_ours"] == 1 for row in ours)
    assert all(row["largest_error"] < 1e-5 and row["both_ms"] > 0 for row in result["rows"])
    assert set(peers[2:]) <= set(result["skipped"])
    for name, reason in result["skipped"].items():
        assert f"Left out: {name}: {reason}" in done.stdout
    assert result["machine"]["versions"]["torch"] == torch.__version__
    assert "aten::mm" in done.stdout  # the profile
