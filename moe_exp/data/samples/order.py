"""The order of a run's samples: saved with checkpoints, and compared when training resumes.

A checkpoint knows how many samples were consumed. That number means something only in the order in which they
were counted: in another one, training would see some samples twice and others not at all, and nothing in its
loss would show it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.config.checks.data import with_stage_begins
from moe_exp.config.data_stages import stages_of
from moe_exp.data.embedded import embedded_folder, ensure_embedded_corpus
from moe_exp.data.samples.dataset import content_of, fingerprint_of, print_of
from moe_exp.data.samples.skipping import Range, merged, skipped_from, stream_number
from moe_exp.data.tokens.document_ends import DocumentTokens, documents_of
from moe_exp.data.tokens.files import manifest_of, parse_split
from moe_exp.data.tokens.tokenizer import same_fingerprint, tokenizer_fingerprint
from moe_exp.data.tokens.tokens import parse_blend


@dataclass(frozen=True)
class SampleOrder:
    """Everything that the order of the training samples depends on.

    Args:
        fingerprint: of the token files (`dataset.fingerprint_of`); not their paths, so files may be moved.
        weights: share of each file in the blend, such as 7/10; empty if Megatron reads files without
            weights.
        share: the part of each file's documents that is read, begin and end from 0 to 1.
        seed: of the shuffles.
        seq_len: tokens per sample.
        data_order: DATA_ORDER.
        num_samples: of the whole run, which Megatron's order depends on; None: ours does not.
        tokenizer: `tokenizer_fingerprint` of TOKENIZER; None if that is not set.
        content: of the tokens (`dataset.content_of`).
        manifest: of all their bytes, as the manifests of the files have them; None if one has no manifest.
        packing: DOCUMENT_PACKING.
        eod_id, bos_id: as of `DocumentTokens`, both None if they are not known; they follow from the files,
            and are not compared.
        stages: the later ones of DATA_STAGES, each with `first_sample`, `seq_len`, `weights` and `files`, the
            fingerprint and hash of its files together; and `from_tokens`, which is not compared.
    """

    fingerprint: str
    weights: list[str]
    share: list[float]
    seed: int
    seq_len: int
    data_order: str
    num_samples: int | None
    tokenizer: str | None = None
    content: str = ""
    manifest: str | None = None
    packing: str = "concatenate"
    eod_id: int | None = None
    bos_id: int | None = None
    stages: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        config: Config,
        fingerprint: str,
        content: str,
        stage_prints: Sequence[str] = (),
        documents: DocumentTokens | None = None,
    ) -> SampleOrder:
        """The order that `config` asks for, over files of this fingerprint and content; `stage_prints`: of
        the files of each later stage (`dataset.print_of`); `documents`: of the files.
        """
        is_megatrons = config.data_order == "megatron"
        return cls(
            fingerprint=fingerprint,
            weights=_weights(config.train_data, is_megatrons=is_megatrons),
            share=list(parse_split(config.split or "1")[0] or (0.0, 1.0)),
            seed=config.seed,
            seq_len=config.seq_len,
            data_order=config.data_order,
            num_samples=config.train_iters * config.gbsz if is_megatrons else None,
            tokenizer=tokenizer_fingerprint(config.tokenizer) if config.tokenizer else None,
            content=content,
            manifest=_manifest(config.train_data),
            packing=config.document_packing,
            **asdict(documents or DocumentTokens()),
            stages=[
                {
                    "first_sample": stage.first_sample,
                    "seq_len": stage.seq_len,
                    "weights": _weights(stage.train_data, is_megatrons=False),
                    "files": prints,
                    "from_tokens": stage.from_tokens,
                }
                for stage, prints in zip(stages_of(config)[1:], stage_prints, strict=True)
            ],
        )

    def facts(self) -> dict[str, Any]:
        """As a checkpoint keeps them: numbers, texts and lists."""
        return asdict(self)


def order_of_files(config: Config) -> SampleOrder | None:
    """The order of training with `config`, by its token files; None if the embedded corpus is not there."""
    blend = config.train_data
    if not blend:
        if not (embedded_folder(Path(config.data_dir)) / "manifest.json").is_file():
            return None
        blend = ensure_embedded_corpus(Path(config.data_dir)).train_prefix
    blends = [blend, *(stage.train_data or blend for stage in stages_of(config)[1:])]
    prefixes = [[prefix for _, prefix in parse_blend(one)] for one in blends]
    first, *later = [(fingerprint_of(ones), content_of(ones)) for ones in prefixes]
    documents = documents_of(config.train_data) if config.train_data else None
    return SampleOrder.of(config, *first, [print_of(*prints) for prints in later], documents)


def is_same_order(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether two `SampleOrder.facts` agree in all that both have: an older version wrote fewer."""
    return not _differing(facts, saved)


