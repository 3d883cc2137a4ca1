from collections import Counter
from itertools import product

import pytest

from helpers.planner.planned import A100, LARGE, PRIORS, SMALL, found, model, with_memory
from moe_exp.config import ConfigError
from moe_exp.planner.costs.job import PlannedJob
from moe_exp.planner.prediction import predict
from moe_exp.planner.search import layout_rules, topology
from moe_exp.planner.search.layout_rules import (
    Space,
    families,
    layout_problems,
    recompute_level,
    recompute_settings,
    stage_splits,
    with_layout,
)
from moe_exp.planner.search.topology import search, search_smaller

LEVELS = ("none", "experts", "experts; host: attention", "selective", "full")
GROUPS = {"num_router_groups": 4, "router_group_topk": 2}
MODELS = {
    "dense": (LARGE, {"nnodes": 8}),
    "ramp-up": (LARGE, {"nnodes": 48, "rampup_batch_size": "192 16 9765"}),
    "small": (SMALL, {}),
    "biases": (SMALL, {"add_bias_linear": True, "nnodes": 2}),
    "local dispatcher": (SMALL, {"dispatcher": "local", "nnodes": 2}),
    "deepep": (SMALL, {"dispatcher": "deepep", "nnodes": 2}),
    "grouped rows": (SMALL, {"expert_backend": "torch", "moe_ffn_hidden_size": 24, "nnodes": 2}),
    "mixtral": ({"preset": "mixtral-8x7b", "gpus_per_node": 8}, {"nnodes": 4, "gbsz": 128}),
    "latent attention": ({"preset": "deepseek-v3-like", "gpus_per_node": 8}, {"nnodes": 32}),
    "long sequences": (SMALL, {"seq_len": 32768, "nnodes": 2, "num_layers": 4}),
    "stages": (SMALL, {"nnodes": 2, "gbsz": 64, "data_stages": "[{from_samples: 320000, seq_len: 8192}]"}),
    "first layers dense": (SMALL | {"first_k_dense": 3, "num_layers": 9}, GROUPS),
}


SLOW = {"small", "local dispatcher", "grouped rows", "mixtral", "long sequences"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS]
)
def test_training_accepts_whatever_a_search_proposes_and_the_rest_is_counted_once(name):
    base, settings = MODELS[name]
    config = model(base, **settings)
    result = search(config, A100, constants=PRIORS)
    assert result.ranked, result.rejected
    assert [problem for one in result.ranked for problem in layout_problems(one.config)] == []
    assert [one.seconds for one in result.ranked] == sorted(one.seconds for one in result.ranked)
    assert not any(one.prediction.oom for one in result.ranked)
    space, rejected = Space.of(config), Counter[str]()
    left = sum(
        len(family.experts) * sum(map(len, family.batches.values())) * len(space.recompute)
        for family in families(config, space, rejected)
    )
    pairs = product(space.tp, space.pp)
    splits = sum(len(space.etps(tp)) * len(stage_splits(config, pp)) for tp, pp in pairs)
    whole = splits * len(space.cp) * len(space.ep) * len(space.mbsz) * len(space.vpp) * len(space.recompute)
    assert left + rejected.total() == whole == result.num_tried


def all_layouts(config, space):
    """The whole space as configurations, one by one."""
    for tp, pp, cp, ep in product(space.tp, space.pp, space.cp, space.ep):
        for etp, split, mbsz, vpp, recompute in product(
            space.etps(tp), stage_splits(config, pp), space.mbsz, space.vpp, space.recompute
        ):
            outer = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "etp": etp}
            yield with_layout(config, **outer, mbsz=mbsz, vpp=vpp, **recompute_settings(recompute), **split)


