"""Checks of this machine before a run starts: devices, packages, port, files and folders.

Every function returns one line per problem (name, value, rule, fix) and creates no files.
"""

import importlib.metadata
import importlib.util
import os
import shutil
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from packaging.version import Version

from moe_exp.checkpoint.format.folders import is_converted, one_checkpoint
from moe_exp.checkpoint.remote import ahead_problem, find_there
from moe_exp.config import PREFETCHED_MICROBATCHES, Config, problem
from moe_exp.config.choices import EXPERT_BACKENDS, ExpertBackend
from moe_exp.config.setting_types import is_prepared_first, names_text
from moe_exp.data.own_text import needs_preparation, text_problems, validation_setting
from moe_exp.data.tokens import tokens
from moe_exp.data.tokens.manifests import check_ends, tokenizer_problems
from moe_exp.data.tokens.tokenizer import tokenizer_vocab_size
from moe_exp.data.tokens.tokens import Share, TokenFiles, parse_blend, parse_split
from moe_exp.host.devices import compute_capability, count_gpus, cuda_problem, device_name, torch_has_cuda
from moe_exp.host.files import bytes_text, expanded, is_url
from moe_exp.launch.source_checks import source_problems
from moe_exp.launch.torchrun_job import port_problem
from moe_exp.planner.costs.params import checkpoint_bytes
from moe_exp.planner.costs.saves import disk_use, keep_last_that_fits
from moe_exp.planner.estimate import memory_advice, predicted_on
from moe_exp.runs import run_folder
from moe_exp.runs.run_folder import LATEST, RunFolder, existing_place, iterations


def check_environment(config: Config) -> list[str]:
    """All problems that prevent a run from starting on this machine."""
    return check_machine(config) + (check_files(config) or run_folder.lock_problems(config))


def check_machine(config: Config) -> list[str]:
    """Checks devices, environment, packages and port; a dry run prints these problems as warnings."""
    return [
        *_devices(config),
        *(config.environment_problems(os.environ) if count_gpus() else ()),
        *_packages(config),
        *_prometheus(config),
        *_port(config),
        *_shared_memory(config),
    ]


def check_files(config: Config, *, with_space: bool = True) -> list[str]:
    """Checks data, tokenizer and folders on this machine. `with_space` adds a check of the disk space."""
    return [
        *data_problems(config),
        *_tokenizer(config),
        *(load_dir := list(_load_dir(config))),
        *([] if load_dir else source_problems(config)),
        *_data_of_converted(config),
        *_remote_dir(config),
        *_upcycle_from(config),
        *_data_dir(config),
        *(folder := run_folder.run_folder_problems(config)),
        *(disk_problems(config) if with_space and not folder else ()),
    ]


def _devices(c: Config) -> Iterator[str]:
    gpus = count_gpus()
    has = f"this host has {gpus} GPU{'s' if gpus > 1 else ''}"
    without = "" if not gpus or torch_has_cuda() else f"is a build without CUDA, but {has}"
    if gpus and (rule := without or cuda_problem()):
        fix = "install a torch build with CUDA" + ("" if without else " for this driver")
        fix += ", or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        yield problem("torch", importlib.metadata.version("torch"), rule, fix)
    if 0 < gpus < c.gpus_per_node:
        fix = f"set GPUS_PER_NODE to at most {gpus}, or CUDA_VISIBLE_DEVICES= to run on the CPU"
        yield c.problem("gpus_per_node", has, fix)
    if c.memory_snapshot and not gpus:
        rule = "records allocations on a CUDA device, but this host has none"
        fix = "leave MEMORY_SNAPSHOT empty; on a CPU, the trace of PROFILE_ITERS includes memory"
        yield c.problem("memory_snapshot", rule, fix)


def training_problem() -> str:
    """Error line if this Python lacks packages of the extra `train`, else ''."""
    needed = ("torch", "megatron", "safetensors")
    if not (missing := [name for name in needed if importlib.util.find_spec(name) is None]):
        return ""
    rule = f"{', '.join(missing)} not installed, but required for training"
    fix = 'pip install "moe-exp[train]", or in a checkout: pip install -c constraints.txt -e ".[train]"'
    return problem("python", sys.executable, rule, fix)