def _differing(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    saved = {"packing": "concatenate", **saved}  # the only one before it was a setting
    differing = {name for name, value in facts.items() if name in saved and saved[name] != value}
    differing -= {"stages", "eod_id", "bos_id"}  # stages: those to come may change, see `order_changes`
    if same_fingerprint(facts.get("tokenizer") or "none", saved.get("tokenizer") or ""):
        differing.discard("tokenizer")
    return differing - {"manifest"} if None in (facts.get("manifest"), saved.get("manifest")) else differing


@dataclass(frozen=True)
class Change:
    """A setting by which the samples, or their order, are not those of the checkpoint."""

    name: str
    value: object
    rule: str
    fix: str
    consequence: str = "samples would be repeated or left out"

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.rule}"

    @property
    def problem(self) -> str:
        """Why training does not continue with it, in one line."""
        rule = f"{self.rule}, so {self.consequence}"
        fix = f"{self.fix}, or ALLOW_OTHER_DATA=true to continue with other data"
        return problem(self.name, self.value, rule, fix)


def order_changes(
    config: Config, order: SampleOrder, saved: Mapping[str, Any], checkpoint: str, next_sample: int
) -> list[Change]:
    """How `order`, that of `config`, differs from the one of a checkpoint; empty: training resumes in it.

    Args:
        config: settings of this start.
        order: what they and the files make of it.
        saved: `SampleOrder.facts` of the checkpoint. A fact that it does not have is not compared.
        checkpoint: what to call it.
        next_sample: the first that the checkpoint has not seen; stages from there on may be others.
    """
    differing = _differing(order.facts(), saved)
    changes = []
    if "fingerprint" in differing:
        changes.append(_other_files(config, order, saved, checkpoint))
    elif "content" in differing:
        rule = (
            f"its files hold other tokens than those of {checkpoint}, with the same lengths of documents"
            f" (content {order.content} instead of {saved['content']})"
        )
        fix = "give back the old files"
        changes.append(Change("TRAIN_DATA", config.train_data, rule, fix, "the loss would jump"))
    elif "manifest" in differing:
        rule = (
            f"its files hold other tokens than those of {checkpoint} by their manifests ({order.manifest}"
            f" instead of {saved['manifest']}), though a sample of them is the same"
        )
        fix = "give back the old files; moe-exp data verify checks whether files are what their manifest says"
        changes.append(
            Change("TRAIN_DATA", config.train_data, rule, fix, "the order of samples means others")
        )
    elif "weights" in differing:  # weights by size follow the files
        rule = f"blends its files as {_blend(order.weights)}, {checkpoint} as {_blend(saved['weights'])}"
        changes.append(Change("TRAIN_DATA", config.train_data, rule, "give back the old weights"))
    if "share" in differing:
        parts = [f"{share[0]:.4g} to {share[1]:.4g}" for share in (order.share, saved["share"])]
        rule = f"trains on the documents from {parts[0]} of each file, {checkpoint} on those from {parts[1]}"
        changes.append(Change("SPLIT", config.split, rule, "give back the old SPLIT"))
    settings = {name: name for name in ("seed", "seq_len", "data_order")} | {"packing": "document_packing"}
    for fact, name in settings.items():
        if fact in differing:
            setting, before = name.upper(), saved.get(fact, "concatenate")
            rule = f"{checkpoint} has {setting}={before}"
            changes.append(Change(setting, getattr(config, name), rule, f"set {setting}={before}"))
    if order.tokenizer and saved.get("tokenizer") and "tokenizer" in differing:
        prints = f"fingerprint {order.tokenizer} instead of {saved['tokenizer']}"
        rule, fix = f"is not the tokenizer of {checkpoint} ({prints})", "give back the old tokenizer"
        changes.append(Change("TOKENIZER", config.tokenizer, rule, fix, "ids would stand for other text"))
    past, past_of_saved = (
        [{name: value for name, value in stage.items() if name != "from_tokens"} for stage in stages]
        for stages in (
            begun_stages(order.stages, next_sample),
            begun_stages(saved.get("stages", []), next_sample),
        )
    )
    if past != past_of_saved:
        changes.append(_other_stages(config, past, past_of_saved, checkpoint, next_sample))
    if "num_samples" in differing and "data_order" not in differing:
        changes.append(_other_length(config, order, saved, checkpoint))
    return changes


