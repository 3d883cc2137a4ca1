"""Runs whose loss goes wrong: a spike that corrupted tokens cause, and steps that cannot be made any more."""

import json
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint.small_job import records, run_to_end, small_settings, train_whole, write_tokens
from helpers.ranks import free_port, run_on_ranks
from helpers.token_files import GBSZ, corrupt, spiking_settings, write_corpus
from moe_exp.checkpoint.format.folders import Manifest, iteration_folder, latest_iteration
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.state import Progress
from moe_exp.checkpoint.tools.diff import compare
from moe_exp.config import Config
from moe_exp.data.samples.dataset import DataStage, SampleStream
from moe_exp.host.exit_codes import FAILED, FINISHED, START_AGAIN
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training.loss_guard import GuardEnd, LossGuard
from moe_exp.training.spikes import Spike, SpikeDetector
from moe_exp.training.step import IterationEnd, Step
from moe_exp.watch.hangs import heartbeat

LAYOUTS: dict[str, dict[str, Any]] = {
    "1 rank": {"async_save": True, "ema_decay": 0.9},
    "EP=2": {"gpus_per_node": 2, "ep": 2, "ema_decay": 0.9},
}
CORRUPT = 71  # iteration, when the fall at the start no longer fills the window of the spread


def corrupted_corpus(folder: Path, *iterations: int) -> list[list[int]]:
    """Returns the documents that each of the iterations has of its own."""
    prefix = write_corpus(folder)
    return [corrupt(prefix, range((iteration - 1) * GBSZ, iteration * GBSZ)) for iteration in iterations]


def curve(folder: Path) -> list[tuple[int, float, float]]:
    return [(one["iteration"], one["lm_loss"], one["grad_norm"]) for one in records(folder, "train")]


def events(folder: Path, name: str) -> list[dict[str, Any]]:
    return [record for record in records(folder, "event") if record["event"] == name]


def done_step(
    iteration: int, first_sample: int, batch_size: int, updated: bool, grad_norm: float | None
) -> Step:
    step = Step(iteration, first_sample, batch_size, [], None, None)
    step.updated, step.grad_norm = updated, grad_norm
    return step


def run_without(settings: dict[str, Any], skipped: list[int], port: int) -> None:
    """On a rank: a run in whose order these samples never were."""
    sample, left = SampleStream.sample, [number for number in range(4000) if number not in skipped]
    SampleStream.sample = lambda self, index: sample(self, left[index])  # type: ignore[method-assign]
    train_whole(settings, port)


@pytest.mark.slow
def test_log_names_the_batch(tmp_path):
    (documents,) = corrupted_corpus(tmp_path, CORRUPT)
    settings = spiking_settings(tmp_path, "run", train_iters=80, spike_action="log")
    code, printed = run_to_end(settings)
    assert code == FINISHED
    assert f"spike at iteration {CORRUPT}: loss " in printed
    (spike,), (end,) = events(tmp_path / "run", "spike"), events(tmp_path / "run", "spike_end")
    assert spike["iteration"] == spike["first_iteration"] == end["first_iteration"] == CORRUPT
    assert spike["samples"] == [[(CORRUPT - 1) * GBSZ, CORRUPT * GBSZ]]
    assert set(documents) <= set(spike["documents"][str(tmp_path / "tokens")])
    assert spike["loss"] > 5 > 1 > spike["loss_level"] and end["outcome"] == "recovered"
    assert len(curve(tmp_path / "run")) == 80


