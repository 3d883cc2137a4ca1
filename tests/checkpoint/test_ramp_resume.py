"""A run that is interrupted in the middle of its batch ramp-up."""

import pytest

from helpers.checkpoint.legs import Leg, deviations, run_legs, write_data
from moe_exp.config.learning_rate import learning_rate


def test_goes_on_in_the_middle_of_a_ramp_under_another_layout(tmp_path):
    """The same batches, learning rates (which count samples) and losses."""
    settings = {"train_data": str(write_data(tmp_path)), "gpus_per_node": 2, "num_layers": 2}
    settings |= {"mbsz": 1, "rampup_batch_size": "2 2 24", "warmup_iters": 1}
    settings["lr_decay_style"] = "constant:2:80%,cosine:3:20%,linear:50%:100%,linear"  # in batches of 8
    saved = tmp_path / "checkpoints"
    whole = Leg(settings, steps=10, saves={6: saved})
    # 4 batches of 2 reach 8 samples, 2 of 4 reach 16, and there it is saved.
    assert whole.config.batches.steps()[:3] == [(2, 4, 8), (4, 2, 8), (6, 2, 12)]
    expected, *resumed = run_legs([whole, Leg(settings, saved, 4), Leg(settings | {"tp": 2}, saved, 4)])
    samples = [2, 4, 6, 8, 12, 16, 22, 28, 36, 44]  # after each iteration
    rates = [learning_rate(whole.config, consumed) for consumed in samples]
    assert [step.learning_rate for step in expected] == pytest.approx(rates, rel=1e-6)
    for steps in resumed:
        assert max(deviations(steps, expected[6:]).values()) < 1e-4
        assert deviations(steps, expected[6:])["lm_loss"] < 1e-6
        assert deviations(steps, expected[6:])["learning_rate"] == 0
        tokens = [sum(step.tokens_per_expert[0]) for step in steps]
        assert tokens == [batch * 16 * 2 for batch in (6, 6, 8, 8)]
