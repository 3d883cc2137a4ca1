"""Reads and writes Hugging Face folders: safetensors files (with only one tensor in memory at a time),
tokenizer, generation config and model card.
"""

import contextlib
import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from moe_exp.checkpoint.format.folders import first_few, unusable
from moe_exp.data.download.sources import LEGAL_FILES
from moe_exp.data.tokens import tokenizer as tokenizers
from moe_exp.data.tokens.manifests import DocumentTokens
from moe_exp.host import files
from moe_exp.host.files import write_json

logger = logging.getLogger(__name__)

ADAPTER = "adapter_config.json"
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
DTYPE_NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}  # values of DTYPE
TORCH_DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}
Advance = Callable[[int], None]  # called with the number of bytes converted since the last call
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
# MXFP4 (OCP Microscaling Formats 1.0), the published format of gpt-oss: ends of the names of the two tensors
# of a weight, and the numbers that the lower three of four bits mean.
_BLOCKS, _SCALES = "_blocks", "_scales"
_MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "tokenizer.model", "spiece.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip
GENERATION = "generation_config.json"
ORIGINAL = "huggingface"  # folder next to a checkpoint with DESCRIPTION of its source, for a later export
DESCRIPTION = ("config.json", GENERATION, "README.md", *LEGAL_FILES)
ORIGIN = "origin.txt"  # in ORIGINAL: hf://OWNER/NAME@COMMIT of a downloaded source
# Fields of a README.md: the license, its name and link, and the model that this model was trained from.
_CARD_FIELD = re.compile(r"^(?:license\w*|base_model) *:.*(?:\n[ \t-].*)*", re.MULTILINE)
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_KEPT = (*_TOKENS, "max_position_embeddings", "architectures")  # fields that survive an import and export


def _damaged(place: object, reason: str) -> ValueError:
    return unusable(place, reason, "download the folder again")


@dataclass(frozen=True)
class StoredWeight:
    """File, shape and dtype of a stored tensor."""

    file: str
    shape: tuple[int, ...]
    dtype: str


