"""The router: scores, top-k, weights, and the record of its decisions."""

from moe_exp.layers.router.config import RouterConfig, kernel_problem
from moe_exp.layers.router.router import Router, RoutingDecision, count_kept, tokens_in_group

__all__ = [
    "Router",
    "RouterConfig",
    "RoutingDecision",
    "count_kept",
    "kernel_problem",
    "tokens_in_group",
]
