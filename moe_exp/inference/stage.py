"""One pipeline stage of a model: loads its weights, and turns token ids into logits, with or without a
key/value cache. Called by every rank.

The weights of a checkpoint go into a model without optimizer, in any layout; each rank reads its own pieces,
one at a time, without megatron-core, which would unpickle whatever the files contain.

Shapes: B batch, S tokens, V vocabulary, D hidden.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.checkpoint.format.folders import Manifest, damages
from moe_exp.checkpoint.format.keys import (
    CheckpointKeys,
    check_tensors,
    model_state,
    sharded_tensors,
    zero_missing_biases,
)
from moe_exp.checkpoint.format.torch_dist import COMMON, METADATA, CheckpointReader
from moe_exp.checkpoint.state import sharding_metadata
from moe_exp.config import Config
from moe_exp.engine.backends import check_run
from moe_exp.engine.model import build_chunk, transformer_config
from moe_exp.engine.runtime import Runtime
from moe_exp.layers.megatron.attention import KeyValueCache
from moe_exp.layers.megatron.documents import Documents, document_lengths, document_positions

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module


def check_files(folder: Path) -> None:
    """Compares the files with weights with the manifest; ValueError if one differs."""
    manifest = Manifest.read(folder)
    if manifest is None:
        return  # written by Megatron-LM
    reader, keys = CheckpointReader(folder), CheckpointKeys.read(folder)
    needed = {chunk.file for key in keys.tensors for chunk in reader.tensors[key].chunks}
    needed |= {COMMON, METADATA}
    entries = {name: entry for name, entry in manifest.files.items() if name in needed}
    if damage := next(damages(folder, entries), ""):
        raise ValueError(f"{damage}. Fix: use another checkpoint.")


def load_model(config: Config, rank: Runtime, folder: Path) -> GPTModel:
    """This rank's stage with the weights of `folder`, in eval mode; ValueError if they do not fit."""
    settings = transformer_config(config)
    failures = check_run(config, rank)
    model = build_chunk(config, settings, rank, 0, initial_weights=False, kernel_failures=failures)
    model.to(rank.device)
    if config.dtype != "fp32":
        Float16Module(settings, model)  # converts to half precision in place, as for training
    model.eval().requires_grad_(False)
    keys, reader = CheckpointKeys.read(folder), CheckpointReader(folder, keep_bytes=1)
    state = model_state(model, sharding_metadata(rank), keys)
    check_tensors(state, keys, folder)
    zero_missing_biases(model, keys)
    for shard in sharded_tensors(state):
        sizes = (1,) * shard.prepend_axis_num + tuple(shard.local_shape)
        values = reader.read(shard.key, shard.global_offset, sizes)
        # `data` is a view of the parameter, even if it consists of several shards
        shard.data.copy_(values.view(shard.data.shape))
    return model


class Stage:
    """Runs this rank's part of a model together with the others, by settings of `jobs.config_for_use`.
    `eod_id`: the token that ends a document; required with DOCUMENT_MASK.
    """

    def __init__(self, config: Config, rank: Runtime, model: GPTModel, eod_id: int | None = None):
        self.config, self.rank, self.model = config, rank, model
        self._eod_id = eod_id if config.document_mask else None
        self._caches: list[KeyValueCache] = []
        self._context: StaticInferenceContext | None = None
        self._positions = torch.empty(0)
        self._is_latent = config.multi_latent_attention
        self.is_last = bool(model.post_process)  # it computes logits
        self.writes = self.is_last and rank.groups.tp.rank() == 0  # the logits of its replica
        # The sequence is gathered before the output layer, as generation needs only one row.
        if model.post_process:
            model.output_layer.sequence_parallel = False

    @contextlib.contextmanager
    def cache(self, num_positions: int) -> Iterator[None]:
        """Inside, each call of `logits` continues one sequence, of at most `num_positions` tokens."""
        # the last tokens may be padded to a multiple of TP
        room = num_positions + self.config.tp
        cores = [layer.self_attention.core_attention for layer in self.model.decoder.layers]
        if self._is_latent:
            # multi-latent attention rotates its keys before Megatron's context stores them
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

    @torch.no_grad()  # inference_mode would not reach the threads that compute experts
    def logits(self, tokens: Tensor, *, last_only: bool = False) -> Tensor | None:
        """Logits for the token after each of `tokens`, int64 [B, S], equal on all ranks of a replica: float32
        [B, S, V], with `last_only` [B, 1, V]; None before the last stage.
        """
        num_tokens = tokens.size(1)
        padding = -num_tokens % self.config.tp
        # Padding does not change logits before it: attention is causal, and no token is dropped.
        tokens = nn.functional.pad(tokens, (0, padding))
        documents = None
        if self._eod_id is not None:
            lengths = document_lengths(tokens.cpu(), self._eod_id)
            documents = Documents(lengths, document_positions(lengths).to(self.rank.device))
        tokens = tokens.to(self.rank.device)
        hidden = self._decode(self._input(tokens), tokens.size(1), documents)
        for cache in self._caches:
            cache.advance(num_tokens)
        if self._context is not None:
            self._context.increment_sequence_len_offset(num_tokens)
        if not self.is_last:
            pp = self.rank.groups.pp
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

    def _input(self, tokens: Tensor) -> Tensor:
        """[S / TP, B, D]: the embedding, or received from the previous stage."""
        if self.model.pre_process:
            hidden: Tensor = self.model.embedding(input_ids=tokens, position_ids=None)
            return hidden
        pp = self.rank.groups.pp
        shape = (tokens.size(1) // self.config.tp, tokens.size(0), self.config.hidden_size)
        hidden = torch.empty(shape, dtype=self.model.config.pipeline_dtype, device=self.rank.device)
        torch.distributed.recv(hidden, group=pp, group_src=pp.rank() - 1)
        return hidden

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
        # YaRN also returns its factor, which attention has
        found: Tensor = angles[0] if isinstance(angles, tuple) else angles
        return found
