"""Which token comes next. Pure functions of logits and a random stream."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_exp.config import problem


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Args:
        temperature: logits are divided by it; 0: always the most probable token (greedy).
        top_k: draw from the k most probable tokens; 0: from all.
        top_p: draw from the fewest most probable tokens whose probabilities add up to this, after `top_k`
            (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751); 1: from all.
        seed: of the random stream.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 1234

    def check(self) -> None:
        """Raises a ValueError, one line, for values that cannot be."""
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(
                problem(
                    "temperature",
                    self.temperature,
                    "must be a number of at least 0",
                    "give 0 for greedy, or about 0.8",
                )
            )
        if self.top_k < 0:
            raise ValueError(
                problem("top_k", self.top_k, "must not be negative", "give a number of tokens, or 0 for all")
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(
                problem(
                    "top_p",
                    self.top_p,
                    "must be over 0 and at most 1",
                    "give for instance 0.9, or 1 for all tokens",
                )
            )
        if self.seed < 0:
            raise ValueError(problem("seed", self.seed, "must not be negative", "give another number"))
        for name, is_set in (("top_k", self.top_k > 0), ("top_p", self.top_p < 1)):
            if is_set and not self.temperature:
                fix = "give --temperature, for instance 0.8, or leave it out"
                raise ValueError(
                    problem(
                        name,
                        getattr(self, name),
                        "has no effect with the temperature 0, which is greedy",
                        fix,
                    )
                )


class Sampler:
    """Draws the tokens of one text: the same ones from the same logits and seed, whatever rank and device
    hold them.

    Args:
        sampling: how.
        text_index: of the text among those of one call; each has a random stream of its own.
    """

    def __init__(self, sampling: Sampling, text_index: int = 0):
        self.sampling = sampling
        digest = hashlib.sha256(f"{sampling.seed}:{text_index}".encode()).digest()
        # which takes no more than 32 bits
        self._stream = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))

    def draw(self, logits_V: Tensor) -> tuple[int, float]:
        """A token, and its log-probability (nats) by the model itself: at temperature 1, among all tokens."""
        log_probs_V = logits_V.double().log_softmax(0)
        token = int(log_probs_V.argmax()) if not self.sampling.temperature else self._drawn(logits_V)
        return token, log_probs_V[token].item()

    def _drawn(self, logits_V: Tensor) -> int:
        probs_K, tokens_K = candidates(logits_V, self.sampling)
        # By the distribution function and a number from the CPU's stream: a GPU's streams are others.
        point = torch.rand((), generator=self._stream, dtype=torch.float64).item() * probs_K.sum().item()
        index = torch.searchsorted(probs_K.cumsum(0), point, right=True).clamp_(max=len(probs_K) - 1)
        return int(tokens_K[index])


def candidates(logits_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The tokens that may be drawn, the most probable first.

    Returns:
        Probabilities among all tokens, float64 [K], and the tokens [K].
    """
    logits_V = logits_V.double() / sampling.temperature
    probs_V, tokens_V = logits_V.softmax(0).sort(descending=True, stable=True)
    if sampling.top_k:
        probs_V, tokens_V = probs_V[: sampling.top_k], tokens_V[: sampling.top_k]
    if sampling.top_p < 1:
        share_V = probs_V / probs_V.sum()
        # A token stays where those before it have not reached the sum; so the first always does.
        kept = int((share_V.cumsum(0) - share_V < sampling.top_p).sum())
        probs_V, tokens_V = probs_V[:kept], tokens_V[:kept]
    return probs_V, tokens_V
