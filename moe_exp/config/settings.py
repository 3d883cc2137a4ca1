"""All settings of a training run.

Resolved in the order default < preset < settings file < environment < command line. The environment variable
of `num_experts` is NUM_EXPERTS, its flag `--num-experts`. Each section has a file in config/sections/ with
its settings, derived values and rules. Imports neither torch nor megatron, so that `--help`, `--dry-run` and
the planner are fast.
"""

from moe_exp.config.sections.reliability import ReliabilitySettings
from moe_exp.config.setting_types import traits


class Config(ReliabilitySettings):
    """All settings of a training run. Field order is the order of `--help` and of docs/settings.md."""


TRAITS = {name: traits(Config, name) for name in Config.model_fields}
# First setting of each section of `--help` and docs/settings.md, in the order of the fields.
SECTIONS = {
    "Launch": "preset",
    "Model": "num_layers",
    "Mixture of experts": "use_moe",
    "Parallelism": "tp",
    "Optimization": "lr",
    "Data": "train_data",
    "Input and output": "run_dir",
    "Reliability and debugging": "fingerprints",
}


def names_by_section() -> dict[str, list[str]]:
    """Returns the names of the settings by section, in order."""
    heading_of = {first: heading for heading, first in SECTIONS.items()}
    found: dict[str, list[str]] = {}
    for name in Config.model_fields:
        if name in heading_of:
            names = found[heading_of[name]] = []
        names.append(name)
    return found
