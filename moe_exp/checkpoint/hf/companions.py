"""What lies beside the weights in a Hugging Face folder: tokenizer, tokens of its config, generation
settings, model card.
"""

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
# Folder beside a checkpoint: what of its source says nothing about weights and is wanted again on the way
# back.
ORIGINAL = "huggingface"
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Fields that a model keeps on its way through a checkpoint.
_KEPT = (*_TOKENS, "max_position_embeddings")


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copies the tokenizer's files that are in the folder `source`, or the tokenizer.json that `source` is;
    whether there were any.

    Without a tokenizer_config.json transformers would guess a class by the model's, and know of no end of
    text, which lm_eval needs to begin one: one is written that says to take tokenizer.json, and its usual
    end-of-text token.
    """
    files = (
        {"tokenizer.json": source} if source.is_file() else {name: source / name for name in TOKENIZER_FILES}
    )
    found = {name: path for name, path in files.items() if path.is_file()}
    for name, path in found.items():
        target.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        eod = _usual_eod(_added_tokens(found["tokenizer.json"]))
        write_json(
            target / "tokenizer_config.json",
            {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eod} if eod else {}),
        )
    return bool(found)


def token_ids(tokenizer: Path | None) -> dict[str, int | None]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` as the tokenizer's files say it, None where they do
    not.

    None is written, too: a class of transformers has ids of its own for what config.json leaves out.
    """
    if tokenizer is None:
        return dict.fromkeys(_TOKENS)
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    if not (folder / "tokenizer.json").is_file():
        return dict.fromkeys(_TOKENS)
    added = _added_tokens(folder / "tokenizer.json")
    named: dict[str, Any] = (
        {} if (folder / "tokenizer_config.json").is_file() else {"eos_token": _usual_eod(added)}
    )
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
    """Of the config.json in a folder what is no setting of ours: token ids, and the length that the model may
    be used at.
    """
    if folder is None or not (folder / "config.json").is_file():
        return {}
    fields = read_json(folder / "config.json")
    return {name: fields[name] for name in _KEPT if name in fields}


def write_generation_config(folder: Path, like: Path | None, fields: Mapping[str, Any]) -> None:
    """generation_config.json: that of the folder `like`, else greedy decoding with the token ids of
    config.json.
    """
    if like is not None and (like / GENERATION).is_file():
        shutil.copyfile(like / GENERATION, folder / GENERATION)
        return
    write_json(folder / GENERATION, {name: fields[name] for name in _TOKENS if fields.get(name) is not None})


def write_model_card(
    folder: Path, *, title: str, architecture: str, source: Path, iteration: int, dtype: str, facts: str
) -> None:
    """README.md: what this is and where it comes from, and nothing that is not known."""
    write_atomically(
        folder / "README.md",
        f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {title}

A causal language model, `{architecture}`, {facts}, weights in {dtype}.

Converted by `moe-exp convert to-hf` from iteration {iteration} of the run or folder `{_name(source)}`.
License, training data and evaluation are for its authors to add.
""",
    )


def _name(checkpoint: Path) -> str:
    """Of the run or folder that an iteration's folder lies in."""
    parent = checkpoint.resolve().parent
    return parent.parent.name if parent.name == "checkpoints" else parent.name
