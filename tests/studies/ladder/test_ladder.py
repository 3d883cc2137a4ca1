"""Definitions and rungs, what a ladder refuses, and its results from run folders with losses by a law."""

import json
import math
from functools import partial

import pytest

from helpers.whole_runs import SMALL
from moe_exp.config import ConfigError, to_yaml
from moe_exp.studies.compare.comparison import read_ended
from moe_exp.studies.compare.variants import flops_per_token
from moe_exp.studies.ladder import climb, results
from moe_exp.studies.ladder.climb import write_reports
from moe_exp.studies.ladder.ladder import Definition, Ladder, compute_of, scaled
from moe_exp.studies.ladder.laws import Law, fit_laws
from moe_exp.studies.ladder.results import predict, prediction_file, results_of

LAWS = {"dense": Law(1.5, 60.0, 0.13), "dmoe": Law(1.5, 80.0, 0.145)}
RUNGS = tuple({"TRAIN_ITERS": 40 * 3**number} for number in range(5))
# The rungs set the others.
MODEL = {name: value for name, value in SMALL.items() if name not in ("train_iters", "eval_interval")}
CANCELLED = "CANCELLED AT 2026-11-27T10:00:00"
OFFSETS = (-0.002, 0.0, 0.002)  # of the three seeds


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch):
    monkeypatch.setattr(results, "fit_laws", partial(fit_laws, num_draws=60))


def ladder_of(folder, rungs, **definition):
    flags = MODEL | {"run_dir": str(folder), "run_name": "mine", "warmup_iters": 2}
    return Ladder.of(Definition(rungs=rungs, **definition), flags, {})


@pytest.fixture
def ladder(tmp_path):
    return ladder_of(tmp_path, RUNGS)


def write_run(run, loss, *, status="finished"):
    """A run folder with its last train and validation records."""
    last = run.config.train_iters
    tokens, flops = last * run.config.gbsz * run.config.seq_len, compute_of(run.config)
    records = [
        {"kind": "train", "iteration": n, "consumed_tokens": tokens * n / last,
         "consumed_flops": flops * n / last, "lm_loss": loss + 0.1, "elapsed_time_per_iteration_ms": 1.0}
        for n in (last - 1, last)
    ]  # fmt: skip
    records.append({"kind": "valid", "iteration": last, "lm_loss": loss})
    run.folder.path.mkdir(parents=True, exist_ok=True)
    run.folder.config.write_text(to_yaml(run.config))
    run.folder.metrics.write_text("".join(json.dumps(one) + "\n" for one in records))
    run.folder.summary.write_text(json.dumps({"status": status, "iteration": last}))


def write_rungs(rungs, offsets=OFFSETS):
    for comparison in rungs:
        for run in comparison.runs():
            offset = offsets[run.config.seed - comparison.reference.config.seed]
            write_run(run, LAWS[run.variant].loss(compute_of(run.config)) + offset)


def test_every_rung_has_equal_flops_and_every_variant_each_seed(ladder):
    assert [len(comparison.runs()) for comparison in ladder.rungs] == [6] * 5
    for number, comparison in enumerate(ladder.rungs, start=1):
        costs = {flops_per_token(one.config) for one in comparison.variants}
        assert max(costs) / min(costs) == pytest.approx(1, abs=2e-3)
        assert {run.config.train_iters for run in comparison.runs()} == {40 * 3 ** (number - 1)}
        assert comparison.folder == ladder.folder / f"rung_{number}"
    assert ladder.baseline == "dense" and not ladder.grows
    assert Ladder.of(Definition(sizes=(64, 128)), MODEL, {}).grows


def test_sizes_scale_by_the_rule():
    base = Ladder.of(Definition(sizes=(64, 128)), MODEL, {}).rungs[1].variants[0].config
    half = scaled(base, 64)
    # From 4 layers of width 128 with 4 heads in 2 groups, MLP 256: a half of each.
    shape = {"num_layers": 2, "num_heads": 2, "num_query_groups": 1, "ffn_hidden_size": 128}
    assert {name: half[name] for name in shape} == shape
    assert half["moe_latent_size"] == 0
    assert scaled(base.model_copy(update={"moe_latent_size": 48}), 64)["moe_latent_size"] == 24
    assert half["lr"] == pytest.approx(base.lr * math.sqrt(2), rel=1e-3)
    assert half["min_lr"] == pytest.approx(base.min_lr * math.sqrt(2), rel=1e-2)
    # The parametrization scales the learning rate.
    mup = scaled(base.model_copy(update={"parametrization": "mup"}), 64)
    assert (mup["lr"], mup["min_lr"]) == (base.lr, base.min_lr)
    # An eighth of the parameters in the body and so of the tokens.
    assert half["train_iters"] == pytest.approx(base.train_iters / 8, rel=0.05)
    assert half["warmup_iters"] == pytest.approx(base.warmup_iters / 8, abs=1)


