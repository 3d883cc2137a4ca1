"""One checkpoint, written at once."""

from pathlib import Path

from moe_exp.checkpoint.save import CheckpointWriter
from moe_exp.checkpoint.state import Progress, Trained
from moe_exp.config import Config
from moe_exp.engine.runtime import Runtime


def save(config: Config, runtime: Runtime, checkpoints: Path, trained: Trained, progress: Progress) -> None:
    """Writes a checkpoint and waits. Called by every rank."""
    writer = CheckpointWriter(config, runtime, checkpoints)
    writer.begin(trained, progress)
    saved = writer.finish()
    assert saved is not None
    assert not saved.error, saved.error
