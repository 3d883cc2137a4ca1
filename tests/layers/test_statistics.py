"""The statistics of all layers are added up at once."""

import pytest
import torch

from helpers.layers.references import Operations
from helpers.layers.tiny_moe import HIDDEN, MODES, random, tiny_layer
from moe_exp.layers import statistics
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.statistics import update

LOSSES = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2}
TOKENS = statistics.STATISTICS.index("tokens")


def run(layers: list[MoELayer], num_microbatches: int, *, padded: bool = False) -> None:
    """Micro-batches of different numbers of tokens through all layers."""
    for number in range(num_microbatches):
        x_TD = random(9 + number, HIDDEN, seed=number)
        mask = torch.arange(9 + number) > 6 if padded else None
        for place, layer in enumerate(layers):
            layer(x_TD.roll(place, dims=1), mask)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["dropless", "capacity"])
@pytest.mark.parametrize("behind", [0, 1])
def test_all_layers_at_once_are_as_one_by_one(mode, padded, behind):
    """`behind`: micro-batches that one layer has not seen."""
    layers = [tiny_layer(**LOSSES, **MODES[mode]) for _ in range(3)]
    run(layers[behind:], 1, padded=padded)
    run(layers, 3, padded=padded)
    alone = [tiny_layer(**LOSSES, **MODES[mode]).statistics for _ in layers]
    for one, layer in zip(alone, layers, strict=True):
        one._pending = list(layer.statistics._pending)
    expected = [(one.tokens_per_expert_E.clone(), one.sums.clone()) for one in alone]
    update([layer.statistics for layer in layers])
    for layer, (tokens, sums) in zip(layers, expected, strict=True):
        assert not layer.statistics._pending
        assert torch.equal(layer.statistics.tokens_per_expert_E, tokens) and tokens.sum() > 0
        torch.testing.assert_close(layer.statistics.sums, sums, rtol=1e-15, atol=0)
    assert layers[-1].statistics.sums[TOKENS] == sum(7 if padded else 9 + number for number in (0, 0, 1, 2))


def test_more_layers_take_no_more_operations():
    counts = []
    for number in (1, 6):
        layers = [tiny_layer(**LOSSES) for _ in range(number)]
        run(layers, 1)
        with Operations() as operations:
            update([layer.statistics for layer in layers])
        counts.append(operations.counts.total())
    assert counts[0] == counts[1]


def test_sums_that_are_not_read_are_updated_now_and_then(monkeypatch):
    monkeypatch.setattr(statistics, "_MOST_PENDING", 3)
    layer = tiny_layer(**LOSSES)
    for number in range(1, 8):
        run([layer], 1)
        assert len(layer.statistics._pending) == number % 3
    assert layer.statistics.num_microbatches == 7
    assert layer.statistics.sums[TOKENS] == 7 * 9
    layer.statistics.reset()
    assert not layer.statistics.sums.any()


def test_no_graph_is_kept():
    layer = tiny_layer(**LOSSES)
    run([layer], 1)
    ((_, values),) = layer.statistics._pending
    assert not any(torch.is_tensor(x) and x.requires_grad for x in values.values())
