"""Writes the tables of docs/recipes.md from committed results: PYTHONPATH=. python docs/generate_recipes.py

Results are the `ladder.json` of each ladder, beside its definition in moe_exp/studies/ladders/, and the
`results.json` of comparisons in docs/recipes/ (bench/recipes.sh). Intervals are of 90%, by Student's t; for
ladders with the standard deviation of differences over seeds, pooled over the rungs.
"""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moe_exp.host.quantities import count_text
from moe_exp.studies.compare.table import aligned, half_interval
from moe_exp.studies.ladder.ladder import PUBLISHED

RECIPES_MD = Path(__file__).with_name("recipes.md")
COMPARISONS = Path(__file__).with_name("recipes")


@dataclass(frozen=True)
class Claim:
    """A published claim: at the last rung of a ladder, the loss of `lower` is below each of `higher`.

    Attributes:
        lower: a variant, or several of which the best counts.
        must_grow: whether the effective speedup must grow with compute, too.
    """

    text: str
    source: str
    ladder: str
    lower: Sequence[str]
    higher: Sequence[str]
    must_grow: bool = False


CLAIMS = [
    Claim("an MoE beats the dense model of equal FLOPs, and the gain grows with tokens",
          "OLMoE, 2409.02060", "tokens", ["dmoe"], ["dense"], must_grow=True),
    Claim("the gain grows as the share of active experts falls, 8 to 32 experts",
          "2507.17702", "active_share", ["of_32"], ["of_8"]),
    Claim("the same, 32 to 64", "2507.17702", "active_share", ["of_64"], ["of_32"]),
    Claim("the number of active experts has an optimum between 1 and 8",
          "2402.07871, 2507.17702", "granularity", ["top4"], ["top1", "top8"]),
    Claim("a shared expert does not help",
          "OLMoE, 2409.02060", "shared_expert", ["none"], ["quarter", "half", "three_quarters"]),
    Claim("the share of a shared expert has an inner optimum",
          "2509.23678", "shared_expert", ["quarter", "half"], ["none", "three_quarters"]),
    Claim("dropless beats capacity factor 1.0",
          "MegaBlocks, 2211.15841", "capacity", ["dropless"], ["capacity_1"]),
    Claim("dropless beats capacity factor 1.25",
          "MegaBlocks, 2211.15841", "capacity", ["dropless"], ["capacity_1.25"]),
    Claim("balancing over the global batch beats balancing each micro-batch",
          "2501.11873", "balancing_scope", ["global_batch"], ["micro_batch"]),
    Claim("an expert bias beats a balancing loss",
          "2408.15664", "aux_loss_free", ["bias_1e-3", "bias_1e-2"], ["aux_loss"]),
]  # fmt: skip


def read_result(folder: Path, name: str) -> dict[str, Any]:
    """Results of a ladder or a comparison; empty if it has not run."""
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def losses_of(ladder: dict[str, Any], name: str) -> np.ndarray:
    """Losses by rung and seed, NaN for runs that failed."""
    return np.array(ladder["rungs"][name]["losses"], dtype=float)


def difference(ladder: dict[str, Any], one: str, other: str) -> tuple[float, float]:
    """Mean loss of `one` minus that of `other` at the last rung over seeds, and half its interval."""
    apart = losses_of(ladder, one) - losses_of(ladder, other)
    known = [rung[np.isfinite(rung)] for rung in apart]
    degrees = sum(max(0, len(rung) - 1) for rung in known)
    variance = sum(((rung - rung.mean()) ** 2).sum() for rung in known if len(rung)) / degrees
    return float(known[-1].mean()), half_interval(math.sqrt(variance), len(known[-1]), degrees)


def verdict(claim: Claim, ladder: dict[str, Any]) -> tuple[list[str], str]:
    """The differences as text, and whether the result agrees with the claim."""
    best = min(claim.lower, key=lambda name: np.nanmean(losses_of(ladder, name)[-1]))
    found = [(other, *difference(ladder, best, other)) for other in claim.higher]
    texts = [f"{best} − {other}: {signed(mean)} ± {half:.4f}" for other, mean, half in found]
    agrees, disagrees = (
        all(mean + half < 0 for _, mean, half in found),
        any(mean - half > 0 for _, mean, half in found),
    )
    if claim.must_grow:
        trend = ladder["speedups"][best]["trend"]
        texts.append(f"exponent of the speedup {spread(trend, 3)}")
        agrees, disagrees = agrees and trend["low"] > 0, disagrees or trend["high"] < 0
    return texts, "agrees" if agrees else "**disagrees**" if disagrees else "undecided"


