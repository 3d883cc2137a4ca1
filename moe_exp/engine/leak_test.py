"""Whether documents of one sample see each other on this machine, for `moe-exp doctor --leak-test`.

A small model of each kind of attention gets two samples of several documents: packed, and one by one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_exp.config import Config, load_config
from moe_exp.engine import runtime
from moe_exp.engine.backends import backends_of
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.layers.megatron.documents import Documents, Lengths, document_positions

HEADER = ["attention", "heads", "dtype", "error of logits", "of gradients", "changed logits", "result"]
_LENGTHS: Lengths = ((16, 1, 47), (20, 44))
# Every token uses every expert, so that the products have the same shapes whatever is in a document.
_MODEL = {
    "preset": "cpu", "gpus_per_node": 1, "num_layers": 2, "hidden_size": 64, "ffn_hidden_size": 64,
    "num_heads": 4, "num_query_groups": 2, "seq_len": 64, "vocab_size": 128, "num_experts": 4, "topk": 4,
    "document_mask": True, "aux_loss_type": "none", "z_loss_coeff": 0, "init_std": 0.1, "mbsz": 1, "gbsz": 1,
}  # fmt: skip
_HEADS = {
    "grouped": {},
    "latent": {
        "multi_latent_attention": True, "num_query_groups": 4, "kv_lora_rank": 32, "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8, "v_head_dim": 16,
    },
}  # fmt: skip
_LIMITS = {"fp32": 1e-4, "bf16": 0.05}


@dataclass(frozen=True)
class Leak:
    """Result of a kind of attention; errors are relative to the documents alone."""

    kernel: str  # as `backends_of` names it
    heads: str  # `grouped` or `latent`
    dtype: str
    logits_error: float
    gradients_error: float  # of all parameters, together
    num_changed: int  # logits of other documents that are not the same bits when one document changes

    @property
    def is_tight(self) -> bool:
        """Whether no document saw another."""
        limit = _LIMITS[self.dtype]
        return self.logits_error < limit and self.gradients_error < limit and not self.num_changed

    @property
    def row(self) -> list[str]:
        """Cells under HEADER."""
        errors = [f"{self.logits_error:.1e}", f"{self.gradients_error:.1e}", str(self.num_changed)]
        return [self.kernel, self.heads, self.dtype, *errors, "ok" if self.is_tight else "leaks"]


def find_leaks() -> Iterator[Leak]:
    """Runs every kind of attention that a training could use here."""
    for heads, settings in _HEADS.items():
        for dtype in _LIMITS:
            config = load_config(_MODEL | settings | {"dtype": dtype}, {})
            rank = runtime.share_alone(config)
            model = build_chunk(config, transformer_config(config), rank, 0).to(rank.device).eval()
            yield _leak(config, rank.device, model, heads)


def _leak(config: Config, device: torch.device, model: Any, heads: str) -> Leak:
    drawn = torch.Generator().manual_seed(1)
    tokens = torch.randint(1, config.vocab_size, (2, config.seq_len), generator=drawn).to(device)
    weights = torch.randn(2, config.seq_len, config.padded_vocab_size, generator=drawn).to(device)
    packed = _packed(model, tokens)
    packed_gradients = _gradients(model, packed, weights)
    alone = torch.cat([_alone(model, row, lengths) for row, lengths in zip(tokens, _LENGTHS, strict=True)])
    alone_gradients = _gradients(model, alone, weights)
    changed, first = tokens.clone(), _LENGTHS[0][0]
    changed[0, :first] = (tokens[0, :first] + 1) % config.vocab_size
    with torch.no_grad():
        differ = _packed(model, changed) != packed
    differ[0, :first] = False
    kernel = backends_of(config, device.type)["attention"][0]
    errors = _error(packed, alone), _error(packed_gradients, alone_gradients)
    return Leak(kernel, heads, config.dtype, *errors, int(differ.sum()))


def _packed(model: Any, tokens: Tensor) -> Tensor:
    positions = document_positions(_LENGTHS).to(tokens.device)
    found: Tensor = model(tokens, positions, None, packed_seq_params=Documents(_LENGTHS, positions))
    return found


def _alone(model: Any, row: Tensor, lengths: Sequence[int]) -> Tensor:
    documents = row[None].split(lengths, dim=1)
    logits = [model(one, torch.arange(one.size(1), device=one.device)[None], None) for one in documents]
    return torch.cat(logits, dim=1)


def _gradients(model: Any, logits: Tensor, weights: Tensor) -> Tensor:
    parameters = [one for one in model.parameters() if one.requires_grad]
    total = (logits.float() * weights).sum()
    found = torch.autograd.grad(total, parameters, allow_unused=True)
    return torch.cat([one.flatten().float() for one in found if one is not None])


def _error(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())
