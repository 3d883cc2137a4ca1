"""How long a run stays at each batch size: by hand, and iteration for iteration as training counts."""

from itertools import groupby

from hypothesis import given
from hypothesis import strategies as st

from helpers.whole_runs import SMALL
from moe_exp.config import Config, load_config
from moe_exp.config.sections.learning import RampStep


def ramped(rampup: str, *, gbsz: int = 64, train_iters: int = 100) -> Config:
    own = {"gbsz": gbsz, "mbsz": 1, "gpus_per_node": 1, "rampup_batch_size": rampup}
    return load_config(SMALL | own | {"train_iters": train_iters}, {})


def one_by_one(config: Config, num_samples: int | None) -> list[RampStep]:
    sizes, consumed = [], 0
    while len(sizes) < config.train_iters if num_samples is None else consumed < num_samples:
        sizes.append(config.batches.size_at(consumed))
        consumed += sizes[-1]
    return [RampStep(size, (count := len(list(same))), count * size) for size, same in groupby(sizes)]


def test_by_hand():
    # Three steps of 100 samples: 7 batches of 16 reach 112, 3 of 32 reach 208, 2 of 48 reach 304.
    config = ramped("16 16 300", train_iters=20)
    assert config.batches.steps() == [(16, 7, 112), (32, 3, 96), (48, 2, 96), (64, 8, 512)]
    assert config.batches.steps(250) == [(16, 7, 112), (32, 3, 96), (48, 1, 48)]
    assert config.batches.steps(0) == []


def test_without_a_ramp():
    assert ramped("", train_iters=5).batches.steps() == [(64, 5, 320)]
    assert ramped("64 8 1000").batches.steps(65) == [(64, 2, 128)]


def test_a_step_may_be_passed_over():
    # A batch of 16 is larger than the 10 samples of a step.
    assert [step.batch_size for step in ramped("16 16 30", train_iters=9).batches.steps()] == [16, 32, 64]


def test_a_trillion_samples_take_no_time():
    steps = ramped("8 8 1000000000", gbsz=4096).batches.steps(10**12)
    assert len(steps) == 512
    assert 0 <= sum(step.samples for step in steps) - 10**12 < 4096


@given(
    st.integers(1, 9), st.integers(1, 9), st.integers(0, 8), st.integers(1, 3000), st.integers(1, 400),
    st.none() | st.integers(0, 4000),
)  # fmt: skip
def test_as_counted_one_by_one(start, increment, num_steps, samples, train_iters, num_samples):
    gbsz = start + num_steps * increment
    config = ramped(f"{start} {increment} {samples}", gbsz=gbsz, train_iters=train_iters)
    assert config.batches.steps(num_samples) == one_by_one(config, num_samples)
