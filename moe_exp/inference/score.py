"""Token ids to logits: a .npy file in, a .npy file out, in batches.

Replicas share the batches, whatever layout they have inside; the last stage of each writes its rows into the
one file.
"""

import io
import json
import logging
import os
import shutil
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import Config, problem
from moe_exp.engine.runtime import Runtime
from moe_exp.host.progress import progress
from moe_exp.inference.jobs import planned_quietly, run_rank
from moe_exp.inference.layout import Layout, config_for_use
from moe_exp.inference.loading import load_model
from moe_exp.inference.stage import Stage

logger = logging.getLogger("moe_exp.inference.score")  # by name: torchrun runs this module as __main__

_BATCH_BYTES = 256 << 20  # of logits, where the batch size is not given
_CHECKED_ROWS_BYTES = 64 << 20


@dataclass(frozen=True)
class ScoreRequest:
    """What is to be scored.

    Args:
        checkpoint: an iter_ folder, a checkpoints folder or a run folder.
        tokens: .npy file with the ids, [B, S] of an integer type.
        out: .npy file for the logits.
        batch_size: rows at a time; None: as many as have 256 MB of logits, or with `capacity` MBSZ of the
            training.
        dtype: compute type; empty: that of the training.
        capacity: drop tokens over capacity as in training, see `layout.config_for_use`.
        overwrite: replace `out` where it exists.
        layout: of the ranks.
    """

    checkpoint: str
    tokens: str
    out: str
    batch_size: int | None = None
    dtype: str = ""
    capacity: bool = False
    overwrite: bool = False
    layout: Layout = field(default_factory=Layout)

    @classmethod
    def from_json(cls, text: str) -> "ScoreRequest":
        """From what `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"layout": Layout(**values["layout"])})

    def to_json(self) -> str:
        """For the ranks of a job."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Plan:
    """A request that was checked."""

    folder: Path
    config: Config
    ids: npt.NDArray[np.integer[Any]]
    out: Path
    batch_size: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of the logits, [B, S, V]."""
        return (*self.ids.shape, self.config.vocab_size)

    @property
    def partial(self) -> Path:
        """Where the logits are until all are there."""
        return self.out.with_name(f".{self.out.name}.partial")


def plan_scoring(request: ScoreRequest) -> Plan:
    """Checks a request without loading weights; touches no file.

    Raises:
        ValueError: one line for what cannot be.
    """
    folder = one_checkpoint(Path(request.checkpoint).expanduser())
    saved = saved_config(folder)
    config = config_for_use(folder, request.layout, dtype=request.dtype or None, capacity=request.capacity)
    ids = _read_ids(Path(request.tokens), saved.vocab_size)
    if request.batch_size is not None and request.batch_size < 1:
        raise ValueError(
            problem("batch_size", request.batch_size, "must be positive", "give the number of rows at a time")
        )
    if request.capacity and ids.shape[1] % config.tp:
        rule = f"with --capacity the {ids.shape[1]} tokens of a row cannot be padded to a multiple of it"
        raise ValueError(problem("tp", config.tp, rule, "use another TP, or leave --capacity out"))
    plan = Plan(
        folder, config, ids, Path(request.out), request.batch_size or _batch_size(request, saved, ids.shape)
    )
    _check_out(plan, Path(request.tokens), overwrite=request.overwrite)
    if ids.shape[1] > saved.seq_len:
        logger.warning(
            "tokens: rows of %d tokens, the model was trained on SEQ_LEN=%d", ids.shape[1], saved.seq_len
        )
    if saved.use_moe and saved.moe_type == "moe":
        dropped = f"tokens over capacity are dropped per batch of {plan.batch_size}, as in training"
        logger.info(
            "MOE_TYPE=moe: %s",
            dropped if request.capacity else "no token is dropped here; --capacity drops as in training",
        )
    return plan


def _read_ids(path: Path, vocab_size: int) -> npt.NDArray[np.integer[Any]]:
    fix = "give a .npy file with integers [B, S], as numpy.save writes it"
    try:
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise ValueError(problem("tokens", path, "does not exist", fix)) from None
    except (OSError, ValueError, EOFError) as error:
        reason = "is a folder" if path.is_dir() else f"cannot be read ({' '.join(str(error).split())[:120]})"
        raise ValueError(problem("tokens", path, reason, fix)) from None
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            problem("tokens", path, f"holds {getattr(ids, 'dtype', 'several arrays')}, not integers", fix)
        )
    if ids.ndim != 2 or not ids.size:
        raise ValueError(problem("tokens", path, f"has the shape {list(ids.shape)}", fix))
    _check_range(ids, path, vocab_size)
    return ids


def _check_range(ids: npt.NDArray[np.integer[Any]], path: Path, vocab_size: int) -> None:
    rows = max(1, _CHECKED_ROWS_BYTES // ids[0].nbytes)
    for first in range(0, len(ids), rows):
        block = ids[first : first + rows]
        for value in (block.min(), block.max()):
            if not 0 <= value < vocab_size:
                row, column = (int(index) for index in np.argwhere(block == value)[0])
                rule = (
                    f"has the id {value} in row {first + row}, column {column}, the model has 0 to"
                    f" {vocab_size - 1}"
                )
                raise ValueError(problem("tokens", path, rule, "tokenize with the tokenizer of the training"))


def _batch_size(request: ScoreRequest, saved: Config, shape: tuple[int, ...]) -> int:
    return (
        saved.mbsz
        if request.capacity
        else max(1, min(shape[0], _BATCH_BYTES // (4 * shape[1] * saved.vocab_size)))
    )


def _check_out(plan: Plan, tokens: Path, *, overwrite: bool) -> None:
    out, folder = plan.out, plan.out.absolute().parent
    if out.is_dir():
        raise ValueError(problem("out", out, "is a folder", "give the name of a file"))
    if out.exists() and tokens.exists() and out.samefile(tokens):
        raise ValueError(problem("out", out, "is the file with the tokens", "give another name"))
    if out.exists() and not overwrite:
        raise ValueError(problem("out", out, "exists", "give another name, or --overwrite"))
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        state = "cannot be written to" if folder.is_dir() else "does not exist"
        raise ValueError(
            problem("out", out, f"its folder {state}", "give a file in a folder that you can write to")
        )
    needed, free = 4 * int(np.prod(plan.shape, dtype=np.int64)), shutil.disk_usage(folder).free
    if needed > free:
        rule = (
            f"its {list(plan.shape)} float32 values need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )
        raise ValueError(problem("out", out, rule, "score fewer rows, or free some space"))


def score(plan: Plan, rank: Runtime) -> None:
    """Loads the model and writes the logits of all rows; `out` appears when it is complete. Called by every
    rank.

    Raises:
        ValueError: when the checkpoint cannot be loaded.
    """
    stage = Stage(plan.config, rank, load_model(plan.config, rank, plan.folder))
    try:
        if rank.is_first:
            _make_file(plan)
        torch.distributed.barrier()
        with plan.partial.open("r+b") as file:
            _score_batches(plan, stage, file)
            file.flush()
            os.fsync(file.fileno())
        torch.distributed.barrier()
        if rank.is_first:
            plan.partial.replace(plan.out)
    finally:
        if rank.is_first:
            plan.partial.unlink(missing_ok=True)


def _score_batches(plan: Plan, stage: Stage, file: io.BufferedRandom) -> None:
    """Batch i goes to replica i modulo their number. Experts may be spread over replicas, so all work to the
    last step.
    """
    replicas, batch = stage.rank.groups.dp, plan.batch_size
    start, row_bytes = _header_bytes(plan), 4 * plan.shape[1] * plan.shape[2]
    bar = progress("score", len(plan.ids), unit="rows") if stage.rank.is_first else nullcontext(_no_progress)
    with bar as advance:
        for first_of_step in range(0, len(plan.ids), batch * replicas.size()):
            first = first_of_step + batch * replicas.rank()
            # A replica for which no rows are left computes some, and leaves them.
            rows = plan.ids[first : first + batch] if first < len(plan.ids) else plan.ids[:batch]
            logits = stage.logits(torch.from_numpy(rows.astype(np.int64)))
            if logits is not None and stage.writes and first < len(plan.ids):
                file.seek(start + first * row_bytes)
                logits.contiguous().cpu().numpy().tofile(file)
            advance(min(batch * replicas.size(), len(plan.ids) - first_of_step))


def _no_progress(rows: int) -> None:
    """On ranks that show none."""


def _header(plan: Plan) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_2_0(
        buffer, {"descr": "<f4", "fortran_order": False, "shape": plan.shape}
    )
    return buffer.getvalue()


def _header_bytes(plan: Plan) -> int:
    return len(_header(plan))


def _make_file(plan: Plan) -> None:
    """The whole file without its values, so that a disk that is too small is known at once."""
    header = _header(plan)
    num_bytes = len(header) + 4 * int(np.prod(plan.shape, dtype=np.int64))
    with plan.partial.open("wb") as file:
        file.write(header)
        file.flush()
        _reserve(file.fileno(), num_bytes)


_reserve: Callable[[int, int], None] = (
    (lambda number, num_bytes: os.posix_fallocate(number, 0, num_bytes))
    if hasattr(os, "posix_fallocate")
    else os.truncate
)


def main(request_file: str) -> None:
    """One rank of a job that torchrun started."""
    plan = planned_quietly(
        lambda: plan_scoring(ScoreRequest.from_json(Path(request_file).read_text(encoding="utf-8")))
    )
    run_rank(plan.config, lambda rank: score(plan, rank))


if __name__ == "__main__":
    main(sys.argv[1])
