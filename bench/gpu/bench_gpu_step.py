"""A training step of the reference models (dense, moe, dmoe) on one GPU: moe_exp, the same model of
Megatron's own parts, transformers.

    export PYTHONPATH=$PWD                             # in the repository; not where the package is installed
    python bench/gpu/bench_gpu_step.py --json step.json    # all three models and contenders
    python bench/gpu/bench_gpu_step.py --model dmoe --contenders ours --profile
    python bench/gpu/bench_gpu_step.py                     # on a CPU: tiny models; 1 min

The first is meant to take about 5 minutes on one GPU, not measured; the first run also compiles the kernels
of ours, in its warm-up steps. A step is forward, backward, clipping and optimizer on one micro-batch. `ours`
and `megatron` are `loop.train_step` with Megatron's GPTModel, DDP and distributed optimizer (fp32
main weights and gradients) from the same initial weights on the same tokens; `megatron` has the layer spec of
megatron-core: Transformer Engine's with grouped experts where it is installed, else the local one with
experts one by one. Their first losses are compared. `transformers` is Llama or Qwen3-MoE (which normalizes
queries and keys, too) of the same sizes with weights of its own and torch's fused AdamW on weights of the
model's dtype, so it moves less memory in the optimizer.

TFLOP/s are those of the model (`moe_exp.planner.costs.flops`), the same for all. What does not fit the GPU
loses layers, said in the table. The contenders run one after the other; every time is the median of steps.
Who fails is left out by name, with the reason, and the exit code is 1 where that is ours. Results are saved
after every row.
"""

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bench_arguments
import numpy as np
import torch
from gpu_attempts import Attempts, DeviceLost, free
from gpu_clock import elapsed_ms
from gpu_machine import origin

from moe_exp.config import Config, load_config
from moe_exp.data.tokens.tokens import write_token_files
from moe_exp.engine import initial_weights
from moe_exp.engine import model as our_model
from moe_exp.engine.runtime import Runtime, start_alone, stop
from moe_exp.host import megatron_versions
from moe_exp.layers.experts.grouped_gemm import choose_backend
from moe_exp.planner.costs.flops import flops_per_iteration
from moe_exp.planner.costs.params import count_parameters
from moe_exp.training import samples as training_data

from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe import moe_utils

sys.path.append(str(Path(__file__).resolve().parents[1]))
from bench_layer import start_megatron
from bench_step import Ours
from small_model import SETTINGS

MODELS: dict[str, dict[str, str]] = {
    "dense": {"use_moe": "false"},
    "moe": {"use_moe": "true", "moe_type": "moe", "topk": "1"},
    "dmoe": {"use_moe": "true", "moe_type": "dmoe", "topk": "1"},
}
TINY = {
    **SETTINGS, "num_layers": "2", "hidden_size": "64", "ffn_hidden_size": "96", "seq_len": "64",
    "vocab_size": "512", "mbsz": "2", "gbsz": "2",
}  # fmt: skip
WARMUP = 3
# Megatron's bytes per parameter: bf16 weight, fp32 gradient, main weight and two moments. And activations of
# the reference runs.
PARAMETER_BYTES, ACTIVATION_BYTES_PER_SAMPLE = 18, 3e9
LOSS_TOLERANCE = {"fp32": 1e-5, "bf16": 2e-3, "fp16": 1e-3}


def sizes() -> dict[str, str]:
    return {"preset": "reference", "mbsz": "8", "gbsz": "8"} if torch.cuda.is_available() else TINY


