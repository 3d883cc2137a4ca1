"""Tokens to text while they come: whole characters, stop texts; and prompts to tokens."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_exp.config import Config
from moe_exp.data.tokens.tokenizer import load_tokenizer
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.inference.text import TextStream, decoder_of, encode, tokenizer_for

BYTES = load_tokenizer("ByteLevelTokenizer")
DECODE = decoder_of(BYTES)


def pieces(stream: TextStream, text: bytes) -> list[str]:
    """What each byte, and then the end, adds."""
    return [*(stream.push(byte) for byte in text), stream.finish()]


def test_a_character_appears_when_it_is_whole():
    assert pieces(TextStream(DECODE, list(b"abc")), "aé🙂".encode()) == ["a", "", "é", "", "", "", "🙂", ""]


def test_bytes_that_are_no_character_are_shown_in_the_end():
    assert pieces(TextStream(DECODE, []), b"a\xf0\x9f") == ["a", "", "", "\ufffd"]
    assert "".join(pieces(TextStream(DECODE, []), b"\xffab")) == "\ufffdab"


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stopped"),
    [
        (("ab",), b"xaab", ["x", "", "a", "", ""], True),
        (("aab", "ba"), b"aaab", ["", "", "a", "", ""], True),
        (("ab",), b"xa", ["x", "", "a"], False),
        (("b", "ab"), b"xab", ["x", "", "", ""], True),
    ],
)
def test_stop_texts(stops, text, shown, stopped):
    stream = TextStream(DECODE, [], stops)
    assert pieces(stream, text) == shown
    assert stream.stopped == stopped


@settings(max_examples=30, deadline=None)
@given(st.text(max_size=30), st.binary(max_size=8))
def test_the_pieces_are_the_text(prompt, noise):
    """Whatever the bytes are, and after whatever prompt."""
    stream = TextStream(DECODE, list(prompt.encode()))
    text = "né".encode() + noise + "z🙂".encode()
    assert "".join(pieces(stream, text)) == text.decode(errors="replace")


def test_a_trained_tokenizer(tmp_path):
    """Tokens that are parts of characters, and words whose space belongs to the token."""
    train_bpe(["Grüße an alle 世界 the end of the story"] * 4, 300).save(str(tmp_path / "tokenizer.json"))
    config = Config(preset="cpu", vocab_size=512, tokenizer=str(tmp_path), train_data="x")
    tokenizer = tokenizer_for(config, "")
    prompt, text = "the end", " of the wörld 世界🙂"
    stream = TextStream(decoder_of(tokenizer), encode(tokenizer, prompt))
    assert "".join([*map(stream.push, encode(tokenizer, text)), stream.finish()]) == text
    special = f"<|endoftext|>{prompt}"
    assert len(encode(tokenizer, special)) > 1 + len(encode(tokenizer, prompt))
    ids = encode(tokenizer_for(config, "", allow_special=True), special)
    assert ids == [tokenizer.eod_id, *encode(tokenizer, prompt)]


@pytest.mark.parametrize(
    ("settings", "name", "rule"),
    [
        ({"vocab_size": 200, "train_data": "x"}, ".", r"^TOKENIZER=.*: has \d+ .* VOCAB_SIZE=200"),
        (
            {"train_data": "x"},
            "",
            r"^TOKENIZER=: is unknown, because it was not set in training\. Fix: pass --tokenizer",
        ),
        ({"train_data": "x"}, "nowhere", r"^TOKENIZER=nowhere: does not exist\. Fix: pass --tokenizer"),
        ({"data_dir": "data"}, "", "embedded corpus's tokenizer was not found at"),
    ],
)
def test_tokenizers_that_cannot_be(settings, name, rule, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train_bpe(["abc " * 50], 300).save("tokenizer.json")
    with pytest.raises(ValueError, match=rule):
        tokenizer_for(Config(preset="cpu", **settings), name)
