"""Marks in the curves of a run: where a stage of data began, and where the run was resumed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Mark:
    """A place between two iterations.

    Attributes:
        kind: a stage of DATA_STAGES, a resume with changed settings, or another resume.
        after: the last iteration before it.
        label: short; empty for a resume without changes.
    """

    kind: Literal["stage", "settings", "resume"]
    after: int
    label: str = ""
    details: str = ""

    @property
    def text(self) -> str:
        """In words, with the iteration."""
        if self.kind == "stage":
            return f"data {self.label} from iteration {self.after + 1}: {self.details}"
        return f"resume after iteration {self.after}" + (f": {self.label}" if self.label else "")


def marks_of(records: Iterable[Mapping[str, Any]]) -> list[Mark]:
    """Marks from the events among the records of a run, by iteration.

    A resume removes what happened after the checkpoint that it continues from. The first start is no resume,
    also if it begins with the iteration of LOAD_DIR.
    """
    found: dict[tuple[str, int], Mark] = {}
    is_first = True
    for event in records:
        name, iteration = event.get("event"), event.get("iteration")
        if not isinstance(iteration, int):
            continue
        if name == "data_stage":
            details = f"{event.get('train_data')}, SEQ_LEN {event.get('seq_len')}"
            found["stage", iteration] = Mark("stage", iteration - 1, f"stage {event.get('stage')}", details)
        elif name == "changed_settings":
            changes = event.get("changes")
            label = ", ".join(map(str, changes)) if isinstance(changes, list) else str(changes)
            found["resume", iteration] = Mark("settings", iteration, label)
        elif name in ("start", "resume"):
            found = {key: mark for key, mark in found.items() if mark.after <= iteration}
            if name == "resume" and not is_first:
                found.setdefault(("resume", iteration), Mark("resume", iteration))
            is_first = False
    return sorted(found.values(), key=lambda mark: mark.after)
