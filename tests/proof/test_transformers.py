"""Our layer against the MoE blocks of transformers: same weights, fp32, outputs and every gradient.

transformers runs its plain loop over experts (`experts_implementation="eager"`). The versions compared are in
the last lines of pytest's output.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV3Config, MixtralConfig, OlmoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func as mixtral_loss
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import load_balancing_loss_func as olmoe_loss
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from helpers.relative_error import assert_equal_to
from moe_exp.layers.dispatcher import LocalDispatcher
from moe_exp.layers.experts import Experts, SharedExpert
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig

HIDDEN, FFN, EXPERTS, SHARED = 24, 20, 16, 2
LIMIT = 1e-5
# Of x [B, S, D]; with one token most experts get nothing.
SHAPES = {"one token": (1, 1), "three tokens": (1, 3), "odd": (3, 17), "many": (2, 128)}


COMMON = {"hidden_size": HIDDEN, "experts_implementation": "eager"}


def mixtral() -> nn.Module:
    sizes = {"intermediate_size": FFN, "num_local_experts": EXPERTS, "num_experts_per_tok": 2}
    return MixtralSparseMoeBlock(MixtralConfig(**COMMON, **sizes))


def olmoe(topk: int = 4) -> nn.Module:
    sizes = {"intermediate_size": FFN, "num_experts": EXPERTS, "num_experts_per_tok": topk}
    return OlmoeSparseMoeBlock(OlmoeConfig(**COMMON, **sizes))


def qwen3() -> nn.Module:
    sizes = {"moe_intermediate_size": FFN, "num_experts": EXPERTS, "num_experts_per_tok": 4}
    return Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**COMMON, **sizes, norm_topk_prob=True))


def deepseek(**settings: object) -> nn.Module:
    sizes = {"moe_intermediate_size": FFN, "n_routed_experts": EXPERTS, "n_shared_experts": SHARED}
    defaults = {
        "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }  # fmt: skip
    return DeepseekV3MoE(DeepseekV3Config(**COMMON, **sizes, **(defaults | settings)))


# The score of a group is the sum of its two best experts in transformers, of its K/group_topk best here (in
# Megatron, too): the same for DeepSeek-V3 with K = 8 of 4 groups, and for what is compared here.
SIGMOID = {"score": "sigmoid", "expert_bias": True}
NOT_NORMALIZED = {"norm_topk_prob": False, "routed_scaling_factor": 1.5}
# Blocks of transformers and the router settings that make ours the same function.
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, object]]] = {
    "Mixtral, softmax over the chosen": (mixtral, {"topk": 2, "pre_softmax": False}),
    "Mixtral, normalized": (mixtral, {"topk": 2, "normalize": True}),
    "OLMoE": (olmoe, {"topk": 4}),
    "OLMoE, one expert": (lambda: olmoe(topk=1), {"topk": 1}),
    "OLMoE, every expert": (lambda: olmoe(topk=EXPERTS), {"topk": EXPERTS}),
    "Qwen3-MoE": (qwen3, {"topk": 4, "normalize": True}),
    "DeepSeek-V3": (deepseek, {"topk": 4, "num_groups": 4, "group_topk": 2, "scaling_factor": 2.5} | SIGMOID),
    "DeepSeek-V3, not normalized": (
        lambda: deepseek(num_experts_per_tok=6, topk_group=3, **NOT_NORMALIZED),
        {"topk": 6, "num_groups": 4, "group_topk": 3, "scaling_factor": 1.5, "normalize": False} | SIGMOID,
    ),
    "DeepSeek-V3, one group": (
        lambda: deepseek(n_group=1, topk_group=1, num_experts_per_tok=6),
        {"topk": 6, "scaling_factor": 2.5} | SIGMOID,
    ),
}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_weights(block: nn.Module) -> nn.Module:
    """The block with weights at which no part of the result is lost in another's rounding."""
    with torch.no_grad():
        for seed, (name, weight) in enumerate([*block.named_parameters(), *block.named_buffers()]):
            scale = 0.2 if name == "gate.e_score_correction_bias" else weight.size(-1) ** -0.5
            weight.copy_(scale * random(*weight.shape, seed=seed))
    return block


