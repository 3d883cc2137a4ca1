"""Settings of the learning rate, of groups of parameters and of batch sizes; the optimizer: optimizer.py.

A rule between settings of several sections stands in the last of them (sections/launch.py).
"""

import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from moe_exp.config.choices import DECAYS, PIECES, SCHEDULES, one_of
from moe_exp.config.errors import multiples, problem
from moe_exp.config.parameter_names import parameter_sizes, useless_rules
from moe_exp.config.parsers import Rule, composed, is_composed, iteration_of, parsed_groups, read_composed
from moe_exp.config.ramp import Batches
from moe_exp.config.sections.parallel import SIZE_MULTIPLES, ParallelSettings
from moe_exp.config.setting_types import (
    IterationsOrShares,
    NonNegative,
    ParameterGroups,
    Positive,
    Rate,
    learning,
)

_MOST_RAMP_STEPS, _MOST_RAMP_SAMPLES = 10_000, 10**15


class Piece(NamedTuple):
    """A part of a learning-rate schedule."""

    style: str  # one of PIECES
    start: int  # number of samples after which it begins
    end: int  # number of samples after which the next piece takes over
    target: float | None  # learning rate at its end, as a share of LR; None: MIN_LR, or no change if constant


class LearningSettings(ParallelSettings):
    """The section Optimization up to RAMPUP_BATCH_SIZE."""

    lr: float = learning(0.0006, "peak learning rate", gt=0)
    min_lr: Rate = learning(6e-05, "final learning rate")
    router_lr_mult: float = learning(1.0, "LR and MIN_LR of routers, as a multiple", gt=0)
    expert_lr_mult: float = learning(1.0, "LR and MIN_LR of routed experts, as a multiple", gt=0)
    lr_groups: ParameterGroups = learning(
        "",
        "multiples of LR and MIN_LR (lr) and of WEIGHT_DECAY (wd) by names of parameters: "
        "'*.router.*:lr=0.5,wd=0;*embedding*:lr=2'; the first pattern counts (docs/learning_rate.md)",
    )
    lr_decay_style: Annotated[str, one_of(SCHEDULES, read=read_composed)] = learning(
        "cosine",
        "learning-rate schedule; or its pieces: 'constant:80%,linear' (docs/learning_rate.md)",
        measured="constant",
    )
    mbsz: Positive = learning(8, "micro-batch size, samples", costs=True)
    gbsz: Positive = learning(64, "global batch size, samples", costs=True)
    train_iters: Positive = learning(40000, "iterations")
    warmup_iters: NonNegative = learning(
        1000, "iterations of linear warm-up; if only TRAIN_ITERS is set, at most a tenth of it", measured=0
    )
    decay_iters: NonNegative = learning(0, "iteration at which MIN_LR is reached; 0: TRAIN_ITERS", measured=0)
    wsd_decay_iters: NonNegative = learning(
        0, "iterations of the final decay (LR_DECAY_STYLE=WSD, power), and of every decay (WSD-S)"
    )
    wsd_decay_style: Annotated[str, one_of(DECAYS)] = learning(
        "linear", "shape of these decays; minus_sqrt: 1 - sqrt"
    )
    wsd_decay_ends: IterationsOrShares = learning(
        "",
        "iterations, or shares such as 25%,50%, with which decays before the final one end; after each "
        "the rate is LR again (LR_DECAY_STYLE=WSD-S)",
    )
    lr_power_a: float = learning(
        4.0, "A of LR_DECAY_STYLE=power: at most LR, and at most GBSZ * A * tokens^B", gt=0
    )
    lr_power_b: float = learning(-0.51, "B of LR_DECAY_STYLE=power", lt=0)
    rampup_batch_size: str = learning(
        "", "'START INCREMENT SAMPLES': batch ramp-up from START to GBSZ", measured=""
    )

    @property
    def num_microbatches(self) -> int:
        """Micro-batches per iteration at the full global batch."""
        return self.gbsz // (self.mbsz * self.data_parallel_size)

    @property
    def rampup(self) -> tuple[int, int, int] | None:
        """RAMPUP_BATCH_SIZE as (start, increment, samples), or None."""
        if not self.rampup_batch_size:
            return None
        start, increment, samples = (int(x) for x in self.rampup_batch_size.split())
        return start, increment, samples

    @property
    def batches(self) -> Batches:
        """Batch sizes of the run."""
        return Batches(self.gbsz, self.rampup, self.train_iters)

    @property
    def parameter_rules(self) -> list[Rule]:
        """The lines of LR_GROUPS, ROUTER_LR_MULT and EXPERT_LR_MULT in order; empty if all parameters are
        treated alike.
        """
        rules = list(parsed_groups(self.lr_groups)) if self.lr_groups else []
        for setting, pattern in (("router_lr_mult", "*.router.*"), ("expert_lr_mult", "*.mlp.experts.*")):
            if (multiple := getattr(self, setting)) != 1:
                rules.append(Rule(setting, pattern, lr=multiple))
        return rules

    @property
    def decay_end(self) -> int:
        """Iteration at which MIN_LR is reached."""
        return self.decay_iters or self.train_iters

    @property
    def decay_ends(self) -> list[int]:
        """Iterations with which the decays of WSD and WSD-S end; the last of them is that of the run."""
        points = self.wsd_decay_ends.split(",") if self.lr_decay_style == "WSD-S" else []
        return [*(iteration_of(point, self.decay_end) for point in points if point), self.decay_end]

    @property
    def pieces(self) -> list[Piece]:
        """The pieces of the schedule after the warm-up, in order; at least one if there are no `problems`.

        The first begins where the warm-up ends. A final decay that is longer than what the warm-up leaves of
        the run has begun before that, as Megatron has it. Raises ValueError if LR_DECAY_STYLE is not known
        here.
        """
        pieces, start = [], self.warmup_iters
        for style, end, target in self._pieces_in_iterations():
            pieces.append(Piece(style, start * self.gbsz, end * self.gbsz, target))
            start = end
        return pieces

    def _pieces_in_iterations(self) -> list[tuple[str, int, float | None]]:
        """Style, last iteration and target of each piece."""
        style, end, decay = self.lr_decay_style, self.decay_end, self.wsd_decay_iters
        if is_composed(style):
            return [(name, iteration_of(until, end), target) for name, until, target in composed(style)]
        if style in PIECES and not SCHEDULES[style].has_final_decay:
            return [(style, end, None)]
        if style == "power":
            return [(style, end - decay, None), *([(self.wsd_decay_style, end, None)] if decay else [])]
        if style not in ("WSD", "WSD-S"):
            rule = "config/sections/learning.py does not know its pieces"
            raise ValueError(f"lr_decay_style={style}: {rule}. Fix: use cosine.")
        parts: list[tuple[str, int, float | None]] = []
        for last in self.decay_ends:
            parts += [("constant", last - decay, 1.0), (self.wsd_decay_style, last, None)]
        return parts

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.has_whole_replicas:
            yield from self._batch_problems(self.data_parallel_size)
        yield from self._microbatch_problems()
        yield from self._schedule_problems("DECAY_ITERS" if self.decay_iters else "TRAIN_ITERS")
        if rules := self.parameter_rules:  # each has to have an effect on some parameter
            for rule, *text in useless_rules(rules, list(parameter_sizes(self))):
                value = rule.pattern if rule.setting == "lr_groups" else getattr(self, rule.setting)
                yield problem(rule.setting, value, *text)

    def _batch_problems(self, replicas: int) -> Iterator[str]:
        """Every batch is a number of micro-batches on all data-parallel replicas."""
        step = self.mbsz * replicas
        if self.gbsz % step:
            fix = f"set GBSZ to {multiples(step, self.gbsz)}"
            if self.gbsz % replicas == 0:
                fix += f", or MBSZ to {math.gcd(self.mbsz, self.gbsz // replicas)}"
            yield self.problem("gbsz", f"is not a multiple of MBSZ*DP={self.mbsz}*{replicas}={step}", fix)
        elif self.vpp and self.pp > 1 and self.num_microbatches % self.pp:
            # Megatron requires (micro-batches mod group size) to be 0 or at least PP; the group size is PP,
            # so 0.
            rule = f"the interleaved schedule needs micro-batches in multiples of PP={self.pp}"
            rule += f", but GBSZ / (MBSZ*DP) is {self.num_microbatches}"
            fix = f"set GBSZ to {multiples(step * self.pp, self.gbsz)}, or VPP=none"
            yield self.problem("vpp", rule, fix)
        if self.rampup_batch_size and (rule := self._broken_ramp_rule(replicas)):
            size = step * self.pp if self.vpp else step
            fix = f"give START INCREMENT SAMPLES, for instance '{size} {size} 1000'"
            yield self.problem("rampup_batch_size", rule, "first correct GBSZ" if self.gbsz % size else fix)

    def _broken_ramp_rule(self, replicas: int) -> str:
        """The rule that RAMPUP_BATCH_SIZE breaks, or ''."""
        try:
            start, increment, samples = self.rampup or (0, 0, 0)
        except ValueError:
            start = increment = samples = 0
        if min(start, increment, samples) < 1:
            return "must be three positive whole numbers"
        if start > self.gbsz or (self.gbsz - start) % increment:
            return f"START must reach GBSZ={self.gbsz} in whole steps of INCREMENT"
        if (self.gbsz - start) // increment > _MOST_RAMP_STEPS or samples > _MOST_RAMP_SAMPLES:
            return f"must have at most {_MOST_RAMP_STEPS} steps and {_MOST_RAMP_SAMPLES} samples"
        step, sizes = self.mbsz * replicas, self.batches.sizes
        for number, size in enumerate(sizes[:-1], start=1):
            has = f"step {number} of {len(sizes)} has a batch of {size}"
            if size % step:
                return f"{has}, no multiple of MBSZ*DP={self.mbsz}*{replicas}={step}"
            if self.vpp and size % (step * self.pp):
                product = f"PP*MBSZ*DP={self.pp}*{self.mbsz}*{replicas}={step * self.pp}"
                return f"{has}, with VPP={self.vpp} no multiple of {product}"
        return ""

    def _microbatch_problems(self) -> Iterator[str]:
        """Tokens of a micro-batch: TOKEN_ROUNDING rounds some, and FP8 multiplies a multiple."""
        slots = self.mbsz * self.seq_len * self.topk
        tokens = self.seq_len * self.mbsz // (self.cp * self.tp)
        multiple = SIZE_MULTIPLES[self.fp8_recipe]
        is_fp8 = self.fp8 != "none" and not self.is_fp8_by_kernels and self.impl != "local"
        return self.broken(
            (self.use_moe and self.token_rounding > slots, "token_rounding",
             f"rounds nothing, as a micro-batch has {slots} slots in all (MBSZ * SEQ_LEN * TOPK)",
             "set a tile of the kernels, 64 or 128, or TOKEN_ROUNDING=0"),
            (is_fp8 and tokens % multiple, "seq_len",
             f"with MBSZ={self.mbsz} a rank multiplies {tokens} tokens, FP8_RECIPE={self.fp8_recipe} wants a"
             f" multiple of {multiple}", "change SEQ_LEN or MBSZ, or set FP8=none"),
        )  # fmt: skip

    def _schedule_problems(self, decay_name: str) -> Iterator[str]:
        """LR, MIN_LR, LR_DECAY_STYLE and the iterations that they name."""
        decay = self.decay_end
        yield from self.broken(
            (self.warmup_iters >= decay, "warmup_iters",
             f"is not below {decay_name}={decay}, where the decay ends",
             f"set WARMUP_ITERS below {decay}, or raise {decay_name}"),
            (self.min_lr > self.lr, "min_lr",
             f"is over LR={self.lr}", f"set MIN_LR to at most {self.lr}, for instance {self.lr / 10:g}"),
        )  # fmt: skip
        style = self.lr_decay_style
        if is_composed(style):
            yield from self._composed_problems(decay_name)
            return
        schedule = SCHEDULES[style]
        least = int(schedule.needs_it)
        if schedule.has_final_decay and not least <= self.wsd_decay_iters <= decay:
            fix = f"set WSD_DECAY_ITERS to {least} to {decay}, or another LR_DECAY_STYLE"
            rule = f"LR_DECAY_STYLE={style} decays over {least} to {decay_name}={decay} iterations"
            yield self.problem("wsd_decay_iters", rule, fix)
        elif style == "WSD-S":
            yield from self._decay_problems()
        if style == "inverse-square-root" and not self.warmup_iters:
            rule = "LR_DECAY_STYLE=inverse-square-root is LR * sqrt(WARMUP_ITERS / iteration)"
            yield self.problem("warmup_iters", rule, "set WARMUP_ITERS to 1 or more")

    def _decay_problems(self) -> Iterator[str]:
        """The decays of WSD-S follow one another, and all are over before the final one begins."""
        if not self.wsd_decay_ends:
            rule = "LR_DECAY_STYLE=WSD-S needs the iterations with which decays before the final one end"
            yield self.problem("wsd_decay_ends", rule, "set for instance WSD_DECAY_ENDS=25%,50%")
            return
        before, what = self.warmup_iters, "the warm-up"
        for end in self.decay_ends:
            begin = end - self.wsd_decay_iters
            if begin < before:
                rule = f"a decay of WSD_DECAY_ITERS={self.wsd_decay_iters} up to iteration {end} begins at"
                rule += f" {begin}, before {what} ends at {before}"
                fix = "give iterations in order, at least WSD_DECAY_ITERS apart, and from the end of the run"
                yield self.problem("wsd_decay_ends", rule, fix)
                return
            before, what = end, "the decay before it"

    def _composed_problems(self, decay_name: str) -> Iterator[str]:
        """Pieces follow one another, from the end of the warm-up to that of the schedule."""
        pieces = self.pieces
        before, what = self.warmup_iters, "the warm-up"
        for number, piece in enumerate(pieces, 1):
            end = piece.end // self.gbsz
            if end <= before:
                rule = f"piece {number} ends at iteration {end}, but {what} ends at {before}"
                yield self.problem("lr_decay_style", rule, "give the iterations, or shares, in order")
                return
            before, what = end, "the piece before it"
        if before > self.decay_end:
            rule = f"its last piece ends at iteration {before}, after {decay_name}={self.decay_end}"
            yield self.problem("lr_decay_style", rule, f"leave that end out, or raise {decay_name}")
        if pieces[0].style == "inverse-square-root" and not self.warmup_iters:
            rule = "an inverse square root falls from the end of the warm-up on"
            yield self.problem("warmup_iters", rule, "set WARMUP_ITERS to 1 or more")
