"""PREFLIGHT=1: the checks once per launch, before the ranks of training start. No torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.config import Config
from moe_exp.host.exit_codes import complain
from moe_exp.launch.preflight.node import preflight, wait_for_port
from moe_exp.launch.preflight.report import add_to_list, findings_lines, print_report, write_event
from moe_exp.runs.run_folder import LATEST, RunFolder
from moe_exp.watch.nodes.exclude import EXCLUDE_NODES

logger = logging.getLogger(__name__)


def passes(config: Config, flags: Mapping[str, Any]) -> bool:
    """Whether training may start; called by the launcher of every node, and the same on all.

    Node 0 prints the table, adds bad nodes to RUN_DIR/exclude_nodes.txt and writes the event `preflight`. A
    slow node is a warning, a failing one ends the job.
    """
    start = time.monotonic()
    try:
        verdict = preflight(config, flags)
    except ValueError as error:
        complain(str(error))
        return False
    if config.node_rank == 0:
        print_report(verdict, num_ranks=config.world_size)
        path = Path(config.run_dir).expanduser() / EXCLUDE_NODES
        if added := add_to_list(verdict, path):
            complain(f"{path}: added {', '.join(added)}")
        write_event(config, verdict, time.monotonic() - start, _iteration(config))
        wait_for_port(config)
    if verdict.grade != "failed":
        return True
    for line in findings_lines(verdict):
        if line.startswith("failed"):
            complain(f"preflight {line}")
    complain(
        "no training: a node has failed the preflight. Fix: start the job without it, or set PREFLIGHT=0 to"
        " train all the same."
    )
    return False


def _iteration(config: Config) -> int:
    newest = RunFolder.of(config).checkpoints / LATEST
    try:
        return int(newest.read_text())
    except (OSError, ValueError):
        return 0
