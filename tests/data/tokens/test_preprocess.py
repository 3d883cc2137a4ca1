"""JSONL to .bin/.idx: Megatron's bytes, whatever the workers, parts and crashes; what is lost is said."""

import gzip
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from itertools import islice
from pathlib import Path

import numpy as np
import orjson
import pytest
import torch
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from helpers import ROOT
from helpers.ranks import RankError, run_on_ranks
from moe_exp.commands.data import main
from moe_exp.data.documents import Tally, read_documents, read_lines
from moe_exp.data.download.sources import python_stdlib_documents
from moe_exp.data.kinds import BadDocument
from moe_exp.data.stage import Unfinished
from moe_exp.data.tokens.encoders import CheckedGigatoken, choose_backend, own_package, probe_texts
from moe_exp.data.tokens.parts import Part, PartEncoder, PartSettings, plan_parts
from moe_exp.data.tokens.preprocess import dry_run, merge_token_files, tokenize_files, tokenized_prefix
from moe_exp.data.tokens.tokenizer import load_tokenizer
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_bpe
from moe_exp.data.tokens.tokens import manifest_of, tokenizer_fact
from moe_exp.host.files import bytes_text

from megatron.core.datasets.indexed_dataset import IndexedDataset, IndexedDatasetBuilder

PART_BYTES = 20_000
ODD_TEXTS = [
    "nul \0 inside", "line\u2028separator\u2029and\x85", "Grüße, 世界! 🙂", " ", "\n",
    f"quotes {EOD_TOKEN} and <|pad|>", "\ufeffBOM", "a\r\nb",
]  # fmt: skip


def jsonl(texts, end="\n"):
    return end.join(
        json.dumps({"text": text, "id": str(number)}, ensure_ascii=number % 2 == 0)
        for number, text in enumerate(texts)
    ).encode()


@pytest.fixture(scope="module")
def texts():
    """About 150 KB of real text, and texts that tokenizers disagree on."""
    source = (text[:4000] for _, text in islice(python_stdlib_documents(), 60) if text)
    return [text for group in zip(source, ODD_TEXTS * 9, strict=False) for text in group]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, texts):
    """A tokenizer of 600 tokens, and the texts as corpus.jsonl."""
    folder = tmp_path_factory.mktemp("corpus")
    train_bpe(texts, 600, special_tokens=(EOD_TOKEN, "<|pad|>")).save(str(folder / "tokenizer.json"))
    (folder / "corpus.jsonl").write_bytes(jsonl(texts) + b"\n")
    return folder


@pytest.fixture(scope="module")
def how(folder):
    return PartSettings(load_tokenizer("HuggingFaceTokenizer", model=folder), append_eod=True)


@pytest.fixture(scope="module")
def undisturbed(folder, how):
    """The files of one run with one worker."""
    prefix = folder / "undisturbed"
    return prefix, tokenize_files([folder / "corpus.jsonl"], prefix, how, part_bytes=PART_BYTES)


def contents(prefix):
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


def write(path, content):
    path.write_bytes(content)
    return path


def changed_tokenizer(folder, path, part=None, **changes):
    """That of `folder` with changes, in one part of its tokenizer.json or in the whole."""
    content = json.loads((folder / "tokenizer.json").read_text())
    (content[part] if part else content).update(changes)
    path.write_text(json.dumps(content))
    return load_tokenizer("HuggingFaceTokenizer", model=path)


