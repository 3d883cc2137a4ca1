"""Every setting of a run, once, and what has to hold between settings. No torch."""

from moe_exp.config.settings import (
    PREFETCHED_MICROBATCHES,
    Config,
    ConfigError,
    add_arguments,
    load_config,
    module_arguments,
    problem,
    to_yaml,
)

__all__ = [
    "PREFETCHED_MICROBATCHES", "Config", "ConfigError", "add_arguments", "load_config", "module_arguments",
    "problem", "to_yaml",
]  # fmt: skip
