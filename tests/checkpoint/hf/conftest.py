"""Folders that several files of tests look at."""

from pathlib import Path

import pytest

from helpers.hf.tiny_models import MODELS, tiny_folder
from moe_exp.checkpoint.hf.importing import from_hf


@pytest.fixture(scope="session")
def hf_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For every architecture what `save_pretrained` writes, fp32."""
    root = tmp_path_factory.mktemp("hf")
    return {name: tiny_folder(root / name, name) for name in MODELS}


@pytest.fixture(scope="session")
def checkpoints(hf_folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same as checkpoints of ours."""
    root = tmp_path_factory.mktemp("ours")
    for name, folder in hf_folders.items():
        from_hf(folder, root / name)
    return {name: root / name for name in hf_folders}
