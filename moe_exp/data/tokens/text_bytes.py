"""How many bytes of UTF-8 text tokens stand for, so that losses of different tokenizers compare.

By a table with two numbers per token, so that text that a window cuts in the middle of a character is counted
exactly, and nothing has to be decoded. The numbers add up to the length of the text that the tokenizer
decodes a document to: if it normalizes (lower case, spaces in a row) that of the normalized text. Special
tokens, the end of a document among them, and the unknown token stand for no text.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from moe_exp.data.tokens.tokenizer import TextTokenizer, pieces_of

Int64Array = npt.NDArray[np.int64]

_NUM_BYTES = 256
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WORD = re.compile(r"[a-z]+")


class TokenBytes:
    """Bytes per token of one tokenizer.

    Args:
        tokenizer: that made the tokens.

    Attributes:
        inside_V: bytes of every token after another one, int64 [V].
        first_V: bytes of every token as the first of a document, where some decoders take a space away.
        eod_id, bos_id: of the tokens that end and begin a document, or None.
    """

    def __init__(self, tokenizer: TextTokenizer):
        make = {"bytes": _of_bytes, "sentencepiece": _of_sentencepiece, "huggingface": _of_huggingface}[
            tokenizer.kind
        ]
        self.inside_V, self.first_V = make(tokenizer)
        self.eod_id, self.bos_id = tokenizer.eod_id, tokenizer.bos_id
        for index in (self.eod_id, self.bos_id):
            if index is not None:
                self.inside_V[index] = self.first_V[index] = 0

    def count(self, ids: npt.NDArray[np.integer[Any]], is_first: npt.NDArray[np.bool_]) -> int:
        """Bytes of tokens that follow one another.

        Args:
            ids: of any shape; ids that the tokenizer does not have stand for nothing.
            is_first: of the same shape, whether a token is the first of its document.
        """
        known = ids < len(self.inside_V)
        ids = np.where(known, ids, 0)
        return int((np.where(is_first, self.first_V[ids], self.inside_V[ids]) * known).sum())

    def count_samples(
        self, tokens: npt.NDArray[np.integer[Any]], *, eod_mask_loss: bool = False
    ) -> tuple[int, int]:
        """Bytes and number of the labels of samples [B, S1]: of all but the first token, with documents by
        EOD; with `eod_mask_loss` without those after an EOD.
        """
        before, labels = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
        is_after_end = before == (-1 if self.eod_id is None else self.eod_id)
        is_first = is_after_end | (before == (-1 if self.bos_id is None else self.bos_id))
        if eod_mask_loss:
            labels, is_first = labels[~is_after_end], is_first[~is_after_end]
        return self.count(labels, is_first), labels.size


def _of_bytes(tokenizer: TextTokenizer) -> tuple[Int64Array, Int64Array]:
    lengths = (np.arange(tokenizer.vocab_size) < _NUM_BYTES).astype(np.int64)
    return lengths, lengths.copy()


def _of_sentencepiece(tokenizer: TextTokenizer) -> tuple[Int64Array, Int64Array]:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    inside, first = np.zeros((2, tokenizer.vocab_size), dtype=np.int64)
    for token in range(tokenizer.vocab_size):
        if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
            continue
        if processor.is_byte(token):
            inside[token] = first[token] = 1
            continue
        inside[token] = len(processor.id_to_piece(token).replace("\u2581", " ").encode())
        first[token] = len(processor.decode([token]).encode())
    return inside, first


def _of_huggingface(tokenizer: TextTokenizer) -> tuple[Int64Array, Int64Array]:
    content = orjson.loads(tokenizer.content)
    pieces = pieces_of(content)
    if "ByteLevel" in _decoders(content):
        inside, first = _of_byte_level(content, pieces, tokenizer.vocab_size)
    else:
        inside, first = _of_decoded(tokenizer, pieces)
    if "ByteFallback" in _decoders(content):
        for piece, token in pieces.items():
            if _BYTE_PIECE.fullmatch(piece):
                inside[token] = first[token] = 1
    unknown = content["model"].get("unk_token")
    for token in content.get("added_tokens") or []:
        if token["special"] or token["content"] == unknown:
            inside[token["id"]] = first[token["id"]] = 0
    return inside, first


def _decoders(content: dict[str, Any]) -> set[str]:
    decoder = content.get("decoder") or {}
    return {decoder.get("type", ""), *(part["type"] for part in decoder.get("decoders") or [])}


def _of_byte_level(
    content: dict[str, Any], pieces: dict[str, int], vocab_size: int
) -> tuple[Int64Array, Int64Array]:
    """Every character of a piece is a byte; that of an added token is itself."""
    lengths = np.zeros(vocab_size, dtype=np.int64)
    for piece, token in pieces.items():
        lengths[token] = len(piece)
    for added in content.get("added_tokens") or []:
        lengths[added["id"]] = len(added["content"].encode())
    return lengths, lengths.copy()


def _of_decoded(tokenizer: TextTokenizer, pieces: dict[str, int]) -> tuple[Int64Array, Int64Array]:
    """Bytes that a token adds after a word, and those of the token alone, as decoders differ there."""
    from tokenizers import Tokenizer

    backend, ids = Tokenizer.from_str(tokenizer.content.decode()), range(tokenizer.vocab_size)
    word = next((token for piece, token in pieces.items() if _WORD.fullmatch(piece)), 0)

    def lengths(texts: list[str]) -> Int64Array:
        return np.array([len(text.encode()) for text in texts], dtype=np.int64)

    alone = lengths(backend.decode_batch([[token] for token in ids], skip_special_tokens=False))
    after = lengths(backend.decode_batch([[word, token] for token in ids], skip_special_tokens=False))
    return np.maximum(after - alone[word], 0), alone
