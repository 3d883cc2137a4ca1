"""Filters that count and hash what they drop and what they change, with reasons and samples.

Each runs a block of datatrove's. The sums of all must agree with what was read and written (`Counts.check`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_exp.data.documents import Tally

NOTHING_LEFT, OTHER = "nothing is left of the text", "other"
_SAMPLES, _SAMPLE_CHARS = 3, 1000  # of each reason, in each task
_MOST_REASONS, _MOST_SAMPLES = 20, 100  # of a filter: in each task, of all tasks
_KEPT = ("num_documents", "num_text_bytes", "text_hash")


@dataclass
class Filter:
    """A step that drops or edits documents by a block of datatrove's.

    Args:
        name: of it, in the manifest.
        build: makes the block where the step runs; its `run` forwards or drops one document at a time.
    """

    name: str
    build: Callable[[], Any]

    def __post_init__(self) -> None:
        self.stats: Any = None
        self._reset()

    def _reset(self) -> None:
        self.dropped, self.before, self.after = Tally(), Tally(), Tally()
        self.reasons: Counter[str] = Counter()
        self.samples: list[dict[str, Any]] = []
        self._inside: Any = None
        self._text = self._reason = ""

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        block = self.build()
        self._reset()
        self.stats = block.stats
        if decide := getattr(block, "filter", None):  # it leaves here why it drops a document

            def decided(document: Any) -> Any:
                result = decide(document)
                self._reason = str(result[1]) if isinstance(result, tuple) and not result[0] else ""
                return result

            block.filter = decided
        for document in block.run(self._watched(data), rank, world_size):
            if not document.text:
                self._reason = NOTHING_LEFT
                continue
            self._inside = None
            if document.text is not self._text and document.text != self._text:
                self.before.add(self._text.encode())
                self.after.add(document.text.encode())
            yield document

    def _watched(self, data: Any) -> Iterator[Any]:
        for document in data:
            self._inside, self._text, self._reason = document, document.text, ""
            yield document
            if self._inside is None:  # the block has forwarded it
                continue
            self.dropped.add(self._text.encode())
            if self._reason not in self.reasons and len(self.reasons) >= _MOST_REASONS:
                self._reason = OTHER
            self.reasons[self._reason] += 1
            if self.reasons[self._reason] <= _SAMPLES:
                sample = {"filter": self.name, "reason": self._reason, "id": document.id}
                sample |= self.sample_facts(document)
                self.samples.append(sample | {"text": self._text[:_SAMPLE_CHARS]})

    def sample_facts(self, document: Any) -> dict[str, Any]:
        """Further facts of a sample of a dropped document."""
        return {}


@dataclass
class Counts:
    """Documents that a task, or all tasks, read, dropped, changed and wrote.

    Args:
        read: documents that were read.
        written: documents that were written, read back from the file.
        filtered: name of a filter to what it dropped.
        reasons: name of a filter to its reasons and how many it dropped for each.
        edited: name of a filter to what it changed, before and after.
        samples: some of the documents that were dropped.
    """

    read: Tally = field(default_factory=Tally)
    written: Tally = field(default_factory=Tally)
    filtered: dict[str, Tally] = field(default_factory=dict)
    reasons: dict[str, Counter[str]] = field(default_factory=dict)
    edited: dict[str, tuple[Tally, Tally]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def check(self, who: str) -> None:
        """Checks that what was read is what was filtered and written, as a multiset of texts.

        Raises:
            ValueError: it is not.
        """
        before, after = Tally(), Tally()
        for tally in (self.read, *(new for _, new in self.edited.values())):
            before += tally
        for tally in (self.written, *self.filtered.values(), *(old for old, _ in self.edited.values())):
            after += tally
        for what in _KEPT:
            had, has = getattr(before, what), getattr(after, what)
            if had != has:
                rule = f"{what} is {had} of what was read, {has} of what was filtered and written"
                fix = "call it again with --start-over, and check disk and memory"
                raise ValueError(f"{who}: {rule}. Fix: {fix}.")

    def __iadd__(self, other: Counts) -> Counts:
        self.read += other.read
        self.written += other.written
        for name, tally in other.filtered.items():
            self.filtered.setdefault(name, Tally()).__iadd__(tally)
        for name, reasons in other.reasons.items():
            self.reasons.setdefault(name, Counter()).update(reasons)
        for name, tallies in other.edited.items():
            mine = self.edited.setdefault(name, (Tally(), Tally()))
            for total, tally in zip(mine, tallies, strict=True):
                total.__iadd__(tally)
        known = Counter(sample["filter"] for sample in self.samples)
        for sample in other.samples:
            known[sample["filter"]] += 1
            if known[sample["filter"]] <= _MOST_SAMPLES:
                self.samples.append(sample)
        return self

    def then(self, following: Counts) -> Counts:
        """Counts of two pipelines, of which the second read what the first wrote.

        Raises:
            ValueError: it did not.
        """
        for what in _KEPT:
            if getattr(self.written, what) != getattr(following.read, what):
                rule = "differs between what one pass wrote and the next one read"
                raise ValueError(f"{what}: {rule}. Fix: call it again with --start-over, and check the disk.")
        return Counts(
            self.read,
            following.written,
            self.filtered | following.filtered,
            self.reasons | following.reasons,
            self.edited | following.edited,
            self.samples + following.samples,
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "read": self.read.to_json(),
            "written": self.written.to_json(),
            "filtered": {name: tally.to_json() for name, tally in self.filtered.items()},
            "reasons": {name: dict(reasons.most_common()) for name, reasons in self.reasons.items()},
            "edited": {name: [one.to_json() for one in tallies] for name, tallies in self.edited.items()},
            "samples": self.samples,
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Counts:
        filtered = {name: Tally.from_json(one) for name, one in content["filtered"].items()}
        edited = {
            name: (Tally.from_json(before), Tally.from_json(after))
            for name, (before, after) in content.get("edited", {}).items()
        }
        reasons = {name: Counter(one) for name, one in content.get("reasons", {}).items()}
        read, written = Tally.from_json(content["read"]), Tally.from_json(content["written"])
        return cls(read, written, filtered, reasons, edited, content.get("samples", []))


def filter_by(keeps: Callable[[Any], Any]) -> Any:
    """LambdaFilter: keeps documents for which a function returns true, not False or (False, reason)."""
    from datatrove.pipeline.filters import LambdaFilter

    return LambdaFilter(keeps)


def has_field(
    document: Any, field: str, *, allowed: Sequence[str] | None = None, minimum: float | None = None
) -> bool:
    """Whether a metadata field is one of `allowed`, or at least `minimum`.

    Raises:
        ValueError: the document has no such field, or it is no number.
    """
    value, fix = document.metadata.get(field), "omit this filter"
    if value is None:
        raise ValueError(f"{field}: document {document.id} has no field {field!r}. Fix: {fix}.")
    if allowed is not None:
        return value in allowed
    if not isinstance(value, int | float):
        rule = f"field {field!r} of document {document.id} is {value!r}, no number"
        raise ValueError(f"{field}: {rule}. Fix: {fix}.")
    return value >= (minimum or 0)


def has_length(document: Any, min_chars: int, max_chars: int | None) -> bool:
    """Whether the number of characters is in a range."""
    num_chars = len(document.text)
    return min_chars <= num_chars and (max_chars is None or num_chars <= max_chars)


def word_tokenizer(
    words: Callable[[str], list[str]] = str.split,
    sentences: Callable[[str], list[str]] = lambda text: [text],
) -> Any:
    """datatrove's WordTokenizer with these functions, as its own for English need spaCy; by default words are
    what stands between spaces.
    """
    from datatrove.utils.word_tokenizers import WordTokenizer

    methods = {
        "word_tokenize": lambda _, text: words(text),
        "sent_tokenize": lambda _, text: sentences(text),
        "span_tokenize": lambda _, text: [(0, len(text))],
    }
    return type("Words", (WordTokenizer,), methods)()
