"""Settings of what a run reads and writes: folders, checkpoints, log lines, evaluations.

A rule between settings of several sections stands in the last of them (sections/launch.py).
"""

from collections.abc import Iterator
from typing import Literal

from moe_exp.config.sections.data import DataSettings
from moe_exp.config.setting_types import (
    NonNegative,
    PathText,
    Positive,
    as_given,
    names_text,
    output,
    place,
    shown,
)


class OutputSettings(DataSettings):
    """The section Input and output."""

    run_dir: PathText = place("runs", "folder of all runs")
    run_name: str = place("", "folder of this run inside RUN_DIR; empty: built from the settings")
    load_dir: PathText = output(
        "",
        "checkpoint to start from, with its optimizer and iteration (without them after ckpt reshape "
        "--weights-only): a checkpoints folder, a run folder or the folder of one iteration, or its URL at "
        "an object store; empty: the run's own",
        measured="",
    )
    remote_dir: str = output(
        "",
        "folder at an object store (s3://, gs://) that gets a copy of the run: each checkpoint, and"
        " config.yaml and metrics.jsonl with it; a run folder without checkpoints continues from it",
        measured="",
        compared=False,
    )
    allow_other_model: bool = output(
        False,
        "resume from a checkpoint of a model of the same shapes that computes something else (router,"
        " norms, rotary base)",
    )
    allow_other_optimizer: bool = output(
        False, "resume from a checkpoint of another optimizer; its moments start at zero"
    )
    save_interval: NonNegative = output(
        1000, "iterations between checkpoints; 0: only at the end", measured=0
    )
    save_at_end: bool = output(
        True,
        "save a checkpoint when the run ends; false: only every SAVE_INTERVAL iterations",
        measured=False,
    )
    async_save: bool = output(
        False,
        "continue training while the files of a checkpoint are written; the next save waits for them",
        measured=False,
        compared=False,
    )
    keep_last: NonNegative = output(
        0, "number of newest checkpoints to keep, others are removed; 0: keep all", measured=0, compared=False
    )
    keep_every: NonNegative = output(
        0,
        "with KEEP_LAST, also keep checkpoints at multiples of this iteration; 0: none",
        measured=0,
        compared=False,
    )
    keep_best: NonNegative = output(
        0,
        "with KEEP_LAST, also keep this number of checkpoints with the lowest validation loss",
        measured=0,
        compared=False,
    )
    verify_checkpoint: bool = output(
        True,
        "compare the checksums of a checkpoint's files before loading it; false: only their sizes",
        compared=False,
    )
    exit_interval: NonNegative = output(0, "save and end at the next multiple of it; 0: never", measured=0)
    log_interval: Positive = output(20, "iterations between log lines", measured=1)
    log_timers: bool = output(
        False, "measure milliseconds per iteration by phase: data, all-to-all, experts, optimizer, ..."
    )
    eval_interval: NonNegative = output(1000, "iterations between evaluations; 0: none", measured=0)
    eval_iters: NonNegative = output(10, "global batches per evaluation")
    tensorboard_axes: bool = output(
        False,
        "TensorBoard: repeat the losses over tokens, FLOPs and training time, as runs named by_*",
        compared=False,
    )
    wandb_project: str = output("", "wandb project; empty: no wandb", measured="", compared=False)
    prometheus_file: PathText = output(
        "",
        "file NAME.prom that has the newest metrics, for node_exporter's textfile collector; empty: none",
        measured="",
        compared=False,
    )
    wandb_mode: Literal["online", "offline", "disabled"] = output("online", "wandb mode", compared=False)

    @property
    def name(self) -> str:
        """RUN_NAME, or one of the settings that checkpoints depend on, so that each gets its own folder."""
        if self.run_name:
            return self.run_name
        name = f"moe_{str(self.use_moe).lower()}"
        if self.use_moe:
            name += f"_num_experts_{self.num_experts}_topk_{self.topk}_type_{self.moe_type}"
        name += f"_num_nodes_{self.nnodes}_gpus_per_node_{self.gpus_per_node}"
        name += f"_TP_{self.tp}_PP_{self.pp}_VPP_{as_given(self.vpp)}_EP_{self.ep}"
        name += f"_ETP_{self.etp}" if self.etp > 1 else ""
        name += f"_CP_{self.cp}" if self.cp > 1 else ""
        return name if self.optimizer == "adam" else f"{name}_OPTIMIZER_{self.optimizer}"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.eval_interval:
            yield from self._evaluation_problems(self.eval_interval)
        yield from self._checkpoint_problems()

    def _evaluation_problems(self, interval: int) -> Iterator[str]:
        """There is something to evaluate on."""
        has_valid = self.valid_data or self.split or names_text(self.train_data)
        shares = self.split_shares
        return self.broken(
            (not self.eval_iters, "eval_iters",
             f"evaluates nothing every EVAL_INTERVAL={interval}", "set EVAL_ITERS=10 or EVAL_INTERVAL=0"),
            (self.train_data and not has_valid, "valid_data",
             f"TRAIN_DATA={shown(self.train_data)} is no folder or file of text here, and for token files"
             f" there is nothing to evaluate on every EVAL_INTERVAL={interval}",
             "correct TRAIN_DATA if it should name text, else set VALID_DATA, SPLIT=99,1 or EVAL_INTERVAL=0"),
            (shares and not sum(shares[1:2]), "split",
             f"leaves nothing to evaluate on every EVAL_INTERVAL={interval}",
             "set for instance SPLIT=99,1, or EVAL_INTERVAL=0"),
        )  # fmt: skip

    def _checkpoint_problems(self) -> Iterator[str]:
        """Checkpoints to keep, and to start from."""
        no_effect = "has no effect with KEEP_LAST=0, which keeps all checkpoints"
        save, evaluate = self.save_interval, self.eval_interval
        return self.broken(
            (self.keep_every and not self.keep_last, "keep_every", no_effect, "set KEEP_LAST"),
            (self.keep_best and not self.keep_last, "keep_best", no_effect, "set KEEP_LAST"),
            (save and self.keep_every % save, "keep_every",
             f"is no multiple of SAVE_INTERVAL={save}", f"set it to {save}"),
            (self.keep_best and (not evaluate or not save or save % evaluate), "keep_best",
             f"needs a validation at every save, SAVE_INTERVAL={save} is no multiple of"
             f" EVAL_INTERVAL={evaluate}", "set both to the same number"),
            (self.upcycle_from and self.use_moe and self.load_dir, "upcycle_from",
             f"LOAD_DIR={self.load_dir} names other weights to start from", "give one of the two"),
        )  # fmt: skip
