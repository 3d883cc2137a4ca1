"""kill -9 while checkpoints are written: there is always one to continue from, and every one is whole."""

import itertools
import random
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint import small_job
from helpers.checkpoint.ckpt_files import write_checkpoint
from helpers.checkpoint.small_job import files_of, records, run_to_end, small_settings, write_tokens
from moe_exp.checkpoint.format.folders import damages, latest_iteration, publish, recover, usable
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.integrity import contents
from moe_exp.runs.run_folder import iterations


def check_all(checkpoints: Path, reference: Path) -> int:
    """Every checkpoint is that of the undisturbed run; the iteration to continue from, or 0."""
    for iteration in iterations(checkpoints):
        folder = checkpoints / f"iter_{iteration:07d}"
        damage, files = contents(folder)
        assert damage == ""
        assert list(damages(folder, files)) == []
        expected = reference / folder.name
        assert files_of(folder) == files_of(expected)
        progress, other = (CheckpointReader(path).common()["progress"] for path in (folder, expected))
        assert progress == other
    newest = usable(checkpoints)[:1]
    return int(newest[0].name.removeprefix("iter_")) if newest else 0


def kill_and_go_on(folder: Path, num_kills: int, seed: int, **changes: Any) -> tuple[int, int]:
    """Kills a run at random until it ends; kills that left a partial checkpoint, and the last iteration."""
    write_tokens(folder)
    random_moments, out = random.Random(seed), folder / "out"
    settings = small_settings(folder, "killed", save_interval=1, **changes)
    assert run_to_end(settings | {"keep_last": 0, "run_name": "whole"}, timeout=900)[0] == 0
    saves = [event for event in records(folder / "whole", "event") if event["event"] == "checkpoint"]
    assert len(saves) == settings["train_iters"]
    checkpoints, num_partial, reached = folder / "killed" / "checkpoints", 0, 0
    for _ in range(num_kills):
        started = len(records(folder / "killed", "event"))
        processes = small_job.start_run(settings, out)
        deadline = time.monotonic() + 120
        # From the first save of this start on.
        while len(records(folder / "killed", "event")) <= started:
            if all(process.exitcode is not None for process in processes):
                break
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.01)
        time.sleep(random_moments.uniform(0, 3 * max(save["seconds"] for save in saves)))
        small_job.kill_run(processes)
        num_partial += any(path.suffix for path in checkpoints.glob("iter_*"))
        recover(checkpoints)
        now = check_all(checkpoints, folder / "whole" / "checkpoints")
        assert now >= reached
        reached = now
    assert run_to_end(settings, timeout=900)[0] == 0
    for name in ("lm_loss", "grad_norm"):
        curves = [[record[name] for record in records(folder / run, "train")] for run in ("whole", "killed")]
        assert curves[0] == curves[1]
    assert not [path for path in checkpoints.glob("iter_*") if path.suffix]
    return num_partial, check_all(checkpoints, folder / "whole" / "checkpoints")


def test_killed_while_saving(tmp_path):
    assert kill_and_go_on(tmp_path, 3, seed=1, train_iters=12)[1] == 12


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{}, {"async_save": True}, {"keep_last": 2}], ids=["at once", "background", "retention"]
)
def test_killed_twenty_times_while_saving(changes, tmp_path, record_property):
    ranks = {"gpus_per_node": 2, "ep": 2, "train_iters": 80}
    num_partial, last = kill_and_go_on(tmp_path, 20, seed=2, **(ranks | changes))
    record_property("kills_with_a_partial_checkpoint", num_partial)
    assert num_partial >= 3
    assert last == 80


@pytest.mark.parametrize("again", [False, True], ids=["new", "replaces one"])
def test_latest_names_a_whole_checkpoint_between_any_two_renames(again, tmp_path, monkeypatch):
    num_done = 0
    for stop in itertools.count(1):
        checkpoints = tmp_path / str(stop)
        for iteration in (3, 6) if again else (3,):
            write_checkpoint(checkpoints, iteration)
        partial = write_checkpoint(tmp_path / "new" / str(stop), 6).rename(checkpoints / "partial")
        calls = itertools.count(1)

        def until(of, *args, stop=stop, calls=calls):
            if next(calls) == stop:
                raise KeyboardInterrupt
            return of(*args)

        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            for name in ("rename", "replace"):
                of = getattr(Path, name)
                patch.setattr(Path, name, lambda path, target, of=of: until(of, path, target))
            publish(partial, 6)
            num_done = stop
        recover(checkpoints)
        latest = latest_iteration(checkpoints)
        assert (checkpoints / f"iter_{latest:07d}" / "manifest.json").exists(), stop
        if num_done:
            assert latest == 6
            break
    assert num_done > 3
