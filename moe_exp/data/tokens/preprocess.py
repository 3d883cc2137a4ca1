"""Files of documents to .bin/.idx by worker processes: the same bytes for any number, after any crash.

The inputs are cut into parts (parts.py), workers make them in any order, and this process joins them in the
order of the inputs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from multiprocessing.connection import wait as wait_for
from pathlib import Path
from typing import Any

from moe_exp.config import setting_error
from moe_exp.data.documents import Tally, text_of
from moe_exp.data.kinds import FILES, TextRule, is_compressed, is_stream
from moe_exp.data.stage import MAKE_AGAIN, Stage, Unfinished, check_free_disk, run_stage
from moe_exp.data.tokens.encoders import BACKENDS, ONE_THREAD, Encoders, Probe, one_thread, probe_backend
from moe_exp.data.tokens.joined_parts import TASKS, JoinedParts
from moe_exp.data.tokens.parts import (
    Part,
    PartEncoder,
    PartSettings,
    default_part_bytes,
    is_complete,
    part_lines,
    plan_parts,
)
from moe_exp.host.devices import num_cores
from moe_exp.host.files import bytes_text, read_json, write_json
from moe_exp.host.processes import worker_context
from moe_exp.host.progress import print_summary, progress

logger = logging.getLogger(__name__)

_SAMPLED_PLACES, _SAMPLE_BYTES, _DRY_RUN_SAMPLE_BYTES = 8, 2**16, 2**20
_POLL_SECONDS = 0.5
_PENDING_PER_WORKER = 4  # parts that have been submitted: each wait() goes through all of them
_INDEX_BYTES_PER_DOCUMENT = 20


def tokenized_prefix(output_prefix: str | Path, json_key: str = "text") -> Path:
    """The prefix of the token files by Megatron's rule: PREFIX_text_document."""
    return Path(f"{output_prefix}_{json_key}_document")


def tokenize_files(
    inputs: Sequence[Path],
    output: Path,
    settings: PartSettings,
    *,
    workers: int = 1,
    backend: str = "auto",
    start_over: bool = False,
    part_bytes: int | None = None,
) -> dict[str, Any]:
    """Writes `output`.bin, .idx and .manifest.json, a sequence per document in order; returns the manifest.

    Args:
        inputs: files of the kinds of `moe_exp.data.kinds`.
        output: path without suffix, see `tokenized_prefix`.
        settings: how a text becomes tokens.
        workers: processes; with 1 it is this one. The output does not depend on it.
        backend: auto, gigatoken or tokenizers (the package that defines the tokenizer).
        start_over: replace what is there.
        part_bytes: of input per part; by default see `default_part_bytes`.

    Raises:
        ValueError: a setting is wrong; a line is no document (it names file and line); a worker died; the
            disk is too small.
    """
    _check_how(workers, backend)
    part_bytes = part_bytes or default_part_bytes(inputs)
    what: dict[str, Any] = {"settings": stage_settings(settings, part_bytes), "inputs": inputs}
    what |= {"is_folder": False, "suffixes": (".bin", ".idx")}
    with run_stage("tokenize", output, **what, start_over=start_over) as stage:
        if stage.was_done:
            return stage.manifest or {}
        for leftover in stage.folder.glob("*.tmp"):
            leftover.unlink()
        if (stage.folder / TASKS).exists():
            tasks = read_json(stage.folder / TASKS, fix=MAKE_AGAIN)["tasks"]
            rule, fix = f"{output} was begun by {tasks} tasks", f"give --tasks {tasks}, or --start-over"
            raise setting_error("tasks", "", rule, fix)
        parts = plan_parts(inputs, part_bytes)
        joined = JoinedParts(stage.folder, output.name, settings)
        joined.resume(parts, output.with_name(output.name + ".bin"))
        with _Workers(settings, min(usable(workers), max(1, len(parts)))) as pool:
            probe = partial(pool.probe, backend)
            chosen = pinned_backend(stage, probe, backend, inputs, settings, pool.number)
            _make_parts(pool, chosen, parts, joined, stage.folder)
        return publish(stage, joined, parts, backend=chosen)


def stage_settings(settings: PartSettings, part_bytes: int) -> dict[str, Any]:
    """Everything that the files depend on besides the inputs."""
    return settings.facts() | {"part_bytes": part_bytes}


