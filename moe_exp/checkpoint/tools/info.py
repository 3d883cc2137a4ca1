"""`moe-exp ckpt info`: describes checkpoints from their metadata, without reading tensors."""

import fnmatch
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_exp.checkpoint.format import folders, naming
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.config.choices import LOSS_STATE
from moe_exp.host.files import bytes_text
from moe_exp.host.progress import print_summary
from moe_exp.runs.run_folder import iterations

# Router buffers: not trained by the optimizer, and kept in fp32 by Megatron.
BUFFERS = (".router.expert_bias", ".router.local_tokens_per_expert", *LOSS_STATE)
_LAYOUT = ("tp", "pp", "vpp", "ep", "etp", "cp", "device")


def chosen(path: Path, iteration: int | None = None) -> Path:
    """Returns the iter_ folder of `iteration` (None: the newest) in `path`; ValueError if it is missing."""
    if iteration is None:
        return folders.one_checkpoint(path)
    name, folder = f"iteration={iteration}", folders.checkpoints_folder(path)
    if folder is None:
        fix = "omit --iteration, or specify a run folder"
        raise folders.unusable(name, f"{path} is not a checkpoints or run folder", fix)
    if iteration not in (there := iterations(folder)):
        fix = f"choose one of {', '.join(map(str, there)) or 'none'}"
        raise folders.unusable(name, f"{folder} has no such checkpoint", fix)
    return folders.existing(folders.iteration_folder(folder, iteration))


def iteration_of(folder: Path, common: Mapping[str, Any]) -> int:
    """Iteration from the checkpoint's state, else from the folder's name, else 0."""
    own = common.get("progress", {}).get("iteration", common.get("iteration"))
    return int(own) if own is not None else folders.iteration_of(folder)


def describe(folder: Path) -> dict[str, Any]:
    """Facts about an iter_ folder in display order (None: unknown). ValueError if the folder is damaged."""
    reader, manifest = CheckpointReader(folder), folders.Manifest.read(folder)
    common, weights = reader.common(), naming.logical_tensors(reader)
    config, progress = common.get("config") or {}, common.get("progress") or {}
    samples = progress.get("consumed_samples")
    facts = manifest.facts if manifest else {}
    files = [one for one in folder.iterdir() if one.is_file()]
    of_weights = naming.weight_keys(reader.tensors)
    styles = zip(("layers", "experts"), naming.single_styles(of_weights), strict=True)
    layout = {**config, **(common.get("layout") or {})}
    tokens = progress.get("consumed_tokens")  # older checkpoints only count samples
    if tokens is None and samples is not None and "seq_len" in config:
        tokens = samples * config["seq_len"]
    kept = naming.states(reader)
    if not kept and any(map(naming.is_optimizer, reader.tensors)):
        kept = ["in a layout-dependent format"]
    schedule = common.get("scheduler") or common.get("opt_param_scheduler")
    if isinstance(schedule, Mapping):
        schedule = {name: value for name, value in schedule.items() if isinstance(value, int | float | str)}
    else:
        schedule = None
    return {
        "path": str(folder),
        "iteration": iteration_of(folder, common),
        "written_by": "moe_exp" if "config" in common else "Megatron-LM or another program",
        "format": "torch_dist",
        "samples": samples,
        "tokens": tokens,
        "model": model_line(weights, config),
        "parameters": count_parameters(weights),
        "dtypes": dict(Counter(str(tensor.dtype).removeprefix("torch.") for tensor in weights.values())),
        "optimizer_setting": config.get("optimizer"),
        "optimizer": kept,
        "layout": {name: layout[name] for name in _LAYOUT if layout.get(name) is not None} or None,
        "styles": {name: "single" if is_single else "stacked" for name, is_single in styles},
        "num_bytes": sum(path.stat().st_size for path in files),
        "num_files": len(files),
        "tensor_bytes": sum(stored.num_bytes for stored in reader.tensors.values()),
        "checksums": manifest is not None,
        "valid_loss": facts.get("valid_loss"),
        "versions": common.get("versions") or facts.get("versions"),
        "schedule": schedule,
        "data": progress.get("sample_order"),
    }


def count_parameters(weights: Mapping[str, naming.LogicalTensor]) -> dict[str, int]:
    """Number of trained parameters in each group (see `naming.group_of`) and in `total`."""
    counts: Counter[str] = Counter()
    for name, tensor in weights.items():
        if not name.endswith(BUFFERS):
            counts[naming.group_of(name)] += math.prod(tensor.shape)
    return {**dict(counts.most_common()), "total": counts.total()}


