"""Settings of a run, and the rules that they must satisfy. Does not import torch."""

from moe_exp.config.errors import ConfigError, problem, raise_for, setting_error
from moe_exp.config.loading import add_arguments, load_config, module_arguments, to_yaml
from moe_exp.config.sections.data import PREFETCHED_MICROBATCHES
from moe_exp.config.settings import TRAITS, Config, names_by_section

__all__ = [
    "PREFETCHED_MICROBATCHES", "TRAITS", "Config", "ConfigError", "add_arguments", "load_config",
    "module_arguments", "names_by_section", "problem", "raise_for", "setting_error", "to_yaml",
]  # fmt: skip
