"""Bytes per token: their sum is the length of a text, whatever the tokenizer, and wherever it is cut."""

from pathlib import Path

import numpy as np
import orjson
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from moe_exp.data.tokens.encoders import own_package
from moe_exp.data.tokens.text_bytes import TokenBytes
from moe_exp.data.tokens.tokenizer import TextTokenizer, load_tokenizer
from moe_exp.data.tokens.tokenizer_training import train_bpe

TEXTS = [
    "The end of the story, and its beginning.", "Grüße an alle 世界", "def main(x):\n    return x\n",
    "né 🙂🙂 z", "a  b   c",
]  # fmt: skip


def metaspace(model: str) -> Tokenizer:
    """As in tokenizer.json of Llama and Mistral (BPE with bytes for what is unknown) or T5 (Unigram)."""
    if model == "unigram":
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
        how = {"unk_token": "<unk>", "special_tokens": ["<unk>", "</s>"], "show_progress": False}
        trainer = trainers.UnigramTrainer(vocab_size=150, **how)
        tokenizer.train_from_iterator(TEXTS * 20, trainer)
        return tokenizer
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False)
    tokenizer.train_from_iterator(["The end of the story, and its beginning. an return main"] * 20, trainer)
    content = orjson.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]  # the bytes are tokens like others
    return Tokenizer.from_str(orjson.dumps(content).decode())


def built(kind: str) -> Tokenizer:
    """Tokenizers that add a space before a text, or have no piece for a space or a letter by itself."""
    if kind in ("prefix_space", "prefix_space_nfc"):
        tokenizer = train_bpe(TEXTS * 3, 300)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.normalizer = normalizers.NFKC() if kind == "prefix_space_nfc" else None
        return tokenizer
    if kind == "wordpiece":
        words = ["the", "end", "of", "story", "and", "its", "beginning", ",", ".", "n", "##o", "s", "##t"]
        vocab = {word: number for number, word in enumerate(["[UNK]", "</s>", *words])}
        tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
        return tokenizer
    if kind == "end_of_word":
        tokenizer = Tokenizer(models.BPE(unk_token="<unk>", end_of_word_suffix="</w>"))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.WhitespaceSplit(), decoders.BPEDecoder()
        special = ["<unk>", "</s>"]
        trainer = trainers.BpeTrainer(special_tokens=special, end_of_word_suffix="</w>", show_progress=False)
        tokenizer.train_from_iterator(TEXTS[:1] * 20, trainer)
        return tokenizer
    content = orjson.loads(metaspace("bpe").to_str())
    model = content["model"]
    # ids stay free; spaces become the three bytes of ▁
    model["vocab"] = {piece: token for piece, token in model["vocab"].items() if piece[:1] != "▁"}
    model["merges"] = [pair for pair in model["merges"] if "▁" not in "".join(pair)]
    return Tokenizer.from_str(orjson.dumps(content).decode())


def trained(kind: str, folder: Path) -> TextTokenizer:
    path = folder / "tokenizer.json"
    if kind == "bytes":
        return load_tokenizer("ByteLevelTokenizer")
    if kind == "sentencepiece":
        sentencepiece = pytest.importorskip("sentencepiece")
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter([*TEXTS[:1] * 30, "an main return x"]), model_prefix=str(folder / "m"),
            vocab_size=310, byte_fallback=True, character_coverage=0.98, hard_vocab_limit=False,
            minloglevel=2, remove_extra_whitespaces=False, normalization_rule_name="identity",
        )  # fmt: skip
        return load_tokenizer("SentencePieceTokenizer", model=folder / "m.model")
    if kind == "byte_level":
        tokenizer = train_bpe(TEXTS * 3, 300)
    else:
        tokenizer = metaspace(kind) if kind in ("bpe", "unigram") else built(kind)
    tokenizer.save(str(path))
    return load_tokenizer("HuggingFaceTokenizer", model=path)


