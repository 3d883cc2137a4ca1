"""Score of the decisions after a failure (moe_exp/watch/diagnosis.py) on those in tests/watch/failures.

    python bench/bench_diagnosis.py               # both halves: accuracy, confusion table, mean cost; 3 s
    # also each wrong decision of the half that the rules were written with
    python bench/bench_diagnosis.py --wrong

Rules are written with `rules.yaml`; `held_out.yaml` is only scored. Costs are in hours of the job: a restart
that fails again wastes one of them, a stop that was not needed a night of eight, waiting or excluding without
need a quarter.
"""

import argparse
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

from moe_exp.watch.diagnosis import Diagnosis, diagnose_logs

FAILURES = Path(__file__).parents[1] / "tests" / "watch" / "failures"
ACTIONS = ("restart", "exclude", "wait", "stop")
# Hours lost by action taken (row) instead of the right one (column), in the order of ACTIONS.
COSTS = {
    "restart": (0.0, 1.0, 1.0, 1.0),
    "exclude": (0.25, 0.0, 1.0, 1.0),
    "wait": (0.25, 1.0, 0.0, 1.0),
    "stop": (8.0, 8.0, 8.0, 0.0),
}


def read_failures(name: str) -> list[dict[str, Any]]:
    """`rules` or `held_out`."""
    return yaml.safe_load((FAILURES / f"{name}.yaml").read_text())


def decision(failure: dict[str, Any]) -> Diagnosis:
    """What the rules say of the failure's logs."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for file in failure["files"]:
            path = Path(folder) / file["name"]
            path.write_text("\n".join(file["lines"]) + "\n")
            paths.append(path)
        return diagnose_logs(
            paths, iterations=failure["iterations"], trained_before=failure["trained_before"]
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--wrong", action="store_true", help="print the wrong decisions on rules.yaml")
    arguments = parser.parse_args()
    for name in ("rules", "held_out"):
        failures = read_failures(name)
        found = [(one, decision(one)) for one in failures]
        table = Counter((said.action, one["action"]) for one, said in found)
        right = sum(table[action, action] for action in ACTIONS)
        hours = sum(COSTS[said][ACTIONS.index(label)] * count for (said, label), count in table.items())
        number = max(1, len(failures))
        print(
            f"{name}: {number} failures, {right / number:.1%} right, {hours / number:.2f} h lost on average\n"
        )
        print(f"| decided | {' | '.join(ACTIONS)} |\n|{'---|' * 5}")
        for said in ACTIONS:
            print(f"| {said} | {' | '.join(str(table[said, label]) for label in ACTIONS)} |")
        print()
        if arguments.wrong and name == "rules":
            for one, said in found:
                if said.action != one["action"]:
                    print(f"{one['id']}: {one['action']} ({one['reason']}), decided {said.text}: {said.line}")


if __name__ == "__main__":
    sys.exit(main())
