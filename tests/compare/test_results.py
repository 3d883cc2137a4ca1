"""From records to the table: curves worked out by hand, files of older versions, runs that failed or were never started."""

from __future__ import annotations

import json
import math

import pytest

from moe_exp.compare.compare_table import plan_text, result_text
from moe_exp.compare.comparison import Comparison, Options, compare_with_before, keep, known_pace
from moe_exp.compare.matching import flops_per_token
from moe_exp.compare.results import Curve, curve_of, is_finished, reached, read_ended, shared_end
from moe_exp.config import ConfigError, load_config

CONFIG = load_config({"preset": "cpu"}, {})


def record(iteration: int, loss: float | None, **more) -> dict:
    return {"kind": "train", "iteration": iteration, "consumed_tokens": 100 * iteration, "lm_loss": loss,
            "elapsed_time_per_iteration_ms": 500.0, **more}  # fmt: skip


@pytest.fixture
def comparison(tmp_path):
    flags = {"preset": "cpu", "run_dir": str(tmp_path), "run_name": "mine", "train_iters": 4, "decay_iters": 4, "warmup_iters": 1}
    return Comparison.of(Options(repeats=2), flags, {})


def write_run(run, losses, *, seconds=1.0, status="finished", valid=None):
    run.folder.path.mkdir(parents=True)
    records = [
        record(n, loss, training_seconds=n * seconds, tokens_per_second=100 / seconds, peak_memory_bytes=2**30)
        for n, loss in enumerate(losses, start=1)
    ]
    if valid:
        records.append({"kind": "valid", "iteration": len(losses), "lm_loss": valid})
    run.folder.metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
    run.folder.summary.write_text(json.dumps({"status": status, "iteration": len(losses)}))


def test_curve_with_and_without_the_new_keys():
    old = curve_of([record(2, 5.0), record(4, 4.0)], CONFIG)
    assert old == Curve([5.0, 4.0], [200.0, 400.0], [200 * flops_per_token(CONFIG), 400 * flops_per_token(CONFIG)], [1.0, 2.0])
    new = curve_of([record(2, 5.0, consumed_flops=7, training_seconds=3.5)], CONFIG)
    assert (new.flops, new.seconds) == ([7.0], [3.5])


def test_curve_is_a_mean_over_its_latest_twentieth():
    curve = curve_of([record(n, float(n)) for n in range(1, 41)], CONFIG)
    assert curve.loss[:3] == [1.0, 1.5, 2.5] and curve.loss[-1] == 39.5
    with_gap = curve_of([record(n, None if n == 40 else float(n)) for n in range(1, 42)], CONFIG)
    assert math.isnan(with_gap.loss[39]) and with_gap.loss[40] == 41.0


def test_when_a_loss_is_reached():
    curve = Curve([6.0, 5.0, 3.0], [10.0, 20.0, 30.0], [1.0, 2.0, 3.0], [4.0, 8.0, 12.0])
    assert curve.when("tokens", 4.0) == 25.0 and curve.when("seconds", 5.5) == 6.0
    assert curve.when("flops", 6.5) == 1.0 and curve.when("flops", 2.9) is None
    assert curve.loss_at("tokens", 25.0) == 4.0 and curve.loss_at("tokens", 5.0) == 6.0 and curve.loss_at("tokens", 99.0) == 3.0


def test_the_report_of_seeds_of_which_one_failed(comparison):
    dmoe, dense, dmoe2, dense2 = comparison.runs()
    assert [run.name for run in comparison.runs()] == ["dmoe", "dense", "dmoe_seed_1235", "dense_seed_1235"]
    write_run(dmoe, [6.0, 4.0, 3.0, 2.0], seconds=2.0, valid=2.5)
    write_run(dense, [6.0, 5.0, 4.0, 3.0], valid=3.5)
    write_run(dmoe2, [6.0, 5.0, 4.0, 1.0], seconds=2.0, valid=1.5)
    ended = [read_ended(dmoe), read_ended(dense), read_ended(dmoe2), read_ended(dense2, status="failed", reason="it is gone")]
    assert [is_finished(run) for run in comparison.runs()] == [True, True, True, False]
    assert shared_end(ended, "seconds") == 4.0 and shared_end(ended, "tokens") == 400.0
    ways = reached(ended[0], ended[1])
    # dmoe is at 3.0 with its third record: three quarters of the tokens, and at 6 s, when dense has ended at 4 s.
    assert ways is not None and (ways.tokens, ways.flops, ways.seconds) == (0.75, 0.75, 1.5)
    assert reached(ended[0], ended[3]) is None
    text = result_text(comparison, ended)
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for line in text.splitlines() if len(cells := line.split("|")) > 3}
    assert rows["status"] == ["finished", "1 finished, 1 failed"]
    assert rows["final loss"] == ["1.5000 ± 0.7071", "3.0000"]
    assert rows["last validation loss"] == ["2.0000 ± 0.7071", "3.5000"]
    assert rows["loss at 4.0 s of training"] == ["4.5000 ± 0.7071", "3.0000"]
    assert rows["memory of a rank"] == ["1.00 GiB", "1.00 GiB"]
    assert "- dmoe reaches the final loss of dense, 3.0000, with 75% of its tokens, 75% of its FLOPs, 150% of its time" in text
    assert "- dense_seed_1235 failed: it is gone" in text


