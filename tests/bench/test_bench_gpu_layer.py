"""The benchmark of one layer on a GPU, as far as a CPU can run it: floors, the reference, the comparison, the
command end to end.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import types
from functools import partial

import pytest
import torch

from helpers import ROOT
from helpers.relative_error import relative_error

BENCH = ROOT / "bench/gpu"
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


def test_the_documents_have_the_tables():
    assert gpu_floors.floors_table() in (ROOT / "docs/performance.md").read_text()
    assert gpu_floors.roofline_table() in (ROOT / "docs/kernels.md").read_text()


def test_flops_of_the_kernels_are_those_of_the_layer():
    for shape in gpu_floors.SHAPES.values():
        flops = sum(flops for flops, _ in gpu_floors.kernels_of(shape).values())
        assert flops == 3 * gpu_floors.forward_flops(shape)


def test_bytes_of_a_kernel_by_hand():
    """2 tokens of width 8 use 3 of 5 experts of width 4: rows have 48 values, the activation 24."""
    kernels = gpu_floors.kernels_of(gpu_floors.Shape(8, 4, 5, 3, 2, "worked example"))
    assert kernels["down"] == (2 * 6 * 8 * 4, 2 * (24 + 5 * 8 * 4 + 48))
    assert kernels["combine, twice"] == (0, 2 * 2 * (48 + 16))


def test_documented_commands():
    documents = {path.name: path.read_text() for path in (ROOT / "docs").glob("*.md")}
    named = {name for text in documents.values() for name in re.findall(r"bench/([\w/]+\.py)", text)}
    assert len(named) > 10
    assert not {name for name in named if not (ROOT / "bench" / name).is_file()}
    # Said once, where they are explained, and in no command of its own.
    assert "\n    export PYTHONPATH=$PWD\n" in documents["performance.md"].split("\n## ")[0]
    assert not [name for name, text in documents.items() if "PYTHONPATH=. python bench" in text]


def inputs(shape, routing="balanced", dtype=torch.float64):
    return gpu_inputs.draw_weights(shape, dtype=dtype, device=CPU), gpu_inputs.draw_inputs(
        shape, routing, dtype=dtype, device=CPU, seed=3
    )


@pytest.mark.parametrize("name", gpu_floors.SHAPES)
def test_balanced_routing(name):
    shape = gpu_floors.SHAPES[name]
    generator = torch.Generator().manual_seed(0)
    expert_TK = gpu_inputs.draw_experts(shape, "balanced", device=CPU, generator=generator)
    assert expert_TK.shape == (shape.tokens, shape.topk)
    assert expert_TK.sort(dim=1).values.diff(dim=1).ne(0).all()  # K different ones
    assert torch.bincount(expert_TK.flatten()).tolist() == [shape.rows // shape.experts] * shape.experts


def test_zipf_routing_is_skewed_and_differs_between_input_sets():
    one, other = (
        inputs(TINY, "zipf")[1].routing,
        gpu_inputs.draw_inputs(TINY, "zipf", dtype=torch.float32, device=CPU, seed=4).routing,
    )
    assert one.counts_E[0] > 2 * one.counts_E[-1]
    assert not torch.equal(one.expert_TK, other.expert_TK)


def test_rows_arrive_sorted():
    shape = gpu_floors.TINY["tiny-rows"]
    routing = inputs(shape)[1].routing
    assert routing.expert_TK.flatten().diff().ge(0).all()
    assert routing.splits == tuple(routing.counts_E.tolist()) == (24,) * 4


def test_reference_against_autograd():
    weights, given = inputs(TINY, "zipf")
    routing, leaves = (
        given.routing,
        [given.x_TD, weights.weight1_LWD, weights.weight2_LDF, given.routing.weights_TK],
    )
    y_TD = torch.zeros_like(given.x_TD)
    for k in range(TINY.topk):
        weight1, weight2 = (
            weights.weight1_LWD[routing.expert_TK[:, k]],
            weights.weight2_LDF[routing.expert_TK[:, k]],
        )
        gate, up = torch.einsum("twd,td->tw", weight1, given.x_TD).chunk(2, dim=1)
        y_TD = y_TD + routing.weights_TK[:, k, None] * torch.einsum(
            "tdf,tf->td", weight2, torch.nn.functional.silu(gate) * up
        )
    expected = [y_TD, *torch.autograd.grad(y_TD, leaves, given.dy_TD)]
    for one, other in zip(gpu_inputs.reference(given, weights), expected, strict=True):
        assert relative_error(one, other) < 1e-6


def check(provider, shape, weights, given):
    """Output and gradients against the reference; the gradients of the parameters as autograd gave them."""
    leaves = provider.leaves(weights)
    y_TD = provider.build(shape, leaves.parameters)(given.x_TD, given.routing)
    dx_TD, dweights_TK, *grads = torch.autograd.grad(
        y_TD, [given.x_TD, given.routing.weights_TK, *leaves.parameters], given.dy_TD
    )
    found = gpu_inputs.errors(
        [y_TD, dx_TD, *leaves.join(grads), dweights_TK], gpu_inputs.reference(given, weights)
    )
    assert max(found.values()) < gpu_inputs.TOLERANCE[torch.float32], found
    return grads


@pytest.mark.parametrize(
    "name", ["ours, torch", "loop", "grouped_mm, 2 products", "grouped_mm, 3 products", "transformers"]
)
@pytest.mark.parametrize("shape", gpu_floors.TINY.values(), ids=list(gpu_floors.TINY))
def test_providers_on_a_cpu(name, shape):
    if name == "transformers":
        pytest.importorskip("transformers")
    weights, given = inputs(shape, "zipf", torch.float32)
    check(gpu_peers.PROVIDERS[name], shape, weights, given)


class GroupedLinear(torch.nn.Module):
    """transformer_engine.pytorch.GroupedLinear: weight0, weight1, ... [out, in] each, and splits as a
    list.
    """

    def __init__(self, num_gemms, in_features, out_features, *, bias, params_dtype, device):
        super().__init__()
        assert not bias
        self.num_gemms = num_gemms
        for index in range(num_gemms):
            weight = torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            self.register_parameter(f"weight{index}", torch.nn.Parameter(weight))

    def forward(self, inp, m_splits):
        assert type(m_splits) is list
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        return torch.cat([x @ w.t() for x, w in zip(inp.split(m_splits), weights, strict=True)])


@pytest.mark.parametrize("shape", gpu_floors.TINY.values(), ids=list(gpu_floors.TINY))
def test_transformer_engine_has_a_parameter_per_expert(monkeypatch, shape):
    package, module = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    module.GroupedLinear = GroupedLinear
    monkeypatch.setitem(sys.modules, "transformer_engine", package)
    monkeypatch.setitem(sys.modules, "transformer_engine.pytorch", module)
    weights, given = inputs(shape, "zipf", torch.float32)
    grads = check(gpu_peers.PROVIDERS["te"], shape, weights, given)
    assert [tuple(grad.shape) for grad in grads] == [(2 * shape.ffn, shape.hidden)] * shape.experts + [
        (shape.hidden, shape.ffn)
    ] * shape.experts


@pytest.mark.parametrize("name", ["whole", "gate_and_up", "one_per_expert"])
def test_parameters_are_leaves_in_the_memory_of_the_weights(name):
    weights, _ = inputs(TINY)
    leaves = getattr(gpu_inputs, name)(weights)
    assert all(parameter.is_leaf and parameter.requires_grad for parameter in leaves.parameters)
    storages = {weight.untyped_storage().data_ptr() for weight in (weights.weight1_LWD, weights.weight2_LDF)}
    assert {parameter.untyped_storage().data_ptr() for parameter in leaves.parameters} == storages
    joined = leaves.join([parameter.detach() for parameter in leaves.parameters])
    assert torch.equal(joined[0], weights.weight1_LWD)
    assert torch.equal(joined[1], weights.weight2_LDF)


@pytest.mark.parametrize("name", ["loop", "grouped_gemm", "grouped_mm, 2 products", "grouped_mm, 3 products"])
def test_the_host_asks_for_the_splits_once(monkeypatch, name):
    asked = []
    monkeypatch.setattr(gpu_peers, "_splits", lambda routing, counts_E: asked.append(1) or counts_E.tolist())
    weights, given = inputs(TINY, "zipf", torch.float32)
    counts, got = given.routing.counts_E.tolist(), []

    def gemm(x_RD, w_LDF, counts_L, splits):
        got.append(splits)
        return gpu_peers.BACKENDS["loop"](x_RD, w_LDF, counts_L, counts)

    wants_splits = not name.startswith("grouped_mm")
    leaves = gpu_peers.PROVIDERS[name].leaves
    check(gpu_peers._permuted(gemm, name, leaves=leaves, wants_splits=wants_splits), TINY, weights, given)
    assert got == [counts if wants_splits else None] * (3 if name.endswith("3 products") else 2)
    assert len(asked) == wants_splits
    # And so are those of the table built.
    before = len(asked)
    if name != "grouped_gemm":
        check(gpu_peers.PROVIDERS[name], TINY, weights, given)
        assert len(asked) - before == wants_splits


def test_bounds():
    ours, peers = (gpu_inputs.bounds(torch.bfloat16, of_peer=of_peer) for of_peer in (False, True))
    assert ours == dict.fromkeys(gpu_inputs.RESULTS, 1e-2)
    assert peers == ours | {"router weights": pytest.approx(3e-2)}


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
    parameters = gpu_inputs.whole(weights).parameters
    layer = gpu_peers.PROVIDERS["grouped_mm, 2 products"].build(shape, parameters)
    saved = gpu_clock.saved_bytes(partial(layer, given.x_TD, given.routing), parameters, given.x_TD)
    assert saved == pytest.approx(gpu_floors.naive_kept_bytes(shape, itemsize=4), rel=0.05)


def test_a_provider_that_takes_too_long():
    with pytest.raises(gpu_clock.TooSlow, match="took over 0 s"), gpu_clock.at_most(0.05):
        while True:
            torch.ones(1)


@pytest.mark.slow
def test_the_command(tmp_path):
    command = [
        sys.executable,
        str(ROOT / "bench/gpu/bench_gpu_layer.py"),
        "--rounds",
        "1",
        "--json",
        str(tmp_path / "layer.json"),
        "--profile",
    ]
    here = ["loop", "grouped_mm, 2 products"] + ["transformers"] * (
        importlib.util.find_spec("transformers") is not None
    )
    peers = [*here, "liger", "sonic-moe", "te", "grouped_gemm"]
    environ = os.environ | {
        "TRITON_INTERPRET": "0",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [*command, "--peers", *peers], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "layer.json").read_text())
    timed = {(row["shape"], row["routing"], row["provider"]) for row in result["rows"]}
    names = {
        "tiny": [gpu_peers.OURS, *here],
        "tiny-rows": [gpu_peers.OURS, *[gpu_peers.OURS_SORTING] * (len(here) > 2), *here],
    }
    assert timed == {
        (shape, routing, name) for shape in names for routing in gpu_inputs.ROUTINGS for name in names[shape]
    }
    ours = [row for row in result["rows"] if row["provider"] in gpu_peers.OUR_KERNELS]
    assert all(1 <= row["saved_over_minimal"] < 1.05 and row["theirs_over_ours"] == 1 for row in ours)
    assert all(row["largest_error"] < 1e-5 and row["both_ms"] > 0 for row in result["rows"])
    assert set(result["left_out"]) == {"liger", "sonic-moe", "te", "grouped_gemm"}
    for name, reason in result["left_out"].items():
        assert f"Left out: {name}: {reason}" in done.stdout
    assert result["machine"]["versions"]["torch"] == importlib.metadata.version("torch")
    assert "aten::mm" in done.stdout  # the profile
