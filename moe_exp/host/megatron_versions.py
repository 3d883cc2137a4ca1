"""Differences between the versions of Megatron-Core that setup.py accepts, 0.16 to 0.19.

Everything here is needed by some of these versions only; the rest of the package uses what all of them have.
No module of Megatron is imported, callers pass it. tests/host/test_megatron_versions.py lists each
difference, and fails once the accepted versions no longer differ, so that it can be removed here.
"""

import logging
from collections.abc import Callable
from typing import Any

# From 0.19 on, what is not sharded is this object of a checkpoint instead of the file common.pt.
COMMON_OBJECT = "common_state/shard_0_1"

# UserWarnings of how Megatron from 0.18 on calls torch when each rank loads by itself.
LOAD_WARNINGS = "(The argument order of load|torch.distributed is disabled)"


def quiet_loggers() -> None:
    """Silences messages that users can do nothing about."""
    # "Unknown MLP type", once per layer: ours. From 0.19 on "GPTModel IS DEPRECATED".
    for name in ("transformer.transformer_layer", "models.gpt.gpt_model"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)
    # From 0.18 on DDP says that it computes the layout of the optimizer's buffers, as it always did.
    ddp = logging.getLogger("megatron.core.distributed.distributed_data_parallel")
    ddp.addFilter(lambda record: "full_param_layout not provided" not in record.getMessage())


def patch_router(moe_utils: Any) -> None:
    """Fixes a NameError in the router of 0.16 without Transformer Engine, on any device.

    Training uses our router, so on a GPU only comparisons with Megatron's layer need this.
    """
    if not moe_utils.HAVE_TE:
        moe_utils.te_general_gemm = None


def patch_latent_attention(multi_latent_attention: Any, linear: type) -> None:
    """Lets Megatron build multi-latent attention without Transformer Engine.

    Args:
        linear: Megatron's own linear layer, which from 0.19 on it imports only with Transformer Engine.
    """
    if not isinstance(multi_latent_attention.TELinear, type):
        # Stand-ins, which Megatron takes for the classes of Transformer Engine.
        multi_latent_attention.HAVE_TE = False
        multi_latent_attention.Linear = linear


class PartsOfSpec:
    """Makes multi-latent attention use the norms of its spec in 0.19, too.

    Its own rules require Transformer Engine for uncompressed queries.
    """

    def _resolve_qk_norm_config(self, submodules: Any) -> dict[str, Any]:
        return vars(submodules)


def refuse_cuda_graphs(capturable: bool) -> None:
    """Checks an argument that Megatron passes to Adam from 0.17 on; ValueError if true."""
    if capturable:
        rule = "the step counts on the host, which a CUDA graph leaves out"
        raise ValueError(f"capturable=True: {rule}. Fix: use capturable=False.")


def write_in_the_rank(filesystem_async: Any, write: Callable[..., None], results: Any) -> None:
    """Has the rank itself write checkpoints by `write`, with `results` as the queue of what was written.

    0.16 writes in forked processes. From 0.17 on the rank writes in threads, with the queue in another
    process and under another name.
    """
    filesystem_async._get_write_results_queue = lambda *args: results
    filesystem_async.get_write_results_queue = lambda *args: results
    filesystem_async.FileSystemWriterAsync.write_preloaded_data_multiproc = staticmethod(write)
