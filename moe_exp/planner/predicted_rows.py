"""Predictions for the rows of a CSV of runs, as a CSV of `row_id,mem_gb,sec_per_it,oom`. No torch."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence

from moe_exp.planner.hardware import load_hardware
from moe_exp.planner.measured import GIBIBYTE, data_parallel_size, job_of_row
from moe_exp.planner.prediction import Constants, predict

COLUMNS = ("row_id", "mem_gb", "sec_per_it", "oom")


def predicted_csv(rows: Sequence[Mapping[str, str]], constants: Constants) -> str:
    """A line for every row, in their order. Without a batch size there is no time; without a number of GPUs they are TP*PP.

    Args:
        rows: of `measured.read_rows`; columns of results may be absent or empty.
        constants: of the predictions.
    """
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(_predicted(row, constants) for row in rows)
    return text.getvalue()


def _predicted(row: Mapping[str, str], constants: Constants) -> dict[str, str]:
    prediction = predict(job_of_row(row), load_hardware(row["gpu"]), constants)
    return {
        "row_id": row["row_id"],
        "mem_gb": f"{prediction.peak_bytes / GIBIBYTE:.6g}",
        "sec_per_it": f"{prediction.time.total:.6g}" if row.get("gbs") and data_parallel_size(row) else "",
        "oom": str(int(prediction.oom)),
    }
