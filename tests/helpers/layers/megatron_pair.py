"""megatron-core's own MoELayer with SequentialMLP and our layer with the same weights, on the ranks of one
job; for test_megatron.py.
"""

import functools
import warnings
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.relative_error import relative_errors
from moe_exp.layers.dispatcher import AllToAllDispatcher
from moe_exp.layers.dispatcher.allgather import AllGatherDispatcher
from moe_exp.layers.experts import Experts, SharedExpert
from moe_exp.layers.losses import AuxLoss
from moe_exp.layers.microbatch import MoESettings
from moe_exp.layers.moe_layer import MoELayer
from moe_exp.layers.router import Router, RouterConfig
from moe_exp.layers.router.balance import GlobalFractions

with warnings.catch_warnings():
    # Megatron warns at import of modules of its own that it has moved.
    warnings.simplefilter("ignore")
    from moe_exp.layers.spec import moe_submodule_spec

    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.post_training.modelopt.layers import Linear
    from megatron.core.transformer.moe import moe_layer, moe_utils, token_dispatcher
    from megatron.core.transformer.moe.moe_utils import apply_router_token_dropping, get_default_pg_collection
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

__all__ = ["apply_router_token_dropping", "compare_on_rank"]

HIDDEN, FFN, EXPERTS, SHARED_FFN = 24, 20, 8, 12
LENGTH, SEQUENCES = 12, 3
DISPATCHERS = {"alltoall": AllToAllDispatcher, "allgather": AllGatherDispatcher}
Tensors = dict[str, Tensor | None]


@dataclass(frozen=True)
class Pair:
    """Settings under which the two layers are the same function. `router` to `latent` but `ours` are for our
    plain layer; the one in Megatron reads TransformerConfig.
    """

    megatron: dict[str, Any] = field(default_factory=dict)  # fields of TransformerConfig
    router: dict[str, Any] = field(default_factory=dict)  # fields of our RouterConfig
    settings: dict[str, Any] = field(default_factory=dict)  # fields of our MoESettings
    ours: dict[str, Any] = field(default_factory=dict)  # of TransformerConfig, others for our layer
    shared: bool | None = None  # SharedExpert: None, or whether it has a gate
    latent: int = 0  # width of the experts between latent projections; 0: none
    activation: str = "swiglu"
    dispatchers: tuple[str, ...] = ("alltoall", "allgather")  # Megatron's that allow these settings
    passes: int = 0  # global batches before the one that is compared
    only_ep: int | None = None  # the expert parallel size at which the definitions agree; None: all


def balancing(**coeffs: float) -> dict[str, Any]:
    """Megatron's settings of several balancing losses."""
    return {"moe_router_load_balancing_type": list(coeffs), "moe_aux_loss_coeff": list(coeffs.values())}


def losses(**coeffs: float) -> dict[str, Any]:
    """The same as MoESettings."""
    return {"losses": tuple(AuxLoss(kind, coeff) for kind, coeff in coeffs.items())}


def megatron_config(ep: int, dispatcher: str, settings: dict[str, Any]) -> TransformerConfig:
    defaults = {
        "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS,
        "ffn_hidden_size": FFN, "moe_ffn_hidden_size": FFN, "moe_router_topk": 2,
        "moe_router_pre_softmax": True, "moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0.0,
        "gated_linear_unit": True, "activation_func": nn.functional.silu, "add_bias_linear": False,
        "bias_activation_fusion": False, "params_dtype": torch.float32,
        "moe_token_dispatcher_type": dispatcher, "expert_model_parallel_size": ep,
    }  # fmt: skip
    return TransformerConfig(**(defaults | settings))


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def draw_weights(theirs: nn.Module, first_expert: int) -> None:
    """Weights of Megatron's layer, each expert by its global number, at which no part is lost in another's
    rounding.
    """
    with torch.no_grad():
        theirs.router.weight.copy_(random(EXPERTS, HIDDEN, seed=1) * HIDDEN**-0.5)
        if theirs.router.bias is not None:
            theirs.router.bias.copy_(random(EXPERTS, seed=3))
        if theirs.router.expert_bias is not None:
            theirs.router.expert_bias.copy_(0.3 * random(EXPERTS, seed=2))
        for index, expert in enumerate(theirs.experts.local_experts, start=first_expert):
            for seed, weight in enumerate((expert.linear_fc1.weight, expert.linear_fc2.weight)):
                weight.copy_(random(*weight.shape, seed=100 + 2 * index + seed) * weight.size(1) ** -0.5)
        others = [] if theirs.shared_experts is None else list(theirs.shared_experts.parameters())
        for seed, weight in enumerate([*others, *latent_weights(theirs).values()], start=10):
            weight.copy_(random(*weight.shape, seed=seed) * weight.size(1) ** -0.5)


