"""docs/huggingface.md has a row for every causal class with experts of transformers."""

import re

import pytest
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from helpers import ROOT
from moe_exp.checkpoint.hf.families_attention import ARCHITECTURES

CHECKED = "5.23."
pytestmark = pytest.mark.skipif(
    not transformers.__version__.startswith(CHECKED),
    reason=f"the tables list the classes of transformers {CHECKED}*, not {transformers.__version__}",
)
NUMBER_OF_EXPERTS = re.compile(r"(^|_)n(um)?_(\w+_)?experts$")  # num_local_experts, n_routed_experts, ...


def has_experts(model_type):
    """Whether the configuration class or a class inside it has a field for a number of experts."""
    config = CONFIG_MAPPING[model_type]
    parts = [config, *config.sub_configs.values()]
    names = {
        name
        for part in parts
        for names in (getattr(part, "__dataclass_fields__", ()), getattr(part, "attribute_map", ()))
        for name in names
    }
    return any(map(NUMBER_OF_EXPERTS.search, names))


def rows(section):
    """Classes in the first column of a section's table."""
    text = (ROOT / "docs" / "huggingface.md").read_text(encoding="utf-8")
    table = text.split(f"\n## {section}\n")[1].split("\n## ")[0]
    first = [line.split("|")[1] for line in table.splitlines() if line.startswith("|")]
    return re.findall(r"`(\w+)`", " ".join(first))


def test_every_class_with_experts_has_a_row():
    converted, missing = rows("Architectures"), rows("Other classes with experts")
    assert sorted(converted) == sorted(ARCHITECTURES)
    assert len(missing) == len(set(missing))
    assert set(missing) & set(converted) == set(), "converted, and listed as missing a part"
    known, with_experts = set(), set()
    for model_type, names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        classes = {names} if isinstance(names, str) else set(names)
        known |= classes
        with_experts |= classes if has_experts(model_type) else set()
    assert len(with_experts) > 50  # the rule still finds them
    assert set(missing) - known == set(), "transformers has no such class"
    assert with_experts - {*converted, *missing} == set(), "without a row"
    assert set(missing) - with_experts == set(), "a class without experts"
