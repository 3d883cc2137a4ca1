"""Every command of the recipes for published models, in order, with a tiny model of the same class."""

import json
import math
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from helpers import ROOT
from helpers.hf.tiny_models import their_loss, tiny_folder
from helpers.ranks import free_port
from moe_exp.data.tokens.tokenizer_training import train_bpe
from moe_exp.inference.evaluate import EvalRequest, plan_evaluation

VOCAB = 512
# Page to class of transformers, its name in tiny_models, and changes of the tiny model.
PAGES = {
    "qwen3-30b-a3b": ("Qwen3MoeForCausalLM", "qwen3_moe", {"mlp_only_layers": []}),
    "olmoe-1b-7b": ("OlmoeForCausalLM", "olmoe", {}),
    "gpt-oss-20b": ("GptOssForCausalLM", "gpt_oss", {"rope_parameters": None}),
}
# What the commands after the plan get instead of the page's numbers.
TINY = {
    "GPUS_PER_NODE=8": "GPUS_PER_NODE=2", "EP=8": "EP=2", "--ep 8": "--ep 2", "GBSZ=64": "GBSZ=8",
    "MBSZ=4": "MBSZ=2", "SEQ_LEN=4096": "SEQ_LEN=64", "TRAIN_ITERS=3815": "TRAIN_ITERS=20",
    "WARMUP_ITERS=100": "WARMUP_ITERS=2 LR=1e-2 MIN_LR=1e-3 LOG_INTERVAL=5", "_INTERVAL=500": "_INTERVAL=10",
    "SPLIT=99,1": "SPLIT=90,10",
}  # fmt: skip


@dataclass
class Walk:
    """Runs a page's commands one by one in `folder`, with the variables that the page has exported."""

    folder: Path
    page: str
    exported: list[str] = field(default_factory=list)

    def commands(self) -> list[str]:
        """Commands of the bash blocks and the Python example, in order; none of those for more nodes."""
        blocks = re.findall(r"```(bash|python)\n(.*?)```", self.page.partition("## More nodes")[0], re.DOTALL)
        found = []
        for language, text in blocks:
            found += (
                [f"python - <<'END'\n{text}END"]
                if language == "python"
                else text.replace("\\\n", " ").strip().splitlines()
            )
        return found

    def run(self, command: str) -> str:
        python = shlex.quote(sys.executable)
        functions = f'python() {{ {python} "$@"; }}\nmoe-exp() {{ {python} -m moe_exp "$@"; }}\n'
        program = "\n".join(["set -e", functions, *self.exported, command])
        if not command.startswith("moe-exp plan"):
            for theirs, ours in TINY.items():
                program = program.replace(theirs, ours)
        variables = os.environ | {"COLUMNS": "200", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
        options = {"cwd": self.folder, "env": variables, "capture_output": True, "text": True, "timeout": 300}
        done = subprocess.run(["bash", "-c", program], **options)
        assert done.returncode == 0, command + done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout


def make_model(folder: Path, name: str, changes: dict, texts: list[str]) -> None:
    changes = {"vocab_size": VOCAB, "num_hidden_layers": 2, "max_position_embeddings": 4096} | changes
    tiny_folder(folder, name, dtype=torch.bfloat16, changes=changes)
    train_bpe(texts, VOCAB).save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", PAGES)
def test_every_command_of_the_recipe_runs(name, tmp_path, monkeypatch):
    architecture, tiny, changes = PAGES[name]
    walk = Walk(tmp_path, (ROOT / "docs" / "recipes" / f"{name}.md").read_text(encoding="utf-8"))
    texts = [one.read_text("utf-8") for one in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-c]*.py"))]
    (tmp_path / "my_texts").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "my_texts" / f"{number}.txt").write_text(text, "utf-8")
    losses, ran = [], []
    for command in walk.commands():
        words = command.split()
        if words[0] == "export":
            walk.exported.append(command)
            continue
        if words[0] == "hf":
            make_model(tmp_path / words[-1], tiny, changes, texts)
            continue
        if words[0] == "pip":
            continue
        printed = walk.run(command)
        step = " ".join(words[1:3])
        ran.append(step)
        if step == "plan search":
            (line,) = re.findall(r"^    (│ 1 │.*)$", walk.page, re.MULTILINE)
            assert line in printed
        elif step == "plan --preset":
            figures = r"([\d,]+) tokens per second, ([\d.]+ of [\d.]+) GiB"
            for figure in re.search(figures, walk.page).groups():
                assert f" {figure}" in printed
        elif step == "convert from-hf":
            assert (tmp_path / words[4] / "latest_checkpointed_iteration.txt").is_file()
            assert (tmp_path / words[4] / "settings.env").is_file()
        elif step == "ckpt info":
            assert "iter" in printed
        elif step == "data tokenize":
            assert (tmp_path / f"{words[6]}_text_document.bin").stat().st_size > 2 * 100_000
        elif step == "train --config":
            check_run(tmp_path)
        elif words[1] == "eval":
            (row,) = (line.split("│") for line in printed.splitlines() if "_text_document │" in line)
            losses.append(float(row[5]))
        elif step == "convert to-hf":
            assert json.loads((tmp_path / "my_model" / "config.json").read_text())["architectures"] == [
                architecture
            ]
        elif words[0] == "python":
            assert math.isfinite(float(re.search(r"[\d.]+", printed)[0]))
    steps = ["plan search", "plan --preset", "convert from-hf", "ckpt info", "data tokenize", "data inspect"]
    steps += [
        "train --config",
        "watch run",
        "eval --checkpoint",
        "eval --checkpoint",
        "convert to-hf",
        "- <<'END'",
    ]
    assert ran == steps
    before, after = losses
    assert after < before - 0.3
    monkeypatch.chdir(tmp_path)
    (run,) = Path("runs").iterdir()
    (held_out,) = plan_evaluation(EvalRequest(str(run))).sources
    assert their_loss(Path("my_model"), held_out) == pytest.approx(after, abs=1e-2)


def check_run(folder: Path) -> None:
    """The run has its settings of memory, a checkpoint, and finite losses that fall."""
    (run,) = (folder / "runs").iterdir()
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    losses = [record["lm_loss"] for record in records if record["kind"] == "train"]
    assert len(losses) >= 2 and all(map(math.isfinite, losses))
    assert losses[-1] < losses[0] - 0.3
    config = (run / "config.yaml").read_text()
    assert "main_params: remainder" in config or "offload_optimizer: true" in config
    assert (run / "checkpoints" / "iter_0000020").is_dir()
