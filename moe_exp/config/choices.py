"""Settings with named choices: one table per kind, with the facts other code needs about each entry.

Settings, their help, docs/settings.md, checks and the planner use these tables. The functions behind the
names are in the layers, which reject names they lack. No torch.
"""

import importlib.util
import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from pydantic import BeforeValidator
from pydantic_core import PydanticCustomError


@dataclass(frozen=True)
class Score:
    """A router score; `normalizes`: for TOPK > 1, ROUTER_NORMALIZE=auto divides weights by their sum."""

    normalizes: bool


SCORES = {
    "softmax": Score(normalizes=False),
    "sigmoid": Score(normalizes=True),
    "sqrtsoftplus": Score(normalizes=True),
    "relu": Score(normalizes=False),
}


@dataclass(frozen=True)
class Loss:
    """A balancing loss."""

    text: str = ""  # of what it is a mean, for the help
    needs_scores: bool = False  # uses the scores of all experts, not only their sums
    state: str = ""  # buffer of the router with what it needs of earlier global batches


LOSSES = {
    "aux_loss": Loss("over a micro-batch, whatever ranks hold it"),
    "seq_aux_loss": Loss("over each sequence", needs_scores=True),
    "global_aux_loss": Loss("over the global batch", state="global_tokens_per_expert"),
    "l1": Loss(
        "of ROUTER_SCORE=relu, with a weight that brings the experts per token to TOPK", True, "l1_factor"
    ),
    "entropy": Loss("of the scores, for ROUTER_TOP_P", needs_scores=True),
}
# Ends of the names of these buffers, of no use to other losses or outside of training.
LOSS_STATE = tuple(f".router.{loss.state}" for loss in LOSSES.values() if loss.state)
NO_LOSS = ("none", "sinkhorn")


@dataclass(frozen=True)
class ExpertBackend:
    """Implementation of the expert computation."""

    modules: tuple[str, ...] = ()  # that it imports
    install: str = ""  # how to install them
    dtypes: tuple[str, ...] = ()  # supported values of DTYPE; empty: all
    row_bytes: int = 1  # the rows of its inputs must be a multiple of this

    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [module for module in self.modules if importlib.util.find_spec(module) is None]


_PIP = "pip install --no-build-isolation"
EXPERT_BACKENDS = {
    "triton": ExpertBackend(),
    "loop": ExpertBackend(),
    # grouped_mm and the CUTLASS kernels read rows in 16-byte pieces
    "torch": ExpertBackend(row_bytes=16),
    "grouped_gemm": ExpertBackend(("grouped_gemm",), f"{_PIP} nv-grouped-gemm", ("bf16",), 16),
    "te": ExpertBackend(
        ("transformer_engine",), f"{_PIP} transformer-engine[pytorch]", ("bf16", "fp16", "fp32")
    ),
    "megablocks": ExpertBackend(("megablocks", "grouped_gemm"), f"{_PIP} megablocks[gg]", ("bf16",), 16),
}


@dataclass(frozen=True)
class Dispatcher:
    """How tokens get to the ranks of their experts."""

    gathers: bool = False  # every rank receives all tokens; else only those for its own experts


DISPATCHERS = {name: Dispatcher(name == "allgather") for name in ("alltoall", "allgather", "deepep", "local")}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer, and what the planner and the checks need to know of it."""

    text: str  # for the help
    moments: str  # moments are kept and can be taken over by optimizers of the same word
    momentum: str = ""  # setting of its momentum
    is_sharded: bool = True  # works on ranges of values, as ranks have them with DISTRIBUTED_OPTIMIZER
    has_bf16: bool = False  # its moments may be in bf16


OPTIMIZERS = {
    "adam": Optimizer("AdamW", "adam", has_bf16=True),
    "adam8bit": Optimizer("with moments in 8 bits (bitsandbytes)", "adam"),
    "sgd": Optimizer("", "sgd", momentum="sgd_momentum"),
    "muon": Optimizer(
        "matrices by Muon, the rest by AdamW", "muon", momentum="muon_momentum", is_sharded=False
    ),
}


# Decay to its shape: the share of the way down that is left after this share of its length. The formulas of
# Megatron's lr_wsd_decay_style; its `exponential` is 2 * 0.5^x - 1, so that it ends at 0.
DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda share: 1 - share,
    "cosine": lambda share: 0.5 * (math.cos(math.pi * share) + 1),
    "exponential": lambda share: 2 * 0.5**share - 1,
    "minus_sqrt": lambda share: 1 - math.sqrt(share),
}
# Parts of a composed schedule: decays, and what needs no end to aim at.
PIECES = (*DECAYS, "constant", "inverse-square-root", "power")


@dataclass(frozen=True)
class Schedule:
    """A learning-rate schedule; config/sections/learning.py takes it apart."""

    has_final_decay: bool  # its last WSD_DECAY_ITERS iterations decay in the shape of WSD_DECAY_STYLE
    needs_it: bool = True  # WSD_DECAY_ITERS must not be 0
    ends_at_lr: bool = False  # it never decays


SCHEDULES = {
    "cosine": Schedule(has_final_decay=False),
    "linear": Schedule(has_final_decay=False),
    "constant": Schedule(has_final_decay=False, ends_at_lr=True),
    "inverse-square-root": Schedule(has_final_decay=False),
    "WSD": Schedule(has_final_decay=True),
    "WSD-S": Schedule(has_final_decay=True),
    "power": Schedule(has_final_decay=True, needs_it=False),
}


@dataclass(frozen=True)
class MupRule:
    """A published muP for MoE layers (see parameter_groups.py).

    `expert_down`: factor on the initial weights of the experts' second projection, by hidden size, size of an
    expert and top-k, relative to the base model; `text`: for the help.
    """

    text: str
    expert_down: Callable[[float, float, float], float]


MUP_RULES = {
    "fan_in": MupRule("arXiv:2508.09752", lambda n, m, k: m**-0.5),
    "mean_field": MupRule("arXiv:2601.20205", lambda n, m, k: n**0.5 / m),
    "active_width": MupRule("arXiv:2605.23893", lambda n, m, k: (k / m) ** 0.5),
}


@dataclass(frozen=True)
class OneOf:
    """Validates that a value is one of `others` or a key of `table`, as the table is at that time.

    `read` returns the text of a value that is something else, written in a syntax of its own, or None.
    """

    table: Collection[str]
    others: tuple[str, ...] = ()
    read: Callable[[str], str | None] = lambda value: None

    @property
    def names(self) -> list[str]:
        return [*self.others, *self.table]

    def __call__(self, value: Any) -> Any:
        if value not in self.names:
            if (text := self.read(str(value))) is not None:
                return text
            *most, last = map(repr, self.names)
            expected = f"{', '.join(most)} or {last}" if most else last
            raise PydanticCustomError("literal_error", "Input should be {expected}", {"expected": expected})
        return value


def one_of(
    table: Collection[str], *others: str, read: Callable[[str], str | None] = lambda value: None
) -> BeforeValidator:
    """Validator for `Annotated[str, one_of(TABLE, "auto")]`; `read` as in `OneOf`."""
    return BeforeValidator(OneOf(table, others, read))


def choices_of(field: Any) -> list[str]:
    """Allowed names of a pydantic field; empty for settings without named choices."""
    for one in field.metadata:
        if isinstance(one, BeforeValidator) and isinstance(one.func, OneOf):
            return one.func.names
    return []
