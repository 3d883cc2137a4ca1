"""The same command again continues where the run stands: bit for bit, under other layouts, after a crash."""

import json
import re
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch

from helpers.jsonl import BinIdxWriter
from helpers.whole_runs import EndedRun, Runs
from moe_exp.config import Config, ConfigError

CURVES = ("lm_loss", "grad_norm", "params_norm")


class Interrupted(NamedTuple):
    """12 iterations in one go, and the same as 6 and 6 more."""

    whole: EndedRun
    first: EndedRun
    second: EndedRun
    records_of_first: list[dict[str, Any]]
    saved_first: Runs


@pytest.fixture(scope="session")
def interrupted(session_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Interrupted]:
    """Runs by number of ranks, EP and dropout."""

    @cache  # without a default: with and without it, a run would be two, of one name
    def run(num_ranks: int, ep: int, dropout: float) -> Interrupted:
        settings = {
            "GPUS_PER_NODE": num_ranks, "MBSZ": 4, "EP": ep, "TRAIN_ITERS": 12,
            "DROPOUT": dropout, "ATTENTION_DROPOUT": dropout,
        }  # fmt: skip
        name = f"resume_{num_ranks}_{ep}_{dropout}"
        whole = session_runs.succeed(f"{name}_whole", **settings)
        first = session_runs.stopped(name, EXIT_INTERVAL=6, **settings)
        records = first.records()
        copy = Runs(tmp_path_factory.mktemp("saved"), session_runs.data_dir)
        shutil.copytree(first.folder.path, copy.folder(name).path)
        second = session_runs.succeed(name, EXIT_INTERVAL=6, **settings)
        return Interrupted(whole, first, second, records, copy)

    return lambda num_ranks=1, ep=1, dropout=0.0: run(num_ranks, ep, dropout)


def events_of(run: EndedRun) -> list[tuple[Any, ...]]:
    return [(event["event"], event["iteration"], event.get("status")) for event in run.records("event")]


def saved_at_6(source: Interrupted, runs: Runs, name: str) -> None:
    """A copy of the run that ended after 6 of 12 iterations, as run `name` of `runs`."""
    shutil.copytree(source.saved_first.folder(source.first.folder.path.name).path, runs.folder(name).path)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("num_ranks", "ep", "dropout"), [(1, 1, 0.0), pytest.param(2, 2, 0.1, marks=slow)], ids=["1", "EP2"]
)
def test_goes_on_bit_for_bit(num_ranks, ep, dropout, interrupted):
    runs = interrupted(num_ranks, ep, dropout)
    assert [record["iteration"] for record in runs.records_of_first] == list(range(1, 7))
    assert runs.second.curve("iteration") == list(range(1, 13))
    for name in (*CURVES, "experts", "learning_rate"):
        assert runs.second.curve(name) == runs.whole.curve(name), name


# Without the distributed optimizer nothing but the model holds the weights; expert bias and global fractions
# are in no optimizer at all.
NO_SHARDS = {
    "DISTRIBUTED_OPTIMIZER": False, "ROUTER_SCORE": "sigmoid", "ROUTER_BIAS_UPDATE_RATE": 0.01,
    "AUX_LOSS_TYPE": "global_aux_loss", "AUX_LOSS_COEFF": "0.1",
}  # fmt: skip


@slow
@pytest.mark.parametrize(
    ("settings", "half", "curves"),
    [
        (NO_SHARDS, 6, ("experts",)),
        ({"DTYPE": "bf16"}, 12, ("skipped_iterations",)),
        # saved while it still looks for its loss scale: the optimizer has not made a step
        ({"DTYPE": "fp16"}, 12, ("loss_scale", "skipped_iterations")),
    ],
    ids=["parameters from the model", "bf16", "fp16"],
)
def test_other_settings_go_on_bit_for_bit(settings, half, curves, runs):
    settings = settings | {"TRAIN_ITERS": 2 * half}
    whole = runs.succeed("whole", **settings)
    runs.stopped("resumed", EXIT_INTERVAL=half, **settings)
    resumed = runs.succeed("resumed", EXIT_INTERVAL=half, **settings)
    for name in ("iteration", *CURVES, *curves):
        assert resumed.curve(name) == whole.curve(name), name


def test_what_a_resume_says_and_leaves(interrupted):
    runs = interrupted()
    assert "resumed from" not in runs.first.text
    assert f"resumed from iteration 6 of {runs.second.folder.checkpoints}" in runs.second.stdout
    assert "Run stopped: 6 of 12 iterations" in runs.first.stdout
    assert "Run finished: 12 of 12 iterations" in runs.second.stdout
    assert events_of(runs.second) == [
        ("start", 0, None), ("stop", 6, None), ("checkpoint", 6, None), ("end", 6, "stopped"),
        ("resume", 6, None), ("checkpoint", 12, None), ("end", 12, "finished"),
    ]  # fmt: skip
    assert len(json.loads(runs.second.folder.provenance.read_text())["starts"]) == 2
    assert sorted(path.name for path in runs.second.folder.checkpoints.iterdir()) == [
        "iter_0000006", "iter_0000012", "latest_checkpointed_iteration.txt",
    ]  # fmt: skip


