"""torch.compile of the layer: the same output, gradients and statistics as without."""

import pytest
import torch

from helpers.layers.tiny_moe import HIDDEN, MODES, tiny_layer
from moe_exp.layers.moe_layer import MoELayer


def layer_of(backend: str, mode: str) -> MoELayer:
    # grouped_mm wants widths of a multiple of 16 bytes.
    options = {"aux_loss_coeff": 0.3, "z_loss_coeff": 0.2, "router": {"dtype": "fp32"}, "latent": 4}
    return tiny_layer(backend=backend, dtype=torch.float32, **options, **MODES[mode])


def steps(layer: MoELayer, function) -> list[torch.Tensor]:
    """Output and gradients of the input and of the weights, over three batches of different routing."""
    results = []
    for seed in range(3):
        x_TD = torch.randn(32, HIDDEN, generator=torch.Generator().manual_seed(seed)).requires_grad_()
        output_TD, loss = function(x_TD)
        (output_TD.square().mean() + loss).backward()
        results += [output_TD.detach(), x_TD.grad]
    return [*results, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # torch's own
@pytest.mark.parametrize(
    ("backend", "mode"),
    [
        ("torch", "padded"),
        pytest.param("loop", "dropless", marks=pytest.mark.slow),
        pytest.param("loop", "capacity", marks=pytest.mark.slow),
        pytest.param("torch", "dropless", marks=pytest.mark.slow),
        pytest.param("triton", "dropless", marks=pytest.mark.slow),
    ],
)
def test_a_compiled_layer_computes_the_same(backend, mode, request):
    """In one graph unless the number of rows depends on the data, with two threads for the experts."""
    request.addfinalizer(torch._dynamo.reset)
    threads = torch.get_num_threads()
    request.addfinalizer(lambda: torch.set_num_threads(threads))
    torch.set_num_threads(2)
    eager, layer = layer_of(backend, mode), layer_of(backend, mode)
    expected = steps(eager, eager)
    actual = steps(layer, torch.compile(layer, fullgraph=mode != "capacity", backend="aot_eager"))
    for one, other in zip(actual, expected, strict=True):
        assert (one - other).norm() <= 1e-6 * other.norm()
    assert torch.equal(layer.statistics.tokens_per_expert_E, eager.statistics.tokens_per_expert_E)
    assert (layer.statistics.sums - eager.statistics.sums).norm() <= 1e-6 * eager.statistics.sums.norm()
    assert layer.statistics.num_microbatches == eager.statistics.num_microbatches == 3
