"""Finds documents that share word n-grams with benchmark texts, using datatrove's filter."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_exp.data.convert.filters import word_tokenizer
from moe_exp.data.documents import Tally, read_documents
from moe_exp.data.kinds import input_error
from moe_exp.data.stage import MAKE_AGAIN, fingerprint
from moe_exp.host.files import expanded, read_json, write_json

NGRAM_WORDS = 12  # datatrove's default, after GPT-3's 13 (Brown et al., 2020, appendix C)


@dataclass(frozen=True)
class Benchmark:
    """A JSONL file of benchmark texts, or `lm-eval:TASK`; TASK is a task, group or YAML file of lm-eval."""

    given: str

    def __post_init__(self) -> None:
        if not all(path.is_file() for path in self.files):
            fix = "give a JSONL file of benchmark texts, or lm-eval:TASK"
            raise input_error(f"decontaminate={self.given}", "file not found", fix)

    @property
    def task(self) -> str:
        """Task name in lm-evaluation-harness; empty for a file."""
        return self.given.removeprefix("lm-eval:") if self.given.startswith("lm-eval:") else ""

    @property
    def files(self) -> list[Path]:
        """The JSONL or YAML file; empty if lm-eval finds the task by its name."""
        is_file = not self.task or self.task.endswith((".yaml", ".yml"))
        return [expanded(self.task or self.given)] if is_file else []

    def facts(self) -> dict[str, Any]:
        found = [fingerprint(path) for path in self.files]
        if not self.task:
            return found[0]
        return {"lm_eval": self.task} | ({"yaml": found[0]} if found else {})

    def texts(self) -> Iterator[tuple[str, str]]:
        """Yields (task name, text). ValueError for an invalid line, an unknown task or missing task data."""
        if not self.task:
            (path,) = self.files
            for _, text in read_documents(path, Tally()):
                yield path.name.partition(".")[0], text
            return
        try:
            from lm_eval.tasks import TaskManager

            tasks = TaskManager().load([str(next(iter(self.files), self.task))])["tasks"]
            for name, task in tasks.items():
                for document in task.eval_docs:
                    for text in _questions_with_answers(task, document):
                        yield name, text
        # lm-eval and datasets raise many types of exceptions for missing tasks and data
        except Exception as error:
            if isinstance(error, ModuleNotFoundError):
                rule, fix = f"requires the package {error.name}", "pip install lm-eval"
            else:
                rule = f"cannot be read ({' '.join(str(error).split())[:300] or type(error).__name__})"
                fix = "check the name (lm-eval ls tasks), or run the task once online to cache its data"
            raise input_error(f"decontaminate={self.given}", rule, fix) from error


def _questions_with_answers(task: Any, document: Any) -> list[str]:
    """Returns one text for each correct answer: the question followed by the answer."""
    text, target = task.doc_to_text(document), task.doc_to_target(document)
    chooses_question = isinstance(text, int)  # as in winogrande, where the choices precede the answer
    question = task.doc_to_choice(document)[text] if chooses_question else text
    has_choices = task.OUTPUT_TYPE == "multiple_choice" and not chooses_question
    choices = task.doc_to_choice(document) if has_choices else []
    targets = target if isinstance(target, list) else [target]
    return [f"{question} {choices[one] if isinstance(one, int) and choices else one}" for one in targets]


def contamination_block(index_folder: Path) -> Any:
    """NGramsDecontFilter that drops contaminated documents and gives the benchmark's name as the reason."""
    from datatrove.pipeline.decont import NGramsDecontFilter
    from datatrove.pipeline.decont.n_grams import NGramsDecontConfig
    from datatrove.utils.hashing import HashConfig

    # datatrove hashes n-grams as str, which newer versions of xxhash do not accept.
    config = NGramsDecontConfig(n_grams=NGRAM_WORDS, hash_config=HashConfig(hash_fc="sha1"))
    block = NGramsDecontFilter(str(index_folder), config, language=word_tokenizer())
    decide = block.filter

    def decided(document: Any) -> Any:
        keeps = decide(document)
        return keeps if keeps is True else (False, document.metadata["contaminated_task"])

    block.filter = decided
    return block


def write_contamination_index(benchmarks: Sequence[Benchmark], folder: Path) -> dict[str, Any]:
    """Writes one file of n-grams per task, in the format of datatrove's indexer. Does not need lighteval.
    Keeps an existing index: conversion tasks may be reading it, and building an index may need the network.

    Returns:
        The totals `num_texts`, `num_ngrams` and `num_short`, and `tasks` with these counts for each task.
        `num_short` counts texts of fewer than NGRAM_WORDS words, which cannot be found in documents.

    Raises:
        ValueError: a benchmark has no text of NGRAM_WORDS or more words; see also `Benchmark.texts`.
    """
    import numpy as np
    from datatrove.utils.text import ngrams, simplify_text

    summary = folder / "index.json"
    if summary.is_file():
        return read_json(summary, fix=MAKE_AGAIN)
    block = contamination_block(folder)
    hashes, tasks = dict[str, set[int]](), dict[str, dict[str, int]]()
    for benchmark in benchmarks:
        read = dict[str, dict[str, int]]()
        for task, text in benchmark.texts():
            words = block.tokenizer.word_tokenize(simplify_text(text, block.config.norm_config))
            counts = read.setdefault(task, tasks.setdefault(task, {"num_texts": 0, "num_short": 0}))
            counts["num_texts"] += 1
            counts["num_short"] += len(words) < NGRAM_WORDS
            found = hashes.setdefault(task, set())
            found.update(block.hash_func(" ".join(ngram)) for ngram in ngrams(words, NGRAM_WORDS))
        # without any n-gram, every corpus would look clean
        if not any(hashes[task] for task in read):
            num_texts = sum(counts["num_texts"] for counts in read.values())
            rule = f"none of its {num_texts} texts has {NGRAM_WORDS} words or more"
            fix = "combine question and answer in one text"
            raise input_error(f"decontaminate={benchmark.given}", rule, fix)
    folder.mkdir(parents=True, exist_ok=True)
    for number, (task, found) in enumerate(hashes.items()):
        tasks[task]["num_ngrams"] = len(found)
        name = re.sub(r"[^A-Za-z0-9._-]", "_", task)  # may not be unique
        path = folder / f"{name if name == task else f'{name}_{number}'}.index.hashes"
        np.array(sorted(found), dtype=block.config.hash_config.np_descr).tofile(path)
    totals = {name: sum(counts[name] for counts in tasks.values()) for name in ("num_texts", "num_short")}
    totals["num_ngrams"] = len(set().union(*hashes.values()))
    # last: this file marks the index as complete
    write_json(summary, facts := {**totals, "tasks": tasks})
    return facts


def benchmarks_of(given: str | Path | Sequence[str | Path]) -> tuple[Benchmark, ...]:
    """Benchmarks named in a setting; ValueError if a file does not exist or a benchmark is given twice."""
    names = [str(one) for one in ([given] if isinstance(given, str | Path) else given)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise input_error(f"decontaminate={twice[0]}", "is given twice", "give it once")
    return tuple(map(Benchmark, names))
