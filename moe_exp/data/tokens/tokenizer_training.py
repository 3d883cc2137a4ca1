"""Training of a byte-level BPE tokenizer, saved in a folder for Hugging Face's AutoTokenizer."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from moe_exp.config import setting_error
from moe_exp.data.documents import Tally, read_documents
from moe_exp.data.kinds import FILES, TextRule, total_bytes
from moe_exp.data.stage import run_stage
from moe_exp.host.files import write_json
from moe_exp.host.progress import Advance, progress

EOD_TOKEN = "<|endoftext|>"

# The trainer keeps all words in memory, and a long line without a space would be a single word.
_PIECE_CHARACTERS = 2**16


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, special_tokens: Sequence[str] = (EOD_TOKEN,)
) -> Tokenizer:
    """Trains a byte-level BPE tokenizer deterministically. The special tokens have the first ids.

    `vocab_size`: maximum number of tokens; a small corpus may yield fewer. Raises ValueError if `vocab_size`
    is less than the number of special tokens plus 256 (a token for each byte).
    """
    smallest = len(pre_tokenizers.ByteLevel.alphabet()) + len(special_tokens)
    if vocab_size < smallest:
        rule = f"must be at least {smallest} for a byte-level BPE"
        raise setting_error("vocab_size", vocab_size, rule, f"set {smallest} or more")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def train_tokenizer(
    inputs: Sequence[Path], output: Path, *, vocab_size: int, json_key: str = "text",
    eos_token: str = EOD_TOKEN, bos_token: str | None = None, pad_token: str | None = None,
    max_bytes: int = 10**9, skip_bad: bool = False, start_over: bool = False, rule: TextRule = FILES,
) -> dict[str, Any]:  # fmt: skip
    """Trains a byte-level BPE on files, writes a folder for AutoTokenizer, and returns its manifest.

    Documents are streamed; memory grows with the number of distinct words. An equal amount of text is read
    from the start of every file, up to `max_bytes` in total.

    Args:
        inputs: files of a kind listed in `moe_exp.data.kinds`.
        vocab_size: see `train_bpe`.
        eos_token, bos_token, pad_token: special tokens (ids 0, 1, ...); `eos_token` ends a document.
        max_bytes: maximum amount of text (UTF-8 bytes).
        json_key, skip_bad, rule: see `read_documents`.

    Raises:
        ValueError: if `vocab_size` is too small, two special tokens are equal, the inputs have no text, or a
            line is invalid.
    """
    names = {"eos_token": eos_token, "bos_token": bos_token, "pad_token": pad_token}
    named = {name: token for name, token in names.items() if token}
    special_tokens = list(named.values())
    if len(set(special_tokens)) < len(special_tokens):
        must = "EOS, BOS and padding must be different tokens"
        raise setting_error("pad_token", pad_token, must, "set another name")
    settings = {"vocab_size": vocab_size, "json_key": json_key, "special_tokens": special_tokens}
    settings |= {"max_bytes": max_bytes, "skip_bad": skip_bad, **rule.facts()}
    with run_stage(
        "train-tokenizer", output, settings=settings, inputs=inputs, start_over=start_over
    ) as stage:
        if stage.manifest is not None:
            return stage.manifest
        tally = Tally()

        def limited_texts(advance: Advance) -> Iterator[str]:
            for index, path in enumerate(inputs):
                # Later files share the amount that shorter earlier files did not use.
                limit = tally.num_text_bytes + (max_bytes - tally.num_text_bytes) // (len(inputs) - index)
                reading = read_documents(path, tally, text_field=json_key, skip_bad=skip_bad, rule=rule)
                for line, text in reading:
                    advance(len(line) + 1)
                    for start in range(0, len(text), _PIECE_CHARACTERS):
                        yield text[start : start + _PIECE_CHARACTERS]
                    if tally.num_text_bytes >= limit:
                        break

        with progress("reading", min(max_bytes, total_bytes(inputs))) as advance:
            tokenizer = train_bpe(limited_texts(advance), vocab_size, special_tokens=special_tokens)
        if not tally.num_documents:
            raise setting_error(
                "input", inputs[0], "the inputs have no documents", "name files that contain text"
            )
        tokenizer.save(str(stage.folder / "tokenizer.json"))
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 10**30}
        config |= {"clean_up_tokenization_spaces": False, **named}
        outputs = [stage.folder / "tokenizer.json", stage.folder / "tokenizer_config.json"]
        write_json(outputs[1], config)
        return stage.finish(outputs, **tally.to_json(), vocab_size=tokenizer.get_vocab_size())
