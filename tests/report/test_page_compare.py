"""Smoothing, spikes and comparisons of the report, by hand."""

import math

import numpy as np
import pytest

from helpers.run_folders import dense_and_moe, event, train_record, write_run
from moe_exp.report import comparison, page
from moe_exp.report.comparison import (
    common_loss,
    cost_of,
    loss_unit,
    parity_text,
    trailing_mean,
    warnings_of,
)
from moe_exp.report.headline import pairs
from moe_exp.report.page import page_data, report_html
from moe_exp.report.run_data import AXES, read_runs, spikes

NAN = float("nan")


def test_trailing_mean():
    x, values = np.array([1.0, 2, 3, 4, 5]), np.array([1.0, 2, NAN, 4, 8])
    assert np.array_equal(trailing_mean(x, values, 2), [NAN, 1.5, 2, 4, 6], equal_nan=True)
    assert np.array_equal(trailing_mean(x, values, 0.5), [1, 2, NAN, 4, 8], equal_nan=True)
    assert trailing_mean(np.array([]), np.array([]), 1).tolist() == []
    # the second is of one iteration before a stop: it counts a twentieth of the others
    assert trailing_mean(np.array([20.0, 40, 41]), np.array([2.0, 2, 23]), 21)[-1] == pytest.approx(3)
    # A run from LOAD_DIR counts on from what its checkpoint had consumed.
    assert np.array_equal(trailing_mean(x + 100, values, 2), [NAN, 1.5, 2, 4, 6], equal_nan=True)


def test_when_a_loss_is_reached():
    values = np.array([NAN, 5, 4, 4.5, 4, 3])
    at = dict.fromkeys(AXES, np.arange(0.0, 60.0, 10.0))
    # 0.8 of the way from the second to the third
    assert cost_of(at, values, 4.2)["consumed_tokens"] == pytest.approx(18.0)
    # A value that is met exactly, one with nothing before it, and one that never comes.
    found = [cost_of(at, values, target) for target in (4, 5, 2)]
    assert found == [dict.fromkeys(AXES, 20.0), dict.fromkeys(AXES, 10.0), None]
    assert page.new_minima(values) == [1, 2, 5]
    assert len(page.new_minima(np.arange(5000.0, 0, -1), most=400)) == 400


def test_spikes():
    norms = np.ones(200)
    # before there are ten records, above and below three times the median
    norms[[5, 100, 150]] = 3.5, 3.5, 2.9
    assert spikes(norms) == [100]
    norms[90:99] = NAN
    assert spikes(norms) == [100]


def test_a_spike_of_one_record_is_seen_among_100000():
    values = np.ones(100_000)
    values[77_777], values[5] = 50, NAN
    starts = page.bucket_starts(len(values), 1000)
    mean, _, high, num_missing = page.bucketed(values, starts)
    assert len(starts) == 1000 and high.max() == 50 and high.argmax() == 777
    assert num_missing.sum() == 1 and mean[0] == 1
    assert math.isnan(page.bucketed(np.array([NAN, NAN]), page.bucket_starts(2, 1))[0][0])


def runs_of(folder, losses, **settings):
    paths = []
    for name, (values, flops, seconds, more) in losses.items():
        records = [
            train_record(index, loss, consumed_flops=flops * index, training_seconds=seconds * index)
            for index, loss in enumerate(values, start=1)
        ]
        paths.append(write_run(folder / name, records, **(settings | more)))
    return read_runs(paths)


DENSE, MOE = {"use_moe": False}, {"use_moe": True}


def test_parity_by_hand(tmp_path):
    # With four records 5% of the tokens is less than one: each record is its own mean. Both reach 3.0.
    losses = {"dense": ([5, 4, 3.5, 3], 10, 1, DENSE), "moe": ([4, 3, 2.5, None], 15, 3, MOE)}
    runs = runs_of(tmp_path, losses)
    (found,) = pairs(runs)
    shares = {"consumed_flops": 30 / 40, "training_seconds": 6 / 4, "consumed_tokens": 2 / 4}
    assert (found.loss, found.shares) == (3, shares)
    text = parity_text(found)
    assert "moe reaches the loss of dense (3.0000 nats per token, the lowest that both reach)" in text
    assert "75% of the FLOPs, 150% of the time and 50% of the tokens" in text
    assert common_loss(runs) == (3, "nats per token")


