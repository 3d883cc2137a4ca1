"""A run folder with default settings, and logging as it was before."""

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_exp.config import Config
from moe_exp.runs.run_folder import RunFolder, open_run_folder


@pytest.fixture
def config(tmp_path: Path) -> Config:
    return Config(run_dir=str(tmp_path), run_name="a", gpus_per_node=1)


@pytest.fixture
def folder(config: Config) -> RunFolder:
    return open_run_folder(config)


@pytest.fixture
def clean_logging() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("moe_exp")
    handlers, level = root.handlers[:], ours.level
    yield
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    ours.setLevel(level)
