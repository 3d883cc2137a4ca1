"""Any rank of a world of any size, built by the package on torch's meta device in milliseconds.

Process groups are torch's fake ones, which communicate nothing. They are state of the process, so that
`built_ranks` starts one for all that it is asked.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from helpers.ranks import run_on_ranks
from moe_exp.config import Config, load_config


@dataclass(frozen=True)
class BuiltRank:
    """Trained parameters of the model chunks of a rank."""

    pp_rank: int
    dense: int  # reduced over the data-parallel ranks
    expert: int  # reduced over the expert-data-parallel ranks
    embedding: int  # of `dense`, in the embedding and the output layer


class _MetaInstead(TorchFunctionMode):
    """Tensors on the meta device also where a device is named; megatron names one for every parameter."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def built_ranks(worlds: Sequence[tuple[dict[str, Any], Sequence[int]]]) -> list[list[BuiltRank]]:
    """Builds ranks of worlds, each given as settings and numbers of ranks."""
    return run_on_ranks(1, _build_all, list(worlds), join=False, timeout=300)[0]


def _build_all(worlds: list[tuple[dict[str, Any], Sequence[int]]]) -> list[list[BuiltRank]]:
    return [[build_rank(load_config(settings, {}), rank) for rank in ranks] for settings, ranks in worlds]


def build_rank(config: Config, rank: int) -> BuiltRank:
    """Builds one rank, in a process without process groups."""
    from moe_exp.engine import runtime
    from moe_exp.engine.model import build_chunk, transformer_config

    runtime.quiet_third_parties()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=config.world_size)
    try:
        here = runtime.joined(config, rank, torch.device("meta"))
        with torch.device("meta"), _MetaInstead():
            settings = transformer_config(config)
            numbers = range(config.vpp or 1)
            chunks = [build_chunk(config, settings, here, n, initial_weights=False) for n in numbers]
        return _count(chunks, here.groups.pp.rank())
    finally:
        runtime.stop()


def _count(chunks: list[Any], pp_rank: int) -> BuiltRank:
    named = [(name, parameter) for chunk in chunks for name, parameter in chunk.named_parameters()]
    assert {parameter.device.type for _, parameter in named} == {"meta"}
    for name, parameter in named:
        assert (".mlp.experts." in name) == (not getattr(parameter, "allreduce", True))
    sizes = [(name, parameter.numel()) for name, parameter in named]
    expert = sum(size for name, size in sizes if ".mlp.experts." in name)
    tables = sum(size for name, size in sizes if name.startswith(("embedding.", "output_layer.")))
    return BuiltRank(pp_rank, sum(size for _, size in sizes) - expert, expert, tables)
