"""Compares a converted model with the model of transformers, layer by layer (`convert from-hf --verify`)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.config import setting_error
from moe_exp.inference.model import Model

NUM_TOKENS = 64
LIMIT = 1e-4  # relative, in fp32; the models tested have at most 4e-7


def check_transformers() -> None:
    """Checks that transformers is installed; ValueError if not."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        rule, fix = "requires transformers, which is not installed", "pip install transformers, or omit it"
        raise setting_error("verify", True, rule, fix) from None


@torch.no_grad()
def compare(source: Path, target: Path) -> tuple[list[str], bool]:
    """Runs both models in fp32 on random tokens; returns lines for the user, and whether the logits agree.

    Args:
        source: Hugging Face folder.
        target: checkpoints folder that was converted from it.
    """
    from transformers import AutoModelForCausalLM

    ours = Model(target, dtype="fp32")
    generator = torch.Generator().manual_seed(0)
    length = min(NUM_TOKENS, ours.config.seq_len)
    tokens = torch.randint(ours.config.vocab_size, (1, length), generator=generator)
    found: list[Tensor] = []  # the embedding's output, then that of each layer, [B, S, D]

    def keep(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden.transpose(0, 1).float().cpu())

    decoder = ours.module.decoder
    parts = [ours.module.embedding, *list(decoder.layers)[:-1], decoder.final_layernorm]
    hooks = [part.register_forward_hook(keep) for part in parts]
    logits = ours.score(tokens)
    for hook in hooks:
        hook.remove()
    theirs: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    result = theirs(tokens.clamp(max=theirs.config.vocab_size - 1), output_hidden_states=True)
    names = [
        "embedding",
        *(f"layer {number}" for number in range(1, len(decoder.layers))),
        "last layer, norm",
    ]
    pairs = [*zip(names, found, result.hidden_states, strict=True), ("logits", logits, result.logits)]
    differences = {name: _difference(one, other[..., : one.size(-1)]) for name, one, other in pairs}
    agrees = differences["logits"] <= LIMIT
    lines = [f"{length} random tokens in fp32, relative difference from transformers:"]
    lines += [f"  {name:<20}{value:.1e}" for name, value in differences.items()]
    begins = next((name for name, value in differences.items() if not value <= LIMIT), "")
    lines.append(f"differs from {begins} on (limit {LIMIT:.0e})" if begins else "the models agree")
    return lines, agrees


def _difference(one: Tensor, other: Tensor) -> float:
    return float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other))
