"""Traits of settings, and the functions that declare settings with them."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel, Field

from moe_exp.config.setting_types import Part


@dataclass(frozen=True)
class Traits:
    """Properties of a setting apart from type, default and description."""

    part: Part  # aspect of a run; place: where it is started and written
    costs: bool  # whether it affects the memory of a rank or the time of an iteration
    compared: bool  # whether it must be equal in all calls of a comparison, as losses or records depend on it
    # further names in Megatron-LM, where the flag has no value; then it needs none here either
    megatron_flags: tuple[str, ...] | None = None


def _setting(default: Any, description: str, **options: Any) -> Any:
    """Declares a setting. `options`: values of its Traits, and arguments of `Field`. If `options` has a
    `default_factory`, `default` must be `...` (Ellipsis).
    """
    own = {name: options.pop(name) for name in Traits.__dataclass_fields__ if name in options}
    given = {} if default is ... else {"default": default}
    field = Field(description=description, **given, **options)
    field.metadata.append(Traits(**own))
    return field


# One function per part of a run; its traits are defaults that a declaration can override.
place = partial(_setting, part="place", costs=False, compared=False)
layout = partial(_setting, part="layout", costs=True, compared=True)
model = partial(_setting, part="model", costs=True, compared=True)
experts = partial(_setting, part="experts", costs=True, compared=True)
learning = partial(_setting, part="learning", costs=False, compared=True)
data = partial(_setting, part="data", costs=False, compared=True)
output = partial(_setting, part="output", costs=False, compared=True)
care = partial(_setting, part="care", costs=False, compared=False)
# The same parts, for many of whose settings the defaults do not hold.
numerics = partial(model, costs=False)  # what the model computes, at the same cost
costly = partial(learning, costs=True)
bookkeeping = partial(output, compared=False)  # where files and records go, and which of them are kept


def traits(settings: type[BaseModel], name: str) -> Traits:
    """Returns the traits of the setting `name`; LookupError if it was declared without traits."""
    found = [one for one in settings.model_fields[name].metadata if isinstance(one, Traits)]
    if not found:
        raise LookupError(f"{name} has no traits. Fix: declare it with a function of config/traits.py")
    return found[0]