class ModelFolder:
    """Config and weights of a folder; reads tensors on request. Like `from_pretrained` of transformers, uses
    model.safetensors if it exists, else the files in the index. ValueError if a file is missing or damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        if not path.is_dir():
            fix = "specify a local folder with config.json and safetensors files"
            raise unusable(f"SRC={path}", "is not a folder", fix)
        if (path / ADAPTER).is_file():
            rule = f"has {ADAPTER}, an adapter that transformers would add to the weights"
            fix = "merge the adapter: PeftModel.from_pretrained(...).merge_and_unload().save_pretrained(...)"
            raise unusable(f"SRC={path}", rule, fix)
        self.config = read_json(path / "config.json")
        self.weights: dict[str, StoredWeight] = {}
        self._open: tuple[str, Any] | None = None
        index = self._index()
        for file in [SINGLE] if index is None else sorted(set(index.values())):
            self._read_header(file)
        # A file's tensors may differ from the index.
        there = {name: weight.file for name, weight in self.weights.items()}
        index = there if index is None else index
        if differing := sorted(name for name in {*index, *there} if index.get(name) != there.get(name)):
            said, is_in = (where.get(differing[0], "no file") for where in (index, there))
            more = f" ({len(differing) - 1} more tensors differ)" if len(differing) > 1 else ""
            raise _damaged(path / INDEX, f"lists {said} for {differing[0]}, but {is_in} contains it{more}")
        self._packed = self._take_packed() if is_mxfp4(self.config) else {}

    def _index(self) -> dict[str, str] | None:
        """Maps each tensor to its file; None if all tensors are in model.safetensors."""
        has_index, is_single = ((self.path / name).is_file() for name in (INDEX, SINGLE))
        used = SINGLE if is_single else INDEX
        if (named := self.config.get("transformers_weights") or used) != used:
            rule = f"transformers_weights={named}: must be {used}"
            fix = "remove this field and the unused weights"
            raise unusable(f"{self.path}/config.json", rule, fix)
        if is_single:
            if has_index:
                logger.warning("%s: reading %s instead of %s, as transformers does", self.path, SINGLE, INDEX)
            return None
        if not has_index:
            rule, fix = f"has neither {SINGLE} nor {INDEX}", "download the folder again"
            if others := sorted(path.name for path in self.path.glob("*.safetensors")):
                rule += f", but {first_few(others, 3)}"
                fix = f"save the model with transformers' save_pretrained, or {fix}"
            elif any(any(self.path.glob(pattern)) for pattern in _PICKLES):
                rule = "has only pickled weights, which can execute code when loaded"
                fix = "convert it with transformers: from_pretrained(...).save_pretrained(...)"
            raise unusable(f"SRC={self.path}", rule, fix)
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise _damaged(self.path / INDEX, "has no weight_map")
        return index

    def _read_header(self, file: str) -> None:
        if Path(file).name != file:
            raise _damaged(self.path / INDEX, f"names a file outside the folder, {file}")
        with self._opened(file) as opened:
            for name in opened.keys():  # noqa: SIM118  # not a dict
                if name in self.weights:
                    raise _damaged(self.path, f"{name} is in {self.weights[name].file} and in {file}")
                entry = opened.get_slice(name)
                self.weights[name] = StoredWeight(file, tuple(entry.get_shape()), entry.get_dtype())

    def _take_packed(self) -> dict[str, StoredWeight]:
        """Replaces MXFP4 blocks and scales in `weights` with the weights that they encode."""
        packed: dict[str, StoredWeight] = {}
        for name in [name.removesuffix(_BLOCKS) for name in self.weights if name.endswith(_BLOCKS)]:
            blocks, scales = (self.weights.pop(name + end, None) for end in (_BLOCKS, _SCALES))
            if (
                not blocks or not scales or {blocks.dtype, scales.dtype} != {"U8"}
                or len(scales.shape) != 3 or blocks.shape != (*scales.shape, 16)
            ):  # fmt: skip
                rule = f"{name + _BLOCKS}: must be U8 [..., 16] and have {name + _SCALES} of type U8"
                raise unusable(self.path, rule, "download the published weights")
            packed |= {name + _BLOCKS: blocks, name + _SCALES: scales}
            experts, rows, num_blocks = scales.shape
            self.weights[name] = StoredWeight(blocks.file, (experts, 32 * num_blocks, rows), "BF16")
        return packed

    def read(self, name: str, index: int | None = None) -> Tensor:
        """Reads a tensor, or its slice at `index` of the first axis; ValueError if the file is damaged."""
        if name + _BLOCKS in self._packed:
            return unpacked(self.read(name + _BLOCKS, index), self.read(name + _SCALES, index))
        file = (self._packed.get(name) or self.weights[name]).file
        with self._opened(file) as opened:
            return opened.get_tensor(name) if index is None else opened.get_slice(name)[index]

    @contextlib.contextmanager
    def _opened(self, file: str) -> Iterator[Any]:
        """Yields an open safetensors file; if reading fails, raises a ValueError that names the file."""
        path = self.path / file
        try:
            if self._open is None or self._open[0] != file:
                if not path.is_file():
                    raise _damaged(path, "is missing")
                # pread instead of mmap: mapped pages count as this process's memory until the file is closed.
                self._open = file, safe_open(str(path), framework="pt", backend="pread")
            yield self._open[1]
        except SafetensorError as error:
            raise _damaged(path, f"is damaged ({' '.join(str(error).split())})") from None


def is_mxfp4(fields: Mapping[str, Any]) -> bool:
    """Whether a config.json says that weights are in MXFP4."""
    how = fields.get("quantization_config")
    return isinstance(how, dict) and how.get("quant_method") == "mxfp4"


def unpacked(blocks: Tensor, scales: Tensor) -> Tensor:
    """Decodes an expert's MXFP4 weight to bf16 [I, O]; bf16 represents every value exactly.

    Args:
        blocks: [O, I / 32, 16], with two 4-bit values per byte, low bits first.
        scales: [O, I / 32], exponents of 2, biased by 127.
    """
    values = torch.tensor([*_MXFP4_VALUES, *(-value for value in _MXFP4_VALUES)])
    of_byte = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # [256, 2]
    exponents = scales.int().unsqueeze(-1) - 127
    return torch.ldexp(of_byte[blocks.int()].flatten(-2), exponents).flatten(-2).bfloat16().t()


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file; ValueError if it is missing or not a JSON object."""
    try:
        content = files.read_json(path)
    except FileNotFoundError:
        raise _damaged(path, "is missing") from None
    except ValueError as error:
        raise _damaged(path, f"is not JSON ({error})") from None
    if not isinstance(content, dict):
        raise _damaged(path, "must contain a JSON object")
    return content


