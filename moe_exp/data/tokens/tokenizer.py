"""Loads tokenizers for the corpus tools, with their vocabulary sizes and end-of-document tokens.

The tokenizers encode only the text: truncation, padding, dropout and post-processors (which add BOS) are
removed, because Megatron encodes with `add_special_tokens=False`. Special tokens in a text are treated as
plain text unless `allow_special` is set. Unigram and WordLevel models have `</s>` in their own vocabulary and
cannot encode it as plain text. A document whose ids still include a special token (see `special_tokens`) is
treated like an invalid line of the input files.
"""

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import orjson
import xxhash

from moe_exp.config import setting_error
from moe_exp.host.files import read_json

logger = logging.getLogger(__name__)

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer", "GPT2BPETokenizer", "SentencePieceTokenizer", "Llama2Tokenizer",
    "ByteLevelTokenizer",
)  # fmt: skip

# End-of-document tokens to look for if the tokenizer's files do not define one.
USUAL_EOD_TOKENS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<EOD>", "<eod>")
_HUB_FILES = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json",
    "config.json",
]  # fmt: skip
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
_NUM_BYTES = 256


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer that can be pickled for workers."""

    kind: Literal["huggingface", "sentencepiece", "bytes"]
    name: str  # as given by the user
    content: bytes = field(repr=False)  # a tokenizer.json, or a SentencePiece model; empty for bytes
    vocab_size: int  # highest id + 1
    eod_id: int | None  # end-of-document token
    eod_token: str | None
    allow_special: bool = False  # read special tokens in a text as special tokens
    bos_id: int | None = None  # token to put before each document; None: nothing is added
    bos_token: str | None = None  # token that the tokenizer's own post-processor adds before a text

    def special_tokens(self) -> dict[int, str]:
        """Special tokens (id to text) that an encoded text must not contain; excludes the unknown token."""
        if self.allow_special:
            return {}
        tokens = {}
        if self.kind == "huggingface":
            content = orjson.loads(self.content)
            unknown = content["model"].get("unk_token"), content["model"].get("unk_id")
            special = (token for token in content.get("added_tokens") or [] if token["special"])
            tokens = {
                token["id"]: token["content"]
                for token in special
                if token["content"] != unknown[0] and token["id"] != unknown[1]
            }
        return tokens if self.eod_id is None else tokens | {self.eod_id: str(self.eod_token)}

    def facts(self) -> dict[str, Any]:
        """Returns everything that determines the tokens, as entries of a manifest."""
        names = ("kind", "vocab_size", "eod_id", "eod_token", "allow_special")
        facts = {"hash": xxhash.xxh3_128_hexdigest(self.content)}
        facts |= {name: getattr(self, name) for name in names}
        return facts if self.bos_id is None else facts | {"bos_id": self.bos_id}

    def processor(self) -> Any:
        """The tokenizer as an object of its own package (tokenizers or sentencepiece); None for `bytes`."""
        if self.kind == "bytes":
            return None
        if self.kind == "huggingface":
            from tokenizers import Tokenizer

            return Tokenizer.from_str(self.content.decode())
        import sentencepiece

        return sentencepiece.SentencePieceProcessor(model_proto=self.content)

    def token(self, index: int) -> str | None:
        """Token with id `index`; None for tokenizer `bytes` or an unknown id."""
        if self.kind == "sentencepiece" and 0 <= index < self.vocab_size:
            return str(self.processor().id_to_piece(index))
        return token_text(orjson.loads(self.content), index) if self.kind == "huggingface" else None

    def log_left_out(self) -> None:
        """Logs a warning if documents lack the BOS that the tokenizer itself would add."""
        if self.bos_token is not None and self.bos_id is None:
            text = "tokenizer %s adds %s before a text, but documents lack this token (to add it: %s)"
            logger.warning(text, self.name, self.bos_token, "--prepend-bos, PREPEND_BOS=true")

    def recorded(self) -> dict[str, Any]:
        """`facts()` plus an entry `ids` for `same_tokenizer`: a hash of all that determines a text's ids."""
        is_json = self.kind == "huggingface"
        found = _ids_hash(orjson.loads(self.content)) if is_json else xxhash.xxh3_64_hexdigest(self.content)
        return self.facts() | {"ids": found}


