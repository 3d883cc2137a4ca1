"""Files beside the weights in a Hugging Face folder: tokenizer, generation settings, model card."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.format.folders import unusable
from moe_exp.checkpoint.hf.model_folder import read_json
from moe_exp.data.tokens.manifests import DocumentTokens
from moe_exp.data.tokens.tokenizer import (
    USUAL_EOD_TOKENS,
    ids_before_text,
    token_id,
    token_text,
    tokenizer_vocab_size,
)
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
        content = read_json(found["tokenizer.json"])
        eod = next((token for token in USUAL_EOD_TOKENS if token_id(content, token) is not None), None)
        facts = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eod} if eod else {})
        write_json(target / "tokenizer_config.json", facts)
    return "tokenizer.json" in found


def as_in_documents(folder: Path, documents: DocumentTokens) -> dict[str, int]:
    """Makes a copied tokenizer encode a text as the training's documents, with their BOS or without one, and
    name their end as its EOS. Returns the ids for config.json and generation_config.json.
    """
    content, config = (read_json(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    eod = None if documents.eod_id is None else token_text(content, documents.eod_id)
    named: dict[str, Any] = {} if eod is None else {"eos_token": eod}
    if ids_before_text(content) != ([] if documents.bos_id is None else [documents.bos_id]):
        bos = None if documents.bos_id is None else token_text(content, documents.bos_id)
        named |= {} if bos is None else {"bos_token": bos}
        content["post_processor"] = _post_processor(content["post_processor"], bos, documents.bos_id)
        write_json(folder / "tokenizer.json", content)
    if config.get("tokenizer_class") != "PreTrainedTokenizerFast":
        # Before transformers 5, the classes of some models decided by these, not by the post-processor.
        named |= {"add_bos_token": documents.bos_id is not None, "add_eos_token": False}
    write_json(folder / "tokenizer_config.json", config | named)
    if (path := folder / "special_tokens_map.json").is_file():
        tokens = {name: token for name, token in named.items() if isinstance(token, str)}
        write_json(path, read_json(path) | tokens)
    ids = {"eos_token_id": documents.eod_id if eod is not None else None, "bos_token_id": documents.bos_id}
    return {name: index for name, index in ids.items() if index is not None}


def _post_processor(old: dict[str, Any] | None, bos: str | None, bos_id: int | None) -> dict[str, Any] | None:
    """Puts the BOS before a text, or nothing, and trims offsets as the old one."""
    steps = [] if old is None else [old] if old["type"] != "Sequence" else old["processors"]
    steps = [step for step in steps if step["type"] == "ByteLevel"]
    if bos is not None:
        text, begin = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": bos, "type_id": 0}}
        second = {"Sequence": {"id": "B", "type_id": 1}}
        tokens = {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}}
        template = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, second]}
        steps.append(template | {"special_tokens": tokens})
    return {"type": "Sequence", "processors": steps} if len(steps) > 1 else next(iter(steps), None)


def tokens_beyond(folder: Path, vocab_size: int) -> list[str]:
    """Added tokens with ids from `vocab_size`, in order; ValueError if not all are added ones."""
    path = folder / "tokenizer.json"
    if not path.is_file() or (size := tokenizer_vocab_size(path)) <= vocab_size:
        return []
    tokens = read_json(path).get("added_tokens") or []
    added = {token["id"]: token["content"] for token in tokens}
    beyond = range(vocab_size, size)
    if not added.keys() >= set(beyond):
        rule = f"has {size} tokens, and not only added ones beyond vocab_size={vocab_size} of config.json"
        raise unusable(path, rule, "fetch the tokenizer that belongs to the weights")
    return [added[token] for token in beyond]


def check_tokenizer(path: Path) -> None:
    """Raises a ValueError unless `path` is a tokenizer.json, or a folder that has one."""
    if path.is_file():
        read_json(path)
    elif not (path / "tokenizer.json").is_file():
        fix = "name a folder with that file, or the file"
        raise unusable(f"TOKENIZER={path}", "has no tokenizer.json", fix)


def token_ids(folder: Path) -> dict[str, int | None]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` from the files of `copy_tokenizer`, else None."""
    # None goes into config.json, too: classes of transformers have default ids for missing fields
    if not (folder / "tokenizer.json").is_file():
        return dict.fromkeys(_TOKENS)
    content = read_json(folder / "tokenizer.json")
    named: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        if (folder / name).is_file():
            named |= read_json(folder / name)
    ids: dict[str, int | None] = {}
    for field in _TOKENS:
        token = named.get(field.removesuffix("_id"))
        token = token["content"] if isinstance(token, dict) else token
        ids[field] = None if token is None else token_id(content, token)
    return ids


def kept_fields(folder: Path | None) -> dict[str, Any]:
    """Token ids and max_position_embeddings in the folder's config.json."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    fields = read_json(folder / "config.json")
    return {name: fields[name] for name in _KEPT if name in fields}


def as_trained(trained: Mapping[str, int], old: Mapping[str, Any]) -> dict[str, Any]:
    """The ids that the training decided, without those that a list of the old ones contains."""
    lists = {name: ids for name, ids in old.items() if isinstance(ids, list)}
    return {name: index for name, index in trained.items() if index not in lists.get(name, ())}


def write_generation_config(
    folder: Path, like: Path | None, fields: Mapping[str, Any], trained: Mapping[str, int]
) -> None:
    """Copies generation_config.json from `like` with the trained ids, or writes one with the token ids."""
    if like is not None and (like / GENERATION).is_file():
        old = read_json(like / GENERATION)
        write_json(folder / GENERATION, old | as_trained(trained, old))
        return
    write_json(folder / GENERATION, {name: fields[name] for name in _TOKENS if fields.get(name) is not None})


def write_model_card(folder: Path, title: str, facts: str, *, source: Path, iteration: int) -> None:
    """Writes README.md with what is known: the model and its origin."""
    parent = source.resolve().parent  # of the iteration's folder
    run = parent.parent.name if parent.name == "checkpoints" else parent.name
    write_atomically(
        folder / "README.md",
        f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {title}

A causal language model, {facts}.

Converted by `moe-exp convert to-hf` from iteration {iteration} of the run or folder `{run}`.
License, training data and evaluation are for its authors to add.
""",
    )
