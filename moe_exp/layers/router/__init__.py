"""The router: scores, top-k, weights, and the record of its decisions."""

from moe_exp.layers.router.router import (
    Router,
    RouterConfig,
    RoutingDecision,
    count_kept,
    kernel_problem,
    tokens_in_group,
)

__all__ = ["Router", "RouterConfig", "RoutingDecision", "count_kept", "kernel_problem", "tokens_in_group"]