def publish(
    stage: Stage,
    joined: JoinedParts,
    parts: Sequence[Part],
    *,
    backend: str,
    hashes: Mapping[Path, str] | None = None,
) -> dict[str, Any]:
    """Writes the index of all parts, which are joined, and finishes the stage; returns the manifest.

    Args:
        stage, joined, parts: what was made.
        backend: by which.
        hashes: as of `Stage.finish_files`.

    Raises:
        ValueError: there is no document, or counts do not agree.
    """
    counts = joined.counts
    if not counts.tally.num_documents:
        rule = "the inputs have no documents"
        raise setting_error("input", stage.inputs[0], rule, "give files with text")
    joined.write_index(parts)
    facts = {
        "num_tokens": counts.num_tokens,
        "num_eods": counts.num_eods,
        "dtype": joined.settings.dtype.name,
    }
    facts |= {"backend": backend, "num_checked": counts.num_checked, "num_rerouted": counts.num_rerouted}
    facts |= counts.tally.to_json() | {"tokenizer": joined.settings.tokenizer.recorded()}
    return stage.finish_files([joined.bin_path, joined.idx_path], hashes=hashes, **facts)


def _check_how(workers: int, backend: str) -> None:
    if workers < 1:
        raise setting_error("workers", workers, "must be at least 1", "give 1 or more")
    check_backend(backend)


def check_backend(backend: str) -> None:
    """ValueError if there is none of that name."""
    if backend not in BACKENDS:
        raise setting_error("backend", backend, f"must be one of {', '.join(BACKENDS)}", "choose one of them")


def usable(workers: int) -> int:
    """At most as many as this process has cores."""
    available = num_cores()
    if workers > available:
        what = "%d workers asked for, %d are started: as many as this process has cores"
        logger.info(what, workers, available)
    return min(workers, available)


def pinned_backend(
    stage: Stage,
    probe_of: Callable[[Sequence[str]], Probe],
    requested: str,
    inputs: Sequence[Path],
    settings: PartSettings,
    num_apart: int,
) -> str:
    """The backend of the call that began; chosen, and the disk checked, where this is the first.

    Args:
        stage: in whose folder it is kept.
        probe_of: tries a sample of the texts.
        requested: see `tokenize_files`.
        inputs, settings: what is to be tokenized, and how.
        num_apart: parts that are on the disk before they are joined.
    """
    path = stage.folder / "backend.json"
    if path.exists():
        begun: str = read_json(path, fix=MAKE_AGAIN)["backend"]
        if requested not in ("auto", begun):
            rule = f"{stage.output} was begun with {begun}"
            raise setting_error("backend", requested, rule, f"give --backend {begun}, or --start-over")
        logger.info("backend: %s, as %s was begun with it", begun, stage.output)
        return begun
    sample = sample_texts(inputs, settings.json_key, _SAMPLE_BYTES, settings.rule)
    probe = probe_of(sample)
    logger.info("backend: %s, %s", probe.backend, probe.reason)
    estimate = _Estimate(inputs, sample, probe, settings, num_apart)
    check_free_disk(stage.output.parent, estimate.disk_bytes, f"{stage.output.name}.bin, by a sample,")
    write_json(path, {"backend": probe.backend, "reason": probe.reason})
    return probe.backend


def _make_parts(
    pool: _Workers, backend: str, parts: Sequence[Part], joined: JoinedParts, folder: Path
) -> None:
    """Makes the parts that are not there, and joins all in order, as soon as it is one's turn."""
    missing = [part for part in parts[joined.num_parts :] if not is_complete(part, folder)]
    done = sum(part.num_bytes for part in parts) - sum(part.num_bytes for part in missing)
    waiting = {part.index for part in missing}

    def join() -> None:
        while joined.num_parts < len(parts) and joined.num_parts not in waiting:
            joined.append(parts[joined.num_parts])

    with progress("tokenizing", sum(part.num_bytes for part in parts), done=done) as advance:
        join()
        for part in pool.encode(backend, missing, folder, advance):
            waiting.remove(part.index)
            join()


