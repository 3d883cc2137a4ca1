"""Evaluates held-out text: loss, perplexity, bits per byte and expert usage, for each data prefix and in
total. The batches are divided among the replicas, as in `score`. Each rank keeps its sums in float64; the
ranks add them up once, at the end. Token files are cut into sequences so that every token except the first of
each text is predicted exactly once.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import UNKNOWN_DATA, saved_config, saved_order
from moe_exp.checkpoint.format.torch_dist import read_common
from moe_exp.checkpoint.tools.info import iteration_of
from moe_exp.config import Config, problem, raise_for, setting_error
from moe_exp.config.loading import load_config
from moe_exp.data.embedded import ensure_embedded_corpus
from moe_exp.data.own_text import find_prepared_text
from moe_exp.data.tokens import tokens as token_files
from moe_exp.data.tokens.manifests import DocumentTokens, check_ends, documents_of, trained_documents
from moe_exp.data.tokens.ranged import prefix_of
from moe_exp.data.tokens.text_bytes import NOT_KEPT, TokenBytes
from moe_exp.data.tokens.tokenizer import TextTokenizer, is_tokenizer_of, same_tokenizer
from moe_exp.engine.model import moe_layers
from moe_exp.engine.runtime import Runtime
from moe_exp.host.files import expanded
from moe_exp.inference import ranks
from moe_exp.inference.eval_report import Evaluation, LayerUsage, RouterCounts, Row, print_evaluation
from moe_exp.inference.text import tokenizer_for

logger = logging.getLogger("moe_exp.inference.evaluate")  # by name: torchrun runs this module as __main__

Int64Array = npt.NDArray[np.int64]

_IGNORED = -100
_SCANNED_TOKENS = 2**24


@dataclass(frozen=True)
class EvalRequest(ranks.Request):
    """Settings of an evaluation."""

    # prefixes of .bin/.idx files, one row each; empty: the run's VALID_DATA or SPLIT, or the embedded corpus
    data: tuple[str, ...] = ()
    # another run whose held-out data is used, cut and masked as in that run
    data_of: str = ""
    allow_other_data: bool = False  # accept data of another tokenizer (according to its manifest)
    samples: int | None = None  # limit of sequences per prefix; None: all
    by_document: bool = False  # evaluate every document by itself, see `Cut`
    experts: int | None = None  # number of experts to show per layer; None: do not count experts
    batch_size: int | None = None  # sequences; None: 256 MB of logits, or with `capacity` the training's MBSZ
    tokenizer: str = ""  # see `text.tokenizer_for`
    capacity: bool = False  # as in training: drop tokens over capacity, skip incomplete sequences
    document_mask: bool | None = None  # limit attention to the document; None: as in training
    as_json: bool = False  # print one JSON object instead of tables


@dataclass(frozen=True)
class Cut:
    """Options for cutting texts into sequences."""

    seq_len: int  # S, predicted tokens per sequence; a text's last sequence may have fewer
    by_document: bool = False  # each document is a text; otherwise all are one, as in training's validation
    whole_only: bool = False  # skip sequences shorter than S, as in validation during training
    samples: int | None = None  # limit of sequences; None: all
    share: token_files.Share = (0.0, 1.0)  # range of the documents, as divided by SPLIT
    share_of_sequences: bool = False  # DATA_ORDER=megatron divides the file's sequences instead of documents


class HeldOut:
    """Sequences of one .bin/.idx prefix. Sequence i consists of the tokens `begins[i]` to `ends[i] - 1`; all
    of them except the first are predicted. Raises ValueError if files are missing or damaged, or have no
    token to predict.
    """

    def __init__(self, prefix: str, cut: Cut):
        self.prefix = prefix_of(prefix)
        self.files = token_files.TokenFiles(self.prefix)
        # Adjacent sequences of a text share one token: the last of one is the first of the next.
        divided = self.files.sequence_bounds if cut.share_of_sequences else self.files.document_bounds
        first, last = divided[list(token_files.share_range(len(divided) - 1, cut.share))]
        bounds = np.unique(np.clip(self.files.document_bounds, first, last))
        bounds = bounds if cut.by_document else bounds[[0, -1]]
        lengths = np.maximum(np.diff(bounds) - 1, 0)  # predicted tokens of each text
        counts = -(-lengths // cut.seq_len)
        place = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        begins = np.repeat(bounds[:-1], counts) + place * cut.seq_len
        ends = np.minimum(begins + cut.seq_len + 1, np.repeat(bounds[1:], counts))
        if cut.whole_only:
            whole = ends - begins == cut.seq_len + 1
            begins, ends = begins[whole], ends[whole]
        self.begins, self.ends = begins[: cut.samples], ends[: cut.samples]
        if not len(self.begins):
            least = f"SEQ_LEN + 1 = {cut.seq_len + 1}" if cut.whole_only else "two"
            where = "must have a document with" if cut.by_document else "must have"
            raise setting_error("data", self.prefix, f"{where} at least {least} tokens", "use more text")

    def __len__(self) -> int:
        return len(self.begins)

    def read(self, first: int, count: int) -> list[Int64Array]:
        """Token ids of the sequences `first` to `first + count - 1`."""
        chosen = slice(first, first + count)
        bounds = zip(self.begins[chosen].tolist(), self.ends[chosen].tolist(), strict=True)
        return [self.files.read(begin, end).astype(np.int64) for begin, end in bounds]

    def count_bytes(
        self, first: int, sequences: Sequence[Int64Array], token_bytes: TokenBytes, masked_id: int | None
    ) -> int:
        """Bytes of predicted tokens, except right after `masked_id`. `first`: index of `sequences[0]`."""
        bounds, total = self.files.document_bounds, 0
        for begin, ids in zip(self.begins[first:], sequences, strict=False):
            is_first = np.zeros(len(ids) - 1, dtype=bool)
            documents = bounds[np.searchsorted(bounds, begin + 1) : np.searchsorted(bounds, begin + len(ids))]
            is_first[documents - begin - 1] = True
            is_first |= ids[:-1] == (-1 if token_bytes.bos_id is None else token_bytes.bos_id)
            counts = ids[:-1] != (-1 if masked_id is None else masked_id)
            total += int(token_bytes.each(ids[1:], is_first)[counts].sum())
        return total

    def id_problem(self, vocab_size: int) -> str | None:
        """Describes the first token id outside the model's vocabulary; None if there is no such id."""
        last = int(self.ends[-1])
        for begin in range(int(self.begins[0]), last, _SCANNED_TOKENS):
            ids = self.files.read(begin, min(begin + _SCANNED_TOKENS, last))
            for value in (int(ids.min()), int(ids.max())):
                if not 0 <= value < vocab_size:
                    place = begin + int((ids == value).argmax())
                    rule = f"has id {value} at token {place}, but the model's ids are 0 to {vocab_size - 1}"
                    return problem("data", self.prefix, rule, "tokenize with the model's tokenizer")
        return None


