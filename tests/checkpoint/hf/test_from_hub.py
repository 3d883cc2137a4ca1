"""`moe-exp convert from-hf` of a model on a small hub on 127.0.0.1, and what travels with the weights."""

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

pytest.importorskip("huggingface_hub")

from helpers.hf.tiny_models import save_tokenizer, tiny_folder, weights_of
from helpers.servers.hub import Fault, HubServer, leave_host_settings
from moe_exp.cli import main
from moe_exp.data.download.sources import model_source

NAME = "Qwen/Tiny"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
CARD = """---
library_name: transformers
license: other
license_name: tiny-license
license_link: >-
  https://example.org/LICENSE
base_model:
- Qwen/Tiny-Base
tags: [license]
---
# Tiny

license: not this line
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a repository has: weights in several files, all that describes a model, and pickles."""
    folder = tiny_folder(tmp_path_factory.mktemp("hub") / "v1", "qwen3", max_shard_size="20KB")
    save_tokenizer(folder, 256, 0)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20}))
    (folder / "LICENSE.txt").write_text("as you like")
    (folder / "NOTICE").write_text("by nobody")
    (folder / "README.md").write_text(CARD)
    for name in ("pytorch_model.bin", "consolidated.safetensors", "onnx/model.json", "training.py"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("not needed")
    return folder


@pytest.fixture
def server(model, tmp_path, monkeypatch):
    leave_host_settings(monkeypatch, tmp_path / "hf_home", "TRANSFORMERS_")
    (tmp_path / "home").mkdir()
    monkeypatch.chdir(tmp_path / "home")
    with HubServer(model, repository=NAME) as running:
        monkeypatch.setenv("HF_ENDPOINT", running.url)
        yield running


def files(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but the settings, which have its path, and what tells the origin."""
    found = (path for path in folder.rglob("*") if path.is_file())
    named = {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}
    apart = ("settings.env", "origin.txt", "common.pt", "manifest.json", "metadata")
    return {name: content for name, content in named.items() if not name.endswith(apart)}


def convert(*words: str) -> int:
    return main(["convert", "from-hf", *words])


@pytest.mark.parametrize("source", [f"hf://{NAME}", NAME])
def test_equal_to_a_local_folder(source, server, model, capsys):
    assert convert(source, "ours") == 0
    out = capsys.readouterr().out
    origin = f"hf://{NAME}@{server.main}"
    assert f"ours: Qwen3ForCausalLM, fp32, from {origin}\n" in out
    assert Path("ours/huggingface/origin.txt").read_text() == f"{origin}\n"
    assert convert(str(model), "expected") == 0
    assert files(Path("ours")) == files(Path("expected")) and len(files(Path("ours"))) > 8
    assert not [path for path in server.downloads() if re.search(r"\.bin|consolidated|onnx|\.py", path)]
    names = {path.name for path in Path().iterdir()}
    assert names - {"ours", "expected"} == {"Qwen--Tiny@main", ".Qwen--Tiny@main.lock"}
    server.requests.clear()
    assert convert(source, "again", "--dtype", "bf16") == 0
    assert server.requests == []  # of the kept download


def test_revision_and_offline(server, model, tmp_path, capsys, monkeypatch):
    first, newer = server.main, shutil.copytree(model, tmp_path / "v2")
    (newer / "NOTICE").write_text("a newer one")
    server.move_main(newer)
    assert convert(f"hf://{NAME}@{first}", "old") == convert(f"hf://{NAME}@main", "new") == 0
    origins = [Path(name, "huggingface/origin.txt").read_text() for name in ("old", "new")]
    assert origins == [f"hf://{NAME}@{first}\n", f"hf://{NAME}@{server.main}\n"]
    notices = [Path(name, "huggingface/NOTICE").read_text() for name in ("old", "new")]
    assert notices == ["by nobody", "a newer one"]
    capsys.readouterr()
    assert convert(f"hf://{NAME}@v9", "none") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        f"revision=v9: not found in {NAME}. Fix: use main or a revision listed on {server.url}/{NAME}" in line
    )
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert convert(NAME, "offline") == 0  # from the kept download
    capsys.readouterr()
    assert convert(f"{NAME}@v9", "none") == 1
    assert "HF_HUB_OFFLINE=1: the files of Qwen/Tiny have not been listed" in capsys.readouterr().err


def test_an_interrupted_download_resumes(server, model, capsys, monkeypatch):
    name = sorted(path.name for path in model.glob("model-*.safetensors"))[-1]
    server.faults = [Fault(status=500, where=name, times=99)]
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    assert convert(NAME, "ours") == 1
    assert "keeps failing" in capsys.readouterr().err
    assert {path.name for path in Path().iterdir()} == {"Qwen--Tiny@main.partial", ".Qwen--Tiny@main.lock"}
    server.faults.clear()
    server.requests.clear()
    assert convert(NAME, "ours") == 0
    fetched = [path for path in server.downloads() if "safetensors" in path and "index" not in path]
    assert len(fetched) == 1 and name in fetched[0]
    assert convert(str(model), "expected") == 0
    assert files(Path("ours")) == files(Path("expected"))


@pytest.mark.parametrize("case", ["missing", "gated", "unsupported", "pickles", "name", "target"])
def test_errors_are_one_line_and_leave_nothing(case, server, model, tmp_path, capsys):
    source, error = f"hf://{NAME}", ""
    if case == "missing":
        source, error = "Qwen/Tinny", f"source=Qwen/Tinny: no such public model at {server.url}. Fix: check"
    elif case == "gated":
        server.token = "hf_right"
        rule = "access requires its owner's permission. Fix: accept the license on"
        error = f"source={NAME}: {rule} {server.url}/{NAME}"
    elif case == "unsupported":
        other = shutil.copytree(model, tmp_path / "other")
        (other / "config.json").write_text(json.dumps({"architectures": ["JambaForCausalLM"]}))
        server.move_main(other)
        error = "config.json: architectures=JambaForCausalLM: is not supported"
    elif case == "pickles":
        (tmp_path / "other").mkdir()
        for name in ("config.json", "pytorch_model.bin", "consolidated.safetensors"):
            shutil.copy(model / name, tmp_path / "other")
        server.move_main(tmp_path / "other")
        error = f"{NAME} at main: has no model*.safetensors. Fix: choose another model, or load it with"
    elif case == "name":
        source, error = "hf://Tiny", "SRC=hf://Tiny: is not the name of a model. Fix: use hf://OWNER/NAME"
    else:
        Path("x").mkdir()
        Path("x/y").touch()
        error = "DST=x: already exists"
    assert convert(source, "x" if case == "target" else "a/b/ours") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert error in line
    assert not server.downloads("safetensors")
    assert [path.name for path in Path().iterdir()] == (["x"] if case == "target" else [])


def test_a_path_is_no_name_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models/Qwen").mkdir(parents=True)
    for path in ("models/Qwen", "./models/Qwen3", "../x", "/a/b", "a/b/c", "model", "~/x"):
        assert model_source(path) is None
    assert model_source("hf://models/Qwen").repository == "models/Qwen"
    assert model_source("models/Qwen3@refs/pr/1").revision == "refs/pr/1"


def test_what_describes_the_model_travels(server, model):
    """There and back, with license, chat templates of all kinds and generation settings."""
    for source, target in ((f"hf://{NAME}", "from_hub"), (str(model), "from_folder")):
        assert convert(source, target) == main(["convert", "to-hf", target, f"{target}_back"]) == 0
        back = Path(f"{target}_back")
        for name in ("LICENSE.txt", "NOTICE", "chat_template.jinja", "chat_template.json"):
            assert (back / name).read_bytes() == (model / name).read_bytes()
        assert json.loads((back / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
        generation = json.loads((back / "generation_config.json").read_text())
        assert generation == {"temperature": 0.6, "top_k": 20}
        card = (back / "README.md").read_text()
        fields = yaml.safe_load(card.split("---\n")[1])
        assert fields["license"] == "other" and fields["license_name"] == "tiny-license"
        assert fields["license_link"] == "https://example.org/LICENSE" and "tags" not in fields
        assert fields["base_model"] == (NAME if target == "from_hub" else ["Qwen/Tiny-Base"])
        assert "not this line" not in card and "should add its training data" in card
        assert weights_of(back).keys() == weights_of(Path("Qwen--Tiny@main")).keys()
