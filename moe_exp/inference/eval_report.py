"""Results of `moe-exp eval` as tables and JSON: losses, and each source's expert usage.

Shapes: L MoE layers, P sources, E experts, K top-k, T tokens. A source is a data prefix. Each token
has K slots. The share s_pe is the fraction of source p's slots that are routed to expert e, before drops.
The specialisation b_e is expert e's term in the mutual information between expert and source, in bits; all
sources have equal weight:

    b_e = 1/P sum_p s_pe log2(s_pe / mean_p s_pe),    0 <= sum_e b_e = I(expert; source) <= log2 P.

b_e is 0 if all sources use the expert equally. A rarely used expert has a small b_e, even if only one source
uses it.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from moe_exp.host.progress import table_console
from moe_exp.layers.router import RoutingDecision, count_kept

Float64Array = npt.NDArray[np.float64]


class RouterCounts:
    """Counts how often this rank's routers choose each expert, [P, L, E]. `layers`: pairs (index in the whole
    model, layer with a `router`). Before every batch, set `source` to the index of the batch's source. To
    exclude padding, also set `valid_T` to a mask of the tokens to count.
    """

    def __init__(
        self, layers: Iterable[tuple[int, nn.Module]], sizes_PLE: tuple[int, int, int], device: torch.device
    ):
        self.counts_PLE = torch.zeros(sizes_PLE, dtype=torch.int64, device=device)
        self.source = 0
        self.valid_T: Tensor | None = None
        for index, layer in layers:
            router = layer.router
            assert isinstance(router, nn.Module)
            router.register_forward_hook(partial(self._add, index))

    def _add(self, layer: int, router: nn.Module, inputs: Any, decision: RoutingDecision) -> None:
        chosen_TK, num_experts = decision.expert_TK, self.counts_PLE.size(2)
        kept_TK = decision.kept_TK  # only from routers with a variable number of experts per token
        if self.valid_T is not None:
            valid_TK = self.valid_T.unsqueeze(1).expand_as(chosen_TK)
            kept_TK = valid_TK if kept_TK is None else kept_TK & valid_TK
        self.counts_PLE[self.source, layer] += count_kept(chosen_TK, kept_TK, num_experts)


@dataclass(frozen=True)
class LayerUsage:
    """Usage of one layer's experts."""

    layer: int  # number in the model, from 1
    counts_PE: npt.NDArray[np.int64]  # slots

    @property
    def shares_PE(self) -> Float64Array:
        """Shares s_pe as defined at the top of this file; rows sum to 1."""
        shares: Float64Array = self.counts_PE / self.counts_PE.sum(axis=1, keepdims=True)
        return shares

    @property
    def bits_E(self) -> Float64Array:
        """Specialisation b_e as defined at the top of this file."""
        shares = self.shares_PE
        mean = shares.mean(axis=0)
        ratio = np.divide(shares, mean, out=np.ones_like(shares), where=shares > 0)
        bits: Float64Array = (shares * np.log2(ratio)).mean(axis=0)
        return np.maximum(bits, 0.0)  # negative only by rounding

    @property
    def order_E(self) -> npt.NDArray[np.int64]:
        """Expert indices, most specialised first; ties are ordered by usage, most used first."""
        return np.lexsort((-self.shares_PE.mean(axis=0), -self.bits_E.round(12)))

    def to_json(self, sources: list[str]) -> dict[str, Any]:
        """Values for JSON. Each list has one value per expert; each nested object has one key per source."""
        return {
            "layer": self.layer,
            "specialisation_bits": float(self.bits_E.sum()),
            "expert_bits": self.bits_E.tolist(),
            "order": self.order_E.tolist(),
            "tokens_per_expert": dict(zip(sources, self.counts_PE.tolist(), strict=True)),
            "shares": dict(zip(sources, self.shares_PE.tolist(), strict=True)),
        }


