"""A layout as environment variables. No torch."""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config import Config, problem
from moe_exp.planner.layout_rules import LAYOUT_SETTINGS

_OF_THE_HOST = ("master_addr", "master_port", "node_rank", "num_workers", "threads_per_rank")
_ALWAYS = (*LAYOUT_SETTINGS, "nnodes", "gpus_per_node", "gbsz")


def exported_settings(config: Config, defaults: Config) -> Iterator[tuple[str, str]]:
    """Environment variables with which `moe-exp train` runs a layout: all of the layout, and whatever else differs from the preset.

    The one place that knows how a layout is told to training. What belongs to one node or host is left out. A layout setting that is
    empty is among them: it takes the place of what an earlier layout left in the environment.

    Args:
        config: the settings with the layout.
        defaults: those of the preset alone.

    Raises:
        ValueError: a setting is empty that the preset sets: an empty variable counts as none.
    """
    yield "PRESET", config.preset
    for name in type(config).model_fields:
        value = getattr(config, name)
        if name in _OF_THE_HOST or name == "preset" or (name not in _ALWAYS and value == getattr(defaults, name)):
            continue
        if value == "" and getattr(defaults, name):
            rule = f"an empty variable would leave what PRESET={config.preset} has"
            raise ValueError(problem(name, "", rule, f"leave the preset's, and train with --{name.replace('_', '-')}="))
        yield name.upper(), setting_text(value)


def setting_text(value: object) -> str:
    """A value as an environment variable has it."""
    if value is None:
        return "none"
    return str(value).lower() if isinstance(value, bool) else str(value)
