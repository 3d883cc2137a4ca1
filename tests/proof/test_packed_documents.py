"""A packed micro-batch has the loss and gradients of its documents alone, in test_topology.py's layouts."""

import contextlib
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from helpers.documents_on_ranks import documents_alone, packed_models
from helpers.model_on_ranks import Found
from helpers.ranks import run_on_ranks
from helpers.relative_error import assert_equal_to, relative_error
from test_topology import LAYOUTS, Layout

LIMIT = 1e-10
LATENT = {
    "multi_latent_attention": True, "kv_lora_rank": 16, "q_lora_rank": 12, "qk_head_dim": 10,
    "qk_pos_emb_head_dim": 6, "v_head_dim": 8, "qk_norm": True, "num_query_groups": 1,
}  # fmt: skip
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 4, "rope_original_seq_len": 64}
KINDS: dict[str, dict[str, Any]] = {
    "dense": {"use_moe": False, "eod_mask_loss": True},
    # Room for every token: what an expert drops depends on the other documents of the micro-batch.
    "moe": {"moe_type": "moe", "capacity_factor": 4.0},
    "dmoe": {"moe_type": "dmoe", "shared_expert_size": 32, "shared_expert_gate": True, "qk_norm": True},
    "latent": LATENT | {"eod_mask_loss": True},
    "latent, one sample": LATENT | YARN | {"mbsz": 1},
    "recompute": {"recompute": "full", "rotary_fraction": 0.5, "qkv_bias": True},
    "windows": {
        "moe_type": "dmoe",
        "sliding_window": 4,
        "window_pattern": "1:1",
        "attention_sinks": "all",
        "attention_softcap": 2.0,
        "rotary_layers": "windowed",
        "attention_gate": True,
    },
    "windows, latent": LATENT | {"sliding_window": 3, "attention_sinks": "windowed", "eod_mask_loss": True},
    "yarn": YARN | {"normalization": "LayerNorm", "qk_norm": True},
}
TP2_CP2 = Layout(2, 1, "none", 1, 1, 2)
CASES = [  # of one layout after each other, see `in_turn`
    (kind, ranks, layout)
    for ranks in (1, 2, 4)
    for layout in (*LAYOUTS, TP2_CP2)
    if layout.fits(ranks)
    for kind in KINDS
]


def is_fast(kind: str, ranks: int, layout: Layout) -> bool:
    if kind.startswith("windows"):
        return kind == "windows" and (ranks == 1 or ranks == layout.pp * layout.cp == 2)
    if ranks == 2:
        return kind == "dmoe" or (kind == "latent" and 2 in (layout.tp, layout.cp))
    return ranks == 1 and kind not in ("latent, one sample", "recompute", "yarn")


FAST = [case for case in CASES if is_fast(*case)]


def _settings(kind: str, layout: Layout) -> dict[str, Any]:
    sizes = {"num_layers": layout.num_layers, "num_query_groups": KINDS[kind].get("num_query_groups", 2)}
    return KINDS[kind] | layout._asdict() | sizes


@pytest.fixture(scope="module")
def alone() -> Callable[[str, int], Found]:
    """A kind of model of that many layers, one document at a time."""

    fast = {(kind, layout.num_layers) for kind, _, layout in FAST}

    @cache
    def run_all(in_fast: bool) -> dict[tuple[str, int], Found]:
        names = [(kind, num) for kind in KINDS for num in (2, 4) if ((kind, num) in fast) == in_fast]
        jobs = [KINDS[kind] | {"num_layers": num} for kind, num in names]
        return dict(zip(names, documents_alone(jobs), strict=True))

    return lambda *name: run_all(name in fast)[name]


@pytest.fixture(scope="module")
def packed() -> Callable[[str, int, Layout], Found]:
    @cache
    def run_all(num_ranks: int, fast: bool) -> dict[tuple[str, int, Layout], Found]:
        cases = [case for case in CASES if case[1] == num_ranks and is_fast(*case) == fast]
        jobs = [_settings(kind, layout) for kind, _, layout in cases]
        return dict(zip(cases, packed_models(num_ranks, jobs), strict=True))

    return lambda *case: run_all(case[1], is_fast(*case))[case]


def _case(kind: str, num_ranks: int, layout: Layout) -> Any:
    name = "-".join(f"{field}{value}" for field, value in layout._asdict().items())
    marks = [] if is_fast(kind, num_ranks, layout) else [pytest.mark.slow]
    return pytest.param(kind, num_ranks, layout, id=f"{kind}-{num_ranks}-{name}", marks=marks)


@pytest.mark.parametrize(("kind", "num_ranks", "layout"), [_case(*case) for case in CASES])
def test_as_documents_one_by_one(kind, num_ranks, layout, alone, packed):
    ours, right = packed(kind, num_ranks, layout), alone(kind, layout.num_layers)
    assert ours.losses.dtype == right.losses.dtype == torch.float64
    torch.testing.assert_close(ours.losses, right.losses, rtol=LIMIT, atol=0)
    assert all(gradient.dtype == torch.float64 for gradient in ours.gradients.values())
    print(f"largest relative error {assert_equal_to(LIMIT, ours.gradients, right.gradients):.1e}")


def leaks(without: str) -> tuple[int, str]:
    """On a rank: exit code and output of `moe-exp doctor --leak-test`, where attention ignores something."""
    from moe_exp.cli import main
    from moe_exp.layers.megatron import attention
    from moe_exp.layers.megatron.documents import Documents

    if without == "windows":
        attention.is_layer_window_attention = lambda *args: False
    elif without == "documents":
        Documents.are_whole_samples = property(lambda self: True)  # type: ignore[assignment,method-assign]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        code = main(["doctor", "--leak-test"])
    return code, printed.getvalue()


@pytest.mark.parametrize(("without", "num_leaks"), [("", 0), ("documents", 10), ("windows", 2)])
def test_doctor_finds_what_leaks(without, num_leaks):
    ((code, printed),) = run_on_ranks(1, leaks, without, join=False)
    assert code == int(num_leaks > 0), printed
    assert printed.count("tokens attend beyond their document or window") == num_leaks
    rows = [line.split()[-2] for line in printed.splitlines() if line.rstrip(" │|").endswith(("ok", "leaks"))]
    assert len(rows) == 10, printed


@pytest.mark.parametrize("policy", ["position", pytest.param("probs", marks=pytest.mark.slow)])
def test_dropped_tokens_are_the_same_where_ranks_share_stripes(policy):
    """Each context parallel rank has several pieces of a sequence; the queue of an expert is in its order."""
    settings = {"moe_type": "moe", "capacity_factor": 0.6, "drop_policy": policy}
    (one,) = packed_models(1, [settings])
    (two,) = packed_models(2, [settings | {"cp": 2}])
    assert_equal_to(LIMIT, two.gradients, one.gradients)
    (dropless,) = packed_models(1, [{"moe_type": "dmoe"}])
    assert relative_error(one.losses, dropless.losses) > 1e-6


def test_the_proof_fails_without_the_mask(alone):
    (leaking,) = packed_models(1, [_settings("dmoe", LAYOUTS[0])], without_mask=True)
    right = alone("dmoe", 2)
    assert relative_error(leaking.losses, right.losses) > 1e-5
    errors = {name: relative_error(leaking.gradients[name], one) for name, one in right.gradients.items()}
    assert max(errors.values()) > 0.01
