"""`moe-exp score`, `moe-exp eval` and `moe-exp generate`: what was trained, used."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_exp.config import Config
    from moe_exp.engine.runtime import Runtime
    from moe_exp.inference.layout import Layout

# The library is imported by the commands that use it: `moe-exp --help` answers at once.

_DTYPES = ("fp32", "bf16", "fp16")
_SHOWN_EXPERTS = 8


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds this file's commands."""
    score = subparsers.add_parser(
        "score", help="token ids to logits, with the model of a checkpoint", allow_abbrev=False
    )
    _add_model(score)
    score.add_argument("--tokens", required=True, metavar="IDS.npy", help="integers [B, S]")
    score.add_argument(
        "--out",
        required=True,
        metavar="LOGITS.npy",
        help="float32 [B, S, VOCAB_SIZE], for the token after each",
    )
    score.add_argument(
        "--batch-size", type=int, help="rows at a time (default: as many as have 256 MB of logits)"
    )
    score.add_argument(
        "--capacity",
        action="store_true",
        help="drop tokens over capacity as in training, per batch (MOE_TYPE=moe)",
    )
    score.add_argument("--overwrite", action="store_true", help="replace LOGITS.npy where it exists")
    score.set_defaults(run=_score)
    evaluate = subparsers.add_parser(
        "eval", help="loss, perplexity and bits per byte on held-out tokens", allow_abbrev=False
    )
    _add_model(evaluate)
    _add_evaluation(evaluate)
    evaluate.set_defaults(run=_eval)
    generate = subparsers.add_parser(
        "generate", help="text that goes on from a prompt, with the model of a checkpoint", allow_abbrev=False
    )
    _add_model(generate)
    _add_generation(generate)
    generate.set_defaults(run=_generate)


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        required=True,
        metavar="DIR",
        help="an iter_ folder, a checkpoints folder or a run folder",
    )
    parser.add_argument(
        "--dtype", choices=_DTYPES, default="", help="compute type (default: that of the training)"
    )
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        parser.add_argument(
            f"--{name}",
            type=_positive,
            default=1,
            help=f"{what} parallel size (default: 1, whatever the training had)",
        )
    parser.add_argument(
        "--gpus-per-node",
        type=_positive,
        default=0,
        metavar="N",
        help="ranks per node (default: what the sizes need)",
    )
    parser.add_argument(
        "--threads-per-rank",
        type=_positive,
        default=0,
        metavar="N",
        help="torch threads (default: the cores, shared)",
    )
    for name in ("nnodes", "node-rank", "master-addr", "master-port"):
        variable = name.upper().replace("-", "_")
        parser.add_argument(
            f"--{name}", default=None, help=f"as in moe-exp train (default: {variable} of the environment)"
        )


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    data_help = (
        "of .bin/.idx files, each a row of the table (default: the run's VALID_DATA, or the embedded corpus)"
    )
    parser.add_argument("--data", nargs="+", default=[], metavar="PREFIX", help=data_help)
    parser.add_argument(
        "--samples",
        type=int,
        metavar="N",
        help="the first N sequences of SEQ_LEN tokens of each prefix (default: all)",
    )
    parser.add_argument(
        "--by-document", action="store_true", help="every document alone, instead of one text of all of them"
    )
    experts_help = (
        "count which experts take each prefix's tokens, and show the N most specialised ones per layer"
        " (default: 8)"
    )
    parser.add_argument(
        "--experts", type=int, nargs="?", const=_SHOWN_EXPERTS, metavar="N", help=experts_help
    )
    parser.add_argument(
        "--batch-size", type=int, help="sequences at a time (default: as many as have 256 MB of logits)"
    )
    capacity_help = (
        "drop tokens over capacity, and leave out sequences shorter than SEQ_LEN, as in training"
        " (MOE_TYPE=moe)"
    )
    parser.add_argument("--capacity", action="store_true", help=capacity_help)
    tokenizer_help = (
        "tokenizer.json, its folder, a .model file, or bytes, for bits per byte (default: the training's)"
    )
    parser.add_argument("--tokenizer", default="", help=tokenizer_help)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--prompt", action="append", default=[], help="text to go on from; may be given several times"
    )
    parser.add_argument(
        "--prompt-file",
        action="append",
        default=[],
        metavar="FILE",
        help="a file with a prompt, or - for standard input",
    )
    parser.add_argument(
        "--tokenizer",
        default="",
        help="tokenizer.json, its folder, a .model file, or bytes (default: the training's)",
    )
    parser.add_argument(
        "--allow-special", action="store_true", help="read special tokens in a prompt, such as <s>, as such"
    )
    parser.add_argument("--max-new-tokens", type=int, default=128, help="per prompt (default: 128)")
    parser.add_argument(
        "--max-positions",
        type=int,
        default=0,
        help="of prompt and text together (default: SEQ_LEN of the training)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.0, help="0: the most probable token each time (default)"
    )
    parser.add_argument(
        "--top-k", type=int, default=0, help="draw from the k most probable tokens; 0: all (default)"
    )
    parser.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="draw from the most probable tokens that add up to this; 1: all (default)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=1234,
        help="of the random stream; the same text in every layout (default: 1234)",
    )
    parser.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end before this text; may be given several times",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="print one JSON object per prompt, with tokens and log-probabilities",
    )


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _layout(arguments: argparse.Namespace) -> Layout:
    from moe_exp.config import problem
    from moe_exp.inference.layout import Layout

    values: dict[str, Any] = {
        name: getattr(arguments, name)
        for name in ("tp", "pp", "ep", "etp", "gpus_per_node", "threads_per_rank")
    }
    for name, default in (
        ("nnodes", 1),
        ("node_rank", 0),
        ("master_addr", "localhost"),
        ("master_port", 23456),
    ):
        text = getattr(arguments, name) or os.environ.get(name.upper()) or str(default)
        if isinstance(default, int) and not text.isdigit():
            raise ValueError(
                problem(name, text, "must be a whole number", f"give --{name.replace('_', '-')}")
            )
        values[name] = int(text) if isinstance(default, int) else text
    return Layout(**values)


