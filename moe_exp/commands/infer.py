"""`moe-exp score`, `moe-exp eval` and `moe-exp generate`: inference with trained models."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_exp.commands.parsers import arg, command, flag, positive, repeated, string, takes
from moe_exp.config import Config, raise_for, setting_error

if TYPE_CHECKING:
    from moe_exp.engine.runtime import Runtime

T = TypeVar("T")

_SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "etp": "expert tensor"}
# Settings of a multi-node job, as in moe-exp train.
_NODES = {"nnodes": 1, "node_rank": 0, "master_addr": "localhost", "master_port": 23456}
_MODEL = (
    arg("--checkpoint DIR", "iteration folder (iter_*), checkpoints folder or run folder", required=True),
    arg("--dtype", "data type for computation (default: as in training)", choices=("fp32", "bf16", "fp16"),
        default=""),
    *(
        arg(f"--{name}", f"{what}-parallel size; may differ from that in training", positive, default=1)
        for name, what in _SIZES.items()
    ),
    arg("--gpus-per-node N", "ranks per node (default: the fewest that the parallel sizes allow)", positive,
        default=0),
    arg("--threads-per-rank N", "PyTorch threads per rank (default: an equal share of the cores)", positive,
        default=0),
    *(
        arg(f"--{name.replace('_', '-')}",
            f"same as in moe-exp train (default: ${name.upper()}, otherwise {default})")
        for name, default in _NODES.items()
    ),
)  # fmt: skip
_DOCUMENT_MASK = arg(
    "--document-mask",
    "restrict attention to tokens of the same document, as with DOCUMENT_MASK (default: as in training)",
    action=argparse.BooleanOptionalAction,
    default=None,
)


@command("score", "compute the logits of token ids")
@takes(
    *_MODEL, arg("--tokens IDS.npy", "file of input token ids: integers [B, S]", required=True),
    arg("--out LOGITS.npy", "file for next-token logits: float32 [B, S, VOCAB_SIZE]", required=True),
    arg("--batch-size", "rows per batch (default: as many as keep the logits within 256 MB)", int),
    flag("--capacity", "drop tokens above the expert capacity, as in training (MOE_TYPE=moe)"),
    _DOCUMENT_MASK,
    arg("--eod-id ID", "end-of-document token id (default: that of the tokenizer used in training)", int),
    flag("--overwrite", "replace an existing LOGITS.npy"),
)  # fmt: skip
def run_score(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.score import ScoreRequest, plan_scoring, score

    request = _request(ScoreRequest, arguments)
    plan = plan_scoring(request)
    # another call is writing it and will remove it
    is_other_calls = plan.partial.exists()
    try:
        return _run_ranks(plan, request, score)
    finally:
        # another node may finish before rank 0 has published the file
        if plan.config.world_size > 1 and not (plan.config.node_rank or is_other_calls):
            plan.partial.unlink(missing_ok=True)


@command("eval", "measure loss, perplexity and bits per byte on held-out tokens")
@takes(
    *_MODEL,
    arg("--data PREFIX", "prefixes of .bin/.idx files; each gets a row in the table (default: VALID_DATA of "
        "the run, else the validation split of TRAIN_DATA, else the embedded corpus)", nargs="+", default=[]),
    string("--data-of RUN",
           "use the validation data and sequence length of RUN instead of those of the checkpoint's run"),
    flag("--allow-other-data",
         "print a warning instead of failing if data and model use different tokenizers"),
    arg("--samples N", "evaluate only the first N sequences of each --data prefix (default: all)", int),
    flag("--by-document", "evaluate each document separately instead of joining all documents"),
    arg("--experts N", "count the tokens per expert for each --data prefix, and show the N most specialized "
        "experts per layer (if N is omitted: 8)", int, nargs="?", const=8),
    arg("--batch-size", "sequences per batch (default: as many as keep the logits within 256 MB)", int),
    flag("--capacity", "drop tokens above the expert capacity and skip sequences shorter than SEQ_LEN, as in "
         "training (MOE_TYPE=moe)"),
    _DOCUMENT_MASK,
    string("--tokenizer", "tokenizer used to compute bits per byte: tokenizer.json, its folder, a .model "
           "file, or 'bytes' for one token per byte (default: as in training)"),
    flag("--json", "print one JSON object"),
)  # fmt: skip
def run_eval(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.evaluate import EvalRequest, plan_evaluation, print_evaluated

    request = _request(EvalRequest, arguments, data=tuple(arguments.data), as_json=arguments.json)
    return _run_ranks(plan_evaluation(request), request, print_evaluated)


@command("generate", "continue a prompt with the model of a checkpoint")
@takes(
    *_MODEL,
    repeated("--prompt", "text to continue (repeatable)"),
    repeated("--prompt-file FILE", "file with a prompt, or - for standard input (repeatable)"),
    string("--tokenizer", "tokenizer.json, its folder, a .model file, or the word bytes, for one token "
           "per byte (default: as in training)"),
    flag("--allow-special", "parse <s> and other special tokens in prompts instead of treating them as text"),
    arg("--max-new-tokens", "maximum number of new tokens per prompt", default=128),
    arg("--max-positions", "maximum number of tokens in a prompt plus its continuation (default: SEQ_LEN of "
        "training)", default=0),
    arg("--temperature", "sampling temperature; 0: always the most probable token (default: 0)", default=0.0),
    arg("--top-k", "sample from the k most probable tokens; 0: all (default: 0)", default=0),
    arg("--top-p",
        "sample from the smallest set of tokens with at least this total probability; 1: all (default: 1)",
        default=1.0),
    arg("--seed", "random seed; results do not depend on the parallel layout", default=1234),
    repeated("--stop TEXT", "text at which generation stops; the text itself is not printed (repeatable)"),
    flag("--json", "print one JSON object per prompt, with tokens and log-probabilities"),
)  # fmt: skip
def run_generate(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.generate import GenerateRequest, Sampling, plan_generation, print_generated

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
    prompts = list(arguments.prompt)
    for name in arguments.prompt_file:
        try:
            data = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
            prompts.append(data.decode())
        except OSError as error:
            fix = "specify a file that you can read, or - for standard input"
            raise setting_error("prompt_file", name, f"cannot be read ({error.strerror})", fix) from None
        except UnicodeDecodeError as error:
            rule = f"is not UTF-8 ({error.reason} at byte {error.start})"
            raise setting_error("prompt_file", name, rule, "convert it") from None
    if not prompts:
        raise setting_error("prompt", "", "must be given", "use --prompt TEXT or --prompt-file FILE")
    # an empty stop text would end every answer at once
    texts = {"prompts": tuple(prompts), "stops": tuple(filter(None, arguments.stop))}
    request = _request(GenerateRequest, arguments, sampling=sampling, **texts, as_json=arguments.json)
    return _run_ranks(plan_generation(request), request, print_generated)


def _request(kind: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """Creates a request of class `kind` and its layout from `arguments`; `others` are additional fields."""
    from moe_exp.inference.ranks import Layout

    sizes = (*_SIZES, "gpus_per_node", "threads_per_rank")
    values: dict[str, Any] = {name: getattr(arguments, name) for name in sizes}
    for name, default in _NODES.items():
        # only these are read from the environment, as they differ between the nodes of a cluster
        text = getattr(arguments, name) or os.environ.get(name.upper()) or str(default)
        if isinstance(default, int) and not text.isdigit():
            raise setting_error(name, text, "must be a whole number", f"pass --{name.replace('_', '-')} N")
        values[name] = int(text) if isinstance(default, int) else text
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return kind(**given | others | {"layout": Layout(**values)})


def _run_ranks(plan: Any, request: Any, work: Callable[[Any, Runtime], None]) -> int:
    """With one rank, runs `work` in this process; else torchrun runs the module of the request's class."""
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
    raise_for(check_machine(config))
    with tempfile.NamedTemporaryFile("w", suffix=".json", encoding="utf-8") as file:
        file.write(request.to_json())
        file.flush()
        command = torchrun_command(config, [file.name], type(request).__module__)
        return run_job(command, child_environment(config))