@pytest.mark.parametrize(
    ("backend", "is_large"), [("gigatoken", False), ("tokenizers", False), ("tokenizers", True)]
)
def test_files_are_those_of_tokenizers_and_megatron(backend, is_large, folder, texts, tmp_path):
    vocab = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
    vocab |= {f"unused {i}": i for i in range(600, 65500) if is_large}
    model = tmp_path / "tokenizer.json"
    how = PartSettings(changed_tokenizer(folder, model, "model", vocab=vocab), append_eod=True)
    options = {"backend": backend, "part_bytes": PART_BYTES}
    manifest = tokenize_files([folder / "corpus.jsonl"], tmp_path / "ours", how, **options)
    tokenizer = Tokenizer.from_file(str(model))
    tokenizer.encode_special_tokens = True
    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.int32 if is_large else np.uint16)
    for text in texts:
        ids = [*tokenizer.encode(text, add_special_tokens=False).ids, 0]
        builder.add_document(torch.tensor(ids), [len(ids)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert manifest["num_documents"] == manifest["num_eods"] == len(texts) and manifest["backend"] == backend
    assert manifest["num_tokens"] == sum(len(one) for one in IndexedDataset(str(tmp_path / "ours")))
    tally = Tally()
    assert len(list(read_documents(folder / "corpus.jsonl", tally))) == tally.num_documents
    assert Tally.from_json(manifest) == tally


@pytest.mark.parametrize("workers", [1, 3])
def test_any_number_of_workers_and_any_packing(workers, texts, how, undisturbed, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)), raising=False)
    thirds = [texts[:20], texts[20:40], texts[40:]]
    inputs = [
        write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + jsonl(thirds[0], "\r\n")),
        write(tmp_path / "b.jsonl.gz", gzip.compress(jsonl(thirds[1]))),
        write(tmp_path / "c.jsonl", b""),
        write(tmp_path / "d.jsonl.zst", zstandard.compress(jsonl(thirds[2]) + b"\n\n")),
    ]
    manifest = tokenize_files(inputs, tmp_path / "out", how, workers=workers, part_bytes=PART_BYTES // 2)
    assert contents(tmp_path / "out") == contents(undisturbed[0])
    assert manifest["skipped"] == {"blank line": 1}


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b"a", b"bb", b"\xef\xbb\xbf", b"cc\r", b"d" * 9]), max_size=8),
    st.booleans(),
    st.integers(1, 12),
)
def test_parts_have_every_line_once(tmp_path_factory, lines, ends, part_bytes):
    path = write(tmp_path_factory.mktemp("parts") / "x.jsonl", b"\n".join(lines) + b"\n" * ends)
    found = []
    for part in plan_parts([path], part_bytes):
        found += [(part.line_number(number), line) for number, line in read_lines(path, *part.bounds())]
    assert found == list(read_lines(path))


def test_shards_merge_to_the_files_of_a_single_run(texts, how, undisturbed, tmp_path, caplog):
    prefixes = []
    for number, shard in enumerate([texts[:1], texts[1:50], texts[50:]]):
        prefixes.append(tmp_path / f"shard{number}")
        tokenize_files([write(tmp_path / f"{number}.jsonl", jsonl(shard))], prefixes[-1], how)
    manifest = merge_token_files(prefixes, tmp_path / "merged")
    assert contents(tmp_path / "merged") == contents(undisturbed[0])
    assert (manifest["num_documents"], manifest["num_tokens"]) == (len(texts), undisturbed[1]["num_tokens"])
    for name in ("vocab_size", "eod_id"):
        assert manifest[name] == tokenizer_fact(manifest_of(str(prefixes[0])), name) is not None
    path = tmp_path / "shard1.manifest.json"
    other = json.loads(path.read_text())
    other["tokenizer"] |= {"hash": "0" * 32, "ids": "0" * 16}
    path.write_text(json.dumps(other))
    assert "were tokenized with different" not in caplog.text
    merge_token_files(prefixes, tmp_path / "other")
    both = f"{prefixes[0]} and {prefixes[1]}"
    assert f"{both} were tokenized with different tokenizer.json files" in caplog.text


def test_what_cannot_be_merged(how, undisturbed, tmp_path):
    builder = IndexedDatasetBuilder(str(tmp_path / "other.bin"), dtype=np.int32)
    builder.add_document(torch.arange(3), [3])
    builder.finalize(str(tmp_path / "other.idx"))
    types = "tokens are stored as uint16 in .* and int32 in .*other"
    for prefixes, output, rule in (
        ([undisturbed[0], tmp_path / "other"], "out", types),
        ([tmp_path / "missing"], "out", r"missing\.bin is missing\. Fix: "),
        ([tmp_path / "other"], "other", "must not be one of the shards"),
    ):
        with pytest.raises(ValueError, match=rule):
            merge_token_files(prefixes, tmp_path / output)


