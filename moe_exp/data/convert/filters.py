"""Document filters that record what they drop or change: counts, hashes, reasons and samples.

Each filter runs a datatrove block. The counts of reader, filters and writer must add up (`Counts.check`).
Users select a filter by its name and options, or give a function in a file:

gopher-quality    'gopher-quality: {min_doc_words: 20}'    my_filters.py:keep
"""

import importlib
import importlib.util
import inspect
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from operator import iadd
from pathlib import Path
from typing import Annotated, Any

from pydantic import PlainSerializer

from moe_exp.data.documents import TALLIED, Counted, Tally
from moe_exp.data.kinds import input_error
from moe_exp.data.stage import fingerprint

NOTHING_LEFT, OTHER = "nothing is left of the text", "other"
_SAMPLES, _SAMPLE_CHARS = 3, 1000  # for each reason, in each task
_MOST_REASONS, _MOST_SAMPLES = 20, 100  # of a filter: in each task, in all tasks


@dataclass
class Filter:
    """Step that drops or edits documents with a datatrove block.

    `build` creates the block in the process that runs the step. The block's `run` must forward or drop one
    document at a time.
    """

    name: str  # in the manifest
    build: Callable[[], Any]
    words: str = field(default="", kw_only=True)  # metadata field with the words to show in samples

    def __post_init__(self) -> None:
        self.stats: Any = None
        self.dropped, self.before, self.after = Tally(), Tally(), Tally()
        self.reasons: Counter[str] = Counter()
        self.samples: list[dict[str, Any]] = []
        self._inside: Any = None
        self._text = self._reason = ""

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> Iterator[Any]:
        block = self.build()
        self.stats = block.stats
        if decide := getattr(block, "filter", None):  # wrapped to record the reason for dropping

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
            # identity first: most blocks forward the same object
            if document.text is not self._text and document.text != self._text:
                self.before.add(self._text.encode())
                self.after.add(document.text.encode())
            yield document

    def _watched(self, data: Any) -> Iterator[Any]:
        for document in data:
            self._inside, self._text, self._reason = document, document.text, ""
            yield document
            # the block requests the next document only when it is done with this one
            if self._inside is None:  # forwarded by the block
                continue
            self.dropped.add(self._text.encode())
            # a reason may name the document: limit the number of different reasons
            if self._reason not in self.reasons and len(self.reasons) >= _MOST_REASONS:
                self._reason = OTHER
            self.reasons[self._reason] += 1
            if self.reasons[self._reason] <= _SAMPLES:
                sample = {"filter": self.name, "reason": self._reason, "id": document.id}
                sample |= {"words": document.metadata[self.words]} if self.words else {}
                self.samples.append(sample | {"text": self._text[:_SAMPLE_CHARS]})


_MostCommon = PlainSerializer(lambda reasons: dict(reasons.most_common()))


@dataclass
class Counts(Counted):
    """Counts of documents read, dropped, changed and written by one task or by all tasks.

    `reasons` counts the dropped documents by filter and reason.
    """

    read: Tally = field(default_factory=Tally)
    written: Tally = field(default_factory=Tally)  # counted when read back from the file
    filtered: dict[str, Tally] = field(default_factory=dict)  # dropped documents by filter
    reasons: dict[str, Annotated[Counter[str], _MostCommon]] = field(default_factory=dict)
    edited: dict[str, tuple[Tally, Tally]] = field(default_factory=dict)  # by filter, before and after
    samples: list[dict[str, Any]] = field(default_factory=list)  # some of the dropped documents

    def check(self, who: str) -> None:
        """Raises ValueError unless texts read = texts dropped + texts written, all counted before edits."""
        # an edited document enters as its old text and leaves as its new one
        before = reduce(iadd, (self.read, *(new for _, new in self.edited.values())), Tally())
        old = (tally for tally, _ in self.edited.values())
        after = reduce(iadd, (self.written, *self.filtered.values(), *old), Tally())
        for what in TALLIED:
            if (had := getattr(before, what)) != (has := getattr(after, what)):
                rule = f"{what} is {had} for documents read, but {has} for documents filtered and written"
                raise input_error(who, rule, "repeat with --start-over, and check disk and memory")

    def __iadd__(self, other: "Counts") -> "Counts":
        self.read += other.read
        self.written += other.written
        for name, tally in other.filtered.items():
            self.filtered.setdefault(name, Tally()).__iadd__(tally)
        for name, reasons in other.reasons.items():
            self.reasons.setdefault(name, Counter()).update(reasons)
        for name, tallies in other.edited.items():
            for total, tally in zip(self.edited.setdefault(name, (Tally(), Tally())), tallies, strict=True):
                total.__iadd__(tally)
        known = Counter(sample["filter"] for sample in self.samples)
        for sample in other.samples:
            known[sample["filter"]] += 1
            if known[sample["filter"]] <= _MOST_SAMPLES:
                self.samples.append(sample)
        return self

    def then(self, following: "Counts") -> "Counts":
        """Combines counts of two passes; ValueError if pass 2 did not read the output of pass 1."""
        for what in TALLIED:
            if getattr(self.written, what) != getattr(following.read, what):
                rule = "differs between the output of a pass and the input of the next"
                raise input_error(what, rule, "repeat with --start-over, and check the disk")
        names = ("filtered", "reasons", "edited")
        both = {name: getattr(self, name) | getattr(following, name) for name in names}
        return Counts(self.read, following.written, **both, samples=self.samples + following.samples)