@dataclass(frozen=True)
class Row:
    """Result for one data prefix, or for all prefixes together."""

    data: str  # prefix, or `total`
    sequences: int
    tokens: int  # predicted tokens
    nats: float  # cross-entropy summed over the predicted tokens
    text_bytes: int | None  # UTF-8 bytes of the predicted tokens; None without a tokenizer

    @property
    def lm_loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def lm_loss_ppl(self) -> float:
        """Perplexity, exp(lm_loss); infinite on overflow."""
        return math.exp(self.lm_loss) if not self.lm_loss > 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte: nats / ln 2 / bytes; None if the number of bytes is unknown or 0."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Values for JSON; unknown and non-finite values become None."""
        losses = {name: getattr(self, name) for name in ("lm_loss", "lm_loss_ppl", "bits_per_byte")}
        known = {name: x if x is not None and math.isfinite(x) else None for name, x in losses.items()}
        sizes = {"sequences": self.sequences, "tokens": self.tokens, "bytes": self.text_bytes}
        return {"data": self.data, **sizes, **known}


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    checkpoint: str  # iter_ folder
    iteration: int
    rows: Sequence[Row]  # per data prefix
    experts: Sequence[LayerUsage] = field(default=())  # per MoE layer, if counted

    @property
    def total(self) -> Row:
        """Result for all prefixes together, weighted by their tokens."""
        known = [row.text_bytes for row in self.rows if row.text_bytes is not None]
        names = ("sequences", "tokens", "nats")
        sequences, tokens, nats = (sum(getattr(row, name) for row in self.rows) for name in names)
        return Row("total", sequences, tokens, nats, sum(known) if len(known) == len(self.rows) else None)

    def to_json(self) -> dict[str, Any]:
        """Values that `--json` prints; contains `experts` only if expert usage was counted."""
        values: dict[str, Any] = {"checkpoint": self.checkpoint, "iteration": self.iteration}
        values |= {"data": [row.to_json() for row in self.rows], "total": self.total.to_json()}
        names = [row.data for row in self.rows]
        return values | ({"experts": [one.to_json(names) for one in self.experts]} if self.experts else {})


def print_evaluation(result: Evaluation, *, num_experts: int) -> None:
    """Prints a table of losses, and for each layer a table of the `num_experts` most specialised experts."""
    console, names = table_console(), short_names([row.data for row in result.rows])
    table = Table(title=f"iteration {result.iteration} of {escape(result.checkpoint)}", title_justify="left")
    table.add_column("data", overflow="fold")
    for name in ("sequences", "tokens", "bytes", "loss", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    rows = list(zip(names, result.rows, strict=True)) + ([("total", result.total)] if len(names) > 1 else [])
    for name, row in rows:
        num_bytes = "-" if row.text_bytes is None else f"{row.text_bytes:,d}"
        bits_per_byte = "-" if row.bits_per_byte is None else f"{row.bits_per_byte:.6f}"
        table.add_row(
            escape(name), f"{row.sequences:,}", f"{row.tokens:,}", num_bytes,
            f"{row.lm_loss:.6f}", f"{row.lm_loss_ppl:,.4g}", bits_per_byte,
            end_section=name == names[-1] and len(names) > 1,
        )  # fmt: skip
    console.print(table)
    for layer in result.experts:
        shares, bits, order = layer.shares_PE, layer.bits_E, layer.order_E
        fair = 1 / shares.shape[1]
        most = f" (maximum {math.log2(len(names)):.3f})" if len(names) > 1 else ""
        title = f"layer {layer.layer}: share of each source's tokens by expert (uniform: {fair:.2%})"
        title += f"; {bits.sum():.3f} bits{most}"
        left_out = shares.shape[1] - num_experts
        caption = f"not shown: {left_out} less specialized experts" if left_out > 0 else None
        if len(names) == 1:
            caption = "Specialization needs at least two sources; with a single source, it is 0 bits."
        table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
        for name in ("expert", "bits", *(escape(name) for name in names)):
            table.add_column(name, justify="right", overflow="fold")
        for expert in order[:num_experts].tolist():
            table.add_row(str(expert), f"{bits[expert]:.4f}", *(f"{one:.2%}" for one in shares[:, expert]))
        console.print(table)


def short_names(prefixes: Sequence[str]) -> list[str]:
    """Shortest distinct names: the last 1, 2 or 3 components of each path, else whole paths."""
    for count in range(1, 4):
        names = ["/".join(Path(prefix).parts[-count:]) for prefix in prefixes]
        if len(set(names)) == len(names):
            return names
    return list(prefixes)