@pytest.mark.parametrize("layout", ["1 rank", pytest.param("EP=2", marks=pytest.mark.slow)])
def test_rollback_is_the_run_without_the_batch(layout, tmp_path):
    corrupted_corpus(tmp_path, 41)
    values = {"train_iters": 44, "save_interval": 20, "spike_action": "rollback"}
    settings = spiking_settings(tmp_path, "run", **values) | LAYOUTS[layout]
    folder = RunFolder(tmp_path / "run")
    code, printed = run_to_end(settings)
    assert code == START_AGAIN
    assert "rolled back to iteration 20, before the spike, skipping samples 156 to 163 of iter" in printed
    (rollback,) = events(folder.path, "rollback")
    # The checkpoint at 40 has the batch before the alarm, whose step may be the cause.
    assert (rollback["back_to"], rollback["set_aside"]) == (20, ["1/iter_0000040"])
    assert rollback["samples"] == [[156, 164]]
    assert latest_iteration(folder.checkpoints) == 20
    assert Manifest.read(iteration_folder(folder.set_aside / "1", 40)) is not None
    assert run_to_end(settings)[0] == FINISHED
    reference = settings | {"run_name": "reference", "spike_action": "none", "async_save": False}
    skipped = list(range(156, 164))
    run_on_ranks(settings["gpus_per_node"], run_without, reference, skipped, free_port(), join=False)
    assert curve(folder.path) == curve(tmp_path / "reference")
    assert len(curve(folder.path)) == 44
    ends = (iteration_folder(path / "checkpoints", 44) for path in (folder.path, tmp_path / "reference"))
    same = compare(*ends, optimizer=True)
    assert same.is_within(0.0)
    assert any(tensor.name.startswith("ema of ") for tensor in same.tensors)
    # The skips are in the checkpoints: without the file the next start reads the same samples.
    folder.skipped_samples.unlink()
    iteration_folder(folder.checkpoints, 44).rename(tmp_path / "away")
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("40")
    assert run_to_end(settings)[0] == FINISHED
    assert curve(folder.path) == curve(tmp_path / "reference")


