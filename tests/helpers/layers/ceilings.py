"""Ceilings for the machine code of every kernel and config on sm_80, sm_90 and sm_100, by version of Triton.

    PYTHONPATH=.:tests python -m helpers.layers.ceilings

compiles all (minutes), writes tests/layers/kernels/ceilings/VERSION.csv and, for the version of
constraints.txt, the table in docs/compiled_kernels.md. Run it after a change that is meant to change the
code, and explain what grew.
"""

import csv
import sys
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from helpers import ROOT
from helpers.layers import kernel_launches as launches
from helpers.layers.compiled import Compiled, compiled, num_configs

CAPABILITIES = (80, 90, 100)
CASES: dict[str, Callable[[], None]] = {
    "up": launches.up,
    "down": launches.down,
    "gradient of the rows": partial(launches.down, False),
    "activation_grad": launches.activation_gradient,
    "weight_grad": launches.weight_gradient,
    "weight_grad, adding": partial(launches.weight_gradient, main_grad=True),
    **launches.BIASED,
    "combine": launches.combined,
    "gather_rows": launches.rows_in_order,
    "slot_sort": launches.sorted_slots,
    "chunk_order": launches.chunks,
    "keep_within, by weight": launches.kept,
    "keep_within, by position": partial(launches.kept, False),
    "padded_order": launches.padded,
    "top-k": launches.routed,
    "top-k backward": launches.routed_back,
    "losses of the router": launches.losses_of_sums,
    "cross entropy": launches.loss,
    "cross entropy backward": launches.loss_back,
}
PAGE = ROOT / "docs/compiled_kernels.md"
START, END = "<!-- by helpers.layers.ceilings -->\n", "<!-- end -->\n"
# A measured value may exceed its ceiling by this much. Products and copies may only become more.
SLACK = {"registers": 4, "stack": 0, "shared": 0, "loop": 4}
LEAST = ("products", "copies", "tma")
_KEY = ("case", "kernel", "config", "capability")

Row = dict[str, Any]


def file_of(triton: str = "") -> Path:
    """The ceilings for this version, by default the installed one."""
    return ROOT / "tests/layers/kernels/ceilings" / f"{triton or version('triton')}.csv"


def pinned() -> str:
    """The version of Triton in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return next(line.removeprefix("triton==").strip() for line in lines if line.startswith("triton=="))


def row_of(case: str, capability: int, kernel: Compiled) -> Row:
    """What is measured of a kernel."""
    return {
        "case": case, "kernel": kernel.function, "config": label(kernel.config), "capability": capability,
        "registers": kernel.registers, "stack": kernel.stack_bytes, "shared": kernel.shared_bytes,
        **kernel.machine,
    }  # fmt: skip


def label(config: dict[str, int]) -> str:
    """A config as docs/compiled_kernels.md writes it: tile, warps, stages."""
    if not config:
        return ""
    tile = "x".join(str(value) for name, value in config.items() if name.startswith("BLOCK_"))
    parts = [tile, str(config["num_warps"]), str(config["num_stages"])]
    parts += ["TMA"] if config.get("TMA") else []
    parts += ["two programs"] if config.get("PROGRAMS") == 2 else []
    parts += [f"at most {config['maxnreg']} registers"] if config.get("maxnreg") else []
    return ", ".join(parts)


def measured(case: str, capability: int) -> list[Row]:
    """Every kernel and config of a case."""
    launch, found = CASES[case], {}
    for config in range(num_configs(launch, capability)):
        for kernel in compiled(launch, capability, config):
            row = row_of(case, capability, kernel)
            found[_key(row)] = row
    return list(found.values())


def limits(triton: str = "") -> dict[tuple[str, ...], Row]:
    """Rows of the file by case, kernel, config and capability."""
    with file_of(triton).open(newline="") as file:
        return {_key(row): row for row in csv.DictReader(file)}


def exceeded(rows: Iterable[Row], known: dict[tuple[str, ...], Row]) -> list[str]:
    """One line for each value that is past its limit."""
    lines = []
    for row in rows:
        name = f"{row['kernel']} ({row['case']}), {row['config']}, sm_{row['capability']}"
        limit = known.get(_key(row))
        if limit is None:
            lines.append(f"{name}: not in {file_of().name}")
            continue
        for kind, slack in SLACK.items():
            if row[kind] > int(limit[kind]) + slack:
                lines.append(f"{name}: {row[kind]} {kind}, ceiling {limit[kind]} + {slack}")
        for kind in LEAST:
            if row[kind] < int(limit[kind]):
                lines.append(f"{name}: {row[kind]} {kind}, at least {limit[kind]}")
    return lines


def table(triton: str) -> str:
    """Registers, shared memory and loop of the GEMMs in Markdown."""
    rows = [row for row in limits(triton).values() if int(row["products"])]
    lines = ["| kernel | tile, warps, stages | sm_80 | sm_90 | sm_100 |", "|---|---|---|---|---|"]
    previous = ""
    for case, config in dict.fromkeys((row["case"], row["config"]) for row in rows):
        cells = {
            row["capability"]: _cell(row) for row in rows if (row["case"], row["config"]) == (case, config)
        }
        name, previous = "" if case == previous else case, case
        lines.append(f"| {name} | {config} | {' | '.join(cells.get(str(c), '') for c in CAPABILITIES)} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    spilled = f", {row['stack']} B" if int(row["stack"]) else ""
    return f"{row['registers']}{spilled} / {int(row['shared']) / 1024:.0f} / {row['loop']}"


def _key(row: Row) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in _KEY)


def main() -> None:
    rows: list[Row] = []
    for case in CASES:
        for capability in CAPABILITIES:
            print(f"{case}, sm_{capability}", file=sys.stderr, flush=True)
            rows += measured(case, capability)
    path = file_of()
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if version("triton") == pinned():
        before, start, rest = PAGE.read_text().partition(START)
        _, end, after = rest.partition(END)
        PAGE.write_text(f"{before}{start}\n{table(pinned())}\n\n{end}{after}")


if __name__ == "__main__":
    main()
