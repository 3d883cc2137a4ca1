"""Settings of reliability and debugging: what a run checks, when it ends, and what it records of itself.

A rule between settings of several sections stands in the last of them (sections/launch.py).
"""

from collections.abc import Iterator
from typing import Literal

from moe_exp.config.sections.output import OutputSettings
from moe_exp.config.setting_types import (
    Iterations,
    NonNegative,
    OptionalPositive,
    Positive,
    RankList,
    Rate,
    Timeout,
    WholeNumbers,
    care,
    iteration_ranges,
)

# A trace of one iteration of a large model has hundreds of MB.
_MOST_TRACED = 100


class ReliabilitySettings(OutputSettings):
    """The section Reliability and debugging."""

    fingerprints: bool = care(
        True, "take a fingerprint of each tensor at every save and compare it after a load; false: neither"
    )
    check_interval: NonNegative = care(
        0,
        "iterations between comparisons of the replicas of the parameters; 0: only before the first "
        "iteration of a start",
    )
    dump_iters: Iterations = care(
        "",
        "after these iterations, such as 10,20 or 10-12, write parameters, gradients and moments to "
        "RUN_DIR/RUN_NAME/dumps",
        measured="",
    )
    dump_ranks: WholeNumbers = care("", "ranks that write DUMP_ITERS, such as 0,4; empty: all", measured="")
    disk_check: Literal["run", "one", "none"] = care(
        "run",
        "free disk that a start requires; run: for all checkpoints until its end (a resumed run: for "
        "the next one); one: for one checkpoint, if you remove others yourself; none: not checked",
    )
    max_bad_steps: NonNegative = care(
        10,
        "consecutive iterations with a loss or gradient that is not finite, after which the run ends "
        "as failed; 0: never",
        compared=True,
    )
    spike_action: Literal["none", "log", "rollback"] = care(
        "log",
        "at a loss spike; none: nothing; log: write an event; rollback: also return to a checkpoint "
        "before it and skip its batches",
        compared=True,
        measured="none",
    )
    max_rollbacks: NonNegative = care(
        5, "rollbacks of a run; the next spike ends it as failed", compared=True
    )
    preflight: bool = care(
        False,
        "check every node before training: arithmetic, memory, links, disks, clocks; a failing node "
        "ends the job",
        measured=False,
    )
    preflight_timeout: Positive = care(
        300, "seconds that nodes wait for each other at the start of the preflight"
    )
    preflight_slow: float = care(
        0.7, "a node is slow below this share of the other nodes' median speed", gt=0, le=1
    )
    hang_timeout: Timeout = care(
        "auto",
        "seconds after which an iteration counts as hanging: stacks are written to hang/ and the "
        "ranks end for a restart; auto: ten times the median, at least 180; none: never",
    )
    hang_timeout_other: OptionalPositive = care(
        1500,
        "timeout in seconds, as HANG_TIMEOUT, for each part of the start, the first iterations, a "
        "batch of an evaluation and a save; none: never",
    )
    trace_calls_from: NonNegative = care(
        0,
        "iteration from which every rank keeps its latest function calls in hang/calls/, which costs "
        "time; 0: never",
    )
    trace_calls_mb: Positive = care(16, "size of that file per rank, MB; newer calls replace older ones")
    trace_calls_in: str = care(
        "moe_exp,megatron,torch.distributed", "packages and modules whose calls are kept"
    )
    max_restarts: NonNegative = care(
        0, "number of restarts of the ranks per launch after a rank has failed; 0: never", measured=0
    )
    exit_duration: Rate = care(
        0.0,
        "minutes since the launch after which the run saves and ends; 0: never",
        measured=0,
        compared=True,
    )
    profile_iters: Iterations = care(
        "", "iterations that torch's profiler traces, such as 10-12 or 10,20; empty: none", measured=""
    )
    profile_ranks: RankList = care("0", "ranks of PROFILE_ITERS and MEMORY_SNAPSHOT: '0', '0,3', or all")
    memory_snapshot: Iterations = care(
        "",
        "iterations whose allocations on the GPU are recorded for pytorch.org/memory_viz, as PROFILE_ITERS",
        measured="",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        for name in ("profile_iters", "memory_snapshot"):
            yield from self._traced_problems(name)
        for name, others in (("profile_ranks", ", or all"), ("dump_ranks", "")):
            ranks = [int(rank) for rank in getattr(self, name).split(",") if rank not in ("", "all")]
            if missing := [rank for rank in ranks if rank >= self.world_size]:
                rule = f"there is no rank {missing[0]}, the run has {self.world_size}"
                yield self.problem(name, rule, f"name ranks from 0 to {self.world_size - 1}{others}")
        rolls_back = self.spike_action == "rollback"
        yield from self.broken(
            (self.dump_ranks and not self.dump_iters, "dump_ranks",
             "has no effect without DUMP_ITERS", "set DUMP_ITERS to the iterations"),
            (rolls_back and not self.save_interval, "spike_action",
             "goes back to a checkpoint, but SAVE_INTERVAL=0 saves none before the end",
             "set SAVE_INTERVAL, or SPIKE_ACTION=log"),
            (rolls_back and self.keep_last == 1, "keep_last",
             "keeps no checkpoint from before a spike that comes right after a save, and"
             " SPIKE_ACTION=rollback goes back to one", "set KEEP_LAST=2 or more, or 0 for all"),
        )  # fmt: skip

    def _traced_problems(self, name: str) -> Iterator[str]:
        """PROFILE_ITERS or MEMORY_SNAPSHOT; launch/machine_checks.py checks what the device supports."""
        ranges, last_of_run = iteration_ranges(getattr(self, name)), self.train_iters
        most = max((last - first + 1 for first, last in ranges), default=0)
        return self.broken(
            (any(first > last_of_run for first, _ in ranges), name,
             f"is after TRAIN_ITERS={last_of_run}", f"name iterations up to {last_of_run}"),
            (most > _MOST_TRACED, name,
             f"are {most} iterations, more than a viewer can load", f"name at most {_MOST_TRACED}"),
        )  # fmt: skip