@dataclass(frozen=True)
class EvaluationPlan:
    """A checked request."""

    request: EvalRequest
    folder: Path
    config: Config
    sources: list[HeldOut]
    token_bytes: list[TokenBytes] | None  # one per source
    batch_size: int
    eod_id: int | None  # end-of-document token, only with DOCUMENT_MASK

    @property
    def batches(self) -> list[tuple[int, int, int]]:
        """(source, first sequence, number of sequences) for each batch."""
        size, found = self.batch_size, []
        for number, source in enumerate(self.sources):
            found += [(number, at, min(size, len(source) - at)) for at in range(0, len(source), size)]
        return found


def plan_evaluation(request: EvalRequest, *, check_ids: bool = True) -> EvaluationPlan:
    """Checks a request without loading weights; with `check_ids`, also checks the token ids of its data.
    A ValueError lists all problems.
    """
    folder = request.folder
    saved, order = saved_config(folder), saved_order(folder)
    owner = _Owner.of(request.data_of) if request.data_of else _Owner(saved, order)
    if owner.settings.seq_len > (longest := saved.longest_sample):
        text = "data: sequences have SEQ_LEN=%d as in %s, but the model was trained with SEQ_LEN=%d"
        logger.warning(text, owner.settings.seq_len, owner.named, longest)
    how_data_is_cut = ("seq_len", "data_order", "document_mask", "eod_mask_loss")
    saved = saved.model_copy(update={name: getattr(owner.settings, name) for name in how_data_is_cut})
    mask = saved.document_mask if request.document_mask is None else request.document_mask
    mask, capacity = mask and not request.by_document, request.capacity
    config = request.config_for(folder, capacity=capacity, document_mask=mask, seq_len=saved.seq_len)
    config = config.model_copy(update={"eod_mask_loss": saved.eod_mask_loss})
    # tokenizer of the --data-of run, if known
    of_data = None
    with suppress(ValueError):
        of_data = tokenizer_for(owner.settings, "", order=owner.order) if owner.named else None
    tokenizer = _tokenizer(request, saved, order, of_data)
    raise_for(_number_problems(request, saved))
    sources = _sources(request, saved, owner, check_ids=check_ids)
    most = max(map(len, sources))
    batch_size = request.batch_size or ranks.batch_size_of(saved, saved.seq_len, most, capacity=capacity)
    if tokenizer is not None:
        tokenizers = [tokenizer, of_data] if of_data else [tokenizer]
        _compare_tokenizers(request, tokenizers, trained_documents(saved, order), sources)
    if saved.use_moe and saved.moe_type == "moe" and not capacity:
        logger.info("MOE_TYPE=moe: evaluating without dropped tokens; use --capacity to drop as in training")
    eod_id = None
    if config.document_mask:
        problems, eod_id = check_ends(config, [source.prefix for source in sources])
        raise_for(problems)
    token_bytes = None
    if tokenizer:
        # Each source's documents may start and end with other tokens; sources that agree share a table.
        ends = [documents_of(source.prefix) or tokenizer for source in sources]
        as_in_data = [replace(tokenizer, eod_id=one.eod_id, bos_id=one.bos_id) for one in ends]
        tables = {one: TokenBytes(one) for one in as_in_data}
        token_bytes = [tables[one] for one in as_in_data]
        if token_bytes[0].note:
            logger.info(NOT_KEPT, tokenizer.name, token_bytes[0].note)
    return EvaluationPlan(request, folder, config, sources, token_bytes, batch_size, eod_id)


