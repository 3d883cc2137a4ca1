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
from moe_exp.data.embedded import embedded_folder, ensure_embedded_corpus
from moe_exp.data.samples.dataset import (
    Range,
    content_of,
    fingerprint_of,
    merged,
    skipped_from,
    stream_number,
)
from moe_exp.data.tokens.manifests import DocumentTokens, documents_of
from moe_exp.data.tokens.tokenizer import same_fingerprint, tokenizer_fingerprint
from moe_exp.data.tokens.tokens import manifest_of, parse_blend, parse_split


@dataclass(frozen=True)
class SampleOrder:
    """Everything that the order of the training samples depends on."""

    fingerprint: str  # `dataset.fingerprint_of` the token files; not their paths, so files may be moved
    weights: list[str]  # of files in the blend, such as 7/10; empty if Megatron reads them without
    share: list[float]  # of each file's documents that is read, begin and end from 0 to 1
    seed: int
    seq_len: int
    data_order: str
    num_samples: int | None  # of the whole run, which Megatron's order depends on; None: ours does not
    tokenizer: str | None = None  # `tokenizer_fingerprint` of TOKENIZER
    content: str = ""  # `dataset.content_of` the tokens
    manifest: str | None = None  # hashes of whole files by their manifests; None if one has none
    packing: str = "concatenate"
    eod_id: int | None = None  # as of `DocumentTokens`; both follow from the files, and are not compared
    bos_id: int | None = None
    # The later ones of DATA_STAGES, each with `first_sample`, `seq_len`, `weights` and `files`, the
    # fingerprint and hash of its files together; and `from_tokens`, which is not compared.
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
        """The order that `config` asks for, over files of this fingerprint and content; `stage_prints`: both
        of every later stage, hashed together; `documents`: of the files.
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
                for stage, prints in zip(config.stages[1:], stage_prints, strict=True)
            ],
        )

    def facts(self) -> dict[str, Any]:
        """Plain values for a checkpoint: numbers, texts and lists."""
        return asdict(self)


def order_of_files(config: Config) -> SampleOrder | None:
    """The order of training with `config`, by its token files; None if the embedded corpus is not there."""
    blend = config.train_data
    if not blend:
        if not (embedded_folder(Path(config.data_dir)) / "manifest.json").is_file():
            return None
        blend = ensure_embedded_corpus(Path(config.data_dir)).train_prefix
    blends = [blend, *(stage.train_data or blend for stage in config.stages[1:])]
    prefixes = [[prefix for _, prefix in parse_blend(one)] for one in blends]
    # lengths of documents and tokens: the order depends on the former, the text on the latter
    first, *later = [(fingerprint_of(ones), content_of(ones)) for ones in prefixes]
    together = [hashlib.blake2b(" ".join(prints).encode(), digest_size=8).hexdigest() for prints in later]
    documents = documents_of(config.train_data) if config.train_data else None
    return SampleOrder.of(config, *first, together, documents)


def is_same_order(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether two `SampleOrder.facts` agree in all that both have: an older version wrote fewer."""
    return not _differing(facts, saved)