@dataclass(frozen=True)
class Entry:
    """Name, shape and dtype of a tensor to write."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_shards(
    folder: Path, entries: Sequence[Entry], tensors: Iterator[Tensor], advance: Advance, *, max_bytes: int
) -> None:
    """Writes `tensors`, which are in the order of `entries`, into files of at most `max_bytes`. A larger
    tensor gets a file of its own. If there are several files, also writes an index. After each tensor,
    calls `advance` with its size (bytes).
    """
    shards: list[list[Entry]] = [[]]
    num_bytes = 0  # size of the last shard
    for entry in entries:
        if shards[-1] and num_bytes + entry.num_bytes > max_bytes:
            shards.append([])
            num_bytes = 0
        shards[-1].append(entry)
        num_bytes += entry.num_bytes
    count = len(shards)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    names = names if count > 1 else [SINGLE]
    for name, shard in zip(names, shards, strict=True):
        # Written by hand, because the safetensors package needs the whole file in memory. The format
        # (https://github.com/huggingface/safetensors): header length (8 bytes, little-endian), header (JSON,
        # padded with spaces to a multiple of 8 bytes), then the values of all tensors.
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        start = 0
        for entry in shard:
            end = start + entry.num_bytes
            described = {"dtype": _NAMES[entry.dtype], "shape": list(entry.shape)}
            header[entry.name] = {**described, "data_offsets": [start, end]}
            start = end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for entry in shard:
                values = next(tensors)
                assert (tuple(values.shape), values.dtype) == (entry.shape, entry.dtype)
                file.write(values.detach().contiguous().flatten().view(torch.uint8).numpy().data)
                advance(entry.num_bytes)
                # freed before the next tensor is read, so that only one is in memory
                del values
    if count > 1:
        weight_map = {entry.name: name for name, shard in zip(names, shards, strict=True) for entry in shard}
        total = sum(entry.num_bytes for entry in entries)
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        write_json(folder / INDEX, index)


def copy_files(source: Path, target: Path, patterns: Sequence[str]) -> None:
    """Copies the files in `source` that match any of `patterns`."""
    for path in filter(Path.is_file, chain.from_iterable(map(source.glob, patterns))):
        shutil.copyfile(path, target / path.name)


def copy_tokenizer(source: Path, target: Path) -> bool:
    """Copies tokenizer files from `source`, a file or folder; returns whether tokenizer.json was copied."""
    files = {name: source / name for name in TOKENIZER_FILES}
    files = {"tokenizer.json": source} if source.is_file() else files
    found = {name: path for name, path in files.items() if path.is_file()}
    for name, path in found.items():
        target.mkdir(exist_ok=True)
        shutil.copyfile(path, target / name)
    # Without tokenizer_config.json, transformers guesses the class from the model and knows no end-of-text
    # token, which lm_eval needs to start a text.
    if "tokenizer.json" in found and "tokenizer_config.json" not in found:
        content = read_json(found["tokenizer.json"])
        known = (one for one in tokenizers.USUAL_EOD_TOKENS if tokenizers.token_id(content, one) is not None)
        eod = next(known, None)
        facts = {"tokenizer_class": "PreTrainedTokenizerFast"} | ({"eos_token": eod} if eod else {})
        write_json(target / "tokenizer_config.json", facts)
    return "tokenizer.json" in found


def as_in_documents(folder: Path, documents: DocumentTokens) -> dict[str, int]:
    """Makes a copied tokenizer use the EOS and optional BOS token of the training data; returns their ids."""
    content, config = (read_json(folder / name) for name in ("tokenizer.json", "tokenizer_config.json"))
    eod = None if documents.eod_id is None else tokenizers.token_text(content, documents.eod_id)
    named: dict[str, Any] = {} if eod is None else {"eos_token": eod}
    if tokenizers.ids_before_text(content) != ([] if documents.bos_id is None else [documents.bos_id]):
        bos = None if documents.bos_id is None else tokenizers.token_text(content, documents.bos_id)
        named |= {} if bos is None else {"bos_token": bos}
        # Keeps only the steps that trim offsets, and adds one that inserts the BOS, if there is one.
        old = content["post_processor"]
        steps = [] if old is None else [old] if old["type"] != "Sequence" else old["processors"]
        steps = [step for step in steps if step["type"] == "ByteLevel"]
        if bos is not None:
            text, begin = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": bos, "type_id": 0}}
            second = {"Sequence": {"id": "B", "type_id": 1}}
            tokens = {bos: {"id": bos, "ids": [documents.bos_id], "tokens": [bos]}}
            template = {"type": "TemplateProcessing", "single": [begin, text], "pair": [begin, text, second]}
            steps.append(template | {"special_tokens": tokens})
        one = next(iter(steps), None)
        content["post_processor"] = {"type": "Sequence", "processors": steps} if len(steps) > 1 else one
        write_json(folder / "tokenizer.json", content)
    if config.get("tokenizer_class") != "PreTrainedTokenizerFast":
        # Before transformers 5, some tokenizer classes followed these fields instead of the post-processor.
        named |= {"add_bos_token": documents.bos_id is not None, "add_eos_token": False}
    write_json(folder / "tokenizer_config.json", config | named)
    if (path := folder / "special_tokens_map.json").is_file():
        texts = {name: token for name, token in named.items() if isinstance(token, str)}
        write_json(path, read_json(path) | texts)
    ids = {"eos_token_id": documents.eod_id if eod is not None else None, "bos_token_id": documents.bos_id}
    return {name: index for name, index in ids.items() if index is not None}


def tokens_beyond(folder: Path, vocab_size: int) -> list[str]:
    """Added tokens with ids >= `vocab_size`, ordered by id; ValueError if any other token has such an id."""
    path = folder / "tokenizer.json"
    if not path.is_file() or (size := tokenizers.tokenizer_vocab_size(path)) <= vocab_size:
        return []
    added = {token["id"]: token["content"] for token in read_json(path).get("added_tokens") or []}
    beyond = range(vocab_size, size)
    if not added.keys() >= set(beyond):
        rule = f"has {size} tokens; tokens beyond vocab_size={vocab_size} (config.json) must be added tokens"
        raise unusable(path, rule, "use the tokenizer that belongs to the weights")
    return [added[token] for token in beyond]


def check_tokenizer(path: Path) -> None:
    """Raises ValueError unless `path` is a tokenizer.json or a folder with one."""
    if path.is_file():
        read_json(path)
    elif not (path / "tokenizer.json").is_file():
        fix = "specify a tokenizer.json, or a folder that contains one"
        raise unusable(f"TOKENIZER={path}", "has no tokenizer.json", fix)


def token_ids(folder: Path) -> dict[str, int | None]:
    """`bos_token_id`, `eos_token_id` and `pad_token_id` from the copied tokenizer files; None if missing."""
    # None is also written into config.json: for missing fields, transformers' classes have default ids.
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
        ids[field] = None if token is None else tokenizers.token_id(content, token)
    return ids


def kept_fields(folder: Path | None) -> dict[str, Any]:
    """Token ids, max_position_embeddings and architectures from the folder's config.json."""
    if folder is None or not (folder / "config.json").is_file():
        return {}
    fields = read_json(folder / "config.json")
    return {name: fields[name] for name in _KEPT if name in fields}


