"""Encoders from texts to token ids: the tokenizer's own package, or gigatoken if it gives the same ids.

gigatoken 0.10 and tokenizers 0.23 use different Unicode versions, so they split text differently at 359 of
about 260,000 code points (letters and digits added in Unicode 17). Whether such a difference changes the ids
depends on the tokenizer's merges, so testing a sample of texts is not enough. Instead, both packages encode
each non-ASCII character once with a vocabulary whose ids show where the text is split. If the two packages
split any character of a document differently, the tokenizer's own package encodes this document.
"""

import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from moe_exp.config import setting_error
from moe_exp.data.tokens.tokenizer import TextTokenizer

BACKENDS = ("auto", "gigatoken", "tokenizers")

Encoded = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]
# Maps texts to their concatenated ids and the number of ids of each text.
Encoder = Callable[[Sequence[str]], Encoded]

# Characters that tokenizers disagree on: controls, spaces, marks, letters with special case rules, digits of
# other scripts, emoji.
_ODD = (
    "\0\x01\x1c\x1f\x7f\x85\xa0\xad¼²ªßŉǅΐςİıſﬁ\u0300\u0301\u0345\u0661\u0966\u0bef\u1680\u180e\u2000\u2003\u2007"
    "\u200b\u200d\u2028\u2029"
    "\u202f\u2060\u2160\u24b6\u3000\u3007\ufe0f\ufeff\ufffd世界かな한글אבجि\U00010348\U0001d518🙂👩🏽🇩🇪"
)
_PLAIN = [
    "a", "B", "the", "def ", " return", "'s", "'LL", " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "1",
    "2026", "3.14", "(", '"', "#", "-", "_",
]  # fmt: skip
_NUM_PROBES = 300

# A character C between neighbors of each class. The probe vocabulary merges every neighbor with every byte of
# a non-ASCII character, so the ids show where the text was split.
_SPLIT_TEMPLATE, _SPLIT_NEIGHBOURS = "aCa1C1!C! C \nC\n", "a1! \n"


class CheckedGigatoken:
    """Encodes documents with gigatoken. If the tokenizer's own package (`own`) splits text differently
    around any character of a document, that package encodes the document. Raises ValueError if gigatoken
    cannot load the tokenizer.
    """

    def __init__(self, tokenizer: TextTokenizer):
        self._encode, self.own = _gigatoken(tokenizer), own_package(tokenizer)
        self._same: set[str] = set()
        self._other: set[str] = set()
        probe = _splitting_tokenizer(tokenizer)
        self._splitters = (_gigatoken(probe), own_package(probe)) if probe else None

    def __call__(self, texts: Sequence[str]) -> Encoded:
        """Encodes texts. `num_rerouted` counts the texts that the tokenizer's own package encoded."""
        rerouted = [index for index, text in enumerate(texts) if self._is_split_otherwise(text)]
        self.num_rerouted = len(rerouted)
        ids, lengths = self._encode(texts)
        if not rerouted:
            return ids, lengths
        pieces = np.split(ids, np.cumsum(lengths)[:-1])
        for index in rerouted:
            pieces[index] = self.own([texts[index]])[0].astype(ids.dtype)
            lengths[index] = len(pieces[index])
        return np.concatenate(pieces), lengths

    def _is_split_otherwise(self, text: str) -> bool:
        if self._splitters is None or text.isascii():
            return False
        # Each character is tried once per process.
        unknown = set(text) - self._same
        if tried := sorted(unknown - self._other):
            texts = [_SPLIT_TEMPLATE.replace("C", character) for character in tried]
            self._other.update(tried[index] for index in find_differences(*self._splitters, texts))
            self._same.update(set(tried) - self._other)
        return not unknown <= self._same


