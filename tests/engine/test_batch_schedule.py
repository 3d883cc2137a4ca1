"""The batch ramp-up, against Megatron-Core's own calculator where its version has one."""

import pytest

from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.engine.optimizer_setup import next_batch


def config_of(rampup: str, gbsz: int = 64) -> Config:
    sizes = {"gbsz": gbsz, "mbsz": 2, "gpus_per_node": 2}
    return load_config({**SMALL, **sizes, "rampup_batch_size": rampup}, {})


def at(config: Config, consumed: int) -> tuple[int, int, int]:
    return next_batch(config, consumed, config.seq_len)


def test_by_hand():
    ramped = config_of("16 16 300")
    # Three steps of 100 samples each.
    sizes = [(0, 16), (99, 16), (100, 32), (199, 32), (200, 48), (299, 48), (300, 64), (10_000, 64)]
    assert [(consumed, at(ramped, consumed)[-1]) for consumed, _ in sizes] == sizes
    assert at(ramped, 100)[0] == 32 // 4
    assert at(config_of(""), 7) == at(config_of("64 16 300"), 7) == (16, 2, 64)
    # samples of four times the length count as four, and two of SEQ_LEN are less than one of them
    assert next_batch(config_of(""), 7, 4 * SMALL["seq_len"]) == (8, 4, 64)


@pytest.mark.parametrize(
    ("rampup", "gbsz"), [("4 4 1000", 64), ("8 56 333", 64), ("16 16 7", 512), ("4 12 2001", 100)]
)
def test_sample_for_sample_through_a_whole_ramp(rampup, gbsz):
    """At every number of samples, and at those that a run comes by, as the planner counts them."""
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    if not hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this Megatron-Core has no ramp-up calculator")
    start, increment, samples = map(int, rampup.split())
    ramp = (gbsz, 2, 2, False, 1, start, increment, samples)
    config, theirs = config_of(rampup, gbsz), calculators.RampupBatchsizeNumMicroBatchesCalculator(*ramp)
    for consumed in range(samples + 2 * gbsz):
        theirs.update(consumed, consistency_check=True)
        assert at(config, consumed)[::2] == (theirs.get(), theirs.get_current_global_batch_size())
    consumed = 0
    for step in config.batches.steps(samples + 2 * gbsz):
        for _ in range(step.num_iterations):
            theirs.update(consumed, consistency_check=True)
            assert step.batch_size == theirs.get_current_global_batch_size()
            consumed += step.batch_size
    assert consumed >= samples + 2 * gbsz