@pytest.mark.parametrize(
    "kind", ["bytes", "byte_level", "prefix_space", "bpe", "no_space", "unigram", "sentencepiece"]
)
def test_a_document_has_the_bytes_of_its_text(kind, tmp_path):
    tokenizer = trained(kind, tmp_path)
    table, encode = TokenBytes(tokenizer), own_package(tokenizer)
    # whose pre-tokenizer keeps every space, and decoder not
    texts = [text for text in TEXTS if kind != "unigram" or "  " not in text]
    documents = []
    for text in texts:
        ids = np.asarray(encode([text])[0], dtype=np.int64)
        assert table.each(ids, np.arange(len(ids)) == 0).sum() == len(text.encode()), text
        documents.append(np.append(ids, tokenizer.eod_id))
    tokens = np.concatenate([[tokenizer.eod_id], *documents])
    whole, num_tokens = table.count_samples(tokens[None], eod_mask_loss=False)
    assert num_tokens == len(tokens) - 1
    assert whole == sum(len(text.encode()) for text in texts)
    # Cut anywhere, in the middle of characters too: every token but the first of all is counted once. Three
    # tokens that are one space are counted as such if they are in one part.
    for size in () if kind == "no_space" else (1, 2, 7):
        parts = [tokens[begin : begin + size + 1] for begin in range(0, len(tokens) - 1, size)]
        assert sum(table.count_samples(part[None], eod_mask_loss=False)[0] for part in parts) == whole
    left, num_left = table.count_samples(tokens[None], eod_mask_loss=True)
    firsts = [] if kind == "no_space" else [int(document[:1][0]) for document in documents]
    assert num_left == num_tokens - len(documents)
    is_first = np.ones(1, dtype=bool)
    assert left == whole - sum(table.each(np.array([token]), is_first).sum() for token in firsts)


def test_a_text_of_nothing_but_single_spaces_and_letters(tmp_path):
    """Without a piece for a space every second byte is three tokens."""
    tokenizer = trained("no_space", tmp_path)
    text = " ".join("abcdefgh" * 20)
    ids = np.asarray(own_package(tokenizer)([text])[0], dtype=np.int64)
    assert len(ids) > 2 * len(text)
    assert TokenBytes(tokenizer).each(ids, np.arange(len(ids)) == 0).sum() == len(text)


@pytest.mark.parametrize(
    ("kind", "kept", "changed"),
    [
        ("byte_level", ["ﬁ e\u0301 ²", "a  b\n\nc\t", " a"], []),
        ("bytes", ["ﬁ e\u0301 ²", "a  b\n\nc\t", " a"], []),
        ("bpe", ["ﬁ e\u0301 ²", "a  b\n\nc\t", " a"], []),
        ("no_space", ["ﬁ e\u0301 ²", "a  b\n\nc\t", " a"], []),
        ("prefix_space", ["ﬁ e\u0301 ²", "a  b\n\nc\t"], ["a space at the beginning"]),
        ("prefix_space_nfc", ["a  b\n\nc\t"], ["accents and ligatures", "a space at the beginning"]),
        ("unigram", ["a b", "of the end"], ["characters without a token"]),
        ("wordpiece", ["the end of the story, and its beginning."], ["characters without a token"]),
        ("end_of_word", [], ["characters without a token"]),
    ],
)
def test_what_a_tokenizer_does_not_keep_is_said(kind, kept, changed, tmp_path):
    tokenizer = trained(kind, tmp_path)
    table, encode = TokenBytes(tokenizer), own_package(tokenizer)
    for text in kept:
        ids = np.asarray(encode([text])[0], dtype=np.int64)
        assert table.each(ids, np.arange(len(ids)) == 0).sum() == len(text.encode()), text
    assert [what for what in changed if what not in table.note] == []
    assert bool(table.note) == bool(changed)


def test_what_stands_for_no_text(tmp_path):
    """Special tokens, the end of a document, and ids beyond the tokenizer's; another added token is text."""
    tokenizer = train_bpe(["abc abc"], 270)
    tokenizer.add_special_tokens(["<mask>"])
    tokenizer.add_tokens(["wörd"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    loaded = load_tokenizer("HuggingFaceTokenizer", model=tmp_path / "tokenizer.json")
    table = TokenBytes(loaded)
    ids = np.array([tokenizer.token_to_id("<mask>"), loaded.eod_id, loaded.vocab_size, 70000], dtype=np.int64)
    assert (
        table.each(ids, np.zeros(4, dtype=bool)).sum() == table.each(ids, np.ones(4, dtype=bool)).sum() == 0
    )
    word = np.array([tokenizer.token_to_id("wörd")])
    assert table.each(word, np.zeros(1, dtype=bool)).sum() == len("wörd".encode())
