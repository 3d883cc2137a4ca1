"""Megatron's loading without its trust: of a checkpoint it unpickles `.metadata`, and objects with `weights_only=False`."""

import moe_exp.megatron_cpu  # noqa: F401  # before megatron: prepares it for a host without CUDA

# isort: split
import contextlib
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint.api import CheckpointException

from moe_exp.checkpoint.torch_dist import plain_settings, read_metadata

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_sharded(state: dict[str, Any], folder: Path, **options: Any) -> dict[str, Any]:
    """`dist_checkpointing.load`, in which nothing of the files is run. Called by every rank.

    Args:
        state: sharded, what is asked for.
        folder: of one iteration.
        options: of `dist_checkpointing.load`.

    Raises:
        ValueError: where `.metadata` or an object holds more than the format's classes, tensors and plain values, or a file or a
            tensor is not what was asked for.
    """
    read_metadata(folder)
    try:
        with _tensors_and_plain_values(), plain_settings(folder):
            return dict(dist_checkpointing.load(state, str(folder), **options))
    except (CheckpointException, pickle.UnpicklingError) as error:
        # The first is no Exception but a BaseException, with what went wrong by rank.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = " ".join(str(cause).split())[:200]
        if isinstance(cause, pickle.UnpicklingError):
            reason = "an object in it is no plain value, loading it would run code"
        raise ValueError(f"checkpoint={folder}: cannot be used ({reason}). Fix: use another checkpoint.") from None


@contextlib.contextmanager
def _tensors_and_plain_values() -> Iterator[None]:
    """Inside, every `torch.load` of this process is `weights_only`, whatever its caller says."""
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        yield
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
