"""Filters by name: what each removes and changes is counted to the text, with reasons and samples."""

import contextlib
import importlib.util
import json
import random
from collections import Counter

import pytest

from helpers.jsonl import read_jsonl, write_parts
from moe_exp.data.convert.benchmarks import benchmarks_of
from moe_exp.data.convert.convert import ConvertSettings, convert
from moe_exp.data.convert.duplicates import NearDuplicates
from moe_exp.data.convert.filters import NOTHING_LEFT, Counts, NamedFilter
from moe_exp.data.documents import Tally
from moe_exp.data.execution import Execution
from moe_exp.data.inspection import inspect_path, print_inspection

pytest.importorskip("datatrove")

HERE = Execution(workers=1)
SENTENCE = "The quick brown fox jumps over the lazy dog, and that is what all of them have to say. "
WORDS = [a + b for a in "bcdfglmnprst" for b in ("am", "on", "old", "umber", "ellow", "arden", "ittle")]
CHOICE, ALL_WORDS = random.Random(7), [*WORDS, "and", "that", "have", "of", "with"] * 3
GOOD = "\n".join(" ".join(CHOICE.choices(ALL_WORDS, k=15)) + "." for _ in range(10))


def write(folder, documents, number=2):
    return write_parts(folder, [{"id": name, **fields} for name, fields in documents.items()], number)


def converted(folder, documents, *filters, **settings):
    """Texts that stay by id, and the manifest."""
    named = tuple(map(NamedFilter.parse, filters))
    documents = {name: one if isinstance(one, dict) else {"text": one} for name, one in documents.items()}
    inputs = write(folder / "in", documents)
    manifest = convert(inputs, folder / "out", ConvertSettings(filters=named, **settings), HERE)
    return {one["id"]: one["text"] for one in read_jsonl(*(folder / "out").glob("*.jsonl"))}, manifest


def number_of(manifest, name):
    return manifest["filtered"][name]["num_documents"]


def test_quality_rules_remove_with_their_reasons(tmp_path):
    documents = {
        "good": GOOD,
        "short": "Too short to be of use.",
        "list": "\n".join(f"item {number}" for number in range(200)),
        "repeated": SENTENCE * 40,
    }
    kept, manifest = converted(tmp_path, documents, "gopher-quality", "gopher-repetition", "fineweb-quality")
    assert kept == {"good": GOOD}
    assert manifest["reasons"]["gopher-quality"] == {"gopher_short_doc": 1, "gopher_below_alpha_threshold": 1}
    assert number_of(manifest, "gopher-repetition") == 1 and number_of(manifest, "fineweb-quality") == 0
    samples = json.loads((tmp_path / "out/datatrove/samples.json").read_text())
    by_id = {sample["id"]: sample["filter"] for sample in samples}
    assert by_id == {"short": "gopher-quality", "list": "gopher-quality", "repeated": "gopher-repetition"}


def test_options_are_those_of_datatrove(tmp_path):
    documents = {"a": "one two three", "b": "one two three four five"}
    options = "{min_doc_words: 4, min_stop_words: null, min_avg_word_length: null}"
    kept, _ = converted(tmp_path, documents, f"gopher-quality: {options}")
    assert set(kept) == {"b"}


def test_filters_that_edit_are_counted_before_and_after(tmp_path):
    documents = {
        "mail": "Write to jane.doe@somewhere.org about it.",
        "address": "The host is 8.8.4.4 and its neighbour 10.0.0.1.",
        "none": "There is nothing personal here.",
    }
    kept, manifest = converted(tmp_path, documents, "pii")
    assert kept["none"] == documents["none"]
    assert "jane" not in kept["mail"] and "8.8.4.4" not in kept["address"]
    assert "10.0.0.1" in kept["address"]
    before, after = manifest["edited"]["pii"]
    changed = ("mail", "address")
    assert before["num_documents"] == after["num_documents"] == 2
    assert before["num_text_bytes"] == sum(len(documents[name]) for name in changed)
    assert after["num_text_bytes"] == sum(len(kept[name]) for name in changed)


def test_c4_removes_lines_and_documents(tmp_path):
    sentences = [f"{SENTENCE}This is sentence {number}." for number in range(5)]
    page = "\n".join([*sentences, "Menu", "Log in now"])
    code = page + "\nwhile (true) { wait a bit. }."
    kept, manifest = converted(tmp_path, {"page": page, "code": code, "menu": "Home\nAbout"}, "c4-quality")
    assert set(kept) == {"page"} and "Menu" not in kept["page"] and kept["page"].endswith("sentence 4.")
    assert manifest["reasons"]["c4-quality"] == {"curly_bracket": 1, "too_few_sentences": 1}
    assert manifest["edited"]["c4-quality"][0]["num_documents"] == 1


