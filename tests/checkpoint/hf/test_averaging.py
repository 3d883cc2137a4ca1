"""`moe-exp ckpt average` of Hugging Face folders: by plain torch, in any files, in little memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from helpers import ROOT
from moe_exp.checkpoint.hf.averaging import average_folders
from moe_exp.checkpoint.hf.shard_writer import Entry, ShardWriter
from moe_exp.cli import main

CONFIG = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 8, "eos_token_id": 3,
    "torch_dtype": "bfloat16", "rope_theta": 10000.0, "sliding_window": None,
}  # fmt: skip


def drawn(seed: int, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Values whose bits a sum could lose are among them."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed.weight": (7, 8),
        "layers.0.w1.weight": (6, 8),
        "layers.0.w2.weight": (8, 6),
        "norm": (8,),
    }
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    tensors["norm"] = tensors["norm"].float()
    tensors["norm"][:5] = torch.tensor([-0.0, 0.0, 1e-42, 3e38, float("inf")])
    return tensors


def write_folder(folder: Path, tensors: dict[str, Tensor], *, max_bytes: int = 10**9, **config: Any) -> Path:
    folder.mkdir(parents=True)
    entries = [Entry(name, tuple(one.shape), one.dtype) for name, one in tensors.items()]
    writer = ShardWriter(folder, entries, max_bytes=max_bytes)
    for name, values in tensors.items():
        writer.add(name, values)
    writer.finish()
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [], "from": folder.name}))
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.3, 0.7], [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_of_a_folder_with_itself_it_is_the_folder_bit_for_bit(weights, dtype, tmp_path):
    source = write_folder(tmp_path / "one", drawn(0, dtype))
    average_folders([source] * len(weights), tmp_path / "out", weights)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        source / "model.safetensors"
    ).read_bytes()


def test_by_plain_torch_from_folders_in_several_files(tmp_path, capsys):
    """In the type of the first; added in fp64 and rounded once."""
    all_drawn = [drawn(0), drawn(1, torch.float32), drawn(2)]
    sources = [write_folder(tmp_path / "a", all_drawn[0])]
    sources += [write_folder(tmp_path / "b", all_drawn[1], max_bytes=200, torch_dtype="float32")]
    sources += [write_folder(tmp_path / "c", dict(reversed(all_drawn[2].items())), max_bytes=100)]
    (sources[0] / "generation_config.json").write_text('{"eos_token_id": 3}')
    (sources[0] / "modeling_own.py").write_text("raise SystemExit")
    command = ["ckpt", "average", *map(str, sources), str(tmp_path / "out"), "--weights", "1,2,1"]
    assert main(command) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:2]] == [["0.2500", str(sources[0])], ["0.5000", str(sources[1])]]
    found = tensors_of(tmp_path / "out")
    assert found.keys() == all_drawn[0].keys()
    for name, values in found.items():
        parts = zip([0.25, 0.5, 0.25], all_drawn, strict=True)
        expected = sum(weight * one[name].double() for weight, one in parts)
        assert values.dtype == all_drawn[0][name].dtype
        assert torch.equal(values, expected.to(values.dtype)), name
    for name in ("config.json", "tokenizer.json", "generation_config.json", "modeling_own.py"):
        assert (tmp_path / "out" / name).read_bytes() == (sources[0] / name).read_bytes()
    facts = json.loads((tmp_path / "out" / "provenance.json").read_text())
    assert [one["weight"] for one in facts["averaged_from"]] == [0.25, 0.5, 0.25]
    assert [one["folder"] for one in facts["averaged_from"]] == [str(source) for source in sources]
    assert "torch" in facts["versions"]
    assert main(command) == 1
    assert f"DST={tmp_path}/out: is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("tensors", "config", "line"),
    [
        ({}, {"rope_theta": 5e5}, "{b}: config.json has rope_theta=500000.0, that of {a} rope_theta=1"),
        ({}, {"model_type": "olmoe"}, "{b}: config.json has model_type=olmoe, that of {a} model_type=mi"),
        ({"norm": torch.zeros(9)}, {}, "{b}: has norm of shape [9], {a} of shape [8]."),
        ({"more": torch.zeros(9)}, {}, "{b}: has more of shape [9], {a} of shape None."),
    ],
)  # fmt: skip
def test_folders_of_two_models(tensors, config, line, tmp_path, capsys):
    a = write_folder(tmp_path / "a", drawn(0))
    b = write_folder(tmp_path / "b", drawn(1) | tensors, **config)
    assert main(["ckpt", "average", str(a), str(b), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert "SRC=" + line.format(a=a, b=b) in error and error.count("\n") == 1 and " Fix: " in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_what_is_not_averaged(tmp_path, capsys):
    a = write_folder(tmp_path / "a", drawn(0))
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    out = str(tmp_path / "out")
    for command, line in [
        ([str(a), str(tmp_path / "run"), out], "/run: is no Hugging Face folder, as others are. Fix: "),
        ([str(a), out, "--ema"], "--ema is of checkpoints, and this is a Hugging Face folder. Fix: "),
        ([str(a), out, "--last", "2"], "--last is of checkpoints, and this is a Hugging Face folder. Fix: "),
    ]:  # fmt: skip
        assert main(["ckpt", "average", *command]) == 1
        assert line in capsys.readouterr().err
    header = b'{"w":{"dtype":"F8_E4M3","shape":[1],"data_offsets":[0,1]}}'
    quantized = shutil.copytree(a, tmp_path / "quantized") / "model.safetensors"
    quantized.write_bytes(len(header).to_bytes(8, "little") + header + b"\0")
    assert main(["ckpt", "average", str(quantized.parent), out]) == 1
    assert "quantized: w has the type F8_E4M3, which is not averaged. Fix: " in capsys.readouterr().err


PEAK = """
import sys
from pathlib import Path
from moe_exp.checkpoint.hf.averaging import average_folders

def status(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))

before = status("VmRSS")
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
sources = [Path(name) for name in sys.argv[2:]]
average_folders(sources, Path(sys.argv[1]), [1 / len(sources)] * len(sources))
print(status("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize("number", [1, 3])
def test_peak_under_1_3_tensors_for_each_folder(number, tmp_path, record_property):
    size = 96 << 20
    tensors = {f"w{n}": torch.randn(size // 4) for n in range(4)}
    sources = [write_folder(tmp_path / f"{n}", tensors) for n in range(number)]
    command = [sys.executable, "-c", PEAK, str(tmp_path / "out"), *map(str, sources)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    share = int(done.stdout.split()[-1]) / size / number
    record_property("tensors for each folder", share)
    assert share < 1.3
