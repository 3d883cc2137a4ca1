"""Input and output settings: folders, checkpoints, logging and evaluation."""

from collections.abc import Iterator
from typing import Literal

from moe_exp.config.sections.data import DataSettings
from moe_exp.config.setting_types import NonNegative, PathText, Positive, names_text, shown
from moe_exp.config.traits import bookkeeping, output, place


class OutputSettings(DataSettings):
    """Settings of the section Input and output."""

    run_dir: PathText = place("runs", "parent folder of all run folders")
    run_name: str = place("", "name of the run folder in RUN_DIR; empty: built from the settings")
    load_dir: PathText = output(
        "",
        "checkpoint to start from: a checkpoints folder, a run folder, the folder of one iteration, or a URL "
        "in an object store; empty: the run's own checkpoints. Optimizer state and iteration are loaded too, "
        "unless ckpt reshape --weights-only removed them",
    )
    remote_dir: str = bookkeeping(
        "",
        "object store folder (s3://, gs://) to which each checkpoint is copied, with config.yaml and "
        "metrics.jsonl; a run without checkpoints in its run folder resumes from this copy",
    )
    allow_other_model: bool = output(
        False,
        "resume even if the checkpoint differs in settings that change the model's computation but "
        "not its shapes (router, norms, rotary base)",
    )
    allow_other_optimizer: bool = output(
        False, "resume even if the checkpoint is from another optimizer; the moments start at zero"
    )
    save_interval: NonNegative = output(1000, "iterations between checkpoints; 0: only at the end of the run")
    save_at_end: bool = output(
        True, "save a checkpoint when the run ends; false: only every SAVE_INTERVAL iterations"
    )
    async_save: bool = bookkeeping(
        False,
        "continue training while checkpoint files are written; the next save waits until they are written",
    )
    keep_last: NonNegative = bookkeeping(
        0, "number of newest checkpoints to keep; older ones are deleted; 0: keep all"
    )
    keep_every: NonNegative = bookkeeping(
        0, "if KEEP_LAST is set, also keep checkpoints at multiples of this number of iterations; 0: off"
    )
    keep_best: NonNegative = bookkeeping(
        0, "if KEEP_LAST is set, also keep this many checkpoints with the lowest validation loss; 0: off"
    )
    verify_checkpoint: bool = bookkeeping(
        True, "verify the checksums of a checkpoint's files before loading; false: verify only the file sizes"
    )
    exit_interval: NonNegative = output(
        0, "save and exit at the next multiple of this number of iterations; 0: never"
    )
    log_interval: Positive = output(20, "iterations between log lines")
    log_timers: bool = output(
        False, "log the time of each phase of an iteration (ms): data, all-to-all, experts, optimizer, ..."
    )
    eval_interval: NonNegative = output(1000, "iterations between evaluations; 0: no evaluation")
    eval_iters: NonNegative = output(10, "number of global batches per evaluation")
    tensorboard_axes: bool = bookkeeping(
        False, "also plot losses against tokens, FLOPs and training time in TensorBoard (runs named by_*)"
    )
    wandb_project: str = bookkeeping("", "Weights & Biases project; empty: not used")
    prometheus_file: PathText = bookkeeping(
        "",
        "file NAME.prom for the latest metrics, read by node_exporter's textfile collector; empty: no file",
    )
    wandb_mode: Literal["online", "offline", "disabled"] = bookkeeping("online", "Weights & Biases mode")

    @property
    def name(self) -> str:
        """RUN_NAME if set, otherwise a name built from the settings that checkpoints depend on."""
        if self.run_name:
            return self.run_name
        name = f"moe_{str(self.use_moe).lower()}"
        if self.use_moe:
            name += f"_num_experts_{self.num_experts}_topk_{self.topk}_type_{self.moe_type}"
        name += f"_num_nodes_{self.nnodes}_gpus_per_node_{self.gpus_per_node}"
        name += f"_TP_{self.tp}_PP_{self.pp}_VPP_{self.vpp or 'none'}_EP_{self.ep}"
        name += f"_ETP_{self.etp}" if self.etp > 1 else ""
        name += f"_CP_{self.cp}" if self.cp > 1 else ""
        return name if self.optimizer == "adam" else f"{name}_OPTIMIZER_{self.optimizer}"

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        save, evaluate, shares = self.save_interval, self.eval_interval, self.split_shares
        has_valid = self.valid_data or self.split or names_text(self.train_data)
        no_effect = "has no effect with KEEP_LAST=0, which keeps all checkpoints"
        yield from self.broken(
            (evaluate and not self.eval_iters, "eval_iters",
             f"must be positive with EVAL_INTERVAL={evaluate}", "set EVAL_ITERS=10 or EVAL_INTERVAL=0"),
            (evaluate and self.train_data and not has_valid, "valid_data",
             f"must be set for EVAL_INTERVAL={evaluate}; only text is split automatically, and TRAIN_DATA="
             f"{shown(self.train_data)} is not a folder or file of text on this machine",
             "set VALID_DATA, SPLIT=99,1 or EVAL_INTERVAL=0; if TRAIN_DATA should be text, correct its path"),
            (evaluate and shares and not sum(shares[1:2]), "split",
             f"has no validation share, but EVAL_INTERVAL={evaluate}",
             "set for example SPLIT=99,1, or EVAL_INTERVAL=0"),
            (self.keep_every and not self.keep_last, "keep_every", no_effect, "set KEEP_LAST"),
            (self.keep_best and not self.keep_last, "keep_best", no_effect, "set KEEP_LAST"),
            (save and self.keep_every % save, "keep_every",
             f"must be a multiple of SAVE_INTERVAL={save}", f"set KEEP_EVERY={save}"),
            (self.keep_best and (not evaluate or not save or save % evaluate), "keep_best",
             f"requires an evaluation at every save, but SAVE_INTERVAL={save} is not a multiple of"
             f" EVAL_INTERVAL={evaluate}", "set SAVE_INTERVAL and EVAL_INTERVAL to the same number"),
            (self.upcycle_from and self.use_moe and self.load_dir, "upcycle_from",
             f"cannot be combined with LOAD_DIR={self.load_dir}", "omit UPCYCLE_FROM or LOAD_DIR"),
        )  # fmt: skip