def config_of(name: str, arguments: argparse.Namespace, data: str) -> Config:
    """The model on one rank, with as many of its layers as fit the GPU."""
    settings = (
        sizes()
        | MODELS[name]
        | {
            "gpus_per_node": "1",
            "train_data": data,
            "num_workers": "0",
            "warmup_iters": "0",
        }
    )
    settings |= {"expert_backend": arguments.expert_backend}
    config = load_config(settings, environ={})
    while (
        torch.cuda.is_available()
        and config.num_layers > 1
        and _needed_bytes(config) > torch.cuda.mem_get_info()[1]
    ):
        settings["num_layers"] = str(config.num_layers // 2)
        config = load_config(settings, environ={})
    return config


def _needed_bytes(config: Config) -> float:
    return PARAMETER_BYTES * count_parameters(config).total + ACTIVATION_BYTES_PER_SAMPLE * config.mbsz


def write_tokens(folder: Path, vocab_size: int, num_tokens: int) -> str:
    """Random tokens that are as unequally frequent as words; the prefix of their files."""
    tokens = (np.random.default_rng(0).zipf(1.2, size=num_tokens) - 1) % vocab_size
    write_token_files(folder / "tokens", [tokens], vocab_size=vocab_size)
    return str(folder / "tokens")


# The contenders: each a function from settings to one step, which returns its loss


Step = Callable[[], float]


def ours(config: Config, rank: Runtime) -> tuple[Step, str]:
    contender = Ours(config, rank)
    return _training_step(contender), f"EXPERT_BACKEND={config.expert_backend}" if config.use_moe else ""


def _training_step(contender: Ours) -> Step:
    def step() -> float:
        before = contender.loss_sum()
        contender.step()
        return contender.loss_sum() - before

    return step


def megatron(config: Config, rank: Runtime) -> tuple[Step, str]:
    """The model with megatron-core's decoder spec and our initial weights."""
    has_te = torch.cuda.is_available() and moe_utils.HAVE_TE
    megatron_versions.patch_router(moe_utils)
    if rank.device.type == "cpu":
        # patches its dispatcher, which without CUDA gives the all-to-all tensors in the place of numbers
        start_megatron()

    def stock_spec(settings: Any, *, vp_stage: int | None, **options: Any) -> Any:
        settings.moe_grouped_gemm = has_te and config.use_moe
        settings.apply_rope_fusion = has_te
        return get_gpt_decoder_block_spec(
            settings, use_transformer_engine=has_te, normalization=config.normalization, vp_stage=vp_stage
        )

    with patch.object(our_model, "decoder_spec", stock_spec), _with_experts_initialized():
        contender = Ours(config.model_copy(update={"cross_entropy": "megatron"}), rank)
    return _training_step(contender), (
        "Transformer Engine's spec" if has_te else "local spec" + ", experts one by one" * config.use_moe
    )


@contextlib.contextmanager
def _with_experts_initialized() -> Iterator[None]:
    """Has our initialization know Megatron's experts, too: the same weights, by the same keys."""
    initialize = our_model.initialize_weights

    @torch.no_grad()
    def initialize_all(chunk: Any, config: Config) -> None:
        initialize(chunk, config)
        for name, parameter in chunk.named_parameters():
            if ".mlp.experts." not in name or parameter.dim() < 2:
                continue
            experts, _, rest = initial_weights.global_name(chunk, name).partition(".mlp.experts.")
            # local_experts.3.linear_fc1.weight, or linear_fc1.weight3
            number = "".join(
                character for character in rest.replace("fc1", "").replace("fc2", "") if character.isdigit()
            )
            key = f"{experts}.mlp.experts.{number}.weight{1 if 'linear_fc1' in rest else 2}"
            initial_weights.draw_weight(
                parameter, key, config, dim=-1, stride=1, ranks=chunk.pg_collection.tp
            )

    with patch.object(our_model, "initialize_weights", initialize_all):
        yield


def transformers(config: Config, rank: Runtime) -> tuple[Step, str]:
    """Llama, or Qwen3-MoE with its `grouped_mm` experts, and torch's fused AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {
        "hidden_size": config.hidden_size, "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_query_groups, "head_dim": config.kv_channels,
        "vocab_size": config.padded_vocab_size, "max_position_embeddings": config.seq_len,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rotary_base}, "use_cache": False,
    }  # fmt: skip
    experts = {
        "num_experts": config.num_experts, "num_experts_per_tok": config.topk,
        "moe_intermediate_size": config.expert_ffn_size, "norm_topk_prob": False,
        "output_router_logits": True, "router_aux_loss_coef": 0.01,
    }  # fmt: skip
    kind, settings = (
        (Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts))
        if config.use_moe
        else (LlamaForCausalLM, LlamaConfig(**sizes))
    )
    if config.use_moe:
        settings._experts_implementation = "grouped_mm"
    with torch.device(rank.device):
        model = kind(settings).to(our_model.DTYPES[config.dtype])
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr, fused=rank.device.type == "cuda")
    samples, numbers = training_data.build_data(config)[0], itertools.count(step=config.mbsz)

    def step() -> float:
        tokens = samples.batch(next(numbers), config.mbsz).to(rank.device)
        optimizer.zero_grad()
        loss = model(input_ids=tokens[:, :-1], labels=tokens[:, :-1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad)
        optimizer.step()
        return loss.item()

    return step, "other weights"


BUILD: dict[str, Callable[[Config, Runtime], tuple[Step, str]]] = {
    "ours": ours,
    "megatron": megatron,
    "transformers": transformers,
}


def measure(config: Config, contender: str, rank: Runtime, arguments: argparse.Namespace) -> dict[str, Any]:
    """A row: the first loss, milliseconds, TFLOP/s and peak memory; with --profile it prints the operators of
    a step.
    """
    on_gpu = rank.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()  # what Megatron's hooks may still hold of the contender before
    step, note = BUILD[contender](config, rank)
    losses = [step() for _ in range(WARMUP)]
    times = [elapsed_ms([step], rank.device) for _ in range(arguments.steps)]
    milliseconds = statistics.median(times)
    if arguments.profile:
        print(f"\n{contender}\n{operators(step, on_gpu)}", flush=True)
    return {
        "contender": contender, "note": note, "num_layers": config.num_layers, "first_loss": losses[0],
        "ms": milliseconds, "range_ms": [min(times), max(times)],
        "tflops": flops_per_iteration(config, config.gbsz) / milliseconds / 1e9,
        "peak_bytes": torch.cuda.max_memory_allocated() - before if on_gpu else None,
    }  # fmt: skip


def operators(step: Step, on_gpu: bool, *, num_rows: int = 25) -> str:
    """Where the time of a step goes, by torch's profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU] + (
        [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    )
    with torch.profiler.profile(activities=activities) as profiler:
        step()
    sort_by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
    return str(profiler.key_averages().table(sort_by=sort_by, row_limit=num_rows))


class Results:
    """Rows as they come, and what is missing."""

    def __init__(self, arguments: argparse.Namespace, rank: Runtime):
        self.arguments, self.rank = arguments, rank
        self.origin = origin(rank.device)
        self.rows: list[dict[str, Any]] = []
        self.attempts = Attempts(rank.device)

    def compare(self, name: str, config: Config) -> bool:
        """Adds the rows of one model; whether the losses agree that should."""
        rows = []
        for contender in self.arguments.contenders:
            work = partial(measure, config, contender, self.rank, self.arguments)
            row = self.attempts.run(f"{contender}, {name}", work, may_fail=contender != "ours")
            if row is not None:
                rows.append(row | {"model": name})
                self.add(rows[-1])
            free(self.rank.device)
        first = [row["first_loss"] for row in rows if row["contender"] != "transformers"]
        return max(first, default=0.0) - min(first, default=0.0) <= LOSS_TOLERANCE[config.dtype] * max(
            first, default=0.0
        )

    def add(self, row: dict[str, Any]) -> None:
        peak = "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**30:.1f}"
        cells = [
            row["model"],
            str(row["num_layers"]),
            row["contender"],
            row["note"],
            f"{row['ms']:.1f}",
            f"{row['tflops']:.3g}",
            peak,
        ]
        print(f"| {' | '.join(cells)} | {row['first_loss']:.4f} |", flush=True)
        self.rows.append(row)
        self.save()

    def save(self) -> None:
        if self.arguments.json:
            result = self.origin | {"rows": self.rows, "left_out": self.attempts.left_out}
            self.arguments.json.write_text(json.dumps(result, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS), help="default: all")
    parser.add_argument("--contenders", nargs="+", choices=BUILD, default=list(BUILD), help="default: all")
    parser.add_argument("--expert-backend", default="auto", help="EXPERT_BACKEND of ours (default auto)")
    parser.add_argument(
        "--steps", type=bench_arguments.at_least(1), default=10, help="steps that are timed (default 10)"
    )
    parser.add_argument(
        "--json", type=bench_arguments.result_file, help="write the rows there, after every row"
    )
    parser.add_argument(
        "--profile", action="store_true", help="also the operators of a step, by torch's profiler"
    )
    arguments = parser.parse_args()
    try:
        config = load_config(sizes() | {"expert_backend": arguments.expert_backend}, environ={})
        device = "cuda" if torch.cuda.is_available() else "cpu"
        choose_backend(config.expert_backend, device_type=device, dtype=our_model.DTYPES[config.dtype])
    except ValueError as error:
        parser.error(" ".join(str(error).splitlines()))
    return arguments


def main() -> None:
    arguments = parse_arguments()
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        base = load_config(sizes(), environ={})
        data = write_tokens(
            Path(folder), base.vocab_size, 1 + 8 * base.seq_len * (WARMUP + arguments.steps + 2)
        )
        configs = {name: config_of(name, arguments, data) for name in arguments.model}
        results = Results(arguments, start_alone(next(iter(configs.values()))))
        facts = results.origin["machine"]
        print(
            f"{facts['card']}, {', '.join(f'{name} {found}' for name, found in facts['versions'].items())}\n"
        )
        print(
            "| model | layers | contender | parts | step, ms | TFLOP/s | peak, GiB | first loss"
            " |\n|---|---|---|---|---|---|---|---|"
        )
        try:
            wrong = [name for name, config in configs.items() if not results.compare(name, config)]
            stop()
        except DeviceLost as error:  # to stop would need the device
            results.attempts.end(error)
    results.save()
    print(*results.attempts.report(), sep="\n")
    results.attempts.exit(*(f"first losses of ours and megatron differ: {name}" for name in wrong))


if __name__ == "__main__":
    main()
