"""Chooses the next token: pure functions of logits and a random stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_exp.config import problem


@dataclass(frozen=True)
class Sampling:
    """Sampling settings."""

    temperature: float = 0.0  # divides logits; 0: greedy, always the most probable token
    top_k: int = 0  # draw from the k most probable tokens; 0: from all
    # after `top_k`, draw from the fewest most probable tokens with this total probability (nucleus sampling,
    # Holtzman et al. 2020, arXiv:1904.09751); 1: from all
    top_p: float = 1.0
    seed: int = 1234

    def check(self) -> None:
        """Raises ValueError with one line for an invalid value."""
        draws, all_tokens = self.temperature != 0, "give for instance 0.9, or 1 for all tokens"
        greedy = "has no effect with the temperature 0, which is greedy"
        fix = "give --temperature, for instance 0.8, or leave it out"
        is_number = 0 <= self.temperature < float("inf")
        for name, holds, rule, way_out in (
            ("temperature", is_number, "must be a number of at least 0", "give 0 for greedy, or about 0.8"),
            ("top_k", self.top_k >= 0, "must not be negative", "give a number of tokens, or 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "must be over 0 and at most 1", all_tokens),
            ("seed", self.seed >= 0, "must not be negative", "give another number"),
            ("top_k", draws or not self.top_k, greedy, fix),
            ("top_p", draws or self.top_p == 1, greedy, fix),
        ):
            if not holds:
                raise ValueError(problem(name, getattr(self, name), rule, way_out))


class Sampler:
    """Draws the tokens of one text, reproducibly on any rank and device; one random stream per text index."""

    def __init__(self, sampling: Sampling, text_index: int = 0):
        self.sampling = sampling
        digest = hashlib.sha256(f"{sampling.seed}:{text_index}".encode()).digest()
        # torch uses at most 32 bits of the seed here
        self._stream = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))

    def draw(self, logits_V: Tensor) -> tuple[int, float]:
        """A token and its log-probability in nats, at temperature 1 among all tokens."""
        log_probs_V = logits_V.double().log_softmax(0)
        token = int(log_probs_V.argmax()) if not self.sampling.temperature else self._drawn(logits_V)
        return token, log_probs_V[token].item()

    def _drawn(self, logits_V: Tensor) -> int:
        probs_K, tokens_K = candidates(logits_V, self.sampling)
        # inverse CDF of a number from the CPU's stream, as a GPU's streams differ
        point = torch.rand((), generator=self._stream, dtype=torch.float64).item() * probs_K.sum().item()
        index = torch.searchsorted(probs_K.cumsum(0), point, right=True).clamp_(max=len(probs_K) - 1)
        return int(tokens_K[index])


def candidates(logits_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Tokens that may be drawn, most probable first: probabilities among all tokens, float64 [K]; ids [K]."""
    logits_V = logits_V.double() / sampling.temperature
    probs_V, tokens_V = logits_V.softmax(0).sort(descending=True, stable=True)
    if sampling.top_k:
        probs_V, tokens_V = probs_V[: sampling.top_k], tokens_V[: sampling.top_k]
    if sampling.top_p < 1:
        share_V = probs_V / probs_V.sum()
        # keeps tokens until those before reach the sum, so always the first
        kept = int((share_V.cumsum(0) - share_V < sampling.top_p).sum())
        probs_V, tokens_V = probs_V[:kept], tokens_V[:kept]
    return probs_V, tokens_V