@pytest.mark.parametrize(
    ("gibibytes", "settings"),
    [
        pytest.param(80, {}, marks=pytest.mark.slow),
        (5.5, {"seq_len": 4096}),
        pytest.param(4.5, {"seq_len": 4096, "topk": 2}, marks=pytest.mark.slow),
    ],
)
def test_what_is_left_out_is_slower_or_does_not_fit(gibibytes, settings):
    config, hardware = model(SMALL, **settings), with_memory(gibibytes)
    result = search(config, hardware, constants=PRIORS)
    ranked = {one.config: one.seconds for one in result.ranked}
    fitting = {}
    for layout in all_layouts(config, Space.of(config)):
        if not layout_problems(layout):
            prediction = predict(PlannedJob.of(layout), hardware, PRIORS)
            if not prediction.oom:
                fitting[layout] = prediction.time.total
    assert ranked.keys() <= fitting.keys()
    best = min(fitting.values())
    assert result.ranked[0].seconds == best
    for layout, seconds in fitting.items():
        less = [layout.model_copy(update=recompute_settings(other)) for other in LEVELS]
        # Left out: slow whatever its stages, or one with less recompute is there and no slower.
        is_beaten = any(ranked.get(other, 1e9) <= seconds for other in less)
        assert layout in ranked or seconds > 1.49 * best or is_beaten
    counts = result.rejected
    too_slow = counts[layout_rules.TOO_SLOW]
    assert counts[layout_rules.NOT_NEEDED] + too_slow == len(fitting) - len(ranked) or too_slow > 0
    if gibibytes < 80:
        assert counts[layout_rules.OUT_OF_MEMORY] > 0


def test_leaving_out_changes_no_place_near_the_top(monkeypatch):
    config = model(SMALL, nnodes=4, topk=2)
    short = search(config, A100, constants=PRIORS)
    monkeypatch.setattr(topology, "_HOPELESS", float("inf"))
    whole = search(config, A100, constants=PRIORS)
    assert short.rejected[layout_rules.TOO_SLOW] > 0 and short.num_tried == whole.num_tried
    limit = 1.5 * whole.ranked[0].seconds
    near, others = ([one.config for one in of.ranked if one.seconds <= limit] for of in (short, whole))
    assert near == others


def test_a_batch_that_only_the_world_does_not_divide():
    fixed = {"tp": [4], "pp": [12], "mbsz": [2]}
    result = search(model(LARGE, nnodes=48), A100, fixed=fixed, constants=PRIORS)
    assert result.ranked
    for one in result.ranked:
        assert (one.config.world_size, one.config.data_parallel_size, one.filling_batch) == (384, 8, 192)
        assert one.config.gbsz % one.config.world_size == 128


def test_every_step_of_the_ramp_is_divided():
    ramped = found(48, rampup_batch_size="192 16 9765")
    assert ramped.rejected["a step of the batch ramp-up is not a multiple of MBSZ*DP"] > 0
    steps = {one.config.mbsz * one.config.data_parallel_size for one in ramped.ranked}
    assert steps and all(16 % step == 0 for step in steps)
    assert any(16 % (one.config.mbsz * one.config.data_parallel_size) for one in found(48).ranked)


def test_tensor_parallel_ranks_stay_in_a_node():
    config = model(LARGE, nnodes=48)
    wide = search(config, A100, fixed={"tp": [16]}, constants=PRIORS)
    assert set(wide.rejected) == {"TP spans nodes"}
    line = layout_problems(with_layout(config, tp=16))[-1]
    assert line.startswith("TP=16: ") and line.endswith("Fix: set TP to one of 1, 2, 4, 8.")
    assert layout_problems(with_layout(model(LARGE, nnodes=1, gpus_per_node=16), tp=16)) == []


def test_experts_over_nodes_are_allowed_and_noted():
    config = model(SMALL, nnodes=4)
    result = search(config, A100, fixed={"ep": [2, 8], "etp": [1]}, constants=PRIORS)
    noted = {one.config.ep: "experts span nodes" in one.notes for one in result.ranked}
    assert noted == {2: False, 8: True}
    # EP=4 over the ranks of TP
    result = search(model(SMALL, nnodes=2), A100, fixed={"tp": [4], "pp": [2], "ep": [4]}, constants=PRIORS)
    assert {(one.config.data_parallel_size, one.config.etp) for one in result.ranked} == {(1, 1)}
    assert result.rejected["GPUs are not a multiple of TP*PP*CP, or of ETP*EP*PP"] > 0  # ETP=4


def test_stages_by_the_size_of_the_vocabulary():
    config = model(LARGE, num_layers=106)
    splits = [with_layout(config, pp=12, **split).stage_layers for split in stage_splits(config, 12)]
    assert [8, *[9] * 10, 8] in splits  # embedding and output layer count
    assert all(sum(split) == 106 and min(split) > 0 for split in splits)
    config = model(LARGE, vocab_size=32000)
    (split,) = stage_splits(config, 7)
    assert with_layout(config, pp=7, **split).stage_layers == [10] * 7
    assert len(stage_splits(model(LARGE), 7)) > 1


