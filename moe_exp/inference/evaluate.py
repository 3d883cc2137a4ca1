"""Held-out text to loss, perplexity and bits per byte, per data prefix and in total; and which experts take
which prefix's tokens.

Replicas share the batches as in `score`; sums are in float64, and reduced once at the end.
"""

import json
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_exp.checkpoint.format.folders import iteration_of, one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import Config, ConfigError, problem
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.data.tokens.text_bytes import TokenBytes
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.data.tokens.tokens import parse_blend
from moe_exp.engine.model import moe_layers
from moe_exp.engine.runtime import Runtime
from moe_exp.host.progress import progress
from moe_exp.inference.eval_report import Evaluation, Row, print_evaluation
from moe_exp.inference.expert_usage import LayerUsage, RouterCounts
from moe_exp.inference.held_out import Cut, HeldOut, Int64Array
from moe_exp.inference.jobs import planned_quietly, run_rank
from moe_exp.inference.layout import Layout, config_for_use
from moe_exp.inference.loading import load_model
from moe_exp.inference.stage import Stage
from moe_exp.inference.text import tokenizer_for

logger = logging.getLogger("moe_exp.inference.evaluate")  # by name: torchrun runs this module as __main__

_BATCH_BYTES = 256 << 20  # of logits, where the batch size is not given
_IGNORED = -100


@dataclass(frozen=True)
class EvalRequest:
    """What is to be evaluated.

    Args:
        checkpoint: an iter_ folder, a checkpoints folder or a run folder.
        data: prefixes of .bin/.idx files, each a row; none: the validation data of the run, or of the
            embedded corpus.
        samples: sequences per prefix, the first ones; None: all.
        by_document: every document alone, see `held_out.Cut`.
        experts: show this many experts per layer; None: count no experts.
        batch_size: sequences at a time; None: as many as have 256 MB of logits, or with `capacity` MBSZ of
            the training.
        tokenizer: see `text.tokenizer_for`.
        dtype: compute type; empty: that of the training.
        capacity: as in training: drop tokens over capacity, and leave out what is shorter than a sequence.
        as_json: print one JSON object instead of tables.
        layout: of the ranks.
    """

    checkpoint: str
    data: tuple[str, ...] = ()
    samples: int | None = None
    by_document: bool = False
    experts: int | None = None
    batch_size: int | None = None
    tokenizer: str = ""
    dtype: str = ""
    capacity: bool = False
    as_json: bool = False
    layout: Layout = field(default_factory=Layout)

    @classmethod
    def from_json(cls, text: str) -> "EvalRequest":
        """From what `to_json` wrote."""
        values = json.loads(text)
        return cls(**values | {"layout": Layout(**values["layout"]), "data": tuple(values["data"])})

    def to_json(self) -> str:
        """For the ranks of a job."""
        return json.dumps(asdict(self))


@dataclass(frozen=True)
class Plan:
    """A request that was checked."""

    request: EvalRequest
    folder: Path
    config: Config
    sources: list[HeldOut]
    token_bytes: TokenBytes | None
    batch_size: int

    @property
    def batches(self) -> list[tuple[int, int, int]]:
        """(source, first sequence, number of sequences) of every batch."""
        size = self.batch_size
        return [
            (number, first, min(size, len(source) - first))
            for number, source in enumerate(self.sources)
            for first in range(0, len(source), size)
        ]


def plan_evaluation(request: EvalRequest, *, check_ids: bool = True) -> Plan:
    """Checks a request without loading weights. Without `check_ids` the tokens are not read.

    Raises:
        ValueError: a line for everything that cannot be.
    """
    folder = one_checkpoint(Path(request.checkpoint).expanduser())
    saved = saved_config(folder)
    problems = _number_problems(request, saved)
    config = config_for_use(folder, request.layout, dtype=request.dtype or None, capacity=request.capacity)
    tokenizer = _tokenizer(request, saved)
    if problems:
        raise ConfigError(problems)
    sources = _sources(request, saved, check_ids=check_ids)
    batch_size = request.batch_size or _batch_size(request, saved, max(map(len, sources)))
    if tokenizer is not None:
        _compare_tokenizers(tokenizer, sources)
    if saved.use_moe and saved.moe_type == "moe" and not request.capacity:
        logger.info("MOE_TYPE=moe: no token is dropped here; --capacity drops as in training")
    return Plan(request, folder, config, sources, TokenBytes(tokenizer) if tokenizer else None, batch_size)


