"""Compares the stacks of all ranks to find the ranks that block the other ranks.

In a hang, nearly all ranks wait in a collective that a few ranks have not reached. The following rules
decide which ranks are suspected. The rule with the strongest evidence comes first:

1. The rank's process is stopped, gone or under a debugger, or its launcher has not answered.
2. The rank is not waiting, while other ranks are.
3. The rank is in an earlier iteration than other ranks.
4. Torch's flight recorder shows that the rank has started fewer collectives of a group than another rank.
5. The rank's stack differs from the stack that the majority of ranks share.

Rules 1 and 2 are always applied. Rules 3 to 5 are each applied only if no earlier rule suspects a rank.
"""

import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from moe_exp.host.files import write_atomically
from moe_exp.runs.run_folder import RunFolder
from moe_exp.watch.hangs import files
from moe_exp.watch.hangs.dump import DISK, GONE, STOPPED, TRACED
from moe_exp.watch.hangs.files import MAIN, Frame, RankDump, read_answers, read_dumps

_IN_TORCH = (
    "torch/distributed/distributed_c10d.py", "torch/distributed/c10d_logger.py",
    "torch/distributed/_functional_collectives.py",
)  # fmt: skip
_COLLECTIVE_CODE = (
    *_IN_TORCH, "moe_exp/layers/dispatcher/collectives.py", "moe_exp/host/gloo.py", "p2p_communication.py",
)  # fmt: skip
# Host calls that wait for kernels and collectives on a GPU
_DEVICE_WAITS = (".item()", ".tolist()", ".cpu()", "synchronize(")
_NATIVE_WAITS = (
    "c10d::", "gloo::", "nccl", "cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize",
)  # fmt: skip
_ABSENT = "absent"
_STATES = {
    STOPPED: "is stopped (by a signal such as SIGSTOP)",
    TRACED: "is under a debugger",
    GONE: "has ended",
    _ABSENT: "was not found: its launcher did not answer, or the rank has ended",
}
_SHOWN_FRAMES, _SHOWN_CALLS = 12, 10
_STILL_SECONDS = 60.0  # if all ranks have been in their phase this long, it may be an unreported hang
FIRST_SECONDS = 15.0  # timeout for the first launcher; a network file system may lag
_ALL_SECONDS = 120.0


def main_stack(dump: RankDump) -> tuple[Frame, ...]:
    """Main thread's Python frames, innermost first. In a GPU backward pass, autograd's frames come first."""
    frames = next((thread.frames for thread in dump.threads if thread.name == MAIN), ())
    if any(frame.name.endswith("_engine_run_backward") for frame in frames[:2]):
        for thread in dump.threads:
            is_autograd = any(frame.file.endswith("torch/autograd/function.py") for frame in thread.frames)
            if thread.name != MAIN and is_autograd:
                return thread.frames + frames
    return frames


def is_waiting(dump: RankDump) -> bool:
    """Whether a rank waits for a torch collective (in the call or in `wait`) or for its own GPU work."""
    if not (frames := main_stack(dump)):
        return False
    source = dump.facts.get("source", "")
    in_native = any(name in function for function in dump.native for name in _NATIVE_WAITS)
    if in_native or frames[0].file.endswith(_IN_TORCH):
        return True
    if not frames[0].is_in_packages:
        return False
    # on a CPU these calls return at once
    on_gpu = dump.facts.get("gpus", "0") != "0"
    return ".wait(" in source or (on_gpu and any(text in source for text in _DEVICE_WAITS))


def where(dump: RankDump) -> str:
    """Describes the function that a rank is executing, and whether it is in a collective."""
    if not (frames := main_stack(dump)):
        return f"has no stack ({dump.facts.get('without', 'no tool returned one')})"
    named = (frame for frame in frames if not frame.key[0].startswith("<"))  # no <listcomp>
    inside = next((frame for frame in named if frame.file.endswith(_COLLECTIVE_CODE)), None)
    if is_waiting(dump):
        return f"waits in {inside or frames[0]}"
    if inside is not None:
        return f"is in {frames[0]}, inside {inside}, but does not wait for others"
    # for a library's function or a patch, the calling function of the packages is more informative
    ours = next((frame for frame in frames if frame.is_in_packages), frames[0])
    called = "" if ours is frames[0] else f", called by {ours}"
    return f"is in {frames[0]}{called}, outside any collective"


