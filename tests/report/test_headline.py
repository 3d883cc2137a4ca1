"""The headline of a report: which run is better at equal tokens, and when nothing can be said."""

import math

import pytest

from helpers.run_folders import TOKENS, train_record, write_run
from moe_exp.report.comparison import parity_text, warnings_of
from moe_exp.report.headline import headline, pairs, ranking, seed_groups
from moe_exp.report.run_data import read_runs

DENSE, MOE = {"use_moe": False}, {"use_moe": True}


def run_of(folder, losses, *, valid=None, seconds=0.1, rates=(), **settings):
    """A run with a record per loss, and validations {iteration: loss}."""
    records = []
    for index, loss in enumerate(losses, start=1):
        rate = {"tokens_per_second": rates[index - 1]} if rates else {}
        records.append(train_record(index, loss, training_seconds=seconds * index, **rate))
        if index in (valid or {}):
            point = {"kind": "valid", "iteration": index, "consumed_tokens": TOKENS * index}
            records.append(point | {"lm_loss": valid[index]})
    return write_run(folder, records, **settings)


def test_validation_at_the_last_point_that_both_have_reached(tmp_path):
    dense = run_of(tmp_path / "dense", [5, 4, 3.5, 3], valid={2: 4.5, 4: 3.2}, **DENSE)
    moe = run_of(tmp_path / "moe", [4, 3.5, 3, 2], valid={2: 4.25}, seconds=0.4, **MOE)
    runs = read_runs([dense, moe])
    # After 2 iterations, although dense is at 3.2 in the end.
    assert headline(runs) == (
        "moe is better than dense by 0.2500 at equal tokens: validation loss 4.2500 against 4.5000 nats per"
        " token, after 1.024K tokens each.",
        "",
    )
    # After 0.4 s, the last validation of dense; moe has none until 0.8 s, so its training loss counts.
    found = ranking(runs, "training_seconds")
    assert (found.what, found.at) == ("training loss", pytest.approx(0.4))
    assert [(one.group.name, one.loss) for one in found.standings] == [("dense", 3), ("moe", 4)]


def test_validations_at_different_places_are_interpolated(tmp_path):
    dense = run_of(tmp_path / "dense", [5, 4, 3, 2], valid={1: 5, 3: 3}, **DENSE)
    moe = run_of(tmp_path / "moe", [5, 4, 3, 2], valid={2: 4.5, 4: 2.5}, **MOE)
    found = ranking(read_runs([dense, moe]))
    assert (found.at, [one.loss for one in found.standings]) == (3 * TOKENS, [3, 3.5])


def test_training_losses_where_validation_says_nothing(tmp_path):
    dense = run_of(tmp_path / "dense", [5, 4, 3], **DENSE)
    moe = run_of(tmp_path / "moe", [5, 4.5], valid={2: 4}, **MOE)
    text, _ = headline(read_runs([dense, moe]))
    assert "dense is better than moe by 0.5000 at equal tokens: training loss 4.0000 against 4.5000" in text
    other = run_of(tmp_path / "other", [5, 4, 3], valid={2: 1.0}, valid_data="elsewhere", **DENSE)
    runs = read_runs([moe, other])
    assert ranking(runs).what == "training loss"
    assert (
        "The runs were validated on different data: they are ranked by their training losses."
        in warnings_of(runs)
    )


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"gbsz": 8, "eval_iters": 5}, "validation loss"),
        ({"gbsz": 8, "eval_iters": 10}, "training loss"),
        ({"seq_len": 64}, "training loss"),
        ({"eod_mask_loss": True}, "training loss"),
    ],
)
def test_validations_of_other_samples_or_tokens_are_not_compared(other, what, tmp_path):
    usual = {"gbsz": 4, "eval_iters": 10, "seq_len": 32}
    paths = [
        run_of(tmp_path / name, [5, 4], valid={1: 4.5, 2: 3.5}, **usual | more, **DENSE)
        for name, more in (("one", {"lr": 1e-4}), ("other", other))
    ]
    assert ranking(read_runs(paths)).what == what