def claims_table() -> list[str]:
    rows = [["claim", "source (arXiv)", "ladder", "difference of losses at its last rung", "result"]]
    for claim in CLAIMS:
        ladder = read_result(PUBLISHED, claim.ladder)
        texts, result = verdict(claim, ladder) if ladder else (["-"], "not run")
        rows.append([claim.text, claim.source, f"`{claim.ladder}`", "; ".join(texts), result])
    return aligned(rows, num_left=5)


def ladders_table() -> list[str]:
    rows = [["ladder", "variants", "rungs", "seeds", "core hours", "left out"]]
    for name in dict.fromkeys(claim.ladder for claim in CLAIMS):
        if ladder := read_result(PUBLISHED, name):
            definition, hours = ladder["definition"], f"{ladder['training_seconds'] / 3600:.1f}"
            sizes = [str(len(definition["rungs"])), str(definition["repeats"]), hours]
            left_out = "; ".join(ladder["left_out"]) or "none"
            rows.append([f"`{name}`", ", ".join(ladder["rungs"]), *sizes, left_out])
    return aligned(rows, num_left=2)


def tokens_table() -> list[str]:
    """Losses, gap and effective speedup over tokens."""
    rows = [["iterations", "FLOPs", "dense", "dmoe", "gap", "effective speedup"]]
    ladder = read_result(PUBLISHED, "tokens")
    for number, rung in enumerate(ladder["definition"]["rungs"] if ladder else []):
        dense, dmoe = (np.nanmean(losses_of(ladder, name)[number]) for name in ("dense", "dmoe"))
        flops = count_text(ladder["rungs"]["dense"]["flops"][number])
        speedup = spread(ladder["speedups"]["dmoe"]["rungs"][number], 2)
        losses = [f"{loss:.4f}" for loss in (dense, dmoe, dense - dmoe)]
        rows.append([f"{rung['TRAIN_ITERS']:,}", flops, *losses, speedup])
    return aligned(rows)


def prediction_table() -> list[str]:
    rows = [["variant", "predicted", "measured", "error"]]
    ladder = read_result(PUBLISHED, "tokens")
    for name, loss in (ladder["prediction"]["losses"] if ladder else {}).items():
        measured = float(np.nanmean(losses_of(ladder, name)[-1]))
        rows.append([name, spread(loss, 4), f"{measured:.4f}", f"{loss['value'] / measured - 1:+.2%}"])
    return aligned(rows)


def changes_table() -> list[str]:
    """Validation loss of each change against its base: the MoE, or dense for settings of the dense model."""
    rows = [["change", "validation loss", "difference", "time"]]
    results = read_result(COMPARISONS, "changes")
    for name, variant in results.items():
        base = results["dense" if name.startswith("dense") else "dmoe"]
        paces = [np.nanmedian(numbers(of, "tokens_per_second")) for of in (base, variant)]
        cells = [loss_of(variant), difference_of(variant, base), f"{paces[0] / paces[1]:.2f}×"]
        rows.append([changed(name, variant, base), *([*cells[:1], "", ""] if variant is base else cells)])
    return aligned(rows)


def documents_table() -> list[str]:
    """Validation loss with documents apart or whole, against the base whose loss is over the same tokens."""
    rows = [["change", "validation loss", "difference"]]
    results = read_result(COMPARISONS, "documents")
    bases = {"dense": results.get("dense"), "eod": results.get("eod")}
    for name, variant in results.items():
        base = bases.get(name.split("_")[0], results["dmoe"])
        label = changed(name, variant, results["dmoe"] if base is bases["eod"] else base)
        rows.append([label, loss_of(variant), "" if variant is base else difference_of(variant, base)])
    return aligned(rows)


