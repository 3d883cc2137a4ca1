"""Scores token ids in batches: reads a .npy file of ids and writes a .npy file of logits. Each replica scores
a part of the batches, and its last pipeline stage writes the logits to the file.
"""

import io
import logging
import math
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.config import Config, setting_error
from moe_exp.engine.runtime import Runtime
from moe_exp.host.files import bytes_text
from moe_exp.inference import ranks
from moe_exp.inference.text import tokenizer_for

logger = logging.getLogger("moe_exp.inference.score")  # by name: torchrun runs this module as __main__


@dataclass(frozen=True)
class ScoreRequest(ranks.Request):
    """Settings of a scoring job."""

    tokens: str  # .npy file of ids, integers [B, S]
    out: str  # .npy file for the logits
    batch_size: int | None = None  # rows; None: 256 MB of logits, or with `capacity` the training's MBSZ
    capacity: bool = False  # drop tokens over capacity as in training, see `ranks.config_for_use`
    document_mask: bool | None = None  # limit attention to the document; None: as in training
    eod_id: int | None = None  # end-of-document token; None: from the training's tokenizer
    overwrite: bool = False  # replace an existing `out`


@dataclass(frozen=True)
class ScoringPlan:
    """A checked request."""

    folder: Path
    config: Config
    ids: npt.NDArray[np.integer[Any]]
    out: Path
    batch_size: int
    eod_id: int | None

    @property
    def shape(self) -> tuple[int, int, int]:
        """Shape of the logits, [B, S, V]."""
        return (*self.ids.shape, self.config.vocab_size)

    @property
    def partial(self) -> Path:
        """Temporary file for the logits."""
        return self.out.with_name(f".{self.out.name}.partial")

    @property
    def header(self) -> bytes:
        """Header of the .npy file."""
        buffer, header = io.BytesIO(), {"descr": "<f4", "fortran_order": False, "shape": self.shape}
        np.lib.format.write_array_header_2_0(buffer, header)
        return buffer.getvalue()

    @property
    def num_bytes(self) -> int:
        """Size of the float32 logits in bytes."""
        return 4 * math.prod(self.shape)


def plan_scoring(request: ScoreRequest) -> ScoringPlan:
    """Checks a request without loading weights or writing files; raises ValueError for the first problem."""
    folder = request.folder
    saved, capacity = saved_config(folder), request.capacity
    config = request.config_for(folder, capacity=capacity, document_mask=request.document_mask)
    eod_id = _end_of_document(request, saved, folder) if config.document_mask else None
    ids = _read_ids(Path(request.tokens), saved.vocab_size)
    if request.batch_size is not None and request.batch_size < 1:
        fix = "use a positive number of rows per batch"
        raise setting_error("batch_size", request.batch_size, "must be positive", fix)
    # Padding tokens would take capacity from real ones.
    if capacity and ids.shape[1] % config.tp:
        rule = f"must divide the {ids.shape[1]} tokens of each row if --capacity is given"
        raise setting_error("tp", config.tp, rule, "use another TP, or omit --capacity")
    most, seq_len = ids.shape
    size = request.batch_size or ranks.batch_size_of(saved, seq_len, most, capacity=capacity)
    plan = ScoringPlan(folder, config, ids, Path(request.out), size, eod_id)
    _check_out(plan, Path(request.tokens), overwrite=request.overwrite)
    if ids.shape[1] > (seq_len := saved.longest_sample):
        text = "tokens: rows have %d tokens, but the model was trained with SEQ_LEN=%d"
        logger.warning(text, ids.shape[1], seq_len)
    if saved.use_moe and saved.moe_type == "moe":
        drops = "scoring without dropped tokens; use --capacity to drop as in training"
        if capacity:
            drops = f"dropping tokens over capacity in each batch of {plan.batch_size}, as in training"
        logger.info("MOE_TYPE=moe: %s", drops)
    return plan


def _end_of_document(request: ScoreRequest, saved: Config, folder: Path) -> int:
    if (found := request.eod_id) is None:
        try:
            found = tokenizer_for(saved, "", order=saved_order(folder)).eod_id
        except ValueError as error:
            rule = f"is required, because the tokenizer cannot be used ({error})"
            raise setting_error("eod_id", "", rule, "pass --eod-id") from None
    if found is None or not 0 <= found < saved.vocab_size:
        rule = "is required, because the training's tokenizer has no end-of-document token"
        if found is not None:
            rule = f"must be from 0 to {saved.vocab_size - 1}"
        fix = "pass --eod-id with the id that ends a document, or --no-document-mask"
        raise setting_error("eod_id", "" if found is None else found, rule, fix)
    return found


