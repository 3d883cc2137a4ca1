"""Generation from a cache: ours against transformers' `generate`, with the same sizes, greedy, one prompt,
turn by turn.

    python bench/bench_generate.py                # two models, one thread; about a minute on 2 cores
    python bench/bench_generate.py --threads 2

Prefill is the time to the first token, decode that of each token after it. The fastest of the rounds counts,
which disturbs the least what else runs on the machine. Weights are random, and not the same: the work is.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import MixtralConfig, MixtralForCausalLM

from moe_exp.config import Config
from moe_exp.engine import runtime
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.inference.generate import Sampler, Sampling, new_tokens
from moe_exp.inference.ranks import Stage

MODELS: dict[str, dict[str, int]] = {
    "4 layers, hidden 128, 8 experts of 256": {
        "layers": 4,
        "hidden": 128,
        "ffn": 256,
        "heads": 4,
        "groups": 2,
        "vocab": 4096,
    },
    "8 layers, hidden 256, 8 experts of 512": {
        "layers": 8,
        "hidden": 256,
        "ffn": 512,
        "heads": 8,
        "groups": 4,
        "vocab": 4096,
    },
    "8 layers, hidden 512, 8 experts of 1024": {
        "layers": 8,
        "hidden": 512,
        "ffn": 1024,
        "heads": 8,
        "groups": 4,
        "vocab": 32000,
    },
}
EXPERTS, TOPK = 8, 2
ROUNDS = 7


def ours(sizes: dict[str, int], length: int) -> Callable[[list[int], int], None]:
    """A function of a prompt and a number of new tokens."""
    config = Config(
        preset="cpu", gpus_per_node=1, num_layers=sizes["layers"], hidden_size=sizes["hidden"],
        ffn_hidden_size=sizes["ffn"], num_heads=sizes["heads"], num_query_groups=sizes["groups"],
        vocab_size=sizes["vocab"], num_experts=EXPERTS, topk=TOPK, router_pre_softmax=False, seq_len=length,
        dtype="fp32", threads_per_rank=torch.get_num_threads(),
    )  # fmt: skip
    rank = runtime.start_alone(config)
    stage = Stage(
        config, rank, build_chunk(config, transformer_config(config), rank, 0).eval().requires_grad_(False)
    )

    def run(prompt: list[int], num_new: int) -> None:
        for _ in new_tokens(stage, prompt, Sampler(Sampling()), max_positions=len(prompt) + num_new):
            pass

    return run


def theirs(sizes: dict[str, int], length: int) -> Callable[[list[int], int], None]:
    """The same."""
    config = MixtralConfig(
        vocab_size=sizes["vocab"], hidden_size=sizes["hidden"], intermediate_size=sizes["ffn"],
        num_hidden_layers=sizes["layers"], num_attention_heads=sizes["heads"],
        num_key_value_heads=sizes["groups"], max_position_embeddings=length, num_local_experts=EXPERTS,
        num_experts_per_tok=TOPK,
    )  # fmt: skip
    model: Any = MixtralForCausalLM(config).eval()
    model.generation_config.eos_token_id = None

    def run(prompt: list[int], num_new: int) -> None:
        tokens = torch.tensor([prompt])
        model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=num_new, do_sample=False
        )

    return run


def measure(
    runs: list[Callable[[list[int], int], None]], prompt: list[int], num_new: int
) -> list[tuple[float, float]]:
    """Seconds of prefill and per token of decode, for each."""
    best = [[float("inf")] * 2 for _ in runs]
    for _ in range(ROUNDS):
        for run, times in zip(runs, best, strict=True):
            for index, count in enumerate((1, 1 + num_new)):
                start = time.perf_counter()
                run(prompt, count)
                times[index] = min(times[index], time.perf_counter() - start)
    return [(first, (whole - first) / num_new) for first, whole in best]


def main() -> None:
    """Prints a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    arguments = parser.parse_args()
    print(
        "| model | prefill, ms | transformers | ratio | decode, tokens/s | transformers | ratio"
        " |\n|---|---|---|---|---|---|---|"
    )
    length = arguments.prompt_tokens + arguments.new_tokens + 1
    for name, sizes in MODELS.items():
        torch.set_num_threads(arguments.threads)
        torch.manual_seed(1)
        prompt = torch.randint(sizes["vocab"], (arguments.prompt_tokens,)).tolist()
        runs = [ours(sizes, length), theirs(sizes, length)]
        (prefill, token), (their_prefill, their_token) = measure(runs, prompt, arguments.new_tokens)
        runtime.stop()
        decode = f"{1 / token:.0f} | {1 / their_token:.0f} | {their_token / token:.2f}"
        print(
            f"| {name} | {1e3 * prefill:.0f} | {1e3 * their_prefill:.0f} | {their_prefill / prefill:.2f} |"
            f" {decode} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
