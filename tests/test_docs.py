"""The Markdown pages: every link leads somewhere, and every command is one that the program takes."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.docs.commands import (
    all_flags,
    blocks,
    commands,
    flags_problem,
    inline_commands,
    moe_exp_arguments,
    problem_of,
    whole_parser,
)
from helpers.docs.links import GUIDES, PAGES, broken_links
from helpers.hf.tiny_models import their_loss
from helpers.jsonl import BinIdxWriter
from helpers.ranks import free_port
from moe_exp.cli import main
from moe_exp.config import Config
from moe_exp.inference.evaluate import EvalRequest, plan_evaluation
from moe_exp.launch.slurm.settings import SlurmSettings
from moe_exp.studies.sweep.settings import SweepSettings

guides, pages = (
    pytest.mark.parametrize("page", some, ids=lambda page: str(page.relative_to(ROOT)))
    for some in (GUIDES, PAGES)
)
SETTINGS = {name.upper() for kind in (Config, SlurmSettings, SweepSettings) for name in kind.model_fields}
# Variables of other programs that the pages set.
OTHERS = {"PYTHONPATH", "OMP_NUM_THREADS", "PYTHON", "TRITON_INTERPRET", "CUDA_VISIBLE_DEVICES", "PATH"}
OTHERS |= {"NCCL_SOCKET_IFNAME", "NCCL_DEBUG"}


@pages
def test_links_lead_to_files_and_headings(page):
    assert broken_links(page) == []


@guides
@pytest.mark.parametrize(("found", "judge"), [(commands, problem_of), (inline_commands, flags_problem)])
def test_commands_are_parsed(found, judge, page):
    """Those of code blocks as they stand; of those in the text the flags exist."""
    asked = {str(command): moe_exp_arguments(command) for command in found(page)}
    problems = {name: judge(arguments) for name, arguments in asked.items() if arguments is not None}
    assert {name: problem for name, problem in problems.items() if problem} == {}


def test_flags_that_stand_alone_exist():
    text = (ROOT / "docs" / "corpus.md").read_text(encoding="utf-8")
    flags = set(re.findall(r"`(--[a-z][\w-]*)", text))
    assert len(flags) > 20 and flags <= all_flags(whole_parser())


@guides
def test_variables_are_settings_and_programs_exist(page):
    wrong = []
    for command in [*commands(page), *inline_commands(page)]:
        names = set(filter(str.isupper, command.names)) - SETTINGS - OTHERS
        if names and (not command.words or moe_exp_arguments(command) is not None):
            wrong.append(f"{command}: {names}")
        for word in command.words:
            path = re.fullmatch(r"((?:moe_exp|tests|bench|docs)/[\w/-]+\.(?:py|sh))(?:::\w+)?", word)
            if path and not (ROOT / path[1]).is_file():
                wrong.append(str(command))
    assert wrong == []


def test_the_index_names_every_page():
    docs = ROOT / "docs"
    index = (docs / "README.md").read_text(encoding="utf-8")
    others = {str(page.relative_to(docs)) for page in docs.glob("**/*.md")} - {"README.md"}
    assert [name for name in others if f"({name})" not in index] == []


def test_the_recipe_plans_and_would_be_submitted(tmp_path, monkeypatch, capsys):
    """Its plan and dry run for more nodes, with settings of the model in place of the imported checkpoint."""
    found = commands(ROOT / "docs" / "recipes" / "qwen3-30b-a3b.md")
    (start,) = (place for place, one in enumerate(found) if "128" in one.words)
    assert main(list(found[start].words[1:])) == 0
    given = dict(v.partition("=")[::2] for one in found[start:] if not one.words for v in one.variables)
    prefix = tmp_path / given["TRAIN_DATA"]
    prefix.parent.mkdir(parents=True)
    with BinIdxWriter(prefix, vocab_size=151936) as writer:
        for _ in range(200):
            writer.add_document(range(4096))
    settings = tmp_path / "settings.env"
    settings.write_text("PRESET=qwen3-30b-a3b\n")
    places = {"TRAIN_DATA": prefix, "RUN_DIR": tmp_path, "DISK_CHECK": "none"}
    for name, value in (given | places).items():
        monkeypatch.setenv(name, str(value))
    capsys.readouterr()
    assert main(["slurm", "--config", str(settings), "--dry-run"]) == 0
    done = capsys.readouterr()
    assert "#SBATCH --nodes=16" in done.out and "sbatch --parsable" in done.err


def run_in(folder: Path, program: str) -> str:
    done = subprocess.run(["bash", "-c", program], cwd=folder, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_runs_as_it_stands(tmp_path, monkeypatch):
    """Its steps after the installation, with four iterations instead of 500."""
    page = ROOT / "docs" / "tutorial.md"
    shell = [text for _, text in blocks(page) if re.search(r"^(mkdir|moe-exp|export|USE_MOE)", text)]
    assert len(shell) == 8
    steps = "\n".join(shell[1:]).replace("TRAIN_ITERS=500", "TRAIN_ITERS=4")
    assert "TRAIN_ITERS=4" in steps
    python = shlex.quote(sys.executable)
    program = f'set -e\npython() {{ {python} "$@"; }}\nmoe-exp() {{ {python} -m moe_exp "$@"; }}\n{steps}'
    monkeypatch.setenv("WARMUP_ITERS", "1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    assert "my_model: MixtralForCausalLM" in run_in(tmp_path, program)
    assert (tmp_path / "my_model" / "model.safetensors").is_file()
    assert (tmp_path / "report.html").stat().st_size > 100_000


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_continued_training_runs_as_it_stands_and_makes_the_model_better(tmp_path, monkeypatch):
    """Every command of the page in order; its losses are those of transformers."""
    page = (ROOT / "docs" / "continued_training.md").read_text(encoding="utf-8")
    steps = re.findall(r"```(python|bash)\n(.*?)```", page, flags=re.DOTALL)
    python = shlex.quote(sys.executable)
    program = f'set -e\nmoe-exp() {{ {python} -m moe_exp "$@"; }}\n'
    for language, text in steps:
        program += text if language == "bash" else f"{python} - <<'END'\n{text}END\n"
    assert [language for language, _ in steps] == ["python", *["bash"] * 5]
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    printed = run_in(tmp_path, program)
    rows = [line.split("│") for line in printed.splitlines() if line.startswith("│ valid")]
    before, after, averaged = (float(row[5]) for row in rows)
    assert max(after, averaged) < before - 1
    monkeypatch.chdir(tmp_path)
    (held_out,) = plan_evaluation(EvalRequest("averaged", data_of="runs/continued")).sources
    for name, loss in (("my_model", before), ("better_model", averaged)):
        assert their_loss(tmp_path / name, held_out) == pytest.approx(loss, rel=1e-5)
    folders = (tmp_path / name for name in ("my_model", "better_model"))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in folders)
    for field in ("router_aux_loss_coef", "max_position_embeddings"):
        assert before[field] == after[field]
