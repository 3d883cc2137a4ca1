"""Tests that tokens attend only to their own document and window, for `moe-exp doctor --leak-test`.

For each kind and backend of attention, runs a small model on two packed samples, and on each of their
documents alone.
"""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from moe_exp.config import Config, load_config
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.engine.runtime import share_alone
from moe_exp.layers.megatron.documents import Documents, Lengths, document_positions

HEADER = ["attention", "model", "dtype", "error of logits", "of gradients", "changed logits", "result"]
# The samples are cut at different places, and one document has a single token.
_LENGTHS: Lengths = ((16, 1, 47), (20, 44))
# Every token uses every expert, so that the expert GEMMs have the same shapes for any content.
_MODEL = {
    "preset": "cpu", "gpus_per_node": 1, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 64, "vocab_size": 128, "num_experts": 4, "topk": 4,
    "document_mask": True, "aux_loss_type": "none", "z_loss_coeff": 0, "init_std": 0.1, "mbsz": 1, "gbsz": 1,
}  # fmt: skip
_HEADS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "latent": {
        "multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 32, "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    },
    "windows": {"sliding_window": 8, "attention_sinks": "all"},
}  # fmt: skip
_LIMITS = {"fp32": 1e-4, "bf16": 0.05}


@dataclass(frozen=True)
class Leak:
    """Result for one kind of attention; errors compare packed documents with the same documents alone."""

    kernel: str  # named as by `backends_of`
    heads: str  # a key of _HEADS
    dtype: str
    logits_error: float
    gradients_error: float  # over all parameters
    # logits of other documents, and of tokens behind the windows, that change in any bit if a token changes
    num_changed: int

    @property
    def is_tight(self) -> bool:
        """Whether attention stayed within documents and windows in the test."""
        limit = _LIMITS[self.dtype]
        return self.logits_error < limit and self.gradients_error < limit and not self.num_changed

    @property
    def row(self) -> list[str]:
        """Table cells, one per column of HEADER."""
        errors = [f"{self.logits_error:.1e}", f"{self.gradients_error:.1e}", str(self.num_changed)]
        return [self.kernel, self.heads, self.dtype, *errors, "ok" if self.is_tight else "leaks"]


def find_leaks() -> Iterator[Leak]:
    """Tests every kind and backend of attention that a training run could use on this machine."""
    backends = ["sdpa", "blocks"]
    if torch.cuda.is_available():
        backends += ["flex", *(["flash-attn"] if importlib.util.find_spec("flash_attn") else [])]
    for heads, dtype, backend in product(_HEADS, _LIMITS, backends):
        lacks = {"sdpa": heads == "windows", "flash-attn": heads != "grouped" or dtype == "fp32"}
        if lacks.get(backend):
            continue
        settings: dict[str, Any] = {**_HEADS[heads], "dtype": dtype, "attention_backend": backend}
        config = load_config(_MODEL | settings, {})
        rank = share_alone(config)
        model = build_chunk(config, transformer_config(config), rank, 0).to(rank.device).eval()
        found = backends_of(config, rank.device.type)
        kernel = next(name for part, (name, _) in found.items() if "attention" in part)
        yield Leak(kernel, heads, dtype, *_leak(config, rank.device, model))


def _leak(config: Config, device: torch.device, model: Any) -> tuple[float, float, int]:
    """Returns logits_error, gradients_error and num_changed, as in `Leak`."""
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, config.vocab_size, (2, config.seq_len), generator=drawn).to(device)
    weights = torch.randn(2, config.seq_len, config.padded_vocab_size, generator=drawn).to(device)
    positions = document_positions(_LENGTHS).to(device)
    packed = model(tokens, positions, None, packed_seq_params=Documents(_LENGTHS, positions))
    alone = []
    for row, lengths in zip(tokens, _LENGTHS, strict=True):
        documents = row[None].split(lengths, dim=1)
        each = [model(one, torch.arange(one.size(1), device=device)[None], None) for one in documents]
        alone.append(torch.cat(each, dim=1))
    found = []
    for logits in (packed, torch.cat(alone)):
        trained = [one for one in model.parameters() if one.requires_grad]
        gradients = torch.autograd.grad((logits.float() * weights).sum(), trained, allow_unused=True)
        joined = torch.cat([one.flatten().float() for one in gradients if one is not None])
        found.append((logits.detach().double(), joined.double()))
    errors = [float((one - other).norm() / other.norm()) for one, other in zip(*found, strict=True)]
    # Changing the tokens of a document must not change a bit of the other documents' logits, and changing one
    # token not those that all windows together do not reach.
    changed, first, last = tokens.clone(), _LENGTHS[0][0], _LENGTHS[1][0]
    changed[0, :first] = (tokens[0, :first] + 1) % config.vocab_size
    changed[1, last] = (tokens[1, last] + 1) % config.vocab_size
    with torch.no_grad():
        differ = model(changed, positions, None, packed_seq_params=Documents(_LENGTHS, positions)) != packed
    reach = config.num_layers * (config.sliding_window - 1) + 1 if config.sliding_window else config.seq_len
    differ[0, :first] = differ[1, last : last + reach] = False
    return errors[0], errors[1], int(differ.sum())