def _packages(c: Config) -> Iterator[str]:
    if lacking := training_problem():
        yield lacking
    has_te = importlib.util.find_spec("transformer_engine") is not None
    if c.impl == "te" and not has_te:
        fix = "pip install transformer-engine[pytorch], or set IMPL=local"
        yield c.problem("impl", "transformer_engine is not installed", fix)
    # auto has no entry: it selects a backend that can run here
    backend = EXPERT_BACKENDS.get(c.expert_backend, ExpertBackend())
    if missing := backend.missing():
        rule = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed"
        fix = f"{backend.install}, or set EXPERT_BACKEND=auto"
        yield c.problem("expert_backend", rule, fix)
    elif backend.modules and count_gpus() == 0:
        yield c.problem("expert_backend", _NO_CUDA, "set EXPERT_BACKEND=auto")
    yield from _kernels(c)
    # without the package or a GPU, Megatron would silently use bf16; the layer checks the GPU's generation
    if c.fp8 != "none" and not c.is_fp8_by_kernels and not has_te:
        fix = f"{EXPERT_BACKENDS['te'].install}, or set FP8=none"
        yield c.problem("fp8", "requires Transformer Engine, which is not installed", fix)
    elif c.fp8 != "none" and not c.is_fp8_by_kernels and not count_gpus():
        yield c.problem("fp8", _NO_CUDA, "set FP8=none")
    device = "GPU" if count_gpus() else "CPU"
    if c.optimizer == "adam8bit" and (reason := bitsandbytes_problem(device)):
        fix = f"pip install 'bitsandbytes>={BITSANDBYTES[device]}', or set OPTIMIZER=adam"
        yield c.problem("optimizer", reason, fix)
    if c.wandb_project and c.wandb_mode != "disabled" and importlib.util.find_spec("wandb") is None:
        fix = "pip install wandb, or set WANDB_MODE=disabled"
        yield c.problem("wandb_project", "wandb is not installed", fix)
    for name in c.trace_calls_in.split(",") if c.trace_calls_from else ():
        package = name.strip().partition(".")[0]  # finding a module inside would import it
        if not package.isidentifier() or importlib.util.find_spec(package) is None:
            rule, fix = "package not installed", "set it to packages or modules, separated by commas"
            yield problem("trace_calls_in", name, rule, fix)


def _prometheus(c: Config) -> Iterator[str]:
    path = Path(c.prometheus_file)
    if not c.prometheus_file or c.node_rank:  # rank 0 writes it
        return
    fix = "set it to a file NAME.prom in the folder of node_exporter's --collector.textfile.directory"
    if path.suffix != ".prom" or path.is_dir():
        yield c.problem("prometheus_file", "must be a *.prom file, as node_exporter requires", fix)
    elif not os.access(path.parent, os.W_OK | os.X_OK):
        rule = f"{path.parent} is {'not writable' if path.parent.is_dir() else 'not a folder'}"
        yield c.problem("prometheus_file", rule, fix)


_NO_CUDA = "requires a CUDA device, but this host has none"
OLDEST_GPU, OLDEST_TRITON = (8, 0), Version("3.4")  # as in layers/kernels/launch.py


def _kernels(c: Config) -> Iterator[str]:
    """Checks that Triton works if a setting is `triton`. Skips CPUs, where plain torch replaces Triton."""
    asked = [name for name in ("expert_backend", "cross_entropy") if getattr(c, name) == "triton"]
    if not asked or not count_gpus():
        return
    rule, fix, version = "", "", OLDEST_TRITON
    with suppress(importlib.metadata.PackageNotFoundError):  # a distribution of another name provides it
        version = Version(importlib.metadata.version("triton"))
    if importlib.util.find_spec("triton") is None:
        rule, fix = "triton is not installed", "pip install triton, or "
    elif version < OLDEST_TRITON:
        rule, fix = f"the kernels require triton {OLDEST_TRITON} or newer", "install a newer torch, or "
    elif compute_capability() < OLDEST_GPU:
        rule = f"the kernels require a GPU of compute capability {OLDEST_GPU[0]}.{OLDEST_GPU[1]} or newer"
    if rule:
        yield from (c.problem(name, rule, f"{fix}set {name.upper()}=auto") for name in asked)


# Oldest bitsandbytes releases with the 8-bit kernels that our Adam8bit needs
BITSANDBYTES = {"GPU": "0.45", "CPU": "0.50"}


