"""docs/recipes.md shows what the committed results say."""

import json
import runpy
from dataclasses import asdict

import pytest

from helpers import ROOT
from moe_exp.studies.ladder.ladder import PUBLISHED, Definition

RESULTS = sorted(PUBLISHED.glob("*.json"))


def test_tables_are_generated_from_the_results():
    generator = runpy.run_path(str(ROOT / "docs" / "generate_recipes.py"), run_name="generate_recipes")
    written = generator["RECIPES_MD"].read_text()
    assert written == generator["page"](written), "run: PYTHONPATH=. python docs/generate_recipes.py"


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_result_is_of_the_definition_beside_it(result):
    kept = json.loads(result.read_text())["definition"]
    definition = asdict(Definition.read(result.with_suffix(".yaml")))
    for name in ("settings", "rungs", "variants", "runs", "repeats"):
        assert json.loads(json.dumps(definition[name])) == kept[name], name
