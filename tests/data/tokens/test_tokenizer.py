"""Tokenizers: training, vocabulary size, which token ends a document, and what no file may do to a text."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers import ROOT
from helpers.servers.hub import HubServer
from moe_exp.commands.data import main
from moe_exp.data.tokens.encoders import (
    CheckedGigatoken,
    choose_backend,
    find_differences,
    own_package,
    probe_texts,
)
from moe_exp.data.tokens.tokenizer import load_tokenizer, tokenizer_vocab_size
from moe_exp.data.tokens.tokenizer_training import EOD_TOKEN, train_bpe, train_tokenizer

TEXTS = ["def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i)\n", "Grüße, 世界! 🙂"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 300)


def test_training(tokenizer, tmp_path):
    assert tokenizer.token_to_id(EOD_TOKEN) == 0
    assert train_bpe(iter(TEXTS), 300).to_str() == tokenizer.to_str()
    with pytest.raises(ValueError, match=r"^VOCAB_SIZE=256: must be at least 257"):
        train_bpe(TEXTS, 256)
    assert train_bpe(TEXTS, 257).get_vocab_size() == 257
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_vocab_size(tmp_path) == tokenizer_vocab_size(tmp_path / "tokenizer.json") == 300


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_round_trip_of_any_unicode_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize(
    ("content", "size"),
    [
        ({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": []}, 8),
        ({"model": {"vocab": {"a": 0, "b": 7}}, "added_tokens": [{"id": 99}]}, 100),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": None}, 1),
        ({"model": {"vocab": [["a", -1.0], ["b", -2.0], ["c", -3.0]]}}, 3),
    ],
)
def test_vocab_size_is_highest_id_plus_one(content, size, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert tokenizer_vocab_size(tmp_path) == size


@pytest.mark.parametrize(
    "content",
    [None, "not json", "[]", '{"model": {}}', '{"model": {"vocab": null}}', '{"model": {"vocab": 3}}'],
)
def test_no_tokenizer(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"^TOKENIZER=\S+: is not a Hugging Face tokenizer\.json .* Fix: "):
        tokenizer_vocab_size(tmp_path)


def ids_of(tokenizer, text, backend="tokenizers"):
    encode = (own_package if backend == "tokenizers" else CheckedGigatoken)(tokenizer)
    return [int(token) for token in encode([text])[0]]


def save(tokenizer, folder, **files):
    tokenizer.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def with_names():
    return train_bpe(TEXTS, 300, special_tokens=("<|endoftext|>", "<|end|>", "</s>"))


@pytest.mark.parametrize(
    ("files", "eod_token", "eod_id"),
    [
        ({}, None, 0),  # the first of the usual names
        ({"tokenizer_config": {"eos_token": "</s>"}}, None, 2),
        ({"tokenizer_config": {"eos_token": {"content": "<|end|>"}}, "config": {"eos_token_id": 2}}, None, 1),
        ({"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": "<|end|>"}}, None, 1),
        ({"tokenizer_config": {}, "generation_config": {"eos_token_id": [2, 1]}}, None, 2),
        ({"config": {"eos_token_id": 1}}, None, 1),
        ({"tokenizer_config": {"eos_token": "</s>"}}, "<|end|>", 1),
    ],
)
def test_which_token_ends_a_document(files, eod_token, eod_id, with_names, tmp_path):
    folder = save(with_names, tmp_path, **files)
    assert load_tokenizer("HuggingFaceTokenizer", model=folder, eod_token=eod_token).eod_id == eod_id
    with pytest.raises(ValueError, match=r"^EOD_TOKEN=<none>: not found in the tokenizer \S+\. Fix: "):
        load_tokenizer("HuggingFaceTokenizer", model=folder, eod_token="<none>")


def test_an_end_token_that_is_not_marked_special_is_text_too_and_dropout_is_off(with_names, tmp_path, caplog):
    content = json.loads(with_names.to_str())
    content["added_tokens"][0]["special"] = False
    content["model"]["dropout"] = 0.5
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = load_tokenizer("HuggingFaceTokenizer", model=tmp_path)
    for backend in ("gigatoken", "tokenizers"):
        assert 0 not in ids_of(tokenizer, "a <|endoftext|> b", backend)
    assert "ignoring BPE dropout 0.5" in caplog.text
    assert len({tuple(ids_of(tokenizer, TEXTS[0])) for _ in range(10)}) == 1


def test_gpt2_files(tmp_path):
    trained = train_bpe(TEXTS, 300)
    vocab_file, merge_file = trained.model.save(str(tmp_path))
    tokenizer = load_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=merge_file)
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (300, 0)
    for backend in ("gigatoken", "tokenizers"):
        assert ids_of(tokenizer, TEXTS[2], backend) == trained.encode(TEXTS[2]).ids
    (tmp_path / "broken.txt").write_text("a b c d\n")
    with pytest.raises(ValueError, match="is not a GPT-2 vocabulary"):
        load_tokenizer("GPT2BPETokenizer", vocab_file=vocab_file, merge_file=tmp_path / "broken.txt")


@pytest.fixture(scope="module")
def spm(tmp_path_factory):
    """A Llama-2-like SentencePiece model: BPE with byte fallback."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS), model_writer=model, vocab_size=320, model_type="bpe",
        byte_fallback=True, minloglevel=2, normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("spm") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return path


