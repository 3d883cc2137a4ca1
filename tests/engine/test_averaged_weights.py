"""The average of the weights (EMA_DECAY) by numbers, without a model."""

from types import SimpleNamespace

import pytest
import torch

from helpers.relative_error import relative_error
from moe_exp.engine.averaged_weights import (
    allocate_average,
    averaged_weights,
    restart_average,
    update_average,
)
from moe_exp.engine.optimizer_classes import AVERAGE


def an_optimizer(*weights: torch.Tensor) -> SimpleNamespace:
    """Two parts of Megatron's chain, and a stage without experts."""
    found = [torch.optim.SGD([torch.nn.Parameter(one)]) for one in weights]
    parts = [SimpleNamespace(is_stub_optimizer=False, optimizer=one) for one in found]
    return SimpleNamespace(chained_optimizers=[*parts, SimpleNamespace(is_stub_optimizer=True)])


def weights_of(optimizer):
    return [part.optimizer.param_groups[0]["params"][0] for part in optimizer.chained_optimizers[:-1]]


def averages_of(optimizer):
    pairs = zip(optimizer.chained_optimizers, weights_of(optimizer), strict=False)
    return [part.optimizer.state[weight][AVERAGE] for part, weight in pairs]


def set_weights(optimizer, value):
    for weight in weights_of(optimizer):
        weight.detach().copy_(value)


@pytest.mark.parametrize("decay", [0.9, 0.999])
def test_it_is_the_mean_with_weights_that_decay(decay):
    drawn = torch.randn(50, 7, dtype=torch.float64)
    optimizer = an_optimizer(torch.full((7,), 9.0), torch.full((2, 7), 9.0))
    allocate_average(optimizer)
    for number, weights in enumerate(drawn, start=1):
        set_weights(optimizer, weights.float())
        update_average(optimizer, decay=decay, number=number)
    shares = decay ** torch.arange(49, -1, -1, dtype=torch.float64)
    expected = (shares / shares.sum()) @ drawn
    one, matrix = averages_of(optimizer)
    assert relative_error(one, expected) < 1e-6
    assert relative_error(matrix, expected.expand(2, 7)) < 1e-6
    # and after many updates the plain rule, in which 1 - d is the share of the newest weights
    plain = decay * one.double() + (1 - decay) * drawn[-1]
    update_average(optimizer, decay=decay, number=10**6)
    assert relative_error(averages_of(optimizer)[0], plain) < 1e-6


def test_weights_and_average_change_places_to_the_bit():
    """Values whose bits a sum would lose."""
    strange = torch.tensor([-0.0, 1e-42, 3e38, float("inf"), 1.0, 1 + 2**-23])
    optimizer = an_optimizer(torch.arange(6.0))
    optimizer.chained_optimizers[0]._copy_main_params_to_model_params = lambda: None
    allocate_average(optimizer)
    set_weights(optimizer, strange)
    model = [SimpleNamespace(ddp_config=SimpleNamespace(use_distributed_optimizer=False))]
    with averaged_weights(optimizer, model):
        assert weights_of(optimizer)[0].tolist() == [0, 1, 2, 3, 4, 5]
    (weight,), (average,) = weights_of(optimizer), averages_of(optimizer)
    assert torch.equal(weight.detach().view(torch.int32), strange.view(torch.int32))
    assert average.tolist() == [0, 1, 2, 3, 4, 5]
    restart_average(optimizer)
    assert torch.equal(average, weight.detach())
