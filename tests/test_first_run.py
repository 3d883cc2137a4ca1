"""What a run does and leaves behind, and that its features train."""

import dataclasses
import json
import math
import statistics
from datetime import datetime

import pytest
import yaml

from helpers.whole_runs import EndedRun, Runs
from moe_exp.runs.records import TRAIN_KEYS, VALID_KEYS
from moe_exp.training.console import console_line, validation_lines


@pytest.fixture(scope="session")
def first_run(session_runs: Runs) -> EndedRun:
    """PRESET=cpu as it is, only shorter."""
    short = {"TRAIN_ITERS": 10, "LOG_INTERVAL": 2, "EVAL_INTERVAL": 5, "EVAL_ITERS": 2, "SAVE_INTERVAL": 5}
    temporary = session_runs.run_dir.with_name("temporary")
    temporary.mkdir()
    return dataclasses.replace(session_runs, by_script=True).succeed(
        "first", tiny=False, PRESET="cpu", TMPDIR=temporary, **short
    )


def test_loss_falls(first_run):
    losses = first_run.curve("lm_loss")
    assert losses[0] == pytest.approx(math.log(2048), abs=0.5)
    assert losses[-1] < losses[0] - 1
    valid = [record["lm_loss"] for record in first_run.records("valid")]
    assert valid[1] < valid[0] < losses[0]
    assert valid[1] == pytest.approx(losses[-1], abs=0.6)


def test_nothing_is_left_in_the_folder_of_temporary_files(first_run, session_runs):
    names = [path.name for path in session_runs.run_dir.with_name("temporary").iterdir()]
    assert [name for name in names if not name.startswith("torchinductor_")] == []  # torch's cache


def test_run_folder_has_what_the_design_lists(first_run):
    folder = first_run.folder
    assert sorted(path.name for path in folder.path.iterdir()) == [
        ".lock", "checkpoints", "config.yaml", "loss_curve.png", "metrics.jsonl", "provenance.json",
        "ranks.json", "summary.json", "tensorboard", "train.log",
    ]  # fmt: skip
    checkpoints = sorted(path.name for path in folder.checkpoints.iterdir())
    assert checkpoints == ["iter_0000005", "iter_0000010", "latest_checkpointed_iteration.txt"]
    settings = yaml.safe_load(folder.config.read_text())
    expected = {"preset": "cpu", "train_iters": 10, "num_experts": 64, "vpp": None}
    assert {name: settings[name] for name in expected} == expected
    (start,) = json.loads(folder.provenance.read_text())["starts"]
    assert {"time", "command", "host", "platform", "versions", "commit"} <= set(start)
    assert {"torch", "megatron-core", "numpy"} <= set(start["versions"])
    assert list(folder.tensorboard.glob("events.out.tfevents.*"))
    assert (folder.path / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads(folder.summary.read_text())
    losses = first_run.curve("lm_loss")
    assert (summary["status"], summary["iteration"], summary["num_starts"]) == ("finished", 10, 1)
    assert (summary["first_lm_loss"], summary["last_lm_loss"]) == (losses[0], losses[-1])
    assert summary["checkpoints"] == ["iter_0000005", "iter_0000010"]


def test_log_has_a_line_of_every_record(first_run):
    train, valid = first_run.records(), first_run.records("valid")
    lines = [console_line(record, 10, datetime.min).partition("] ")[2] for record in train]
    lines += [validation_lines(record)[1] for record in valid]
    for text in (first_run.stdout, first_run.folder.log.read_text()):
        assert [line for line in lines if line not in text] == []
        assert text.count("] iteration ") == len(train) == 5
    assert [record["iteration"] for record in valid] == [5, 10]
    assert all(set(record) == {"kind", *VALID_KEYS} for record in valid)


def test_metrics_have_every_key(first_run):
    records = first_run.records()
    assert [record["iteration"] for record in records] == list(range(2, 11, 2))
    for record in records:
        assert set(record) == {"kind", *TRAIN_KEYS}
        nulls = [name for name, value in record.items() if value is None]
        of_mtp = ["mtp_loss"]
        assert nulls == [*of_mtp, "max_attention_logits", "memory_allocated_bytes", "timers"]
        assert record["consumed_samples"] == record["iteration"] * 32
        assert record["consumed_tokens"] == record["iteration"] * 32 * 256
        assert [layer["layer"] for layer in record["experts"]] == [1, 2, 3, 4]
        for layer in record["experts"]:
            assert sum(layer["tokens_per_expert"]) == 2 * 32 * 256 * 4  # LOG_INTERVAL * GBSZ * SEQ_LEN * TOPK
            counts = layer["tokens_per_expert"]
            assert layer["max_over_mean"] == max(counts) / statistics.mean(counts)
            assert 0 < layer["router_entropy"] <= math.log(64)


def test_start_says_the_true_counts_and_nothing_follows_the_end(first_run):
    start = first_run.stdout.partition("] iteration ")[0]
    for text in ("Parameters: 942K (942,368), ", "weight and optimizer=", "operations per iteration: "):
        assert text in start
    # nothing, such as what Triton takes for leaked
    assert first_run.stdout.rstrip().endswith("# the loss curve")
    assert "leaked" not in first_run.text


@pytest.mark.slow  # a ramp goes on in tests/checkpoint/test_ramp_resume.py
def test_bf16_with_ramped_up_batch(runs):
    ramp = {"MBSZ": 1, "RAMPUP_BATCH_SIZE": "4 2 24", "TRAIN_ITERS": 8}
    run = runs.succeed("ramp", GPUS_PER_NODE=2, EP=2, DTYPE="bf16", **ramp)
    sizes = run.curve("global_batch_size")
    assert (sizes[0], sizes[-1]) == (4, 8) and 6 in sizes and sizes == sorted(sizes)
    assert run.curve("consumed_samples") == [sum(sizes[: index + 1]) for index in range(8)]
    used = [sum(experts[0]["tokens_per_expert"]) for experts in run.curve("experts")]
    assert used == [size * 64 * 2 for size in sizes]
    assert run.curve("lm_loss") == pytest.approx([7.62] * 8, abs=0.1)
    assert set(run.curve("nan_iterations") + run.curve("skipped_iterations")) == {0}


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"USE_MOE": False}], ids=["moe", "dense"])
def test_recompute_changes_nothing(settings, runs):
    settings = {"TRAIN_ITERS": 4, "WARMUP_ITERS": 1, "DROPOUT": 0.1, "ATTENTION_DROPOUT": 0.1, **settings}
    names = ("none", "full", "selective")
    plain, *others = (runs.succeed(name, RECOMPUTE=name, **settings) for name in names)
    for other in others:
        for name in ("lm_loss", "grad_norm", "z_loss", "experts"):
            assert other.curve(name) == plain.curve(name), name


@pytest.mark.slow
def test_expert_bias_balances(runs):
    """Without the loss that balances, the bias alone has to bring the busiest expert down."""
    settings = {"ROUTER_SCORE": "sigmoid", "AUX_LOSS_TYPE": "none", "TRAIN_ITERS": 30}
    worst = []
    for rate in (0, 0.01):
        run = runs.succeed(f"rate_{rate}", ROUTER_BIAS_UPDATE_RATE=rate, **settings)
        layers = [layer for experts in run.curve("experts")[-5:] for layer in experts]
        worst.append(statistics.mean(layer["max_over_mean"] for layer in layers))
    assert worst[1] < worst[0] - 0.3