def test_runs_that_are_level(tmp_path):
    runs = read_runs([run_of(tmp_path / name, [5, 4], **more) for name, more in (("a", DENSE), ("b", MOE))])
    assert headline(runs)[0] == (
        "a and b have the same training loss, 4.0000 nats per token, after 1.024K tokens each."
    )


def test_the_best_of_three_and_a_single_run(tmp_path):
    ends = {"a": 3.0, "b": 2.0, "c": 2.5}
    paths = [run_of(tmp_path / name, [5, end], lr=end / 1000, **MOE) for name, end in ends.items()]
    assert headline(read_runs(paths))[0].startswith(
        "b is the best of 3 by 0.5000 at equal tokens, before c: training loss 2.0000 against 2.5000"
    )
    assert headline(read_runs(paths[:1]))[0] == (
        "a has a training loss of 3.0000 nats per token after 1.024K tokens."
    )
    # Without a dense run and one with experts, the first is the baseline of the others.
    assert [(one.run.name, one.other.name) for one in pairs(read_runs(paths))] == [("b", "a"), ("c", "a")]


def seeds(folder, name, ends, **settings):
    return [
        run_of(folder / f"{name}{seed}", [9, end], seed=seed, **settings)
        for seed, end in enumerate(ends, start=1)
    ]


def test_seeds_are_one_run_with_a_range(tmp_path):
    paths = [*seeds(tmp_path, "dense", (4.0, 4.5), **DENSE), *seeds(tmp_path, "moe", (3.0, 3.5), **MOE)]
    runs = read_runs(paths)
    assert [group.name for group in seed_groups(runs)] == ["dense1 (2 seeds)", "moe1 (2 seeds)"]
    text, about_seeds = headline(runs)
    assert "moe1 (2 seeds) is better than dense1 (2 seeds) by 1.0000 at equal tokens" in text
    assert about_seeds == (
        "The losses are means over seeds: moe1 (2 seeds) from 3.0000 to 3.5000 and dense1 (2 seeds) from"
        " 4.0000 to 4.5000. These ranges do not overlap."
    )
    assert [(one.run.name, one.other.name) for one in pairs(runs)] == [("moe1", "dense1"), ("moe2", "dense2")]
    overlapping = read_runs([*paths[:2], *seeds(tmp_path, "wide", (2.0, 4.25), lr=0.1, **MOE)])
    assert headline(overlapping)[1].endswith("These ranges overlap, so the difference may be chance.")
    assert headline(read_runs(paths[:2]))[0] == (
        "No two of the runs can be compared at equal tokens: they differ only in SEED."
    )


def test_a_percentage_only_for_a_loss_that_both_come_down_to(tmp_path):
    dense = run_of(tmp_path / "dense", [5, 4, 3.5], **DENSE)
    moe = run_of(tmp_path / "moe", [3.4, 3.3, 3.2], **MOE)  # from a checkpoint
    (found,) = pairs(read_runs([dense, moe]))
    assert math.isnan(found.tokens)
    assert (
        parity_text(found) == "moe and dense are not compared: moe starts at 3.5000 nats per token or below."
    )


def test_throughput_that_varied_is_named(tmp_path):
    steady = run_of(tmp_path / "steady", [5] * 8, rates=[10, 100, 90, 95, 100, 105, 100, 100], **DENSE)
    uneven = run_of(tmp_path / "uneven", [5] * 8, rates=[1, 600, 900, 1000, 1000, 1000, 1000, 1000], **MOE)
    (warning,) = warnings_of(read_runs([steady, uneven]))
    assert warning == (
        "Throughput varied by more than 20% (5th to 95th percentile) within a run, so that its times say"
        " little about the model: uneven by 31% of its median, from 690 to 1,000 tokens/s."
    )