def test_parity_where_the_dense_run_is_better(tmp_path):
    losses = {"dense": ([5, 3, 2], 10, 1, DENSE), "moe": ([5, 4, 3.5], 10, 1, MOE)}
    (found,) = pairs(runs_of(tmp_path, losses))
    # dense comes to 3.5 three quarters of the way from its first record to the second.
    assert (found.loss, found.shares["consumed_tokens"]) == (3.5, 3 / 1.75)
    text = parity_text(found)
    assert "moe does not reach the loss of dense (2.0000 nats per token). It needed" in text
    assert "171% of the time and 171% of the tokens of dense to reach its own lowest loss, 3.5000" in text


@pytest.mark.parametrize(("losses", "reason"), [([], "no loss yet"), ([None], "no finite loss")])
def test_parity_without_a_loss(losses, reason, tmp_path):
    (found,) = pairs(runs_of(tmp_path, {"dense": ([5, 3], 10, 1, DENSE), "moe": (losses, 10, 1, MOE)}))
    assert found.reason == f"moe has {reason}"
    assert parity_text(found) == f"moe and dense are not compared: {found.reason}."


def test_a_run_that_has_just_begun_leaves_the_others_comparable(tmp_path):
    falling = [8 - index / 100 for index in range(400)]
    losses = {"dense": (falling, 10, 1, DENSE), "moe": (falling, 10, 1, MOE)}
    runs = runs_of(tmp_path, losses | {"new": ([9, 8], 10, 1, MOE | {"lr": 0.1})})
    # 20 records are 5% of 400: the last mean is that of 4.01 to 4.2.
    assert comparison.window_of(runs) == comparison.window_of(runs[:2])
    assert common_loss(runs) == (4.105, "nats per token")
    short = "new is too short to smooth its loss: it has less than 1% of the tokens of the longest run"
    assert [found.reason for found in pairs(runs)] == ["", short]
    assert f"{short}; comparisons of the cost to reach a loss exclude this run." in warnings_of(runs)
    assert f"Left out: {short}." in report_html(runs)


def test_a_run_without_token_counts_is_named(tmp_path):
    runs = runs_of(tmp_path, {"dense": ([5, 4], 10, 1, DENSE), "moe": ([5, 4], 10, 1, MOE)})
    runs[1].train["consumed_tokens"][:] = NAN
    assert common_loss(runs)[0] == 4
    assert "moe has losses but no token counts (consumed_tokens)" in pairs(runs)[0].reason
    page = report_html(runs[1:])
    assert "No loss can be compared. Left out: moe has losses but no token counts" in page
    assert "No loss has been recorded" not in page


def test_a_printed_loss_is_one_that_was_reached(tmp_path):
    runs = runs_of(tmp_path, {"dense": ([5, 4.049514], 10, 1, DENSE), "moe": ([5, 4.0], 10, 1, MOE)})
    assert common_loss(runs)[0] == 4.0496
    page = report_html(runs)
    assert 'value="4.0496"' in page and "(4.0496 nats per token, the lowest that both reach)" in page
    assert [comparison.rounded_up(x) for x in (4.3, 4.1 + 0.2, 4.30001)] == [4.3, 4.3, 4.3001]
    assert 'value="4.04952"' in report_html(runs, loss=4.04952)  # what was asked for stays what it is


def test_the_last_of_many_validations_is_on_the_page(tmp_path):
    (run,) = runs_of(tmp_path, {"a": ([5] * 2500, 10, 1, DENSE)})
    assert len(page_data([run])["runs"][0]["x"]["iteration"]) == 1000
    for number in (1, 4000, 4001):
        run.valid = {key: np.arange(1.0, number + 1) for key in run.valid}
        losses = page_data([run])["runs"][0]["valid"]["lm_loss"]
        assert losses[-1] == number and len(losses) <= 2001


def validate(run, bits):
    """Gives a run one validation, with a loss of 4 nats per token."""
    known = {"lm_loss": 4.0, "lm_loss_bits_per_byte": bits}
    run.valid = {key: np.array([known.get(key, NAN)]) for key in run.valid}