def filter_by(keeps: Callable[[Any], Any]) -> Any:
    """LambdaFilter that drops documents for which `keeps` returns False or (False, reason)."""
    from datatrove.pipeline.filters import LambdaFilter

    return LambdaFilter(keeps)


def has_field(
    document: Any, field: str, *, allowed: Sequence[str] | None = None, minimum: float | None = None
) -> bool:
    """Whether a metadata field's value is in `allowed` or, if `allowed` is None, at least `minimum`."""
    value, fix = document.metadata.get(field), "omit this filter"
    if value is None:
        raise input_error(field, f"document {document.id} has no field {field!r}", fix)
    if allowed is not None:
        return value in allowed
    if not isinstance(value, int | float):
        raise input_error(field, f"field {field!r} of document {document.id} is {value!r}, not a number", fix)
    return value >= (minimum or 0)


def has_length(document: Any, min_chars: int, max_chars: int | None) -> bool:
    """Whether the number of characters is within the limits."""
    return min_chars <= len(document.text) <= (max_chars or len(document.text))


def filters_of(settings: Any) -> list[Filter]:
    """Filters from `ConvertSettings`: first the filters on fields and length, then the named filters."""
    rules: dict[str, Callable[[Any], Any]] = {}
    if settings.languages:
        rules["language"] = partial(has_field, field="language", allowed=list(settings.languages))
    for name in ("language_score", "score"):
        if (minimum := getattr(settings, f"min_{name}")) is not None:
            rules[name] = partial(has_field, field=name, minimum=minimum)
    shortest, longest = settings.min_chars, settings.max_chars
    if shortest is not None or longest is not None:
        rules["length"] = partial(has_length, min_chars=shortest or 0, max_chars=longest)
    by_rule = [Filter(name, partial(filter_by, keeps)) for name, keeps in rules.items()]
    # in the manifest, "language" already is the filter by the documents' field
    names = {LANGUAGE: "identified language"}
    return by_rule + [Filter(names.get(one.name, one.name), one.build) for one in settings.filters]