def groups_of(dumps: Iterable[RankDump]) -> list[list[RankDump]]:
    """Groups ranks with the same stack, largest group first."""
    return _grouped(dumps, lambda dump: tuple(frame.key for frame in main_stack(dump)))


def _grouped(dumps: Iterable[RankDump], key: Callable[[RankDump], object]) -> list[list[RankDump]]:
    groups = defaultdict(list)
    for dump in dumps:
        groups[key(dump)].append(dump)
    return sorted(groups.values(), key=lambda group: (-len(group), group[0].rank))


def apart(dumps: Sequence[RankDump]) -> dict[int, str]:
    """Applies the rules at the top of this file. Returns a finding for each suspected rank."""
    found = _by_state(dumps)
    waiting = [dump for dump in dumps if is_waiting(dump)]
    for dump in dumps:
        if dump.rank not in found and waiting and not is_waiting(dump):
            asleep = f"; state {DISK}, in the kernel's {dump.facts.get('kernel function', 'code')}"
            found[dump.rank] = where(dump) + (asleep if dump.facts.get("state") == DISK else "")
    if found:
        return {dump.rank: found[dump.rank] for dump in dumps if dump.rank in found}
    newest = max((dump.iteration for dump in dumps), default=0)
    if late := [dump for dump in dumps if dump.iteration < newest]:
        return {d.rank: f"is in iteration {d.iteration}, others in {newest}; it {where(d)}" for d in late}
    # a group's name may be reused for other ranks: name and ranks together identify it
    most: dict[tuple[str, str], Mapping[str, object]] = {}
    for last in (last for dump in dumps for last in dump.collectives):
        key = last["group"], last["ranks"]
        if key not in most or last["number"] > most[key]["number"]:
            most[key] = last
    for dump in dumps:
        for last in dump.collectives:
            others = most[last["group"], last["ranks"]]
            if last["number"] < others["number"]:
                group = last["description"] or f"group {last['group']}"
                mine = f"has started {last['number']} collectives of {group}"
                found[dump.rank] = f"{mine}, others {others['number']} ({others['name']}); it {where(dump)}"
    if found:
        return found
    # without a majority, no stack is the usual one
    largest, *smaller = groups_of(dumps) or [[]]
    minority = [dump for one in smaller for dump in one] if 2 * len(largest) > len(dumps) else []
    return {dump.rank: where(dump) for dump in minority}


def _by_state(dumps: Sequence[RankDump]) -> dict[int, str]:
    """Describes the state of each rank whose process is stopped, traced, gone or absent."""
    found = {}
    for dump in dumps:
        if state := _STATES.get(dump.facts.get("state", "")):
            found[dump.rank] = f"{state}; it {where(dump)}" if main_stack(dump) else state
    return found


class Summary(NamedTuple):
    """Summary of the launchers' answers to a request for stacks."""

    named: Mapping[int, str]  # suspected ranks with the finding
    line: str  # the suspected ranks in a few words
    short: str  # for screen and log
    whole: str  # `short` with the stacks


def summarize(folder: Path) -> Summary:
    """Summarizes a folder of answers, RUN/hang/TIME; raises ValueError if the folder has no stacks."""
    dumps, answers, request = read_dumps(folder), read_answers(folder), files.latest_request(folder)
    if not dumps and not answers:
        fix = "specify a folder in RUN/hang, or a run folder to request new stacks from its launchers"
        raise ValueError(f"stacks={folder}: has no stacks. Fix: {fix}.")
    for rank in sorted(set(range(answers[0].world_size if answers else 0)) - {dump.rank for dump in dumps}):
        # torchrun numbers ranks node by node
        node = rank // (answers[0].world_size // answers[0].nnodes)
        host = next((answer.host for answer in answers if answer.node == node), f"node {node}")
        dumps.append(RankDump(rank, {"state": _ABSENT, "host": host}))
    is_asked = request is not None and request.kind == "stacks"
    # in a running job, ranks are normally in different places, which is no reason to suspect them
    is_still = all(float(dump.facts.get("seconds in it", 0.0)) >= _STILL_SECONDS for dump in dumps)
    named = apart(dumps) if is_still or not is_asked else _by_state(dumps)
    by_rank = {dump.rank: dump for dump in dumps}
    head = [request.reason] if request else []
    nodes = set(range(answers[0].nnodes)) if answers else set()
    if silent := sorted(nodes - {answer.node for answer in answers if answer.done}):
        whose = "launcher of node" if len(silent) == 1 else "launchers of nodes"
        head += [f"no answer from the {whose} {_numbers(silent)}"]
    if is_asked:
        head += ["requested by a user: the run continues, and ranks may be in different places"]
    if named or not is_asked:
        head += ["ranks that differ from the others:" if named else "no rank stands out"]
    short = []
    for dump, reason in ((by_rank[rank], reason) for rank, reason in named.items()):
        facts, frames = dump.facts, main_stack(dump)
        moment = facts.get("phase", "unknown")
        if "iteration" in facts:
            moment = f"iteration {facts['iteration']}, {moment} for {facts['seconds in it']} s"
        head += [f"  rank {dump.rank} on {dump.host} ({moment}): {reason}"]
        state = _STATES.get(facts.get("state", ""), "").partition(" (")[0]
        place = state or (f"in {frames[0]}" if frames else "no stack")
        short.append(f"rank {dump.rank} on {dump.host} ({place})")
    head += ["location of all ranks:"]
    for group in _grouped(dumps, where):
        hosts = ", ".join(sorted({dump.host for dump in group}))
        head.append(f"  {_ranks(group)} on {hosts}: {where(group[0])}")
    # this line goes into logs and alerts, so it names at most three ranks
    line = "; ".join(short[:3]) or "no rank stands out"
    line += f"; and {len(named) - 3} more" if len(named) > 3 else ""
    return Summary(named, line, "\n".join(head), "\n".join([*head, "", *_details(dumps, named)]))


