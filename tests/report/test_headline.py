"""The headline of a report: which run is better at equal tokens, and when nothing can be said."""

import pytest

from helpers.run_folders import TOKENS, train_record, write_run
from moe_exp.report.comparison import parity_text, seed_groups, warnings_of
from moe_exp.report.headline import headline, pairs, ranking
from moe_exp.report.page import report_html, report_markdown
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
    losses = "validation loss 4.2500 against 4.5000 nats per token, after 1.024K tokens each"
    assert headline(runs) == (f"moe is better than dense by 0.2500 at equal tokens: {losses}.", "")
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
    assert any("validated on different data" in line for line in warnings_of(runs))


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
    assert "a and b have the same training loss, 4.0000 nats per token, after 1.024K" in headline(runs)[0]


def test_the_best_of_three_and_a_single_run(tmp_path):
    ends = {"a": 3.0, "b": 2.0, "c": 2.5}
    paths = [run_of(tmp_path / name, [5, end], lr=end / 1000, **MOE) for name, end in ends.items()]
    text = "b is the best of 3 by 0.5000 at equal tokens, ahead of c: training loss 2.0000 against 2.5000"
    assert headline(read_runs(paths))[0].startswith(text)
    text = "a has a training loss of 3.0000 nats per token after 1.024K tokens."
    assert headline(read_runs(paths[:1]))[0] == text
    # Without a dense run and one with experts, the first is the baseline of the others.
    assert [(one.run.name, one.other.name) for one in pairs(read_runs(paths))] == [("b", "a"), ("c", "a")]


def seeds(folder, name, ends, **settings):
    numbered = enumerate(ends, start=1)
    return [run_of(folder / f"{name}{seed}", [9, end], seed=seed, **settings) for seed, end in numbered]


def test_seeds_are_one_run_with_a_range(tmp_path):
    paths = [*seeds(tmp_path, "dense", (4.0, 4.5), **DENSE), *seeds(tmp_path, "moe", (3.0, 3.5), **MOE)]
    runs = read_runs(paths)
    assert [group.name for group in seed_groups(runs)] == ["dense1 (2 seeds)", "moe1 (2 seeds)"]
    text, about_seeds = headline(runs)
    assert "moe1 (2 seeds) is better than dense1 (2 seeds) by 1.0000 at equal tokens" in text
    ranges = "moe1 (2 seeds) from 3.0000 to 3.5000 and dense1 (2 seeds) from 4.0000 to 4.5000"
    assert about_seeds.endswith(f": {ranges}. These ranges do not overlap.")
    assert [(one.run.name, one.other.name) for one in pairs(runs)] == [("moe1 (2 seeds)", "dense1 (2 seeds)")]
    overlapping = read_runs([*paths[:2], *seeds(tmp_path, "wide", (2.0, 4.25), lr=0.1, **MOE)])
    assert headline(overlapping)[1].endswith("These ranges overlap, so the difference may be chance.")
    assert headline(read_runs(paths[:2]))[0].endswith("they differ only in SEED.")


def falling(folder, by_seed, **settings):
    """Runs of {seed: (training losses, validation losses)} with a validation at each record."""
    kind = "moe" if settings["use_moe"] else "dense"
    paths = []
    for seed, (train, valid) in by_seed.items():
        numbered = dict(enumerate(valid, start=1))
        paths.append(run_of(folder / f"{kind}{seed}", train, valid=numbered, seed=seed, **settings))
    return paths


LOW, MIDDLE, HIGH = [5, 4, 3], [5.2, 4.2, 3.2], [5.4, 4.4, 3.4]
# Training losses say the opposite of the validation losses: of other batches, they favour the second seed.
SEEDS = {
    "a second seed that dense lacks": ({1: (MIDDLE, LOW)}, {1: (HIGH, MIDDLE), 2: (LOW, MIDDLE)}, 1.0),
    "no seed in common": ({1: (MIDDLE, LOW)}, {3: (LOW, MIDDLE), 4: (LOW, MIDDLE)}, 1.0),
    "one seed has no validation": ({1: (MIDDLE, LOW)}, {1: (LOW, MIDDLE), 2: ([4.8, 3.8, 2.8], [])}, 1.0),
    "a seed that has not finished": ({1: (MIDDLE, LOW)}, {1: (LOW, MIDDLE), 2: (LOW[:2], MIDDLE[:2])}, 1.0),
    "dense has more seeds": ({1: (HIGH, LOW), 2: (HIGH, LOW), 3: (HIGH, HIGH)}, {2: (LOW, HIGH)}, 1.0),
    "moe is better": ({1: (LOW, MIDDLE)}, {1: (MIDDLE, LOW), 2: (HIGH, LOW)}, -1.0),
}