def _score(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.jobs import run_alone
    from moe_exp.inference.loading import check_files
    from moe_exp.inference.score import ScoreRequest, plan_scoring, score

    request = ScoreRequest(
        checkpoint=arguments.checkpoint,
        tokens=arguments.tokens,
        out=arguments.out,
        batch_size=arguments.batch_size,
        dtype=arguments.dtype,
        capacity=arguments.capacity,
        overwrite=arguments.overwrite,
        layout=_layout(arguments),
    )
    plan = plan_scoring(request)
    check_files(plan.folder)
    if plan.config.world_size > 1:
        try:
            return _run_job(plan.config, request.to_json(), "moe_exp.inference.score")
        finally:
            if not plan.config.node_rank:  # another node may be done before rank 0 has published the file
                plan.partial.unlink(missing_ok=True)
    run_alone(plan.config, lambda rank: score(plan, rank))
    return 0


def _eval(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.evaluate import EvalRequest, plan_evaluation, print_evaluated
    from moe_exp.inference.loading import check_files

    request = EvalRequest(
        checkpoint=arguments.checkpoint,
        data=tuple(arguments.data),
        samples=arguments.samples,
        by_document=arguments.by_document,
        experts=arguments.experts,
        batch_size=arguments.batch_size,
        tokenizer=arguments.tokenizer,
        dtype=arguments.dtype,
        capacity=arguments.capacity,
        as_json=arguments.json,
        layout=_layout(arguments),
    )
    plan = plan_evaluation(request)
    check_files(plan.folder)
    return _run_ranks(
        plan.config, request.to_json(), "moe_exp.inference.evaluate", lambda rank: print_evaluated(plan, rank)
    )


def _generate(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.generate import GenerateRequest, plan_generation, print_generated
    from moe_exp.inference.loading import check_files
    from moe_exp.inference.sampling import Sampling

    request = GenerateRequest(
        checkpoint=arguments.checkpoint,
        prompts=tuple(_prompts(arguments)),
        sampling=Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed),
        max_new_tokens=arguments.max_new_tokens,
        max_positions=arguments.max_positions,
        stops=tuple(stop for stop in arguments.stop if stop),
        tokenizer=arguments.tokenizer,
        allow_special=arguments.allow_special,
        dtype=arguments.dtype,
        as_json=arguments.json,
        layout=_layout(arguments),
    )
    plan = plan_generation(request)
    check_files(plan.folder)
    return _run_ranks(
        plan.config, request.to_json(), "moe_exp.inference.generate", lambda rank: print_generated(plan, rank)
    )


def _prompts(arguments: argparse.Namespace) -> list[str]:
    from moe_exp.config import problem

    prompts = list(arguments.prompt)
    for name in arguments.prompt_file:
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            prompts.append(data.decode())
        except OSError as error:
            fix = "name a file that you can read, or - for standard input"
            raise ValueError(
                problem("prompt_file", name, f"cannot be read ({error.strerror})", fix)
            ) from None
        except UnicodeDecodeError as error:
            raise ValueError(
                problem(
                    "prompt_file", name, f"is not UTF-8 ({error.reason} at byte {error.start})", "convert it"
                )
            ) from None
    if not prompts:
        raise ValueError(problem("prompt", "", "there is none", "give --prompt TEXT, or --prompt-file FILE"))
    return prompts


def _run_ranks(config: Config, request: str, module: str, alone: Callable[[Runtime], None]) -> int:
    """`alone` in this process where one rank is asked for, else a job of `module`, whose ranks read
    `request`.
    """
    from moe_exp.inference.jobs import run_alone

    if config.world_size > 1:
        return _run_job(config, request, module)
    run_alone(config, alone)
    return 0


def _run_job(config: Config, request: str, module: str) -> int:
    """Runs the ranks of this node."""
    from moe_exp.config import ConfigError
    from moe_exp.host.processes import free_port
    from moe_exp.launch.machine_checks import check_machine
    from moe_exp.launch.torchrun_job import child_environment, run_job, torchrun_command

    if config.nnodes == 1:
        config = config.model_copy(update={"master_port": free_port()})
    if problems := check_machine(config):
        raise ConfigError(problems)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(request)
        file.flush()
        return run_job(torchrun_command(config, [file.name], module), child_environment(config), stopping="")