def test_a_heavy_output_layer_takes_layers_off_the_last_stage():
    config = model({"preset": "reference", "use_moe": False, "gpus_per_node": 8})  # worth 20 of its 24 layers
    lasts = [with_layout(config, pp=4, **split).stage_layers[-1] for split in stage_splits(config, 4)]
    assert lasts[0] == 6 and min(lasts) <= 1


def test_recompute_is_what_memory_asks_for():
    config = model(SMALL, seq_len=4096, gbsz=64)
    fixed = {"tp": [1], "pp": [1], "vpp": [None], "mbsz": [16], "ep": [1]}
    levels = []
    for step in range(140):
        result = search(config, with_memory(80 * 0.97**step), fixed=fixed, constants=PRIORS)
        chosen = [recompute_level(one.config) for one in result.ranked] or ["nothing fits"]
        assert len(chosen) == 1 and result.num_tried == 5
        levels.append([*LEVELS, "nothing fits"].index(chosen[0]))
    assert levels == sorted(levels) and set(levels) >= {0, 1, 4, 5}


def test_results_change_only_if_nothing_else_fits():
    fixed = {"tp": [1], "pp": [1], "vpp": [None], "mbsz": [1], "ep": [1]}
    config, changes = model(SMALL, seq_len=256, gbsz=64), []
    for step in range(140):
        hardware = with_memory(80 * 0.97**step)
        found, changed = search_smaller(config, hardware, fixed=fixed, constants=PRIORS)
        rooms = [one.prediction.margin_bytes / one.prediction.memory_bytes for one in found.ranked]
        if changed and rooms and max(rooms) >= 0.08:
            before = search(config, hardware, fixed=fixed, constants=PRIORS).ranked
            assert all(one.prediction.margin_bytes < 0.08 * one.prediction.memory_bytes for one in before)
            assert all(getattr(found.ranked[0].config, name) == "bf16" for name in changed)
        changes.append(list(changed))
    assert [changes[0], changes[-1]] == [[], ["optimizer_state_dtype", "grad_dtype"]]
    assert changes == sorted(changes)


def test_nothing_fits():
    result = search(model(SMALL), with_memory(0.5), constants=PRIORS)
    assert not result.ranked
    assert result.smallest is not None and result.smallest.prediction.oom
    assert result.rejected[layout_rules.OUT_OF_MEMORY] > 0 and result.rejected[layout_rules.NOT_NEEDED] == 0


def test_values_that_are_fixed():
    fixed = {"vpp": [4, 2], "pp": [2], "recompute": ["full"], "mbsz": [2, 4]}
    result = search(model(SMALL), A100, fixed=fixed, constants=PRIORS)
    assert {one.config.vpp for one in result.ranked} == {2, 4}
    assert {(one.config.pp, one.config.recompute) for one in result.ranked} == {(2, "full")}
    assert {one.config.mbsz for one in result.ranked} == {2, 4}


def test_runner_ups_are_within_two_percent():
    result = found(48)
    best = result.ranked[0].seconds
    near = [one for one in result.ranked if one.seconds <= 1.02 * best]
    assert result.runner_ups() == near[1:]


def test_ranks_that_only_the_whole_world_has_are_no_problem():
    config = model(SMALL, nnodes=2, profile_iters="3-4", profile_ranks="0,7", dump_iters="2", dump_ranks="7")
    assert search(config, A100, constants=PRIORS).ranked
    with pytest.raises(ConfigError, match="PROFILE_RANKS=8: rank 8 does not exist"):
        search(config.model_copy(update={"profile_ranks": "8"}), A100, constants=PRIORS)


def test_a_model_that_no_layout_would_mend():
    with pytest.raises(ConfigError) as error:
        search(model(SMALL, num_heads=7, num_query_groups=3, topk=9), A100, constants=PRIORS)
    names = [line.partition("=")[0] for line in error.value.problems]
    assert names == ["NUM_QUERY_GROUPS", "NUM_HEADS", "TOPK"]