def test_laws_speedups_and_a_prediction_made_before_the_last_rung(ladder):
    write_rungs(ladder.rungs[:-1])
    assert predict(ladder) == ""
    kept = prediction_file(ladder).read_text()
    write_rungs(ladder.rungs[-1:])
    assert predict(ladder) == "" and prediction_file(ladder).read_text() == kept
    found = results_of(ladder)
    assert (found.num_left, found.left_out, found.missing, found.is_validated) == (0, [], [], True)
    assert found.predicted
    assert all(abs(error) < 1e-3 for error in found.predicted.errors(found.points).values())
    last = float(found.points["dmoe"].compute[-1])
    true = LAWS["dense"].compute(LAWS["dmoe"].loss(last)) / last
    speedup = found.speedups["dmoe"].rungs[-1]
    assert speedup.value == pytest.approx(true, rel=1e-3) and speedup.low < true < speedup.high
    assert found.speedups["dmoe"].trend.low > 0

    _, text = write_reports(ladder, {})
    assert f"dmoe over dense: {true:.2f}×" in text and "the gain grows with compute" in text
    assert "the last rung: predicted" in text and "± 0.0020" in text
    page = (ladder.folder / "report.html").read_text()
    assert "<svg" in page and "the gain grows with compute" in page
    losses = json.loads((ladder.folder / "ladder.json").read_text())["rungs"]["dmoe"]["losses"]
    assert losses[0][1] == pytest.approx(LAWS["dmoe"].loss(found.points["dmoe"].compute[0]))


def test_a_failed_and_a_diverged_run_are_named_and_left_out(ladder):
    write_rungs(ladder.rungs)
    first, second, *_ = ladder.rungs[1].runs()
    write_run(first, 3.0, status="failed")
    write_run(second, 9.5)
    third = ladder.rungs[0].runs()[0]
    with third.folder.metrics.open("a") as file:
        file.write(f'{{"kind": "valid", "iteration": {third.config.train_iters}, "lm_loss": null}}\n')
    found = results_of(ladder, {"rung_2/dmoe": "oom: out of memory"})
    diverged = ("rung_1/dmoe diverged: its loss is nan", "rung_2/dense diverged: its loss is 9.5")
    assert set(found.left_out) == {"rung_2/dmoe: oom: out of memory", *diverged}
    assert [math.isnan(points.losses[1, 0]) for points in found.points.values()] == [True, True]
    true = LAWS["dmoe"]
    assert found.fit and found.fit.laws["dmoe"].exponent == pytest.approx(true.exponent, rel=0.02)
    _, text = write_reports(ladder, {"rung_2/dmoe": "oom: out of memory"})
    assert "left out: rung_2/dmoe: oom: out of memory" in text


def test_too_few_runs_say_what_to_add(tmp_path):
    ladder = ladder_of(tmp_path, RUNGS[:2], repeats=1)
    write_rungs(ladder.rungs, offsets=(0.0,))
    (missing,) = results_of(ladder).missing
    assert missing == "dmoe has 2 finished rungs but a law requires 3: add 1 more rung, or set --asymptote"
    assert "this rung started before other rungs had ended" in predict(ladder)
    assert not prediction_file(ladder).exists() and results_of(ladder).predicted is None
    for run in ladder.rungs[1].runs():
        run.folder.metrics.unlink()
    three = ladder_of(tmp_path, RUNGS[:3], repeats=1, asymptote=1.5)
    assert predict(three).endswith(": dmoe has 1 finished rungs but a law requires 2: add 1 more rung.")
    write_rungs(three.rungs[:2], offsets=(0.0,))
    assert predict(three) == ""
    write_rungs(three.rungs[2:], offsets=(0.0,))
    found = results_of(three)
    assert found.predicted and not found.predicted.losses["dmoe"].has_interval
    assert abs(found.predicted.errors(found.points)["dmoe"]) < 1e-6
    assert found.missing == ["no intervals: the noise is unknown with a single seed; add --repeats 3"]
    assert found.speedups["dmoe"].rungs[0].value > 0


@pytest.mark.slow
def test_a_prediction_of_other_rungs_does_not_count(ladder, tmp_path):
    write_rungs(ladder.rungs[:-1])
    assert predict(ladder) == ""
    write_rungs(ladder.rungs[-1:])
    longer = ladder_of(tmp_path, (*RUNGS, {"TRAIN_ITERS": 40 * 3**5}))
    assert results_of(longer).predicted is None
    assert predict(longer) == ""
    write_rungs(longer.rungs[-1:])
    for one in (ladder, longer):
        found = results_of(one)
        assert found.predicted
        assert all(abs(error) < 1e-3 for error in found.predicted.errors(found.points).values())
    changed = ladder_of(tmp_path, (*RUNGS[:-1], {"TRAIN_ITERS": 40 * 3**4 + 100}))
    assert results_of(changed).predicted is None


