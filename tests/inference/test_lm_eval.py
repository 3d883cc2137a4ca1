"""lm-evaluation-harness on an export to Hugging Face, as docs/inference.md has it: without network."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from helpers.hf.hf_checkpoint import tiny_model, write_checkpoint
from moe_exp import cli

HAS_HARNESS = all(importlib.util.find_spec(name) is not None for name in ("lm_eval", "accelerate"))
QUESTIONS = [("abc", [" def", " xyz"], 0), ("12", ["3", " one"], 1), ("the e", ["nd", "gg"], 0)]
TASK = """
task: local_choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
doc_to_text: question
doc_to_choice: choices
doc_to_target: answer
target_delimiter: ""
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def byte_tokenizer(path: Path) -> Path:
    """Byte b of a text is token b, as the model's own tokenizer has it; 256 ends a document."""
    # Byte-level tokenizers write printable bytes as themselves, the others as characters from 256 on.
    printable, others = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    vocab = {chr(byte) if byte in printable else chr(next(others)): byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>"])
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@torch.no_grad()
def log_likelihood(model: Any, question: str, choice: str) -> float:
    ids = torch.tensor([list((question + choice).encode())])
    log_probs = model(ids).logits[0].log_softmax(-1)
    places = range(len(question.encode()) - 1, ids.size(1) - 1)
    return sum(log_probs[place, ids[0, place + 1]].item() for place in places)


@pytest.mark.slow
@pytest.mark.skipif(not HAS_HARNESS, reason="lm_eval or accelerate is missing: pip install 'lm_eval[hf]'")
def test_a_local_task(tmp_path):
    model, data = tiny_model("mixtral"), tmp_path / "questions.jsonl"
    checkpoint, exported = write_checkpoint(model, tmp_path / "iter_0000000"), tmp_path / "hf"
    tokenizer = byte_tokenizer(tmp_path / "tokenizer")
    assert cli.main(["convert", "to-hf", str(checkpoint), str(exported), "--tokenizer", str(tokenizer)]) == 0
    rows = [dict(zip(("question", "choices", "answer"), one, strict=True)) for one in QUESTIONS]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "local_choice.yaml").write_text(TASK.format(data=data))
    command = [
        sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args",
        f"pretrained={exported},dtype=float32", "--tasks", "local_choice", "--include_path", str(tmp_path),
        "--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path / "out"), "--log_samples",
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environ = os.environ | offline | {"HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (samples,) = (tmp_path / "out").rglob("samples_local_choice_*.jsonl")
    by_number = {sample["doc_id"]: sample for sample in map(json.loads, samples.read_text().splitlines())}
    for number, (question, choices, _) in enumerate(QUESTIONS):
        found = [float(response[0]) for response in by_number[number]["filtered_resps"]]
        expected = [log_likelihood(model, question, choice) for choice in choices]
        assert found == pytest.approx(expected, rel=1e-4)