def _read_ids(path: Path, vocab_size: int) -> npt.NDArray[np.integer[Any]]:
    fix = "use a .npy file with integers [B, S], as written by numpy.save"
    try:
        # memory-mapped and checked in blocks, since the file may be larger than memory
        ids = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise setting_error("tokens", path, "does not exist", fix) from None
    except (OSError, ValueError, EOFError) as error:
        reason = "is a folder" if path.is_dir() else f"cannot be read ({' '.join(str(error).split())[:120]})"
        raise setting_error("tokens", path, reason, fix) from None
    if not isinstance(ids, np.ndarray) or not np.issubdtype(ids.dtype, np.integer):
        kind = getattr(ids, "dtype", "several arrays")
        raise setting_error("tokens", path, f"must contain integers, not {kind}", fix)
    if ids.ndim != 2 or not ids.size:
        raise setting_error("tokens", path, f"must be a non-empty matrix, not shape {list(ids.shape)}", fix)
    rows = max(1, (64 << 20) // ids[0].nbytes)
    for first in range(0, len(ids), rows):
        block = ids[first : first + rows]
        for value in (block.min(), block.max()):
            if not 0 <= value < vocab_size:
                row, column = (int(index) for index in np.argwhere(block == value)[0])
                place = f"row {first + row}, column {column}"
                rule = f"has the id {value} in {place}, but the model's ids are 0 to {vocab_size - 1}"
                raise setting_error("tokens", path, rule, "tokenize with the model's tokenizer")
    return ids


def _check_out(plan: ScoringPlan, tokens: Path, *, overwrite: bool) -> None:
    out, folder = plan.out, plan.out.absolute().parent
    is_input = out.exists() and tokens.exists() and out.samefile(tokens)
    is_writable, move = os.access(folder, os.W_OK | os.X_OK), "specify a file in a writable folder"
    for is_wrong, rule, fix in (
        (out.is_dir(), "is a folder", "specify a file"),
        (is_input, "is the same file as --tokens", "use another name"),
        (out.exists() and not overwrite, "already exists", "use another name, or pass --overwrite"),
        (not folder.is_dir(), "its folder does not exist", move),
        (not is_writable, "its folder is not writable", move),
    ):
        if is_wrong:
            raise setting_error("out", out, rule, fix)
    if plan.num_bytes > (free := shutil.disk_usage(folder).free):
        rule = f"requires {bytes_text(plan.num_bytes)} for {list(plan.shape)} float32 values"
        rule += f", but only {bytes_text(free)} are free"
        raise setting_error("out", out, rule, "score fewer rows, or free disk space")


def score(plan: ScoringPlan, rank: Runtime) -> None:
    """Writes logits to `out` atomically. All ranks must call this. Raises ValueError if loading fails."""
    stage = ranks.Stage(plan.config, rank, ranks.load_model(plan.config, rank, plan.folder), plan.eod_id)
    start, row_bytes, size = len(plan.header), 4 * plan.shape[1] * plan.shape[2], plan.batch_size
    batches = [range(i, min(i + size, len(plan.ids))) for i in range(0, len(plan.ids), size)]
    if rank.is_first:
        _make_file(plan)
    try:
        # The other ranks open the file only after the first rank has created it.
        torch.distributed.barrier()
        with plan.partial.open("r+b") as file:
            for batch, is_mine in ranks.shared_batches(batches, rank, "score", "rows", len):
                logits = stage.logits(torch.from_numpy(plan.ids[batch.start : batch.stop].astype(np.int64)))
                if logits is not None and stage.writes and is_mine:
                    file.seek(start + batch.start * row_bytes)
                    logits.contiguous().cpu().numpy().tofile(file)
            file.flush()
            os.fsync(file.fileno())
        # All rows must be on disk before the file gets its final name.
        torch.distributed.barrier()
        if rank.is_first:
            plan.partial.replace(plan.out)
    finally:
        if rank.is_first:
            plan.partial.unlink(missing_ok=True)


def _make_file(plan: ScoringPlan) -> None:
    """Creates the file at its full size, so that a full disk is detected immediately."""
    num_bytes = len(plan.header) + plan.num_bytes
    try:
        # "x" prevents two jobs from writing to the same file
        with plan.partial.open("xb") as file:
            file.write(plan.header)
            file.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file.fileno(), 0, num_bytes)
            else:
                os.truncate(file.fileno(), num_bytes)
    except FileExistsError:
        rule = f"another job is writing this file, or was killed and left {plan.partial} behind"
        fix = "wait for that job, or remove the file left behind"
        raise setting_error("out", plan.out, rule, fix) from None
    except OSError:
        plan.partial.unlink()
        raise


if __name__ == "__main__":
    ranks.run_rank(lambda file: plan_scoring(ScoreRequest.read(file)), score)