class _Workers:
    """One worker in this process, or several processes; for use in a `with` statement."""

    def __init__(self, settings: PartSettings, number: int):
        self._settings, self.number = settings, number
        self._encoders = Encoders(settings.tokenizer)
        self._stack = ExitStack()

    def __enter__(self) -> _Workers:
        if self.number == 1:
            self._stack.enter_context(one_thread())
            return self
        context = worker_context(__name__)
        self._bytes, self._stop = context.Value("q", 0), context.Event()
        arguments = (self._settings, self._bytes, self._stop)
        self._pool = ProcessPoolExecutor(
            self.number, mp_context=context, initializer=_start_worker, initargs=arguments
        )
        self._stack.callback(self._pool.shutdown, cancel_futures=True)
        self._stack.callback(self._stop.set)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def probe(self, backend: str, sample: Sequence[str]) -> Probe:
        if self.number == 1:
            return probe_backend(self._encoders, backend, sample)
        with _with_dead_worker_named():
            return self._pool.submit(_probe_in_worker, backend, list(sample)).result()

    def encode(
        self, backend: str, parts: Sequence[Part], folder: Path, advance: Callable[[int], None]
    ) -> Iterator[Part]:
        """Yields the parts as they are complete."""
        if not parts:
            return
        if self.number == 1:
            encoder = PartEncoder(self._settings, backend, self._encoders)
            for part in parts:
                encoder.encode(part, folder, advance)
                yield part
            return
        with _with_dead_worker_named():
            seen, left, pending = 0, iter(parts), dict[Future[None], Part]()
            while True:
                for part in islice(left, self.number * _PENDING_PER_WORKER - len(pending)):
                    pending[self._pool.submit(_encode_in_worker, backend, part, folder)] = part
                if not pending:
                    return
                finished, _ = wait(pending, _POLL_SECONDS, FIRST_COMPLETED)
                advance(self._bytes.value - seen)
                seen = self._bytes.value
                for future in sorted(finished, key=lambda future: pending[future].index):
                    future.result()
                    yield pending.pop(future)


@contextmanager
def _with_dead_worker_named() -> Iterator[None]:
    """A worker that died is a ValueError."""
    try:
        yield
    except BrokenProcessPool as error:
        fix = "give fewer --workers if the memory was not enough, and call it again: it continues"
        raise Unfinished(f"tokenize: a worker process died. Fix: {fix}.") from error


_worker: dict[str, Any] = {}


