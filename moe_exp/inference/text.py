"""Encodes prompts and decodes streams of tokens into whole characters."""

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_exp.config import Config, setting_error
from moe_exp.data.embedded import embedded_folder
from moe_exp.data.own_text import find_prepared_text
from moe_exp.data.tokens.encoders import own_package
from moe_exp.data.tokens.manifests import DocumentTokens, trained_documents
from moe_exp.data.tokens.tokenizer import TextTokenizer

logger = logging.getLogger(__name__)

Decoder = Callable[[Sequence[int]], str]

# New tokens are decoded after this many others: decoders treat the first piece differently (leading space).
_CONTEXT_TOKENS = 8


def tokenizer_for(
    saved: Config, name: str, *, order: Mapping[str, Any] | None = None, allow_special: bool = False
) -> TextTokenizer:
    """Returns a tokenizer that encodes documents as in a run's training. `saved` has the run's settings.
    `name` is a tokenizer.json or its folder, a SentencePiece .model file, or `bytes`. If `name` is empty, the
    run's tokenizer is used. `order` has facts about the training data (`SampleOrder.facts`) from the run's
    checkpoint. `allow_special` parses special tokens such as <s> in the text.

    Raises ValueError if the tokenizer is missing, lacks the end-of-document token, or has too large ids.
    """
    give = "pass --tokenizer with tokenizer.json or its folder"
    trained = (order or {}).get("tokenizer") or ""
    path = name or saved.tokenizer or find_prepared_text(saved, trained).tokenizer
    if not path and saved.train_data:
        raise setting_error("tokenizer", "", "is unknown, because it was not set in training", give)
    if not path:
        path = str(embedded_folder(Path(saved.data_dir)) / "tokenizer.json")
        if not Path(path).is_file():
            rule = f"the embedded corpus's tokenizer was not found at {path}"
            fix = "pass --tokenizer with the tokenizer.json in the training's DATA_DIR"
            raise setting_error("tokenizer", "", rule, fix)
    if path != "bytes" and not Path(path).exists():
        raise setting_error("tokenizer", path, "does not exist", give)
    documents = trained_documents(saved, order or {})
    tokenizer = (documents or DocumentTokens()).tokenizer(path, allow_special=allow_special)
    if tokenizer.vocab_size > saved.vocab_size:
        rule = f"has {tokenizer.vocab_size} tokens, but the model has VOCAB_SIZE={saved.vocab_size}"
        raise setting_error("tokenizer", path, rule, "pass --tokenizer with the training's tokenizer")
    if tokenizer.vocab_size < saved.vocab_size:
        text = "tokenizer %s has %d of the model's %d tokens; the remaining tokens decode to empty text"
        logger.info(text, path, tokenizer.vocab_size, saved.vocab_size)
    return tokenizer


def encode(tokenizer: TextTokenizer, text: str) -> list[int]:
    """Token ids of a text, with BOS first if training documents start with BOS. Adds no end token."""
    ids, _ = own_package(tokenizer)([text])
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return begin + [int(token) for token in ids]


def decoder_of(tokenizer: TextTokenizer) -> Decoder:
    """Returns a function that decodes token ids to text and ignores unknown ids."""
    if tokenizer.kind == "bytes":
        return lambda ids: bytes(token for token in ids if token < 256).decode(errors="replace")
    size, processor = tokenizer.vocab_size, tokenizer.processor()
    if tokenizer.kind == "sentencepiece":
        return lambda ids: str(processor.decode([int(token) for token in ids if token < size]))
    return lambda ids: str(processor.decode(list(ids), skip_special_tokens=False))


class TextStream:
    """Decodes the tokens after `prompt` one by one and stops where any text from `stops` begins. Holds back
    text that may still change: an incomplete character or the beginning of a stop text.
    """

    def __init__(self, decode: Decoder, prompt: Sequence[int], stops: Sequence[str] = ()):
        self._decode, self._stops = decode, stops
        self._ids = list(prompt[-_CONTEXT_TOKENS:])
        self._first, self._read = 0, len(self._ids)
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        """Adds a token and returns the new text. Sets `stopped` once a stop text is complete."""
        self._ids.append(token)
        return self._released(final=False)

    def finish(self) -> str:
        """Returns the text that is still held back."""
        return "" if self.stopped else self._released(final=True)

    def _released(self, *, final: bool) -> str:
        known = self._decode(self._ids[self._first : self._read])
        whole, text = self._decode(self._ids[self._first :]), self._held
        if final or not whole.endswith("\ufffd"):  # the end of an incomplete character
            self._first, self._read = self._read, len(self._ids)
            text += whole[len(known) :]
        if found := [index for stop in self._stops if (index := text.find(stop)) >= 0]:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        # longest suffix of the text that is the beginning of a stop text
        starts = [n for stop in self._stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        held = 0 if final else max(starts, default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]
