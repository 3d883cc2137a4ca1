"""From records to the table: by hand, the same as the page's, runs that failed or were never started."""

import json
import re

import pytest

from helpers.whole_runs import SMALL
from moe_exp.config import ConfigError, to_yaml
from moe_exp.report.comparison import Group, parity, parity_text
from moe_exp.report.headline import pairs
from moe_exp.report.page_parts import overview_rows
from moe_exp.report.run_data import read_runs
from moe_exp.studies.compare.comparison import (
    Comparison,
    Options,
    is_finished,
    losses_at_shared_end,
    read_ended,
)
from moe_exp.studies.compare.table import as_json, plan_text, result_text


def record(iteration: int, loss: float | None, **more) -> dict:
    return {
        "kind": "train", "iteration": iteration, "consumed_tokens": 100 * iteration, "lm_loss": loss,
        "consumed_flops": 1000 * iteration, "elapsed_time_per_iteration_ms": 500.0, **more,
    }  # fmt: skip


def _compared(one, other):
    return parity(Group((one.recorded,)), Group((other.recorded,)))


FLAGS = SMALL | {"run_name": "mine", "train_iters": 4, "decay_iters": 4, "warmup_iters": 1}


@pytest.fixture
def comparison(tmp_path):
    return Comparison.of(Options(repeats=2), FLAGS | {"run_dir": str(tmp_path)}, {})


def report(comparison):
    """Of what is in the folders."""
    return result_text(comparison, [read_ended(run) for run in comparison.runs()])


def write_run(run, losses, *, seconds=1.0, status="finished", valid=None):
    run.folder.path.mkdir(parents=True)
    speed = {"tokens_per_second": 100 / seconds, "peak_memory_bytes": 2**30}
    numbered = enumerate(losses, start=1)
    records = [record(n, loss, training_seconds=n * seconds, **speed) for n, loss in numbered]
    for n, loss in (valid if isinstance(valid, dict) else {len(losses): valid} if valid else {}).items():
        records.append({"kind": "valid", "iteration": n, "lm_loss": loss})
    run.folder.config.write_text(to_yaml(run.config))
    run.folder.metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
    run.folder.summary.write_text(json.dumps({"status": status, "iteration": len(losses)}))


def test_losses_where_the_first_run_ends(comparison):
    dmoe, dense, dmoe2, dense2 = comparison.runs()
    write_run(dmoe, [6.0, 4.0, 3.0, 2.0], seconds=2.0)
    write_run(dense, [6.0, 5.0, 4.5], seconds=1.5)
    write_run(dmoe2, [None, None])
    ended = [read_ended(run) for run in (dmoe, dense, dmoe2, dense2)]
    # dense ends with 300 tokens at 4.5 s, where dmoe is a quarter of the way from 4.0 to 3.0, 4 s to 6 s.
    assert losses_at_shared_end(ended, "consumed_tokens") == (300.0, [3.0, 4.5, None, None])
    assert losses_at_shared_end(ended, "training_seconds") == (4.5, [3.75, 4.5, None, None])
    assert losses_at_shared_end(ended[1:], "consumed_tokens") is None


def test_it_says_what_the_page_says(comparison):
    # 30 records, of which 5% is one and a half: means of two. One lucky batch of dense decides nothing.
    dmoe, dense, *_ = comparison.runs()
    write_run(dmoe, [8 - n / 10 for n in range(30)], seconds=2.0)
    write_run(dense, [5.0 if n == 5 else 8 - n / 8 for n in range(30)])
    ended = [read_ended(dmoe), read_ended(dense)]
    assert [one.final_loss for one in ended] == [pytest.approx(5.15), pytest.approx(4.4375)]
    text = report(comparison)
    (said,) = [line for line in text.splitlines() if line.startswith("- dmoe ")]
    runs = read_runs([dmoe.folder.path, dense.folder.path])
    assert said == f"- {parity_text(pairs(runs)[0])}"
    # dense is at 5.1875 with record 24 and at 5.0625 with 25, so at 5.15 with 24.3: 30 / 24.3, 60 s / 24.3 s
    assert "123% of the FLOPs, 247% of the time and 123% of the tokens" in said and "5.1500" in said
    rows = dict(overview_rows([one.numbers for one in ended]))
    assert rows["training loss at the end (mean of the last 5%)"] == ["5.1500", "4.4375"]
    assert re.search(r"\| final loss +\| +5.1500 \| +4.4375 \|", text)