def bitsandbytes_problem(device: str) -> str:
    """Reason why OPTIMIZER=adam8bit cannot run on `device` (GPU or CPU). Empty if this optimizer can run."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    if Version(found := importlib.metadata.version("bitsandbytes")) < Version(BITSANDBYTES[device]):
        return f"bitsandbytes {found} has no 8-bit kernels for a {device}"
    return ""


def _port(c: Config) -> Iterator[str]:
    if c.node_rank:
        return
    try:
        # like any listener, not blocked by TIME_WAIT connections of the last run
        socket.create_server(("", c.rendezvous_port)).close()
    except OSError as error:
        is_forbidden = isinstance(error, PermissionError)
        rule = "cannot be opened by this user" if is_forbidden else "is in use by another program"
        yield port_problem(c.rendezvous_port, rule, num_nodes=c.nnodes)


_SHARED_MEMORY = Path("/dev/shm")


def _shared_memory(c: Config) -> Iterator[str]:
    """Checks that /dev/shm (64 MB by default in containers) has space for the data loader's batches."""
    if not c.num_workers or not _SHARED_MEMORY.is_dir():
        return
    # a sample has seq_len + 1 tokens, each an int64
    microbatches = c.num_workers * PREFETCHED_MICROBATCHES + 1  # plus the current one
    needed_bytes = c.gpus_per_node * microbatches * c.mbsz * (c.seq_len + 1) * 8
    free_bytes = shutil.disk_usage(_SHARED_MEMORY).free
    if needed_bytes > free_bytes:
        needed, free = bytes_text(needed_bytes), bytes_text(free_bytes)
        rule = f"batches need {needed} of shared memory on this node, but {_SHARED_MEMORY} has {free} free"
        fix = f"set NUM_WORKERS=0, or start the container with --shm-size={-(-2 * needed_bytes // 2**20)}m"
        yield c.problem("num_workers", rule, fix)


def data_problems(c: Config) -> Iterator[str]:
    """Checks that the run's data are complete and long enough, and VOCAB_SIZE covers the vocabulary."""
    try:
        shares = parse_split(c.split)[:2]
    except ValueError:
        return  # reported by `Config.problems`
    if needs_preparation(c):
        yield from text_problems(c)
    # name, blend, sequence length, and the shares for training and validation, which must be long enough
    of_all: list[tuple[str, str, int, Sequence[Share | None]]] = [
        ("train_data", c.train_data, c.seq_len, shares),
        (validation_setting(c), c.valid_data, c.seq_len, [None, (0.0, 1.0)]),
    ]
    of_all += [("data_stages", one.train_data, one.seq_len, [shares[0], None]) for one in c.stages[1:]]
    prefixes: dict[str, None] = {}
    are_readable = True
    for name, blend, seq_len, parts in of_all:
        if is_prepared_first(blend):
            continue
        try:
            named = dict.fromkeys(prefix for _, prefix in parse_blend(blend)) if blend else {}
        except ValueError as error:
            yield f"{name.upper()}={error}"  # starts with the value and ends with the fix
            continue
        at_length = c.model_copy(update={"seq_len": seq_len})
        bad = [line for prefix in named for line in _prefix(at_length, name, prefix, parts)]
        yield from bad
        are_readable = are_readable and not bad
        prefixes |= named
    if prefixes and are_readable and (c.document_mask or c.eod_mask_loss):
        yield from check_ends(c, list(prefixes))[0]
    if are_readable and not c.allow_other_data and not any(_data_of_converted(c)):
        yield from tokenizer_problems(c)


def _prefix(c: Config, name: str, prefix: str, shares: Sequence[Share | None]) -> Iterator[str]:
    if not any(Path(f"{prefix}{suffix}").exists() for suffix in (".bin", ".idx")):
        rule = f"not found: no text at this path, and no token files {prefix}.bin and .idx"
        fix = "specify a text file or folder, or the path of token files without the suffix .bin"
        yield problem(name, prefix, rule, fix)
        return
    if reason := tokens.bin_idx_problem(prefix):
        fix = f"set {name.upper()} to the path of an existing .bin and .idx pair, without the suffix"
        yield problem(name, prefix, reason, fix)
        return
    files = TokenFiles(prefix)
    for part, share in zip(("training", "validation"), shares, strict=True):
        if share is None or (part == "validation" and not c.eval_interval):
            continue
        num_tokens = tokens.part_tokens(files, share, by_sequence=c.data_order == "megatron")
        if num_tokens <= c.seq_len:
            of = f" with SPLIT={c.split}" if c.split else ""
            needed = f"but a sample needs SEQ_LEN + 1 = {c.seq_len + 1}"
            rule = f"has {num_tokens} tokens for {part}{of}, {needed}"
            fix = "use more data or a smaller SEQ_LEN" + (", or change SPLIT" if c.split else "")
            yield problem(name, prefix, rule, fix)
    vocab_size = tokens.tokenizer_fact(tokens.manifest_of(prefix), "vocab_size")
    if vocab_size and vocab_size > c.vocab_size:
        rule = f"was tokenized with a vocabulary of {vocab_size} tokens, more than VOCAB_SIZE={c.vocab_size}"
        yield problem(name, prefix, rule, _vocabulary_fix(c, vocab_size))