def ours(
    block: nn.Module, router: dict[str, object], *, backend: str = "loop", settings: MoESettings | None = None
) -> MoELayer:
    """Our layer with the block's weights; the layout of the weights is the same, gate half first."""
    routing = Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, **router))
    experts = Experts(
        num_local_experts=EXPERTS, hidden_size=HIDDEN, ffn_size=FFN, activation="swiglu", backend=backend
    )
    their_shared, shared = getattr(block, "shared_experts", None), None
    with torch.no_grad():
        routing.weight.copy_(block.gate.weight)
        if routing.config.expert_bias:
            routing.expert_bias.copy_(block.gate.e_score_correction_bias)
        experts.weight1.copy_(block.experts.gate_up_proj)
        experts.weight2.copy_(block.experts.down_proj)
        if their_shared is not None:
            shared = SharedExpert(hidden_size=HIDDEN, ffn_size=FFN * SHARED)
            shared.weight1.copy_(torch.cat([their_shared.gate_proj.weight, their_shared.up_proj.weight]))
            shared.weight2.copy_(their_shared.down_proj.weight)
    parts = {"router": routing, "dispatcher": LocalDispatcher(EXPERTS), "experts": experts, "shared": shared}
    return MoELayer(**parts, settings=settings or MoESettings())


def their_gradients(block: nn.Module) -> dict[str, Tensor]:
    gate, up = block.experts.gate_up_proj.grad.chunk(2, dim=1)
    grads = {"router": block.gate.weight.grad, "gate": gate, "up": up, "down": block.experts.down_proj.grad}
    if hasattr(block, "shared_experts"):
        shared = block.shared_experts
        grads |= {"shared gate": shared.gate_proj.weight.grad, "shared up": shared.up_proj.weight.grad}
        grads["shared down"] = shared.down_proj.weight.grad
    return grads


def our_gradients(layer: MoELayer) -> dict[str, Tensor]:
    gate, up = layer.experts.weight1.grad.chunk(2, dim=1)
    grads = {"router": layer.router.weight.grad, "gate": gate, "up": up, "down": layer.experts.weight2.grad}
    if layer.shared is not None:
        gate, up = layer.shared.weight1.grad.chunk(2, dim=0)
        grads |= {"shared gate": gate, "shared up": up, "shared down": layer.shared.weight2.grad}
    return grads


@pytest.mark.parametrize("backend", ["loop", "torch"])
@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[pytest.mark.slow] * (name in ("three tokens", "many")))
        for name, shape in SHAPES.items()
    ],
)
@pytest.mark.parametrize(("block", "router"), CASES.values(), ids=CASES)
def test_block(block, router, shape, backend):
    block = with_weights(block())
    layer = ours(block, router, backend=backend)
    x, grad = random(*shape, HIDDEN, seed=100), random(*shape, HIDDEN, seed=101)
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_theirs = block(x_theirs)
    y_theirs.backward(grad)
    y_ours, _ = layer(x_ours)
    y_ours.backward(grad)

    expected = {"y": y_theirs, "x": x_theirs.grad, **their_gradients(block)}
    error = assert_equal_to(LIMIT, {"y": y_ours, "x": x_ours.grad, **our_gradients(layer)}, expected)
    print(f"largest relative error {error:.1e}")


@pytest.mark.parametrize(
    ("case", "balancing_loss"),
    [("Mixtral, normalized", mixtral_loss), ("OLMoE", olmoe_loss), ("OLMoE, one expert", olmoe_loss)],
)
def test_load_balancing_loss(case, balancing_loss):
    """For one layer theirs is K times ours: their fractions of tokens per expert sum to K, ours of slots to
    1. For several layers theirs multiplies averages over the layers, ours adds the losses of the layers.
    """
    block, router = CASES[case]
    block = with_weights(block())
    layer = ours(block, router, settings=MoESettings(losses=(AuxLoss("aux_loss", 1.0),)))
    x = random(2, 64, HIDDEN, seed=100)
    x_theirs, x_ours = x.clone().requires_grad_(), x.clone().requires_grad_()
    logits, _, _ = block.gate(x_theirs)
    theirs = balancing_loss((logits,), num_experts=EXPERTS, top_k=router["topk"])
    theirs.backward()
    loss = layer(x_ours)[1] * router["topk"]
    loss.backward()
    found = {"loss": loss, "x": x_ours.grad, "router": layer.router.weight.grad}
    expected = {"loss": theirs, "x": x_theirs.grad, "router": block.gate.weight.grad}
    error = assert_equal_to(LIMIT, found, expected)
    print(f"largest relative error {error:.1e}")
