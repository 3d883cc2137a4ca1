"""Stages of unequally many layers: the same losses and gradients as on one rank, and through checkpoints.

Every split starts from the checkpoint of one rank, with another seed: a tensor that is not loaded is seen.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from helpers.model_on_ranks import Found, run_models
from helpers.relative_error import assert_equal_to
from helpers.whole_runs import SMALL
from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import load_config

LIMIT = 1e-5
KINDS: dict[str, dict[str, Any]] = {
    "moe": {"num_layers": 6, "first_k_dense": 1, "shared_expert_size": 16},
    "dense": {"num_layers": 6, "use_moe": False, "tie_embeddings": True, "normalization": "LayerNorm"}
    | {"add_bias_linear": True},
    "deep": {"num_layers": 10, "moe_layer_freq": "2"},
}
# Kind, ranks, layout. The number of ranks is TP*PP.
SPLITS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "first 2 of PP2": ("moe", 2, {"pp": 2, "first_stage_layers": 2}),
    "last 1 of PP2": ("dense", 2, {"pp": 2, "last_stage_layers": 1}),
    "first and last of PP4": ("moe", 4, {"pp": 4, "first_stage_layers": 1, "last_stage_layers": 1}),
    "last of PP4": ("deep", 4, {"pp": 4, "last_stage_layers": 4}),
    "any of PP4": ("moe", 4, {"pp": 4, "pipeline_layers": "1,3,1*2"}),
    "only the embedding": ("moe", 2, {"pp": 2, "pipeline_layers": "0,6"}),
    "only the output layer": ("moe", 2, {"pp": 2, "pipeline_layers": "6,0", "recompute": "full"}),
    "ends without layers": ("moe", 4, {"pp": 4, "pipeline_layers": "0,2,4,0"}),
    "ends without layers, tied": ("dense", 4, {"pp": 4, "pipeline_layers": "0,3*2,0"}),
    "only the embedding, TP2": ("moe", 4, {"tp": 2, "pp": 2, "pipeline_layers": "0,6"}),
    "VPP of PP2": ("moe", 2, {"pp": 2, "vpp": 2, "pipeline_layers": "2,4"}),
    "VPP, first of PP2": ("deep", 2, {"pp": 2, "vpp": 2, "first_stage_layers": 6}),
    "VPP, last of PP2": ("dense", 2, {"pp": 2, "vpp": 2, "last_stage_layers": 2}),
    "VPP of PP4": ("deep", 4, {"pp": 4, "vpp": 2, "pipeline_layers": "2,4,2*2"}),
}
# The rest is slow.
FAST = ["first 2 of PP2", "only the embedding", "VPP of PP2"]
BATCH = {"gbsz": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a checkpoints folder per kind, once `one_rank` was asked for it."""
    return tmp_path_factory.mktemp("stages")


@pytest.fixture(scope="module")
def one_rank(folder: Path) -> Callable[[str], Found]:
    """What a kind of model does on one rank, from what it saves before."""
    return cache(lambda kind: run_models(1, [BATCH | KINDS[kind] | {"save": f"{folder}/{kind}"}])[0])


@pytest.fixture(scope="module")
def on_ranks(folder: Path, one_rank: Callable[[str], Found]) -> Callable[[str], Found]:
    """What the model of a split does, by the split's name, from the checkpoint of one rank."""

    @cache
    def run_all(num_ranks: int, fast: bool) -> dict[str, Found]:
        names = [name for name in SPLITS if SPLITS[name][1] == num_ranks and (name in FAST) is fast]
        for kind in {SPLITS[name][0] for name in names}:
            one_rank(kind)
        start = {"iterations": 1, "seed": 99}
        jobs = [BATCH | settings_of(name) | start | {"load": f"{folder}/{SPLITS[name][0]}"} for name in names]
        return dict(zip(names, run_models(num_ranks, jobs), strict=True))

    return lambda name: run_all(SPLITS[name][1], name in FAST)[name]


def settings_of(name: str) -> dict[str, Any]:
    kind, num_ranks, layout = SPLITS[name]
    return KINDS[kind] | {"gpus_per_node": num_ranks} | layout


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FAST else [pytest.mark.slow]) for name in SPLITS]
)
def test_same_numbers_as_on_one_rank(name, on_ranks, one_rank):
    found, alone = on_ranks(name), one_rank(SPLITS[name][0])
    assert_equal_to(LIMIT, {"losses": found.losses}, {"losses": alone.losses[: BATCH["gbsz"]]})
    assert found.grad_norms == pytest.approx(alone.grad_norms[:1], rel=LIMIT)
    gradients = dict(found.gradients)
    if "output_layer.weight" not in alone.gradients:  # tied: the last stage has a copy
        copy, tied = gradients.pop("output_layer.weight"), alone.gradients["embedding.word_embeddings.weight"]
        assert_equal_to(LIMIT, {"copy": copy}, {"copy": tied})
    assert_equal_to(LIMIT, gradients, alone.gradients)


@pytest.mark.parametrize("name", SPLITS)
def test_splits_pass_the_checks(name):
    stated = {**SMALL, "hidden_size": 32, "gbsz": 32} | settings_of(name)
    assert list(load_config(stated, {}).problems()) == []


@pytest.mark.slow
def test_stages_without_layers_in_a_checkpoint(folder, one_rank):
    """Saved by them, and loaded under other splits: the second iteration is that of a run on one rank."""
    alone = one_rank("moe")
    ends = BATCH | KINDS["moe"] | {"distributed_optimizer": True, "gpus_per_node": 4}
    ends |= {"pp": 4, "pipeline_layers": "0,4,2,0"}
    start, middle = f"{folder}/moe", f"{folder}/ends"
    [saved] = run_models(4, [ends | {"load": start, "save": middle, "save_after": 1}])
    again = BATCH | KINDS["moe"] | {"load": middle, "iterations": 1, "seed": 99}
    found = [
        *run_models(1, [again]),
        *run_models(2, [again | {"pp": 2, "pipeline_layers": "5,1"}]),
        *run_models(4, [again | ends]),
    ]
    second = alone.losses[BATCH["gbsz"] :]
    assert_equal_to(LIMIT, {"losses": saved.losses}, {"losses": alone.losses})
    for resumed in found:
        assert_equal_to(LIMIT, {"losses": resumed.losses}, {"losses": second})
    assert saved_config(one_checkpoint(Path(middle))).stage_layers == [6]