def _vocabulary_fix(c: Config, size: int) -> str:
    if c.load_dir or RunFolder.of(c).checkpoints.exists():  # its embeddings have VOCAB_SIZE rows
        fix = "use the checkpoint's own tokenizer"
        return f"{fix}, or create a checkpoint with rows for added tokens (moe-exp convert from-hf)"
    return f"set VOCAB_SIZE to at least {size}"


def _tokenizer(c: Config) -> Iterator[str]:
    if c.prepend_bos and not any(map(names_text, (c.train_data, c.valid_data, *c.stage_blends))):
        fix = "omit PREPEND_BOS, or create the token files with moe-exp data tokenize --prepend-bos"
        rule = "requires text, not only token files, in TRAIN_DATA, VALID_DATA or DATA_STAGES"
        yield c.problem("prepend_bos", rule, fix)
    if not c.tokenizer:
        return
    if not Path(c.tokenizer).exists():
        fix = "set TOKENIZER to a folder with tokenizer.json, or to that file"
        yield c.problem("tokenizer", "not found", fix)
        return
    try:
        size = tokenizer_vocab_size(c.tokenizer)
    except ValueError as error:
        yield str(error)
        return
    if size > c.vocab_size:
        rule = f"has {size} tokens, more than VOCAB_SIZE={c.vocab_size}"
        yield c.problem("tokenizer", rule, _vocabulary_fix(c, size))


def _remote_dir(c: Config) -> Iterator[str]:
    if c.remote_dir and not is_url(c.remote_dir):
        yield c.problem("remote_dir", "must be a URL", "set it to a URL such as s3://bucket/runs")
    elif c.remote_dir.startswith("hf://"):
        rule = "cannot be an hf:// URL: hf:// commits each file separately"
        yield c.problem("remote_dir", rule, "set it to an s3:// or gs:// URL")
    elif c.remote_dir:
        try:
            yield from filter(None, [ahead_problem(c)])
        except (ValueError, ConnectionError) as error:
            yield f"REMOTE_DIR={error}"


def _load_dir(c: Config) -> Iterator[str]:
    if is_url(c.load_dir):
        try:
            find_there(c.load_dir)
        except (ValueError, ConnectionError) as error:
            yield f"LOAD_DIR={error}"
        return
    folder = Path(c.load_dir).expanduser()
    # in a checkpoints folder, a run folder, the folder of one iteration
    names = (LATEST, f"checkpoints/{LATEST}", "metadata.json")
    if c.load_dir and not any((folder / name).is_file() for name in names):
        fix = "set LOAD_DIR to a checkpoints folder, a run folder or the folder of one iteration"
        rule = f"is not a folder with checkpoints ({LATEST} not found)"
        yield c.problem("load_dir", rule, f"{fix}, or leave it empty")


def _data_of_converted(c: Config) -> Iterator[str]:
    """Checks that a run from converted weights sets TRAIN_DATA: the default corpus has another tokenizer."""
    for name in ("load_dir", "upcycle_from") if not c.train_data else ():
        with suppress(ValueError):  # reported by the checks of these settings
            value = getattr(c, name)
            if value and not is_url(value) and is_converted(one_checkpoint(expanded(value))):
                rule = f"{name.upper()}={value} has a different vocabulary than the embedded corpus"
                yield c.problem("train_data", rule, "set TRAIN_DATA to text or token files")


def _upcycle_from(c: Config) -> Iterator[str]:
    if c.upcycle_from and c.use_moe and not training_problem():
        from moe_exp.checkpoint.integrity import dense_source, find_source_here

        try:
            dense_source(c, find_source_here)
        except ValueError as error:
            yield from str(error).splitlines()