def test_a_seed_that_was_cut_short_is_in_no_mean(comparison):
    dmoe, dense, dmoe2, dense2 = comparison.runs()
    write_run(dmoe, [6.0, 4.0, 3.0, 2.0], valid=2.5)
    write_run(dense, [6.0, 5.0, 4.0, 3.0], valid=3.5)
    write_run(dmoe2, [6.0, 5.0, 4.0, 1.0], valid=1.5)
    write_run(dense2, [6.0, 5.5], valid=5.5, status="stopped")
    ended = [*map(read_ended, (dmoe, dense, dmoe2)), read_ended(dense2, status="timeout", reason="an hour")]
    text = result_text(comparison, ended)
    assert re.search(r"\| last validation loss +\| +2.0000 ± 0.7071 +\| +3.5000 +\|", text)
    assert re.search(r"\| final loss +\| +1.5000 ± 0.7071 +\| +3.0000 +\|", text)
    (line,) = (line for line in text.splitlines() if "validation loss against" in line)
    assert re.search(r"[+-]1\.0000 +\|", line) and "[" not in line
    assert "1 finished, 1 timeout" in text
    # neither of the pairs of one seed: dense at 3.0, which dmoe reaches with three quarters of the tokens
    assert parity_text(_compared(ended[0], ended[1])) in text and "means of 2 seeds" not in text


def test_pairs_are_compared_by_validation_where_there_is_one(comparison):
    """dmoe has the lower training losses, and needs 4 / 3.5 of the tokens by validation, with both seeds."""
    for run in comparison.runs():
        is_moe = run.config.use_moe
        valid = {2: 5.0, 3: 4.5, 4: 4.0} if is_moe else {2: 5.0, 3: 4.25, 4: 3.75}
        write_run(run, [6.0, 4.0, 3.0, 2.0] if is_moe else [6.0, 5.0, 4.0, 3.0], valid=valid)
    text = report(comparison)
    line = "reached the lowest common validation loss, 4.0000, with 114% [114%, 114%] of the FLOPs"
    assert line in text and "At equal tokens, however" not in text


def test_the_report_of_seeds_of_which_one_failed(comparison):
    dmoe, dense, dmoe2, dense2 = comparison.runs()
    assert [run.name for run in comparison.runs()] == ["dmoe", "dense", "dmoe_seed_1235", "dense_seed_1235"]
    write_run(dmoe, [6.0, 4.0, 3.0, 2.0], seconds=2.0, valid=2.5)
    write_run(dense, [6.0, 5.0, 4.0, 3.0], valid=3.5)
    write_run(dmoe2, [6.0, 5.0, 4.0, 1.0], seconds=2.0, valid=1.5)
    ended = [*map(read_ended, (dmoe, dense, dmoe2)), read_ended(dense2, status="failed", reason="it is gone")]
    assert [is_finished(run) for run in comparison.runs()] == [True, True, True, False]
    way = _compared(ended[0], ended[1])
    # dmoe is at 3.0 with its third record, at 6 s; dense has ended at 4 s.
    shares = {"consumed_flops": 0.75, "training_seconds": 1.5, "consumed_tokens": 0.75}
    assert (way.loss, way.shares) == (3.0, shares)
    assert _compared(ended[2], ended[3]).reason == "dense_seed_1235 has no loss yet"
    text = result_text(comparison, ended)
    rows = {
        cells[1].strip(): [cell.strip() for cell in cells[2:-1]]
        for line in text.splitlines()
        if len(cells := line.split("|")) > 3
    }
    assert rows["status"] == ["finished", "1 finished, 1 failed"]
    assert rows["final loss"] == ["1.5000 ± 0.7071", "3.0000"]
    assert rows["last validation loss"] == ["2.0000 ± 0.7071", "3.5000"]
    assert rows["loss at 4.0 s of training"] == ["4.5000 ± 0.7071", "3.0000"]
    assert rows["memory of a rank"] == ["1.00 GiB", "1.00 GiB"]
    assert "in 75% of the FLOPs, 150% of the time and 75% of the tokens." in text
    assert "- dense_seed_1235 failed: it is gone" in text
    dense = as_json(comparison, ended)["dense"]
    assert dense["settings"] == {"use_moe": False}
    numbers = ("final_loss", "valid_loss", "tokens", "flops", "seconds", "tokens_per_second")
    finished = dict(zip(numbers, (3.0, 3.5, 400.0, 4000.0, 4.0, 100.0), strict=True))
    failed = dict.fromkeys(numbers)
    assert dense["runs"] == [
        {"seed": 1234, "status": "finished", **finished}, {"seed": 1235, "status": "failed", **failed}
    ]  # fmt: skip
    write_run(dense2, [6.0, 5.0, 4.0, 2.0], valid=3.0)
    text = report(comparison)
    # The second pair meets at 2.0, after record 4 of dense and 3 2/3 of dmoe: 75% and 91.7%, 150% and 183.3%.
    # Student's t at one degree of freedom is 6.3138: intervals are the mean ± 4.4645 standard deviations.
    assert re.search(r"\| validation loss against dmoe +\| +\| \+1\.2500 \[-0\.3284, \+2\.8284\] \|", text)
    assert "- dmoe against dense, means of 2 seeds: " in text and "2.5000 ± 0.7071, with" in text
    assert "83% [31%, 136%] of the FLOPs, 167% [61%, 272%] of the time and 83% [31%, 136%] of" in text


