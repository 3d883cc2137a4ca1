"""Settings of a sweep: lists of layouts, iterations per case, and output folder. No torch.

Like run settings, sweep settings are resolved in the order default < environment < command line. Each
list, such as TPS, has values of one run setting, such as TP; if TPS is empty, all cases use the value of TP.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from moe_exp.config import ConfigError, problem
from moe_exp.config.loading import explain, given_values
from moe_exp.config.setting_types import OptionalPositive, Positive


def _words(value: Any) -> Any:
    return tuple(dict.fromkeys(value.replace(",", " ").split())) if isinstance(value, str) else value


Sizes = Annotated[tuple[Positive, ...], BeforeValidator(_words)]
OptionalSizes = Annotated[tuple[OptionalPositive, ...], BeforeValidator(_words)]

# Lists and their settings, in the order of the cross product (the last changes fastest).
AXES = {
    "nodes": "nnodes", "gpus": "gpus_per_node", "tps": "tp", "pps": "pp", "vpps": "vpp", "eps": "ep",
    "etps": "etp", "cps": "cp", "mbszs": "mbsz",
}  # fmt: skip


class SweepSettings(BaseModel):
    """Settings of a sweep. The environment variable of a field is its name in upper case."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gpus: Sizes = Field((), description="list of GPU counts per node (process counts on a CPU)")
    nodes: Sizes = Field((), description="list of node counts; counts above 1 require EXECUTOR=slurm")
    tps: Sizes = Field((), description="list of tensor-parallel sizes, such as '1 2 4'")
    pps: Sizes = Field((), description="list of pipeline-parallel sizes")
    vpps: OptionalSizes = Field((), description="list of model chunks per pipeline rank, such as 'none 2'")
    eps: Sizes = Field((), description="list of expert-parallel sizes")
    etps: Sizes = Field((), description="list of expert-tensor-parallel sizes")
    cps: Sizes = Field((), description="list of context-parallel sizes")
    mbszs: Sizes = Field((), description="list of micro-batch sizes")
    sweep_iters: Positive = Field(10, description="iterations per case")
    sweep_warmup: Positive = Field(3, description="warm-up iterations, which are not measured")
    sweep_dir: str = Field("sweeps", description="folder that contains all sweeps")
    sweep_name: str = Field(
        "", description="folder inside SWEEP_DIR; empty: derived from the model's settings"
    )
    case_timeout: Positive = Field(1800, description="time limit of a case (seconds)")
    run_oom: bool = Field(False, description="also run cases that are predicted to run out of memory")
    gpu: str = Field(
        "", description="device for predictions, as in `moe-exp plan`; empty: this host's device"
    )
    executor: Literal["local", "slurm"] = Field(
        "local", description="where cases run: sequentially on this node, or each as a SLURM job"
    )
    sbatch: str = Field("", description="additional sbatch options, such as '--partition=gpu --account=x'")


def load_sweep_settings(flags: Mapping[str, Any], environ: Mapping[str, str]) -> SweepSettings:
    """Resolves settings (default < environment < `flags`); ConfigError lists all invalid values."""
    try:
        settings = SweepSettings(**given_values(flags, environ, SweepSettings))
    except ValidationError as error:
        raise ConfigError(explain(error, SweepSettings)) from None
    if settings.sweep_warmup >= settings.sweep_iters:
        fix = f"set SWEEP_ITERS to at least {settings.sweep_warmup + 1}"
        rule = f"must exceed SWEEP_WARMUP={settings.sweep_warmup}"
        raise ConfigError([problem("sweep_iters", settings.sweep_iters, rule, fix)])
    return settings
