"""Reliability and debugging settings: checks, timeouts, restarts and recordings."""

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
    iteration_ranges,
)
from moe_exp.config.traits import care

# The trace of one iteration of a large model is hundreds of MB.
_MOST_TRACED = 100


class ReliabilitySettings(OutputSettings):
    """Settings of the section Reliability and debugging."""

    fingerprints: bool = care(
        True, "store a fingerprint of each tensor in checkpoints, and verify the fingerprints after loading"
    )
    check_interval: NonNegative = care(
        0,
        "iterations between comparisons of the parameters across replicas; 0: compared only at each start, "
        "before the first iteration",
    )
    dump_iters: Iterations = care(
        "",
        "iterations after which parameters, gradients and moments are written to RUN_DIR/RUN_NAME/dumps, "
        "such as 10,20 or 10-12; empty: none",
    )
    dump_ranks: WholeNumbers = care("", "ranks that write the dumps of DUMP_ITERS, such as 0,4; empty: all")
    disk_check: Literal["run", "one", "none"] = care(
        "run",
        "disk space that must be free at start; run: for all checkpoints of a new run, or for the next "
        "checkpoint of a resumed run; one: for one checkpoint (for users who delete old ones themselves); "
        "none: not checked",
    )
    max_bad_steps: NonNegative = care(
        10,
        "number of consecutive iterations with a non-finite loss or gradient after which the run fails; "
        "0: never",
        compared=True,
    )
    spike_action: Literal["none", "log", "rollback"] = care(
        "log",
        "action at a loss spike; none: nothing; log: write an event; rollback: also return to a checkpoint "
        "before the spike and skip its batches",
        compared=True,
    )
    max_rollbacks: NonNegative = care(
        5,
        "maximum number of rollbacks, counted separately for loss spikes and for silent corruption; the run "
        "fails if one more is needed",
        compared=True,
    )
    sdc_check_every: NonNegative = care(
        0,
        "iterations between checks for silent corruption: each rank's gradients are computed again, by "
        "that rank and another; if the results differ, the run restarts from an earlier checkpoint; 0: off",
    )
    preflight: bool = care(
        False,
        "check arithmetic, memory, links, disks and clocks of every node before training; the job ends if a "
        "node fails",
    )
    preflight_timeout: Positive = care(
        300, "maximum time for which nodes wait for each other at the start of the preflight (seconds)"
    )
    preflight_slow: float = care(
        0.7, "a node counts as slow below this fraction of the other nodes' median speed", gt=0, le=1
    )
    hang_timeout: Timeout = care(
        "auto",
        "time limit of an iteration (seconds), after which stacks are written to hang/ and the ranks exit "
        "for a restart; auto: ten times the median iteration time, at least 180; none: no limit",
    )
    hang_timeout_other: OptionalPositive = care(
        1500,
        "time limit (seconds) for each startup phase, each of the first iterations, each evaluation batch "
        "and each save; if the limit is exceeded, the ranks exit as with HANG_TIMEOUT; none: no limit",
    )
    slow_rank_every: NonNegative = care(
        5, "iterations between comparisons of phase times to find slow ranks (event slow_rank); 0: off"
    )
    exclude_slow: bool = care(
        False, "add the host of a slow rank to the list of excluded nodes, which later jobs avoid"
    )
    trace_calls_from: NonNegative = care(
        0,
        "first iteration in which every rank records its latest function calls in hang/calls/ (slows "
        "training); 0: never",
    )
    trace_calls_mb: Positive = care(
        16, "size of each rank's call record (MB); new calls replace the oldest calls"
    )
    trace_calls_in: str = care(
        "moe_exp,megatron,torch.distributed", "packages and modules whose functions are in the call record"
    )
    max_restarts: NonNegative = care(
        0, "maximum number of times that a launch restarts all ranks after one fails; 0: never"
    )
    exit_duration: Rate = care(
        0.0,
        "time after launch at which the run saves and exits (minutes); 0: never",
        compared=True,
    )
    profile_iters: Iterations = care(
        "", "iterations traced by the PyTorch profiler, such as 10-12 or 10,20; empty: none"
    )
    profile_ranks: RankList = care(
        "0", "ranks on which PROFILE_ITERS and MEMORY_SNAPSHOT record, such as 0 or 0,3; all: every rank"
    )
    memory_snapshot: Iterations = care(
        "",
        "iterations whose GPU memory allocations are recorded for pytorch.org/memory_viz, such as 10-12; "
        "empty: none",
    )

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        last_of_run = self.train_iters
        for name in ("profile_iters", "memory_snapshot"):  # machine_checks.py checks the device's support
            ranges = iteration_ranges(getattr(self, name))
            most = max((last - first + 1 for first, last in ranges), default=0)
            yield from self.broken(
                (any(first > last_of_run for first, _ in ranges), name,
                 f"must not exceed TRAIN_ITERS={last_of_run}", f"choose iterations from 1 to {last_of_run}"),
                (most > _MOST_TRACED, name,
                 f"has a range of {most} iterations, too many to display",
                 f"limit each range to {_MOST_TRACED}"),
            )  # fmt: skip
        for name, others in (("profile_ranks", ", or set PROFILE_RANKS=all"), ("dump_ranks", "")):
            ranks = [int(rank) for rank in getattr(self, name).split(",") if rank not in ("", "all")]
            if missing := [rank for rank in ranks if rank >= self.world_size]:
                rule = f"rank {missing[0]} does not exist in a run of {self.world_size} ranks"
                yield self.problem(name, rule, f"list ranks from 0 to {self.world_size - 1}{others}")
        rolls_back = self.spike_action == "rollback"
        yield from self.broken(
            (0 < self.slow_rank_every < 5, "slow_rank_every",
             "too few iterations to detect slow ranks", "set SLOW_RANK_EVERY=5 or more, or 0 to turn it off"),
            (self.exclude_slow and not self.slow_rank_every, "exclude_slow",
             "has no effect with SLOW_RANK_EVERY=0", "set SLOW_RANK_EVERY=5"),
            (self.dump_ranks and not self.dump_iters, "dump_ranks",
             "has no effect without DUMP_ITERS", "set DUMP_ITERS"),
            (self.sdc_check_every and self.save_interval % self.sdc_check_every, "save_interval",
             f"must be a multiple of SDC_CHECK_EVERY={self.sdc_check_every}, so that checkpoints are checked",
             "change one of the two"),
            (self.sdc_check_every and self.keep_last == 1, "keep_last",
             "keeps only the last save, but SDC_CHECK_EVERY may need an earlier checkpoint",
             "set KEEP_LAST=2 or more, or 0 to keep all"),
            (rolls_back and not self.save_interval, "spike_action",
             "requires checkpoints during the run, but SAVE_INTERVAL=0",
             "set SAVE_INTERVAL, or SPIKE_ACTION=log"),
            (rolls_back and self.keep_last == 1, "keep_last",
             "keeps only the last save, but SPIKE_ACTION=rollback may need an earlier checkpoint",
             "set KEEP_LAST=2 or more, or 0 to keep all"),
        )  # fmt: skip
