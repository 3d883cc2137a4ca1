"""Keys and values of earlier tokens, kept for generating the next one. No megatron import here.

Shapes: B batch, G key/value heads on this rank, d head size, S new tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor


class KeyValueCache:
    """Keys (after the rotary embedding) and values of one layer.

    Megatron's own inference context keeps keys without positions and rotates all of them at every token, at a
    cost that grows with the text.

    Args:
        num_positions: capacity in tokens per sequence, allocated at the first call of `extend`.
    """

    def __init__(self, num_positions: int):
        self.num_positions, self.length = num_positions, 0
        self._keys = self._values = torch.empty(0)

    def extend(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes key and value [S, B, G, d] after the first `length` tokens; only `advance` changes `length`.

        Returns:
            Views [length + S, B, G, d] of the cached keys and values; their head sizes may differ.
        """
        if not self._keys.numel():
            self._keys, self._values = self._room(key), self._room(value)
        end = self.length + key.size(0)
        self._keys[:, :, self.length : end] = key.permute(1, 2, 0, 3)
        self._values[:, :, self.length : end] = value.permute(1, 2, 0, 3)
        return self._keys[:, :, :end].permute(2, 0, 1, 3), self._values[:, :, :end].permute(2, 0, 1, 3)

    def advance(self, num_tokens: int) -> None:
        """Keeps the first `num_tokens` of what `extend` wrote last; the rest was padding."""
        self.length += num_tokens

    def _room(self, new: Tensor) -> Tensor:
        _, batch, heads, head_size = new.shape
        # Head by head, as attention reads it.
        return new.new_empty(batch, heads, self.num_positions, head_size)
