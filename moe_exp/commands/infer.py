"""`moe-exp score`, `moe-exp eval` and `moe-exp generate`: what was trained, used."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_exp.commands.guard import add_command
from moe_exp.config import setting_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_exp.config import Config
    from moe_exp.engine.runtime import Runtime
    from moe_exp.inference.ranks import Layout

# The library is imported by the commands that use it: `moe-exp --help` answers at once.

T = TypeVar("T")


def add_commands(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    score = add_command(subparsers, "score", _score, "compute the logits of token ids")
    _add_model(score)
    add = score.add_argument
    add("--tokens", required=True, metavar="IDS.npy", help="integers [B, S]")
    about = "float32 [B, S, VOCAB_SIZE], for the token after each"
    add("--out", required=True, metavar="LOGITS.npy", help=about)
    add("--batch-size", type=int, help="rows at a time (default: as many as have 256 MB of logits)")
    about = "drop tokens over capacity as in training, per batch (MOE_TYPE=moe)"
    add("--capacity", action="store_true", help=about)
    _add_document_mask(score)
    about = "the token that ends a document (default: that of the training's tokenizer)"
    add("--eod-id", type=int, metavar="ID", help=about)
    add("--overwrite", action="store_true", help="replace LOGITS.npy where it exists")
    about = "measure loss, perplexity and bits per byte on held-out tokens"
    _add_evaluation(add_command(subparsers, "eval", _eval, about))
    about = "continue a prompt with the model of a checkpoint"
    _add_generation(add_command(subparsers, "generate", _generate, about))


def _add_model(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    about = "an iter_ folder, a checkpoints folder or a run folder"
    add("--checkpoint", required=True, metavar="DIR", help=about)
    about = "compute type (default: that of the training)"
    add("--dtype", choices=("fp32", "bf16", "fp16"), default="", help=about)
    for name, what in (("tp", "tensor"), ("pp", "pipeline"), ("ep", "expert"), ("etp", "expert tensor")):
        about = f"{what} parallel size (default: 1, whatever the training had)"
        add(f"--{name}", type=_positive, default=1, help=about)
    about = "ranks per node (default: what the sizes need)"
    add("--gpus-per-node", type=_positive, default=0, metavar="N", help=about)
    about = "torch threads (default: the cores, shared)"
    add("--threads-per-rank", type=_positive, default=0, metavar="N", help=about)
    for name in ("nnodes", "node-rank", "master-addr", "master-port"):
        variable = name.upper().replace("-", "_")
        add(f"--{name}", default=None, help=f"as in moe-exp train (default: {variable} of the environment)")


def _add_document_mask(parser: argparse.ArgumentParser) -> None:
    about = "tokens see only their own document, as with DOCUMENT_MASK (default: as in training)"
    action = argparse.BooleanOptionalAction
    parser.add_argument("--document-mask", action=action, default=None, help=about)


def _add_evaluation(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    data_help = (
        "of .bin/.idx files, each a row of the table (default: the run's VALID_DATA, the part of"
        " TRAIN_DATA that its SPLIT holds out, or the embedded corpus)"
    )
    add = parser.add_argument
    add("--data", nargs="+", default=[], metavar="PREFIX", help=data_help)
    data_of_help = (
        "evaluate on the held-out data of this run instead of the checkpoint's own, in its sequences"
    )
    add("--data-of", default="", metavar="RUN", help=data_of_help)
    about = "warn of data of another tokenizer than the model's, by its manifest, instead of refusing it"
    add("--allow-other-data", action="store_true", help=about)
    about = "the first N sequences of SEQ_LEN tokens of each prefix (default: all)"
    add("--samples", type=int, metavar="N", help=about)
    add("--by-document", action="store_true", help="every document alone, instead of one text of all of them")
    experts_help = (
        "count which experts take each prefix's tokens, and show the N most specialised ones per layer"
        " (default: 8)"
    )
    add("--experts", type=int, nargs="?", const=8, metavar="N", help=experts_help)
    add("--batch-size", type=int, help="sequences at a time (default: as many as have 256 MB of logits)")
    capacity_help = (
        "drop tokens over capacity, and leave out sequences shorter than SEQ_LEN, as in training"
        " (MOE_TYPE=moe)"
    )
    add("--capacity", action="store_true", help=capacity_help)
    _add_document_mask(parser)
    tokenizer_help = (
        "tokenizer.json, its folder, a .model file, or bytes, for bits per byte (default: the training's)"
    )
    add("--tokenizer", default="", help=tokenizer_help)
    add("--json", action="store_true", help="print one JSON object")


def _add_generation(parser: argparse.ArgumentParser) -> None:
    _add_model(parser)
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="text to continue; may be given several times")
    about = "a file with a prompt, or - for standard input"
    add("--prompt-file", action="append", default=[], metavar="FILE", help=about)
    about = "tokenizer.json, its folder, a .model file, or bytes (default: the training's)"
    add("--tokenizer", default="", help=about)
    add("--allow-special", action="store_true", help="read special tokens in a prompt, such as <s>, as such")
    add("--max-new-tokens", type=int, default=128, help="per prompt (default: 128)")
    about = "of prompt and text together (default: SEQ_LEN of the training)"
    add("--max-positions", type=int, default=0, help=about)
    add("--temperature", type=float, default=0.0, help="0: the most probable token each time (default)")
    add("--top-k", type=int, default=0, help="draw from the k most probable tokens; 0: all (default)")
    about = "draw from the most probable tokens that add up to this; 1: all (default)"
    add("--top-p", type=float, default=1.0, help=about)
    about = "of the random stream; the same text in every layout (default: 1234)"
    add("--seed", type=int, default=1234, help=about)
    about = "end before this text; may be given several times"
    add("--stop", action="append", default=[], metavar="TEXT", help=about)
    about = "print one JSON object per prompt, with tokens and log-probabilities"
    add("--json", action="store_true", help=about)


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number of at least 1")
    return int(text)


def _layout(arguments: argparse.Namespace) -> Layout:
    from moe_exp.inference.ranks import Layout

    same = ("tp", "pp", "ep", "etp", "gpus_per_node", "threads_per_rank")
    values: dict[str, Any] = {name: getattr(arguments, name) for name in same}
    defaults = {"nnodes": 1, "node_rank": 0, "master_addr": "localhost", "master_port": 23456}
    for name, default in defaults.items():
        text = getattr(arguments, name) or os.environ.get(name.upper()) or str(default)
        if isinstance(default, int) and not text.isdigit():
            raise setting_error(name, text, "must be a whole number", f"give --{name.replace('_', '-')}")
        values[name] = int(text) if isinstance(default, int) else text
    return Layout(**values)


def _request(kind: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """A request of `kind`: its fields are the arguments of the same names, `layout` and `others`."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return kind(**given | others | {"layout": _layout(arguments)})


