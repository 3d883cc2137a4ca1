"""Token dispatchers: local, all-to-all, all-gather and DeepEP."""

from moe_exp.layers.dispatcher.dispatcher import (
    AllToAllDispatcher,
    Dispatched,
    Dispatcher,
    DispatchRecord,
    LocalDispatcher,
    Pending,
    RoutedTokens,
    SpreadDispatcher,
    TokensDispatcher,
    experts_per_rank,
)

__all__ = [
    "AllToAllDispatcher", "DispatchRecord", "Dispatched", "Dispatcher", "LocalDispatcher", "Pending",
    "RoutedTokens", "SpreadDispatcher", "TokensDispatcher", "experts_per_rank",
]  # fmt: skip