def _other_files(config: Config, order: SampleOrder, saved: Mapping[str, Any], checkpoint: str) -> Change:
    prints = f"fingerprint {order.fingerprint} instead of {saved['fingerprint']}"
    rule = f"its files are not those of {checkpoint} ({prints})"
    fix = "give back the old files, in their old order"
    if not config.train_data:
        fix = "start with the versions of Python, torch and moe_exp that made the embedded corpus"
    return Change("TRAIN_DATA", config.train_data, rule, fix)


def place_stages(
    config: Config, progress: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]
) -> tuple[Config, list[str], tuple[Range, ...]]:
    """DATA_STAGES of a run as it continues from a checkpoint.

    Args:
        config: settings of this start.
        progress: facts of the checkpoint's `Progress`; empty: training starts at iteration 0.
        rollbacks: of the run.

    Returns:
        `config` whose stages in tokens begin with a batch, a line for each that this moves, and the ranges
        that the stream leaves out.
    """
    consumed, past = progress.get("consumed_samples") or 0, progress.get("skipped_samples") or []
    skipped = skipped_from(past, [pair for entry in rollbacks for pair in entry["samples"]], consumed)
    # One that begins with the very next sample keeps its place too.
    next_sample = stream_number(consumed, merged(past))
    begun = begun_stages((progress.get("sample_order") or {}).get("stages", ()), next_sample + 1)
    return *with_stage_begins(config, consumed, skipped, begun), skipped


def begun_stages(stages: Sequence[Mapping[str, Any]], next_sample: int) -> list[dict[str, Any]]:
    """Entries of `SampleOrder.stages` that have begun before a sample."""
    return [dict(stage) for stage in stages if stage["first_sample"] < next_sample]


def _other_stages(
    config: Config,
    past: Sequence[dict[str, Any]],
    past_of_saved: Sequence[dict[str, Any]],
    checkpoint: str,
    next_sample: int,
) -> Change:
    pairs = zip_longest(past, past_of_saved)
    number, (ours, theirs) = next((at, pair) for at, pair in enumerate(pairs, 1) if pair[0] != pair[1])
    rule = f"stage {number} has begun before sample {next_sample}, where {checkpoint} is, and"
    if ours is None or theirs is None:
        rule += f" {checkpoint} has {'it' if ours is None else 'no such stage'} at sample "
        rule += str((ours or theirs)["first_sample"])
    else:
        name = next(name for name in ours if ours[name] != theirs.get(name))
        rule += f" its {name} is {_shown(ours[name])}, that of the checkpoint {_shown(theirs.get(name))}"
    return Change("DATA_STAGES", config.data_stages, rule, "give back the old stage; later ones may change")


def _shown(value: Any) -> str:
    return " : ".join(value) if isinstance(value, list) else str(value)


def _other_length(config: Config, order: SampleOrder, saved: Mapping[str, Any], checkpoint: str) -> Change:
    rule = (
        f"DATA_ORDER=megatron orders the {order.num_samples} samples of TRAIN_ITERS * GBSZ otherwise than the"
        f" {saved['num_samples']} of {checkpoint}, a limit that a run with DATA_ORDER=stream does not have"
    )
    fix = f"set TRAIN_ITERS and GBSZ to {saved['num_samples']} samples again"
    return Change("TRAIN_ITERS", config.train_iters, rule, fix)


def _manifest(train_data: str) -> str | None:
    """16 hex digits of the hashes in all manifests, which unlike `content_of` are of whole files."""
    digest = hashlib.blake2b(digest_size=8)
    for _, prefix in parse_blend(train_data) if train_data else []:
        listed = manifest_of(prefix).get("outputs")
        entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        hashes = {Path(str(one.get("name"))).name: one.get("hash") for one in entries}
        for suffix in (".bin", ".idx"):
            found = hashes.get(Path(prefix).name + suffix)
            if found is None or "-" in str(found):  # of blocks: the same files may have a whole one elsewhere
                return None
            digest.update(f"{found}\n".encode())
    return digest.hexdigest() if train_data else None


def _weights(train_data: str, *, is_megatrons: bool) -> list[str]:
    """Weights divided by their sum, so that 7 and 3 are the same as 0.7 and 0.3."""
    if not train_data:
        return ["1"]
    blend = parse_blend(train_data)
    if is_megatrons and len(train_data.split()) == len(blend):
        return []
    fractions = [Fraction(str(weight)) for weight, _ in blend]
    return [str(fraction / sum(fractions)) for fraction in fractions]


def _blend(weights: list[str]) -> str:
    return " : ".join(weights) or "one after the other"
