from dataclasses import replace

import pytest

from helpers.planner.planned import A100, LARGE, PRIORS, SMALL, found, model, with_memory
from moe_exp.config import ConfigError, load_config
from moe_exp.planner.search import layout_text
from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS
from moe_exp.planner.search.layout_text import exported_settings, parse_budget, parse_fixed, parse_wanted
from moe_exp.planner.search.topology import explain, layout_words, search
from moe_exp.planner.tables import describe_candidate


def told(wanted, *, fixed=None, **settings):
    return explain(replace(found(48, **settings), fixed=fixed or {}), wanted)


def names(lines):
    return [line.partition("=")[0] for line in lines]


def test_all_reasons_together():
    said = told({"tp": 3, "pp": 13, "vpp": 4})
    assert (said.candidate, said.fits, said.place) == (None, False, 0)
    assert {"GPUS_PER_NODE", "TP", "VPP"} <= set(names(said.problems))
    rules = " ".join(said.problems)
    for rule in ("TP*PP*CP=39", "NUM_HEADS=112", "VOCAB_SIZE=250880", "every layer waits"):
        assert rule in rules
    assert all(" Fix: " in line for line in said.problems)


def test_a_batch_for_no_whole_number_of_replicas():
    said = told({"tp": 2, "pp": 4}, gbsz=1024)
    (line,) = said.problems
    assert line == "GBSZ=1024: must be a multiple of MBSZ*DP=1*48=48. Fix: set GBSZ to 1008 or 1056."


def test_one_setting_is_blamed_for_itself_alone():
    # not for the ranks that TP=5, PP=1 would leave over
    assert set(names(told({"tp": 5}).problems)) == {"TP"}
    assert "the global batch is not a multiple" in told({"mbsz": 3}).problems[0]
    # flags that fix a setting count
    said = told({"tp": 4}, fixed={"pp": (12,), "mbsz": (3,)})
    assert names(said.problems) == ["GBSZ"]
    assert "MBSZ*DP=3*8=24" in said.problems[0]


def test_where_a_layout_stands_and_what_it_loses():
    everything = found(48)
    best, last = everything.ranked[0], everything.ranked[-1]
    names = (name for name in LAYOUT_SETTINGS if not name.endswith("_stage_layers"))
    said = told({name: getattr(last.config, name) for name in names})
    assert said.fits and said.candidate is not None
    assert said.candidate.config == last.config
    assert everything.ranked[said.place - 1].seconds == last.seconds
    assert sum(said.losses.values()) == pytest.approx(last.seconds - best.seconds)
    assert list(said.losses.values()) == sorted(said.losses.values(), reverse=True)
    assert set(said.losses) == set(last.prediction.time.parts())
    said = told({"tp": best.config.tp, "pp": best.config.pp})
    assert said.place == 1 and not any(said.losses.values())


def test_a_layout_out_of_memory_says_how_far():
    hardware = with_memory(10)
    config = model(LARGE, nnodes=48)
    everything = search(config, hardware, constants=PRIORS)
    said = explain(everything, {"tp": 4, "pp": 12})
    assert said.candidate is not None and not said.fits
    assert said.problems[0].startswith("LAYOUT=TP4,PP12,DP8: needs ")
    assert f"{said.candidate.prediction.peak_bytes / 2**30:.1f} of 10.0 GiB" in said.problems[0]


def test_bound_and_layout_in_words():
    fixed = {"tp": [2], "pp": [2], "ep": [2], "vpp": [2], "etp": [1]}
    result = search(model(SMALL), A100, fixed=fixed, constants=PRIORS)
    one = result.ranked[0]
    assert layout_words(one.config) == "TP2,PP2,VPP2,EP2,DP1"
    words = describe_candidate(one, result, 1)["bound_by"]
    assert words.startswith(one.prediction.time.bound.replace("_", " "))


@pytest.mark.parametrize(
    "base",
    [
        LARGE | {"nnodes": 48},
        {"preset": "mixtral-8x7b", "nnodes": 2, "gpus_per_node": 8, "gbsz": 64},
        {"preset": "mixtral-8x7b", "nnodes": 2, "gpus_per_node": 8},
        # what TRAIN_ITERS would give is 500
        {"preset": "mixtral-8x7b", "nnodes": 2, "gpus_per_node": 8}
        | {"train_iters": 5000, "warmup_iters": 1000},
    ],
)
def test_training_takes_what_is_exported(base):
    config = model(base)
    ranked = search(config, A100, constants=PRIORS).ranked
    uneven = [one for one in ranked if one.config.pipeline_layers][:2]
    interleaved = [one for one in ranked if one.config.vpp][:2]
    for one in [*ranked[:2], *uneven, *interleaved]:
        variables = dict(exported_settings(one.config, load_config({"preset": config.preset}, {})))
        # Whatever an earlier layout left in the environment is overridden.
        old = {"TP": "2", "PIPELINE_LAYERS": "1,2", "FIRST_STAGE_LAYERS": "7", "VPP": "9"}
        old |= {"RECOMPUTE": "moe_act", "NNODES": "3", "GBSZ": "48"}
        again = load_config({}, old | variables)
        assert again == one.config
        assert list(again.problems()) == []
        assert "NODE_RANK" not in variables and "MASTER_ADDR" not in variables