def _number_problems(request: EvalRequest, saved: Config) -> list[str]:
    problems = [
        problem(name, value, "must be at least 1", "give a positive number, or leave it out")
        for name, value in (
            ("samples", request.samples),
            ("batch_size", request.batch_size),
            ("experts", request.experts),
        )
        if value is not None and value < 1
    ]
    if request.experts is not None and not saved.use_moe:
        problems.append(
            problem("experts", request.experts, "the model is dense, it has none", "leave --experts out")
        )
    if request.capacity and saved.seq_len % request.layout.tp:
        rule = (
            f"with --capacity the {saved.seq_len} tokens of a sequence cannot be padded to a multiple of it"
        )
        problems.append(problem("tp", request.layout.tp, rule, "use another TP, or leave --capacity out"))
    if request.capacity and request.by_document:
        rule = "training drops tokens in sequences of SEQ_LEN, whatever documents are in them"
        problems.append(problem("by_document", "true", rule, "leave --capacity or --by-document out"))
    return problems


def _tokenizer(request: EvalRequest, saved: Config) -> TextTokenizer | None:
    """None, said with the reason, where there is none and none is asked for."""
    try:
        return tokenizer_for(saved, request.tokenizer)
    except ValueError as error:
        if request.tokenizer:
            raise
        logger.warning("no bits per byte: %s", error)
        return None


def _sources(request: EvalRequest, saved: Config, *, check_ids: bool) -> list[HeldOut]:
    cut = Cut(saved.seq_len, request.by_document, whole_only=request.capacity, samples=request.samples)
    sources, problems = [], []
    for prefix in request.data or _own_data(saved):
        try:
            source = HeldOut(str(Path(prefix).expanduser()), cut)
        except ValueError as error:
            problems.append(str(error))
            continue
        if check_ids and (wrong := source.id_problem(saved.vocab_size)):
            problems.append(wrong)
        sources.append(source)
    if not problems and len({source.prefix for source in sources}) < len(sources):
        problems.append(
            problem(
                "data",
                " ".join(source.prefix for source in sources),
                "names a prefix twice",
                "name each once",
            )
        )
    if problems:
        raise ConfigError(problems)
    return sources


def _own_data(saved: Config) -> list[str]:
    """What the run was validated on."""
    if saved.valid_data:
        return [prefix for _, prefix in parse_blend(saved.valid_data)]
    if saved.train_data:
        rule = "there is none, and the training had no VALID_DATA"
        raise ValueError(problem("data", "", rule, "give --data, prefixes of .bin/.idx files"))
    return [ensure_embedded_corpus(Path(saved.data_dir)).valid_prefix]


