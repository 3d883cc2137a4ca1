"""Trains Megatron-Core's GPTModel with moe_exp's MoE layer, in the shape of Megatron-LM's pretrain_gpt.py.

    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py          # under 60 seconds on two cores
    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py --ep 2   # experts over two ranks
    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py --folder ckpt --steps 10  # saves
    torchrun --standalone --nproc-per-node 2 examples/megatron_gpt.py --folder ckpt --steps 20  # continues

In a script of your own, `decoder_spec(config)` replaces Megatron's layer spec, and moe_exp is imported before
megatron. The schedule, the data-parallel wrapper and the optimizer are Megatron's.
"""

import argparse
import os
from pathlib import Path

import torch
from torch import Tensor

from moe_exp.layers.spec import decoder_spec

from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.distributed import DistributedDataParallel as DDP
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig

VOCAB, LENGTH, MICRO_BATCH, NUM_MICRO_BATCHES = 128, 64, 4, 2


def build_model(ep: int, *, distributed_optimizer: bool) -> DDP:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, normalization="RMSNorm", add_bias_linear=False,
        hidden_dropout=0.0, attention_dropout=0.0,
        gated_linear_unit=True, activation_func=torch.nn.functional.silu, bias_activation_fusion=False,
        bias_dropout_fusion=False, num_moe_experts=8, moe_router_topk=2, moe_ffn_hidden_size=128,
        moe_router_load_balancing_type="aux_loss", moe_aux_loss_coeff=1e-2, expert_model_parallel_size=ep,
        finalize_model_grads_func=finalize_model_grads,
    )  # fmt: skip
    spec = decoder_spec(config)
    model = GPTModel(config, spec, VOCAB, max_sequence_length=LENGTH, position_embedding_type="rope")
    if torch.cuda.is_available():
        model.cuda()
    ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=distributed_optimizer)
    return DDP(config, ddp_config, model)


def batches(rank: int):
    """Sequences that count up by a step of 1 to 8: the next token follows from the two before it."""
    generator = torch.Generator().manual_seed(rank)
    while True:
        start = torch.randint(VOCAB, (MICRO_BATCH, 1), generator=generator)
        step = torch.randint(1, 9, (MICRO_BATCH, 1), generator=generator)
        yield (start + step * torch.arange(LENGTH + 1)) % VOCAB


def loss_func(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = output.float().mean()
    return loss, {"lm loss": loss.detach()}


def forward_step(data_iterator, model):
    batch = next(data_iterator).to(next(model.parameters()).device)
    positions = torch.arange(LENGTH, device=batch.device).expand(MICRO_BATCH, -1)
    return model(batch[:, :-1], positions, None, labels=batch[:, 1:]), loss_func


def sharded_state(model: DDP, optimizer, step: int, *, is_loading: bool = False) -> dict:
    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    weights = model.module.sharded_state_dict(metadata=metadata)
    moments = optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)
    return {"model": weights, "optimizer": moments, "step": step}


def load(model: DDP, optimizer, folder: str) -> int:
    """Loads a checkpoint and returns its step. With Megatron's default, a tensor of the checkpoint that the
    model does not have would be dropped silently; RAISE_ALL makes it an error.
    """
    state = sharded_state(model, optimizer, 0, is_loading=True)
    state = dist_checkpointing.load(state, folder, strict=StrictHandling.RAISE_ALL)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    for part in optimizer.chained_optimizers:
        for moments in part.optimizer.state.values():
            # torch's AdamW, which Megatron takes without Transformer Engine and Apex, counts steps per
            # parameter; Megatron restores one tensor for all, which would advance once per parameter.
            if isinstance(moments.get("step"), Tensor):
                moments["step"] = moments["step"].clone()
    return state["step"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ep", type=int, default=1, help="expert parallel size")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", help="checkpoint: loaded if it exists, and saved after the last step")
    parser.add_argument(
        "--distributed-optimizer",
        action="store_true",
        help="to resume, it needs the Adam of Transformer Engine or Apex",
    )
    arguments = parser.parse_args()
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    parallel_state.initialize_model_parallel(expert_model_parallel_size=arguments.ep)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    is_distributed = arguments.distributed_optimizer
    model = build_model(arguments.ep, distributed_optimizer=is_distributed)
    settings = OptimizerConfig(lr=3e-3, clip_grad=1.0, use_distributed_optimizer=is_distributed)
    optimizer = get_megatron_optimizer(settings, [model])
    first = 1
    if arguments.folder and Path(arguments.folder, "metadata.json").exists():
        first = load(model, optimizer, arguments.folder) + 1
    data = batches(torch.distributed.get_rank())
    for _ in range(NUM_MICRO_BATCHES * (first - 1)):
        next(data)
    for step in range(first, arguments.steps + 1):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=data, model=model,
            num_microbatches=NUM_MICRO_BATCHES, seq_length=LENGTH, micro_batch_size=MICRO_BATCH,
        )  # fmt: skip
        optimizer.step()
        loss = torch.stack([one["lm loss"] for one in losses]).mean()
        torch.distributed.all_reduce(loss)
        if torch.distributed.get_rank() == 0 and step % 10 == 0:
            print(f"step {step:4d}  lm loss {loss / torch.distributed.get_world_size():.6f}", flush=True)
    if arguments.folder:
        Path(arguments.folder).mkdir(parents=True, exist_ok=True)
        last = max(first - 1, arguments.steps)
        dist_checkpointing.save(sharded_state(model, optimizer, last), arguments.folder)
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