FUNCTIONS = """
from __future__ import annotations
from dataclasses import dataclass

@dataclass
class Rule:
    word: str

def keep(document):
    if "bad" in document.text:
        return False, "bad word"
    document.text = document.text.replace("secret", "")
    return document.metadata.get("score", 1) > 0

def wrong(document):
    return document.nothing
"""


def test_a_function_of_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    documents = {"a": "a secret plan", "b": "a bad plan", "c": "secret"}
    documents["d"] = {"text": "no score", "score": 0}
    kept, manifest = converted(tmp_path, documents, "mine.py:keep")
    assert kept == {"a": "a  plan"}
    assert manifest["reasons"]["mine.py:keep"] == {"bad word": 1, NOTHING_LEFT: 1, "": 1}
    # the function belongs to the result
    (tmp_path / "mine.py").write_text(FUNCTIONS.replace("> 0", ">= 0"))
    inputs = sorted((tmp_path / "in").iterdir())
    with pytest.raises(ValueError, match=r"out: was made with filters=.* Fix: use --start-over"):
        convert(inputs, tmp_path / "out", ConvertSettings(filters=(NamedFilter.parse("mine.py:keep"),)), HERE)
    with pytest.raises(RuntimeError, match=r"task 0 of 2: AttributeError.*nothing.*Log: "):
        wrong = ConvertSettings(filters=(NamedFilter.parse("mine.py:wrong"),))
        convert(inputs, tmp_path / "other", wrong, HERE)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("no-such", r"filter=no-such: must be one of c4-paragraphs, .*, FILE\.py:FUNCTION\. Fix: choose one"),
        ("gopher-quality: {words: 3}", r"filter=gopher-quality: unknown option words\. Fix: use"),
        ("pii: [1]", r"filter=pii: \[1\]: must be NAME or 'NAME: \{option: value\}'"),
        ("a: {b: [", r"filter=a: \{b: \[: must be NAME"),
        ("gone.py:keep", r"filter=gone\.py:keep: gone\.py not found\. Fix: check the path"),
        (f"{__file__}:ENGLISH: {{a: 1}}", r"unknown option a\. Fix: use no options"),
        ("language", r"filter=language: languages=None: must be a list\. Fix: give"),
        ("language: {languages: [en], threshold: 2}", r"threshold=2: must be between 0 and 1"),
        ("language: {languages: [en], model: gone}", r"model=gone: file not found\. Fix: give"),
    ],
)
def test_what_is_no_filter(given, message):
    if "model" in given and importlib.util.find_spec("fasttext") is None:
        pytest.skip("needs fasttext-numpy2-wheel, which Python 3.13 has not")
    with pytest.raises(ValueError, match=message):
        NamedFilter.parse(given)
    with pytest.raises(ValueError, match=r"filter=pii: is given twice\. Fix: give it once\."):
        ConvertSettings(filters=(NamedFilter("pii"), NamedFilter("pii")))