def test_a_prediction_is_renewed_until_its_rung_begins(ladder):
    kept = []
    for rungs in (ladder.rungs[:3], ladder.rungs[3:4]):
        write_rungs(rungs)
        assert predict(ladder) == ""
        kept.append(json.loads(prediction_file(ladder).read_text())["losses"])
    assert kept[0] != kept[1]


def test_every_run_has_a_validation_at_its_end(tmp_path):
    rungs = ({"TRAIN_ITERS": 100}, {"TRAIN_ITERS": 250}, {"TRAIN_ITERS": 300, "EVAL_INTERVAL": 0})
    ladder = Ladder.of(Definition(rungs=rungs, settings={"EVAL_INTERVAL": 100}), MODEL, {})
    assert [one.reference.config.eval_interval for one in ladder.rungs] == [100, 250, 0]


@pytest.mark.slow
def test_the_last_rung_waits_for_a_run_that_has_stopped(ladder, monkeypatch, capsys):
    write_rungs(ladder.rungs[:-1])
    write_run(ladder.rungs[0].runs()[0], 3.0, status="stopped")
    started = []

    def stop(_, run, name):
        started.append(name)
        return read_ended(run, status="timeout", reason="took over 5 s")

    for name, replacement in (("check", lambda _: None), ("check_runs", lambda _: None), ("run_one", stop)):
        monkeypatch.setattr(climb, name, replacement)
    assert climb.run_ladder(ladder) != 0
    assert started == ["rung_1/dmoe"]
    assert "The last rung waits for unfinished runs: rung_1/dmoe." in capsys.readouterr().out
    assert not prediction_file(ladder).exists()


@pytest.mark.parametrize(
    ("log", "status", "reason"),
    [
        (f"*** JOB 7 ON n1 {CANCELLED} DUE TO TIME LIMIT ***", "timeout", "DUE TO TIME LIMIT"),
        (f"*** STEP 7.0 ON n1 {CANCELLED} DUE TO PREEMPTION ***", "stopped", "PREEMPTION"),
        (f"*** JOB 7 ON n1 {CANCELLED} ***", "stopped", "CANCELLED AT"),
        ("ValueError: no", "failed", "ValueError: no"),
    ],
)
def test_a_job_that_slurm_has_ended_has_stopped(ladder, log, status, reason):
    """Its shell wrote no exit code."""
    run = ladder.rungs[0].runs()[0]
    write_run(run, 3.0, status="stopped")
    run.folder.summary.write_text(json.dumps({"status": "stopped", "iteration": 1}))
    run.log.parent.mkdir(exist_ok=True)
    run.log.write_text(f"iteration 1\nslurmstepd: error: {log}\n")
    ended = climb.ended_job(run, None)
    assert ended.status == status and reason in ended.reason


def beside_dense(variant, runs="dense"):
    return Definition(sizes=(64, 128), runs=runs, variants=(variant,))


@pytest.mark.parametrize(
    ("definition", "message"),
    [
        (Definition(), "SIZES=.*: a ladder requires sizes. Fix: set --sizes"),
        (Definition(sizes=(64,)), "SIZES=1: a ladder requires at least two sizes. Fix: add larger"),
        (Definition(sizes=(0, 64)), r"SIZES=\(0, 64\): must be widths above 0"),
        (Definition(sizes=(128, 64)), r"RUNGS=rung 2: .* FLOPs must exceed .*\. Fix: list rungs"),
        (Definition(sizes=(64, 128), baseline="big"), "BASELINE=big: unknown variant. Fix: use one of dmoe"),
        (Definition(sizes=(64, 128), asymptote=-1.0), "ASYMPTOTE=-1.0: must be a loss"),
        (
            beside_dense("wide:USE_MOE=false,FFN_HIDDEN_SIZE=512"),
            r"VARIANT=wide of rung 1: FLOPs per token differ by \+",
        ),
        (beside_dense("more:TRAIN_ITERS=9"), "TRAIN_ITERS must be the same for all runs"),
        (beside_dense("huge:SHARED_EXPERT_SIZE=900", "dmoe,dense"), "huge: exceeds the .* of dmoe"),
    ],
)
def test_refused(definition, message):
    with pytest.raises(ConfigError, match=message):
        Ladder.of(definition, MODEL, {})
