"""The projections of a LatentMoE (arXiv:2601.18089; Nemotron 3, arXiv:2512.20856), as in Megatron's MoELayer.

All experts of a layer share them. Every tensor parallel rank has both whole and projects its part of the
tokens, so their gradients are summed over these ranks (`sequence_parallel`), as the router's are.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.post_training.modelopt.layers import Linear as Linear
from megatron.core.transformer.transformer_config import TransformerConfig


def latent_projections(
    config: TransformerConfig, linear: Any, tp_group: Any, device: torch.device
) -> tuple[Any, Any]:
    """Megatron's `fc1_latent_proj`, from hidden to latent size, and `fc2_latent_proj`, back.

    Args:
        linear: Linear, which needs no package, or Transformer Engine's TELinear.
        tp_group: the ranks that have copies, of which one saves them.
        device: of the parameters.
    """
    # Linear is always duplicated, TELinear finds the group itself.
    mode = {"tp_group": tp_group} if linear is Linear else {"parallel_mode": "duplicated"}
    hidden, latent = config.hidden_size, config.moe_latent_size
    return (
        _projection(linear, config, hidden, latent, config.init_method, device, **mode),
        _projection(linear, config, latent, hidden, config.output_layer_init_method, device, **mode),
    )


def _projection(
    linear: Any,
    config: TransformerConfig,
    inputs: int,
    outputs: int,
    init_method: Callable[[Tensor], Any],
    device: torch.device,
    **mode: Any,
) -> Any:
    options = {"bias": config.add_bias_linear, "skip_bias_add": False, "skip_weight_param_allocation": False}
    with device:
        projection = linear(inputs, outputs, config=config, init_method=init_method, **options, **mode)
    if linear is Linear:  # it leaves the initial weights to torch
        init_method(projection.weight)
        if projection.bias is not None:
            torch.nn.init.zeros_(projection.bias)
    return projection


def projecting(projection: Any) -> Callable[[Tensor], Tensor] | None:
    """The projection as a function from tokens to tokens; None for None.

    A partial function, so that a copy of the layer has its own.
    """
    return None if projection is None else partial(_project, projection)


def _project(projection: Any, x_TD: Tensor) -> Tensor:
    output_TD, _ = projection(x_TD)  # Megatron's linear layers also return a bias that is not added
    return output_TD