def test_finished_run_ends_at_once(interrupted, runs):
    source = interrupted()
    shutil.copytree(source.second.folder.path, runs.folder("done").path)
    done = runs.succeed("done", TRAIN_ITERS=12, EXIT_INTERVAL=6)
    assert done.curve("iteration") == list(range(1, 13))
    assert events_of(done)[-2:] == [("resume", 12, None), ("end", 12, "finished")]
    assert json.loads(done.folder.summary.read_text())["status"] == "finished"


@slow  # other layouts are in tests/checkpoint/test_any_to_any.py
def test_changed_settings_of_a_resume_are_said(interrupted, runs):
    source = interrupted()
    saved_at_6(source, runs, "moved")
    moved = runs.succeed("moved", TRAIN_ITERS=12, MBSZ=4, GPUS_PER_NODE=2, PP=2)
    assert "resumed from iteration 6" in moved.stdout
    (event,) = moved.events("changed_settings")
    line = f"resumed with changed settings: {', '.join(event['changes'])}"
    assert f"moe-exp: {line}\n" in moved.stderr and line in moved.folder.log.read_text()
    assert event["iteration"] == 6 and "PP 1 -> 2" in event["changes"]
    assert moved.curve("iteration") == list(range(1, 13))
    assert moved.curve("lm_loss")[6:] == pytest.approx(source.whole.curve("lm_loss")[6:], rel=1e-5)
    assert moved.curve("grad_norm")[6:] == pytest.approx(source.whole.curve("grad_norm")[6:], rel=1e-4)


def test_load_dir_starts_from_another_run(interrupted, runs):
    source = interrupted()
    saved_at_6(source, runs, "source")
    before = {path: path.stat().st_mtime_ns for path in runs.folder("source").path.rglob("*")}
    run = runs.succeed("other", TRAIN_ITERS=12, MBSZ=4, LOAD_DIR=runs.folder("source").checkpoints)
    assert run.curve("iteration") == list(range(7, 13))
    for name in CURVES:
        assert run.curve(name) == source.whole.curve(name)[6:]
    assert (run.folder.checkpoints / "iter_0000012").is_dir()
    assert {path: path.stat().st_mtime_ns for path in runs.folder("source").path.rglob("*")} == before


def test_goes_on_with_the_same_data_only(interrupted, runs, tmp_path):
    """Also through LOAD_DIR; more iterations are no other data."""
    saved_at_6(interrupted(), runs, "one")
    source = runs.folder("one").checkpoints
    with BinIdxWriter(tmp_path / "tokens", vocab_size=2048) as writer:
        for number in range(100):
            writer.add_document(range(number + 1, number + 21))
    other = {"TRAIN_DATA": tmp_path / "tokens", "TRAIN_ITERS": 7}
    refused = runs.run("one", **other)
    assert refused.code == 2 and "Traceback" not in refused.text
    assert refused.curve("iteration") == [1, 2, 3, 4, 5, 6]
    (line,) = [line for line in refused.stderr.splitlines() if line.startswith("moe-exp: TRAIN_DATA=")]
    files = (
        rf"TRAIN_DATA=\S+tokens: its files differ from the data of the checkpoint at iteration 6 of {source}"
        r" \(fingerprint \w+ instead of \w+\)"
    )
    assert re.search(rf"{files}, .*\. Fix: .* or set ALLOW_OTHER_DATA=true to continue ", line)

    allowed = runs.succeed("two", LOAD_DIR=source, ALLOW_OTHER_DATA=True, **other)
    assert allowed.curve("consumed_samples") == [56]
    assert re.search(rf"{files}; ALLOW_OTHER_DATA=true: continuing at sample 48", allowed.text)
    (event,) = allowed.events("other_data")
    assert event["iteration"] == 6
    assert [re.fullmatch(files, change) is not None for change in event["changes"]] == [True]

    longer = runs.stopped("one", TRAIN_ITERS=14, EXIT_INTERVAL=7)
    assert longer.curve("iteration") == [1, 2, 3, 4, 5, 6, 7]


def test_checkpoint_that_does_not_say_what_it_was_trained_on(interrupted, runs, caplog, monkeypatch):
    """As versions before 2026-11 wrote them."""
    from moe_exp.checkpoint.load import saved_progress
    from moe_exp.training import samples as training_data

    saved_at_6(interrupted(), runs, "old")
    source = runs.folder("old").checkpoints
    config = Config(gpus_per_node=1, data_dir=str(runs.data_dir), seq_len=32, eval_interval=0)
    training_data.build_data(config)
    monkeypatch.setattr(training_data, "from_first_rank", lambda make: make())
    with pytest.raises(ConfigError, match="SEQ_LEN=32"):
        training_data.compare_data(config, source)
    common = source / "iter_0000006" / "common.pt"
    state = torch.load(common, weights_only=False)
    del state["progress"]["sample_order"]
    torch.save(state, common)
    saved = saved_progress(source)
    assert saved and (saved.iteration, saved.consumed_samples, saved.sample_order) == (6, 48, None)
    caplog.clear()
    facts, changes = training_data.compare_data(config, source)
    assert (facts["seq_len"], changes) == (32, [])
    (line,) = caplog.messages
    assert line.startswith(f"the checkpoint at iteration 6 of {source} does not record its data")
