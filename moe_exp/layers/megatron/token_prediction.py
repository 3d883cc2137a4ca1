"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): layers after the main model that
predict tokens further ahead.

h^0 are the main model's hidden states after its final norm. For each position i, layer k computes

    h^k_i = Norm(Layer_k(M_k [Norm(Emb(t_{i+k})); Norm(h^{k-1}_i)]))

and predicts t_{i+k+1}; t are tokens, Emb is the embedding, M_k a matrix and [a; b] a concatenation. All
layers share the embedding and the output layer. Parameters are named as in Megatron-Core 0.16's
MultiTokenPredictionBlock. That block holds the layers of this module instead of Megatron's own layers, whose
names and arguments change between 0.16 and 0.19. Moreover, Megatron's layers do not pass on `padding_mask`.
With context parallelism, each rank averages the loss of Megatron's layers over its own tokens only.
"""

from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_exp.layers.megatron.attention import Norm

from megatron.core import tensor_parallel
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionBlockSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset


def prediction_spec(layer: ModuleSpec, num_layers: int) -> MultiTokenPredictionBlockSubmodules:
    """Spec of Megatron's block of `num_layers` PredictionLayers, each of which wraps the layer `layer`."""
    one = ModuleSpec(module=PredictionLayer, params={"layer_spec": layer})
    return MultiTokenPredictionBlockSubmodules(layer_specs=[one] * num_layers)


class PredictionLayer(MegatronModule):  # type: ignore[misc]
    """Layer k of this file's formula (k = `layer_number`, from 1). Holds transformer layer NUM_LAYERS + k."""

    def __init__(
        self, config: TransformerConfig, layer_spec: ModuleSpec, layer_number: int,
        vp_stage: int | None = None, **_options: Any,
    ):  # fmt: skip
        super().__init__(config=config)
        self.layer_number, width = layer_number, config.hidden_size
        eps = config.layernorm_epsilon
        self.enorm, self.hnorm = Norm(config, width, eps), Norm(config, width, eps)
        self.eh_proj = ColumnParallelLinear(
            2 * width, width, config=config, init_method=config.init_method, bias=False, gather_output=False
        )
        # Megatron adds the number of layers on earlier stages.
        number = config.num_layers + layer_number - get_transformer_layer_offset(config, vp_stage=vp_stage)
        self.transformer_layer = build_module(
            layer_spec, config=config, layer_number=number, vp_stage=vp_stage
        )
        self.final_layernorm = Norm(config, width, eps)

    def forward(self, hidden: Tensor, embedded: Tensor, **options: Any) -> Tensor:
        """Computes h^k from h^{k-1} and Emb(t_{i+k}), all [S, B, D] (this rank's shard if sequence parallel).

        `options` are arguments of the transformer layer.
        """
        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(partial(self._forward, **options), False, hidden, embedded)
        return self._forward(hidden, embedded, **options)

    def _forward(self, hidden: Tensor, embedded: Tensor, **options: Any) -> Tensor:
        joined, _ = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        hidden, random = tensor_parallel.gather_from_tensor_model_parallel_region(joined), nullcontext()
        if self.config.sequence_parallel:
            hidden = tensor_parallel.scatter_to_sequence_parallel_region(hidden)
            random = tensor_parallel.get_cuda_rng_tracker().fork()  # dropout differs between ranks
        with random:
            hidden, _ = self.transformer_layer(hidden, attention_mask=None, **options)
        return self.final_layernorm(hidden)


class PredictingModel(GPTModel):  # type: ignore[misc]
    """GPTModel that also returns the losses of its multi-token prediction layers."""

    def forward(
        self, *args: Any, future_tokens: Any = None, future_mask: Any = None, future_weight: Any = None,
        padding_mask: Any = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Like GPTModel. With the `future_...` tensors of `read_microbatch`, returns losses [1+layers, B, S].

        If the loss weight is 0, the prediction layers' balancing losses have no gradient either. These layers
        then do not train, and the main model trains as if they did not exist.
        """
        self._future = None
        if future_tokens is not None:
            self._future = future_tokens, future_mask, padding_mask
            for layer in self.mtp.layers if self.mtp_process else ():
                layer.transformer_layer.mlp.loss_factor = future_weight.sign()
        return super().forward(*args, padding_mask=padding_mask, **options)

    def _postprocess(self, **given: Any) -> Tensor:
        """Returns the pipeline stage's output from the `hidden_states` of its last layer."""
        if not self.mtp_process:
            return super()._postprocess(**given)
        hidden, weight = given["hidden_states"], None
        if self.share_embeddings_and_output_weights:
            weight = self.shared_embedding_or_output_weight()
        losses = [self.losses(hidden, weight, given["labels"], given["loss_mask"])]
        if self._future is None:
            return losses[0]
        future_tokens, future_mask, padding_mask = self._future
        options = {name: given[name] for name in ("rotary_pos_emb", "packed_seq_params")}
        for depth, layer in enumerate(self.mtp.layers):
            embedded = self.embedding(future_tokens[:, :, depth], given["position_ids"])
            hidden = layer(hidden, embedded, padding_mask=padding_mask, **options)
            labels = future_tokens[:, :, depth + 1]
            losses.append(self.losses(hidden, weight, labels, future_mask[:, :, depth]))
        return torch.stack(losses)

    def losses(self, hidden: Tensor, weight: Tensor | None, labels: Tensor, mask: Tensor | None) -> Tensor:
        """Each token's cross entropy [B, S]; `weight`: shared weight of the output layer, `mask`: [B, S]."""
        logits, _ = self.output_layer(hidden, weight=weight)
        return self.compute_language_model_loss(labels, logits)
