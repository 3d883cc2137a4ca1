"""Filters that a user names: datatrove's blocks with their own arguments, and functions of the user's files.

gopher-quality    'gopher-quality: {min_doc_words: 20}'    my_filters.py:keep
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from moe_exp.data.convert.filters import Filter, filter_by, word_tokenizer
from moe_exp.data.stage import fingerprint

# Name to module and class of datatrove's filters and formatters, and the packages that they need.
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

_NOT_OPTIONS = ("self", "exclusion_writer", "batch_size")
_WHEELS = {"ahocorasick": "pyahocorasick", "fasttext": "fasttext-numpy2-wheel"}
_SENTENCE_END = re.compile(r"(?<=[.!?])[\"')\]]*\s+")


@dataclass(frozen=True)
class NamedFilter:
    """A filter by its name.

    Args:
        name: one of `NAMES`.
        options: arguments of datatrove's block; of `language`: languages, threshold (0.65) and model, a
            fastText model's file. Without a model py3langid decides.
    """

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def parse(cls, given: str | Mapping[str, Any]) -> NamedFilter:
        """A filter of a command line or of a YAML file: its name, or name and options.

        Raises:
            ValueError: there is no such filter, option, file, function or package.
        """
        import yaml

        value: Any = given
        if isinstance(given, str) and not re.fullmatch(r"[^:{]+\.py:\w+", given):
            try:
                value = yaml.safe_load(given)
            except yaml.YAMLError:
                value = None
        if isinstance(value, Mapping) and len(value) == 1:
            (name, options), *_ = value.items()
        else:
            name, options = value, {}
        if not isinstance(name, str) or not isinstance(options or {}, dict):
            raise ValueError(f"filter={given}: must be NAME or 'NAME: {{option: value}}'. Fix: write it so.")
        chosen = cls(name, options or {})
        chosen.build()
        return chosen

    def facts(self) -> dict[str, Any]:
        """Everything that its decisions depend on, for a manifest."""
        facts = {"name": self.name, "options": self.options}
        files = [self.name.rpartition(":")[0]] if self._is_function else []
        files += [str(self.options["model"])] if "model" in self.options else []
        return facts | {"files": [fingerprint(Path(path)) for path in files]}

    @property
    def _is_function(self) -> bool:
        return ".py:" in self.name

    def build(self) -> Any:
        """The block.

        Raises:
            ValueError: as of `parse`.
        """
        if self._is_function:
            self._check_options(())
            return filter_by(self._function())
        if self.name == LANGUAGE:
            return self._language_block()
        if self.name not in BLOCKS:
            raise ValueError(f"filter={self.name}: must be one of {', '.join(NAMES)}. Fix: choose one.")
        module, class_name, packages = BLOCKS[self.name]
        self._check_packages(packages)
        block = getattr(importlib.import_module(f"datatrove.{module}"), class_name)
        known = [one for one in inspect.signature(block.__init__).parameters if one not in _NOT_OPTIONS]
        self._check_options(known)
        more = {"language": word_tokenizer(sentences=sentences_of)} if "language" in known else {}
        built = block(**more | self.options)
        if self.name == "url":
            from tldextract import TLDExtract

            built.tldextractor = TLDExtract(suffix_list_urls=())  # its own list: the newest is on the network
        return built

    def _check_options(self, known: Sequence[str]) -> None:
        if unknown := [one for one in self.options if one not in known]:
            rule = f"has no option {unknown[0]}. Fix: its options are {', '.join(known) or 'none'}"
            raise ValueError(f"filter={self.name}: {rule}.")

    def _check_packages(self, names: Sequence[str]) -> None:
        missing = [_WHEELS.get(one, one) for one in names if importlib.util.find_spec(one) is None]
        if missing:
            fix = f"pip install {' '.join(missing)}"
            raise ValueError(f"filter={self.name}: the package {missing[0]} is not installed. Fix: {fix}.")

    def _function(self) -> Any:
        path, _, name = self.name.rpartition(":")
        if not Path(path).is_file():
            raise ValueError(f"filter={self.name}: there is no file {path}. Fix: check the path.")
        spec = importlib.util.spec_from_file_location(f"moe_exp_filter_{Path(path).stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # where a dataclass in it looks for its types
        try:
            spec.loader.exec_module(module)
            return getattr(module, name)
        except Exception as error:
            rule = f"{type(error).__name__} while it is loaded: {error}"
            raise ValueError(f"filter={self.name}: {rule}. Fix: correct the file.") from error

    def _language_block(self) -> Any:
        self._check_options(("languages", "threshold", "model"))
        languages, threshold = self.options.get("languages"), self.options.get("threshold", 0.65)
        if not languages or not isinstance(languages, list) or {str} != set(map(type, languages)):
            raise ValueError(f"filter={LANGUAGE}: languages={languages}: must be a list. Fix: give [en, de].")
        if not isinstance(threshold, int | float) or not 0 <= threshold <= 1:
            rule = "must be from 0 to 1. Fix: 0.65 is what FineWeb used"
            raise ValueError(f"filter={LANGUAGE}: threshold={threshold}: {rule}.")
        if "model" not in self.options:
            self._check_packages(("py3langid",))
            return _langid_block(languages, threshold)
        self._check_packages(("fasttext", "fasteners"))
        model = Path(str(self.options["model"]))
        if not model.is_file():
            rule = "there is no such file. Fix: give lid.176.ftz"
            raise ValueError(f"filter={LANGUAGE}: model={model}: {rule}.")
        from datatrove.pipeline.filters import LanguageFilter
        from fasttext.FastText import _FastText

        block = LanguageFilter(languages, threshold)
        block.model._model = _FastText(str(model))  # of a file, which datatrove would fetch
        return block


def filter_of(named: NamedFilter) -> Filter:
    """A step that runs a named filter."""
    # a name in the manifest that no filter by a field of the documents has
    return Filter("identified language" if named.name == LANGUAGE else named.name, named.build)


@cache
def language_identifier() -> Any:
    """py3langid's, with scores from 0 to 1. Its model takes 0.6 seconds to load."""
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)


def _langid_block(languages: list[str], threshold: float) -> Any:
    """A filter by py3langid, whose model is part of the package; writes language and language_score."""
    identifier = language_identifier()

    def keeps(document: Any) -> bool | tuple[bool, str]:
        language, score = identifier.classify(document.text)
        document.metadata |= {"language": language, "language_score": round(float(score), 4)}
        if language not in languages:
            return False, language
        return (True, "") if score > threshold else (False, f"{language}, unsure")

    return filter_by(keeps)


def sentences_of(text: str) -> list[str]:
    return [one for one in _SENTENCE_END.split(text) if one.strip()]
