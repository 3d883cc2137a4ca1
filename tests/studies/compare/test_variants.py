"""Names and settings of variants as people write them, and lines for what cannot be meant."""

import re

import pytest

from helpers.whole_runs import SMALL
from moe_exp.config import ConfigError
from moe_exp.studies.compare.variants import differences, make_variants


def lines_of(runs="", written=(), given=SMALL) -> list[str]:
    with pytest.raises(ConfigError) as error:
        make_variants(runs, list(written), given)
    return error.value.problems


def test_default_and_kinds():
    assert [one.name for one in make_variants("", [], SMALL)] == ["dmoe", "dense"]
    given = SMALL | {"moe_type": "moe", "use_moe": "false"}
    assert [one.name for one in make_variants("", [], given)] == ["moe", "dense"]
    moe, dmoe, dense = make_variants(" moe, dmoe,dense", [], SMALL | {"capacity_factor": 1.5})
    assert (moe.config.use_moe, moe.config.moe_type, moe.config.capacity_factor) == (True, "moe", 1.5)
    assert (dmoe.config.use_moe, dmoe.config.moe_type, dmoe.config.capacity_factor) == (True, "dmoe", 0)
    assert not dense.config.use_moe
    assert not any(list(one.config.problems()) for one in (moe, dmoe, dense))


def test_values_with_commas_and_names_as_flags():
    written = ["a:NUM_EXPERTS=16,moe-layer-freq=0,1,1,1,AUX_LOSS_TYPE=aux_loss,seq_aux_loss", "b:"]
    (line,) = lines_of(written=written)
    assert line.startswith("VARIANT=b:: the text after the colon must be SETTING=VALUE")
    one, other = make_variants("", [written[0], "b:LR=0.001"], SMALL)
    own = {"num_experts": "16", "moe_layer_freq": "0,1,1,1", "aux_loss_type": "aux_loss,seq_aux_loss"}
    assert one.own == own
    assert (one.config.num_experts, one.config.moe_layers) == (16, [False, True, True, True])
    assert other.config.lr == 0.001


def test_problems_are_told_together():
    written = ["big:NUM_EXPRTS=16", "dense:LR=1", "../x:LR=1", "n:TRAIN_ITERS=3", "z:LR=much"]
    expected = [
        "RUNS=sparse: must be one of moe, dmoe, dense. Fix: .* --variant",
        "VARIANT=big:NUM_EXPRTS=16: .* Fix: use NUM_EXPERTS",
        "VARIANT=dense:LR=1: duplicate name. Fix: ",
        "VARIANT=../x:LR=1: .* letters, digits, dots, dashes and underscores. Fix: ",
        "VARIANT=n:TRAIN_ITERS=3: TRAIN_ITERS must be the same for all runs .* Fix: set ",
        "VARIANT=z:LR=much: LR=much: must be a valid number. Fix: correct LR: peak learning rate",
    ]
    for line, pattern in zip(lines_of("dense,sparse", written), expected, strict=True):
        assert re.match(pattern, line)
    (line,) = lines_of("dense,dmoe", ["logs:LR=1"])
    assert "VARIANT=logs:LR=1: logs is reserved" in line
    for name in ("DATA_STAGES", "DATA_ORDER", "TEXT_FIELD", "EOD_MASK_LOSS"):
        assert f"{name} must be the same for all runs" in lines_of("dmoe,dense", [f"n:{name}=x"])[0]
    fine = make_variants("", ["fine:NUM_EXPERTS=16"], SMALL)
    assert [one.name for one in fine] == ["dmoe", "dense", "fine"]
    (line,) = lines_of("dense")
    assert line.startswith("RUNS=dense: a comparison requires at least two")


def test_differences_are_without_what_says_nothing():
    dmoe, dense = make_variants("dmoe,dense", [], SMALL | {"moe_type": "moe"})
    assert differences([dmoe, dense]) == {"use_moe": [True, False]}
    fine = make_variants("dmoe,dense", ["fine:NUM_EXPERTS=16,LR=0.001"], SMALL)
    lists = {"use_moe": [True, False, True], "num_experts": [8, None, 16], "lr": [3e-3, 3e-3, 1e-3]}
    assert differences(fine) == lists
