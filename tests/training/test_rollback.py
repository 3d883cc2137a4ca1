"""Which checkpoint a start continues from, and which samples it skips."""

import os
from pathlib import Path
from typing import Any

import pytest

from helpers.checkpoint.small_job import small_settings, write_tokens
from helpers.ranks import free_port, run_on_ranks
from moe_exp.checkpoint.integrity import Source
from moe_exp.config import Config, ConfigError, load_config
from moe_exp.host.files import write_json
from moe_exp.runs.run_folder import RunFolder, read_rollbacks
from moe_exp.training import saving
from moe_exp.training.loss_guard import free_place


def skipped_at_start(settings: dict[str, Any], entries: list[dict[str, Any]], port: int) -> list[list[int]]:
    """On a rank: the skipped samples of a start in a folder with rollbacks, by default in its order."""
    from moe_exp.data.samples.order import order_of_files
    from moe_exp.engine import runtime
    from moe_exp.training import loop

    os.environ["MASTER_PORT"] = str(port)
    config = load_config(settings, {})
    rank = runtime.start(config)
    order = order_of_files(config).facts()
    folder = RunFolder.of(config)
    folder.path.mkdir(parents=True)
    write_json(folder.skipped_samples, {"rollbacks": [{"sample_order": order} | entry for entry in entries]})
    _, progress = loop.build(config, rank)
    runtime.stop()
    return progress.skipped_samples


def test_skips_count_in_their_own_order(tmp_path):
    write_tokens(tmp_path)
    settings = small_settings(tmp_path, "run")
    entries = [{"samples": [[8, 12]]}, {"samples": [[40, 44]], "sample_order": {"seed": 5}}]
    assert run_on_ranks(1, skipped_at_start, settings, entries, free_port(), join=False) == [[[8, 12]]]


def test_a_list_that_cannot_be_read(tmp_path):
    folder = RunFolder(tmp_path)
    assert read_rollbacks(folder) == []
    folder.skipped_samples.write_text('{"rollbacks": [')
    with pytest.raises(ConfigError, match=r"skipped_samples\.json: cannot be read \(.*\)\. Fix: restore"):
        read_rollbacks(folder)


def test_no_checkpoint_is_overwritten(tmp_path):
    first = free_place(tmp_path, 7)
    assert first == tmp_path / "1" / "iter_0000007"
    first.mkdir(parents=True)
    assert free_place(tmp_path, 7) == tmp_path / "2" / "iter_0000007"
    assert free_place(tmp_path, 8) == tmp_path / "1" / "iter_0000008"


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [(True, True, "own"), (False, True, "other"), (True, False, "own"), (False, False, None)],
)
def test_load_dir_is_for_runs_without_checkpoints_of_their_own(own, other, expected, tmp_path, monkeypatch):
    folder = RunFolder(tmp_path / "run")
    sources = {folder.checkpoints: Source(Path("own")) if own else None}
    sources[tmp_path / "elsewhere"] = Source(Path("other")) if other else None
    monkeypatch.setattr(saving, "find_source", lambda path, checksums: sources[path])
    config = Config(load_dir=str(tmp_path / "elsewhere"))
    if expected is None:
        with pytest.raises(ConfigError, match=r"LOAD_DIR=.*elsewhere: has no checkpoint\. Fix: "):
            saving.choose_source(config, folder)
    else:
        assert saving.choose_source(config, folder) == Source(Path(expected))
    assert saving.choose_source(Config(), folder) == sources[folder.checkpoints]


def test_rollback_needs_checkpoints():
    config = load_config({"preset": "cpu", "spike_action": "rollback", "save_interval": 0}, {})
    (problem,) = config.problems()
    assert problem.startswith("SPIKE_ACTION=rollback: ") and "SAVE_INTERVAL=0" in problem
