"""Norms after attention and MLP (OLMo 2, arXiv:2501.00656, section 3.2), parallel attention and MLP (GPT-J,
Cohere2) and constant factors (Granite 3.0), which Megatron's layers do not have.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from moe_exp.layers.megatron.attention import Norm

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer


class ResidualAdd(nn.Module):
    """residual + multiplier * Norm(result) after attention or MLP, in place of Megatron's `*_bda` function.

    Args:
        norm: class of the norm; IdentityOp: none.
        multiplier: factor on the result.
    """

    def __init__(self, config: Any, norm: type, multiplier: float):
        super().__init__()
        self.norm = norm(config, config.hidden_size, config.layernorm_epsilon)
        self.multiplier = multiplier

    def forward(self, training: bool, is_fused: bool) -> Callable[..., Tensor]:
        """Function of (result, bias or None), residual and dropout probability; all tensors [S, B, D]."""
        return partial(self._add, get_bias_dropout_add(training, is_fused))

    def _add(
        self, add: Any, result: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float
    ) -> Tensor:
        x, bias = result
        x = self.norm(x if bias is None else x + bias)
        x = x if self.multiplier == 1 else x * self.multiplier
        added: Tensor = add((x, None), residual, dropout)
        return added


class ParallelLayer(TransformerLayer):  # type: ignore[misc]
    """TransformerLayer that computes x + attention(n) + MLP(n), where n = norm(x)."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._normalized: list[Tensor] = []
        self.input_layernorm.register_forward_hook(self._keep)
        # Megatron adds attention to x before this norm, an IdentityOp.
        self.pre_mlp_layernorm.register_forward_hook(self._take)

    def _keep(self, norm: nn.Module, args: tuple[Tensor, ...], normalized: Tensor) -> None:
        self._normalized.append(normalized)

    def _take(self, norm: nn.Module, args: tuple[Tensor, ...], x: Tensor) -> Tensor:
        return self._normalized.pop()


def change_residuals(spec: ModuleSpec, config: Any, *, placement: str, multiplier: float) -> None:
    """Changes the spec of a transformer layer for NORM_PLACEMENT and RESIDUAL_MULTIPLIER.

    The norms have the names `post_self_attn_layernorm` and `post_mlp_layernorm` in checkpoints.
    """
    parts = spec.submodules
    both = ("self_attn", "mlp")
    after = {"post": both, "around": both, "around_moe": ("mlp",), "pre": (), "parallel": ()}[placement]
    if placement == "post":
        parts.input_layernorm = parts.pre_mlp_layernorm = IdentityOp
    if placement == "parallel":
        spec.module, parts.pre_mlp_layernorm = ParallelLayer, IdentityOp
    for name in both if multiplier != 1 else after:
        params = {"config": config, "norm": Norm if name in after else IdentityOp, "multiplier": multiplier}
        setattr(parts, f"{name}_bda", ModuleSpec(module=ResidualAdd, params=params))
        parts.sharded_state_dict_keys_map[f"{name}_bda.norm."] = f"post_{name}_layernorm."


def scale_ends(chunk: Any, *, embedding: float, logits: float) -> None:
    """Multiplies the embeddings of a model chunk, and divides its logits."""
    if embedding != 1 and hasattr(chunk, "embedding"):
        chunk.embedding.register_forward_hook(lambda module, args, embedded: embedded * embedding)
    if logits != 1 and chunk.post_process:
        # The input of the output layer is divided, because CROSS_ENTROPY=linear has no logits.
        chunk.output_layer.register_forward_pre_hook(lambda module, args: (args[0] / logits, *args[1:]))


def change_norms(chunk: Any, *, qk_epsilon: float, has_bias: bool) -> None:
    """Sets the epsilon of the query and key norms, or of the norms of their compressed vectors (0:
    unchanged), and removes the biases of all LayerNorms unless `has_bias`.
    """
    of_qk = ("q_layernorm", "k_layernorm", "kv_layernorm")
    for name, module in chunk.named_modules():
        if qk_epsilon and name.endswith(of_qk) and hasattr(module, "eps"):
            module.eps = qk_epsilon
        if not has_bias and isinstance(module, nn.LayerNorm):
            module.register_parameter("bias", None)
