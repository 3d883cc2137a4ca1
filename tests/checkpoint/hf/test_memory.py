"""Conversions hold one file of safetensors and one layer in memory at most, however large the model is."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from helpers import ROOT
from moe_exp.checkpoint.hf.config_json import fields_of, settings_of
from moe_exp.checkpoint.hf.families import ARCHITECTURES
from moe_exp.checkpoint.hf.importing import _config
from moe_exp.checkpoint.hf.model_folder import Entry, ShardWriter
from moe_exp.checkpoint.hf.tensor_rules import pieces

LAYERS, SHARD_BYTES = 6, 60 * 10**6
FIELDS = {
    "architectures": ["MixtralForCausalLM"], "hidden_size": 512, "intermediate_size": 1024,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "num_key_value_heads": 2, "num_local_experts": 8,
    "num_experts_per_tok": 2, "vocab_size": 12800, "rms_norm_eps": 1e-5,
}  # fmt: skip
# Prints by how many bytes the peak of a call is over what the process held before.
PEAK = """
import sys
from pathlib import Path
from moe_exp.checkpoint.hf.exporting import to_hf
from moe_exp.checkpoint.hf.importing import from_hf

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
source, target, way = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
from_hf(source, target) if way == "from" else to_hf(source, target, max_shard_bytes=int(sys.argv[4]))
print(status("VmHWM") - before)
"""


def write_model(folder: Path) -> tuple[int, int]:
    """A random model of some hundred MB, drawn tensor by tensor; bytes of all, and of a layer."""
    architecture = ARCHITECTURES["MixtralForCausalLM"]
    config = _config(settings_of(FIELDS, architecture))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields_of(config, architecture)))
    entries = [
        Entry(part.name, part.shape, torch.float32)
        for piece in pieces(architecture.tensors, config, scales=True)
        for part in piece.theirs
    ]
    writer = ShardWriter(folder, entries, max_bytes=SHARD_BYTES)
    for entry in entries:
        writer.add(entry.name, torch.randn(entry.shape))
    writer.finish()
    return sum(entry.num_bytes for entry in entries), sum(
        entry.num_bytes for entry in entries if ".layers.0." in entry.name
    )


def peak(*arguments: object) -> int:
    command = [sys.executable, "-c", PEAK, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
def test_peak(tmp_path, record_property):
    total_bytes, layer_bytes = write_model(tmp_path / "hf")
    assert total_bytes > 5 * SHARD_BYTES
    largest = max(path.stat().st_size for path in (tmp_path / "hf").glob("*.safetensors"))
    limit = 1.3 * largest + layer_bytes
    read = peak(tmp_path / "hf", tmp_path / "ours", "from")
    written = peak(tmp_path / "ours", tmp_path / "back", "to", SHARD_BYTES)
    sizes = {"model": total_bytes, "layer": layer_bytes, "file": largest, "from_hf": read, "to_hf": written}
    record_property("bytes", sizes)
    print("MB:", {name: round(size / 1e6) for name, size in sizes.items()})
    assert read < limit
    assert written < limit
    for path in (tmp_path / "hf").glob("*.safetensors"):
        assert (tmp_path / "back" / path.name).read_bytes() == path.read_bytes()