def as_trained(trained: Mapping[str, int], old: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `trained` without each field whose id is already in the field's list in `old`."""
    lists = {name: ids for name, ids in old.items() if isinstance(ids, list)}
    return {name: index for name, index in trained.items() if index not in lists.get(name, ())}


def write_generation_config(
    folder: Path, like: Path | None, fields: Mapping[str, Any], trained: Mapping[str, int]
) -> None:
    """Copies generation_config.json from `like` and sets its token ids from `trained`. If `like` has no such
    file, writes a new file with the token ids in `fields`.
    """
    if like is not None and (like / GENERATION).is_file():
        old = read_json(like / GENERATION)
        write_json(folder / GENERATION, old | as_trained(trained, old))
        return
    write_json(folder / GENERATION, {name: fields[name] for name in _TOKENS if fields.get(name) is not None})


def write_model_card(
    folder: Path, title: str, facts: str, *, source: Path, iteration: int, original: Path | None
) -> None:  # fmt: skip
    """Writes a README.md that names the model and its origin. For imported weights, the license and base
    model come from `original`, a folder with the model card and license files of the imported model.
    """
    fields, missing = [], "license, training data and evaluation"
    if original is not None:
        copy_files(original, folder, LEGAL_FILES)
        card, origin = original / "README.md", original / ORIGIN
        text = card.read_text("utf-8", "replace") if card.is_file() else ""
        fields = _CARD_FIELD.findall(text[4:].partition("\n---")[0]) if text.startswith("---\n") else []
        missing = missing.removeprefix("license, ") if any("license" in one for one in fields) else missing
        if origin.is_file():
            fields = [one for one in fields if not one.startswith("base_model")]
            repository = origin.read_text().strip().removeprefix("hf://").partition("@")[0]
            fields.append(f"base_model: {repository}")
    more = "".join(f"{field}\n" for field in fields)
    parent = source.resolve().parent  # checkpoints folder
    run = parent.parent.name if parent.name == "checkpoints" else parent.name
    files.write_atomically(
        folder / "README.md",
        f"""---
library_name: transformers
pipeline_tag: text-generation
{more}---

# {title}

A causal language model, {facts}.

Converted by `moe-exp convert to-hf` from iteration {iteration} of the run or folder `{run}`.
The model's authors should add its {missing}.
""",
    )