def loss_of(variant: dict[str, Any]) -> str:
    """Mean validation loss over seeds."""
    return f"{np.nanmean(numbers(variant, 'valid_loss')):.4f}"


def difference_of(variant: dict[str, Any], base: dict[str, Any]) -> str:
    """Mean difference of validation losses with the same seeds, and its interval."""
    apart = numbers(variant, "valid_loss") - numbers(base, "valid_loss")
    apart = apart[np.isfinite(apart)]
    half = half_interval(apart.std(ddof=1), len(apart), len(apart) - 1)
    return f"{signed(apart.mean())} ± {half:.4f}"


def numbers(variant: dict[str, Any], name: str) -> np.ndarray:
    """One number of every run of a variant, NaN for runs that failed."""
    return np.array([run[name] for run in variant["runs"]], dtype=float)


def changed(name: str, variant: dict[str, Any], base: dict[str, Any]) -> str:
    """Settings in which a variant differs from its base."""
    if variant is base:
        return f"**{name}**"
    own = {key: value for key, value in variant["settings"].items() if value != base["settings"][key]}
    words = ", ".join(f"{key.upper()}={str(value).lower()}" for key, value in own.items())
    return f"`{words}`" + (", dense" if name.startswith("dense") else "")


def tuning_table() -> list[str]:
    """Validation losses of both models by batch size and learning rate."""
    rows = [["batch", "LR", "dense", "dmoe"]]
    found: dict[tuple[int, float], dict[str, float]] = {}
    for path in COMPARISONS.glob("tuning_*.json"):  # tuning_32.json; tuning_32_more.json adds to it
        batch = int(path.stem.split("_")[1])
        for name, variant in read_result(COMPARISONS, path.stem).items():
            model, thousandths = name.split("_")
            loss = numbers(variant, "valid_loss")[0]
            if math.isfinite(loss):
                found.setdefault((batch, int(thousandths) / 1000), {})[model] = loss
    for (batch, lr), losses in sorted(found.items()):
        cells = []
        for name in ("dense", "dmoe"):
            loss = losses.get(name, math.nan)
            is_best = loss == np.nanmin([other.get(name, math.nan) for other in found.values()])
            cells.append("-" if math.isnan(loss) else f"**{loss:.4f}**" if is_best else f"{loss:.4f}")
        rows.append([str(batch), f"{lr:g}", *cells])
    return aligned(rows, num_left=0)


def balance_table() -> list[str]:
    """Validation losses by coefficient of the balancing loss."""
    rows = [["AUX_LOSS_COEFF", "validation loss"]]
    results = read_result(COMPARISONS, "balance").values()
    for one in sorted(results, key=lambda one: float(one["settings"]["aux_loss_coeff"])):
        coefficient = float(one["settings"]["aux_loss_coeff"])
        rows.append([f"{coefficient:g}", f"{numbers(one, 'valid_loss')[0]:.4f}"])
    return aligned(rows)


def spread(estimate: dict[str, float | None], places: int) -> str:
    """A value with its interval; JSON has no infinity."""
    numbers = (estimate[key] for key in ("value", "low", "high"))
    value, low, high = ("∞" if number is None else f"{number:.{places}f}" for number in numbers)
    return f"{value} [{low}, {high}]"


def signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")


TABLES: dict[str, Callable[[], list[str]]] = {
    "tokens": tokens_table,
    "prediction": prediction_table,
    "changes": changes_table,
    "tuning": tuning_table,
    "balance": balance_table,
    "documents": documents_table,
    "claims": claims_table,
    "ladders": ladders_table,
}


def page(text: str) -> str:
    """The page with its tables written anew: each is between `<!-- table: NAME -->` and `<!-- end -->`."""

    def table(match: re.Match[str]) -> str:
        rows = TABLES[match[1]]()
        lines = "\n".join(rows if len(rows) > 2 else ["No results yet."])
        return f"<!-- table: {match[1]} -->\n\n{lines}\n\n<!-- end -->"

    return re.sub(r"<!-- table: (\w+) -->.*?<!-- end -->", table, text, flags=re.DOTALL)


if __name__ == "__main__":
    RECIPES_MD.write_text(page(RECIPES_MD.read_text()))