def test_special_tokens_in_a_text_are_text(folder, undisturbed, tmp_path):
    ids = np.fromfile(f"{undisturbed[0]}.bin", np.uint16)
    assert np.count_nonzero(ids == 0) == undisturbed[1]["num_documents"]
    assert np.count_nonzero(ids == 1) == 0
    path = write(tmp_path / "x.jsonl", jsonl([f"a{EOD_TOKEN}b<|pad|>", "c"]))
    for backend in ("gigatoken", "tokenizers"):
        tokenizer = load_tokenizer("HuggingFaceTokenizer", model=folder, allow_special=True)
        out = tmp_path / backend
        manifest = tokenize_files([path], out, PartSettings(tokenizer, append_eod=True), backend=backend)
        assert (manifest["num_documents"], manifest["num_eods"]) == (2, 3)
        assert list(np.fromfile(f"{out}.bin", np.uint16) == 1).count(True) == 1


LETTERS = [chr(code) for code in range(32, 127)]
SPECIAL = ["<unk>", "<pad>", "</s>"]
WORDS = {word: index for index, word in enumerate([*SPECIAL, "fine", "not"])}
PIECES = [[piece, -3.0] for piece in SPECIAL + LETTERS]
OWN_VOCABULARY = {
    "Unigram": {"model": {"type": "Unigram", "unk_id": 0, "vocab": PIECES, "byte_fallback": False}},
    "WordLevel": {
        "model": {"type": "WordLevel", "unk_token": "<unk>", "vocab": WORDS},
        "pre_tokenizer": {"type": "WhitespaceSplit"},
    },
}


def own_vocabulary(kind, folder):
    """A tokenizer whose model has the special tokens in its own vocabulary: no switch makes them text."""
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokens = [{"id": SPECIAL.index(token), "content": token, "special": True, **flags} for token in SPECIAL]
    content = {"version": "1.0", "added_tokens": tokens, **OWN_VOCABULARY[kind]}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return load_tokenizer("HuggingFaceTokenizer", model=folder)


@pytest.mark.parametrize("kind", OWN_VOCABULARY)
@pytest.mark.parametrize("token", SPECIAL[1:])
def test_special_tokens_of_the_models_own_vocabulary(kind, token, tmp_path):
    tokenizer = own_vocabulary(kind, tmp_path)
    reason, fine = f"the tokenizer reads {token} in the text as a special token", "not \u4e16 fine"
    texts = ["fine"] * 20 + [f"not {token} fine", f"{token} {token}"] + [fine] * 20
    path = write(tmp_path / "x.jsonl", jsonl(texts))
    with pytest.raises(BadDocument, match=rf"x\.jsonl:21: {reason}$"):
        tokenize_files([path], tmp_path / "out", PartSettings(tokenizer, append_eod=True), part_bytes=150)
    skipping = PartSettings(tokenizer, append_eod=True, skip_bad=True)
    manifest = tokenize_files([path], tmp_path / "skip", skipping, part_bytes=150)
    assert manifest["skipped"] == {reason: 2}
    assert (manifest["num_documents"], manifest["num_eods"]) == (40, 40)
    ids = np.fromfile(tmp_path / "skip.bin", np.uint16)
    # unknown words are text
    assert [np.count_nonzero(ids == index) for index in range(3)] == [20, 0, 40]
    fine_path = write(tmp_path / "fine.jsonl", jsonl(["fine", fine] * 20))
    without = tokenize_files([fine_path], tmp_path / "fine", PartSettings(tokenizer, append_eod=True))
    assert all(manifest[name] == without[name] for name in ("text_hash", "num_text_bytes"))


def test_one_document_larger_than_parts_and_batches(folder, how, tmp_path):
    text = "".join(text for _, text in islice(python_stdlib_documents(), 60))[:1_200_000]
    assert len(text) > 750_000
    path = write(tmp_path / "x.jsonl", jsonl(["before", text, "after"]))
    manifest = tokenize_files([path], tmp_path / "out", how, part_bytes=100_000)
    read = IndexedDataset(str(tmp_path / "out"))
    assert len(read) == manifest["num_documents"] == 3
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.decode(read[1][:-1]) == text