def _details(dumps: Sequence[RankDump], named: Mapping[int, str]) -> Iterator[str]:
    """Yields stacks, latest calls of suspected ranks (if none: of all ranks), and failures of stack tools."""
    # one stack per group: thousands of ranks may be in the same place
    for group in groups_of(dumps):
        frames = main_stack(group[0])
        yield f"{_ranks(group)}: {where(group[0])}"
        yield from (f"    {frame}" for frame in frames[:_SHOWN_FRAMES])
        if len(frames) > _SHOWN_FRAMES:
            yield f"    ... {len(frames) - _SHOWN_FRAMES} more in rank_{group[0].rank:05d}.txt"
        if group[0].native:
            yield f"    in C: {' < '.join(name.partition('<')[0] for name in group[0].native[:6])}"
        yield ""
    for dump in dumps:
        if dump.calls and (dump.rank in named or not named):
            yield f"latest calls of rank {dump.rank} (seconds of its host's clock):"
            yield from (f"    {call}" for call in dump.calls[-_SHOWN_CALLS:])
            yield ""

    def reason(dump: RankDump) -> str:
        return f"by {dump.facts.get('tool')} ({dump.facts['without']})"

    for group in _grouped((dump for dump in dumps if "without" in dump.facts), reason):
        yield f"stacks of {_ranks(group)} {reason(group[0])}"


def _ranks(group: Sequence[RankDump]) -> str:
    return f"{'rank' if len(group) == 1 else 'ranks'} {_numbers([dump.rank for dump in group])}"


def _numbers(numbers: Sequence[int]) -> str:
    """Formats sorted numbers as ranges: 0, 1, 2, 3, 5 becomes `0-3, 5`."""
    # consecutive numbers have the same difference to their index
    runs = groupby(enumerate(numbers), key=lambda placed: placed[1] - placed[0])
    ends = ((found[0][1], found[-1][1]) for found in (list(run) for _, run in runs))
    return ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)


def stacks_of(place: Path, *, first_seconds: float = FIRST_SECONDS) -> tuple[Summary, Path]:
    """Requests new stacks if `place` is a run folder. Otherwise, reads the stacks in `place`, which must be a
    folder RUN/hang/TIME. Returns the summary and the folder of the stacks. Raises ValueError if no launcher
    answers within `first_seconds` or the folder has no stacks.
    """
    run = RunFolder(place)
    if not run.config.exists():
        return summarize(place), place
    folder = run.path / "hang" / files.ask(run.path / "hang", "stacks", "stacks on demand").folder
    if not files.wait_for_answers(folder, first_seconds=first_seconds, all_seconds=_ALL_SECONDS):
        shutil.rmtree(folder)
        fix = "check that the job is running; under plain torchrun, which has no launcher, use py-spy"
        rule = f"no launcher of this run answered in {first_seconds:.0f} s"
        raise ValueError(f"stacks={place}: {rule}. Fix: {fix}.")
    summary = summarize(folder)
    write_atomically(folder / "summary.txt", summary.whole + "\n")
    return summary, folder