def word_tokenizer(
    words: Callable[[str], list[str]] = str.split, sentences: Callable[[str], list[str]] = lambda text: [text]
) -> Any:
    """Builds a datatrove WordTokenizer from functions, because datatrove's English tokenizer needs spaCy."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    methods = {
        "word_tokenize": lambda _, text: words(text),
        "sent_tokenize": lambda _, text: sentences(text),
        "span_tokenize": lambda _, text: [(0, len(text))],
    }
    return type("Words", (WordTokenizer,), methods)()


# Filters by name

# datatrove's filters and formatters by name: module, class and required packages.
BLOCKS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "c4-paragraphs": ("pipeline.filters.c4_filters", "C4ParagraphFilter", ()),
    "c4-quality": ("pipeline.filters.c4_filters", "C4QualityFilter", ()),
    "fineweb-quality": ("pipeline.filters.fineweb_quality_filter", "FineWebQualityFilter", ()),
    "gopher-quality": ("pipeline.filters.gopher_quality_filter", "GopherQualityFilter", ()),
    "gopher-repetition": ("pipeline.filters.gopher_repetition_filter", "GopherRepetitionFilter", ()),
    "pii": ("pipeline.formatters.pii", "PIIFormatter", ()),
    "url": ("pipeline.filters.url_filter", "URLFilter", ("tldextract", "ahocorasick", "fasteners")),
}
LANGUAGE = "language"
NAMES = (*sorted((*BLOCKS, LANGUAGE)), "FILE.py:FUNCTION")

_WHEELS = {"ahocorasick": "pyahocorasick", "fasttext": "fasttext-numpy2-wheel"}
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


@dataclass(frozen=True)
class NamedFilter:
    """A filter that users select by name.

    `options` are arguments of the datatrove block. The filter `language` has the options languages, threshold
    (default: 0.65) and model (a fastText model file). Without a model, py3langid is used.
    """

    name: str  # one of `NAMES`
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> "NamedFilter":
        """Parses NAME or {NAME: options} from a command line or YAML file; raises ValueError if invalid."""
        import yaml

        value: Any = given
        if isinstance(given, str) and not re.fullmatch(r"[^:{]+\.py:\w+", given):
            try:
                value = yaml.safe_load(given)
            except yaml.YAMLError:
                value = None
        name: Any = value
        options: Any = {}
        if isinstance(value, Mapping) and len(value) == 1:
            ((name, options),) = value.items()
        if not isinstance(name, str) or not isinstance(options or {}, dict):
            raise input_error(f"filter={given}", "must be NAME or 'NAME: {option: value}'", "correct it")
        chosen = cls(name, options or {})
        # to raise errors now, not in the first task
        chosen.build()
        return chosen

    def facts(self) -> dict[str, Any]:
        """Name, options and files on which the filter's decisions depend, as stored in a manifest."""
        facts = {"name": self.name, "options": self.options}
        files = [self.name.rpartition(":")[0]] if ".py:" in self.name else []
        files += [str(self.options["model"])] if "model" in self.options else []
        return facts | {"files": [fingerprint(Path(path)) for path in files]}

    def _error(self, rule: str, fix: str) -> ValueError:
        return input_error(f"filter={self.name}", rule, fix)

    def build(self) -> Any:
        """Creates the block; raises the same errors as `parse`."""
        if ".py:" in self.name:
            self._check_options(())
            return filter_by(self._function())
        if self.name == LANGUAGE:
            return self._language_block()
        if self.name not in BLOCKS:
            raise self._error(f"must be one of {', '.join(NAMES)}", "choose one")
        module, class_name, packages = BLOCKS[self.name]
        self._check_packages(packages)
        block = getattr(importlib.import_module(f"datatrove.{module}"), class_name)
        parameters = inspect.signature(block.__init__).parameters
        known = [one for one in parameters if one not in ("self", "exclusion_writer", "batch_size")]
        self._check_options(known)
        # datatrove's own tokenizer for English requires spaCy
        more = {"language": word_tokenizer(sentences=sentences_of)} if "language" in known else {}
        built = block(**more | self.options)
        if self.name == "url":
            from tldextract import TLDExtract

            built.tldextractor = TLDExtract(suffix_list_urls=())  # its built-in list: no download
        return built

    def _check_options(self, known: Sequence[str]) -> None:
        if unknown := [one for one in self.options if one not in known]:
            raise self._error(f"unknown option {unknown[0]}", f"use {', '.join(known) or 'no options'}")

    def _check_packages(self, names: Sequence[str]) -> None:
        missing = [_WHEELS.get(one, one) for one in names if importlib.util.find_spec(one) is None]
        if missing:
            raise self._error(f"requires the package {missing[0]}", f"pip install {' '.join(missing)}")

    def _function(self) -> Any:
        path, _, name = self.name.rpartition(":")
        if not Path(path).is_file():
            raise self._error(f"{path} not found", "check the path")
        spec = importlib.util.spec_from_file_location(f"moe_exp_filter_{Path(path).stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look up their module here
        try:
            spec.loader.exec_module(module)
            return getattr(module, name)
        except Exception as error:
            rule = f"the file cannot be loaded: {type(error).__name__}: {error}"
            raise self._error(rule, "correct the file") from error

    def _language_block(self) -> Any:
        self._check_options(("languages", "threshold", "model"))
        languages, threshold = self.options.get("languages"), self.options.get("threshold", 0.65)
        if not languages or not isinstance(languages, list) or {str} != set(map(type, languages)):
            raise self._error(f"languages={languages}: must be a list", "give, for example, [en, de]")
        if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            rule, fix = "must be between 0 and 1", "use, for example, 0.65 as FineWeb does"
            raise self._error(f"threshold={threshold}: {rule}", fix)
        if "model" not in self.options:
            self._check_packages(("py3langid",))
            identifier = language_identifier()

            def keeps(document: Any) -> bool | tuple[bool, str]:
                language, score = identifier.classify(document.text)
                document.metadata |= {"language": language, "language_score": round(float(score), 4)}
                if language not in languages:
                    return False, language
                return (True, "") if score > threshold else (False, f"{language}, unsure")

            return filter_by(keeps)
        self._check_packages(("fasttext", "fasteners"))
        model = Path(str(self.options["model"]))
        if not model.is_file():
            raise self._error(f"model={model}: file not found", "give the path of lid.176.ftz")
        from datatrove.pipeline.filters import LanguageFilter
        from fasttext.FastText import _FastText

        block = LanguageFilter(languages, threshold)
        block.model._model = _FastText(str(model))  # datatrove would download the model
        return block


@cache
def language_identifier() -> Any:
    """py3langid's identifier with scores from 0 to 1. Cached, because loading the model takes 0.6 s."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def sentences_of(text: str) -> list[str]:
    return [one for one in _SENTENCE_END.split(text) if one.strip()]