def latent_weights(layer: nn.Module) -> Tensors:
    """Weights of the latent projections of Megatron's layer or of one of ours, if it has any."""
    if isinstance(layer, MoELayer):
        projections = {"latent down": layer.down, "latent up": layer.up}
    else:
        found = (getattr(layer, f"fc{number}_latent_proj", None) for number in (1, 2))
        projections = dict(zip(("latent down", "latent up"), found, strict=True))
    return {name: one.weight for name, one in projections.items() if one is not None}


def copy_weights(theirs: nn.Module, router: Router, experts: Experts) -> None:
    with torch.no_grad():
        router.weight.copy_(theirs.router.weight)
        if theirs.router.bias is not None:
            router.bias.copy_(theirs.router.bias)
        if theirs.router.expert_bias is not None:
            router.expert_bias.copy_(theirs.router.expert_bias)
        for index, expert in enumerate(theirs.experts.local_experts):
            experts.weight1[index] = expert.linear_fc1.weight
            experts.weight2[index] = expert.linear_fc2.weight


def in_megatron(theirs: nn.Module, config: TransformerConfig, dispatcher: str) -> nn.Module:
    """Our layer in the place of Megatron's, built from the same TransformerConfig."""
    layer = build_module(moe_submodule_spec("loop", dispatcher=dispatcher), config=config)
    layer.set_layer_number(1)
    copy_weights(theirs, layer.router, layer.experts)
    if theirs.shared_experts is not None:
        layer.shared_experts.load_state_dict(theirs.shared_experts.state_dict())
    copy_latent_weights(theirs, layer)
    return layer


@torch.no_grad()
def copy_latent_weights(theirs: nn.Module, ours: nn.Module) -> None:
    for name, weight in latent_weights(theirs).items():
        latent_weights(ours)[name].copy_(weight)


