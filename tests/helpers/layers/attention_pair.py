"""Attention of transformers and of our model with the same weights, on one rank; for test_attention.py.

Ours is that of a whole GPTModel, built from settings as in a run, so that the way from a setting to what is
computed is compared, too.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from helpers.relative_error import relative_errors
from helpers.whole_runs import SMALL

HIDDEN, HEADS, GROUPS, LENGTH, SEQUENCES = 32, 4, 2, 24, 3
OURS = {
    **SMALL, "gpus_per_node": 1, "use_moe": False, "num_layers": 1, "hidden_size": HIDDEN,
    "num_heads": HEADS, "num_query_groups": GROUPS, "vocab_size": 4096, "norm_epsilon": 1e-6,
}  # fmt: skip
THEIRS = {
    "hidden_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072, "attention_dropout": 0.0,
}  # fmt: skip
# Of multi-latent attention, whose tensors are laid out alike.
LATENT_NAMES = {
    "linear_proj.weight": "o_proj", "linear_q_proj.weight": "q_proj", "linear_q_down_proj.weight": "q_a_proj",
    "q_layernorm.weight": "q_a_layernorm", "linear_q_up_proj.weight": "q_b_proj",
    "linear_kv_down_proj.weight": "kv_a_proj_with_mqa", "kv_layernorm.weight": "kv_a_layernorm",
    "linear_kv_up_proj.weight": "kv_b_proj",
}  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """Attention of a model of transformers, and the settings that make ours the same function."""

    model: str  # module name in transformers.models
    name: str  # prefix of its classes
    theirs: dict[str, Any] = field(default_factory=dict)  # of its config, over THEIRS
    ours: dict[str, Any] = field(default_factory=dict)  # settings, over OURS


def rope(kind: str = "default", theta: float = 10000.0, **parameters: Any) -> dict[str, Any]:
    """`rope_parameters` of a config of transformers."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **parameters}}


def start() -> Any:
    """Megatron's groups of one rank."""
    from moe_exp.config import load_config
    from moe_exp.engine import runtime

    return runtime.start(load_config(OURS, {}))


def built(pair: Pair, rank: Any) -> tuple[nn.Module, nn.Module, Any]:
    """(their attention, their rotary embedding, our model)."""
    from importlib import import_module

    from moe_exp.config import load_config
    from moe_exp.engine.model import build_chunk, transformer_config

    modeling = import_module(f"transformers.models.{pair.model}.modeling_{pair.model}")
    package = import_module(f"transformers.models.{pair.model}")
    settings = getattr(package, f"{pair.name}Config")(**(THEIRS | rope() | pair.theirs))
    # Without a mask the eager one would look ahead.
    settings._attn_implementation = "sdpa"
    config = load_config(OURS | pair.ours, {})
    assert list(config.problems()) == []
    theirs = getattr(modeling, f"{pair.name}Attention")(settings, 0)
    their_rotary = getattr(modeling, f"{pair.name}RotaryEmbedding")(settings)
    return theirs, their_rotary, build_chunk(config, transformer_config(config), rank, 0)


def compare(pair: Pair, rank: Any) -> dict[str, float]:
    """Relative errors of the output, and of the gradients of the input and of every weight."""
    theirs, their_rotary, model = built(pair, rank)
    ours = model.decoder.layers[0].self_attention
    draw(theirs)
    with torch.no_grad():
        packed = pack(theirs, lambda parameter: parameter.detach())
        parameters = dict(ours.named_parameters())
        assert parameters.keys() == packed.keys(), sorted(parameters.keys() ^ packed.keys())
        for name, parameter in parameters.items():
            parameter.copy_(packed[name])
    x, grad = (random(SEQUENCES, LENGTH, HIDDEN, seed=seed) for seed in (100, 101))
    x_theirs, x_ours = x.clone().requires_grad_(), x.transpose(0, 1).contiguous().requires_grad_()

    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    rotary = their_rotary(x_theirs, positions)
    y_theirs, *_ = theirs(hidden_states=x_theirs, position_embeddings=rotary, attention_mask=None)
    y_theirs.backward(grad)
    y_ours, bias = ours(x_ours, attention_mask=None, rotary_pos_emb=_rotary(model))
    assert bias is None
    y_ours.backward(grad.transpose(0, 1))

    expected = {"y": y_theirs, "x": x_theirs.grad} | pack(theirs, lambda parameter: parameter.grad)
    found = {"y": y_ours.transpose(0, 1), "x": x_ours.grad.transpose(0, 1)}
    found |= {name: parameter.grad for name, parameter in parameters.items()}
    assert all(value.any() for value in expected.values()), "a reference of zeros would prove nothing"
    return relative_errors(found, expected)


def compare_frequencies(pair: Pair, rank: Any) -> dict[str, float]:
    """Relative errors of the rotary frequencies and of the factor on cosine and sine."""
    _, theirs, model = built(pair, rank)
    owner = model.decoder.layers[0].self_attention if _rotary(model) is None else model
    emb = owner.rotary_pos_emb.get_emb(2)
    emb, factor = emb if isinstance(emb, tuple) else (emb, 1.0)
    frequencies = emb[1].flatten()[: emb.numel() // 4]  # at position 1, and once for either half
    found = {"frequencies": frequencies, "factor": torch.tensor(factor)}
    factor = torch.tensor(float(theirs.attention_scaling))
    return relative_errors(found, {"frequencies": theirs.inv_freq, "factor": factor})


def run_all(pairs: dict[str, Pair], frequencies: dict[str, Pair]) -> dict[str, dict[str, float]]:
    """On one rank: every comparison by name."""
    rank = start()
    found = {name: compare(pair, rank) for name, pair in pairs.items()}
    return found | {name: compare_frequencies(pair, rank) for name, pair in frequencies.items()}


def _rotary(model: Any) -> Tensor | None:
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is None or model.config.multi_latent_attention:
        return None
    emb = embedding(LENGTH)
    return emb[0] if isinstance(emb, tuple) else emb


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def draw(module: nn.Module) -> None:
    """Weights at which no part of the result is lost in another's rounding."""
    for seed, (name, weight) in enumerate(module.named_parameters()):
        drawn = random(*weight.shape, seed=seed)
        if weight.dim() == 1:
            weight.copy_((0.0 if name.endswith("bias") else 1.0) + 0.3 * drawn)
        else:
            weight.copy_(drawn * 2 * weight.size(1) ** -0.5)


def pack(theirs: nn.Module, of: Callable[[nn.Parameter], Tensor]) -> dict[str, Tensor]:
    """Their weights, or their gradients, under our names and in our order: queries, key and value of one
    group after the other.
    """
    if hasattr(theirs, "kv_b_proj"):
        return {
            name: of(getattr(theirs, module).weight)
            for name, module in LATENT_NAMES.items()
            if getattr(theirs, module) is not None
        }
    packed = {"linear_proj.weight": of(theirs.o_proj.weight)}
    for name in ("weight", "bias"):
        if getattr(theirs.q_proj, name) is not None:
            parts = [of(getattr(one, name)) for one in (theirs.q_proj, theirs.k_proj, theirs.v_proj)]
            by_group = [part.view(GROUPS, -1, *part.shape[1:]) for part in parts]
            packed[f"linear_qkv.{name}"] = torch.cat(by_group, dim=1).flatten(0, 1)
    if hasattr(theirs, "q_norm"):
        packed["q_layernorm.weight"] = of(theirs.q_norm.weight)
        packed["k_layernorm.weight"] = of(theirs.k_norm.weight)
    return packed