def same_tokenizer(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two results of `recorded` have the same `hash` or `ids`; older manifests have no `ids`."""
    return one["hash"] == other["hash"] or ("ids" in one and one["ids"] == other.get("ids"))


def load_tokenizer(
    tokenizer_type: str, *, model: str | Path | None = None, vocab_file: str | Path | None = None,
    merge_file: str | Path | None = None, eod_token: str | None = None, allow_special: bool = False,
    prepend_bos: bool = False,
) -> TextTokenizer:  # fmt: skip
    """Loads a tokenizer; tokenizer types are named as in Megatron.

    Args:
        tokenizer_type: one of TOKENIZER_TYPES.
        model: for HuggingFaceTokenizer, a folder, a tokenizer.json, or a name on the Hub (uses HF_ENDPOINT
            and HF_TOKEN); for SentencePieceTokenizer and Llama2Tokenizer, a .model file. Unlike in Megatron,
            Llama2Tokenizer adds a BOS only with `prepend_bos`.
        vocab_file, merge_file: vocab.json and merges.txt of GPT2BPETokenizer.
        eod_token: end-of-document token (default: from the tokenizer's files).
        allow_special: treat special tokens in a text as special tokens, not as plain text.
        prepend_bos: start every document with the tokenizer's BOS.

    Raises:
        ValueError: if a file is missing or invalid, or if the vocabulary lacks `eod_token` or the BOS.
    """
    if tokenizer_type not in TOKENIZER_TYPES:
        rule = f"must be one of {', '.join(TOKENIZER_TYPES)}"
        raise setting_error("tokenizer_type", tokenizer_type, rule, "choose one of them")
    if tokenizer_type == "ByteLevelTokenizer":
        if eod_token is not None or allow_special:
            field, value = ("allow_special", "True") if eod_token is None else ("eod_token", eod_token)
            rule = "the byte-level tokenizer has only the 256 bytes and an end-of-document token, id 256"
            raise setting_error(field, value, rule, "omit it")
        loaded = TextTokenizer("bytes", "bytes", b"", _NUM_BYTES + 1, _NUM_BYTES, "<eod>")
    elif tokenizer_type == "GPT2BPETokenizer":
        content = _gpt2_json(_existing("vocab_file", vocab_file), _existing("merge_file", merge_file))
        loaded = _from_json(content, str(vocab_file), None, eod_token, allow_special)
    elif model is None:
        rule = f"is required by {tokenizer_type}"
        raise setting_error("tokenizer_model", "", rule, "set --tokenizer-model")
    elif tokenizer_type == "HuggingFaceTokenizer":
        path = _tokenizer_json(str(model))
        content = _read_tokenizer_json(path, "tokenizer_model")
        loaded = _from_json(content, str(model), path.parent, eod_token, allow_special)
    else:
        loaded = _sentencepiece(_existing("tokenizer_model", model), eod_token, allow_special)
        if tokenizer_type == "Llama2Tokenizer" and loaded.bos_id is not None:  # Megatron adds it
            loaded = replace(loaded, bos_token=loaded.token(loaded.bos_id))
    if not prepend_bos:
        return replace(loaded, bos_id=None)
    if loaded.bos_id is None:
        fix = "omit --prepend-bos (PREPEND_BOS), or set bos_token in its tokenizer_config.json"
        raise setting_error("prepend_bos", True, f"the tokenizer {loaded.name} has no BOS", fix)
    return loaded


def load_named_tokenizer(
    name: str, *, eod_token: str | None = None, allow_special: bool = False, prepend_bos: bool = False
) -> TextTokenizer:
    """Loads a tokenizer named as in the setting TOKENIZER: a tokenizer.json or its folder, a SentencePiece
    .model file, or `bytes`. Raises the errors of `load_tokenizer`.
    """
    if name == "bytes":
        return load_tokenizer("ByteLevelTokenizer", prepend_bos=prepend_bos)
    kind = "SentencePieceTokenizer" if name.endswith(".model") else "HuggingFaceTokenizer"
    return load_tokenizer(
        kind, model=name, eod_token=eod_token, allow_special=allow_special, prepend_bos=prepend_bos
    )


def is_tokenizer_of(name: str, facts: Mapping[str, Any]) -> bool:
    """Whether tokenizer `name` gives the same ids as the tokenizer of `facts` (`TextTokenizer.recorded`)."""
    try:
        return same_tokenizer(load_named_tokenizer(name, eod_token=facts.get("eod_token")).recorded(), facts)
    except (ValueError, OSError):  # for example, it lacks the end-of-document token
        return False


def tokenizer_vocab_size(path: str | Path) -> int:
    """Highest token id (including added tokens) + 1; `path`: a tokenizer.json or its folder."""
    # Reading the JSON is faster than building the tokenizer, which processes all merges.
    return _vocab_size(_read_tokenizer_json(Path(path), "tokenizer"))


def tokenizer_fingerprint(path: str | Path) -> str:
    """Fingerprint of a tokenizer (32 hex digits) for `same_fingerprint`: the 16 digits that older
    checkpoints store, then a 16-digit hash of everything that determines the ids of a text. Raises ValueError
    if the file is missing or invalid.
    """
    content = _read_tokenizer_json(Path(path), "tokenizer")
    names = ("normalizer", "pre_tokenizer", "model", "added_tokens", "post_processor")
    return _json_hash([content.get(name) for name in names]) + _ids_hash(content)


def same_fingerprint(one: str, other: str) -> bool:
    """Whether two `tokenizer_fingerprint`s belong to tokenizers that give the same ids."""
    return one[:16] == other[:16] or (len(one) > 16 and one[16:] == other[16:])


def _ids_hash(content: Mapping[str, Any]) -> str:
    """Hash (16 hex digits) of everything that determines the ids of a text."""
    # Excludes dropout and post-processor, which are removed before tokenizing, and differences in notation:
    # null and false are the defaults.
    given = {name: value for name, value in content["model"].items() if name != "dropout"}
    model = {name: value for name, value in given.items() if value is not None and value is not False}
    if merges := model.get("merges"):  # pairs; in older files, strings with a space between
        model["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
    # Whether an added token is special does not matter: in a text it is read as text.
    added = [{**token, "special": None} for token in content.get("added_tokens") or []]
    added.sort(key=lambda token: token["id"])
    return _json_hash([content.get("normalizer"), content.get("pre_tokenizer"), model, added])


def _json_hash(parts: list[Any]) -> str:
    return xxhash.xxh3_64_hexdigest(orjson.dumps(parts, option=orjson.OPT_SORT_KEYS))


def _vocab_size(content: dict[str, Any]) -> int:
    added = [token["id"] for token in content.get("added_tokens") or []]
    return 1 + max([*pieces_of(content).values(), *added], default=-1)


def pieces_of(content: Mapping[str, Any]) -> dict[str, int]:
    """Model vocabulary of a tokenizer.json (piece to id), without added tokens."""
    vocab = content["model"]["vocab"]
    # Unigram models store a list of (piece, score); the positions are the ids.
    return {piece: token for token, (piece, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab


def _existing(field: str, path: str | Path | None) -> Path:
    if path is None or not Path(path).is_file():
        fix = f"set --{field.replace('_', '-')} to the file's path"
        raise setting_error(field, path or "", "must be an existing file", fix)
    return Path(path)


def _tokenizer_json(model: str) -> Path:
    """Path of the tokenizer.json; `model`: a file, a folder or a name on the Hub."""
    path = Path(model)
    if path.is_file():
        return path
    if not path.is_dir():
        if not _HUB_NAME.fullmatch(model):
            rule = "file or folder not found"
            fix = "correct the path, or set a name on the Hugging Face Hub"
            raise setting_error("tokenizer_model", model, rule, fix)
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

        try:
            path = Path(huggingface_hub.snapshot_download(model, allow_patterns=_HUB_FILES))
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            rule = f"not found here or on the Hub ({' '.join(str(error).split())[:200]})"
            fix = "check the name, HF_TOKEN and HF_ENDPOINT"
            raise setting_error("tokenizer_model", model, rule, fix) from error
    if not (path / "tokenizer.json").is_file():
        fix = "set a folder with this file (see save_pretrained), or use another --tokenizer-type"
        raise setting_error("tokenizer_model", model, "has no tokenizer.json", fix)
    return path / "tokenizer.json"


def _read_tokenizer_json(path: Path, field: str) -> dict[str, Any]:
    try:
        file = path / "tokenizer.json" if path.is_dir() else path
        content: dict[str, Any] = orjson.loads(file.read_bytes())
        # Raises an error if the JSON is not a tokenizer.
        _vocab_size(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f"is not a Hugging Face tokenizer.json or a folder with this file ({type(error).__name__})"
        fix = "set the path of a tokenizer.json, as written by tokenizer.save_pretrained"
        raise setting_error(field, path, rule, fix) from error
    return content


def _gpt2_json(vocab_file: Path, merge_file: Path) -> dict[str, Any]:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    try:
        tokenizer = Tokenizer(models.BPE.from_file(str(vocab_file), str(merge_file)))
    except Exception as error:  # tokenizers raises plain Exception
        rule = f"with {merge_file} is not a GPT-2 vocabulary ({error})"
        fix = "set GPT-2's vocab.json and merges.txt"
        raise setting_error("vocab_file", vocab_file, rule, fix) from error
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return orjson.loads(tokenizer.to_str())


def _from_json(
    content: dict[str, Any], name: str, folder: Path | None, eod_token: str | None, allow_special: bool
) -> TextTokenizer:
    for setting in ("truncation", "padding"):
        if content.get(setting) is not None:
            what = "tokenizer %s: ignoring %s in its tokenizer.json, because documents are not cut or padded"
            logger.warning(what, name, setting)
            content[setting] = None
    if content["model"].get("dropout"):
        what = "tokenizer %s: ignoring BPE dropout %s"
        logger.warning(what, name, content["model"]["dropout"])
        content["model"]["dropout"] = None
    files: dict[str, Any] = {file_name: {} for file_name in _HUB_FILES[1:]}
    for file_name in files if folder else ():
        if (path := Path(folder or "", file_name)).exists():
            fields = read_json(path, fix="download it again")
            files[file_name] = fields if isinstance(fields, dict) else {}  # null in some folders
    if ids := ids_before_text(content):
        bos_token, adds_bos = token_text(content, ids[0]), True
    else:
        named = (token for token in _named(files, "bos_token") if token_id(content, token) is not None)
        bos_token, adds_bos = next(named, None), False
    # The post-processor would add special tokens; `PartEncoder` adds BOS and EOD itself.
    content["post_processor"] = None
    if eod_token is None:
        candidates = _eod_candidates(content, files)
        eod_token = next((token for token in candidates if token_id(content, token) is not None), None)
    eod_id = None if eod_token is None else token_id(content, eod_token)
    if eod_token is not None:
        if eod_id is None:
            rule = f"not found in the tokenizer {name}"
            raise setting_error("eod_token", eod_token, rule, "set a token that the tokenizer has")
        # In some files it is an added token that is not special, so a text could contain it.
        for token in content.get("added_tokens") or []:
            token["special"] |= token["content"] == eod_token
    return TextTokenizer(
        "huggingface", name, orjson.dumps(content), _vocab_size(content), eod_id, eod_token, allow_special,
        None if bos_token is None else token_id(content, bos_token), bos_token if adds_bos else None,
    )  # fmt: skip


def _named(files: Mapping[str, dict[str, Any]], field: str) -> Iterator[str]:
    """Special tokens in the entry `field` of the tokenizer's files."""
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        token = files[name].get(field)
        if token := token.get("content") if isinstance(token, dict) else token:
            yield token


def ids_before_text(content: Mapping[str, Any]) -> list[int]:
    """Ids that the post-processor of a tokenizer.json adds before a text."""
    if not content.get("post_processor") or content["post_processor"]["type"] == "ByteLevel":
        return []
    from tokenizers import Tokenizer

    encoded = Tokenizer.from_str(orjson.dumps(content).decode()).encode("a")
    first = next((at for at, special in enumerate(encoded.special_tokens_mask) if not special), None)
    return list(encoded.ids[:first]) if first is not None else []


def _eod_candidates(content: dict[str, Any], files: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Candidates for the end-of-document token: from the tokenizer's files, then the usual names."""
    yield from _named(files, "eos_token")
    for name in ("generation_config.json", "config.json"):
        ids = files[name].get("eos_token_id")
        ids = ids if isinstance(ids, list) else [ids]
        if isinstance(first := next(iter(ids), None), int) and (token := token_text(content, first)):
            yield token
    yield from USUAL_EOD_TOKENS


def token_id(content: Mapping[str, Any], token: str) -> int | None:
    """Id of a token (added or in the vocabulary) in a tokenizer.json; None if missing."""
    for added in content.get("added_tokens") or []:
        if added["content"] == token:
            return int(added["id"])
    return pieces_of(content).get(token)


def token_text(content: Mapping[str, Any], index: int) -> str | None:
    """The token with id `index`; the inverse of `token_id`."""
    for added in content.get("added_tokens") or []:
        if added["id"] == index:
            return str(added["content"])
    return next((token for token, known in pieces_of(content).items() if known == index), None)


def _sentencepiece(path: Path, eod_token: str | None, allow_special: bool) -> TextTokenizer:
    import sentencepiece

    if allow_special:
        rule = "SentencePiece does not support control symbols in texts"
        raise setting_error("allow_special", allow_special, rule, "omit it, or use a tokenizer.json")
    content = path.read_bytes()
    try:
        processor = sentencepiece.SentencePieceProcessor(model_proto=content)
    except RuntimeError as error:
        rule, fix = "is not a SentencePiece model", "set it to a SentencePiece .model file"
        wrong = setting_error("tokenizer_model", path, rule, fix)
        raise wrong from error
    candidates = [processor.id_to_piece(processor.eos_id())] if processor.eos_id() >= 0 else []
    names = [eod_token] if eod_token is not None else [*candidates, *USUAL_EOD_TOKENS]
    ids = [processor.piece_to_id(name) for name in names]
    # SentencePiece returns the unknown piece's id for a missing piece.
    known = [(name, index) for name, index in zip(names, ids, strict=True) if index != processor.unk_id()]
    found = known[0] if known else (None, None)
    if eod_token is not None and found[1] is None:
        rule = f"not found in the tokenizer {path}"
        raise setting_error("eod_token", eod_token, rule, "set a token that the tokenizer has")
    bos_id = processor.bos_id() if processor.bos_id() >= 0 else None
    size = processor.get_piece_size()
    return TextTokenizer("sentencepiece", str(path), content, size, found[1], found[0], bos_id=bos_id)
