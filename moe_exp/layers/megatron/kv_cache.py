"""Keys and values of the tokens that a model has seen, so that the next token does not compute them again. No
megatron import here.

Shapes: B batch, G key/value heads on this rank, d head size, S new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """The keys and values of one layer, with their positions already in them (after the rotary embedding).

    Megatron's own inference context keeps keys without positions and turns all of them at every token, and so
    costs more the longer the text is.

    Args:
        num_positions: tokens per sequence for which there is room; memory is taken once, at the first call of
            `extend`.
    """

    def __init__(self, num_positions: int):
        self.num_positions, self.length = num_positions, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes what comes after the first `length` tokens; returns all. `length` moves on by `advance`
        alone.

        Args:
            key, value: [S, B, G, d] each with a head size of its own.

        Returns:
            Views [length + S, B, G, d] of the cache.
        """
        if not self._keys.numel():
            self._keys, self._values = self._room(key), self._room(value)
        end = self.length + key.size(0)
        self._keys[:, :, self.length : end] = key.permute(1, 2, 0, 3)
        self._values[:, :, self.length : end] = value.permute(1, 2, 0, 3)
        return self._keys[:, :, :end].permute(2, 0, 1, 3), self._values[:, :, :end].permute(2, 0, 1, 3)

    def advance(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` of what `extend` wrote last; what follows them was padding."""
        self.length += num_tokens

    def _room(self, new: Tensor) -> Tensor:
        _, batch, heads, head_size = new.shape
        # as attention reads it, head by head
        return new.new_empty(batch, heads, self.num_positions, head_size)
