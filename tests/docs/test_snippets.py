"""Every Python example of README.md and of the pages in docs/ runs as it is printed.

Those of a page run in order, each in a process of its own, in a folder with the files that the pages speak
of: the runs runs/moe and runs/dense, and my_model, a folder of transformers.
"""

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest

from helpers import ROOT
from helpers.checkpoint.small_job import small_settings, write_tokens
from helpers.docs.links import PAGES
from helpers.hf.tiny_models import tiny_folder
from helpers.ranks import run_on_ranks
from helpers.run_folders import dense_and_moe
from moe_exp.data.tokens.tokenizer_training import train_bpe

BLOCKS = {
    str(page.relative_to(ROOT)): re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    for page in PAGES
}
WITH_BLOCKS = [page for page, blocks in BLOCKS.items() if blocks]
# By the environment, the examples train a model that takes seconds.
NOT_TAKEN = ("num_experts", "topk", "run_dir", "run_name")


def run_block(block: str, folder: Path) -> None:
    """In a process of its own; one of torchrun's variables for one rank, so that it does not start ranks."""
    os.chdir(folder)
    if block.startswith("# my_parts.py"):
        Path("my_parts.py").write_text(block)
    sys.path.insert(0, str(folder))
    sys.stdin = io.StringIO()
    if "moe_exp.train(" in block:
        settings = small_settings(folder, "", tokenizer=folder / "tokenizer.json", vocab_size=384)
        os.environ |= {name.upper(): str(settings[name]) for name in settings if name not in NOT_TAKEN}
    exec(compile(block, "block", "exec"), {"__name__": "__main__"})


SLOW = [pytest.param(page, marks=pytest.mark.slow) for page in WITH_BLOCKS if page != "README.md"]


@pytest.mark.parametrize("page", ["README.md", *SLOW])
def test_examples_run(page, tmp_path):
    write_tokens(tmp_path)
    tokenizer = train_bpe(["def main():\n    import os\n"] * 9, 384)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    for made, name in zip(dense_and_moe(tmp_path / "runs"), ("dense", "moe"), strict=True):
        made.rename(tmp_path / "runs" / name)
    if any("transformers" in block for block in BLOCKS[page]):
        model = tiny_folder(tmp_path / "my_model", "mixtral", changes={"vocab_size": 384})
        tokenizer.save(str(model / "tokenizer.json"))
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (model / "tokenizer_config.json").write_text(json.dumps(settings))
    for block in BLOCKS[page]:
        run_on_ranks(1, run_block, block, tmp_path, join=False)


def test_own_parts_on_two_expert_parallel_ranks(tmp_path):
    """The examples of a router and a loss of a user's own are scripts for torchrun."""
    mine, *scripts = (block for block in BLOCKS["docs/library.md"] if "CosineRouter" in block)
    run_block(mine, tmp_path)
    assert len(scripts) == 2
    for script in scripts:
        run_on_ranks(2, run_block, script, tmp_path, join=False)
