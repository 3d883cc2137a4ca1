"""Steps that need an earlier pass: exact duplicates and benchmark n-grams, by datatrove's own blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.data.convert.filters import Filter
from moe_exp.data.convert.words import word_tokenizer
from moe_exp.data.documents import Tally, read_documents

NGRAM_WORDS = 12  # datatrove's default, after GPT-3's 13 (Brown et al., 2020, appendix C)


def _text(document: Any) -> bytes:
    return document.text.encode()  # newer xxhash takes no str


def _dedup_config() -> Any:
    from datatrove.pipeline.dedup.exact_dedup import ExactDedupConfig

    return ExactDedupConfig(content_getter=_text)


@dataclass
class SignDocuments:
    """Last step of the first pass: hashes every text by ExactDedupSignature, for `num_finders` tasks."""

    folder: str
    num_finders: int

    def __post_init__(self) -> None:
        self.stats: Any = None

    def __call__(self, data: Any, rank: int = 0, world_size: int = 1) -> None:
        from datatrove.pipeline.dedup.exact_dedup import ExactDedupSignature

        block = ExactDedupSignature(self.folder, _dedup_config(), finder_workers=self.num_finders)
        self.stats = block.stats
        block.run(data, rank, world_size)


@dataclass
class FindDuplicates:
    """The second pass: which documents have a text that stands before them, by ExactFindDedups."""

    signatures_folder: str
    duplicates_folder: str

    def __post_init__(self) -> None:
        self.stats: Any = None

    def __call__(self, data: Any = None, rank: int = 0, world_size: int = 1) -> None:
        from datatrove.pipeline.dedup.exact_dedup import ExactFindDedups

        Path(self.duplicates_folder).mkdir(parents=True, exist_ok=True)  # there may be no duplicate
        block = ExactFindDedups(self.signatures_folder, self.duplicates_folder, _dedup_config())
        self.stats = block.stats
        block.run(data, rank, world_size)


@dataclass
class DuplicateFilter(Filter):
    """Keeps one of each text, with `duplicate_count` in its metadata, by ExactDedupFilter. Its 64-bit hashes
    take two different texts for one with probability n^2 / 2^65: 3e-6 for ten million documents, 0.03 for a
    billion.
    """

    name: str
    duplicates_folder: str

    def block(self) -> Any:
        """ExactDedupFilter."""
        from datatrove.pipeline.dedup.exact_dedup import ExactDedupFilter

        return ExactDedupFilter(self.duplicates_folder, _dedup_config())


@dataclass
class ContaminationFilter(Filter):
    """Drops documents that share an n-gram of words with a benchmark, by NGramsDecontFilter."""

    name: str
    index_folder: str

    def block(self) -> Any:
        """NGramsDecontFilter."""
        from datatrove.pipeline.decont import NGramsDecontFilter

        return NGramsDecontFilter(self.index_folder, _ngrams_config(), language=word_tokenizer())


def _ngrams_config() -> Any:
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig
    from datatrove.utils.hashing import HashConfig

    # datatrove gives its n-grams to the hash as str, which newer xxhash does not take.
    return NGramsDecontConfig(n_grams=NGRAM_WORDS, hash_config=HashConfig(hash_fc="sha1"))


def write_contamination_index(texts: Path, folder: Path) -> dict[str, int]:
    """Writes the n-grams of a JSONL file of benchmarks as NGramsDecontIndexer does, which needs lighteval.

    Returns:
        `num_texts`, `num_ngrams`, and `num_short`: texts of fewer than NGRAM_WORDS words, which cannot be
            found.

    Raises:
        ValueError: no text is long enough.
        BadDocument: a line is no document.
    """
    import numpy as np
    from datatrove.utils.text import ngrams, simplify_text

    block = ContaminationFilter("contaminated", str(folder)).block()
    hashes: set[int] = set()
    tally, num_short = Tally(), 0
    for words in _simplified(texts, tally, simplify_text, block):
        num_short += len(words) < NGRAM_WORDS
        hashes.update(block.hash_func(" ".join(ngram)) for ngram in ngrams(words, NGRAM_WORDS))
    if not hashes:
        rule = f"of its {tally.num_documents} texts none has {NGRAM_WORDS} words or more"
        raise ValueError(f"decontaminate={texts}: {rule}. Fix: write question and answer into one text.")
    folder.mkdir(parents=True, exist_ok=True)
    np.array(sorted(hashes), dtype=block.config.hash_config.np_descr).tofile(
        folder / f"{texts.name.partition('.')[0]}.index.hashes"
    )
    return {"num_texts": tally.num_documents, "num_ngrams": len(hashes), "num_short": num_short}


def _simplified(texts: Path, tally: Tally, simplify: Any, block: Any) -> Iterator[list[str]]:
    for _, text in read_documents(texts, tally):
        yield block.tokenizer.word_tokenize(simplify(text, block.config.norm_config))
