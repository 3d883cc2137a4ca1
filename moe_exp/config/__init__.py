"""Every setting of a run, once, and what has to hold between settings. No torch."""

from moe_exp.config.loading import add_arguments, load_config, module_arguments, to_yaml
from moe_exp.config.settings import PREFETCHED_MICROBATCHES, Config, ConfigError, problem

__all__ = [
    "PREFETCHED_MICROBATCHES", "Config", "ConfigError", "add_arguments", "load_config", "module_arguments",
    "problem", "to_yaml",
]  # fmt: skip