@dataclass(frozen=True)
class _Owner:
    """The run that provides the held-out data if --data is not given."""

    settings: Config
    order: Mapping[str, Any]  # from `saved_order`
    named: str = ""  # --data-of; empty: the checkpoint's run

    def error(self, rule: str) -> ValueError:
        """Builds the error about the run's data."""
        others = "" if self.named else ", or --data-of with another run's folder"
        fix = f"pass --data with prefixes of .bin/.idx files{others}"
        return setting_error("data_of" if self.named else "data", self.named, rule, fix)

    @classmethod
    def of(cls, data_of: str) -> "_Owner":
        """Reads the run that --data-of names; the run may have no checkpoint yet."""
        path = expanded(data_of)
        if (path / "config.yaml").is_file() and not any(path.glob("checkpoints/iter_*")):
            return cls(load_config({"config": path}, {}), {}, data_of)
        try:
            folder = one_checkpoint(path)
            return cls(saved_config(folder), saved_order(folder), data_of)
        except ValueError as error:
            # name the option that the user gave
            raise ValueError(str(error).replace("checkpoint=", "DATA_OF=", 1)) from None

    def data(self) -> tuple[list[str], token_files.Share]:
        """Prefixes of the validation data, and the range of documents to use."""
        given = self.settings
        if given.train_data == UNKNOWN_DATA:
            raise self.error("the training data of a converted model is unknown")
        saved = find_prepared_text(given, self.order.get("tokenizer") or "")
        share = token_files.parse_split(saved.split)[1]
        if saved.valid_data:
            where = "the run's VALID_DATA" if given.valid_data else "held-out documents of TRAIN_DATA"
            logger.info("data: %s", where)
            return [prefix for _, prefix in token_files.parse_blend(saved.valid_data)], (0.0, 1.0)
        if saved.train_data and share:
            logger.info("data: the validation part of TRAIN_DATA (SPLIT=%s)", saved.split)
            return [prefix for _, prefix in token_files.parse_blend(saved.train_data)], share
        if saved.train_data:
            raise self.error("training used neither VALID_DATA nor a SPLIT for validation")
        logger.info("data: the held-out part of the embedded corpus")
        return [ensure_embedded_corpus(Path(saved.data_dir)).valid_prefix], (0.0, 1.0)