def test_reasons_and_samples_are_bounded(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text("def keep(document):\n    return False, document.text\n")
    documents = {f"{number}": f"text {number}" for number in range(60)}
    _, manifest = converted(tmp_path, documents, f"{tmp_path}/mine.py:keep")
    (reasons,) = manifest["reasons"].values()
    assert sum(reasons.values()) == 60 and reasons["other"] == 20 and len(reasons) == 41
    assert len(json.loads((tmp_path / "out/datatrove/samples.json").read_text())) == 46


def test_a_package_that_is_missing_is_named(monkeypatch):
    find = importlib.util.find_spec
    gone = ("ahocorasick", "py3langid")
    without = lambda name, *rest: None if name in gone else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", without)
    with pytest.raises(ValueError, match=r"requires the package pyahocorasick\. Fix: pip"):
        NamedFilter.parse("url")
    with pytest.raises(ValueError, match=r"requires the package py3langid\. Fix: pip"):
        NamedFilter.parse("language: {languages: [en]}")


ENGLISH = "This is a text in English, about the weather of last week and what it will be tomorrow."
GERMAN = "Wir lesen hier einen deutschen Text über das Wetter der letzten Woche und wie es morgen wohl wird."
FRENCH = "Ceci est un texte en français sur le temps qu'il a fait la semaine dernière et qu'il fera demain."


def test_languages_by_py3langid(tmp_path):
    pytest.importorskip("py3langid")
    texts = {"en": ENGLISH, "de": GERMAN, "fr": FRENCH}
    documents = {name: {"text": text, "language": "en"} for name, text in texts.items()}
    documents["other"] = {"text": ENGLISH, "language": "xx"}
    how = {"languages": ("en",)}  # a field of the documents, which says something else
    kept, manifest = converted(tmp_path, documents, "language: {languages: [en, fr]}", **how)
    assert set(kept) == {"en", "fr"} and manifest["reasons"] == {"identified language": {"de": 1}}
    assert number_of(manifest, "language") == 1


def test_languages_by_a_fasttext_model(tmp_path):
    fasttext = pytest.importorskip("fasttext")
    texts = [("en", ENGLISH), ("de", GERMAN)] * 50
    lines = [f"__label__{label} {text}" for label, text in texts]
    (tmp_path / "labels.txt").write_text("\n".join(lines))
    how = {"epoch": 50, "lr": 0.2, "dim": 16, "minn": 2, "maxn": 4, "thread": 1, "verbose": 0}
    model = None
    for _ in range(3):  # with the same numbers fasttext rarely ends with "Encountered NaN"
        with contextlib.suppress(RuntimeError):
            model = model or fasttext.train_supervised(str(tmp_path / "labels.txt"), **how)
    model.save_model(str(tmp_path / "lid.bin"))
    options = f"language: {{languages: [en], model: {tmp_path}/lid.bin}}"
    kept, manifest = converted(tmp_path, {"en": ENGLISH, "de": GERMAN}, options)
    assert set(kept) == {"en"} and number_of(manifest, "identified language") == 1
    assert manifest["settings"]["filters"][0]["files"][0]["name"] == "lid.bin"


@pytest.mark.filterwarnings("ignore:The 'registered_domain' property:DeprecationWarning")
def test_addresses(tmp_path):
    pytest.importorskip("ahocorasick")
    pytest.importorskip("tldextract")
    documents = {
        "good": {"text": "a page", "url": "https://www.example.com/page"},
        "bad": {"text": "another", "url": "https://sub.unwanted.org/x"},
    }
    options = "url: {extra_domains: [unwanted.org], use_integrated_lists: false}"
    kept, manifest = converted(tmp_path, documents, options)
    assert set(kept) == {"good"} and manifest["reasons"]["url"] == {"domain": 1}


def a_corpus():
    """Documents that every filter of the chain has something to do with."""
    documents, of_its_own = {}, {}
    for number in range(120):
        choice, kind = random.Random(number), number % 8
        words = (choice.choices(WORDS, k=13) for _ in range(6))
        lines = [f"The {' '.join(some)} and that they have {last}." for *some, last in words]
        if kind == 1:
            lines = [f"short {number}"]
        if kind == 2:
            lines[0] = "The man to write to is me@home.org for that, and he will have it."
        if kind == 3:
            lines = ["The text of this document and that of others have it in them."] * 6
        if kind == 4:  # nearly that of another
            lines = [*of_its_own[number - 4][:-1], "The last one is another and that is all they have."]
        if kind == 5:
            lines.append("These twelve words in a row are part of a benchmark as it happens.")
        if kind == 6:
            lines = [f"The text {number} has few words, and that they have."]
        of_its_own[number] = lines
        language = "de" if kind == 7 else "en"
        documents[f"{number}"] = {"text": "\n".join(lines), "score": number % 10, "language": language}
    return documents | {"empty": {"text": ""}}


def whole_chain(folder, inputs, num_tasks):
    filters = ["gopher-quality: {min_doc_words: 20}", "c4-quality", "pii", f"{folder}/mine.py:keep"]
    settings = ConvertSettings(
        tasks=num_tasks, languages=("en",), min_score=1, min_chars=10, dedup=True,
        filters=tuple(map(NamedFilter.parse, filters)),
        near_dedup=NearDuplicates(num_buckets=20, hashes_per_bucket=3),
        decontaminate=benchmarks_of(folder / "benchmark.jsonl"),
    )  # fmt: skip
    manifest = convert(inputs, folder / f"by_{num_tasks}", settings, HERE)
    return manifest, read_jsonl(*(folder / f"by_{num_tasks}").glob("*.jsonl"))


def test_every_document_is_accounted_for_with_all_filters_on(tmp_path, capsys):
    overlap = "these twelve words in a row are part of a benchmark as it happens"
    (tmp_path / "benchmark.jsonl").write_text(json.dumps({"text": overlap}) + "\n")
    (tmp_path / "mine.py").write_text("def keep(document):\n    return '17' not in document.id\n")
    documents = a_corpus()
    inputs = write(tmp_path / "in", documents, 3)
    manifest, written = whole_chain(tmp_path, inputs, 1)
    removed = {name: tally["num_documents"] for name, tally in manifest["filtered"].items()}
    assert list(removed) == [
        "language", "score", "length", "gopher-quality", "c4-quality", "pii", f"{tmp_path}/mine.py:keep",
        "duplicate", "near duplicate", "contaminated",
    ]  # fmt: skip
    assert [name for name, number in removed.items() if not number] == ["c4-quality", "pii"]
    assert manifest["read"]["num_documents"] == len(documents) - 1 == sum(removed.values()) + len(written)
    assert manifest["edited"]["pii"][0]["num_documents"] > 0
    # the bytes of text, too, where they were changed
    edited = [[one["num_text_bytes"] for one in pair] for pair in manifest["edited"].values()]
    left = manifest["read"]["num_text_bytes"] + sum(after - before for before, after in edited)
    gone = sum(tally["num_text_bytes"] for tally in manifest["filtered"].values())
    assert left == gone + manifest["written"]["num_text_bytes"]
    for task in manifest["tasks"]:
        assert set(task) == {"task", "files", "read", "filtered", "written"}
    by_three, same = whole_chain(tmp_path, inputs, 3)
    assert Counter(one["text"] for one in same) == Counter(one["text"] for one in written)
    for name in ("read", "filtered", "reasons", "edited", "written"):
        assert by_three[name] == manifest[name]
    report = inspect_path(tmp_path / "by_3", num_samples=1)
    assert {one["filter"]: one["removed"] for one in report["filters"]} == removed
    assert {sample["filter"] for sample in report["removed_samples"]} >= {"gopher-quality", "near duplicate"}
    print_inspection(report)
    assert "gopher_" in capsys.readouterr().out


def test_what_was_made_before_there_were_filters_stays(tmp_path):
    inputs = write(tmp_path / "in", {"a": {"text": "one"}, "b": {"text": "two"}})
    convert(inputs, tmp_path / "out", ConvertSettings(), HERE)
    path = tmp_path / "out/manifest.json"
    manifest = json.loads(path.read_text())
    for name in ("filters", "near_dedup"):
        del manifest["settings"][name]
    path.write_text(json.dumps(manifest))
    assert convert(inputs, tmp_path / "out", ConvertSettings(), HERE) == manifest
    with pytest.raises(ValueError, match=r"was made with filters=None, not \[.*pii.*Fix: use --start"):
        convert(inputs, tmp_path / "out", ConvertSettings(filters=(NamedFilter("pii"),)), HERE)


READ, WRITTEN = Tally(3, 30, 7), Tally(2, 20, 4)
ONE, TWO = Tally(1, 10, 1), Tally(1, 4, 2)  # a text, and what a filter makes of it


@pytest.mark.parametrize(
    ("counts", "wrong"),
    [
        (Counts(READ, WRITTEN, {"a": Tally(1, 10, 3)}), ""),
        (Counts(READ, WRITTEN), "num_documents is 3 for documents read, but 2 for"),
        (Counts(READ, WRITTEN, {"a": Tally(1, 11, 3)}), "num_text_bytes is 30 for .* 31 for"),
        (Counts(READ, WRITTEN, {"a": Tally(1, 10, 4)}), "text_hash is 7 for .* 8 for"),
        (Counts(ONE, TWO, edited={"b": (ONE, TWO)}), ""),
        (Counts(TWO, Tally(1, 3, 1), edited={"b": (ONE, TWO)}), "num_text_bytes is 8 for .* 13 for"),
    ],
)
def test_counts_that_do_not_agree_are_an_error(counts, wrong):
    with pytest.raises(ValueError, match=f"task 0: {wrong}") if wrong else contextlib.nullcontext():
        counts.check("task 0")


def test_a_pass_that_did_not_read_what_the_one_before_wrote():
    with pytest.raises(ValueError, match="num_documents: differs between the output of a pass and the input"):
        Counts(ONE, Tally(2, 20, 4)).then(Counts(read=Tally(1, 20, 4)))