def plain(theirs: nn.Module, pair: Pair, dispatcher: str) -> MoELayer:
    """Our layer without Megatron."""
    ep_group = get_default_pg_collection().ep
    router = Router(RouterConfig(hidden_size=HIDDEN, num_experts=EXPERTS, **({"topk": 2} | pair.router)))
    width = pair.latent or HIDDEN
    sizes = {"num_local_experts": EXPERTS // ep_group.size(), "hidden_size": width, "ffn_size": FFN}
    experts = Experts(**sizes, activation=pair.activation, backend="loop")
    copy_weights(theirs, router, experts)
    shared = None
    if pair.shared is not None:
        options = {"activation": pair.activation, "gate": pair.shared}
        shared = SharedExpert(hidden_size=HIDDEN, ffn_size=SHARED_FFN, **options)
        with torch.no_grad():
            shared.weight1.copy_(theirs.shared_experts.linear_fc1.weight)
            shared.weight2.copy_(theirs.shared_experts.linear_fc2.weight)
            if shared.gate_weight is not None:
                shared.gate_weight.copy_(theirs.shared_experts.gate_weight)
    layer = MoELayer(
        router=router,
        dispatcher=DISPATCHERS[dispatcher](EXPERTS, ep_group=ep_group, etp_group=None),
        experts=experts,
        settings=MoESettings(**pair.settings, batch_dim=1),
        shared=shared,
        down=nn.Linear(HIDDEN, width, bias=False) if pair.latent else None,
        up=nn.Linear(width, HIDDEN, bias=False) if pair.latent else None,
    )
    copy_latent_weights(theirs, layer)
    return layer


def run(layer: nn.Module, passes: int) -> Tensors:
    """Output, gradients and token counts of the last of `passes` + 1 global batches of one micro-batch per
    rank, all alike.
    """
    rank = dist.get_rank()
    for _ in range(passes + 1):
        layer.zero_grad()
        x = random(LENGTH, SEQUENCES, HIDDEN, seed=1000 + rank).requires_grad_()
        y, loss = layer(x)
        # Under Megatron the losses are attached to the output, and the second value is a bias that there is
        # none of.
        total = (y * random(LENGTH, SEQUENCES, HIDDEN, seed=2000 + rank)).sum() / 10
        (total if loss is None else total + loss).backward()
        counts = getattr(layer.router, "local_tokens_per_expert", None)
        counts = None if counts is None else counts.clone()
        _end_of_batch(layer)
    found = {"y": y.detach(), "x": x.grad, "router": layer.router.weight.grad}
    found |= {name: weight.grad for name, weight in latent_weights(layer).items()}
    found |= {} if layer.router.bias is None else {"router bias": layer.router.bias.grad}
    return found | _expert_gradients(layer) | ({} if counts is None else {"tokens per expert": counts})


def _end_of_batch(layer: nn.Module) -> None:
    """What Megatron's finalize_model_grads does, without the step of the expert bias."""
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if hasattr(layer.router, "reset_global_aux_loss_tracker"):
        layer.router.reset_global_aux_loss_tracker()
    else:
        layer.router.end_of_batch(group, GlobalFractions)
    if getattr(layer.router, "local_tokens_per_expert", None) is not None:
        layer.router.local_tokens_per_expert.zero_()


def _expert_gradients(layer: nn.Module) -> Tensors:
    if isinstance(layer.experts, Experts):
        found = {"weight1": layer.experts.weight1.grad, "weight2": layer.experts.weight2.grad}
    else:
        matrices = zip(*map(_matrices, layer.experts.local_experts), strict=True)
        found = {
            name: torch.stack([weight.grad for weight in weights])
            for name, weights in zip(("weight1", "weight2"), matrices, strict=True)
        }
    shared = getattr(layer, "shared", None) or getattr(layer, "shared_experts", None)
    if shared is None:
        return found
    weight1, weight2 = _matrices(shared)
    found |= {"shared weight1": weight1.grad, "shared weight2": weight2.grad}
    return found if shared.gate_weight is None else found | {"shared gate": shared.gate_weight.grad}


def _matrices(mlp: nn.Module) -> tuple[Tensor, Tensor]:
    if isinstance(mlp, SharedExpert):
        return mlp.weight1, mlp.weight2
    return mlp.linear_fc1.weight, mlp.linear_fc2.weight


def start_parallel(*, tp: int = 1, ep: int = 1, etp: int = 1) -> None:
    """Megatron's groups on the ranks of this job, and its random numbers."""
    sizes = {"tensor_model_parallel_size": tp, "expert_model_parallel_size": ep}
    sizes["expert_tensor_parallel_size"] = etp
    parallel_state.initialize_model_parallel(**sizes, create_gloo_process_groups=False)
    tensor_parallel.model_parallel_cuda_manual_seed(1)


def start_megatron(ep: int) -> None:
    """Megatron's groups on the ranks of this job: EP folded into data parallelism."""
    warnings.simplefilter("ignore")
    # Two mends of megatron-core 0.16.1, which our package does not need, as it uses neither its router nor
    # its dispatchers: without Transformer Engine the router reads a name that is not defined,
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None
    # and without CUDA the splits of an all-to-all stay tensors, which torch.distributed refuses.
    if not torch.cuda.is_available():
        token_dispatcher.maybe_move_tensor_to_cpu = _as_list
    build_latent_projections_without_te()
    start_parallel(ep=ep)


def build_latent_projections_without_te() -> None:
    """Lets Megatron's layer build its latent projections, for which it wants Transformer Engine's linear
    layer, from its own.
    """
    moe_layer.HAVE_TE, moe_layer.TELinear = True, _linear


def _linear(*sizes: int, parallel_mode: str, **options: Any) -> nn.Module:
    assert parallel_mode == "duplicated"  # as Linear always is
    return Linear(*sizes, tp_group=parallel_state.get_tensor_model_parallel_group(), **options)


def _as_list(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.tolist() if as_numpy and isinstance(tensor, Tensor) else tensor


@dataclass(frozen=True)
class Comparison:
    """What one rank found for a pair."""

    errors: dict[str, dict[str, float]]  # of every tensor, by kind of our layer and Megatron's dispatcher
    effect: float  # change of the router's gradient where the plain layer has no capacity and no losses


def _theirs(ep: int, dispatcher: str, pair: Pair) -> nn.Module:
    # Megatron's experts cannot have biases (a view changed in place); its router can, and ours are zero.
    plain = megatron_config(ep, dispatcher, pair.megatron | {"add_bias_linear": False})
    spec = get_moe_module_spec(use_te=False, num_experts=EXPERTS)
    # a ModuleSpec, from Megatron 0.18 on a partial function
    theirs = spec(config=plain) if isinstance(spec, functools.partial) else build_module(spec, config=plain)
    if pair.megatron.get("add_bias_linear"):
        config = megatron_config(ep, dispatcher, pair.megatron)
        theirs.router = type(theirs.router)(config=config, pg_collection=get_default_pg_collection())
    return theirs


def compare_on_rank(ep: int, pairs: dict[str, Pair]) -> dict[str, Comparison]:
    """Both kinds of our layer against Megatron's, for every pair and each of its dispatchers."""
    start_megatron(ep)
    first_expert = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep)
    found = {}
    for name, pair in pairs.items():
        errors = {}
        for dispatcher in pair.dispatchers:
            theirs = _theirs(ep, dispatcher, pair)
            theirs.set_layer_number(1)
            draw_weights(theirs, first_expert)
            expected = run(theirs, pair.passes)
            our_config = megatron_config(ep, dispatcher, pair.megatron | pair.ours)
            ours = in_megatron(theirs, our_config, dispatcher), plain(theirs, pair, dispatcher)
            for kind, layer in zip(("in Megatron", "plain"), ours, strict=True):
                errors[f"{kind}, {dispatcher}"] = relative_errors(run(layer, pair.passes), expected)
        without = run(plain(theirs, replace(pair, settings={}), dispatcher), pair.passes)
        found[name] = Comparison(errors, relative_errors(without, expected)["router"])
    return found
