"""The documents that describe settings and metrics are current: docs/settings.md and docs/run_folder.md."""

import runpy
from typing import Any

import pytest

from helpers import ROOT
from moe_exp.config import TRAITS, Config, names_by_section
from moe_exp.config.settings import SECTIONS
from moe_exp.runs.records import TRAIN_KEYS, VALID_KEYS

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def generator() -> dict[str, Any]:
    return runpy.run_path(str(DOCS / "generate_settings.py"), run_name="generate_settings")


def test_file_is_current(generator: dict[str, Any]) -> None:
    written = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert written == generator["render"](), "run: PYTHONPATH=. python docs/generate_settings.py"


def test_every_setting_is_in_one_section() -> None:
    assert [name for names in names_by_section().values() for name in names] == list(Config.model_fields)
    assert list(names_by_section()) == list(SECTIONS)


def test_megatron_flags_name_settings(generator: dict[str, Any]) -> None:
    names = [*generator["MEGATRON_FLAGS"], *generator["SAME_FLAG"]]
    assert set(names) <= set(Config.model_fields)
    assert len(names) == len(set(names))
    # every setting that declares flags of Megatron-LM is in the table, with all of them
    declared = {name: traits.megatron_flags for name, traits in TRAITS.items()}
    for name, flags in declared.items():
        assert flags is None or all(flag in generator["MEGATRON_FLAGS"][name] for flag in flags)


def test_run_folder_document_names_every_metric() -> None:
    text = (DOCS / "run_folder.md").read_text(encoding="utf-8")
    assert [key for key in TRAIN_KEYS | VALID_KEYS if f"`{key}`" not in text] == []
