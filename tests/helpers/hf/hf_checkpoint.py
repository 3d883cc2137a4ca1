"""Checkpoints of this package with the weights of tiny models of transformers."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from helpers.checkpoint.ckpt_files import add_tensor
from helpers.hf import tiny_models
from moe_exp.checkpoint.format.torch_dist import CheckpointReader
from moe_exp.checkpoint.format.torch_dist_writer import TorchDistWriter
from moe_exp.checkpoint.hf.importing import from_hf
from moe_exp.config import Config

VOCAB, LAYERS, EXPERTS, SEQ_LEN = 257, 2, 4, 48
KINDS = ("mixtral", "qwen3_moe", "llama", "deepseek_v3", "hunyuan_v1_moe", "mimo_v2_flash")
# Of the run that wrote it.
_RUN: dict[str, Any] = {
    "seq_len": SEQ_LEN, "mbsz": 1, "gbsz": 1, "warmup_iters": 0, "train_data": "none", "eval_interval": 0,
    "tokenizer": "bytes",
}  # fmt: skip


def tiny_model(kind: str) -> PreTrainedModel:
    """A model with random weights, whose vocabulary is padded here."""
    return tiny_models.tiny_model(kind, vocab_size=VOCAB, num_hidden_layers=LAYERS)


def write_checkpoint(model: PreTrainedModel, folder: Path, **settings: Any) -> Path:
    """The weights as a checkpoint of a run with these settings; a logit of a padding row would be seen."""
    disable_progress_bar()  # which tests would find in what a command prints
    with TemporaryDirectory() as place:
        model.save_pretrained(f"{place}/hf")
        config = from_hf(Path(place) / "hf", Path(place) / "ours").config
        reader = CheckpointReader(Path(place) / "ours" / "iter_0000000")
        with TorchDistWriter(folder) as writer:
            for key in reader.tensors:
                values = reader.read(key)
                if key in ("embedding.word_embeddings.weight", "output_layer.weight"):
                    values[VOCAB:] = 9.0
                add_tensor(writer, key, values)
            config = Config(**config.model_dump() | _RUN | settings)
            writer.finish({"config": config.model_dump(), "iteration": 0})
    return folder