def test_many_variants_are_rows_of_the_table(tmp_path):
    flags = {**SMALL, "run_dir": str(tmp_path), "train_iters": 4, "warmup_iters": 1}
    variants = tuple(f"lr{n}:LR={n}e-3" for n in range(1, 6))
    comparison = Comparison.of(Options(runs="dmoe,dense", variants=variants), flags, {})
    text = report(comparison)
    table = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    assert table == ["", table[1], "dmoe", "dense", "lr1", "lr2", "lr3", "lr4", "lr5"]
    assert "left" in text and "final loss" not in text and "reaches" not in text  # nothing has run


def test_a_run_that_came_to_nan_has_no_final_loss(comparison):
    dmoe, dense, *_ = comparison.runs()
    write_run(dmoe, [6.0, None, None, None])
    write_run(dense, [6.0, 5.0, 4.0, 3.0])
    assert read_ended(dmoe).final_loss is None and read_ended(dense).final_loss == 3.0
    assert "- dmoe and dense are not compared: the first loss of dmoe is 6.0000" in report(comparison)


def test_another_call_with_other_settings_is_refused(comparison):
    comparison.folder.mkdir()
    comparison.keep({"dmoe": 0.5})
    comparison.compare_with_before()
    assert comparison.known_pace() == {"dmoe": 0.5}
    flags = FLAGS | {"run_dir": str(comparison.folder.parent)}
    with pytest.raises(
        ConfigError, match=r"^LR=0.1: .* dmoe in .* was started with 0.003. Fix: .* another RUN_NAME"
    ):
        Comparison.of(Options(), flags | {"lr": 0.1}, {}).compare_with_before()
    with pytest.raises(ConfigError, match=r"^MATCH=time: .* was started with flops"):
        Comparison.of(Options(match="time"), flags, {}).compare_with_before()
    # Another variant may join, and where the runs log to may change.
    more = Comparison.of(Options(runs="dmoe,dense,moe"), flags | {"wandb_project": "x"}, {})
    more.compare_with_before()
    more.keep({})
    kept = json.loads((comparison.folder / "compare.json").read_text())
    assert kept["variants"].keys() == {"dmoe", "dense", "moe"}
    for text in ("{}", "{"):
        (comparison.folder / "compare.json").write_text(text)
        with pytest.raises(ValueError, match=r"compare.json: .* Fix: delete this file"):
            comparison.compare_with_before()


def test_equal_time(tmp_path):
    flags = SMALL | {"train_iters": 300, "run_dir": str(tmp_path)}
    by_time = Comparison.of(Options(match="time"), flags, {})
    paced = by_time.paced({"dmoe": 0.5, "dense": 0.4})
    assert [one.config.train_iters for one in paced.variants] == [300, 375]
    assert [one.config.decay_end for one in paced.variants] == [300, 375]
    text = plan_text(paced, {"dmoe": 0.5, "dense": 0.4}, measured=True)
    assert "0:02:30 | 0:02:30" in text and text.endswith("times differ by 0.0%")
    for run, seconds in zip(paced.runs(), (1.0, 1.1), strict=True):
        write_run(run, [5.0, 4.0], seconds=seconds)
    assert "- actual training times differ by 10.0%" in report(paced)
    limited = Comparison.of(Options(match="time", seconds=20.0), flags, {}).paced({"dmoe": 0.5, "dense": 0.3})
    assert [one.config.train_iters for one in limited.variants] == [40, 67]
    assert plan_text(limited, {"dmoe": 0.5, "dense": 0.3}, measured=True).endswith("times differ by 0.5%")


@pytest.mark.parametrize(
    ("options", "flags", "line"),
    [
        (Options(match="luck"), {}, "MATCH=luck: .* use one of flops, active-params, time"),
        (Options(repeats=0), {}, "REPEATS=0: must be at least 1"),
        (Options(seconds=5.0), {}, "SECONDS=5.0: .* add --match time"),
        (Options(match="time", seconds=-1.0), {}, "SECONDS=-1.0: must be a number of at least 0"),
        (Options(timeout=float("nan")), {}, "TIMEOUT=nan: must be a number of at least 0"),
        (Options(), {"nnodes": 2}, "NNODES=2: .* set NNODES=1"),
    ],
)
def test_bad_options(options, flags, line):
    with pytest.raises(ConfigError, match=rf"^{line}[^\n]*$"):
        Comparison.of(options, {**SMALL, **flags}, {})
