"""Inference in a single process or a torchrun job: parallel layout, settings, model loading, and the pipeline
stage that turns token ids into logits, with or without a key/value cache.

The model has no optimizer and can use any parallel layout. Each rank reads its shards one by one.
Megatron-core is not used for reading, because it would unpickle arbitrary objects from the files.

Shapes: B batch, S tokens, V vocabulary, D hidden.
"""

import contextlib
import json
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from moe_exp.checkpoint.format import keys as formats
from moe_exp.checkpoint.format.folders import Manifest, damages, one_checkpoint
from moe_exp.checkpoint.format.naming import weight_keys
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.checkpoint.format.torch_dist import COMMON, METADATA, CheckpointReader
from moe_exp.checkpoint.state import sharding_metadata
from moe_exp.config import Config, raise_for
from moe_exp.engine import faults, runtime
from moe_exp.engine.backends import check_run
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.engine.runtime import Runtime
from moe_exp.host.devices import count_gpus, num_cores
from moe_exp.host.files import expanded
from moe_exp.host.progress import progress
from moe_exp.layers.megatron.attention import KeyValueCache
from moe_exp.layers.megatron.documents import Documents, document_lengths, document_positions

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module

T = TypeVar("T")
# Settings that only training uses, but whose checks could reject the inference layout and sizes.
_NO_TRAINING: dict[str, Any] = {
    "mbsz": 1, "rampup_batch_size": "", "upcycle_from": "", "upcycle_granularity": 1, "load_dir": "",
    "train_data": "unused", "valid_data": "", "split": "", "data_stages": "", "eval_interval": 0,
    "keep_best": 0, "dump_iters": "", "dump_ranks": "", "profile_ranks": "0", "recompute": "none",
    "token_rounding": 0, "distributed_optimizer": False, "overlap": "false", "wandb_project": "",
    "cuda_graph": "off", "recompute_modules": "", "offload_modules": "", "optimizer": "adam",
    "optimizer_state_dtype": "fp32", "main_params": "fp32", "grad_dtype": "fp32", "offload_optimizer": False,
    "mtp_num_layers": 0, "mtp_loss_coeff": 0.3,
}  # fmt: skip
# Our attention supports the key/value cache. Kernels depend on this machine, not on training's.
# Runs with FP8 save their weights in DTYPE.
_OUR_PARTS: dict[str, Any] = {
    "impl": "local", "expert_backend": "auto", "dispatcher": "auto", "fp8": "none",
    "cross_entropy": "megatron", "attention_backend": "auto",
}  # fmt: skip
_DROPLESS: dict[str, Any] = {"moe_type": "dmoe", "capacity_factor": 0.0, "min_capacity": 0}


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and nodes of a job; each field has the name of its setting."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    gpus_per_node: int = 0  # 0: as required by the parallel sizes
    threads_per_rank: int = 0  # 0: without GPUs, the node's cores divided by its ranks
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "localhost"
    master_port: int = 23456

    def settings(self, *, use_moe: bool) -> dict[str, Any]:
        """The layout as fields of Config, with unset values filled in."""
        expert = self.pp * (self.ep * self.etp if use_moe else 1)
        num_ranks = math.lcm(self.tp * self.pp, expert)
        per_node = self.gpus_per_node or -(-num_ranks // self.nnodes)
        threads = self.threads_per_rank or (0 if count_gpus() else max(1, num_cores() // per_node))
        return {**vars(self), "gpus_per_node": per_node, "vpp": None, "cp": 1, "threads_per_rank": threads}


def config_for_use(
    folder: Path, layout: Layout, *, dtype: str = "", capacity: bool = False,
    document_mask: bool | None = False, seq_len: int = 0,
) -> Config:  # fmt: skip
    """Settings for inference with the model of an iter_ folder; `dtype=""`, `document_mask=None` and
    `seq_len=0` keep the training values. With `capacity`, MOE_TYPE=moe drops tokens as in training.
    Otherwise, no token is dropped, and results do not depend on the other tokens in the batch. ValueError if
    the checkpoint is unusable, ConfigError if the layout does not fit the model.
    """
    saved = saved_config(folder)
    changes = layout.settings(use_moe=saved.use_moe) | _NO_TRAINING | _OUR_PARTS
    changes |= {} if capacity else _DROPLESS
    changes |= {} if document_mask is None else {"document_mask": document_mask}
    changes["gbsz"] = changes["nnodes"] * changes["gpus_per_node"]  # at least one row for each replica
    # rounded up, so that the TP ranks can divide it
    changes["seq_len"] = -(-(seq_len or saved.seq_len) // layout.tp) * layout.tp
    config = saved_config(folder, **changes, **({"dtype": dtype} if dtype else {}))
    raise_for(config.problems())
    return config


@dataclass(frozen=True)
class Request:
    """Settings of a job. The launcher passes them to the ranks in a JSON file."""

    checkpoint: str  # an iter_ folder, a checkpoints folder or a run folder
    _: KW_ONLY
    dtype: str = ""  # compute dtype; empty: the training's
    layout: Layout = field(default_factory=Layout)  # parallel layout

    @property
    def folder(self) -> Path:
        """The iter_ folder of the checkpoint."""
        return one_checkpoint(expanded(self.checkpoint))

    def config_for(self, folder: Path, **options: Any) -> Config:
        """Settings for inference with the layout and dtype of the request, see `config_for_use`."""
        return config_for_use(folder, self.layout, dtype=self.dtype, **options)

    @classmethod
    def read(cls: type[T], file: str) -> T:
        """Reads a request from a file that contains the result of `to_json`."""
        return TypeAdapter(cls).validate_json(Path(file).read_text(encoding="utf-8"))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def batch_size_of(saved: Config, seq_len: int, most: int, *, capacity: bool) -> int:
    """Default batch size: with `capacity`, training's MBSZ; else `most`, reduced to fit logits in 256 MB."""
    return saved.mbsz if capacity else max(1, min(most, (256 << 20) // (4 * seq_len * saved.vocab_size)))


def shared_batches(
    batches: Sequence[T], rank: Runtime, what: str, unit: str, size_of: Callable[[T], int]
) -> Iterator[tuple[T, bool]]:
    """Yields (batch, counts) for each batch of this rank. Batch i belongs to replica i modulo the number of
    replicas. `counts` is False if the batch repeats another replica's batch. Rank 0 shows a progress bar.
    """
    # Expert parallelism may span replicas, so all of them must run every step: replicas without a batch in
    # the last step repeat its first batch, which then does not count.
    replicas, total = rank.groups.dp, sum(map(size_of, batches))
    with progress(what, total, unit=unit) if rank.is_first else contextlib.nullcontext() as advance:
        for begin in range(0, len(batches), replicas.size()):
            step = batches[begin : begin + replicas.size()]
            counts = replicas.rank() < len(step)
            yield step[replicas.rank() if counts else 0], counts
            if advance is not None:
                advance(sum(map(size_of, step)))


def run_alone(config: Config, work: Callable[[Runtime], None]) -> None:
    """Runs `work` in this process as the only rank."""
    rank = runtime.start_alone(config)
    try:
        work(rank)
    finally:
        runtime.stop()


def run_rank(plan: Callable[[str], Any], work: Callable[[Any, Runtime], None]) -> None:
    """Runs `work` as a rank of a torchrun job. `plan` reads the file given on the command line. A ValueError
    is printed in one line and ends the process with exit code 1.
    """
    logging.basicConfig(format="%(message)s")
    logging.getLogger("moe_exp").setLevel(logging.ERROR)  # the launcher has logged the plan's messages
    planned = plan(sys.argv[1])
    logging.getLogger("moe_exp").setLevel(logging.INFO if os.environ.get("RANK") == "0" else logging.WARNING)
    with faults.stop_signal() as stop, faults.named_by_rank(stop):
        try:
            work(planned, runtime.start(planned.config))
        except ValueError as error:
            print(f"moe-exp: {error}", file=sys.stderr, flush=True)
            # skips the cleanup of process groups, which would wait for other ranks
            os._exit(1)
        runtime.stop()


def check_files(folder: Path) -> None:
    """Checks the weight files against the manifest; ValueError if a file differs."""
    manifest = Manifest.read(folder)
    if manifest is None:  # written by Megatron-LM
        return
    reader = CheckpointReader(folder)
    needed = {chunk.file for key in weight_keys(reader.tensors) for chunk in reader.tensors[key].chunks}
    needed |= {COMMON, METADATA}
    entries = {name: entry for name, entry in manifest.files.items() if name in needed}
    if damage := next(damages(folder, entries), ""):
        raise ValueError(f"{damage}. Fix: use another checkpoint.")


def load_model(config: Config, rank: Runtime, folder: Path) -> GPTModel:
    """Builds this rank's stage in eval mode with `folder`'s weights; ValueError if the weights do not fit."""
    settings = transformer_config(config)
    failures = check_run(config, rank)
    model = build_chunk(config, settings, rank, 0, initial_weights=False, kernel_failures=failures)
    model.to(rank.device)
    if config.dtype != "fp32":
        # converts to half precision in place, as for training
        Float16Module(settings, model)
    model.eval().requires_grad_(False)
    reader = CheckpointReader(folder, keep_bytes=1)
    state = formats.model_state(model, sharding_metadata(rank), reader)
    formats.check_tensors(state, reader, unused=("mtp.",))  # only training predicts further tokens
    formats.read_tensors(state, reader)
    return model


class Stage:
    """Runs this rank's part of a model. `config` is from `config_for_use`. DOCUMENT_MASK needs `eod_id`."""

    def __init__(self, config: Config, rank: Runtime, model: GPTModel, eod_id: int | None = None):
        self.config, self.rank, self.model = config, rank, model
        self._eod_id = eod_id if config.document_mask else None
        self._caches: list[KeyValueCache] = []
        self._context: StaticInferenceContext | None = None
        self._positions = torch.empty(0)
        self._is_latent = config.multi_latent_attention
        self.is_last = bool(model.post_process)  # computes logits
        self.writes = self.is_last and rank.groups.tp.rank() == 0  # outputs its replica's logits
        # `logits` gathers the sequence before the output layer, since generation only needs one row.
        if model.post_process:
            model.output_layer.sequence_parallel = False

    @contextlib.contextmanager
    def cache(self, num_positions: int) -> Iterator[None]:
        """Context in which each call of `logits` continues one sequence of at most `num_positions` tokens."""
        # Each call may pad its tokens to a multiple of TP.
        room = num_positions + self.config.tp
        cores = [layer.self_attention.core_attention for layer in self.model.decoder.layers]
        if self._is_latent:
            # Multi-latent attention rotates its keys itself, so Megatron's own cache can store them.
            self._context = StaticInferenceContext(max_batch_size=1, max_sequence_length=room)
        else:
            self._caches = [KeyValueCache(room) for _ in cores]
            for core, cache in zip(cores, self._caches, strict=True):
                core.cache = cache
        try:
            yield
        finally:
            self._caches, self._context = [], None
            for core in cores:
                core.cache = None

    @torch.no_grad()  # inference_mode would not apply to the threads that compute experts
    def logits(self, tokens: Tensor, *, last_only: bool = False) -> Tensor | None:
        """Next-token logits, float32 [B, S, V], or [B, 1, V] with `last_only`. Only the last stage returns
        them; other stages return None. `tokens`: int64 [B, S], the same on all ranks of a replica.
        """
        num_tokens = tokens.size(1)
        padding = -num_tokens % self.config.tp
        # Padding does not change the logits before it: attention is causal, and no token is dropped.
        tokens = nn.functional.pad(tokens, (0, padding))
        documents = None
        if self._eod_id is not None:
            lengths = document_lengths(tokens.cpu(), self._eod_id)
            documents = Documents(lengths, document_positions(lengths).to(self.rank.device))
        tokens = tokens.to(self.rank.device)
        # [S / TP, B, D]: computed by the embedding, or received from the previous stage
        pp = self.rank.groups.pp
        if self.model.pre_process:
            hidden: Tensor = self.model.embedding(input_ids=tokens, position_ids=None)
        else:
            shape = (tokens.size(1) // self.config.tp, tokens.size(0), self.config.hidden_size)
            hidden = torch.empty(shape, dtype=self.model.config.pipeline_dtype, device=self.rank.device)
            torch.distributed.recv(hidden, group=pp, group_src=pp.rank() - 1)
        hidden = self._decode(hidden, tokens.size(1), documents)
        for cache in self._caches:
            cache.advance(num_tokens)
        if self._context is not None:
            self._context.increment_sequence_len_offset(num_tokens)
        if not self.is_last:
            torch.distributed.send(hidden.contiguous(), group=pp, group_dst=pp.rank() + 1)
            return None
        if self.config.tp > 1:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.rank.groups.tp
            )
        hidden = hidden[num_tokens - 1 : num_tokens] if last_only else hidden[:num_tokens]
        weight = self.model.shared_embedding_or_output_weight() if self.config.tie_embeddings else None
        logits, _ = self.model.output_layer(hidden, weight=weight, runtime_gather_output=True)
        return logits[..., : self.config.vocab_size].transpose(0, 1).float()

    def _decode(self, hidden: Tensor, num_tokens: int, documents: Documents | None) -> Tensor:
        start = self._caches[0].length if self._caches else 0
        if not self.model.pre_process:
            self.model.set_input_tensor(hidden)
        rotary = None
        if not self._is_latent and documents is not None:
            rotary = self._angles(documents)
        elif not self._is_latent:  # angles of positions: [num_tokens, 1, 1, d]
            if len(self._positions) < (end := start + num_tokens):
                self._positions = self._angles(max(end, self.config.seq_len + self.config.tp))
            rotary = self._positions[start:end]
        out: Any = self.model.decoder(
            hidden,
            attention_mask=None,
            rotary_pos_emb=rotary,
            inference_context=self._context,
            packed_seq_params=documents,
        )
        return out

    def _angles(self, positions: int | Documents) -> Tensor:
        angles: Any = self.model.rotary_pos_emb(positions)
        # YaRN also returns its factor, which attention already applies
        found: Tensor = angles[0] if isinstance(angles, tuple) else angles
        return found
