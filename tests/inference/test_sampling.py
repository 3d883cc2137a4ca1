import math

import pytest
import torch

from moe_exp.inference.generate import Sampler, Sampling, candidates

# Probabilities 0.1, 0.4, 0.2, 0.3.
LOGITS = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()


@pytest.mark.parametrize(
    ("sampling", "probs", "tokens"),
    [
        (Sampling(1.0), [0.4, 0.3, 0.2, 0.1], [1, 3, 2, 0]),
        (Sampling(1.0, top_k=2), [0.4, 0.3], [1, 3]),
        (Sampling(1.0, top_k=9), [0.4, 0.3, 0.2, 0.1], [1, 3, 2, 0]),
        (Sampling(1.0, top_p=0.4), [0.4], [1]),
        (Sampling(1.0, top_p=0.45), [0.4, 0.3], [1, 3]),
        (Sampling(1.0, top_p=1e-9), [0.4], [1]),
        # Of the three that top-k leaves, 4/9 and 3/9 come first: together 0.78.
        (Sampling(1.0, top_k=3, top_p=0.75), [0.4, 0.3], [1, 3]),
        # At temperature 1/2 probabilities are squared: 16, 9, 4, 1 of 30.
        (Sampling(0.5), [16 / 30, 9 / 30, 4 / 30, 1 / 30], [1, 3, 2, 0]),
        # and top-p counts those: 16/30 alone is a half
        (Sampling(0.5, top_p=0.5), [16 / 30], [1]),
    ],
)
def test_candidates(sampling, probs, tokens):
    found, indices = candidates(LOGITS, sampling)
    torch.testing.assert_close(found, torch.tensor(probs, dtype=torch.float64), rtol=1e-6, atol=0)
    assert indices.tolist() == tokens


def test_draws_have_the_probabilities():
    sampler = Sampler(Sampling(1.0, top_k=3, seed=1))
    counts = torch.zeros(4)
    for _ in range(4000):
        token, log_prob = sampler.draw(LOGITS)
        counts[token] += 1
        # the model's own, not that of the three
        assert math.isclose(log_prob, LOGITS[token].item(), rel_tol=1e-6)
    # Four standard deviations of a frequency are 0.03.
    torch.testing.assert_close(counts / 4000, torch.tensor([0, 4 / 9, 2 / 9, 3 / 9]), rtol=0, atol=0.03)


def test_greedy_takes_the_most_probable():
    assert Sampler(Sampling()).draw(LOGITS)[0] == 1


def test_a_seed_and_a_text_have_a_stream_of_their_own():
    def tokens(seed: int, text: int) -> list[int]:
        sampler = Sampler(Sampling(1.0, seed=seed), text)
        return [sampler.draw(torch.zeros(1000))[0] for _ in range(5)]

    assert tokens(1, 0) == tokens(1, 0)
    assert len({tuple(tokens(seed, text)) for seed in (1, 2) for text in (0, 1)}) == 4


@pytest.mark.parametrize(
    ("sampling", "line"),
    [
        (Sampling(-0.1), "TEMPERATURE=-0.1: must be"), (Sampling(math.nan), "TEMPERATURE=nan: must be"),
        (Sampling(1.0, top_p=0.0), "TOP_P=0.0: must be"), (Sampling(1.0, top_p=1.1), "TOP_P=1.1: must be"),
        (Sampling(1.0, top_k=-1), "TOP_K=-1: must not"), (Sampling(seed=-1), "SEED=-1: must not"),
        (Sampling(top_k=5), "TOP_K=5: has no effect"), (Sampling(top_p=0.9), "TOP_P=0.9: has no effect"),
    ],
)  # fmt: skip
def test_what_cannot_be(sampling, line):
    with pytest.raises(ValueError, match=f"^{line}"):
        sampling.check()