def _differing(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    saved = {"packing": "concatenate", **saved}  # the only one before it was a setting
    differing = {name for name, value in facts.items() if name in saved and saved[name] != value}
    differing -= {"stages", "eod_id", "bos_id"}  # stages: those to come may change, see `order_changes`
    if same_fingerprint(facts.get("tokenizer") or "none", saved.get("tokenizer") or ""):
        differing.discard("tokenizer")
    # not known on one side is no difference
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
        fix = f"{self.fix}, or ALLOW_OTHER_DATA=true to continue with other data"
        return problem(self.name, self.value, f"{self.rule}, so {self.consequence}", fix)


def order_changes(
    config: Config, order: SampleOrder, saved: Mapping[str, Any], checkpoint: str, next_sample: int
) -> list[Change]:
    """How `order`, that of `config`, differs from that of a checkpoint; empty: training resumes in it.

    A fact that `saved` (`SampleOrder.facts` of the checkpoint) lacks is not compared. Stages may differ from
    `next_sample` on, the first that the checkpoint has not seen.
    """
    differing = _differing(order.facts(), saved)
    changes: list[Change] = []

    def add(name: str, rule: str, fix: str, **consequence: str) -> None:
        changes.append(Change(name, getattr(config, name.lower()), rule, fix, **consequence))

    def both(fact: str) -> str:
        return f"({fact} {getattr(order, fact)} instead of {saved[fact]})"

    if "fingerprint" in differing:
        fix = "give back the old files, in their old order"
        if not config.train_data:
            fix = "start with the versions of Python, torch and moe_exp that made the embedded corpus"
        add("TRAIN_DATA", f"its files are not those of {checkpoint} {both('fingerprint')}", fix)
    elif "content" in differing:
        rule = f"its files hold other tokens than those of {checkpoint}, with the same lengths of documents"
        fix = "give back the old files"
        add("TRAIN_DATA", f"{rule} {both('content')}", fix, consequence="the loss would jump")
    elif "manifest" in differing:
        rule = f"its files hold other tokens than those of {checkpoint} by their manifests {both('manifest')}"
        fix = "give back the old files; moe-exp data verify checks whether files are what their manifest says"
        same = "though a sample of them is the same"
        add("TRAIN_DATA", f"{rule}, {same}", fix, consequence="the order of samples means others")
    elif "weights" in differing:  # weights by size follow the files
        ours, theirs = (_shown(one) or "one after the other" for one in (order.weights, saved["weights"]))
        rule = f"blends its files as {ours}, {checkpoint} as {theirs}"
        add("TRAIN_DATA", rule, "give back the old weights")
    if "share" in differing:
        ours, theirs = (f"{share[0]:.4g} to {share[1]:.4g}" for share in (order.share, saved["share"]))
        rule = f"trains on the documents from {ours} of each file, {checkpoint} on those from {theirs}"
        add("SPLIT", rule, "give back the old SPLIT")
    settings = {name: name.upper() for name in ("seed", "seq_len", "data_order")}
    for fact, name in (settings | {"packing": "DOCUMENT_PACKING"}).items():
        if fact in differing:
            before = f"{name}={saved.get(fact, 'concatenate')}"
            add(name, f"{checkpoint} has {before}", f"set {before}")
    if order.tokenizer and saved.get("tokenizer") and "tokenizer" in differing:
        prints = f"(fingerprint {order.tokenizer} instead of {saved['tokenizer']})"
        rule, fix = f"is not the tokenizer of {checkpoint} {prints}", "give back the old tokenizer"
        add("TOKENIZER", rule, fix, consequence="ids would stand for other text")
    if rule := _other_stage(order.stages, saved.get("stages", []), checkpoint, next_sample):
        add("DATA_STAGES", rule, "give back the old stage; later ones may change")
    if "num_samples" in differing and "data_order" not in differing:
        rule = f"DATA_ORDER=megatron orders the {order.num_samples} samples of TRAIN_ITERS * GBSZ otherwise"
        rule += f" than the {saved['num_samples']} of {checkpoint}"
        rule += ", a limit that a run with DATA_ORDER=stream does not have"
        add("TRAIN_ITERS", rule, f"set TRAIN_ITERS and GBSZ to {saved['num_samples']} samples again")
    return changes


def place_stages(
    config: Config, progress: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]
) -> tuple[Config, list[str], tuple[Range, ...]]:
    """`config` whose stages in tokens begin with a batch, a line for each that this moves, and the ranges
    that the stream leaves out, as a run continues from a checkpoint with these facts of `Progress` (empty:
    from iteration 0).
    """
    consumed, past = progress.get("consumed_samples") or 0, progress.get("skipped_samples") or []
    skipped = skipped_from(past, [pair for entry in rollbacks for pair in entry["samples"]], consumed)
    # One that begins with the very next sample keeps its place too.
    next_sample = stream_number(consumed, merged(past))
    begun = begun_stages((progress.get("sample_order") or {}).get("stages", ()), next_sample + 1)
    return *config.with_stage_begins(consumed, skipped, begun), skipped


def begun_stages(stages: Sequence[Mapping[str, Any]], next_sample: int) -> list[dict[str, Any]]:
    """Entries of `SampleOrder.stages` that have begun before a sample."""
    return [dict(stage) for stage in stages if stage["first_sample"] < next_sample]


def _other_stage(
    stages: Sequence[Mapping[str, Any]],
    stages_of_saved: Sequence[Mapping[str, Any]],
    checkpoint: str,
    next_sample: int,
) -> str:
    """How the first stage that has begun differs from that of a checkpoint; empty if none does."""
    past, past_of_saved = (begun_stages(one, next_sample) for one in (stages, stages_of_saved))
    for number, (ours, theirs) in enumerate(zip_longest(past, past_of_saved), 1):
        # only what has begun is compared: later stages may be changed
        rule = f"stage {number} has begun before sample {next_sample}, where {checkpoint} is, and"
        if ours is None or theirs is None:
            what, stage = ("it", theirs) if ours is None else ("no such stage", ours)
            return f"{rule} {checkpoint} has {what} at sample {stage['first_sample']}"
        for name in ours:
            if name != "from_tokens" and ours[name] != theirs.get(name):
                mine, other = _shown(ours[name]), _shown(theirs.get(name))
                return f"{rule} its {name} is {mine}, that of the checkpoint {other}"
    return ""


def _shown(value: Any) -> str:
    return " : ".join(value) if isinstance(value, list) else str(value)


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
    # prefixes without weights, which Megatron reads one after the other
    if is_megatrons and len(train_data.split()) == len(blend):
        return []
    fractions = [Fraction(str(weight)) for weight, _ in blend]
    return [str(fraction / sum(fractions)) for fraction in fractions]
