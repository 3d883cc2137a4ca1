"""Tokenizers: training, vocabulary size, which token ends a document, and what the files of a tokenizer may not do to a text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_exp.data.tokenizer import tokenizer_vocab_size
from moe_exp.data.tokenizer_training import EOD_TOKEN, train_bpe

TEXTS = ["def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i)\n", "Grüße, 世界! 🙂"] * 20


@pytest.fixture(scope="module")
def tokenizer():
    return train_bpe(TEXTS, 300)


def test_end_of_document_is_id_0(tokenizer):
    assert tokenizer.token_to_id(EOD_TOKEN) == 0
    assert tokenizer.get_vocab_size() == 300


def test_training_is_deterministic(tokenizer):
    assert train_bpe(iter(TEXTS), 300).to_str() == tokenizer.to_str()


def test_round_trip_of_any_unicode_text(tokenizer):
    @settings(max_examples=100, deadline=None)
    @given(st.text(alphabet=st.characters(exclude_categories=["Cs"])))
    def check(text):
        assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text

    check()


def test_no_room_for_the_bytes():
    with pytest.raises(ValueError, match=r"^VOCAB_SIZE=256: a byte-level BPE has at least 257 tokens\. Fix: set 257 or more\.$"):
        train_bpe(TEXTS, 256)
    assert train_bpe(TEXTS, 257).get_vocab_size() == 257


def test_vocab_size_of_file_and_folder(tokenizer, tmp_path):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert tokenizer_vocab_size(tmp_path) == tokenizer_vocab_size(tmp_path / "tokenizer.json") == 300
    tokenizer = type(tokenizer).from_str(tokenizer.to_str())
    tokenizer.add_tokens(["<extra_0>", "<extra_1>"])
    tokenizer.save(str(tmp_path / "extended.json"))
    assert tokenizer_vocab_size(tmp_path / "extended.json") == 302


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


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"model": {}}', '{"model": {"vocab": null}}', '{"model": {"vocab": 3}}'])
def test_no_tokenizer(content, tmp_path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"^TOKENIZER=\S+: is not a Hugging Face tokenizer\.json or a folder that has one .*\. Fix: "):
        tokenizer_vocab_size(tmp_path)
