"""The router and its decisions."""

from moe_exp.config.sections.router import RouterConfig
from moe_exp.layers.router.decision import RoutingDecision, count_kept, kept_slots, tokens_in_group
from moe_exp.layers.router.router import Router, kernel_problem

__all__ = [
    "Router", "RouterConfig", "RoutingDecision", "count_kept", "kept_slots", "kernel_problem",
    "tokens_in_group",
]  # fmt: skip
