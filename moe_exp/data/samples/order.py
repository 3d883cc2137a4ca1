"""Sample order of a run, saved in checkpoints and compared when training resumes.

A checkpoint stores the number of consumed samples. If the order changed, a resumed run would repeat some
samples and miss others, and the loss would not reveal the mistake.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from itertools import zip_longest
from pathlib import Path
from typing import Any

from moe_exp.config import Config, problem
from moe_exp.data.embedded import embedded_folder, ensure_embedded_corpus
from moe_exp.data.samples import dataset
from moe_exp.data.tokens.manifests import DocumentTokens, documents_of
from moe_exp.data.tokens.tokenizer import same_fingerprint, tokenizer_fingerprint
from moe_exp.data.tokens.tokens import manifest_of, parse_blend, parse_split

_Stages = Sequence[Mapping[str, Any]]  # `SampleOrder.stages`


@dataclass(frozen=True)
class SampleOrder:
    """Everything that determines the order of the training samples."""

    fingerprint: str  # `dataset.fingerprint_of` the token files; independent of paths, so files may be moved
    weights: list[str]  # blend weights such as 7/10; empty if Megatron reads the files without weights
    share: list[float]  # part of each file's documents that is used, begin and end from 0 to 1
    seed: int
    seq_len: int
    data_order: str
    num_samples: int | None  # of the whole run, only for Megatron's order
    tokenizer: str | None = None  # `tokenizer_fingerprint` of TOKENIZER
    content: str = ""  # `dataset.content_of` the tokens
    manifest: str | None = None  # hash of the file hashes in the manifests; None if one is missing
    packing: str = "concatenate"
    eod_id: int | None = None  # see `DocumentTokens`; both follow from the files and are not compared
    bos_id: int | None = None
    # Later entries of DATA_STAGES: `first_sample`, `seq_len`, `weights`, `files` (hash of the files'
    # fingerprint and content) and `from_tokens` (not compared).
    stages: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def of(
        cls, config: Config, fingerprint: str, content: str, stage_prints: Sequence[str] = ()
    ) -> "SampleOrder":
        """Sample order for `config`. `fingerprint` and `content`: hashes of the token files.
        `stage_prints`: for each stage after the first, a hash of its files' fingerprint and content.
        """
        is_megatrons = config.data_order == "megatron"
        return cls(
            fingerprint=fingerprint,
            weights=_weights(config.train_data, is_megatrons=is_megatrons),
            share=list(parse_split(config.split)[0] or (0.0, 1.0)),
            **{name: getattr(config, name) for name in ("seed", "seq_len", "data_order")},
            num_samples=config.train_iters * config.gbsz if is_megatrons else None,
            tokenizer=tokenizer_fingerprint(config.tokenizer) if config.tokenizer else None,
            content=content,
            manifest=_manifest(config.train_data),
            packing=config.document_packing,
            **asdict(documents_of(config.train_data) or DocumentTokens()),
            stages=[
                {name: getattr(stage, name) for name in ("first_sample", "seq_len", "from_tokens")}
                | {"weights": _weights(stage.train_data, is_megatrons=False), "files": prints}
                for stage, prints in zip(config.stages[1:], stage_prints, strict=True)
            ],
        )

    def facts(self) -> dict[str, Any]:
        """The fields as plain values, for a checkpoint."""
        return asdict(self)


def order_of_files(config: Config) -> SampleOrder | None:
    """Sample order for `config` and its token files; None if the embedded corpus is needed but not built."""
    blend = config.train_data
    if not blend:
        if not (embedded_folder(Path(config.data_dir)) / "manifest.json").is_file():
            return None
        blend = ensure_embedded_corpus(Path(config.data_dir)).train_prefix
    blends = [blend, *(stage.train_data or blend for stage in config.stages[1:])]
    prefixes = [[prefix for _, prefix in parse_blend(one)] for one in blends]
    # The order depends on the document lengths (fingerprint), the text on the tokens (content).
    first, *later = [(dataset.fingerprint_of(ones), dataset.content_of(ones)) for ones in prefixes]
    together = [hashlib.blake2b(" ".join(prints).encode(), digest_size=8).hexdigest() for prints in later]
    return SampleOrder.of(config, *first, together)


def is_same_order(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> bool:
    """Whether `facts` and `saved` agree; ignores facts that `saved` lacks (older versions saved fewer)."""
    return not _differing(facts, saved)


def _differing(facts: Mapping[str, Any], saved: Mapping[str, Any]) -> set[str]:
    saved = {"packing": "concatenate", **saved}  # older checkpoints: the only packing before the setting
    differing = {name for name, value in facts.items() if name in saved and saved[name] != value}
    differing -= {"stages", "eod_id", "bos_id"}  # future stages may change, see `order_changes`
    if same_fingerprint(facts.get("tokenizer") or "none", saved.get("tokenizer") or ""):
        differing.discard("tokenizer")
    # A manifest unknown on one side is not a difference.
    return differing - {"manifest"} if None in (facts.get("manifest"), saved.get("manifest")) else differing


@dataclass(frozen=True)
class Change:
    """A setting that differs from the checkpoint and determines the samples or their order."""

    name: str
    value: object
    rule: str
    fix: str
    consequence: str = "samples would be repeated or missed"

    def __str__(self) -> str:
        return f"{self.name}={self.value}: {self.rule}"

    @property
    def problem(self) -> str:
        """One-line error that explains why training cannot resume."""
        fix = f"{self.fix}, or set ALLOW_OTHER_DATA=true to continue with other data"
        return problem(self.name, self.value, f"{self.rule}, so {self.consequence}", fix)


def order_changes(
    config: Config, order: SampleOrder, saved: Mapping[str, Any], checkpoint: str, next_sample: int
) -> list[Change]:
    """Differences between the sample orders of a run and a checkpoint; empty if training can resume.

    `order` is the order for `config`; `saved` contains the checkpoint's `SampleOrder.facts`. Facts missing
    in `saved` are ignored. `next_sample` is the first sample after the checkpoint; stages that begin there
    or later are ignored.
    """
    differing = _differing(order.facts(), saved)
    changes: list[Change] = []

    def add(name: str, rule: str, fix: str, **consequence: str) -> None:
        changes.append(Change(name, getattr(config, name.lower()), rule, fix, **consequence))

    def both(fact: str) -> str:
        return f"({fact} {getattr(order, fact)} instead of {saved[fact]})"

    if "fingerprint" in differing:
        fix = "restore the old files in their old order"
        if not config.train_data:
            fix = "use the versions of Python, PyTorch and moe_exp that created the embedded corpus"
        add("TRAIN_DATA", f"its files differ from the data of {checkpoint} {both('fingerprint')}", fix)
    elif "content" in differing:
        rule = f"its files differ from the data of {checkpoint} in tokens, but not in document lengths"
        fix = "restore the old files"
        add("TRAIN_DATA", f"{rule} {both('content')}", fix, consequence="the loss would jump")
    elif "manifest" in differing:
        rule = f"the file hashes in its manifests differ from those in {checkpoint} {both('manifest')}"
        fix = "restore the old files (moe-exp data verify compares files with their manifest)"
        same = "although the sampled tokens are equal"
        add("TRAIN_DATA", f"{rule}, {same}", fix, consequence="some samples have other text")
    elif "weights" in differing:  # not if the files differ: weights may follow from their sizes
        ours, theirs = (_shown(one) or "sequential" for one in (order.weights, saved["weights"]))
        rule = f"the blend weights are {ours} here but {theirs} in {checkpoint}"
        add("TRAIN_DATA", rule, "restore the old weights")
    if "share" in differing:
        ours, theirs = (f"{share[0]:.4g} to {share[1]:.4g}" for share in (order.share, saved["share"]))
        rule = f"the training part of each file is {ours} here but {theirs} in {checkpoint}"
        add("SPLIT", rule, "restore the old SPLIT")
    settings = {name: name.upper() for name in ("seed", "seq_len", "data_order")}
    for fact, name in (settings | {"packing": "DOCUMENT_PACKING"}).items():
        if fact in differing:
            before = f"{name}={saved.get(fact, 'concatenate')}"
            add(name, f"{checkpoint} has {before}", f"set {before}")
    if order.tokenizer and saved.get("tokenizer") and "tokenizer" in differing:
        prints = f"(fingerprint {order.tokenizer} instead of {saved['tokenizer']})"
        rule, fix = f"is not the tokenizer of {checkpoint} {prints}", "restore the old tokenizer"
        add("TOKENIZER", rule, fix, consequence="token ids would have another meaning")
    if rule := _other_stage(order.stages, saved.get("stages", []), checkpoint, next_sample):
        add("DATA_STAGES", rule, "restore the old stage (later stages may change)")
    if "num_samples" in differing and "data_order" not in differing:
        rule = f"with DATA_ORDER=megatron the order depends on TRAIN_ITERS * GBSZ = {order.num_samples}"
        rule += f", which was {saved['num_samples']} in {checkpoint} (DATA_ORDER=stream depends on neither)"
        add("TRAIN_ITERS", rule, f"set TRAIN_ITERS and GBSZ so that their product is {saved['num_samples']}")
    return changes


def place_stages(
    config: Config, progress: Mapping[str, Any], rollbacks: Sequence[Mapping[str, Any]]
) -> tuple[Config, list[str], tuple[dataset.Range, ...]]:
    """Moves stage starts (set in tokens) to batch boundaries. Returns the config, one message per moved
    stage, and the ranges to skip in the sample stream. `progress`: the checkpoint's `progress`; empty if
    training starts at iteration 0.
    """
    consumed, past = progress.get("consumed_samples") or 0, progress.get("skipped_samples") or []
    skipped = dataset.skipped_from(past, [pair for entry in rollbacks for pair in entry["samples"]], consumed)
    # + 1: a stage that begins with the very next sample also keeps its position.
    next_sample = dataset.stream_number(consumed, dataset.merged(past))
    begun = begun_stages((progress.get("sample_order") or {}).get("stages", ()), next_sample + 1)
    return *config.with_stage_begins(consumed, skipped, begun), skipped


def begun_stages(stages: _Stages, next_sample: int) -> list[dict[str, Any]]:
    """Entries of `SampleOrder.stages` that begin before `next_sample`."""
    return [dict(stage) for stage in stages if stage["first_sample"] < next_sample]


def _other_stage(ours: _Stages, theirs: _Stages, checkpoint: str, next_sample: int) -> str:
    """First difference between the begun stages of this run and of a checkpoint; empty if they agree."""
    # Only stages that have begun are compared: later ones may change.
    begun = (begun_stages(stages, next_sample) for stages in (ours, theirs))
    for number, (mine, other) in enumerate(zip_longest(*begun), 1):
        rule = f"stage {number} began before sample {next_sample}, the position of {checkpoint}, and"
        if mine is None or other is None:
            what, stage = ("has this stage", other) if mine is None else ("lacks this stage", mine)
            return f"{rule} {checkpoint} {what} at sample {stage['first_sample']}"
        for name, value in mine.items():
            if name != "from_tokens" and value != other.get(name):
                here, there = _shown(value), _shown(other.get(name))
                return f"{rule} its {name} is {here} here but {there} in the checkpoint"
    return ""


def _shown(value: Any) -> str:
    return " : ".join(value) if isinstance(value, list) else str(value)


def _manifest(train_data: str) -> str | None:
    """Hash (16 hex digits) of all file hashes in the manifests; None if a file's hash is missing."""
    digest = hashlib.blake2b(digest_size=8)
    for _, prefix in parse_blend(train_data) if train_data else []:
        listed = manifest_of(prefix).get("outputs")
        entries = [one for one in listed if isinstance(one, dict)] if isinstance(listed, list) else []
        hashes = {Path(str(one.get("name"))).name: one.get("hash") for one in entries}
        for suffix in (".bin", ".idx"):
            found = hashes.get(Path(prefix).name + suffix)
            if found is None or "-" in str(found):  # block hashes: not comparable with a hash of the file
                return None
            digest.update(f"{found}\n".encode())
    return digest.hexdigest() if train_data else None


def _weights(train_data: str, *, is_megatrons: bool) -> list[str]:
    """Blend weights divided by their sum: 7 and 3 give the same result as 0.7 and 0.3."""
    if not train_data:
        return ["1"]
    blend = parse_blend(train_data)
    # Megatron reads prefixes without weights sequentially.
    if is_megatrons and len(train_data.split()) == len(blend):
        return []
    fractions = [Fraction(str(weight)) for weight, _ in blend]
    return [str(fraction / sum(fractions)) for fraction in fractions]