@pytest.mark.parametrize("kind", ["SentencePieceTokenizer", "Llama2Tokenizer"])
def test_sentencepiece(kind, spm):
    tokenizer = load_tokenizer(kind, model=spm)
    processor = sentencepiece.SentencePieceProcessor(model_file=str(spm))
    assert (tokenizer.eod_id, tokenizer.eod_token) == (processor.eos_id(), "</s>")
    assert tokenizer.vocab_size == processor.get_piece_size()
    text = "quotes </s> and 世界\n  x"
    assert ids_of(tokenizer, text) == processor.encode(text)
    assert tokenizer.eod_id not in ids_of(tokenizer, text)
    assert load_tokenizer(kind, model=spm, eod_token="<s>").eod_id == processor.bos_id()
    with pytest.raises(ValueError, match="not found in the tokenizer"):
        load_tokenizer(kind, model=spm, eod_token="<none>")
    with pytest.raises(ValueError, match="does not support control symbols"):
        load_tokenizer(kind, model=spm, allow_special=True)


def test_gigatoken_gives_what_sentencepiece_gives_or_is_not_taken(spm):
    tokenizer = load_tokenizer("SentencePieceTokenizer", model=spm)
    if choose_backend(tokenizer, "auto", TEXTS)[0] == "gigatoken":
        texts = [*probe_texts(tokenizer), *TEXTS]
        assert not find_differences(CheckedGigatoken(tokenizer), own_package(tokenizer), texts)


def test_bytes():
    tokenizer = load_tokenizer("ByteLevelTokenizer")
    assert (tokenizer.vocab_size, tokenizer.eod_id) == (257, 256)
    assert ids_of(tokenizer, "aß\0") == [97, 195, 159, 0]


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("BertWordPieceCase", {}, "TOKENIZER_TYPE=BertWordPieceCase: must be one of HuggingFaceTokenizer"),
        ("HuggingFaceTokenizer", {}, "TOKENIZER_MODEL=: is required by HuggingFaceTokenizer"),
        ("HuggingFaceTokenizer", {"model": "./missing/folder/here"}, "file or folder not found"),
        ("GPT2BPETokenizer", {}, "VOCAB_FILE=: must be an existing file"),
        ("SentencePieceTokenizer", {"model": __file__}, "is not a SentencePiece model"),
        ("HuggingFaceTokenizer", {"model": __file__}, "is not a Hugging Face tokenizer.json"),
        ("HuggingFaceTokenizer", {"model": str(Path(__file__).parent)}, "has no tokenizer.json"),
        ("ByteLevelTokenizer", {"eod_token": "x"}, "EOD_TOKEN=x: the byte-level tokenizer has"),
    ],
)
def test_what_is_no_tokenizer(kind, given, message):
    with pytest.raises(ValueError, match=f"(?s)^[^\n]*{message}[^\n]*Fix: [^\n]*$"):
        load_tokenizer(kind, **given)


def test_a_name_on_the_hub(with_names, tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    save(with_names, folder, tokenizer_config={"eos_token": "</s>"})
    (folder / "model.safetensors").write_bytes(b"weights")
    code = """
import sys
from moe_exp.data.tokens.tokenizer import load_tokenizer
for name in sys.argv[1:]:
    try:
        print(load_tokenizer("HuggingFaceTokenizer", model=name).eod_id)
    except ValueError as error:
        print(error)
"""
    with HubServer(folder, repository="org/name") as server:
        environment = {**os.environ, "HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path)}
        options = {"env": environment, "capture_output": True, "text": True, "timeout": 120}
        command = [sys.executable, "-c", code, "org/name", "org/none"]
        done = subprocess.run(command, cwd=ROOT, **options)
        assert not server.downloads("safetensors")
    loaded, missing = done.stdout.splitlines()
    assert loaded == "2" and missing.startswith("TOKENIZER_MODEL=org/none: not found here"), done.stderr


def test_a_trained_folder_is_loaded_by_transformers(tmp_path, capsys):
    from transformers import AutoTokenizer

    source = tmp_path / "x.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    out = tmp_path / "tokenizer"
    flags = ["--vocab-size", "300", "--out", str(out), "--bos-token", "<|bos|>", "--pad-token", "<|pad|>"]
    assert main("train-tokenizer", [str(source), *flags]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {out}"
    theirs = AutoTokenizer.from_pretrained(str(out))
    assert (theirs.eos_token, theirs.bos_token, theirs.pad_token) == (EOD_TOKEN, "<|bos|>", "<|pad|>")
    assert (theirs.eos_token_id, theirs.bos_token_id, theirs.pad_token_id, len(theirs)) == (0, 1, 2, 300)
    ours = load_tokenizer("HuggingFaceTokenizer", model=out)
    assert (ours.eod_id, ours.vocab_size) == (0, 300)
    assert theirs(TEXTS[2], add_special_tokens=False).input_ids == ids_of(ours, TEXTS[2])
    assert theirs.decode(ids_of(ours, TEXTS[2])) == TEXTS[2]
    assert main("train-tokenizer", [str(source), *flags[:-2]]) == 1
    assert "was made with special_tokens=" in capsys.readouterr().err


def test_training_reads_the_same_share_of_every_file(tmp_path):
    paths = [tmp_path / f"{index}.jsonl" for index in range(3)]
    for index, path in enumerate(paths):
        lines = [json.dumps({"text": text}) for text in (f"{index}" * 100, "abc" * 1000)]
        path.write_text("\n".join(lines) + "\n" * 100)
    manifest = train_tokenizer(paths, tmp_path / "out", vocab_size=280, max_bytes=300)
    assert (manifest["num_documents"], manifest["num_text_bytes"]) == (3, 300)


def test_training_that_cannot_be(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_text("\n")
    for size, pad_token, rule in (
        (300, EOD_TOKEN, "EOS, BOS and padding must be different tokens"),
        (10, None, "VOCAB_SIZE=10: must be at least 257"),
        (300, None, "the inputs have no documents"),
    ):
        with pytest.raises(ValueError, match=rule):
            train_tokenizer([path], tmp_path / f"out{size}", vocab_size=size, pad_token=pad_token)
        assert not (tmp_path / f"out{size}").exists()
