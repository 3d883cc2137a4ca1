"""Each difference between the accepted versions of Megatron-Core, by the source of the installed one."""

import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from moe_exp.commands.doctor import requirements
from moe_exp.host import megatron_versions

ACCEPTED = {one.name: one.specifier for one in map(Requirement, requirements(["train"]))}["megatron-core"]


class Difference(NamedTuple):
    """`newer` is a pattern found in a file below megatron/core from version `since` on, and not before."""

    handled_by: str
    since: str
    file: str
    newer: str


DIFFERENCES = {
    "router finds te_general_gemm without Transformer Engine": Difference(
        "patch_router", "0.17", "transformer/moe/moe_utils.py", r"te_general_gemm,[\s\S]*te_general_gemm,"
    ),
    "checkpoints are written in threads": Difference(
        "write_in_the_rank", "0.17", "dist_checkpointing/strategies/filesystem_async.py",
        "def write_preloaded_data_multithread",
    ),
    "the queue of writers has a public name": Difference(
        "write_in_the_rank", "0.17", "dist_checkpointing/strategies/filesystem_async.py",
        r"\ndef get_write_results_queue",
    ),
    "Adam gets the argument capturable": Difference(
        "refuse_cuda_graphs", "0.17", "optimizer/__init__.py", '"capturable"'
    ),
    "DDP warns that it gets no layout": Difference(
        "quiet_loggers", "0.18", "distributed/distributed_data_parallel.py", "full_param_layout not provided"
    ),
    "GPTModel warns that it is deprecated": Difference(
        "quiet_loggers", "0.19", "models/gpt/gpt_model.py", "GPTModel IS DEPRECATED"
    ),
    "what is not sharded is an object": Difference(
        "COMMON_OBJECT", "0.19", "dist_checkpointing/serialization.py", "'common_state'"
    ),
    "latent attention has rules for its norms": Difference(
        "PartsOfSpec", "0.19", "transformer/multi_latent_attention.py", "def _resolve_qk_norm_config"
    ),
    "latent attention imports Linear with Transformer Engine only": Difference(
        "patch_latent_attention", "0.19", "transformer/multi_latent_attention.py",
        r"\nif HAVE_TE:[\s\S]*modelopt.layers import Linear",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DIFFERENCES)
def test_difference_starts_with_its_version(name):
    installed = Version(importlib.metadata.version("megatron-core"))
    core = Path(importlib.util.find_spec("megatron.core").origin).parent
    difference = DIFFERENCES[name]
    found = re.search(difference.newer, (core / difference.file).read_text()) is not None
    assert found == (installed >= Version(difference.since)), f"megatron-core {installed}, {difference}"


@pytest.mark.parametrize("name", DIFFERENCES)
def test_accepted_versions_still_differ(name):
    since = Version(DIFFERENCES[name].since)
    before = Version(f"{since.major}.{since.minor - 1}")
    both = ACCEPTED.contains(since) and ACCEPTED.contains(before)
    assert both, f"setup.py accepts {ACCEPTED}: remove {DIFFERENCES[name].handled_by}, or its older half"


def test_nothing_else_is_in_the_module():
    own = {
        name
        for name, value in vars(megatron_versions).items()
        if isinstance(value, str) or getattr(value, "__module__", "") == megatron_versions.__name__
    }
    public = {name for name in own if not name.startswith("_")}
    assert public == {difference.handled_by for difference in DIFFERENCES.values()}
