"""Reports of the planner on runs and layouts as plain values, for `--json` and the tables. No torch."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from moe_exp.config import Config
from moe_exp.planner.costs.code_paths import counted_as
from moe_exp.planner.costs.goodput import Goodput
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.params import checkpoint_bytes, count_parameters, most_loaded_rank, rank_parameters
from moe_exp.planner.estimate import Cost, speed_of
from moe_exp.planner.hardware import Hardware
from moe_exp.planner.prediction import Prediction
from moe_exp.planner.search.layout_rules import LAYOUT_SETTINGS
from moe_exp.planner.search.topology import RUNNER_UP, Candidate, Explanation, Search, bound_by, layout_words


def describe_run(
    config: Config, hardware: Hardware, prediction: Prediction, cost: Cost, goodput: Goodput | None = None
) -> dict[str, Any]:
    """Report on a run: parameters, memory by stage and part, time by part, speed, totals, and goodput."""
    count, stage = count_parameters(config), most_loaded_rank(config)
    candidate = Candidate(config, prediction)
    return {
        "gpu": hardware.name,
        "num_gpus": config.world_size,
        "preset": config.preset,
        "dtype": config.dtype,
        "layout": layout_words(config),
        "stage_layers": list(Job.of(config).stage_layers),
        "parameters": {
            "total": count.total,
            "active_per_token": count.active_per_token,
            "most_loaded_rank": rank_parameters(config, stage).total,
            "most_loaded_stage": stage,
        },
        "counted_as": counted_as(config, hardware),
        "memory": _memory(prediction),
        "time": _time(config, hardware, prediction),
        "cost": asdict(cost) | {"days": cost.days},
        "goodput": asdict(goodput) if goodput else None,
        "error": {  # relative, to expect
            "memory": prediction.memory_error,
            "time": prediction.time_error,
            "is_calibrated": prediction.is_calibrated,
            "published": asdict(prediction.published) if prediction.published else None,
        },
        "checkpoint_bytes": checkpoint_bytes(config),
        "filling_batch": candidate.filling_batch,
        "notes": candidate.notes,
    }


def _memory(prediction: Prediction) -> dict[str, Any]:
    """Bytes of every stage by part, the stage that needs most, and what is left."""
    return {
        "stages": [asdict(stage) | {"total": stage.total} for stage in prediction.stages],
        "peak_stage": prediction.peak_stage,
        "peak_bytes": prediction.peak_bytes,
        "device_bytes": prediction.memory_bytes,
        "margin_bytes": prediction.margin_bytes,
        "oom": prediction.oom,
    }


def _time(config: Config, hardware: Hardware, prediction: Prediction) -> dict[str, Any]:
    """Seconds of an iteration by part, and the speed that follows."""
    parts = {"parts": prediction.time.parts(), "bound_by": bound_by(prediction.time)}
    return asdict(speed_of(config, hardware, prediction.time.total)) | parts


def describe_candidate(candidate: Candidate, found: Search, hardware: Hardware, place: int) -> dict[str, Any]:
    config, prediction = candidate.config, candidate.prediction
    best = found.ranked[0].seconds if found.ranked else candidate.seconds
    return {
        "place": place,
        **{name: getattr(config, name) for name in LAYOUT_SETTINGS},
        "dp": config.data_parallel_size,
        "edp": config.world_size // (config.etp * config.ep * config.pp),
        "stage_layers": config.stage_layers,
        "peak_bytes": prediction.peak_bytes,
        "margin_bytes": prediction.margin_bytes,
        **_time(config, hardware, prediction),
        "slower_than_best": candidate.seconds / best - 1,
        "runner_up": place > 1 and candidate.seconds <= (1 + RUNNER_UP) * best,
        "filling_batch": candidate.filling_batch,
        "notes": candidate.notes,
    }


def describe_search(found: Search, hardware: Hardware, top: int) -> dict[str, Any]:
    """The first layouts of a search, and how many there were of which kind."""
    return {
        "gpu": hardware.name,
        "counted_as": counted_as(found.ranked[0].config, hardware) if found.ranked else {},
        "num_tried": found.num_tried,
        "num_fitting": len(found.ranked),
        "num_runner_ups": len(found.runner_ups()),
        "rejected": dict(found.rejected.most_common()),
        "layouts": [
            describe_candidate(one, found, hardware, place)
            for place, one in enumerate(found.ranked[:top], start=1)
        ],
    }


def describe_explanation(explained: Explanation, found: Search, hardware: Hardware) -> dict[str, Any]:
    """Why a layout is refused, or where it stands."""
    report: dict[str, Any] = {
        "asked": dict(explained.wanted),
        "valid": explained.candidate is not None,
        "fits": explained.fits,
        "problems": explained.problems,
    }
    if explained.candidate is not None:
        report["losses_seconds"] = explained.losses
        report["layout"] = describe_candidate(explained.candidate, found, hardware, explained.place)
        report["memory"] = _memory(explained.candidate.prediction)
    return report
