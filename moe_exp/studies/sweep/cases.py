"""Cases of a sweep: the cross product of its lists, each with its settings and problems. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import Config, ConfigError, load_config, problem
from moe_exp.config.checks.checks import check_config
from moe_exp.host.processes import free_port
from moe_exp.launch.machine_checks import check_machine
from moe_exp.studies.child_runs import MEASURED_ONLY, Case
from moe_exp.studies.sweep.settings import AXES, SweepSettings


def case_of(flags: Mapping[str, Any], folder: Path, *, local: bool) -> Case:
    """The case with these settings; `local` also checks whether it can run on this machine.

    Its name is built from the layout, so that it means the same in every sweep.
    """
    config = load_config(flags, {})
    name = case_name(config)
    problems = check_config(config)
    if local:
        # Every case gets a free port when it starts.
        problems += check_machine(config.model_copy(update={"master_port": free_port()}))
        if config.nnodes > 1:
            rule = "EXECUTOR=local has this node alone"
            problems.append(problem("nodes", config.nnodes, rule, "set NODES=1, or EXECUTOR=slurm"))
    texts = {key: str(value) for key, value in flags.items()}
    return Case(name, texts, config, folder / "logs" / f"{name}.log", problems=tuple(problems))


def make_cases(given: Mapping[str, Any], settings: SweepSettings, folder: Path) -> list[Case]:
    """All cases, in the order of the lists; `given` is from `given_settings`, `folder` that of the sweep.

    Raises:
        ConfigError: problems that all cases share, which are not due to the layout.
    """
    base = load_config(given, {})
    lists = [getattr(settings, name) or (getattr(base, setting),) for name, setting in AXES.items()]
    shared = {**given, **MEASURED_ONLY, "train_iters": settings.sweep_iters}
    cases: dict[str, Case] = {}
    for values in itertools.product(*lists):
        layout = dict(zip(AXES.values(), ("none" if one is None else one for one in values), strict=True))
        if not base.use_moe:
            layout |= {"ep": 1, "etp": 1}  # MoE only
        flags = shared | layout | {"run_dir": str(folder / "runs")}
        flags["run_name"] = case_name(load_config(flags, {}))
        case = case_of(flags, folder, local=settings.executor == "local")
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
