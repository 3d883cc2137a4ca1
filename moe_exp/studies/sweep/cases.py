"""Cases of a sweep: the cross product of its lists, each with its settings and problems. No torch."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, problem
from moe_exp.config.checks.checks import check_config
from moe_exp.host.processes import free_port
from moe_exp.launch.machine_checks import check_machine
from moe_exp.runs.run_folder import RunFolder
from moe_exp.studies.child_runs import MEASURED_ONLY, run_environment, run_to_end, wait_until_free
from moe_exp.studies.sweep.settings import AXES, SweepSettings


@dataclass(frozen=True)
class Case:
    """One layout.

    Attributes:
        name: built from the layout, so that it means the same in every sweep.
        flags: all settings that are not defaults, as `moe-exp train` takes them.
        config: the resulting configuration.
        problems: why it cannot run, a line each; empty if it can.
    """

    name: str
    flags: dict[str, str]
    config: Config
    problems: tuple[str, ...]

    @classmethod
    def of(cls, flags: Mapping[str, Any], *, local: bool) -> Case:
        """The case with these settings; `local` also checks whether it can run on this machine."""
        config = load_config(flags, {})
        return cls(
            case_name(config),
            {name: str(value) for name, value in flags.items()},
            config,
            tuple(_problems(config, local)),
        )


def make_cases(given: Mapping[str, Any], settings: SweepSettings, runs: Path) -> list[Case]:
    """All cases, in the order of the lists; `given` is from `given_settings`, `runs` their parent folder.

    Raises:
        ConfigError: problems that all cases share, which are not due to the layout.
    """
    base = load_config(given, {})
    lists = [getattr(settings, name) or (getattr(base, setting),) for name, setting in AXES.items()]
    cases: dict[str, Case] = {}
    for values in itertools.product(*lists):
        layout = {
            setting: "none" if value is None else value
            for setting, value in zip(AXES.values(), values, strict=True)
        }
        if not base.use_moe:
            layout |= {"ep": 1, "etp": 1}  # MoE only
        flags = {
            **given,
            **MEASURED_ONLY,
            "train_iters": settings.sweep_iters,
            **layout,
            "run_dir": str(runs),
        }
        case = Case.of(
            flags | {"run_name": case_name(load_config(flags, {}))}, local=settings.executor == "local"
        )
        cases.setdefault(case.name, case)
    first, *others = cases.values()
    if everywhere := [line for line in first.problems if all(line in case.problems for case in others)]:
        raise ConfigError(everywhere)
    return [first, *others]


def default_lists(base: Config) -> dict[str, str]:
    """Default lists: powers of two that divide the ranks of a node, and half the micro-batch."""
    ranks = base.gpus_per_node
    sizes = [str(2**power) for power in range(ranks.bit_length()) if ranks % 2**power == 0]
    few = " ".join(sizes[:2])
    return {"tps": few, "pps": few, "eps": " ".join(sizes), "mbszs": f"{max(1, base.mbsz // 2)} {base.mbsz}"}


def case_name(config: Config) -> str:
    """Name of the layout; ETP, CP and the number of nodes are included only if they are not 1."""
    vpp = "" if config.vpp is None else f"_VPP_{config.vpp}"
    extra = "".join(
        f"_{key.upper()}_{getattr(config, key)}" for key in ("etp", "cp") if getattr(config, key) > 1
    )
    nodes = f"nodes_{config.nnodes}_" if config.nnodes > 1 else ""
    ranks = f"{nodes}gpus_{config.gpus_per_node}_TP_{config.tp}_PP_{config.pp}{vpp}_EP_{config.ep}"
    return f"{ranks}{extra}_MBS_{config.mbsz}"


def _problems(config: Config, local: bool) -> list[str]:
    found = check_config(config)
    if local:
        # Every case gets a free port when it starts.
        found += check_machine(config.model_copy(update={"master_port": free_port()}))
        if config.nnodes > 1:
            found.append(
                problem(
                    "nodes",
                    config.nnodes,
                    "EXECUTOR=local has this node alone",
                    "set NODES=1, or EXECUTOR=slurm",
                )
            )
    return found


# Running one case on this node.


def case_environment() -> dict[str, str]:
    """The environment without settings: a sweep's lists would look like misspelt settings."""
    return run_environment(also_without=SweepSettings.model_fields)


def clear(folder: RunFolder, log: Path) -> None:
    """Removes what an earlier attempt left; ValueError if its processes still run."""
    wait_until_free(folder)
    if folder.path.exists():
        shutil.rmtree(folder.path)
    log.unlink(missing_ok=True)


def run_case(case: Case, log: Path, timeout: int) -> int | None:
    """Runs a case for at most `timeout` seconds; returns the launcher's exit code, None after a timeout."""
    return run_to_end(case.flags, log, timeout=timeout, environ=case_environment())
