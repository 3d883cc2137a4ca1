"""The batch ramp-up, against Megatron-Core's own calculator where its version has one."""

from __future__ import annotations

import moe_exp.megatron_cpu  # noqa: F401

# isort: split
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_exp.config import load_config
from moe_exp.optim import BatchSchedule


def schedule(rampup: str, *, gbsz: int = 64, mbsz: int = 2, ranks: int = 2) -> BatchSchedule:
    settings = {"preset": "cpu", "gbsz": gbsz, "mbsz": mbsz, "gpus_per_node": ranks, "rampup_batch_size": rampup}
    return BatchSchedule(load_config(settings, {}))


def test_by_hand():
    ramped = schedule("16 16 300")
    # Three steps of 100 samples each.
    sizes = [(0, 16), (99, 16), (100, 32), (199, 32), (200, 48), (299, 48), (300, 64), (10_000, 64)]
    assert [(consumed, ramped.at(consumed)[1]) for consumed, _ in sizes] == sizes
    assert ramped.at(100)[0] == 32 // 4
    assert schedule("").at(7) == (16, 64)
    assert schedule("64 16 300").at(7) == (16, 64)


@given(st.integers(0, 2000), st.integers(1, 1000))
def test_against_megatron(consumed, samples):
    calculators = pytest.importorskip("megatron.core.num_microbatches_calculator")
    if not hasattr(calculators, "RampupBatchsizeNumMicroBatchesCalculator"):
        pytest.skip("this Megatron-Core has no ramp-up calculator")
    theirs = calculators.RampupBatchsizeNumMicroBatchesCalculator(64, 2, 2, False, 1, 8, 8, samples)
    theirs.update(consumed, consistency_check=True)
    assert schedule(f"8 8 {samples}").at(consumed) == (theirs.get(), theirs.get_current_global_batch_size())