# For the tokenizers package, and for the thread pool that gigatoken creates at its first long text.
ONE_THREAD = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits tokenizers and gigatoken to one thread per process, because worker processes run in parallel."""
    before = {name: os.environ.get(name) for name in ONE_THREAD}
    os.environ.update(ONE_THREAD)
    try:
        yield
    finally:
        for name in ONE_THREAD:
            del os.environ[name]
        os.environ.update({name: value for name, value in before.items() if value is not None})


def choose_backend(
    tokenizer: TextTokenizer, requested: str, sample: Sequence[str]
) -> tuple[str, str, Encoder]:
    """Chooses the backend: `gigatoken` or `tokenizers`. The name `tokenizers` stands for the tokenizer's own
    package, even if that package has another name. Returns the backend, the reason for it, and the encoder.

    `auto` uses gigatoken if it is installed, can load the tokenizer, and returns the same ids as the
    tokenizer's own package. Raises ValueError if gigatoken was requested but cannot be used.
    """
    if requested == "tokenizers":
        return requested, "requested", own_package(tokenizer)
    if tokenizer.kind == "bytes":
        return "tokenizers", "the byte tokenizer requires no package", own_package(tokenizer)
    texts = [*probe_texts(tokenizer), *sample]
    try:
        gigatoken = CheckedGigatoken(tokenizer)
        if not (wrong := find_differences(gigatoken, gigatoken.own, texts)):
            reason = f"{len(texts)} texts have the same ids as with the tokenizer's own package"
            return "gigatoken", reason, gigatoken
        why = f"it encodes {texts[wrong[0]][:40]!r} differently than the tokenizer's own package"
    except ModuleNotFoundError as error:
        if error.name != "gigatoken":
            raise
        why = "it is not installed (pip install gigatoken)"
    except ValueError as error:
        why = str(error) or type(error).__name__
    if requested == "gigatoken":
        fix = "set --backend tokenizers"
        raise setting_error("backend", requested, f"gigatoken cannot be used: {why}", fix)
    return "tokenizers", f"not gigatoken: {why}", own_package(tokenizer)


def probe_texts(tokenizer: TextTokenizer) -> list[str]:
    """Short random texts made of strings that packages often encode differently, including special tokens."""
    pieces = [*_PLAIN, *_ODD]
    if tokenizer.kind == "huggingface":
        added = orjson.loads(tokenizer.content).get("added_tokens") or []
        pieces += [token["content"] for token in added[:64]]
    # Fixed seed: a resumed run must choose the same backend.
    choice = random.Random(0)
    return ["".join(choice.choices(pieces, k=choice.randrange(1, 30))) for _ in range(_NUM_PROBES)]


def find_differences(encoder: Encoder, reference: Encoder, texts: Sequence[str]) -> list[int]:
    """Positions of the texts that two encoders encode differently."""
    sides = encoder(texts), reference(texts)
    if all(map(np.array_equal, *sides)):
        return []
    # Compare text by text only if something differs.
    pairs = zip(*(np.split(ids, np.cumsum(lengths)[:-1]) for ids, lengths in sides), strict=True)
    return [index for index, (one, other) in enumerate(pairs) if not np.array_equal(one, other)]


def own_package(tokenizer: TextTokenizer) -> Encoder:
    """Encoder of the package that defines the tokenizer. Inside `one_thread`, the encoder uses one thread."""
    backend = tokenizer.processor()
    if tokenizer.kind == "huggingface":
        backend.encode_special_tokens = not tokenizer.allow_special

    def encode(texts: Sequence[str]) -> Encoded:
        if tokenizer.kind == "bytes":
            encoded = [text.encode() for text in texts]
            lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
            return np.frombuffer(b"".join(encoded), np.uint8), lengths
        ids: Sequence[Sequence[int]]
        if tokenizer.kind == "sentencepiece":
            ids = backend.encode(list(texts), out_type=int, num_threads=1)
        else:
            encodings = backend.encode_batch_fast(list(texts), add_special_tokens=False)
            ids = [encoding.ids for encoding in encodings]
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        return np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum())), lengths

    return encode


def _gigatoken(tokenizer: TextTokenizer) -> Encoder:
    import gigatoken

    try:
        if tokenizer.kind == "sentencepiece":
            backend = gigatoken.Tokenizer.from_sentencepiece(tokenizer.content)
        else:
            content = orjson.loads(tokenizer.content)
            if not tokenizer.allow_special:
                # gigatoken has no option to read special tokens as text, so remove them.
                tokens = content.get("added_tokens") or []
                content["added_tokens"] = [token for token in tokens if not token["special"]]
            backend = gigatoken.Tokenizer.from_json(orjson.dumps(content).decode())
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(f"it cannot load this tokenizer ({str(error).splitlines()[0]})") from error

    def encode(texts: Sequence[str]) -> Encoded:
        # Individually: as fast as encode_batch, and does not load the awkward package.
        ids = [backend.encode(text) for text in texts]
        return np.concatenate(ids), np.fromiter(map(len, ids), np.int64, len(ids))

    return encode


def _splitting_tokenizer(tokenizer: TextTokenizer) -> TextTokenizer | None:
    """Copy of a byte-level BPE tokenizer, with a vocabulary whose ids show the splits; None for others."""
    content = orjson.loads(tokenizer.content) if tokenizer.kind == "huggingface" else {}
    if b'"ByteLevel"' not in orjson.dumps(content.get("pre_tokenizer")) or content["model"]["type"] != "BPE":
        return None
    # ByteLevel's names of the 256 bytes: printable Latin-1 unchanged, the others from code point 256.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(256, 512))
    names = [chr(byte if byte in printable else next(others)) for byte in range(256)]
    vocab = {name: byte for byte, name in enumerate(names)}
    pairs = [(names[ord(one)], byte) for one in _SPLIT_NEIGHBOURS for byte in names[128:]]
    merges = [pair for first, second in pairs for pair in ((first, second), (second, first))]
    vocab |= {first + second: len(names) + index for index, (first, second) in enumerate(merges)}
    # Added tokens would be split off before the pre-tokenizer runs.
    content["added_tokens"] = []
    content["model"] |= {"vocab": vocab, "merges": merges, "unk_token": None, "ignore_merges": False}
    return replace(
        tokenizer, content=orjson.dumps(content), vocab_size=len(vocab), eod_id=None, eod_token=None
    )
