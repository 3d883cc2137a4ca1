"""Conversion to JSONL chunks: the lines of plain datatrove, with every document accounted for."""

import datetime
import gzip
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from functools import cache, partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import psutil
import pytest

from helpers import wait_for
from helpers.jsonl import read_jsonl, read_texts
from helpers.ranks import start_process
from moe_exp.data import jobs, kinds, stage
from moe_exp.data.convert import convert as convert_module
from moe_exp.data.convert import steps
from moe_exp.data.convert.benchmarks import _questions_with_answers, benchmarks_of, write_contamination_index
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.duplicates import NearDuplicates
from moe_exp.data.convert.filters import Counts, Filter, filter_by
from moe_exp.data.documents import Tally, read_documents
from moe_exp.data.download.sources import python_stdlib_documents
from moe_exp.data.execution import Execution
from moe_exp.data.kinds import BadDocument

pa = pytest.importorskip("pyarrow")
pytest.importorskip("datatrove")
import pyarrow.parquet  # noqa: E402

ONE = Execution(workers=1)


@cache
def stdlib(num_documents: int = 150) -> list[dict[str, Any]]:
    """Documents with the columns of fineweb-edu."""
    documents = islice(((path, text) for path, text in python_stdlib_documents() if text), num_documents)
    return [
        {
            "text": text,
            "id": f"<urn:uuid:{number:032x}>",
            "dump": "CC-MAIN-2019-30",
            "url": f"https://example.org/{path}",
            "file_path": f"s3://crawl/{path}",
            "language": "en" if number % 5 else "fr",
            "language_score": 0.5 + number % 50 / 100,
            "token_count": len(text) // 4,
            "score": 2.5 + number % 4 / 2,
            "int_score": 3,
        }
        for number, (path, text) in enumerate(documents)
    ]