def test_nothing_has_run(comparison):
    text = result_text(comparison, [read_ended(run) for run in comparison.runs()])
    assert "left" in text and "final loss" not in text and "reaches" not in text


def test_a_run_that_came_to_nan_has_no_final_loss(comparison):
    dmoe, dense, *_ = comparison.runs()
    write_run(dmoe, [6.0, None, None, None])
    write_run(dense, [6.0, 5.0, 4.0, 3.0])
    assert read_ended(dmoe).final_loss is None
    assert "reaches" not in result_text(comparison, [read_ended(dmoe), read_ended(dense), *map(read_ended, comparison.runs()[2:])])


def test_another_call_with_other_settings_is_refused(comparison):
    comparison.folder.mkdir()
    keep(comparison, {"dmoe": 0.5})
    compare_with_before(comparison)
    assert known_pace(comparison) == {"dmoe": 0.5}
    flags = {
        "preset": "cpu",
        "run_dir": str(comparison.folder.parent),
        "run_name": "mine",
        "train_iters": 4,
        "decay_iters": 4,
        "warmup_iters": 1,
    }
    with pytest.raises(ConfigError, match=r"^LR=0.1: .* holds a dmoe with 0.003. Fix: set it as it was, or give another RUN_NAME"):
        compare_with_before(Comparison.of(Options(), flags | {"lr": 0.1}, {}))
    with pytest.raises(ConfigError, match=r"^MATCH=time: .* was made with flops"):
        compare_with_before(Comparison.of(Options(match="time"), flags, {}))
    # Another variant may join, and where the runs log to may change.
    more = Comparison.of(Options(runs="dmoe,dense,moe"), flags | {"wandb_project": "x"}, {})
    compare_with_before(more)
    keep(more, {})
    assert json.loads((comparison.folder / "compare.json").read_text())["variants"].keys() == {"dmoe", "dense", "moe"}
    (comparison.folder / "compare.json").write_text("{}")
    with pytest.raises(ValueError, match=r"compare.json: cannot be read. Fix: remove it"):
        compare_with_before(comparison)


def test_equal_time(tmp_path):
    by_time = Comparison.of(Options(match="time"), {"preset": "cpu", "train_iters": 300, "run_dir": str(tmp_path)}, {})
    paced = by_time.paced({"dmoe": 0.5, "dense": 0.4})
    assert [one.config.train_iters for one in paced.variants] == [300, 375]
    assert [one.config.decay_iters for one in paced.variants] == [300, 375]
    text = plan_text(paced, {"dmoe": 0.5, "dense": 0.4}, measured=True)
    assert "0:02:30 | 0:02:30" in text and text.endswith("times are 0.0% apart")
    for run, seconds in zip(paced.runs(), (1.0, 1.1), strict=True):
        write_run(run, [5.0, 4.0], seconds=seconds)
    assert "- training times came out 10.0% apart" in result_text(paced, [read_ended(run) for run in paced.runs()])
    limited = Comparison.of(Options(match="time", seconds=20.0), {"preset": "cpu", "train_iters": 300}, {}).paced(
        {"dmoe": 0.5, "dense": 0.3}
    )
    assert [one.config.train_iters for one in limited.variants] == [40, 67]
    assert plan_text(limited, {"dmoe": 0.5, "dense": 0.3}, measured=True).endswith("times are 0.5% apart")


@pytest.mark.parametrize(
    ("options", "flags", "line"),
    [
        (Options(match="luck"), {}, "MATCH=luck: is nothing to match by. Fix: use one of flops, active-params, time."),
        (Options(repeats=0), {}, "REPEATS=0: must be at least 1"),
        (Options(seconds=5.0), {}, "SECONDS=5.0: is a budget of time, but --match is flops. Fix: add --match time."),
        (Options(match="time", seconds=-1.0), {}, "SECONDS=-1.0: must be a number from 0 on. Fix: leave it out for none."),
        (Options(timeout=float("nan")), {}, "TIMEOUT=nan: must be a number from 0 on"),
        (Options(), {"nnodes": 2}, "NNODES=2: runs are started on this node alone. Fix: set NNODES=1."),
    ],
)
def test_bad_options(options, flags, line):
    with pytest.raises(ConfigError) as error:
        Comparison.of(options, {"preset": "cpu", **flags}, {})
    assert len(error.value.problems) == 1 and error.value.problems[0].startswith(line)
