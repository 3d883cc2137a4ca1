"""`moe-exp score`, `moe-exp eval` and `moe-exp generate`: what was trained, used."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from moe_exp.commands.parsers import arg, command, flag, positive, repeated, string, takes
from moe_exp.config import setting_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from moe_exp.config import Config
    from moe_exp.engine.runtime import Runtime

# The library is imported by the commands that use it: `moe-exp --help` answers at once.

T = TypeVar("T")

_SIZES = {"tp": "tensor", "pp": "pipeline", "ep": "expert", "etp": "expert tensor"}
# Settings of a job of several nodes, as in moe-exp train.
_NODES = {"nnodes": 1, "node_rank": 0, "master_addr": "localhost", "master_port": 23456}
_MODEL = (
    arg("--checkpoint DIR", "an iter_ folder, a checkpoints folder or a run folder", required=True),
    arg(
        "--dtype",
        "compute type (default: that of the training)",
        choices=("fp32", "bf16", "fp16"),
        default="",
    ),
    *(
        arg(f"--{name}", f"{what} parallel size (default: 1, whatever the training had)", positive, default=1)
        for name, what in _SIZES.items()
    ),
    arg("--gpus-per-node N", "ranks per node (default: what the sizes need)", positive, default=0),
    arg("--threads-per-rank N", "torch threads (default: the cores, shared)", positive, default=0),
    *(
        arg(
            f"--{name.replace('_', '-')}", f"as in moe-exp train (default: {name.upper()} of the environment)"
        )
        for name in _NODES
    ),
)
_DOCUMENT_MASK = arg(
    "--document-mask",
    "tokens see only their own document, as with DOCUMENT_MASK (default: as in training)",
    action=argparse.BooleanOptionalAction,
    default=None,
)


@command("score", "compute the logits of token ids")
@takes(
    *_MODEL,
    arg("--tokens IDS.npy", "integers [B, S]", required=True),
    arg("--out LOGITS.npy", "float32 [B, S, VOCAB_SIZE], for the token after each", required=True),
    arg("--batch-size", "rows at a time (default: as many as have 256 MB of logits)", int),
    flag("--capacity", "drop tokens over capacity as in training, per batch (MOE_TYPE=moe)"),
    _DOCUMENT_MASK,
    arg("--eod-id ID", "the token that ends a document (default: that of the training's tokenizer)", int),
    flag("--overwrite", "replace LOGITS.npy where it exists"),
)
def run_score(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.score import ScoreRequest, plan_scoring, score

    request = _request(ScoreRequest, arguments)
    plan = plan_scoring(request)
    # made by another call, which removes it itself
    is_other_calls = plan.partial.exists()
    try:
        return _run_ranks(plan, request, score)
    finally:
        # another node may be done before rank 0 has published the file
        if plan.config.world_size > 1 and not (plan.config.node_rank or is_other_calls):
            plan.partial.unlink(missing_ok=True)


@command("eval", "measure loss, perplexity and bits per byte on held-out tokens")
@takes(
    *_MODEL,
    arg(
        "--data PREFIX",
        "of .bin/.idx files, each a row of the table (default: the run's VALID_DATA, the part of"
        " TRAIN_DATA that its SPLIT holds out, or the embedded corpus)",
        nargs="+",
        default=[],
    ),
    string(
        "--data-of RUN",
        "evaluate on the held-out data of this run instead of the checkpoint's own, in its sequences",
    ),
    flag(
        "--allow-other-data",
        "warn of data of another tokenizer than the model's, by its manifest, instead of refusing it",
    ),
    arg("--samples N", "the first N sequences of SEQ_LEN tokens of each prefix (default: all)", int),
    flag("--by-document", "every document alone, instead of one text of all of them"),
    arg(
        "--experts N",
        "count which experts take each prefix's tokens, and show the N most specialised ones per layer"
        " (default: 8)",
        int,
        nargs="?",
        const=8,
    ),
    arg("--batch-size", "sequences at a time (default: as many as have 256 MB of logits)", int),
    flag(
        "--capacity",
        "drop tokens over capacity, and leave out sequences shorter than SEQ_LEN, as in training"
        " (MOE_TYPE=moe)",
    ),
    _DOCUMENT_MASK,
    string(
        "--tokenizer",
        "tokenizer.json, its folder, a .model file, or bytes, for bits per byte (default: the training's)",
    ),
    flag("--json", "print one JSON object"),
)
def run_eval(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.evaluate import EvalRequest, plan_evaluation, print_evaluated

    request = _request(EvalRequest, arguments, data=tuple(arguments.data), as_json=arguments.json)
    return _run_ranks(plan_evaluation(request), request, print_evaluated)


@command("generate", "continue a prompt with the model of a checkpoint")
@takes(
    *_MODEL,
    repeated("--prompt", "text to continue; may be given several times"),
    repeated("--prompt-file FILE", "a file with a prompt, or - for standard input"),
    string("--tokenizer", "tokenizer.json, its folder, a .model file, or bytes (default: the training's)"),
    flag("--allow-special", "read special tokens in a prompt, such as <s>, as such"),
    arg("--max-new-tokens", "per prompt (default: 128)", default=128),
    arg("--max-positions", "of prompt and text together (default: SEQ_LEN of the training)", default=0),
    arg("--temperature", "0: the most probable token each time (default)", default=0.0),
    arg("--top-k", "draw from the k most probable tokens; 0: all (default)", default=0),
    arg("--top-p", "draw from the most probable tokens that add up to this; 1: all (default)", default=1.0),
    arg("--seed", "of the random stream; the same text in every layout (default: 1234)", default=1234),
    repeated("--stop TEXT", "end before this text; may be given several times"),
    flag("--json", "print one JSON object per prompt, with tokens and log-probabilities"),
)
def run_generate(arguments: argparse.Namespace) -> int:
    from moe_exp.inference.generate import GenerateRequest, Sampling, plan_generation, print_generated

    sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p, arguments.seed)
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
    # an empty text would end every answer before it begins
    texts = {"prompts": tuple(prompts), "stops": tuple(filter(None, arguments.stop))}
    request = _request(GenerateRequest, arguments, sampling=sampling, **texts, as_json=arguments.json)
    return _run_ranks(plan_generation(request), request, print_generated)


def _request(kind: type[T], arguments: argparse.Namespace, **others: Any) -> T:
    """A request of `kind`: its fields are the arguments of the same names, `layout` and `others`."""
    from moe_exp.inference.ranks import Layout

    values: dict[str, Any] = {
        name: getattr(arguments, name) for name in (*_SIZES, "gpus_per_node", "threads_per_rank")
    }
    for name, default in _NODES.items():
        # only these are read from the environment: every node of a cluster has its own
        text = getattr(arguments, name) or os.environ.get(name.upper()) or str(default)
        if isinstance(default, int) and not text.isdigit():
            raise setting_error(name, text, "must be a whole number", f"give --{name.replace('_', '-')}")
        values[name] = int(text) if isinstance(default, int) else text
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    given = {name: value for name, value in vars(arguments).items() if name in names}
    return kind(**given | others | {"layout": Layout(**values)})


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