def _number_problems(request: EvalRequest, saved: Config) -> Iterator[str]:
    for name in ("samples", "batch_size", "experts"):
        if (value := getattr(request, name)) is not None and value < 1:
            yield problem(name, value, "must be at least 1", "use a positive number, or omit it")
    if request.experts is not None and not saved.use_moe:
        rule = "requires an MoE model, but this model is dense"
        yield problem("experts", request.experts, rule, "omit --experts")
    if request.capacity and saved.seq_len % request.layout.tp:
        rule = f"must divide the sequence length {saved.seq_len} if --capacity is given"
        yield problem("tp", request.layout.tp, rule, "use another TP, or omit --capacity")
    if request.data_of and request.data:
        fix = "omit --data or --data-of"
        yield problem("data_of", request.data_of, "cannot be combined with --data", fix)
    if request.capacity and request.by_document:
        # Training drops tokens in sequences of SEQ_LEN, regardless of their documents.
        rule = "cannot be combined with --capacity"
        yield problem("by_document", "true", rule, "omit --capacity or --by-document")


def _tokenizer(
    request: EvalRequest, saved: Config, order: Mapping[str, Any], of_data: TextTokenizer | None
) -> TextTokenizer | None:
    """Tokenizer of the model or, if it is unknown, of the --data-of run; None if both are unknown. Raises
    ValueError if the two tokenizers differ.
    """
    try:
        found = tokenizer_for(saved, request.tokenizer, order=order)
    except ValueError as error:
        if request.tokenizer:
            raise
        if of_data is None:
            logger.warning("no bits per byte: %s", error)
        return of_data
    if of_data and not same_tokenizer(found.recorded(), of_data.recorded()):
        rule = f"the run's tokenizer {of_data.name} differs from the model's tokenizer {found.name}"
        fix = "specify a run with the model's tokenizer, or pass --data with text tokenized by that tokenizer"
        raise setting_error("data_of", request.data_of, rule, fix)
    return found


def _sources(request: EvalRequest, saved: Config, owner: _Owner, *, check_ids: bool) -> list[HeldOut]:
    prefixes, share = (list(request.data), (0.0, 1.0)) if request.data else owner.data()
    cut = Cut(
        saved.seq_len, request.by_document, whole_only=request.capacity, samples=request.samples,
        share=share, share_of_sequences=saved.data_order == "megatron",
    )  # fmt: skip
    sources, problems = [], []
    for prefix in prefixes:
        try:
            source = HeldOut(str(expanded(prefix)), cut)
        except ValueError as error:
            problems.append(str(error))
            continue
        if check_ids and (wrong := source.id_problem(saved.vocab_size)):
            problems.append(wrong)
        sources.append(source)
    if not problems and len({source.prefix for source in sources}) < len(sources):
        named = " ".join(source.prefix for source in sources)
        problems.append(problem("data", named, "must not name a prefix twice", "name each prefix once"))
    raise_for(problems)
    return sources


def _compare_tokenizers(
    request: EvalRequest,
    tokenizers: Sequence[TextTokenizer],
    trained: DocumentTokens | None,
    sources: Sequence[HeldOut],
) -> None:
    """Raises ValueError if data was tokenized differently from the training data. With --allow-other-data, or
    if neither --data nor --data-of is given, logs a warning instead.
    """
    for source in sources:
        facts = token_files.tokenizer_facts(token_files.manifest_of(source.prefix))
        documents = documents_of(source.prefix)
        if "hash" in facts and not any(is_tokenizer_of(one.name, facts) for one in tokenizers):
            rule = f"the manifest of {source.prefix} names a tokenizer other than {tokenizers[0].name}"
            fix = "if the model was trained with the data's tokenizer, pass it as --tokenizer"
        elif trained and documents and trained != documents:
            rule = f"documents of {source.prefix} and of the training data begin or end with different tokens"
            fix = "tokenize the text with the --eod-token and --prepend-bos of the training data"
        else:
            continue
        name, value = ("data_of", request.data_of) if request.data_of else ("data", " ".join(request.data))
        if value and not request.allow_other_data:
            raise setting_error(name, value, rule, f"{fix}, or pass --allow-other-data")
        logger.warning("%s", rule)