def write_parquet(path: Path, rows: Sequence[dict[str, Any]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.Table.from_pylist(list(rows)), path, **options)
    return path


def write_lines(path: Path, lines: Sequence[bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    content = b"".join(lines)
    if path.suffix == ".zst":
        import zstandard

        content = zstandard.compress(content)
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def line(text: Any, **fields: Any) -> bytes:
    return orjson.dumps({"text": text, **fields}) + b"\n"


def chunks(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.jsonl"))


def texts(folder: Path) -> list[str]:
    return read_texts(*chunks(folder))


def contents(folder: Path) -> dict[str, bytes]:
    """Chunks, and the manifest without its times."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in ("made_at", "seconds", "id", "starts_over"):
        manifest.pop(name, None)
    return {path.name: path.read_bytes() for path in chunks(folder)} | {"manifest": orjson.dumps(manifest)}


def three_files(folder: Path) -> list[Path]:
    parts = {"a": stdlib()[::3], "b": stdlib()[1::3], "c": stdlib()[2::3]}
    return [
        write_parquet(folder / f"{name}.parquet", rows, row_group_size=20) for name, rows in parts.items()
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What `three_files` become."""
    folder = tmp_path_factory.mktemp("undisturbed")
    convert(three_files(folder / "in"), folder / "x", ConvertSettings(), ONE)
    return contents(folder / "x")


COMPRESSED = [pytest.param(f"jsonl.{kind}", marks=pytest.mark.slow) for kind in ("gz", "zst")]


@pytest.mark.parametrize("kind", ["parquet", "jsonl", *COMPRESSED])
def test_lines_are_those_of_plain_datatrove(tmp_path, kind):
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader, ParquetReader
    from datatrove.pipeline.writers import JsonlWriter

    rows = stdlib(60)
    for index, name in enumerate("abc"):
        part = rows[index::3]
        if kind == "parquet":
            write_parquet(tmp_path / "in/sub" / f"{name}.parquet", part, row_group_size=7)
        else:
            write_lines(tmp_path / "in/sub" / f"{name}.{kind}", [orjson.dumps(row) + b"\n" for row in part])
    reader = ParquetReader if kind == "parquet" else JsonlReader
    writer = JsonlWriter(str(tmp_path / "plain"), output_filename="x.chunk.${rank}.jsonl", compression=None)
    steps = [reader(str(tmp_path / "in")), writer]
    LocalPipelineExecutor(steps, tasks=2, workers=1, logging_dir=str(tmp_path / "logs")).run()
    inputs = list((tmp_path / "in").rglob("*.*"))
    manifest = convert(inputs, tmp_path / "x", ConvertSettings(tasks=2), ONE)
    assert [path.name for path in chunks(tmp_path / "x")] == ["x.chunk.00000.jsonl", "x.chunk.00001.jsonl"]
    for path in chunks(tmp_path / "x"):
        assert path.read_bytes() == (tmp_path / "plain" / path.name).read_bytes()
    assert manifest["read"]["num_documents"] == manifest["written"]["num_documents"] == 60
    made = {path.name for path in (tmp_path / "x" / "datatrove").iterdir()}
    assert made == {"completions", "counts", "executor.json", "logs", "stats", "stats.json"}
    stats = json.loads((tmp_path / "x/datatrove/stats.json").read_text())
    assert stats[-1]["stats"]["total"]["total"] == stats[-1]["stats"]["x.chunk.XXXXX.jsonl"]["total"] == 60


def test_multiset_of_documents_is_kept_by_several_processes(tmp_path, undisturbed):
    manifest = convert(three_files(tmp_path / "in"), tmp_path / "x", ConvertSettings(), Execution(workers=2))
    tally = Tally()
    for row in stdlib():
        tally.add(row["text"].encode())
    found = Tally()
    for path in chunks(tmp_path / "x"):
        for _ in read_documents(path, found):
            pass
    assert len(chunks(tmp_path / "x")) == 3
    assert found.to_json() == tally.to_json() == manifest["written"] == manifest["read"]
    assert contents(tmp_path / "x") == undisturbed


def test_bad_line_stops_or_is_counted(tmp_path):
    """Which lines are bad, and of which files: see test_documents."""
    odd = "u\u2028v\x85w\x00 <|endoftext|> \ufeff" + "long " * 150_000
    lines = [line("first"), b'{"text": null}\n', line(odd), b'{"text": null}\n', b"\n", line("last")[:-1]]
    path, reason = write_lines(tmp_path / "in/a.jsonl.zst", lines), "field 'text' is null, not a text"
    with pytest.raises(BadDocument, match=rf"^{path}:2: {reason}"):
        convert([path], tmp_path / "x", ConvertSettings(), ONE)
    assert not (tmp_path / "x").exists()
    inputs = [path, write_lines(tmp_path / "in/b.jsonl", [])]
    manifest = convert(inputs, tmp_path / "y", ConvertSettings(skip_bad=True), ONE)
    assert manifest["read"]["skipped"] == {reason: 2, "blank line": 1}
    assert texts(tmp_path / "y") == ["first", odd, "last"]
    assert [path.stat().st_size > 0 for path in chunks(tmp_path / "y")] == [True, False]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: content[: len(content) // 2],
    "a byte less": lambda content: content[:-1],
    "zeros inside": lambda content: content.replace(content[len(content) // 2 :][:200], bytes(200)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_parquet_file_is_an_error_even_when_bad_lines_are_skipped(tmp_path, damage):
    path = write_parquet(tmp_path / "in/a.parquet", stdlib(60), row_group_size=10, compression="zstd")
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(BadDocument, match=rf"^{path}:\d+: the Parquet file is damaged or ends early"):
        convert([path], tmp_path / "x", ConvertSettings(skip_bad=True), ONE)
    assert not (tmp_path / "x").exists()


def test_rows_of_parquet_follow_the_rules_of_lines(tmp_path):
    bad_utf8 = pa.array([b"one", b"\xff\xfe", None, b"", b"two\x00"]).cast(pa.binary()).view(pa.string())
    path = tmp_path / "in/a.parquet"
    path.parent.mkdir()
    pyarrow.parquet.write_table(pa.table({"text": bad_utf8, "id": ["a", "b", "c", "d", None]}), path)
    with pytest.raises(BadDocument, match=rf"^{path}:2: invalid UTF-8$"):
        convert([path], tmp_path / "x", ConvertSettings(), ONE)
    manifest = convert([path], tmp_path / "y", ConvertSettings(skip_bad=True), ONE)
    null = "field 'text' is null, not a text"
    assert manifest["read"]["skipped"] == {"empty text": 1, null: 1, "invalid UTF-8": 1}
    written = read_jsonl(*chunks(tmp_path / "y"))
    assert written == [{"text": "one", "id": "a"}, {"text": "two\x00", "id": "a.parquet/1"}]


def test_columns_that_json_does_not_have(tmp_path):
    row = {
        "text": "a", "raw": b"\xff\x00", "price": Decimal("1.50"), "took": datetime.timedelta(seconds=3),
        "at": datetime.time(12, 30), "parts": [b"1"], "of": {"x": b"1"}, "day": datetime.date(2026, 1, 2),
    }  # fmt: skip
    path = write_parquet(tmp_path / "in/a.parquet", [row, dict.fromkeys(row) | {"text": "b"}])
    convert([path], tmp_path / "x", ConvertSettings(), ONE)
    first, second = read_jsonl(*chunks(tmp_path / "x"))
    assert first["metadata"] == {
        "raw": "/wA=", "price": "1.50", "took": 3.0, "at": "12:30:00", "parts": ["MQ=="], "of": {"x": "MQ=="},
        "day": "2026-01-02",
    }  # fmt: skip
    assert set(second["metadata"].values()) == {None}


def test_another_text_column_or_one_of_numbers(tmp_path):
    path = write_parquet(tmp_path / "in/a.parquet", [{"content": "a", "n": 1}])
    with pytest.raises(BadDocument, match=rf"^{path}:1: field 'n' is a number, not a text$"):
        convert([path], tmp_path / "y", ConvertSettings(text_field="n"), ONE)
    convert([path], tmp_path / "z", ConvertSettings(text_field="content"), ONE)
    assert chunks(tmp_path / "z")[0].read_bytes() == b'{"text":"a","id":"a.parquet/0","metadata":{"n":1}}\n'


def test_long_documents_come_in_small_batches(tmp_path):
    rows = [{"text": f"{number} " + "x" * 2**20} for number in range(40)]
    path = write_parquet(tmp_path / "a.parquet", rows, compression="none")
    sizes = [batch.num_rows for _, batch in kinds.read_table(path, text_field="text")]
    assert max(sizes) <= 16 and sum(sizes) == 40


def test_any_metadata(tmp_path):
    rows = [
        {"text": "a", "rank": 7, "self": 1, "media": "m"},
        {"text": "b", "metadata": {"deep": [1, {"x": None}]}, "id": 5},
        {"text": "c", "metadata": '{"from": "string"}', "more": 1},
        {"text": "d", "metadata": None, "id": None},
        {"text": "e", "metadata": "plain"},
    ]
    path = write_lines(tmp_path / "in/a.jsonl", [orjson.dumps(row) + b"\n" for row in rows])
    convert([path], tmp_path / "x", ConvertSettings(), ONE)
    assert read_jsonl(*chunks(tmp_path / "x")) == [
        {"text": "a", "id": "a.jsonl/0", "metadata": {"rank": 7, "self": 1, "media": "m"}},
        {"text": "b", "id": 5, "metadata": {"deep": [1, {"x": None}]}},
        {"text": "c", "id": "a.jsonl/2", "metadata": {"from": "string", "more": 1}},
        {"text": "d", "id": "a.jsonl/3", "metadata": {"metadata": None}},
        {"text": "e", "id": "a.jsonl/4", "metadata": {"metadata": "plain"}},
    ]


def test_filters_count_what_they_drop(tmp_path):
    limits = {"min_language_score": 0.6, "min_score": 3.0, "min_chars": 2000, "max_chars": 50_000}
    settings = ConvertSettings(languages=("en", "de"), **limits)
    manifest = convert(three_files(tmp_path / "in"), tmp_path / "x", settings, ONE)
    rest, dropped = stdlib(), {}
    rules: dict[str, Callable[[dict[str, Any]], bool]] = {
        "language": lambda row: row["language"] == "en",
        "language_score": lambda row: row["language_score"] >= 0.6,
        "score": lambda row: row["score"] >= 3.0,
        "length": lambda row: 2000 <= len(row["text"]) <= 50_000,
    }
    for name, rule in rules.items():
        dropped[name], rest = len(rest) - sum(map(rule, rest)), [row for row in rest if rule(row)]
    assert all(dropped.values())
    assert {name: tally["num_documents"] for name, tally in manifest["filtered"].items()} == dropped
    assert Counter(texts(tmp_path / "x")) == Counter(row["text"] for row in rest)
    assert manifest["read"]["num_documents"] == len(stdlib())


def test_a_filter_without_its_field_is_an_error(tmp_path):
    path = write_lines(tmp_path / "in/a.jsonl", [line("a", score=4), line("b")])
    with pytest.raises(ValueError, match=r"^score: document a\.jsonl/1 has no field 'score'\. Fix: omit"):
        convert([path], tmp_path / "x", ConvertSettings(min_score=3), ONE)
    path = write_lines(tmp_path / "in/b.jsonl", [line("a", id="it", score="4")])
    with pytest.raises(
        ValueError, match=r"^score: field 'score' of document it is '4', not a number\. Fix: "
    ):
        convert([path], tmp_path / "y", ConvertSettings(min_score=3), ONE)


@pytest.mark.parametrize("limit", [1, 2, 10, 149, 1000])
def test_limit_is_of_all_tasks_together(tmp_path, limit):
    manifest = convert(three_files(tmp_path / "in"), tmp_path / "x", ConvertSettings(limit=limit), ONE)
    assert manifest["written"]["num_documents"] == min(limit, len(stdlib()))


def test_duplicates_within_and_across_files(tmp_path):
    words = ["a", "b", "a", "c", "b", "d", "a", "e", "", "c"]
    files = [[line(word) for word in words[index::3]] for index in range(3)]
    inputs = [write_lines(tmp_path / f"in/{index}.jsonl", lines) for index, lines in enumerate(files)]
    inputs.append(write_lines(tmp_path / "in/3.jsonl", [b"\n"]))  # a task with no document
    settings = ConvertSettings(dedup=True, tasks=4)
    manifest = convert(inputs, tmp_path / "x", settings, ONE)
    assert sorted(texts(tmp_path / "x")) == ["a", "b", "c", "d", "e"]
    assert manifest["filtered"]["duplicate"]["num_documents"] == 4
    kept = read_jsonl(*chunks(tmp_path / "x"))
    counts = {one["text"]: one["metadata"]["duplicate_count"] for one in kept}
    assert counts == {"a": 2, "b": 1, "c": 1, "d": 0, "e": 0}
    path = write_lines(tmp_path / "once/a.jsonl", [line("a"), line("b")])
    convert([path], tmp_path / "y", ConvertSettings(dedup=True), ONE)
    assert texts(tmp_path / "y") == ["a", "b"]


def test_a_few_tasks_compare_the_signatures_of_many(tmp_path, monkeypatch):
    monkeypatch.setattr(convert_module, "_MOST_FINDERS", 2)
    words = "abacbdaecfbgahc"
    inputs = [write_lines(tmp_path / f"in/{place}.jsonl", [line(word)]) for place, word in enumerate(words)]
    manifest = convert(sorted(inputs), tmp_path / "x", ConvertSettings(dedup=True, tasks=len(words)), ONE)
    assert sorted(texts(tmp_path / "x")) == sorted(set(words))
    assert manifest["filtered"]["duplicate"]["num_documents"] == len(words) - len(set(words))
    completions = tmp_path / "x/datatrove/exact_find/completions"
    assert len(list(completions.iterdir())) == 2


def test_limits_of_what_compares_tasks(tmp_path, monkeypatch):
    inputs = [write_lines(tmp_path / f"in/{place}.jsonl", [line("a")]) for place in range(9)]
    benchmarks = benchmarks_of(write_lines(tmp_path / "bench.jsonl", [line(QUESTION)]))
    for settings in (ConvertSettings(dedup=True), ConvertSettings(decontaminate=benchmarks)):
        with pytest.raises(ValueError, match=r"^output=.*crawl\[v2\]: must not contain \*, \? or \["):
            convert(inputs, tmp_path / "crawl[v2]", settings, ONE)
    monkeypatch.setattr(convert_module, "allow_open_files", lambda: 90)
    for settings in (ConvertSettings(dedup=True), ConvertSettings(near_dedup=NearDuplicates())):
        with pytest.raises(ValueError, match=r"^tasks=9: .* requires 91 open files, .* is 90\. Fix: "):
            convert(inputs, tmp_path / "x", settings, ONE)
    assert not list(tmp_path.glob("x*")) and not list(tmp_path.glob("crawl*"))
    convert(inputs, tmp_path / "x", ConvertSettings(), ONE)


QUESTION = "Which of these twelve words in a row is the one that a benchmark would want to keep secret?"


def test_other_benchmarks_under_the_same_path_are_noticed(tmp_path):
    benchmarks = write_lines(tmp_path / "bench.jsonl", [line(QUESTION)])
    path = write_lines(tmp_path / "in/a.jsonl", [line("nothing")])
    settings = ConvertSettings(decontaminate=benchmarks_of(benchmarks))
    convert([path], tmp_path / "x", settings, ONE)
    write_lines(benchmarks, [line(" ".join(reversed(QUESTION.split())))])
    with pytest.raises(ValueError, match=r"Fix: .*start"):
        convert([path], tmp_path / "x", settings, ONE)


def test_the_index_of_benchmarks_is_written_once(tmp_path):
    benchmarks = write_lines(tmp_path / "bench.jsonl", [line(QUESTION)])
    first = write_contamination_index(benchmarks_of(benchmarks), tmp_path / "index")
    before = {path: path.stat() for path in (tmp_path / "index").iterdir()}
    given = benchmarks_of(benchmarks)
    benchmarks.unlink()  # a node that cannot read them
    assert write_contamination_index(given, tmp_path / "index") == first
    assert {path: path.stat() for path in before} == before


def test_benchmarks_are_counted_each_by_itself(tmp_path):
    other = " ".join(f"another{letter}" for letter in "abcdefghijklmn")
    paths = [
        write_lines(tmp_path / "first.v1.jsonl", [line(QUESTION), line("too short")]),
        write_lines(tmp_path / "second.jsonl", [line(other)]),
    ]
    clean = ["Which of these twelve words is another question.", "nothing", QUESTION[:40]]
    inputs = [f"Page: {QUESTION.upper()} Yes.", QUESTION.replace(" ", " \n, "), other, *clean]
    path = write_lines(tmp_path / "in/a.jsonl", [line(text) for text in inputs])
    manifest = convert([path], tmp_path / "x", ConvertSettings(decontaminate=benchmarks_of(paths)), ONE)
    assert texts(tmp_path / "x") == clean
    assert manifest["reasons"]["contaminated"] == {"first": 2, "second": 1}
    assert manifest["benchmarks"]["num_texts"] == 3 and manifest["benchmarks"]["num_short"] == 1
    tasks = manifest["benchmarks"]["tasks"]
    assert (tasks["first"]["num_texts"], tasks["first"]["num_short"]) == (2, 1)
    assert tasks["second"] == {"num_texts": 1, "num_short": 0, "num_ngrams": 3}
    samples = json.loads((tmp_path / "x/datatrove/samples.json").read_text())
    words = next(one["words"] for one in samples if one["reason"] == "second")
    assert words == " ".join(other.split()[:12])
    with pytest.raises(ValueError, match=r"^decontaminate=/nowhere: file not found\. Fix: "):
        benchmarks_of(["/nowhere"])
    with pytest.raises(ValueError, match="is given twice"):
        benchmarks_of([paths[0], paths[0]])
    short = write_lines(tmp_path / "short.jsonl", [line("too short")])
    with pytest.raises(ValueError, match=r"^decontaminate=.*: none of its 1 texts has 12 words .*Fix: "):
        write_contamination_index(benchmarks_of(short), tmp_path / "index")


def test_names_that_become_the_same_have_an_index_each(tmp_path):
    texts = [" ".join(f"{first}{number}" for number in range(12)) for first in "ab"]
    names = ("数学.jsonl", "物理.jsonl")
    paths = [write_lines(tmp_path / name, [line(text)]) for name, text in zip(names, texts, strict=True)]
    source = write_lines(tmp_path / "in/a.jsonl", [line(text) for text in (*texts, "clean")])
    settings = ConvertSettings(decontaminate=benchmarks_of(paths))
    manifest = convert([source], tmp_path / "x", settings, ONE)
    assert manifest["filtered"]["contaminated"]["num_documents"] == 2


def test_a_task_whose_choices_are_what_comes_before_the_answer():
    """As winogrande of lm-eval: doc_to_text is the number of the right one."""
    task = SimpleNamespace(
        OUTPUT_TYPE="multiple_choice",
        doc_to_text=lambda document: 1,
        doc_to_choice=lambda document: ["The cat hid because the dog", "The cat hid because the storm"],
        doc_to_target=lambda document: "was so loud.",
    )
    assert _questions_with_answers(task, {}) == ["The cat hid because the storm was so loud."]


LM_EVAL = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: {kind}
test_split: test
doc_to_text: "Question: {{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["multiple_choice", "generate_until"])
def test_a_task_of_lm_eval(tmp_path, kind, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    answer = "the one that nobody has ever seen before"
    rows = [{"question": "what is it of all", "choices": ["nothing at all", answer], "answer": 1}]
    if kind == "generate_until":
        rows[0]["answer"] = answer
    data = write_lines(tmp_path / "quiz.jsonl", [json.dumps(row).encode() + b"\n" for row in rows])
    task = tmp_path / "quiz.yaml"
    task.write_text(LM_EVAL.format(name="quiz", data=data, kind=kind))
    # 13 words: the last of the question, and the right answer
    found, clean = f"So: What is it of all? {answer.title()}!", f"it of all {answer}"
    path = write_lines(tmp_path / "in/a.jsonl", [line(found), line(clean), line("nothing at all")])
    settings = ConvertSettings(decontaminate=benchmarks_of(f"lm-eval:{task}"))
    manifest = convert([path], tmp_path / "x", settings, ONE)
    assert manifest["reasons"]["contaminated"] == {"quiz": 1} and clean in texts(tmp_path / "x")
    with pytest.raises(ValueError, match=r"^decontaminate=lm-eval:no_such_task: cannot be read .* Fix: "):
        write_contamination_index(benchmarks_of("lm-eval:no_such_task"), tmp_path / "index")


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (ConvertSettings, {"tasks": 0}, r"^tasks=0: must be at least 1\. Fix: "),
        (ConvertSettings, {"limit": 0}, r"^limit=0: must be at least 1\. Fix: "),
        (ConvertSettings, {"min_chars": 9, "max_chars": 8}, r"^max_chars=8: .* min_chars=9\. Fix: "),
        (ConvertSettings, {"min_language_score": 65}, r"^min_language_score=65: must be between 0 and"),
        (Execution, {"executor": "dask"}, r"^executor=dask: must be one of local, slurm, ray\. Fix: "),
        (Execution, {"workers": 0}, r"^workers=0: must be at least 1\. Fix: "),
        (Execution, {"executor": "slurm"}, r"^partition=: required by executor=slurm\. Fix: "),
        (Execution, {"sbatch": ("account",)}, r"^sbatch=account: must be NAME=VALUE\. Fix: "),
    ],
)
def test_settings_that_cannot_be(kind, settings, message):
    with pytest.raises(ValueError, match=message):
        kind(**settings)


def test_inputs_that_cannot_be(tmp_path):
    path = write_lines(tmp_path / "a.jsonl", [line("a")])
    with pytest.raises(
        ValueError, match=r"^tasks=2: must be at most .* input files .* Fix: give at most 1\.$"
    ):
        convert([path], tmp_path / "x", ConvertSettings(tasks=2), ONE)


def test_a_chunk_that_is_changed_before_it_is_published_is_noticed(tmp_path, monkeypatch):
    def spoil(*arguments: Any, **options: Any) -> bool:
        is_done = run(*arguments, **options)
        with (tmp_path / "x.partial/x.chunk.00000.jsonl").open("ab") as file:
            file.write(line("more"))
        return is_done

    run = convert_module.run_passes
    monkeypatch.setattr(convert_module, "run_passes", spoil)
    with pytest.raises(ValueError, match=r"chunk\.00000\.jsonl: has \d+ bytes, but its task wrote"):
        convert(three_files(tmp_path / "in"), tmp_path / "x", ConvertSettings(), ONE)
    assert not (tmp_path / "x").exists()


def test_another_task_count_is_refused(tmp_path):
    inputs = three_files(tmp_path / "in")
    made = convert(inputs, tmp_path / "x", ConvertSettings(tasks=3), ONE)
    with pytest.raises(ValueError, match=r"x: was made with tasks=3, not 2\. Fix: "):
        convert(inputs, tmp_path / "x", ConvertSettings(tasks=2), ONE)
    assert convert(list(reversed(inputs)), tmp_path / "x", ConvertSettings(tasks=3), ONE) == made


def keeps_unless_met(document: Any, flag: str, document_id: str, *, sleeps: bool = False) -> bool:
    """Keeps all; a task that reads document `document_id` while `flag` is there is killed, or sleeps."""
    if document.id == document_id and Path(flag).exists():
        if sleeps:
            Path(flag).write_text(str(os.getpid()))
            time.sleep(3600)
        os.kill(os.getpid(), signal.SIGKILL)
    return True


def meet(flag: Path, number: int, **options: Any) -> Filter:
    rule = partial(keeps_unless_met, flag=str(flag), document_id=stdlib()[number]["id"], **options)
    return Filter("meet", partial(filter_by, rule))


def test_a_killed_worker_ends_the_run_and_names_its_task(tmp_path, monkeypatch, undisturbed):
    inputs, flag = three_files(tmp_path / "in"), tmp_path / "flag"
    flag.touch()
    monkeypatch.setattr(convert_module, "filters_of", lambda _: [meet(flag, 1 + 3 * 20)])
    message = r"^task 1 of 3 was killed by SIGKILL; .* Fix: repeat .* Log: .*/logs/task_00001\.log\.$"
    with pytest.raises(ChildProcessError, match=message):
        convert(inputs, tmp_path / "x", ConvertSettings(), Execution(workers=2))
    flag.unlink()
    convert(inputs, tmp_path / "x", ConvertSettings(), Execution(workers=2))
    made = contents(tmp_path / "x")
    assert made | {"manifest": b""} == undisturbed | {"manifest": b""}
    assert not list((tmp_path / "x").glob(".*"))


def _convert_sleeping(inputs: list[Path], output: Path, flag: Path) -> None:
    convert_module.filters_of = lambda _: [meet(flag, 1, sleeps=True)]  # type: ignore[assignment]
    convert(inputs, output, ConvertSettings(), Execution(workers=2))


def test_workers_end_with_their_parent(tmp_path):
    inputs, flag = three_files(tmp_path / "in"), tmp_path / "flag"
    flag.touch()
    parent = start_process(_convert_sleeping, inputs, tmp_path / "x", flag)
    wait_for(flag.read_text)
    worker = psutil.Process(int(flag.read_text()))
    assert worker.pid != parent.pid
    parent.kill()
    parent.join()
    worker.wait(timeout=60)


POINTS = {
    "while it reads": (Tally, "add", 70),
    "before a chunk has its name": (Counts, "check", 2),
    "before a chunk's counts are there": (steps, "write_json", 2),
    "before a task is marked complete": ("executor", "mark_rank_as_completed", 2),
    "when all tasks are complete": (jobs, "merge_stats", 1),
    "before the manifest": (convert_module, "merge_stats", 1),
    "before the folder has its name": (stage, "sync_folder", 1),
}


def _convert_and_die(inputs: list[Path], output: Path, point: str) -> None:
    """Kills this process at some call, from 1, of a function."""
    module, name, number = POINTS[point]
    if module == "executor":
        from datatrove.executor.base import PipelineExecutor as module
    function, calls = getattr(module, name), iter(range(1, number))

    def dying(*arguments: Any, **keywords: Any) -> Any:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*arguments, **keywords)

    setattr(module, name, dying)
    convert(inputs, output, ConvertSettings(), ONE)


@pytest.mark.parametrize(
    "point", [pytest.param(point, marks=[pytest.mark.slow] * (i % 3 > 0)) for i, point in enumerate(POINTS)]
)
def test_killed_and_called_again(tmp_path, point, undisturbed):
    inputs = three_files(tmp_path / "in")
    process = start_process(_convert_and_die, inputs, tmp_path / "x", point)
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "x").exists()
    convert(inputs, tmp_path / "x", ConvertSettings(), ONE)
    assert contents(tmp_path / "x") == undisturbed
    assert not (tmp_path / "x.partial").exists()