@pytest.mark.slow
def test_the_last_rollback_ends_the_run(tmp_path):
    corrupted_corpus(tmp_path, 71, 81)
    settings = spiking_settings(
        tmp_path, "run", train_iters=90, save_interval=20, spike_action="rollback", max_rollbacks=1
    )
    assert run_to_end(settings)[0] == START_AGAIN
    code, printed = run_to_end(settings)
    assert code == FAILED
    # Two batches are skipped: the second spike comes two iterations earlier, with the same samples.
    assert "moe-exp: MAX_ROLLBACKS=1: another spike at iteration 79 after 1 rollbacks" in printed
    (refused,) = events(tmp_path / "run", "no_rollback")
    assert refused["back_to"] == 60
    _, second = events(tmp_path / "run", "spike")
    assert second["samples"] == [[80 * GBSZ, 81 * GBSZ]]
    assert len(json.loads((tmp_path / "run" / "skipped_samples.json").read_text())["rollbacks"]) == 1
    # With another one, the two are skipped together.
    assert run_to_end(settings | {"max_rollbacks": 2})[0] == START_AGAIN
    assert run_to_end(settings | {"max_rollbacks": 2})[0] == FINISHED
    reference = settings | {"run_name": "reference", "spike_action": "none"}
    skipped = [number for number in range(400) if number // GBSZ + 1 in (70, 71, 80, 81)]
    run_on_ranks(1, run_without, reference, skipped, free_port(), join=False)
    assert curve(tmp_path / "run") == curve(tmp_path / "reference")


@pytest.mark.slow
def test_no_checkpoint_from_before_the_spike(tmp_path):
    corrupted_corpus(tmp_path, CORRUPT)
    settings = spiking_settings(tmp_path, "run", train_iters=80, save_interval=80, spike_action="rollback")
    assert run_to_end(settings)[0] == FINISHED
    (refused,) = events(tmp_path / "run", "no_rollback")
    assert refused["reason"] == "no usable checkpoint of this run from before iteration 70"
    assert not (tmp_path / "run" / "skipped_samples.json").exists()
    assert len(curve(tmp_path / "run")) == 80


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_bad_steps_in_a_row_end_the_run(num_ranks, tmp_path):
    """At this learning rate the first step takes the weights beyond what fp32 can multiply."""
    write_tokens(tmp_path)
    settings = small_settings(
        tmp_path, "run", lr=1e30, min_lr=1e30, warmup_iters=0, train_iters=50, decay_iters=50,
        max_bad_steps=4, save_interval=1, keep_last=1, gpus_per_node=num_ranks, ep=num_ranks,
    )  # fmt: skip
    code, printed = run_to_end(settings)
    folder = RunFolder(tmp_path / "run")
    assert code == FAILED
    (row,), (end,) = events(folder.path, "bad_step"), events(folder.path, "too_many_bad_steps")
    assert (row["iteration"], row["samples"]) == (2, [[4, 8]])
    assert {row["loss"], row["grad_norm"]} & {"nan", "inf"}
    assert end["iteration"] == 5
    where = folder.bad_steps / "1" / "iter_0000005"
    assert "MAX_BAD_STEPS=4: no optimizer step in iterations 2 to 5, " in printed
    assert f"saved the weights to {where}. Fix:" in printed
    manifest = Manifest.read(where)
    assert manifest is not None and manifest.iteration == 5
    # The same again, from the newest checkpoint: it stays, whatever KEEP_LAST says.
    before = {path.name: path.read_bytes() for path in where.iterdir()}
    assert run_to_end(settings)[0] == FAILED
    assert {path.name: path.read_bytes() for path in where.iterdir()} == before
    assert len(list(folder.bad_steps.glob("1/iter_*"))) + len(list(folder.bad_steps.glob("2/iter_*"))) == 2


def test_bad_steps_count_in_a_row(tmp_path, monkeypatch):
    told = []
    guard = LossGuard.__new__(LossGuard)
    guard.gradients = None
    guard._config, guard._metrics, guard._detector = Config(max_bad_steps=3), None, None
    guard._trained = Namespace(optimizer=Namespace(get_loss_scale=lambda: 1.0))
    guard._num_bad, guard._recent, guard._finish_save = 0, [], list
    guard._warn, guard._event = lambda *args: told.append(args[1]), lambda *args, **values: None
    guard._batches, guard._stream, guard._save_apart = lambda steps: {}, lambda steps: [], lambda _: "saved"
    monkeypatch.setattr("moe_exp.training.loss_guard._ranges_text", lambda ranges: "")

    def make(iteration: int, updated: bool) -> None:
        done = done_step(iteration, 4 * iteration, 4, updated, 1.0 if updated else math.nan)
        guard.check(None, IterationEnd(done, "", False, 2.0))

    for iteration, updated in enumerate([False, False, True, False, False, True, False, False], start=1):
        make(iteration, updated)
    assert told == [1, 4, 7]
    with pytest.raises(GuardEnd, match="no optimizer step in iterations 7 to 9"):
        make(9, False)


@pytest.mark.parametrize("consumed", [0, 160])
def test_a_stage_of_other_data_is_no_spike(consumed, tmp_path):
    """Neither where it begins nor at a resume just there; within a stage the same losses are one."""
    losses = [2.0 + 0.01 * math.sin(step) for step in range(40)] + [3.0] * 5
    found: dict[int, list[Spike]] = {}
    for first_of_stage in (160, 10**6):
        samples = Namespace(stage_at=lambda index, first=first_of_stage: DataStage(int(index >= first), 64))
        progress = Progress(consumed_samples=consumed)
        if consumed:
            detector = SpikeDetector()
            for step, loss in enumerate(losses[:40], 1):
                detector.add(step, loss, 1.0)
            progress.spike_windows = detector.state()
        config, told = Config(spike_action="log"), found.setdefault(first_of_stage, [])
        guard = LossGuard(config, None, RunFolder(tmp_path), None, samples, progress, None, list)
        guard._spike = lambda spike, *_, told=told: told.append(spike)
        for step, loss in list(enumerate(losses, 1))[consumed // 4 :]:
            done = done_step(step, 4 * (step - 1), 4, True, 1.0)
            guard.check(progress, IterationEnd(done, "", False, loss))
    assert not found[160] and found[10**6][0].first_iteration == 41


def test_the_history_of_losses_is_saved(tmp_path):
    """A restart would otherwise judge no loss for a window's length."""
    write_tokens(tmp_path)
    assert run_to_end(small_settings(tmp_path, "run", train_iters=5, decay_iters=5))[0] == FINISHED
    folder = iteration_folder(RunFolder(tmp_path / "run").checkpoints, 5)
    saved = CheckpointReader(folder).common()["progress"]["spike_windows"]
    detector = SpikeDetector()
    for iteration, loss, grad_norm in curve(tmp_path / "run"):
        detector.add(iteration, loss, grad_norm)
    expected = detector.state()
    assert (saved["spike_since"], len(saved["loss"][0])) == (None, len(expected["loss"][0]))
    for name in ("loss", "log_grad_norm"):
        for found, wanted in zip(saved[name], expected[name], strict=True):
            assert found == pytest.approx(wanted, rel=1e-5)


def test_exit_file_is_gone_where_the_guard_ends_the_run(tmp_path):
    """Else the next start would end by it after an iteration."""
    write_tokens(tmp_path)
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.exit_file.touch()
    values = {"lr": 1e30, "min_lr": 1e30, "warmup_iters": 0, "max_bad_steps": 1, "init_std": 1e30}
    code, printed = run_to_end(small_settings(tmp_path, "run", **values))
    assert code == FAILED
    assert "MAX_BAD_STEPS=1: no optimizer step in iterations 1 to 1" in printed
    assert not folder.exit_file.exists()


def roll_back(recent: list[Step], go_back: Any, monkeypatch: Any, path: Path, **settings: Any) -> None:
    """Has a guard roll back a spike of iteration 7."""
    monkeypatch.setattr("moe_exp.training.loss_guard.from_first_rank", lambda make: 0)
    monkeypatch.setattr("moe_exp.training.loss_guard.go_back", go_back)
    guard = LossGuard.__new__(LossGuard)
    guard.gradients = None
    guard._config, guard._folder = Config(**settings), RunFolder(path)
    guard._metrics, guard._skipped, guard._recent = None, (), recent
    guard._roll_back(Namespace(first_iteration=7), Namespace(iteration=7), None)


def test_what_may_take_long_is_no_part_of_the_iteration(tmp_path, monkeypatch):
    """A watch that took reading all checkpoints for a hang would end every rollback."""
    seen = []
    monkeypatch.setattr(heartbeat, "_heart", Namespace(phase="end_of_iteration", enter=seen.append))
    recent = [done_step(6, 20, 4, True, 1.0), done_step(7, 24, 4, True, 1.0)]
    roll_back(recent, lambda *_, **__: seen.append("go_back") or "none", monkeypatch, tmp_path)
    assert seen == ["rollback", "go_back", "end_of_iteration"]


STAGES = {"rampup_batch_size": "4 4 80", "data_stages": '[{"from_samples": 160, "seq_len": 64}]'}


@pytest.mark.parametrize(
    ("settings", "samples"),
    # Batches of the next stage must begin where they did: all that is skipped is a multiple of GBSZ.
    [({}, [(24, 28)]), (STAGES, [(24, 40)])],
    ids=["no stages", "ramp and stages"],
)
def test_a_spike_right_after_a_start_goes_back_to_before_that_start(settings, samples, tmp_path, monkeypatch):
    calls = []

    def go_back(*_, iteration, samples):
        calls.append((iteration, list(samples)))
        return "there is no whole checkpoint"

    recent = [done_step(7, 24, 4, True, 1.0)]  # the start was at 6
    roll_back(recent, go_back, monkeypatch, tmp_path, gbsz=16, seq_len=32, **settings)
    # and if there is none before it, to that of the start
    assert calls == [(6, samples), (7, samples)]


def test_the_loss_scaler_at_work_is_no_bad_step(tmp_path):
    """Megatron begins with a scale of 2^32, and fp16 overflows until it is small enough."""
    write_tokens(tmp_path)
    values = {"dtype": "fp16", "max_bad_steps": 2, "train_iters": 5, "decay_iters": 5}
    assert run_to_end(small_settings(tmp_path, "run", **values))[0] == FINISHED
    assert sum(record["skipped_iterations"] for record in records(tmp_path / "run", "train")) == 5
    assert not events(tmp_path / "run", "bad_step")
