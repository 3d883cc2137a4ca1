"""Compares a converted model with the model of transformers, layer by layer (`convert from-hf --verify`)."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.hf.model_folder import read_json
from moe_exp.checkpoint.hf.mxfp4 import is_mxfp4
from moe_exp.config import setting_error
from moe_exp.engine.runtime import Runtime
from moe_exp.inference.ranks import Layout, Stage, config_for_use, load_model, run_alone

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
    from transformers.utils.quantization_config import Mxfp4Config

    folder = one_checkpoint(target)
    config = config_for_use(folder, Layout(), dtype="fp32")
    length = min(NUM_TOKENS, config.seq_len)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []  # outputs of the embedding, the layers but the last, the final norm; logits

    def keep(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden.transpose(0, 1).float().cpu())

    def run(rank: Runtime) -> None:
        model = load_model(config, rank, folder)
        for part in (model.embedding, *list(model.decoder.layers)[:-1], model.decoder.final_layernorm):
            part.register_forward_hook(keep)
        logits = Stage(config, rank, model).logits(tokens)
        assert logits is not None
        found.append(logits.cpu())

    run_alone(config, run)
    is_packed = is_mxfp4(read_json(source / "config.json"))
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
    theirs: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).eval()
    result = theirs(tokens.clamp(max=theirs.config.vocab_size - 1), output_hidden_states=True)
    layers = [f"layer {number}" for number in range(1, config.num_layers)]
    names = ["embedding", *layers, "last layer, norm", "logits"]
    differences = {}
    for name, ours, other in zip(names, found, (*result.hidden_states, result.logits), strict=True):
        other = other[..., : ours.size(-1)]
        norms = torch.linalg.vector_norm(ours - other), torch.linalg.vector_norm(other)
        differences[name] = float(norms[0] / norms[1])
    agrees = differences["logits"] <= LIMIT
    lines = [f"{length} random tokens in fp32, relative difference from transformers:"]
    lines += [f"  {name:<20}{value:.1e}" for name, value in differences.items()]
    begins = next((name for name, value in differences.items() if not value <= LIMIT), "")
    lines.append(f"differs from {begins} on (limit {LIMIT:.0e})" if begins else "the models agree")
    return lines, agrees
