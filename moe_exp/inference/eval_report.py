"""Results of `moe-exp eval` as tables and JSON. No torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from moe_exp.host.progress import table_console
from moe_exp.inference.held_out import short_names

if TYPE_CHECKING:
    from moe_exp.inference.expert_usage import LayerUsage


@dataclass(frozen=True)
class Row:
    """Result for one data prefix, or for all."""

    data: str  # the prefix
    sequences: int
    tokens: int  # predicted ones
    nats: float  # cross entropy summed over them
    text_bytes: int | None  # their UTF-8 bytes; None without a tokenizer

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
        """nats / ln 2 / bytes; None without text."""
        return self.nats / math.log(2) / self.text_bytes if self.text_bytes else None

    def to_json(self) -> dict[str, Any]:
        """Values for JSON; None if missing or not finite."""
        values: dict[str, Any] = {
            "data": self.data,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "bytes": self.text_bytes,
        }
        for name in ("lm_loss", "lm_loss_ppl", "bits_per_byte"):
            value = getattr(self, name)
            values[name] = value if value is not None and math.isfinite(value) else None
        return values


@dataclass(frozen=True)
class Evaluation:
    """Result of one evaluation."""

    checkpoint: str  # folder of the iteration
    iteration: int
    rows: Sequence[Row]  # per data prefix
    experts: Sequence[LayerUsage] = field(default=())  # per MoE layer, if counted

    @property
    def total(self) -> Row:
        """All prefixes, weighted by their tokens."""
        rows = self.rows
        known = [row.text_bytes for row in rows if row.text_bytes is not None]
        text_bytes = sum(known) if len(known) == len(rows) else None
        sequences, tokens = sum(row.sequences for row in rows), sum(row.tokens for row in rows)
        return Row("total", sequences, tokens, sum(row.nats for row in rows), text_bytes)

    def to_json(self) -> dict[str, Any]:
        """Plain values as `--json` prints them; `experts` only if counted."""
        values: dict[str, Any] = {"checkpoint": self.checkpoint, "iteration": self.iteration}
        values |= {"data": [row.to_json() for row in self.rows], "total": self.total.to_json()}
        names = [row.data for row in self.rows]
        return values | ({"experts": [one.to_json(names) for one in self.experts]} if self.experts else {})


def print_evaluation(result: Evaluation, *, num_experts: int) -> None:
    """Prints a table of losses, and per layer one of the `num_experts` most specialised experts."""
    console, names = table_console(), short_names([row.data for row in result.rows])
    table = Table(title=f"iteration {result.iteration} of {escape(result.checkpoint)}", title_justify="left")
    table.add_column("data", overflow="fold")
    for name in ("sequences", "tokens", "bytes", "loss", "perplexity", "bits per byte"):
        table.add_column(name, justify="right")
    rows = list(zip(names, result.rows, strict=True)) + ([("total", result.total)] if len(names) > 1 else [])
    for name, row in rows:
        table.add_row(
            escape(name), f"{row.sequences:,}", f"{row.tokens:,}", _text(row.text_bytes, ",d"),
            f"{row.lm_loss:.6f}", f"{row.lm_loss_ppl:,.4g}", _text(row.bits_per_byte, ".6f"),
            end_section=name == names[-1] and len(names) > 1,
        )  # fmt: skip
    console.print(table)
    for layer in result.experts:
        console.print(_usage_table(layer, names, num_experts))


def _usage_table(layer: LayerUsage, names: Sequence[str], num_experts: int) -> Table:
    shares, bits, order = layer.shares_PE, layer.bits_E, layer.order_E
    fair = 1 / shares.shape[1]
    most = f", of at most {math.log2(len(names)):.3f}" if len(names) > 1 else ""
    title = f"layer {layer.layer}: share of each source's tokens per expert (fair: {fair:.2%})"
    title += f"; {bits.sum():.3f} bits{most}"
    left_out = shares.shape[1] - num_experts
    one_source = "One source alone shows no specialisation: the bits are 0." if len(names) == 1 else ""
    caption = one_source or (f"and {left_out} less specialised" if left_out > 0 else None)
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for name in ("expert", "bits", *(escape(name) for name in names)):
        table.add_column(name, justify="right", overflow="fold")
    for expert in order[:num_experts].tolist():
        table.add_row(str(expert), f"{bits[expert]:.4f}", *(f"{share:.2%}" for share in shares[:, expert]))
    return table


def _text(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