def evaluate(plan: EvaluationPlan, rank: Runtime) -> Evaluation:
    """Evaluates the model. All ranks must call this; all get the same result. ValueError if loading fails."""
    stage = ranks.Stage(plan.config, rank, ranks.load_model(plan.config, rank, plan.folder), plan.eod_id)
    # nats, tokens and bytes; float64 counts exactly up to 2^53
    sums = torch.zeros(len(plan.sources), 3, dtype=torch.float64, device=rank.device)
    counts = None
    if plan.request.experts is not None:
        sizes = (len(plan.sources), plan.config.num_layers, plan.config.num_experts)
        counts = RouterCounts(moe_layers([stage.model]), sizes, rank.device)
    _run_batches(plan, stage, sums, counts)
    if rank.world_size > 1:
        torch.distributed.all_reduce(sums)
        if counts is not None:
            torch.distributed.all_reduce(counts.counts_PLE)
    has_bytes = plan.token_bytes is not None
    rows = [
        Row(source.prefix, len(source), round(count), nats, round(num_bytes) if has_bytes else None)
        for source, (nats, count, num_bytes) in zip(plan.sources, sums.tolist(), strict=True)
    ]
    usage = []
    if counts is not None:
        counts_PLE = counts.counts_PLE.cpu().numpy()
        layers = [layer for layer, is_moe in enumerate(plan.config.moe_layers) if is_moe]
        usage = [LayerUsage(layer + 1, counts_PLE[:, layer]) for layer in layers]
    return Evaluation(str(plan.folder), iteration_of(plan.folder, read_common(plan.folder)), rows, usage)


def _run_batches(
    plan: EvaluationPlan, stage: ranks.Stage, sums: torch.Tensor, counts: RouterCounts | None
) -> None:
    batches = ranks.shared_batches(plan.batches, stage.rank, "eval", "sequences", lambda batch: batch[2])
    tp = stage.rank.groups.tp
    for (number, first, count), is_mine in batches:
        source = plan.sources[number]
        sequences = source.read(first, count)
        # Inputs and labels [B, S], padded to the longest sequence; padding does not change logits before it.
        tokens = torch.zeros(len(sequences), max(map(len, sequences)) - 1, dtype=torch.int64)
        labels = torch.full_like(tokens, _IGNORED)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids) - 1] = torch.from_numpy(ids[:-1])
            labels[row, : len(ids) - 1] = torch.from_numpy(ids[1:])
        if counts is not None:
            # mask of this rank's tokens that count, in the routers' token order
            valid_BS = nn.functional.pad((labels != _IGNORED) & is_mine, (0, -labels.size(1) % tp.size()))
            valid_SB = valid_BS.transpose(0, 1).chunk(tp.size())[tp.rank()]
            counts.source, counts.valid_T = number, valid_SB.flatten().to(stage.rank.device)
        masks = plan.config.eod_mask_loss and not plan.request.by_document
        # The prediction after an end-of-document token does not count, as in training.
        if (masked_id := source.files.end_of_document[0] if masks else None) is not None:
            labels[tokens == masked_id] = _IGNORED
        logits = stage.logits(tokens)
        if logits is not None and stage.writes and is_mine:
            labels = labels.to(logits.device)
            # row by row to save memory
            loss = partial(nn.functional.cross_entropy, reduction="none", ignore_index=_IGNORED)
            nats = [loss(x, y) for x, y in zip(logits, labels, strict=True)]
            sums[number, 0] += torch.stack(nats).double().sum()
            sums[number, 1] += (labels != _IGNORED).sum()
            if plan.token_bytes:
                sums[number, 2] += source.count_bytes(first, sequences, plan.token_bytes[number], masked_id)


def print_evaluated(plan: EvaluationPlan, rank: Runtime) -> None:
    """Evaluates the model and prints the result on rank 0. All ranks must call this."""
    result = evaluate(plan, rank)
    if not rank.is_first:
        return
    if plan.request.as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    else:
        print_evaluation(result, num_experts=plan.request.experts or 0)


if __name__ == "__main__":
    ranks.run_rank(lambda file: plan_evaluation(EvalRequest.read(file), check_ids=False), print_evaluated)