def test_an_empty_setting_cannot_be_exported():
    config = model({"preset": "deepseek-v3-like"}, rampup_batch_size="", gpus_per_node=8)
    with pytest.raises(ValueError, match=r"^RAMPUP_BATCH_SIZE=: .* PRESET=deepseek-v3-like\. Fix: "):
        list(exported_settings(config, load_config({"preset": "deepseek-v3-like"}, {})))


def test_lists_of_values():
    texts = {"tp": "2, 4", "vpp": "none,2", "recompute": "full", "pipeline_layers": "8,9*10,8"}
    values = {"tp": (2, 4), "vpp": (None, 2), "recompute": ("full",), "pipeline_layers": ("8,9*10,8",)}
    assert parse_fixed(texts | {"first_stage_layers": "0"}) == values | {"first_stage_layers": (0,)}


def test_a_layout_in_one_line():
    config = model(LARGE, nnodes=48)
    wanted = {"tp": 4, "pp": 12, "mbsz": 2, "vpp": None}
    assert parse_wanted("TP=4, pp=12,MBS=2,DP=8,vpp=none", config) == wanted
    assert parse_wanted("PIPELINE_LAYERS=5,6*10,5,PP=12", config) == {"pipeline_layers": "5,6*10,5", "pp": 12}


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("TP=4,PP=12,DP=9", [r"DP=9: must be GPUs / \(TP\*PP\*CP\) = 384 / 48\. Fix: "]),
        ("TP=4,DP=8", [r"DP=8: must be GPUs"]),
        ("TP=0,VPP=x,RECOMPUTE=y", ["TP=0: must be", "VPP=x: must be", "RECOMPUTE=y: must be 'none', "]),
        ("TP,GBSZ=3", ["EXPLAIN=TP: must be", "EXPLAIN=GBSZ=3: must be"]),
        ("PIPELINE_LAYERS=5+6", [r"PIPELINE_LAYERS=5\+6: must be a comma-separated"]),
    ],
)
def test_every_part_that_is_no_layout_is_named(text, lines):
    with pytest.raises(ConfigError, match="\n".join(f"{line}.*" for line in lines)) as error:
        parse_wanted(text, model(LARGE, nnodes=48))
    assert len(error.value.problems) == len(lines)


@pytest.mark.parametrize("text", ["0", "-1", "2.5", "x", "", "1,,2"])
def test_values_that_are_no_sizes(text):
    with pytest.raises(ConfigError, match=r"^TP=.*: must be .* Fix: "):
        parse_fixed({"tp": text})
    with pytest.raises(ConfigError, match=r"PIPELINE_LAYERS=1\*99999999999: must be"):
        parse_fixed({"pipeline_layers": "1*99999999999"})


def test_token_budgets():
    counts = {"300B": 300 * 10**9, "3e11": 3 * 10**11, "0.5t": 5 * 10**11, "7": 7, None: None}
    for text, count in counts.items():
        assert parse_budget(text, "1.5") == {"num_tokens": count, "price_per_gpu_hour": 1.5}
    assert parse_budget("7", None)["price_per_gpu_hour"] is None
    for text in ("0", "-3B", "many", "", "B", "inf", "nan", "1e300"):
        with pytest.raises(ConfigError, match=r"^TOKENS=.*: must be .*1e\+18\. Fix: .*\nPRICE=-1: must be"):
            parse_budget(text, "-1")


def test_gpus_are_whole_nodes():
    assert layout_text.world_of(384, 8) == {"nnodes": 48, "gpus_per_node": 8}
    assert layout_text.world_of(4, 8) == {"nnodes": 1, "gpus_per_node": 4}
    with pytest.raises(ValueError, match=r"^GPUS=12: .* GPUS_PER_NODE=8\. Fix: use 8 or 16"):
        layout_text.world_of(12, 8)
    for gpus, per_node, name in ((0, 8, "GPUS"), (-8, 8, "GPUS"), (8, 0, "GPUS_PER_NODE")):
        with pytest.raises(ValueError, match=f"^{name}=-?[08]: must be a whole number"):
            layout_text.world_of(gpus, per_node)
