"""Parts of a layer against the roofline of a device (Williams et al. 2009). No torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_exp.planner.costs.constants import TimeConstants
from moe_exp.planner.costs.flops import attended_tokens
from moe_exp.planner.costs.job import Job
from moe_exp.planner.costs.layer_time import MLP, MOE, layer_times
from moe_exp.planner.costs.products import Device
from moe_exp.planner.costs.traffic import exchange_seconds, skew_of
from moe_exp.planner.hardware import Hardware


@dataclass(frozen=True)
class Part:
    """A part of one layer, or the output layer: forward and backward of one micro-batch on one rank."""

    name: str
    flops: float  # operations, multiply and add counted as two
    num_bytes: float  # that a product reads and writes at least; 0 where there are no products
    seconds: float  # predicted
    bound: str  # compute, memory, links or host
    peak: float  # FLOP/s of the device in the type of the products

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.num_bytes if self.num_bytes else 0.0

    @property
    def peak_share(self) -> float:
        """Share of the peak that is reached."""
        return self.flops / self.seconds / self.peak if self.seconds else 0.0


def roofline(job: Job, hardware: Hardware, constants: TimeConstants) -> list[Part]:
    """Parts of a layer (with experts, where the model has them), and the output layer."""
    config = job.config
    device = Device(hardware, config.dtype, constants, num_processes=config.gpus_per_node)
    times = layer_times(job, device, constants)
    without = MLP if config.use_moe else MOE
    found = []
    for name, one in times.parts.items():
        flops, num_bytes, peak = _products(job, name, device)
        if name == "core":
            queries = config.mbsz * config.seq_len / config.cp * config.num_heads / config.tp
            keys = config.mbsz * config.seq_len * config.num_query_groups / config.tp
            channels = float(config.kv_channels)
            if config.multi_latent_attention:  # as `layer_time` has it
                channels = (channels + config.v_head_dim) / 2
                keys = queries * config.cp
            flops = 3.5 * 4 * queries * attended_tokens(config) / 2 * channels
            # queries, result, keys and values, read or written forward and backward
            num_bytes = 3 * device.num_bytes * channels * (2 * queries + 2 * keys)
        is_dense = num_bytes and flops / num_bytes > peak / hardware.memory_bytes_per_second
        bound = "compute" if is_dense else "memory"
        if name not in without and one.forward:
            found.append(Part(name, flops, num_bytes, one.forward + one.backward, bound, peak))
    if config.use_moe and config.ep * config.etp > 1:
        seconds = 4 * exchange_seconds(job, hardware, constants) * skew_of(job, hardware, constants)
        found.append(Part("exchange", 0.0, 0.0, seconds, "links", found[0].peak))
    host = times.host_moe if config.use_moe else times.host_dense
    if host:
        found.append(Part("host, beside them", 0.0, 0.0, host, "host", found[0].peak))
    return found


def _products(job: Job, name: str, device: Device) -> tuple[float, float, float]:
    """Operations, bytes and peak of the products of a part."""
    flops = num_bytes = 0.0
    peaks = device.hardware.dense_flops
    peak = peaks[job.config.dtype]
    for rows, columns, depth, number, is_fp8 in job.products.get(name, []):
        width = 1 if is_fp8 else device.num_bytes
        peak = peaks.get("fp8", peak) if is_fp8 else peak
        flops += 6 * rows * columns * depth * number
        num_bytes += 3 * width * number * (rows * depth + depth * columns + rows * columns)
    return flops, num_bytes, peak
