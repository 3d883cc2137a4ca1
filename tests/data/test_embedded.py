"""The embedded corpus is built once, whole or not at all, and says what it holds."""

import hashlib
import json
import logging
import platform
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filelock import FileLock
from tokenizers import Tokenizer

from helpers.ranks import start_process
from moe_exp.data import embedded
from moe_exp.data.embedded import ensure_embedded_corpus

DOCUMENTS = [(f"a/module_{i}.py", f"def function_{i}(value):\n    return value * {i}\n") for i in range(200)]
FOLDER = f"python_{platform.python_version()}_torch_{torch.__version__.partition('+')[0]}_bpe300"
_HASHES = sorted((hashlib.sha256(path.encode()).hexdigest(), text) for path, text in DOCUMENTS)
HELD_OUT = [text for digest, text in _HASHES if int(digest[:8], 16) % 20 == 0]


@pytest.fixture
def small_corpus(monkeypatch):
    monkeypatch.setattr(embedded, "embedded_documents", lambda: DOCUMENTS)


def build(folder):
    return ensure_embedded_corpus(folder, vocab_size=300)


def read_texts(prefix, tokenizer):
    """The documents of a file, by its sizes alone."""
    count = int(np.fromfile(f"{prefix}.idx", "<u8", 1, offset=18)[0])
    sizes = np.fromfile(f"{prefix}.idx", dtype="<i4", offset=34, count=count)
    tokens = np.fromfile(f"{prefix}.bin", dtype=np.uint16)
    parts = np.split(tokens, np.cumsum(sizes)[:-1])
    assert all(part[-1] == 0 for part in parts)
    return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]


def test_corpus_holds_every_document_once(small_corpus, tmp_path):
    corpus = build(tmp_path / "new" / "data")
    tokenizer = Tokenizer.from_file(corpus.tokenizer_path)
    texts = {"train": [text for _, text in DOCUMENTS if text not in HELD_OUT], "valid": HELD_OUT}
    folder = tmp_path / "new/data" / FOLDER
    manifest = json.loads((folder / "manifest.json").read_text())
    assert len(HELD_OUT) > 2 and manifest["license"] == "PSF-2.0 and BSD-3-Clause"
    for name, prefix in (("train", corpus.train_prefix), ("valid", corpus.valid_prefix)):
        assert read_texts(prefix, tokenizer) == texts[name]
        num_bytes = sum(len(text.encode()) for text in texts[name])
        num_tokens = np.fromfile(f"{prefix}.bin", np.uint16).size
        facts = {"num_documents": len(texts[name]), "num_bytes": num_bytes, "num_tokens": num_tokens}
        assert manifest[name] == facts


@pytest.mark.slow
def test_all_sources_of_python_and_torch(tmp_path):
    corpus = ensure_embedded_corpus(tmp_path)
    tokenizer = Tokenizer.from_file(corpus.tokenizer_path)
    assert tokenizer.get_vocab_size() == 2048
    train, valid = (read_texts(prefix, tokenizer) for prefix in (corpus.train_prefix, corpus.valid_prefix))
    assert len(train) > 1500 and np.fromfile(f"{corpus.train_prefix}.bin", np.uint16).size > 5e6
    assert set(valid) <= {text for _, text in embedded.embedded_documents()}


def test_tokenizer_sees_the_training_part_only(monkeypatch, tmp_path):
    monkeypatch.setattr(embedded, "_TEXTS_PER_BPE_TEXT", 1)
    marked = [(path, text + "zqzqzq " * 500 if text in HELD_OUT else text) for path, text in DOCUMENTS]
    monkeypatch.setattr(embedded, "embedded_documents", lambda: marked)
    with_marks = build(tmp_path / "marked")
    monkeypatch.setattr(embedded, "embedded_documents", lambda: DOCUMENTS)
    without = build(tmp_path / "plain")
    sizes = [np.fromfile(f"{one.valid_prefix}.bin", np.uint16).size for one in (with_marks, without)]
    assert sizes[0] > sizes[1] + 500
    tokenizers = {Tokenizer.from_file(one.tokenizer_path).to_str() for one in (with_marks, without)}
    assert len(tokenizers) == 1


