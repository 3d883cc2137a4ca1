"""The layer is the same function on every layout of ranks: loss, outputs and every gradient.

Two global batches of four micro-batches, so that expert bias and the state of losses move on between them.
The rest of the ranks of (EP, TP, ETP) is data parallel. With TP a micro-batch is split along the sequence.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers.layers import layout_job
from helpers.layers.layout_job import LENGTH, MICROBATCHES, Case, Groups, Layout, balancing, confidence
from helpers.ranks import RankError, run_on_ranks
from helpers.relative_error import assert_equal_to
from moe_exp.layers.losses import AuxLoss

DOUBLE = {torch.float64: 1e-10}
LIMITS = DOUBLE | {torch.float32: 1e-5}
BALANCING = balancing(aux_loss=0.3, seq_aux_loss=0.2, global_aux_loss=0.4)
ALL_LOSSES = {"losses": BALANCING, "z_loss_coeff": 0.05}
DROPS = {**ALL_LOSSES, "capacity_factor": 0.8}
FRACTIONS = {"global_fractions": True}
SIGMOID = {"score": "sigmoid", "expert_bias": True, "bias_update_rate": 0.02, **FRACTIONS}
CASES = {
    "dropless": Case(SIGMOID, ALL_LOSSES),
    "softmax over the chosen": Case({"pre_softmax": False, "topk": 3, **FRACTIONS}, ALL_LOSSES),
    "sqrtsoftplus, groups": Case(
        {**SIGMOID, "score": "sqrtsoftplus", "topk": 4, "num_groups": 4, "group_topk": 2}, ALL_LOSSES
    ),
    "quantile bias": Case({**SIGMOID, "bias_rule": "quantile"}, ALL_LOSSES, padded=5),
    "capacity": Case(SIGMOID, DROPS),
    "capacity and pad": Case(FRACTIONS, {**DROPS, "pad_to_capacity": True}),
    "capacity by position": Case(FRACTIONS, {**DROPS, "drop_policy": "position"}),
    "padding tokens": Case(SIGMOID, ALL_LOSSES, padded=5),
    "padding tokens and capacity": Case(
        FRACTIONS, {**ALL_LOSSES, "capacity_factor": 0.6, "pad_to_capacity": True}, padded=5
    ),
    "top-p": Case(
        {**SIGMOID, "topk": 3, "top_p": 0.5},
        {"losses": (*BALANCING, *balancing(entropy=0.2)), "z_loss_coeff": 0.05},
        padded=5,
    ),
    "null experts, capacity and pad": Case(
        {"num_null_experts": 4, "topk": 3, "pre_softmax": False, **FRACTIONS},
        {**DROPS, "pad_to_capacity": True},
    ),
    "relu": Case({"score": "relu", **FRACTIONS}, {**ALL_LOSSES, "losses": balancing(l1=0.4, aux_loss=0.1)}),
    "latent experts, padding tokens and capacity": Case(FRACTIONS, DROPS, padded=3, latent=6),
    "own router and loss, padding tokens and capacity": Case(
        FRACTIONS, {**DROPS, "losses": (*BALANCING, AuxLoss(confidence, 0.5))}, padded=5, cosine=True
    ),
    "sinkhorn": Case({"assignment": "sinkhorn", "topk": 1}, {"z_loss_coeff": 0.05}),
}
ONE = Layout(1, 1, 1, ranks=1)
# With as few ranks as a layout needs, and with more, whose rest is data parallel.
TWO = [(2, 1, 1), (1, 2, 2), (2, 2, 1), (1, 2, 1)]
FOUR = [(1, 1, 1), (4, 1, 1), (2, 2, 2), (4, 2, 1), (1, 4, 4), (2, 1, 2), (4, 4, 1)]
FAST = [Layout(*sizes, ranks=2) for sizes in TWO] + [Layout(2, 2, 1, ranks=2, dispatcher="allgather")]
SLOW = [Layout(*sizes, ranks=4) for sizes in TWO + FOUR]
SLOW += [replace(layout, dispatcher="allgather") for layout in SLOW if layout.ep * layout.etp > 1]


def limits(layout: Layout) -> dict[torch.dtype, float]:
    return LIMITS if layout in (FAST[0], *SLOW) else DOUBLE


@functools.cache
def on_one_rank(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return layout_job.run_case(CASES[name], Groups(), ONE, dtype)


def is_fast(name: str, layout: Layout) -> bool:
    """On EP ranks all cases, half of them by the other dispatcher too; else one half on each layout."""
    half = list(CASES).index(name) % 2
    if layout.ep > 1:
        return layout in FAST and (layout.dispatcher == "alltoall" or half == 1)
    return layout in FAST and half == layout.etp - 1


@functools.cache
def on_ranks(layout: Layout, fast: bool) -> list[dict[Any, dict[str, Any]]] | RankError:
    """Cases, fast or slow, on every rank; or how the job failed, which is to be seen once."""
    cases = {name: case for name, case in CASES.items() if is_fast(name, layout) == fast}
    try:
        args = (layout_job.run_on_rank, layout, cases, list(limits(layout)))
        return run_on_ranks(layout.ranks, *args, timeout=300)
    except RankError as error:
        return error


def expected_on(rank: int, whole: dict[str, Any], layout: Layout) -> dict[str, Any]:
    """What a rank has to have found: its part of the tokens and of the experts."""
    tp, ep, etp = rank % layout.tp, rank // layout.etp % layout.ep, rank % layout.etp
    expected = {}
    for name, value in whole.items():
        kind = name.partition(",")[0]
        if kind[:2] in ("x ", "y "):
            if int(kind[2:]) * layout.dp // MICROBATCHES != rank // layout.tp:
                continue
            value = value[tp * LENGTH // layout.tp : (tp + 1) * LENGTH // layout.tp]
        expected[name] = layout_job.part_of_rank(kind, value, ep, etp, layout)
    return expected


def words(layout: Layout) -> str:
    return f"EP={layout.ep} TP={layout.tp} ETP={layout.etp} DP={layout.dp} {layout.dispatcher}"


def _case(layout: Layout, name: str) -> Any:
    marks = [] if is_fast(name, layout) else [pytest.mark.slow]
    return pytest.param(layout, name, id=f"{words(layout)}-{name}", marks=marks)


@pytest.mark.parametrize(
    ("layout", "name"), [_case(layout, name) for layout in (*FAST, *SLOW) for name in CASES]
)
def test_layout(layout, name):
    ranks = on_ranks(layout, is_fast(name, layout))
    if isinstance(ranks, RankError):
        raise ranks
    for dtype, limit in limits(layout).items():
        whole = dict(on_one_rank(name, dtype))
        dropped = whole.pop("dropped")
        assert sum(rank[name, dtype]["dropped"] for rank in ranks) == dropped
        assert (dropped > 0) == ("capacity" in name)
        largest = 0.0
        for rank, found in enumerate(ranks):
            values = {key: value for key, value in found[name, dtype].items() if key != "dropped"}
            largest = max(largest, assert_equal_to(limit, values, expected_on(rank, whole, layout)))
        print(f"{dtype}: largest relative error {largest:.1e}")