def _start_worker(settings: PartSettings, num_bytes: Any, stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent reports it
    os.environ.update(ONE_THREAD)
    _worker.update(settings=settings, encoders=Encoders(settings.tokenizer), bytes=num_bytes, stop=stop)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    """A parent that was killed takes its workers along: they would wait forever for work."""
    wait_for([sentinel])
    os._exit(1)


def _probe_in_worker(backend: str, sample: list[str]) -> Probe:
    return probe_backend(_worker["encoders"], backend, sample)


def _encode_in_worker(backend: str, part: Part, folder: Path) -> None:
    if "encoder" not in _worker:
        _worker["encoder"] = PartEncoder(_worker["settings"], backend, _worker["encoders"])

    def advance(num_bytes: int) -> None:
        with _worker["bytes"].get_lock():
            _worker["bytes"].value += num_bytes
        if _worker["stop"].is_set():
            raise InterruptedError("another worker failed")

    _worker["encoder"].encode(part, folder, advance)


# What it will take


class _Estimate:
    """Tokens, disk and time of a run, by a sample."""

    def __init__(
        self,
        inputs: Sequence[Path],
        sample: Sequence[str],
        probe: Probe,
        settings: PartSettings,
        num_apart: int,
    ):
        text = b"\n".join(one.encode() for one in sample)
        packed = len(text) / max(1, len(zlib.compress(text, 6)))
        self.input_bytes = sum(path.stat().st_size for path in inputs)
        # As many bytes of text as of JSONL: an upper bound, as escapes and other fields take the rest.
        self.text_bytes = int(
            sum(path.stat().st_size * (packed if is_compressed(path) else 1) for path in inputs)
        )
        self.num_documents = int(len(sample) * self.text_bytes / max(1, len(text)))
        num_added = settings.append_eod + (settings.tokenizer.bos_id is not None)
        self.num_tokens = int(self.text_bytes * probe.tokens_per_byte) + self.num_documents * num_added
        bin_bytes = self.num_tokens * settings.dtype.itemsize
        # While it works, parts that are not joined yet and the one that is are on the disk as well.
        share = min(1.0, (num_apart + 1) * default_part_bytes(inputs) / max(1, self.input_bytes))
        self.disk_bytes = int(bin_bytes * (1 + share)) + self.num_documents * _INDEX_BYTES_PER_DOCUMENT
        self.seconds_of_one = self.text_bytes / max(1.0, probe.bytes_per_second)


def dry_run(
    inputs: Sequence[Path],
    output: Path,
    settings: PartSettings,
    *,
    workers: int,
    backend: str,
    by_tasks: bool = False,
) -> None:
    """Prints inputs, tokens, disk and time, by a sample, and writes nothing. Tasks make all parts first.

    Raises:
        ValueError: a setting is wrong, or the disk is too small.
    """
    _check_how(workers, backend)
    sample = sample_texts(inputs, settings.json_key, _DRY_RUN_SAMPLE_BYTES, settings.rule)
    with one_thread():
        probe = probe_backend(Encoders(settings.tokenizer), backend, sample)
    num_apart = len(plan_parts(inputs, default_part_bytes(inputs))) if by_tasks else workers
    estimate, made_by = _Estimate(inputs, sample, probe, settings, num_apart), settings.tokenizer
    rows = {
        "inputs": f"{len(inputs)} files, {bytes_text(estimate.input_bytes)}",
        "tokenizer": f"{made_by.name}, {made_by.vocab_size:,} tokens, EOD {made_by.eod_token}",
        "backend": f"{probe.backend}: {probe.reason}",
        "tokens": f"about {estimate.num_tokens:,} at most ({probe.tokens_per_byte:.3f} per byte of text)",
        "disk": f"about {bytes_text(estimate.disk_bytes)}",
        "time": f"about {estimate.seconds_of_one / workers:,.0f} s with {workers} workers at most",
        "output": f"{output}.bin, {output}.idx",
    }
    print_summary("tokenize: what it would do, by a sample", rows)
    check_free_disk(output.parent, estimate.disk_bytes, f"{output.name}.bin")


def sample_texts(inputs: Sequence[Path], json_key: str, num_bytes: int, rule: TextRule = FILES) -> list[str]:
    """Documents from a few places of the inputs, without what is no document."""
    halves = [
        Part(0, path, start, path.stat().st_size)
        for path in _evenly(inputs, _SAMPLED_PLACES)
        for start in (0, path.stat().st_size // 2)
    ]
    parts = [Part(0, part.path, 0, None) if is_stream(part.path) else part for part in halves]
    texts: list[str] = []
    for part in dict.fromkeys(parts):
        left = num_bytes // len(parts)
        for _, line in part_lines(part, text_field=json_key, rule=rule):
            try:
                text = text_of(line, json_key)
            except ValueError:
                left -= len(line)
            else:
                left -= len(line)
                texts.append(text[: num_bytes // len(parts)])
            if left <= 0:
                break
    return texts


def _evenly(inputs: Sequence[Path], number: int) -> list[Path]:
    if len(inputs) <= number:
        return list(inputs)
    return [inputs[index * len(inputs) // number] for index in range(number)]


def summary_rows(manifest: dict[str, Any], seconds: float) -> dict[str, object]:
    """The table at the end of a run."""
    tally = Tally.from_json(manifest)
    rows: dict[str, object] = {"documents": tally.num_documents, "tokens": manifest["num_tokens"]}
    num_tokens = manifest["num_tokens"]
    rows["end-of-document tokens"] = manifest["num_eods"]
    rows["tokens per byte"] = f"{num_tokens / tally.num_text_bytes:.3f}"
    rows |= {"tokens/s": f"{num_tokens / max(seconds, 1e-3):,.0f}", "backend": manifest["backend"]}
    if manifest["backend"] == "gigatoken":
        rows["documents compared"] = manifest["num_checked"]
        rows["documents left to the slower package"] = manifest["num_rerouted"]
    return rows | {f"skipped: {reason}": number for reason, number in sorted(tally.skipped.items())}
