"""Names slow ranks of a training job from their phase times. No torch.

All ranks wait for a slow rank, so only times that exclude waiting identify it. A rank is compared with its
peers, which do the same work; a rank without peers is compared with all other ranks and its own past. A rank
counts as slow only if it is slow over several samples (the more the times vary, the more samples are needed).
To count on a host that other programs keep fully busy, a rank must also be slow for at least a minute.
Shapes: S samples, R ranks, N values of a rank.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from moe_exp.host.files import write_json
from moe_exp.watch.excluded_nodes import exclude_if_possible

Floats = NDArray[np.float64]
logger = logging.getLogger(__name__)

PHASES = ("data", "forward", "backward", "optimizer")
# of a rank in a sample: seconds per iteration, and the squared relative standard error of all phases' sum
COLUMNS = (*PHASES, "waits", "variance")
# after COLUMNS: seconds of processors since the last sample: of this process, of all programs, and of none
PROCESSORS = ("own", "busy", "idle")
_LENGTHS = (5, 10, 20)  # samples that are tested together
_LEAST, _OVER = math.log(1.1), math.log(1.05)  # a rank is slow from the first on, until below the second
_CERTAIN = 4.5  # standard errors
_LOAD_SAMPLES, _LOADED = 10, 3  # other programs overload a host if they did in 3 of the last 10 samples
_LOADED_SECONDS = 60.0  # for which a rank has to be slow there


def differences(table_RN: Floats, works: Sequence[str]) -> Floats:
    """Compares each rank with the median of its peers. Returns the differences in COLUMNS (variances are
    added). The last column is the log ratio of the times without waiting (sums over PHASES).
    """
    own_R1 = table_RN[:, : len(PHASES)].sum(axis=1, keepdims=True)
    values_RN = np.concatenate([table_RN, np.log(np.maximum(own_R1, 1e-9))], axis=1)
    others_RN = median_of_others(values_RN)
    for work in set(works):
        ranks = [rank for rank, other in enumerate(works) if other == work]
        if len(ranks) > 1:
            others_RN[ranks] = median_of_others(values_RN[ranks])
    others_RN[:, -2] *= -1
    return values_RN - others_RN


def median_of_others(values_RN: Floats) -> Floats:
    """For each rank, the median over all other ranks (at least one)."""
    order, places = np.sort(values_RN, axis=0), values_RN.argsort(axis=0).argsort(axis=0)
    # without the rank itself, all values behind its place move up
    low, high = (
        np.where(middle < places, order[middle], order[middle + 1])
        for middle in ((len(order) - 2) // 2, (len(order) - 1) // 2)
    )
    return (low + high) / 2


def slow_ranks(gaps_SRN: Floats, ratios_SR: Floats, share_R: Floats) -> dict[int, dict[str, Any]]:
    """Slow ranks in the last samples, each with its slowest `phase` and slowdown `factor`. `gaps_SRN`
    and `ratios_SR` come from `differences`. If a rank has no peers, its past median has been
    subtracted from its values. `share_R`: variance of that median divided by the variance of one sample.
    """
    slow: dict[int, dict[str, Any]] = {}
    is_slow_now_R = np.median(ratios_SR[-_LENGTHS[0] :], axis=0) > _LEAST
    for number in _LENGTHS:
        if number > len(ratios_SR) or not is_slow_now_R.any():  # which saves most of the time
            break
        last_SR, middle_RN = ratios_SR[-number:], np.median(gaps_SRN[-number:], axis=0)
        middle_R = np.median(last_SR, axis=0)
        # The factors are those of normal noise.
        between_R, long_R = (
            (1.48 * np.median(np.abs(parts_SR - np.median(parts_SR, axis=0)), axis=0)) ** 2
            for parts_SR in (last_SR, ratios_SR)
        )
        # Many samples may contain changes; noise within samples may be the same on all ranks.
        other_R = np.full_like(long_R, np.quantile(gaps_SRN[..., -1], 0.75))
        if len(ratios_SR) >= _LENGTHS[1]:
            other_R = np.minimum(np.maximum(long_R, np.median(long_R)), other_R)
        noise_R = np.maximum(np.maximum(between_R, np.median(between_R)), other_R)
        limit_R = np.maximum(_LEAST, _CERTAIN * 1.25 * np.sqrt(noise_R * (1 / number + share_R)))
        is_slow_R = is_slow_now_R & (middle_R > limit_R)
        # in nearly all samples; and the others wait for it, or no waits are measured
        is_slow_R &= np.quantile(last_SR, 0.25, axis=0) > _OVER
        is_slow_R &= middle_RN[:, len(PHASES)] <= 0
        for rank in np.flatnonzero(is_slow_R).tolist():
            phase = PHASES[np.argmax(middle_RN[rank, : len(PHASES)])]
            slow.setdefault(rank, {"phase": phase, "factor": round(math.exp(middle_R[rank]), 3)})
    return slow


def processor_seconds() -> NDArray[np.float64]:
    """Processor seconds (see PROCESSORS): `own` since this process started, `busy` and `idle` since boot."""
    times = psutil.cpu_times()
    idle = times.idle + getattr(times, "iowait", 0.0)
    return np.array([time.process_time(), sum(times[:8]) - idle, idle])  # further fields are parts of others


class SlowRanks:
    """Tracks slow ranks; writes all ranks' times to `table`. `places`: host, device and work of each rank."""

    def __init__(self, places: Sequence[Mapping[str, str]], table: Path):
        self._places, self._table, self._written = places, table, -math.inf
        self._works = [place["work"] for place in places]
        self._is_alone_R = np.array([self._works.count(work) == 1 for work in self._works])
        self._recent: deque[Floats] = deque(maxlen=_LENGTHS[-1])  # from `differences`
        self._past: deque[Floats] = deque(maxlen=60)  # before that, while no rank was slow
        self._slow = set[int]()
        self._since: dict[int, float] = {}  # when a rank was first found
        self._host_R = np.unique([place["host"] for place in places], return_inverse=True)[1]
        self._loaded: deque[NDArray[np.bool_]] = deque(maxlen=_LOAD_SAMPLES)

    def add(self, rows: Sequence[Sequence[float]]) -> list[tuple[str, dict[str, Any]]]:
        """Adds a sample (COLUMNS and PROCESSORS per rank). Returns events: ranks became slow or recovered."""
        table_RN, load_RN = np.split(np.array(rows), [len(COLUMNS)], axis=1)
        if not self._slow and len(self._recent) >= _LENGTHS[0]:
            self._past.append(self._recent[-_LENGTHS[0]])
        self._recent.append(differences(table_RN, self._works))
        recent_SRN, num_past = np.stack(self._recent), len(self._past)
        if self._is_alone_R.any():
            usual_RN = np.median(self._past, axis=0) if num_past >= _LENGTHS[0] else recent_SRN
            usual_RN = np.where(self._is_alone_R[:, None], usual_RN, 0.0)
            usual_RN[..., -2] = 0.0  # variance
            recent_SRN -= usual_RN
        found = slow_ranks(recent_SRN[..., :-1], recent_SRN[..., -1], self._is_alone_R / max(1, num_past))
        is_over_R = np.median(recent_SRN[-_LENGTHS[0] :, :, -1], axis=0) < _OVER
        # Other programs that leave no processor of a host free slow its ranks at random.
        own_R = np.bincount(self._host_R, load_RN[:, 0])[self._host_R]
        busy_R, idle_R = load_RN[:, 1], load_RN[:, 2]
        all_R, now = busy_R + idle_R, time.monotonic()
        self._loaded.append((idle_R < 0.05 * all_R) & (busy_R - own_R > 0.1 * all_R))
        is_loaded_R = np.sum(self._loaded, axis=0) >= _LOADED
        self._since = {rank: at for rank, at in self._since.items() if not is_over_R[rank]}
        changes = [
            ("slow_rank", rank, more)
            for rank, more in found.items()
            if now - self._since.setdefault(rank, now) >= _LOADED_SECONDS * is_loaded_R[rank]
            and rank not in self._slow
        ]
        changes += [("slow_rank_end", rank, {}) for rank in self._slow if is_over_R[rank]]
        self._slow ^= {rank for _, rank, _ in changes}
        if changes or now - self._written > 60:
            self._written, names = now, ("own time / peers'", *COLUMNS[:-1])
            values_RN = np.column_stack([np.exp(self._recent[-1][:, -1]), 1e3 * table_RN[:, :-1]])
            numbers = [dict(zip(names, values, strict=True)) for values in values_RN.tolist()]
            ranks = [{"rank": rank, **self._places[rank], **one} for rank, one in enumerate(numbers)]
            with suppress(OSError):  # a full disk, which the metrics report
                write_json(self._table, {"ranks": ranks})
        return [(name, {"rank": rank, **self._places[rank], **more}) for name, rank, more in changes]


def report(name: str, found: Mapping[str, Any], excluded: Path | None) -> None:
    """Logs an event of `SlowRanks.add`. Adds a slow rank's host to the list `excluded`, if given."""
    who = f"rank {found['rank']} ({found['device']})"
    if name == "slow_rank_end":
        logger.info("%s: %s is no longer slow", found["host"], who)
        return
    why = f"{who} is slow, mainly in {found['phase']}: {found['factor']:.2f} times the time of its peers"
    logger.warning("%s: %s", found["host"], why)
    if excluded is not None:
        exclude_if_possible(excluded, found["host"], why)