TRUNCATION = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
PADDING = {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None}
PADDING |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "<|pad|>"}
WITH_BOS = {
    "type": "TemplateProcessing",
    "single": [{"SpecialToken": {"id": "<|pad|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
    "special_tokens": {"<|pad|>": {"id": "<|pad|>", "ids": [1], "tokens": ["<|pad|>"]}},
}


@pytest.mark.parametrize(
    ("setting", "value", "length"),
    [("truncation", TRUNCATION, 5), ("padding", PADDING, 18), ("post_processor", WITH_BOS, 19)],
)
def test_documents_stay_as_they_are(setting, value, length, folder, undisturbed, tmp_path, caplog):
    """Not cut, not padded, and no token before them."""
    path = tmp_path / "t.json"
    how = PartSettings(changed_tokenizer(folder, path, **{setting: value}), append_eod=True)
    assert len(Tokenizer.from_file(str(path)).encode("x " * 9).ids) == length, "the setting works"
    said = f"ignoring {setting} in its tokenizer.json" in caplog.text
    assert said == (setting != "post_processor")
    tokenize_files([folder / "corpus.jsonl"], tmp_path / "out", how, part_bytes=PART_BYTES)
    assert contents(tmp_path / "out") == contents(undisturbed[0])


BAD_LINES = {
    b'{"text": "cut of': "not valid JSON",
    b'{"text": "\xff"}': "invalid UTF-8",
    rb'{"text": "\ud800"}': "not valid JSON",
    b'{"text": null}': "field 'text' is null, not a text",
}  # all of them: see test_documents


def with_line(line):
    return jsonl(["a"] * 40) + b"\n\n" + line + b"\n" + jsonl(["b"])


@pytest.mark.parametrize(
    ("name", "content", "rule"),
    [
        *(("x.jsonl", with_line(line), rf"x\.jsonl:42: {reason}") for line, reason in BAD_LINES.items()),
        ("x.jsonl.gz", gzip.compress(jsonl(ODD_TEXTS))[:-20], "the compressed file is damaged or ends early"),
        *(("x.jsonl", text, "the inputs have no documents") for text in (b"", b"\n\n", b'{"text": ""}')),
    ],
)
def test_what_stops(name, content, rule, how, tmp_path):
    with pytest.raises(ValueError, match=rule):
        tokenize_files([write(tmp_path / name, content)], tmp_path / "out", how, part_bytes=200)
    assert not (tmp_path / "out.bin").exists()
    assert not (tmp_path / "out.manifest.json").exists()


def test_bad_lines_are_skipped_and_counted(how, tmp_path):
    path = write(tmp_path / "x.jsonl", b"\n".join([*BAD_LINES, b" ", b'{"text": ""}', jsonl(["a", "b"])]))
    skipping = PartSettings(how.tokenizer, append_eod=True, skip_bad=True)
    manifest = tokenize_files([path], tmp_path / "out", skipping, part_bytes=64)
    assert manifest["num_documents"] == len(IndexedDataset(str(tmp_path / "out"))) == 2
    expected = {reason: list(BAD_LINES.values()).count(reason) for reason in BAD_LINES.values()}
    assert manifest["skipped"] == {**expected, "blank line": 1, "empty text": 1}


def test_a_bad_line_stops_all_workers(how, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)), raising=False)
    path = write(tmp_path / "x.jsonl", jsonl(["a" * 100] * 400) + b"\nnot JSON\n" + jsonl(["b" * 100] * 400))
    with pytest.raises(BadDocument, match=r"x\.jsonl:401: not valid JSON"):
        tokenize_files([path], tmp_path / "out", how, workers=2, backend="tokenizers", part_bytes=5000)


def test_gigatoken_is_left_where_it_gives_other_ids(folder, tmp_path):
    tokenizer = changed_tokenizer(folder, tmp_path / "t.json", "pre_tokenizer", use_regex=False)
    backend, reason, _ = choose_backend(tokenizer, "auto", ["some text"])
    assert backend == "tokenizers" and reason.startswith("not gigatoken: it encodes ")
    with pytest.raises(ValueError, match=r"^BACKEND=gigatoken: .* it encodes .* Fix: set --backend token"):
        choose_backend(tokenizer, "gigatoken", [])


def test_a_difference_in_the_corpus_names_the_document(folder, tmp_path):
    tokenizer = changed_tokenizer(folder, tmp_path / "t.json", "pre_tokenizer", use_regex=False)
    fast, slow = CheckedGigatoken(tokenizer), own_package(tokenizer)
    texts = probe_texts(tokenizer)
    odd = next(text for text in texts if not np.array_equal(fast([text])[0], slow([text])[0]))
    part = Part(write(tmp_path / "x.jsonl", jsonl(["a", odd])), 0, 10**6, 0)
    with pytest.raises(ValueError, match=r"x\.jsonl:2: gigatoken encodes .* Fix: add --backend token"):
        PartEncoder(PartSettings(tokenizer), "gigatoken").encode(part, tmp_path, lambda num_bytes: None)
    assert not list(tmp_path.glob("part.*"))


def test_characters_that_gigatoken_splits_otherwise_are_left_to_the_other_package(tmp_path):
    new = "\ua7cf"  # of Unicode 17: a letter for the one, unassigned for the other
    # which has the quotation mark and the first byte as a token
    train_bpe([f'"{new}" '] * 50, 300).save(str(tmp_path / "tokenizer.json"))
    gigatoken = CheckedGigatoken(load_tokenizer("HuggingFaceTokenizer", model=tmp_path))
    texts = ["a", f'x"{new}"', "é", f'y"{new}{new}']
    ids, lengths = gigatoken(texts)
    expected = gigatoken.own(texts)
    assert (list(ids), list(lengths), gigatoken.num_rerouted) == (list(expected[0]), list(expected[1]), 2)
    assert list(gigatoken._encode(texts)[0]) != list(ids)
    # the comparison of a part with the other package must not count in the next part
    path = write(tmp_path / "x.jsonl", jsonl(texts))
    encoder = PartEncoder(PartSettings(load_tokenizer("HuggingFaceTokenizer", model=tmp_path)), "gigatoken")
    for index in range(2):
        encoder.encode(Part(path, 0, 10**6, index), tmp_path, lambda num_bytes: None)
        assert json.loads((tmp_path / f"part.{index:06d}.json").read_text())["num_rerouted"] == 2


def test_without_gigatoken(how, monkeypatch):
    monkeypatch.setitem(sys.modules, "gigatoken", None)
    backend, reason, _ = choose_backend(how.tokenizer, "auto", ["some text"])
    assert backend == "tokenizers" and "it is not installed (pip install gigatoken)" in reason


def test_a_tokenizer_that_gigatoken_cannot_load(folder, tmp_path):
    tokenizer = changed_tokenizer(folder, tmp_path / "t.json", normalizer={"type": "Lowercase"})
    backend, reason, _ = choose_backend(tokenizer, "auto", [])
    assert backend == "tokenizers" and "it cannot load this tokenizer (" in reason


KILLER = """
import os, pathlib, signal
from moe_exp.data import stage
from moe_exp.data.tokens import parts as token_parts, preprocess
from moe_exp.data.tokens.parts import PartSettings
from moe_exp.data.tokens.tokenizer import load_tokenizer

corpus, tokenizer, output, owner, name, needle, countdown = {arguments}
owners = dict(Path=pathlib.Path, stage=stage, token_parts=token_parts)
owner = owners[owner]
original, left = getattr(owner, name), int(countdown)

def kill_in_front(*arguments, **keywords):
    global left
    left -= needle in str(arguments[:2])
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(*arguments, **keywords)

setattr(owner, name, kill_in_front)
how = PartSettings(load_tokenizer("HuggingFaceTokenizer", model=tokenizer), append_eod=True)
preprocess.tokenize_files([pathlib.Path(corpus)], pathlib.Path(output), how, part_bytes=20_000)
"""


def kill(*arguments):
    with pytest.raises(RankError, match="died with exit code -9"):
        run_on_ranks(1, exec, KILLER.format(arguments=list(map(str, arguments))), {}, join=False)


@pytest.mark.parametrize(
    ("owner", "name", "needle", "countdown"),
    [
        pytest.param(
            "Path", "replace", "part.000000", 1, marks=pytest.mark.slow
        ),  # the tokens of the first part are written
        ("token_parts", "write_json", "part.000002", 1),  # its tokens have their name, its counts not
        pytest.param(
            "token_parts", "write_json", "joined.json", 3, marks=pytest.mark.slow
        ),  # it is in the joined file, which nobody knows yet
        pytest.param("token_parts", "write_index", "", 1, marks=pytest.mark.slow),  # all parts are joined
        ("Path", "replace", "out.partial/out.idx", 2),  # the .bin has its place, the .idx not
        pytest.param(
            "stage", "write_json", "out.manifest.json", 1, marks=pytest.mark.slow
        ),  # both have, the manifest is missing
        pytest.param(
            "stage", "sync_folder", "", 1, marks=pytest.mark.slow
        ),  # the manifest is there, the working folder too
    ],
)
def test_killed_and_called_again(owner, name, needle, countdown, folder, how, undisturbed, tmp_path):
    kill(folder / "corpus.jsonl", folder, tmp_path / "out", owner, name, needle, countdown)
    manifest = tokenize_files([folder / "corpus.jsonl"], tmp_path / "out", how, part_bytes=PART_BYTES)
    assert contents(tmp_path / "out") == contents(undisturbed[0])
    differing = {name for name in manifest if manifest[name] != undisturbed[1][name]}
    assert differing <= {"made_at", "seconds", "id", "outputs"}


def test_complete_parts_are_not_made_again(folder, how, undisturbed, tmp_path):
    source = write(tmp_path / "x.jsonl", (folder / "corpus.jsonl").read_bytes() + b"not JSON\n")
    made = []
    for _ in range(2):
        with pytest.raises(BadDocument):
            tokenize_files([source], tmp_path / "out", how, part_bytes=PART_BYTES)
        parts = (tmp_path / "out.partial").glob("part.*.json")
        made.append({path.name: path.stat().st_mtime_ns for path in parts})
    assert len(made[0]) > 5 and made[0] == made[1]


def test_damaged_work_is_made_again(folder, how, undisturbed, tmp_path):
    kill(folder / "corpus.jsonl", folder, tmp_path / "out", "token_parts", "write_index", "", 1)
    joined = tmp_path / "out.partial" / "out.bin"
    content = bytearray(joined.read_bytes())
    content[len(content) // 2] ^= 1
    joined.write_bytes(content)
    tokenize_files([folder / "corpus.jsonl"], tmp_path / "out", how, part_bytes=PART_BYTES)
    assert contents(tmp_path / "out") == contents(undisturbed[0])


def test_a_worker_that_dies_is_named(folder, how, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(2)), raising=False)
    source = write(tmp_path / "x.jsonl", (folder / "corpus.jsonl").read_bytes() * 60)

    def kill_one():
        # each worker reports its progress in a file that has its process id as its name
        while not (working := list((tmp_path / "out.partial/through").glob("*"))):
            time.sleep(0.02)
        os.kill(int(working[0].name), signal.SIGKILL)

    threading.Thread(target=kill_one, daemon=True).start()
    with pytest.raises(Unfinished, match=r"of \S+x\.jsonl was killed by SIGKILL; .*fewer --workers"):
        tokenize_files([source], tmp_path / "out", how, workers=2, backend="tokenizers")


def test_disk_full(folder, how, undisturbed, tmp_path):
    flags = ["--input", folder / "corpus.jsonl", "--output-prefix", tmp_path / "out", "--workers", 1]
    flags += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder, "--append-eod"]
    limit = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))"
    code = f"{limit}; from moe_exp.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "data", "tokenize", *map(str, flags)]
    full = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert full.returncode == 1 and "Traceback" not in full.stderr
    assert re.match("moe-exp data: .*File too large", full.stderr.splitlines()[-1])
    assert main("tokenize", words[5:]) == 0
    assert contents(tmp_path / "out_text_document") == contents(undisturbed[0])