@pytest.mark.parametrize("case", SEEDS)
def test_what_a_loss_costs_never_says_the_opposite_of_the_headline(case, tmp_path):
    dense, moe, sign = SEEDS[case]
    runs = read_runs([*falling(tmp_path, dense, **DENSE), *falling(tmp_path, moe, **MOE)])
    found = ranking(runs)
    (pair,) = pairs(runs)
    losses = {one.group.runs[0].kind: one.loss for one in found.standings}
    assert found.what == pair.what == "validation loss"
    assert sign * (losses["dmoe"] - losses["dense"]) > 0 and sign * (pair.shares["consumed_tokens"] - 1) > 0
    assert ('<b class="less">' in report_html(runs)) == (sign < 0)
    left_out = "Left out because they have no validation: moe2." if case.endswith("no validation") else ""
    assert left_out in headline(runs)[1]


def test_the_cost_of_a_mean_over_seeds_by_hand(tmp_path):
    """Dense is at 4, 3 with one seed; the mean of two MoE seeds at 4.1, 3.2 needs 1.0 / 0.9 of its tokens."""
    dense = falling(tmp_path, {1: ([9, 9, 9], [4, 3.5, 3])}, **DENSE)
    moe = falling(tmp_path, {1: ([1, 1, 1], [4.0, 3.4, 3.0]), 2: ([1, 1, 1], [4.2, 3.8, 3.4])}, **MOE)
    (pair,) = pairs(read_runs([*dense, *moe]))
    assert (pair.loss, pair.shares["consumed_tokens"]) == (pytest.approx(3.2), pytest.approx(3 / 2.6))
    assert parity_text(pair).startswith("moe1 (2 seeds) does not reach the validation loss of dense1 (3.0000")


def test_figures_that_the_headline_contradicts_are_not_green_and_say_so(tmp_path):
    # Validation rises again: the run with experts is first at 3.5, and worse at the end.
    dense = falling(tmp_path, {1: (LOW, [5, 4, 3.5])}, **DENSE)
    moe = falling(tmp_path, {1: (LOW, [4.5, 3.4, 3.9])}, **MOE)
    runs = read_runs([*dense, *moe])
    assert headline(runs)[0].startswith("dense1 is better than moe1 by 0.4000 at equal tokens")
    page = report_html(runs)
    assert '<b class="less">' not in page and "64% of the tokens" in page
    caveat = "At equal tokens, however, dense1 has the lower validation loss, by 0.4000 after"
    assert caveat in page and caveat in report_markdown(runs)


def test_another_winner_at_equal_time_is_in_the_headline(tmp_path):
    dense = run_of(tmp_path / "dense", [5, 4, 3], seconds=0.3, **DENSE)
    moe = run_of(tmp_path / "moe", [5.2, 4.2, 3.2], seconds=0.1, **MOE)
    page = report_html(read_runs([dense, moe]))
    assert "dense is better than moe by 0.2000 at equal tokens" in page
    assert "At equal training time, moe is better: training loss 3.2000 against 5.0000" in page


def test_a_percentage_only_for_a_loss_that_both_come_down_to(tmp_path):
    dense = run_of(tmp_path / "dense", [5, 4, 3.5], **DENSE)
    moe = run_of(tmp_path / "moe", [3.4, 3.3, 3.2], **MOE)  # from a checkpoint
    (found,) = pairs(read_runs([dense, moe]))
    assert found.shares == {}
    assert "are not compared: the first loss of moe is 3.5000 nats per token or below" in parity_text(found)


def test_throughput_that_varied_is_named(tmp_path):
    steady = run_of(tmp_path / "steady", [5] * 8, rates=[10, 100, 90, 95, 100, 105, 100, 100], **DENSE)
    uneven = run_of(tmp_path / "uneven", [5] * 8, rates=[1, 600, 900, 1000, 1000, 1000, 1000, 1000], **MOE)
    (warning,) = warnings_of(read_runs([steady, uneven]))
    assert warning.startswith("Throughput varied by more than 20%")
    assert warning.endswith(": uneven by 31% of its median, from 690 to 1,000 tokens/s.")
