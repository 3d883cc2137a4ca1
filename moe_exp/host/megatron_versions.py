"""Differences between the versions of Megatron-Core that setup.py accepts, 0.16 to 0.19.

Only some of these versions need the code here; all other modules use only features that every version has.
Callers pass Megatron's modules; this file imports none of them. tests/host/test_megatron_versions.py lists
each difference and fails once the accepted versions no longer differ, so that the code here can be removed.
"""

import logging
from collections.abc import Callable
from typing import Any

# From 0.19 on, unsharded state is this object in a checkpoint instead of the file common.pt.
COMMON_OBJECT = "common_state/shard_0_1"


def quiet_loggers() -> None:
    """Silences messages that users cannot act on."""
    # "Unknown MLP type" once per layer, about ours; and from 0.19 on "GPTModel IS DEPRECATED".
    for name in ("transformer.transformer_layer", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    # From 0.18 on DDP reports that it computes the layout of the optimizer's buffers, which is normal.
    ddp = logging.getLogger("megatron.core.distributed.distributed_data_parallel")
    ddp.addFilter(lambda record: "full_param_layout not provided" not in record.getMessage())


def patch_router(moe_utils: Any) -> None:
    """Fixes a NameError that Megatron 0.16's router raises if Transformer Engine is missing."""
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def patch_latent_attention(multi_latent_attention: Any, linear: type) -> None:
    """Lets Megatron build multi-latent attention without Transformer Engine; `linear`: Megatron's Linear."""
    if not isinstance(multi_latent_attention.TELinear, type):
        # The names are then stand-ins, which Megatron mistakes for Transformer Engine's classes.
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.Linear = linear  # from 0.19 on, imported only with Transformer Engine


class PartsOfSpec:
    """Base class: makes multi-latent attention use the spec's norms in Megatron 0.19, as in older ones."""

    # Megatron's own rules require Transformer Engine if queries are not compressed.
    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


def refuse_cuda_graphs(capturable: bool) -> None:
    """Raises ValueError if `capturable` is true; Megatron passes this argument to Adam from 0.17 on."""
    if capturable:
        rule = "not supported, because the step counter is on the host, outside any CUDA graph"
        raise ValueError(f"capturable=True: {rule}. Fix: use capturable=False.")


def write_in_the_rank(filesystem_async: Any, write: Callable[..., None], results: Any) -> None:
    """Makes each rank save in its own process with `write`, which puts outcomes in the queue `results`."""
    # 0.16 writes in forked processes. From 0.17 on the rank writes in threads, and the queue has another name
    # and is in another process.
    filesystem_async._get_write_results_queue = lambda *args: results
    filesystem_async.get_write_results_queue = lambda *args: results
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)