def _batch_size(request: EvalRequest, saved: Config, most: int) -> int:
    return (
        saved.mbsz
        if request.capacity
        else max(1, min(most, _BATCH_BYTES // (4 * saved.seq_len * saved.vocab_size)))
    )


def _compare_tokenizers(tokenizer: TextTokenizer, sources: list[HeldOut]) -> None:
    """Says where the data was made with another tokenizer, as far as its manifest knows."""
    for source in sources:
        facts = source.files.manifest.get("settings", {}).get("tokenizer")
        made_with = facts.get("hash") if isinstance(facts, dict) else None
        if made_with not in (None, tokenizer.facts()["hash"]):
            logger.warning(
                "data=%s: by its manifest of another tokenizer than %s", source.prefix, tokenizer.name
            )


def evaluate(plan: Plan, rank: Runtime) -> Evaluation:
    """Loads the model and evaluates; the same result on every rank. Called by every rank.

    Raises:
        ValueError: when the checkpoint cannot be loaded.
    """
    stage = Stage(plan.config, rank, load_model(plan.config, rank, plan.folder))
    sums = torch.zeros(len(plan.sources), 2, dtype=torch.float64, device=rank.device)  # nats, bytes
    counts = _router_counts(plan, stage) if plan.request.experts is not None else None
    _run_batches(plan, stage, sums, counts)
    if rank.world_size > 1:
        torch.distributed.all_reduce(sums)
        if counts is not None:
            torch.distributed.all_reduce(counts.counts_PLE)
    has_bytes = plan.token_bytes is not None
    rows = [
        Row(source.prefix, len(source), source.num_predicted, nats, round(num_bytes) if has_bytes else None)
        for source, (nats, num_bytes) in zip(plan.sources, sums.tolist(), strict=True)
    ]
    usage = [] if counts is None else _usage(plan.config, counts)
    return Evaluation(str(plan.folder), iteration_of(plan.folder), rows, usage)


def _router_counts(plan: Plan, stage: Stage) -> RouterCounts:
    return RouterCounts(
        moe_layers([stage.model]),
        num_layers=plan.config.num_layers,
        num_sources=len(plan.sources),
        num_experts=plan.config.num_experts,
        device=stage.rank.device,
    )


def _usage(config: Config, counts: RouterCounts) -> list[LayerUsage]:
    counts_PLE = counts.counts_PLE.cpu().numpy()
    return [
        LayerUsage(layer + 1, counts_PLE[:, layer])
        for layer, is_moe in enumerate(config.moe_layers)
        if is_moe
    ]


def _run_batches(plan: Plan, stage: Stage, sums: Tensor, counts: RouterCounts | None) -> None:
    """Batch i goes to replica i modulo their number. Experts may be spread over replicas, so all work to the
    last step.
    """
    replicas, batches = stage.rank.groups.dp, plan.batches
    shows, total = stage.rank.is_first, sum(count for _, _, count in batches)
    with progress("eval", total, unit="sequences") if shows else nullcontext(_no_progress) as advance:
        for first_of_step in range(0, len(batches), replicas.size()):
            step = batches[first_of_step : first_of_step + replicas.size()]
            is_mine = replicas.rank() < len(step)
            # A replica for which no batch is left computes one, and counts nothing.
            number, first, count = step[replicas.rank() if is_mine else 0]
            source = plan.sources[number]
            sequences = source.read(first, count)
            tokens, labels = _padded(sequences)
            if counts is not None:
                counts.source, counts.valid_T = number, _valid_tokens(stage, labels, is_mine=is_mine)
            logits = stage.logits(tokens)
            if logits is not None and stage.writes and is_mine:
                sums[number, 0] += _nats(logits, labels)
                sums[number, 1] += (
                    source.count_bytes(first, sequences, plan.token_bytes) if plan.token_bytes else 0
                )
            advance(sum(count for _, _, count in step))


def _no_progress(sequences: int) -> None:
    """On ranks that show none."""


def _padded(sequences: list[Int64Array]) -> tuple[Tensor, Tensor]:
    """Inputs and labels, int64 [B, S], as long as the longest sequence. What is behind a token does not
    change its logits.
    """
    longest = max(map(len, sequences)) - 1
    tokens = torch.zeros(len(sequences), longest, dtype=torch.int64)
    labels = torch.full_like(tokens, _IGNORED)
    for row, ids in enumerate(sequences):
        tokens[row, : len(ids) - 1] = torch.from_numpy(ids[:-1])
        labels[row, : len(ids) - 1] = torch.from_numpy(ids[1:])
    return tokens, labels


def _valid_tokens(stage: Stage, labels: Tensor, *, is_mine: bool) -> Tensor:
    """Which tokens of this rank's part of the sequence count, bool [T], in the order in which the routers see
    them.
    """
    tp = stage.rank.groups.tp
    valid_BS = nn.functional.pad((labels != _IGNORED) & is_mine, (0, -labels.size(1) % tp.size()))
    valid_SB = valid_BS.transpose(0, 1).chunk(tp.size())[tp.rank()]
    return valid_SB.flatten().to(stage.rank.device)


def _nats(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy summed over the labels; row by row, so that only one is in memory twice."""
    labels = labels.to(logits.device)
    losses = [
        nn.functional.cross_entropy(x, y, reduction="none", ignore_index=_IGNORED)
        for x, y in zip(logits, labels, strict=True)
    ]
    return torch.stack(losses).double().sum()


def print_evaluated(plan: Plan, rank: Runtime, *, show: Callable[[str], None] = print) -> None:
    """Evaluates and prints on rank 0. Called by every rank."""
    result = evaluate(plan, rank)
    if not rank.is_first:
        return
    if plan.request.as_json:
        show(json.dumps(result.to_json(), allow_nan=False))
    else:
        print_evaluation(result, num_experts=plan.request.experts or 0)


def main(request_file: str) -> None:
    """One rank of a job that torchrun started."""
    request = EvalRequest.from_json(Path(request_file).read_text(encoding="utf-8"))
    plan = planned_quietly(lambda: plan_evaluation(request, check_ids=False))
    run_rank(plan.config, lambda rank: print_evaluated(plan, rank))


if __name__ == "__main__":
    main(sys.argv[1])