def test_settings_that_changed_are_refused(folder, how, undisturbed, tmp_path):
    path = write(tmp_path / "x.jsonl", jsonl(["a"]))
    tokenize_files([path], tmp_path / "out", how)
    with pytest.raises(ValueError, match="was made with append_eod=True, not False"):
        tokenize_files([path], tmp_path / "out", PartSettings(how.tokenizer))


def test_no_eod_where_one_is_asked_for(folder, tmp_path):
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"] = []
    content["model"]["vocab"]["none"] = content["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", model=tmp_path)
    with pytest.raises(ValueError, match=r"^APPEND_EOD=True: .* defines no end-of-document token\. Fix: "):
        PartSettings(tokenizer, append_eod=True)
    path = write(tmp_path / "x.jsonl", jsonl(["abc"]))
    assert tokenize_files([path], tmp_path / "out", PartSettings(tokenizer))["num_eods"] == 0


@pytest.mark.parametrize(("field", "value"), [("workers", 0), ("tasks", 0)])
def test_wrong_settings(field, value, how, tmp_path):
    with pytest.raises(ValueError, match=rf"(?i)^{field}={value}: must be .* Fix: "):
        tokenize_files([write(tmp_path / "x.jsonl", jsonl(["a"]))], tmp_path / "out", how, **{field: value})
    assert not (tmp_path / "out.partial").exists()


