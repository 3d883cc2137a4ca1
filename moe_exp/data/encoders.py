"""Texts to token ids: by the package that defines the tokenizer, or by gigatoken, which is checked against it."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_exp.config import problem
from moe_exp.data.tokenizer import TextTokenizer

BACKENDS = ("auto", "gigatoken", "tokenizers")

Encoded = tuple[npt.NDArray[np.integer[Any]], npt.NDArray[np.int64]]
# Takes texts; returns the ids of all of them, one after the other, and how many each has.
Encoder = Callable[[Sequence[str]], Encoded]

# Characters that tokenizers disagree on: controls, kinds of space, marks, letters with case rules, digits of other scripts, emoji.
_ODD = (
    "\0\x01\x1c\x1f\x7f\x85\xa0\xad¼²ªßŉǅΐςİıſﬁ\u0300\u0301\u0345\u0661\u0966\u0bef\u1680\u180e\u2000\u2003\u2007\u200b\u200d\u2028\u2029"
    "\u202f\u2060\u2160\u24b6\u3000\u3007\ufe0f\ufeff\ufffd世界かな한글אבجि\U00010348\U0001d518🙂👩🏽🇩🇪"
)
_PLAIN = [
    "a",
    "B",
    "the",
    "def ",
    " return",
    "'s",
    "'LL",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    "\r\n",
    "\t",
    "1",
    "2026",
    "3.14",
    "(",
    '"',
    "#",
    "-",
    "_",
]
_NUM_PROBES = 300


@dataclass(frozen=True)
class Probe:
    """What was found out before the work starts.

    Args:
        backend: gigatoken or tokenizers; the latter stands for the package that defines the tokenizer, whichever that is.
        reason: why.
        tokens_per_byte: of the sample's text in UTF-8, without end-of-document tokens.
        bytes_per_second: of one worker on the sample, tables cold.
    """

    backend: str
    reason: str
    tokens_per_byte: float
    bytes_per_second: float


def make_encoder(tokenizer: TextTokenizer, backend: str) -> Encoder:
    """The encoder of a backend. Works in the calling thread (see `one_thread`).

    Raises:
        ValueError: gigatoken cannot load the tokenizer.
        ModuleNotFoundError: gigatoken or sentencepiece is not installed.
    """
    if backend == "gigatoken":
        return _gigatoken(tokenizer)
    return {"huggingface": _huggingface, "sentencepiece": _sentencepiece, "bytes": _bytes}[tokenizer.kind](tokenizer)


@contextmanager
def one_thread() -> Iterator[None]:
    """The `tokenizers` package keeps to the calling thread: workers are processes."""
    before = os.environ.get("TOKENIZERS_PARALLELISM")
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ["TOKENIZERS_PARALLELISM"]
        else:
            os.environ["TOKENIZERS_PARALLELISM"] = before


def probe_backend(tokenizer: TextTokenizer, requested: str, sample: Sequence[str]) -> Probe:
    """Chooses the backend, by whether gigatoken gives the same ids as the tokenizer's own package, and measures it on the sample.

    Args:
        tokenizer: the tokenizer.
        requested: one of BACKENDS; `auto` is gigatoken where it is installed, loads the tokenizer and gives the same.
        sample: texts of the corpus.

    Raises:
        ValueError: gigatoken was asked for and cannot be used.
    """
    backend, reason = _choose(tokenizer, requested, [*probe_texts(tokenizer), *sample])
    started = time.process_time()
    num_tokens = len(make_encoder(tokenizer, backend)(sample)[0]) if sample else 0
    seconds = time.process_time() - started
    num_bytes = sum(len(text.encode()) for text in sample)
    return Probe(backend, reason, num_tokens / max(1, num_bytes), num_bytes / max(seconds, 1e-3))


def _choose(tokenizer: TextTokenizer, requested: str, texts: Sequence[str]) -> tuple[str, str]:
    if requested == "tokenizers":
        return "tokenizers", "as asked for"
    if tokenizer.kind == "bytes":
        return "tokenizers", "bytes need no package"
    try:
        encoder = make_encoder(tokenizer, "gigatoken")
        difference = find_difference(encoder, make_encoder(tokenizer, "tokenizers"), texts)
        why = None if difference is None else f"it encodes {texts[difference][:40]!r} otherwise than the tokenizer's own package"
    except ModuleNotFoundError as error:
        if error.name != "gigatoken":
            raise
        why = "it is not installed (pip install 'moe-exp[fast]')"
    except ValueError as error:
        why = str(error)
    if why is None:
        return "gigatoken", f"the ids of {len(texts)} texts are those of the tokenizer's own package"
    if requested == "gigatoken":
        raise ValueError(problem("backend", requested, f"gigatoken cannot be used: {why}", "give --backend tokenizers"))
    return "tokenizers", f"not gigatoken: {why}"


def probe_texts(tokenizer: TextTokenizer) -> list[str]:
    """Short texts of what tokenizers disagree on, special tokens among it; the same at every call."""
    pieces = [*_PLAIN, *_ODD]
    if tokenizer.kind == "huggingface":
        added = json.loads(tokenizer.content).get("added_tokens") or []
        pieces += [token["content"] for token in added[:64]]
    choice = random.Random(0)
    return ["".join(choice.choices(pieces, k=choice.randrange(1, 30))) for _ in range(_NUM_PROBES)]


def find_difference(encoder: Encoder, reference: Encoder, texts: Sequence[str]) -> int | None:
    """Position of the first text that two encoders give other ids for, or None."""
    ids, lengths = encoder(texts)
    reference_ids, reference_lengths = reference(texts)
    if np.array_equal(lengths, reference_lengths) and np.array_equal(ids, reference_ids):
        return None
    pairs = zip(np.split(ids, np.cumsum(lengths)[:-1]), np.split(reference_ids, np.cumsum(reference_lengths)[:-1]), strict=True)
    return next(index for index, (one, other) in enumerate(pairs) if not np.array_equal(one, other))


def _huggingface(tokenizer: TextTokenizer) -> Encoder:
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(tokenizer.content.decode("utf-8", "surrogatepass"))
    backend.encode_special_tokens = not tokenizer.allow_special

    def encode(texts: Sequence[str]) -> Encoded:
        return _joined([encoding.ids for encoding in backend.encode_batch_fast(list(texts), add_special_tokens=False)])

    return encode


def _sentencepiece(tokenizer: TextTokenizer) -> Encoder:
    import sentencepiece

    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.content)
    return lambda texts: _joined(processor.encode(list(texts), out_type=int, num_threads=1))


def _bytes(tokenizer: TextTokenizer) -> Encoder:
    def encode(texts: Sequence[str]) -> Encoded:
        encoded = [text.encode() for text in texts]
        return np.frombuffer(b"".join(encoded), np.uint8), np.fromiter(map(len, encoded), np.int64, len(encoded))

    return encode


def _gigatoken(tokenizer: TextTokenizer) -> Encoder:
    import gigatoken

    try:
        if tokenizer.kind == "sentencepiece":
            backend = gigatoken.Tokenizer.from_sentencepiece(tokenizer.content)
        else:
            backend = gigatoken.Tokenizer.from_json(_gigatoken_json(tokenizer))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise ValueError(f"it cannot load this tokenizer ({str(error).splitlines()[0]})") from error

    def encode(texts: Sequence[str]) -> Encoded:
        layout = backend.encode_batch(list(texts), parallel=False).layout
        offsets = np.asarray(layout.offsets.data, np.int64)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)

    return encode


def _gigatoken_json(tokenizer: TextTokenizer) -> str:
    """It has no switch for special tokens in a text: they are text when it does not know them as special."""
    if tokenizer.allow_special:
        return tokenizer.content.decode("utf-8", "surrogatepass")
    content = json.loads(tokenizer.content)
    content["added_tokens"] = [token for token in content.get("added_tokens") or [] if not token["special"]]
    return json.dumps(content)


def _joined(ids: Sequence[Sequence[int]]) -> Encoded:
    lengths = np.fromiter(map(len, ids), np.int64, len(ids))
    return np.fromiter(chain.from_iterable(ids), np.int64, int(lengths.sum())), lengths
