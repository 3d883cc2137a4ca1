"""The steps of Megatron's `dist_checkpointing.load`, which unpickles `.metadata`, and objects with
`weights_only=False`, without running anything of a file. From 0.19 on its ranks read by themselves: where the
files of one are damaged, the others would continue without it.
"""

import os
import pickle
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from moe_exp.checkpoint.format.folders import unusable
from moe_exp.checkpoint.format.torch_dist import read_common, read_metadata
from moe_exp.engine.runtime import on_every_rank
from moe_exp.host.megatron_versions import LOAD_WARNINGS

from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.dist_checkpointing.utils import extract_sharded_base, force_all_tensors_to_non_fp8
from megatron.core.dist_checkpointing.validation import determine_global_metadata, validate_sharding_integrity

_FORCE, _FORCE_NOT = "TORCH_FORCE_WEIGHTS_ONLY_LOAD", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


def load_sharded(
    state: dict[str, Any], folder: Path, *, validate_access_integrity: bool = True
) -> dict[str, Any]:
    """Called by every rank; `state` is used up. With `validate_access_integrity` every value has to have one
    rank that owns it. Raises a ValueError on every rank, if `.metadata` or an object holds more than the
    format's classes, tensors and plain values, or a file or a tensor is not what was asked for.
    """
    on_every_rank(lambda: read_metadata(folder))  # here, where it runs nothing; Megatron reads it again
    loaded = on_every_rank(lambda: read_common(folder))
    force_all_tensors_to_non_fp8(state)
    sharded, not_sharded, factories = load_preprocess(state)
    merge(loaded, not_sharded)
    sharded, _ = extract_sharded_base(sharded)
    if validate_access_integrity:
        validate_sharding_integrity(determine_global_metadata(sharded)[1])
    merge(loaded, on_every_rank(lambda: _load(sharded, folder)))
    return dict(apply_factory_merges(loaded, factories))


def _load(sharded: dict[str, Any], folder: Path) -> dict[str, Any]:
    # Every `torch.load` of this process is `weights_only` until the end, whatever its caller says.
    before = {name: os.environ.pop(name, None) for name in (_FORCE, _FORCE_NOT)}
    os.environ[_FORCE] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", LOAD_WARNINGS, UserWarning)
            return dict(TorchDistLoadShardedStrategy().load(sharded, folder))
    except (CheckpointException, pickle.UnpicklingError) as error:
        # The first is no Exception but a BaseException, with what went wrong by rank.
        cause = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = " ".join(str(cause).split())[:200]
        if isinstance(cause, pickle.UnpicklingError):
            reason = "an object in it is no plain value, loading it would run code"
        raise unusable(f"checkpoint={folder}", f"cannot be used ({reason})") from None
    finally:
        del os.environ[_FORCE]
        os.environ.update({name: value for name, value in before.items() if value is not None})
