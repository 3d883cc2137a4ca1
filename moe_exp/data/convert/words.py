"""Words and sentences for datatrove's blocks, whose own tokenizers for English need spaCy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def word_tokenizer(
    words: Callable[[str], list[str]] = str.split,
    sentences: Callable[[str], list[str]] = lambda text: [text],
) -> Any:
    """datatrove's WordTokenizer with these functions; by default words are what stands between spaces."""
    from datatrove.utils.word_tokenizers import WordTokenizer

    methods = {
        "word_tokenize": lambda _, text: words(text),
        "sent_tokenize": lambda _, text: sentences(text),
        "span_tokenize": lambda _, text: [(0, len(text))],
    }
    return type("Words", (WordTokenizer,), methods)()
