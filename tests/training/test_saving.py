"""Which checkpoint a start continues from."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_exp.checkpoint.integrity import Source
from moe_exp.config import Config, ConfigError
from moe_exp.runs.run_folder import RunFolder
from moe_exp.training import saving


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