def model_line(weights: Mapping[str, naming.LogicalTensor], config: Mapping[str, Any]) -> str:
    """One-line description of a model, from its weight shapes and `config`, which may be empty."""
    layers = {layer for name in weights if (layer := naming.layer_of(name)[0]) is not None}
    routers = [tensor.shape for name, tensor in weights.items() if name.endswith(".router.weight")]
    words = [f"{len(layers)} layers"]
    if embedding := weights.get("embedding.word_embeddings.weight"):
        words += [f"hidden size {embedding.shape[1]}", f"vocabulary {embedding.shape[0]}"]
    if "num_heads" in config:
        words.append(f"{config['num_heads']} heads")
    if routers:
        top = f" top-{config['topk']}" if "topk" in config else ""
        words.append(f"{routers[0][0]} experts{top} in {len(routers)} layers")
        second = [t for name, t in weights.items() if re.search(r"\.experts\.0\..*linear_fc2\.weight$", name)]
        words += [f"expert size {second[0].shape[1]}"] if second else []
    words += [str(config[name]) for name in ("activation", "normalization") if name in config]
    return ", ".join(words)


def describe_tensors(folder: Path, pattern: str = "*") -> list[dict[str, Any]]:
    """Tensors that match a shell pattern: name, shape, dtype, chunks, bytes. ValueError without a match."""
    reader = CheckpointReader(folder)
    found = [stored for key, stored in sorted(reader.tensors.items()) if fnmatch.fnmatchcase(key, pattern)]
    if not found:
        example = min(reader.tensors, default="no tensors")
        fix = f"use a pattern such as '*', which matches {example}"
        raise folders.unusable(f"tensors={pattern}", f"matches none of {len(reader.tensors)} tensors", fix)
    facts: list[dict[str, Any]] = []
    for stored in found:
        dtype = str(stored.dtype).removeprefix("torch.")
        facts.append({"name": stored.key, "shape": list(stored.shape), "dtype": dtype})
        facts[-1] |= {"num_chunks": len(stored.chunks), "num_bytes": stored.num_bytes}
    return facts


def describe_all(checkpoints: Path) -> list[dict[str, Any]]:
    """Lists checkpoints with iteration, size, state (judged by file sizes) and a flag for the latest."""
    latest, found = folders.latest_iteration(checkpoints), []
    for iteration in iterations(checkpoints):
        folder = folders.iteration_folder(checkpoints, iteration)
        num_bytes = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
        one = {"iteration": iteration, "num_bytes": num_bytes}
        found.append(one | {"state": _state(folder), "latest": iteration == latest})
    if latest is not None and latest not in iterations(checkpoints):
        found.append({"iteration": latest, "num_bytes": 0, "state": "missing", "latest": True})
    return found


def _state(folder: Path) -> str:
    try:
        manifest = folders.Manifest.read(folder)
    except ValueError as error:
        return f"damaged: {error}"
    if manifest is None:
        return "without checksums" if (folder / "metadata.json").is_file() else "damaged: no metadata.json"
    first = next(folders.damages(folder, manifest.files, checksums=False), None)
    return f"damaged: {first}" if first else "whole"


def print_info(report: Mapping[str, Any]) -> None:
    """Prints the known facts from `describe`."""
    parameters = dict(report["parameters"])
    total = parameters.pop("total")
    optimizer = ": ".join(filter(None, [report["optimizer_setting"], ", ".join(report["optimizer"])]))
    num_bytes = report["num_bytes"]
    rows = {
        "iteration": report["iteration"],
        "written by": report["written_by"],
        "samples": report["samples"],
        "tokens": report["tokens"],
        "model": report["model"],
        "parameters": f"{total:,} ({', '.join(f'{name} {count:,}' for name, count in parameters.items())})",
        "type of the weights": ", ".join(report["dtypes"]),
        "optimizer": optimizer if report["optimizer"] else "no",
        "saved at": _pairs(report["layout"]),
        "keys": _pairs(report["styles"]),
        "size": f"{num_bytes:,} bytes ({bytes_text(num_bytes)}) in {report['num_files']} files",
        "format": f"{report['format']}, {'with' if report['checksums'] else 'without'} checksums",
        "validation loss": report["valid_loss"],
        "versions": _pairs(report["versions"]),
        "schedule": _pairs(report["schedule"]),
        "data": _pairs(report["data"]),
    }
    print_summary(report["path"], {name: value for name, value in rows.items() if value is not None})


def _pairs(values: Mapping[str, Any] | None) -> str | None:
    return ", ".join(f"{name} {value}" for name, value in values.items()) if values else None


def print_checkpoints(checkpoints: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Prints the checkpoints of a folder, one per line."""
    print(f"{len(found)} checkpoint{'' if len(found) == 1 else 's'} in {checkpoints}")
    for one in found:
        latest = "  latest" if one["latest"] else ""
        print(f"  iteration {one['iteration']}  {one['num_bytes']:,} bytes  {one['state']}{latest}")


def print_tensors(tensors: Sequence[Mapping[str, Any]]) -> None:
    """Prints tensors, one per line, in columns separated by two spaces."""
    for one in tensors:
        size = f"{one['num_chunks']} chunks  {one['num_bytes']:,} bytes"
        print(f"{one['name']}  {one['shape']}  {one['dtype']}  {size}")
