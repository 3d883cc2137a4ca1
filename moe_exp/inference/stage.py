"""One pipeline stage of a model: token ids in, logits out, with or without a key/value cache.

Called by every rank. Shapes: B batch, S tokens, V vocabulary, D hidden.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.config import Config
from moe_exp.engine.runtime import Runtime
from moe_exp.layers.megatron.attention import KeyValueCache
from moe_exp.layers.megatron.documents import Documents, document_lengths, document_positions

from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


class Stage:
    """Runs this rank's part of a model together with the others.

    Args:
        config: from `layout.config_for_use`.
        rank: this one.
        model: from `loading.load_model`.
        eod_id: the token that ends a document; required with DOCUMENT_MASK.
    """

    def __init__(self, config: Config, rank: Runtime, model: GPTModel, eod_id: int | None = None):
        self.config, self.rank, self.model = config, rank, model
        self._eod_id = eod_id if config.document_mask else None
        self._caches: list[KeyValueCache] = []
        self._context: StaticInferenceContext | None = None
        self._positions = torch.empty(0)
        # The sequence is gathered before the output layer, as generation needs only one row.
        if model.post_process:
            model.output_layer.sequence_parallel = False

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits."""
        return bool(self.model.post_process)

    @property
    def writes(self) -> bool:
        """Whether this rank outputs the logits of its replica."""
        return self.is_last and self.rank.groups.tp.rank() == 0

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

    @property
    def _is_latent(self) -> bool:
        return bool(self.model.config.multi_latent_attention)

    @torch.no_grad()  # inference_mode would not reach the threads that compute experts
    def logits(self, tokens: Tensor, *, last_only: bool = False) -> Tensor | None:
        """Logits for the token after each of `tokens`, int64 [B, S], equal on all ranks of a replica: float32
        [B, S, V], with `last_only` [B, 1, V]; None before the last stage.
        """
        num_tokens = tokens.size(1)
        padding = -num_tokens % self.config.tp
        # Padding does not change logits before it: attention is causal, and no token is dropped.
        tokens = nn.functional.pad(tokens, (0, padding))
        documents = self._documents(tokens)
        tokens = tokens.to(self.rank.device)
        hidden = self._decode(self._input(tokens), tokens.size(1), documents)
        for cache in self._caches:
            cache.advance(num_tokens)
        if self._context is not None:
            self._context.increment_sequence_len_offset(num_tokens)
        if not self.is_last:
            self._send(hidden)
            return None
        if self.config.tp > 1:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.rank.groups.tp
            )
        hidden = hidden[num_tokens - 1 : num_tokens] if last_only else hidden[:num_tokens]
        return self._vocabulary(hidden)

    def _documents(self, tokens: Tensor) -> Documents | None:
        if self._eod_id is None:
            return None
        lengths = document_lengths(tokens.cpu(), self._eod_id)
        return Documents(lengths, document_positions(lengths).to(self.rank.device))

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

    def _send(self, hidden: Tensor) -> None:
        pp = self.rank.groups.pp
        torch.distributed.send(hidden.contiguous(), group=pp, group_dst=pp.rank() + 1)

    def _decode(self, hidden: Tensor, num_tokens: int, documents: Documents | None) -> Tensor:
        start = self._caches[0].length if self._caches else 0
        if not self.model.pre_process:
            self.model.set_input_tensor(hidden)
        rotary = None
        if not self._is_latent:
            rotary = self._rotary(start, start + num_tokens) if documents is None else self._angles(documents)
        out: Any = self.model.decoder(
            hidden,
            attention_mask=None,
            rotary_pos_emb=rotary,
            inference_context=self._context,
            packed_seq_params=documents,
        )
        return out

    def _rotary(self, start: int, end: int) -> Tensor:
        """Angles of positions `start` to `end - 1`: [end - start, 1, 1, d]."""
        if len(self._positions) < end:
            self._positions = self._angles(max(end, self.config.seq_len + self.config.tp))
        return self._positions[start:end]

    def _angles(self, positions: int | Documents) -> Tensor:
        angles: Any = self.model.rotary_pos_emb(positions)
        # YaRN also returns its factor, which attention has
        found: Tensor = angles[0] if isinstance(angles, tuple) else angles
        return found

    def _vocabulary(self, hidden: Tensor) -> Tensor:
        weight = self.model.shared_embedding_or_output_weight() if self.config.tie_embeddings else None
        logits, _ = self.model.output_layer(hidden, weight=weight, runtime_gather_output=True)
        return logits[..., : self.config.vocab_size].transpose(0, 1).float()