def _data_dir(c: Config) -> Iterator[str]:
    """Checks that DATA_DIR is writable if the run will create files in this folder when it starts."""
    folder, what = Path(c.data_dir), "the embedded corpus (TRAIN_DATA is empty)"
    if c.train_data and c.data_order == "megatron":
        what = "the indices of DATA_ORDER=megatron"
    elif needs_preparation(c):
        what = "token files from text or from an object store"
    elif c.train_data or any(folder.glob("python_*_torch_*_bpe*/manifest.json")):
        return
    place = existing_place(folder.absolute())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        rule = f"needed for {what}, but {place} is {'not writable' if place.is_dir() else 'a file'}"
        yield c.problem("data_dir", rule, "set DATA_DIR to a writable folder, or TRAIN_DATA to token files")


def memory_warnings(config: Config) -> list[str]:
    """Warns if a rank is predicted to need more memory than this host's GPUs have."""
    planned = predicted_on(device_name(), config) if count_gpus() else None
    if not planned or not planned[1].oom:
        return []
    hardware, expected = planned
    # both in GiB, as nvidia-smi shows memory
    needed, has = (f"{of / 2**30:.1f} GiB" for of in (expected.needed_bytes, expected.memory_bytes))
    rule = f"the planner predicts that a rank needs {needed} of memory, but {hardware.name} has {has}"
    advice = memory_advice(config, hardware, expected) or "a smaller model"
    fix = f"use more GPUs, a layout from moe-exp plan search, or {advice}"
    return [config.problem("gpus_per_node", rule, fix)]


def disk_warnings(config: Config) -> list[str]:
    """Warns if a resumed run has disk space for its next checkpoint, but not for all new checkpoints."""
    there, refused, rest = _room(config)
    return rest if there and not refused else []


def disk_problems(c: Config) -> list[str]:
    """Checks disk space: for one checkpoint if a run resumes or DISK_CHECK=one, else for all checkpoints."""
    there, refused, rest = _room(c)
    return refused if there else refused or rest


def _room(c: Config) -> tuple[list[int], list[str], list[str]]:
    """Returns the iterations of existing checkpoints, and two lists of problems. The first list reports that
    the disk lacks space for the next checkpoint. The second list reports that the disk lacks space for all
    new checkpoints.
    """
    if c.disk_check == "none" or not (c.save_at_end or c.save_interval):
        return [], [], []
    folder = RunFolder.of(c)
    try:
        place, there = existing_place(folder.path), iterations(folder.checkpoints)
        free_bytes = shutil.disk_usage(place).free
    except OSError:
        return [], [], []
    iteration = max(there, default=0)
    # the next save is at a multiple of SAVE_INTERVAL, or at the end
    interval = c.save_interval or c.train_iters
    next_save = min(c.train_iters, (iteration // interval + 1) * interval)
    until_end = disk_use(c, iteration=iteration, there=there)
    short = c.model_copy(update={"train_iters": next_save})
    next_bytes = disk_use(short, iteration=iteration, there=there).needed_bytes
    if c.disk_check == "one":
        next_bytes = min(until_end.needed_bytes, checkpoint_bytes(c))
    refused, rest = [], []
    has = f"{place} has {bytes_text(free_bytes)} free, but the run needs"
    larger_disk = "choose a RUN_DIR on a larger disk, or free some space"
    if free_bytes < next_bytes and (there or c.disk_check == "one"):
        what = " for the next checkpoint and the records until then" if there else ""
        fix = "free some space, or move the run to a larger disk and update RUN_DIR" if there else larger_disk
        refused.append(c.problem("run_dir", f"{has} {bytes_text(next_bytes)}{what}", fix))
    if free_bytes < until_end.needed_bytes and c.disk_check == "run":
        rule, fix = f"{has} {bytes_text(until_end.needed_bytes)}", larger_disk
        if until_end.num_new > 1:
            those = f" ({len(there)} exist already)" if there else ""
            new = f"{until_end.num_new} new checkpoints of {bytes_text(until_end.one_bytes)} each"
            rule += f" to reach iteration {c.train_iters}: {new}{those}, plus the run's records"
            by_hand = ", or set DISK_CHECK=one if you delete checkpoints yourself"
            if fitting := keep_last_that_fits(c, free_bytes, iteration=iteration, there=there):
                fix = f"set KEEP_LAST={min(fitting, 3)}, which fits, or {fix}{by_hand}"
            elif free_bytes >= checkpoint_bytes(c):
                fix += by_hand
        rest.append(c.problem("run_dir", rule, fix))
    return there, refused, rest