def test_a_run_without_a_loss_has_no_say_in_the_unit(tmp_path):
    values = {"a": [5, 4], "b": [5, 4], "c": []}
    losses = {name: (of_run, 10, 1, DENSE | {"tokenizer": name}) for name, of_run in values.items()}
    runs = runs_of(tmp_path, losses)
    for run in runs[:2]:
        validate(run, bits=2.0)
    assert (common_loss(runs), page_data(runs)["unit"]) == ((2, comparison.BITS), comparison.BITS)
    text = "The runs have different tokenizers (a: a; b: b): losses are compared in bits per byte."
    assert next(warnings_of(runs)) == text
    assert "2.0000 bits per byte" in report_html(runs)
    assert loss_unit([runs[0], runs[2]]) == comparison.NATS


def test_mixed_tokenizers_use_bits_per_byte_where_they_are_known(tmp_path):
    losses = {"dense": ([5, 4], 10, 1, DENSE), "moe": ([9, 6], 10, 1, MOE | {"tokenizer": "other"})}
    runs = runs_of(tmp_path, losses)
    assert loss_unit(runs) is None
    assert "tokenizers differ" in parity_text(pairs(runs)[0])
    assert "losses per token are not comparable, and bits per byte are not known" in next(warnings_of(runs))
    for run, bits in zip(runs, (2.0, 1.5), strict=True):  # 0.5 and 0.375 bits a nat
        validate(run, bits)
    (found,) = pairs(runs)
    assert (found.unit, found.loss) == (comparison.BITS, 2.25)  # 4 * 0.5 = 2.0 and 6 * 0.375 = 2.25
    assert "losses are compared in bits per byte" in next(warnings_of(runs))


def test_settings_that_differ(tmp_path):
    moe = MOE | {"lr": 0.01, "capacity_factor": 1.5, "run_name": "x"}
    losses = {"dense": ([5], 1, 1, DENSE), "moe": ([5], 1, 1, moe)}
    rows = dict(comparison.differing_settings(runs_of(tmp_path, losses, lr=0.003)))
    assert rows == {
        "USE_MOE": ["false", "true"], "NUM_EXPERTS": ["–", "4"], "TOPK": ["–", "1"],
        "MOE_TYPE": ["–", "dmoe"], "CAPACITY_FACTOR": ["–", "1.5"], "Z_LOSS_COEFF": ["–", "0.001"],
        "LR": ["0.003", "0.01"],
    }  # fmt: skip


def test_gaps_are_told(tmp_path):
    found = list(warnings_of(read_runs(dense_and_moe(tmp_path))))
    assert found == ["experts: 2 of 40 records have a loss that is not a number (gaps in the curve)."]


@pytest.mark.parametrize("num_records", [0, 1])
def test_a_run_of_hardly_any_records(tmp_path, num_records):
    (run,) = runs_of(tmp_path, {"short": ([5.0] * num_records, 1, 1, MOE)})
    loss, _ = common_loss([run])
    assert loss == 5 if num_records else math.isnan(loss)


def test_changed_settings_and_data_stages_are_marked(tmp_path):
    changed = event("changed_settings", 12, "10:00:00", changes=["LR 0.001 -> 0.003", "TP 1 -> 2"])
    stage = event("data_stage", 13, "10:00:01", stage=1, train_data="0.5 a 0.5 b", seq_len=4096)
    records = [train_record(iteration, 5.0) for iteration in (5, 10, 15)]
    before, resume = event("start", 0, "09:00:00"), event("resume", 5, "09:30:00")
    records = [before, records[0], resume, records[1], changed, stage, records[2]]
    runs = read_runs([write_run(tmp_path / "resumed", records)])
    found = page_data(runs)["runs"][0]["changes"]
    assert found["iteration"] == [5, 10, 10] and found["kind"] == ["resume", "settings", "stage"]
    texts = ["resume after iteration 5", "resume after iteration 12: LR 0.001 -> 0.003, TP 1 -> 2"]
    assert found["text"] == [*texts, "data stage 1 from iteration 13: 0.5 a 0.5 b, SEQ_LEN 4096"]
    page = report_html(runs)
    assert '<i class="mark changed"' in page and '<i class="mark stage"' in page
    assert "changes: ['LR 0.001 -&gt; 0.003'" not in page
    assert "LR 0.001 -&gt; 0.003, TP 1 -&gt; 2" in page