def test_text_that_quotes_the_special_token_is_one_document(monkeypatch, tmp_path):
    quoting = [(path, "x = '<|endoftext|>'\n" + text) for path, text in DOCUMENTS]
    monkeypatch.setattr(embedded, "embedded_documents", lambda: quoting)
    corpus = build(tmp_path)
    tokens = np.fromfile(f"{corpus.train_prefix}.bin", np.uint16)
    assert np.count_nonzero(tokens == 0) == 200 - len(HELD_OUT)


def test_second_call_reads_only(small_corpus, tmp_path, monkeypatch):
    first = build(tmp_path)
    monkeypatch.setattr(embedded, "_build", lambda *_: pytest.fail("built again"))
    monkeypatch.setattr(embedded, "_check_writable", lambda _: pytest.fail("a read-only folder is enough"))
    assert build(tmp_path) == first


def test_vocabularies_have_folders_of_their_own(small_corpus, tmp_path):
    small, large = build(tmp_path), ensure_embedded_corpus(tmp_path, vocab_size=310)
    assert small.tokenizer_path != large.tokenizer_path
    assert Tokenizer.from_file(large.tokenizer_path).get_vocab_size() == 310


def test_crash_leaves_no_folder_that_looks_complete(small_corpus, tmp_path, monkeypatch):
    def crash(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        # The last step of all: everything but the manifest is written by then.
        patch.setattr(json, "dumps", crash)
        with pytest.raises(KeyboardInterrupt):
            build(tmp_path)
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == []
    build(tmp_path)


def test_leftovers_of_a_killed_process_are_cleared(small_corpus, tmp_path):
    corpus = build(tmp_path)
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    folder.rename(folder.with_name(folder.name + ".building"))
    (folder.with_name(folder.name + ".building") / "rubbish").touch()
    assert build(tmp_path) == corpus
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == [folder.name]
    assert not (folder / "rubbish").exists()


@pytest.mark.parametrize("name", ["train.bin", "valid.idx", "tokenizer.json", "manifest.json"])
def test_damaged_folder_is_built_again_and_says_so(small_corpus, tmp_path, caplog, name):
    corpus = build(tmp_path)
    folder = next(path for path in tmp_path.iterdir() if path.is_dir())
    (folder / name).unlink()
    caplog.clear()  # of the first build, which is told at INFO where an earlier test has asked for it
    with caplog.at_level(logging.WARNING):
        assert build(tmp_path) == corpus
    assert caplog.messages == [f"embedded corpus: rebuilding it because {folder / name} is missing"]


def build_slowly(folder):
    build_now = embedded._build

    def slow_build(*args):
        with (folder / "builds").open("a") as file:
            file.write("building\n")
        time.sleep(1)
        build_now(*args)

    embedded._build, embedded.embedded_documents = slow_build, lambda: DOCUMENTS
    build(folder)


def test_two_processes_build_once(tmp_path):
    # Both wait for this lock, so both find the folder missing: the lock alone must keep them apart.
    with FileLock(tmp_path / f".{FOLDER}.lock"):
        processes = [start_process(build_slowly, tmp_path) for _ in range(2)]
        processes[0].join(timeout=2)
        assert processes[0].is_alive()
    for process in processes:
        process.join(timeout=60)
    assert [process.exitcode for process in processes] == [0, 0]
    assert (tmp_path / "builds").read_text() == "building\n"


def test_progress_without_a_terminal_is_one_line_a_step(small_corpus, tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        build(tmp_path)
    messages = [message for message in caplog.messages if message.startswith("embedded corpus: ")]
    steps = [message.split()[2] for message in messages[:4]]
    assert steps == ["reading", "training", "tokenizing", "tokenizing"]
    assert "tokens in" in messages[4] and not any("\n" in message for message in messages)


def test_data_dir_that_cannot_be_used(small_corpus, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    rule = r"^DATA_DIR=\S+/file/data: cannot write the embedded corpus \(.+\)\. Fix: set DATA_DIR"
    with pytest.raises(ValueError, match=rule):
        ensure_embedded_corpus(tmp_path / "file" / "data")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=199 * 10**6))
    rule = r"^DATA_DIR=\S+: has 199 MB free; the embedded corpus requires 200 MB\. Fix: free up space"
    with pytest.raises(ValueError, match=rule):
        ensure_embedded_corpus(tmp_path)


def test_vocabulary_too_small(small_corpus, tmp_path):
    with pytest.raises(ValueError, match=r"^VOCAB_SIZE=100: "):
        ensure_embedded_corpus(tmp_path, vocab_size=100)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []
