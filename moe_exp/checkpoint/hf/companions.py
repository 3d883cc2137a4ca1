"""Files beside the weights in a Hugging Face folder: tokenizer, generation settings, model card."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.hf.model_folder import read_json
from moe_exp.data.tokens.tokenizer import USUAL_EOD_TOKENS
from moe_exp.host.files import write_atomically, write_json

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
GENERATION = "generation_config.json"
ORIGINAL = "huggingface"  # folder beside a checkpoint with JSON files of its source, for exporting it again
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KEPT = (*_TOKENS, "max_position_embeddings")  # fields that survive an import and export


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copies the tokenizer's files from a folder, or a tokenizer.json; returns whether that was there. Adds a
    missing tokenizer_config.json with the usual end-of-text token: without it transformers guesses the class
    from the model's and knows no end of text, which lm_eval needs to begin one.
    """
    files = {name: source / name for name in TOKENIZER_FILES}
    files = {"tokenizer.json": source} if source.is_file() else files
    found = {name: path for name, path in files.items() if path.is_file()}
    for name, path in found.items():
        target.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        eod = _usual_eod(_added_tokens(found["tokenizer.json"]))
        facts = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eod} if eod else {})
        write_json(target / "tokenizer_config.json", facts)
    return "tokenizer.json" in found


def check_tokenizer(path: Path) -> None:
    """Raises a ValueError unless `path` is a tokenizer.json, or a folder that has one."""
    if path.is_file():
        read_json(path)
    elif not (path / "tokenizer.json").is_file():
        rule = "has no tokenizer.json"
        raise ValueError(f"TOKENIZER={path}: {rule}. Fix: name a folder with that file, or the file.")


def token_ids(tokenizer: Path | None) -> dict[str, int | None]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` from the tokenizer's files, else None."""
    # None goes into config.json, too: classes of transformers have default ids for missing fields
    if tokenizer is None:
        return dict.fromkeys(_TOKENS)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if not (folder / "tokenizer.json").is_file():
        return dict.fromkeys(_TOKENS)
    added = _added_tokens(folder / "tokenizer.json")
    named: dict[str, Any] = {"eos_token": _usual_eod(added)}
    if (folder / "tokenizer_config.json").is_file():
        named = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            named |= read_json(folder / name)
    ids = {}
    for field in _TOKENS:
        token = named.get(field.removesuffix("_id"))
        ids[field] = added.get(str(token["content"] if isinstance(token, dict) else token))
    return ids


def _added_tokens(tokenizer_json: Path) -> dict[str, int]:
    return {token["content"]: token["id"] for token in read_json(tokenizer_json).get("added_tokens") or []}


def _usual_eod(added: Mapping[str, int]) -> str | None:
    return next((token for token in USUAL_EOD_TOKENS if token in added), None)


def kept_fields(folder: Path | None) -> dict[str, Any]:
    """Token ids and max_position_embeddings in the folder's config.json."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    fields = read_json(folder / "config.json")
    return {name: fields[name] for name in _KEPT if name in fields}


def write_generation_config(folder: Path, like: Path | None, fields: Mapping[str, Any]) -> None:
    """Copies generation_config.json from `like`, or writes greedy decoding with the token ids."""
    if like is not None and (like / GENERATION).is_file():
        shutil.copyfile(like / GENERATION, folder / GENERATION)
        return
    write_json(folder / GENERATION, {name: fields[name] for name in _TOKENS if fields.get(name) is not None})


def write_model_card(folder: Path, title: str, facts: str, *, source: Path, iteration: int) -> None:
    """Writes README.md with what is known: the model and its origin."""
    write_atomically(
        folder / "README.md",
        f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {title}

A causal language model, {facts}.

Converted by `moe-exp convert to-hf` from iteration {iteration} of the run or folder `{_name(source)}`.
License, training data and evaluation are for its authors to add.
""",
    )


def _name(checkpoint: Path) -> str:
    """Name of the run or folder that contains an iteration's folder."""
    parent = checkpoint.resolve().parent
    return parent.parent.name if parent.name == "checkpoints" else parent.name