def test_dry_run_writes_nothing(folder, how, undisturbed, tmp_path, capsys):
    dry_run([folder / "corpus.jsonl"], tmp_path / "out", how, workers=1, backend="auto")
    assert list(tmp_path.iterdir()) == []
    out = capsys.readouterr().out
    estimate = int(re.search(r"│ tokens .* at most about ([\d,]+)", out)[1].replace(",", ""))
    assert undisturbed[1]["num_tokens"] * 0.7 < estimate < undisturbed[1]["num_tokens"] * 1.5


def test_the_script_with_megatrons_flags(folder, undisturbed, tmp_path):
    script, source = ROOT / "moe_exp" / "scripts" / "preprocess_data.py", folder / "corpus.jsonl"
    words = [sys.executable, script, "--input", source, "--output-prefix", tmp_path / "llama3"]
    words += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", folder, "--append-eod"]
    words += ["--workers", 128, "--log-interval", 1000]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    options = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True, "timeout": 300}
    done = subprocess.run(list(map(str, words)), **options)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith(f"TRAIN_DATA={tmp_path}/llama3_text_document VOCAB_SIZE=")
    assert contents(tmp_path / "llama3_text_document") == contents(undisturbed[0])


def test_several_keys_and_refused_flags(folder, tmp_path, capsys):
    write(tmp_path / "x.jsonl", orjson.dumps({"text": "a b", "title": "c"}))
    flags = ["--input", str(tmp_path / "x.jsonl"), "--output-prefix", str(tmp_path / "out")]
    flags += ["--tokenizer-type", "ByteLevelTokenizer", "--append-eod"]
    assert main("tokenize", [*flags, "--json-keys", "text", "title"]) == 0
    assert list(np.fromfile(tmp_path / "out_text_document.bin", np.uint16)) == [*b"a b", 256]
    assert list(np.fromfile(f"{tokenized_prefix(tmp_path / 'out', 'title')}.bin", np.uint16)) == [*b"c", 256]
    assert main("tokenize", [*flags, "--split-sentences"]) == 1
    assert "SPLIT_SENTENCES=True: is not supported" in capsys.readouterr().err
    shards = [str(tmp_path / "out_text_document"), str(tmp_path / "out_title_document")]
    before = sorted(tmp_path.iterdir())
    merge = ["--merge", *shards, "--output-prefix"]
    assert main("tokenize", [*merge, str(tmp_path / "new" / "both"), "--dry-run"]) == 0
    assert sorted(tmp_path.iterdir()) == before
    rows = dict(re.findall(r"^│ (\w+) +│ (.*?) +│$", capsys.readouterr().out, re.MULTILINE))
    num_bytes = sum(len(content) for shard in shards for content in contents(shard))
    assert (rows["documents"], rows["tokens"]) == ("2", "6")
    assert rows["disk"].startswith(f"{bytes_text(num_bytes)} of ")
    assert main("tokenize", [*merge, str(tmp_path / "both")]) == 0
    assert list(np.fromfile(tmp_path / "both.bin", np.uint16)) == [*b"a b", 256, *b"c", 256]