def _score(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.score import ScoreRequest, plan_scoring, score

    request = _request(ScoreRequest, arguments)
    plan = plan_scoring(request)
    is_other_calls = plan.partial.exists()
    try:
        return _run_ranks(plan, request, score)
    finally:
        # another node may be done before rank 0 has published the file
        if plan.config.world_size > 1 and not (plan.config.node_rank or is_other_calls):
            plan.partial.unlink(missing_ok=True)


def _eval(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.evaluate import EvalRequest, plan_evaluation, print_evaluated

    request = _request(EvalRequest, arguments, data=tuple(arguments.data), as_json=arguments.json)
    return _run_ranks(plan_evaluation(request), request, print_evaluated)


def _generate(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.generate import GenerateRequest, Sampling, plan_generation, print_generated

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    texts = {"prompts": tuple(_prompts(arguments)), "stops": tuple(stop for stop in arguments.stop if stop)}
    request = _request(GenerateRequest, arguments, sampling=sampling, **texts, as_json=arguments.json)
    return _run_ranks(plan_generation(request), request, print_generated)


def _prompts(arguments: argparse.Namespace) -> list[str]:
    prompts = list(arguments.prompt)
    for name in arguments.prompt_file:
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            prompts.append(data.decode())
        except OSError as error:
            fix = "name a file that you can read, or - for standard input"
            raise setting_error("prompt_file", name, f"cannot be read ({error.strerror})", fix) from None
        except UnicodeDecodeError as error:
            rule = f"is not UTF-8 ({error.reason} at byte {error.start})"
            raise setting_error("prompt_file", name, rule, "convert it") from None
    if not prompts:
        raise setting_error("prompt", "", "there is none", "give --prompt TEXT, or --prompt-file FILE")
    return prompts


def _run_ranks(plan: Any, request: Any, work: Callable[[Any, Runtime], None]) -> int:
    """Runs `work` of the plan here if one rank is asked for, else a job of the request's module."""
    from moe_exp.config import ConfigError
    from moe_exp.inference.ranks import check_files, run_alone
    from moe_exp.launch.machine_checks import check_machine
    from moe_exp.launch.torchrun_job import child_environment, run_job, torchrun_command

    config: Config = plan.config
    check_files(plan.folder)
    if config.world_size == 1:
        run_alone(config, lambda rank: work(plan, rank))
        return 0
    if config.nnodes == 1:
        config = config.model_copy(update={"master_port": 0})  # a free one
    if problems := check_machine(config):
        raise ConfigError(problems)
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(request.to_json())
        file.flush()
        command = torchrun_command(config, [file.name], type(request).__module__)
        return run_job(command, child_environment(config))
