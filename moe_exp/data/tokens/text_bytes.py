"""Number of UTF-8 text bytes per token, which makes losses of different tokenizers comparable.

Tokens are not decoded: their byte counts come from a table (two counts per token). Counts are therefore exact
even if a text is cut within a character. If the tokenizer is lossless, the byte counts of a document's tokens
add up to the length of its text (otherwise, see `TokenBytes.note`). Special tokens and the unknown token
count as 0 bytes.
"""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from moe_exp.data.tokens.encoders import own_package
from moe_exp.data.tokens.tokenizer import TextTokenizer, pieces_of
from moe_exp.data.tokens.tokens import Int64Array

_NUM_BYTES = 256
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_WORD = re.compile(r"[a-z]+")
NOT_KEPT = "bits per byte: the tokenizer %s is lossy (%s), so only the preserved bytes are counted"

_BYTE_SPACE = "\u0120"  # ByteLevel's symbol for a space
_SPACE = "\u2581"  # Metaspace's and SentencePiece's symbol for a space
# Text that tokenizers may change, with examples that reveal it.
_CHANGES = {
    "accents and ligatures": "\ufb01 e\u0301 \u00b2",
    "repeated spaces and line ends": "a  b\n\nc ",
    "a space at the beginning of a document": " a",
}


class TokenBytes:
    """Bytes per token of one tokenizer.

    Attributes:
        inside_V: bytes of each token when it follows another token, int64 [V].
        first_V: bytes of each token at the start of a document (some decoders remove a space there).
        eod_id, bos_id: ids of the tokens that end and begin a document, or None.
        note: kinds of text that the tokenizer does not preserve; "" if it is lossless.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self.inside_V, self.first_V = np.zeros((2, tokenizer.vocab_size), dtype=np.int64)
        if tokenizer.kind == "bytes":
            self.inside_V[:_NUM_BYTES] = self.first_V[:_NUM_BYTES] = 1
        elif tokenizer.kind == "huggingface":
            self.inside_V, self.first_V = _of_huggingface(tokenizer)
        else:
            processor = tokenizer.processor()
            for token in range(tokenizer.vocab_size):
                if processor.is_control(token) or processor.is_unknown(token) or processor.is_unused(token):
                    continue
                is_byte = processor.is_byte(token)
                whole = "a" if is_byte else processor.id_to_piece(token).replace(_SPACE, " ")
                self.inside_V[token] = len(whole.encode())
                self.first_V[token] = 1 if is_byte else len(processor.decode([token]).encode())
        self.eod_id, self.bos_id = tokenizer.eod_id, tokenizer.bos_id
        for index in (self.eod_id, self.bos_id):
            if index is not None and index < tokenizer.vocab_size:
                self.inside_V[index] = self.first_V[index] = 0
        (self._space, unknown), self._first_space_bytes = _space_and_unknown(tokenizer), 1
        self.note = self._probe(tokenizer, unknown)

    def _probe(self, tokenizer: TextTokenizer, unknown: int | None) -> str:
        """Encodes example texts; returns the kinds of text that the tokenizer changes (see `note`)."""
        encode, lost = own_package(tokenizer), []
        if self._space is not None:
            # 0 if the tokenizer itself adds a space before every document.
            self._first_space_bytes = int(not np.array_equal(encode(["\x01"])[0][:3], self._space))
        for what, text in _CHANGES.items():
            ids, _ = encode([text])
            if unknown is not None and (ids == unknown).any():
                what = "characters without a token"
            elif self.each(ids, np.arange(len(ids)) == 0).sum() == len(text.encode()):
                continue
            lost.append(what)
        return ", ".join(dict.fromkeys(lost))

    def each(self, ids: npt.NDArray[np.integer[Any]], is_first: npt.NDArray[np.bool_]) -> Int64Array:
        """Byte counts of consecutive tokens [N]; `is_first` [N] is true where a document begins. Ids
        outside the vocabulary count as 0 bytes.
        """
        known = ids < len(self.inside_V)
        ids = np.where(known, ids, 0)
        found = np.where(is_first, self.first_V[ids], self.inside_V[ids]) * known
        if self._space is not None:
            last = max(0, len(ids) - 2)
            are_space = [ids[place : last + place] == token for place, token in enumerate(self._space)]
            begins = np.flatnonzero(np.logical_and.reduce(are_space))
            found[begins] = found[begins + 1] = 0
            found[begins + 2] = np.where(is_first[begins], self._first_space_bytes, 1)
        return found

    def count_samples(self, tokens: npt.NDArray[np.integer[Any]], *, eod_mask_loss: bool) -> tuple[int, int]:
        """Number of bytes and of labels in samples [B, S1] (S1 = S + 1). The first token of a sample is not a
        label. `eod_mask_loss` excludes the label after each EOD.
        """
        before, labels = tokens[:, :-1].ravel(), tokens[:, 1:].ravel()
        is_after_end = before == (-1 if self.eod_id is None else self.eod_id)
        is_first = is_after_end | (before == (-1 if self.bos_id is None else self.bos_id))
        found = self.each(labels, is_first)
        if eod_mask_loss:
            found = found[~is_after_end]
        return int(found.sum()), found.size


def _space_and_unknown(tokenizer: TextTokenizer) -> tuple[Int64Array | None, int | None]:
    """Ids of the byte tokens that encode the space symbol, and id of the unknown token; None if not used."""
    if tokenizer.kind == "bytes":
        return None, None
    if tokenizer.kind == "sentencepiece":
        processor = tokenizer.processor()
        pieces = {processor.id_to_piece(token): token for token in range(tokenizer.vocab_size)}
        unknown, exchanges_spaces = processor.unk_id(), True
    else:
        content = orjson.loads(tokenizer.content)
        pieces, model = pieces_of(content), content["model"]
        unknown = model.get("unk_id")
        if unknown is None:
            unknown = pieces.get(str(model.get("unk_token")))
        used = orjson.dumps([content.get("normalizer"), content.get("pre_tokenizer")]).decode()
        exchanges_spaces = _SPACE in used or '"Metaspace"' in used
    tokens = [pieces.get(f"<0x{byte:02X}>") for byte in _SPACE.encode()]
    if _SPACE in pieces or None in tokens or not exchanges_spaces:
        return None, unknown
    return np.array(tokens, dtype=np.int64), unknown


def _of_huggingface(tokenizer: TextTokenizer) -> tuple[Int64Array, Int64Array]:
    content = orjson.loads(tokenizer.content)
    pieces, decoder = pieces_of(content), content.get("decoder") or {}
    decoders = {decoder.get("type"), *(part["type"] for part in decoder.get("decoders") or [])}
    if "ByteLevel" in decoders:
        # each character of a piece stands for a byte, but added tokens are plain text
        inside = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        for piece, token in pieces.items():
            inside[token] = len(piece)
        for added in content.get("added_tokens") or []:
            inside[added["id"]] = len(added["content"].encode())
        first = inside.copy()
        pre_tokenizer = content.get("pre_tokenizer") or {}
        parts = pre_tokenizer.get("pretokenizers") or [pre_tokenizer]
        # add_prefix_space: a leading space may not be in the text.
        if any(part.get("type") == "ByteLevel" and part.get("add_prefix_space") for part in parts):
            first[[token for piece, token in pieces.items() if piece.startswith(_BYTE_SPACE)]] -= 1
    else:
        inside, first = _of_decoded(tokenizer, pieces)
    if "ByteFallback" in decoders:
        for piece, token in pieces.items():
            if _BYTE_PIECE.fullmatch(piece):
                inside[token] = first[token] = 1
    unknown = content["model"].get("unk_token")
    for token in content.get("added_tokens") or []:
        if token["special"] or token["content"] == unknown:
            inside[token["id"]] = first[token["id"]] = 0
    return inside, first


def _of_decoded(tokenizer: TextTokenizer, pieces: dict[str, int]) -> tuple[Int64Array, Int64Array]:
    """Bytes that each token adds between two words, and before the first word of a text."""
    backend, ids = tokenizer.processor(), range(tokenizer.vocab_size)
    word = next((token for piece, token in pieces.items() if _WORD.fullmatch(piece)), 0)

    def lengths(texts: list[str]) -> Int64Array:
        return np.array([len(text.encode()) for text in texts], dtype=np.int64)

    alone, two = lengths(backend.decode_batch([[word], [word, word]], skip_special_tokens=False))
    # Decoded between words, because decoders change the start of a text.
    between = [[word, token, word] for token in ids]
    inside = lengths(backend.decode_batch(between, skip_special_tokens=False)) - two
    first = lengths(backend.decode_batch([one[1:] for one in between], skip_special_tokens=False))
    return np.maximum(inside, 0), np.maximum(first - (two - alone), 0)
