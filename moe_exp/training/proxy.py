"""Trains a small model for `moe-exp mup`, in this process and without a run folder."""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, nn

from moe_exp.config import Config
from moe_exp.engine import optimizer_setup
from moe_exp.engine.fused_step import count_step
from moe_exp.engine.model import build_model
from moe_exp.engine.runtime import share_alone
from moe_exp.layers.router import Router
from moe_exp.training.microbatch import read_microbatch, run_schedule, weigh_microbatches
from moe_exp.training.samples import build_data, describe_documents

from megatron.core.transformer.transformer_layer import TransformerLayer


class Proxy:
    """Trains a small model with the model code, schedule, optimizer and samples of loop.py."""

    def __init__(self, config: Config):
        self.config, self._runtime = config, share_alone(config)
        self.model = build_model(config, self._runtime)
        self._optimizer = optimizer_setup.build_optimizer(config, self.model)
        self._scheduler = optimizer_setup.LearningRateScheduler(config, self._optimizer)
        optimizer_setup.set_megatron_hooks(self.model, self._optimizer)
        optimizer_setup.skip_steps_not_finite(self._optimizer, self.model)
        self._samples, _ = build_data(config)
        self._eod_id, _ = describe_documents(config)
        self._consumed_samples = 0

    def microbatches(self, count: int) -> list[dict[str, Any]]:
        """The next `count` micro-batches."""
        first = self._consumed_samples
        return [
            read_microbatch(self.config, self._runtime, self._samples, first, index, eod_id=self._eod_id)
            for index in range(count)
        ]

    def step(self, batch: dict[str, Any] | None = None) -> float:
        """Runs an iteration; returns its loss (nats per token). If `batch` is None, uses the next samples."""
        first, seq_len = self._consumed_samples, self.config.seq_len
        count, _, batch_size = optimizer_setup.next_batch(self.config, first, seq_len)
        microbatches = self.microbatches(count) if batch is None else [batch]
        weigh_microbatches(microbatches, self._runtime.groups.dp)
        self.model[0].zero_grad_buffer()
        self._optimizer.zero_grad()
        losses = run_schedule(self.config, self.model, microbatches, seq_len=seq_len)
        updated, norm, _ = self._optimizer.step()
        self._consumed_samples += batch_size
        if updated or (updated is None and count_step(self._optimizer, float(norm))):
            self._scheduler.step(increment=batch_size)
        total, num_counted = torch.stack(losses)[:, :2].sum(dim=0)
        return float(total / num_counted)


def coordinates(config: Config, num_steps: int) -> list[dict[str, tuple[float, float]]]:
    """Coordinate check: sizes of a model's activations during its first steps on one micro-batch.

    Returns:
        For each step from 0, a dict from module name to (mean absolute output, mean absolute change since
        step 0), averaged over layers. For the router and the output layer, the change is only the effect of
        updates to their own weights, because their initial weights are smaller in wider models.
    """
    proxy = Proxy(config)
    # always the same micro-batch, so that only the weights change between two recordings
    batch = proxy.microbatches(1)[0]
    recorder = _Recorder(proxy.model[0])
    first, _ = recorder.outputs(batch)
    steps = []
    for step in range(num_steps + 1):
        outputs, learned = recorder.outputs(batch)
        changes = {name: output - first[name] for name, output in outputs.items()} | learned
        sizes = {name: (output.abs().mean(), changes[name].abs().mean()) for name, output in outputs.items()}
        steps.append({name: (float(size), float(change)) for name, (size, change) in sizes.items()})
        if step < num_steps:
            proxy.step(batch)
    return steps


class _Recorder:
    """Records the outputs of a model's modules with forward hooks."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._found: dict[str, list[Tensor]] = defaultdict(list)
        self._learned: dict[str, list[Tensor]] = defaultdict(list)
        for path, module in model.named_modules():
            if path.endswith("embedding.word_embeddings"):
                self._record(module, "embedding")
            elif isinstance(module, TransformerLayer):
                self._record(module.self_attention, "attention")
                self._record(module.mlp, "experts" if hasattr(module.mlp, "router") else "dense MLP")
                self._record(module, "residual stream")
            elif isinstance(module, Router):
                self._record(module, "router logits", module.weight.detach().clone())
            elif path.endswith("output_layer"):
                self._record(module, "output layer", module.weight.detach().clone())

    @torch.no_grad()
    def outputs(self, batch: dict[str, Any]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Two dicts by name, [number of modules, ...]: outputs; output changes due to own weight updates."""
        self._found.clear()
        self._learned.clear()
        self._model.eval()
        self._model(batch["tokens"], batch["position_ids"], attention_mask=None)
        self._model.train()
        found = {name: torch.stack(outputs) for name, outputs in self._found.items()}
        return found, {name: torch.stack(outputs) for name, outputs in self._learned.items()}

    def _record(self, module: nn.Module, name: str, first_weight: Tensor | None = None) -> None:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            # training steps between two recordings run the same modules
            if self._model.training:
                return
            output = output.logits_TE if isinstance(module, Router) else output
            output = output[0] if isinstance(output, tuple) else output
            self._found[name].append(output.float().clone())  # later modules may overwrite it in place
            if first_weight is not None:
                change = (module.weight - first_weight).float()
                self._learned[name].append(nn.functional.linear(inputs[0].float(), change))

        module.register_forward_hook(hook)
