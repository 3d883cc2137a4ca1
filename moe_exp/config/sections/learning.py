"""Settings for learning rate, parameter groups and batch sizes."""

import bisect
import math
from collections.abc import Iterator
from typing import Annotated, NamedTuple

from moe_exp.config import parsers
from moe_exp.config.choices import DECAYS, PIECES, SCHEDULES, one_of
from moe_exp.config.errors import multiples, problem
from moe_exp.config.parameter_names import parameter_sizes, useless_rules
from moe_exp.config.parsers import Rule, composed, is_composed, iteration_of
from moe_exp.config.sections.parallel import SIZE_MULTIPLES, ParallelSettings
from moe_exp.config.setting_types import IterationsOrShares, NonNegative, ParameterGroups, Positive
from moe_exp.config.traits import costly, learning

_MOST_RAMP_STEPS, _MOST_RAMP_SAMPLES = 10_000, 10**15


class Piece(NamedTuple):
    """One piece of a learning-rate schedule."""

    style: str  # one of PIECES
    start: int  # samples consumed when it begins
    end: int  # samples consumed when the next piece begins
    target: float | None  # final learning rate as a fraction of LR; None: MIN_LR, or no change if constant


class RampStep(NamedTuple):
    """`num_iterations` consecutive iterations of `batch_size` samples each; `samples` is the total."""

    batch_size: int
    num_iterations: int
    samples: int


class Batches(NamedTuple):
    """Batch sizes of a run (`config.batches`), as with --rampup-batch-size in Megatron-LM.

    RAMPUP_BATCH_SIZE is "START INCREMENT SAMPLES". SAMPLES is divided equally among n = (GBSZ - START) /
    INCREMENT steps, so after c samples the batch size is START + floor(c / (SAMPLES / n)) * INCREMENT.
    Megatron-Core 0.18 and later versions have no calculator for such ramp-ups.
    """

    gbsz: int
    rampup: tuple[int, int, int] | None  # START, INCREMENT, SAMPLES
    train_iters: int

    def size_at(self, consumed_samples: int) -> int:
        """Batch size of the iteration that begins after `consumed_samples` samples."""
        if self.rampup is None:
            return self.gbsz
        start, increment, samples = self.rampup
        num_steps = (self.gbsz - start) // increment
        if not num_steps or consumed_samples > samples:
            return self.gbsz
        return start + int(consumed_samples / (samples / num_steps)) * increment

    def steps(
        self, num_samples: int | None = None, consumed: int = 0, iterations: int | None = None
    ) -> list[RampStep]:
        """Batch-size steps after `consumed` samples, in order. Omits batch sizes that no iteration uses.

        If `num_samples` is given, the steps end when the total of consumed samples reaches it. Otherwise, the
        steps cover `iterations` iterations (default: TRAIN_ITERS).
        """
        found, left = [], self.train_iters if iterations is None else iterations
        while consumed < num_samples if num_samples is not None else left:
            size = self.size_at(consumed)
            left = left if num_samples is None else -(-(num_samples - consumed) // size)
            # The size never decreases, so bisect for the first iteration with another size.
            is_other = lambda i, b=consumed, s=size: self.size_at(b + i * s) != s  # noqa: E731
            count = bisect.bisect_left(range(left), True, key=is_other)
            found.append(RampStep(size, count, count * size))
            consumed, left = consumed + count * size, left - count
        return found

    def samples_of(self, iterations: int, consumed_samples: int = 0) -> int:
        """Number of samples in the first `iterations` iterations after `consumed_samples`."""
        return sum(step.samples for step in self.steps(None, consumed_samples, max(iterations, 0)))


class LearningSettings(ParallelSettings):
    """First settings of the section Optimization, from LR to RAMPUP_BATCH_SIZE."""

    lr: float = learning(0.0006, "peak learning rate", gt=0)
    min_lr: float = learning(6e-05, "final learning rate", ge=0)
    router_lr_mult: float = learning(1.0, "multiplier of LR and MIN_LR for routers", gt=0)
    expert_lr_mult: float = learning(1.0, "multiplier of LR and MIN_LR for routed experts", gt=0)
    lr_groups: ParameterGroups = learning(
        "",
        "multipliers by parameter name, such as '*.router.*:lr=0.5,wd=0;*embedding*:lr=2'; lr multiplies LR "
        "and MIN_LR, wd multiplies WEIGHT_DECAY; the first matching pattern applies (docs/learning_rate.md)",
    )
    lr_decay_style: Annotated[str, one_of(SCHEDULES, read=parsers.read_composed)] = learning(
        "cosine",
        "learning-rate schedule: a name, or a comma-separated list of phases such as 'constant:80%,linear' "
        "(constant for 80% of the iterations, then linear decay; docs/learning_rate.md)",
    )
    mbsz: Positive = costly(8, "micro-batch size (samples)")
    gbsz: Positive = costly(64, "global batch size (samples)")
    train_iters: Positive = learning(40000, "number of training iterations")
    warmup_iters: NonNegative = learning(
        1000,
        "length of the linear warm-up (iterations); if TRAIN_ITERS is set, the default is at most a tenth of "
        "TRAIN_ITERS",
    )
    decay_iters: NonNegative = learning(0, "iteration at which MIN_LR is reached; 0: same as TRAIN_ITERS")
    wsd_decay_iters: NonNegative = learning(
        0,
        "number of iterations in the final decay (LR_DECAY_STYLE=WSD or power) or in each decay "
        "(LR_DECAY_STYLE=WSD-S)",
    )
    wsd_decay_style: Annotated[str, one_of(DECAYS)] = learning(
        "linear", "shape of each decay phase (WSD_DECAY_ITERS long); minus_sqrt: 1 - sqrt(elapsed fraction)"
    )
    wsd_decay_ends: IterationsOrShares = learning(
        "",
        "ends of all decays except the final decay, as iterations or fractions such as 25%,50%; after each "
        "of these decays, the learning rate returns to LR (LR_DECAY_STYLE=WSD-S)",
    )
    lr_power_a: float = learning(
        4.0,
        "factor A of LR_DECAY_STYLE=power: the learning rate is min(LR, GBSZ * A * tokens^B), where tokens "
        "is the number of tokens so far",
        gt=0,
    )
    lr_power_b: float = learning(-0.51, "exponent B of LR_DECAY_STYLE=power", lt=0)
    rampup_batch_size: str = learning(
        "",
        "batch size ramp-up 'START INCREMENT SAMPLES': from START to GBSZ in steps of INCREMENT, over "
        "SAMPLES samples",
    )

    @property
    def num_microbatches(self) -> int:
        """Number of micro-batches per iteration and replica at the full global batch size."""
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
        """Batch size schedule of the run."""
        return Batches(self.gbsz, self.rampup, self.train_iters)

    def mtp_loss_coeff_at(self, consumed_samples: int) -> float:
        """MTP_LOSS_COEFF after `consumed_samples`. The schedule's iterations have GBSZ samples, as for LR."""
        batches, last = consumed_samples / self.gbsz, self.decay_end
        pieces = parsers.value_pieces(str(self.mtp_loss_coeff))
        return next(float(value) for value, end in pieces if not end or batches < iteration_of(end, last))

    @property
    def parameter_rules(self) -> list[Rule]:
        """Rules of LR_GROUPS, ROUTER_LR_MULT and EXPERT_LR_MULT, in order of precedence."""
        rules = list(parsers.parsed_groups(self.lr_groups)) if self.lr_groups else []
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
        """Iterations at which the decays of WSD and WSD-S end, including the final decay."""
        points = self.wsd_decay_ends.split(",") if self.lr_decay_style == "WSD-S" else []
        return [*(iteration_of(point, self.decay_end) for point in points if point), self.decay_end]

    @property
    def pieces(self) -> list[Piece]:
        """Pieces of the schedule after the warm-up, in order; at least one if the settings are valid.

        The first piece begins at the end of the warm-up. If a final decay begins during
        the warm-up, the warm-up replaces that part of the decay, as in Megatron. Raises ValueError for an
        unsupported LR_DECAY_STYLE.
        """
        pieces, start = [], self.warmup_iters
        for style, end, target in self._pieces_in_iterations():
            pieces.append(Piece(style, start * self.gbsz, end * self.gbsz, target))
            start = end
        return pieces

    def _pieces_in_iterations(self) -> list[tuple[str, int, float | None]]:
        """Style, last iteration and target (see Piece) of each piece."""
        style, end, decay = self.lr_decay_style, self.decay_end, self.wsd_decay_iters
        if is_composed(style):
            return [(name, iteration_of(until, end), target) for name, until, target in composed(style)]
        if style in PIECES and not SCHEDULES[style].has_final_decay:
            return [(style, end, None)]
        if style == "power":
            return [(style, end - decay, None), *([(self.wsd_decay_style, end, None)] if decay else [])]
        if style not in ("WSD", "WSD-S"):
            rule = "its pieces are not defined in config/sections/learning.py"
            raise ValueError(f"lr_decay_style={style}: {rule}. Fix: use cosine.")
        parts: list[tuple[str, int, float | None]] = []
        for last in self.decay_ends:
            parts += [("constant", last - decay, 1.0), (self.wsd_decay_style, last, None)]
        return parts

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.world_size % (self.tp * self.pp * self.cp) == 0:  # whole replicas
            yield from self._batch_problems(self.data_parallel_size)
        yield from self._schedule_problems("DECAY_ITERS" if self.decay_iters else "TRAIN_ITERS")
        if rules := self.parameter_rules:  # each must apply to some parameter
            for rule, *text in useless_rules(rules, list(parameter_sizes(self))):
                value = rule.pattern if rule.setting == "lr_groups" else getattr(self, rule.setting)
                yield problem(rule.setting, value, *text)

    def _batch_problems(self, replicas: int) -> Iterator[str]:
        """Checks that every batch consists of whole micro-batches on all data-parallel replicas."""
        step = self.mbsz * replicas
        if self.gbsz % step:
            fix = f"set GBSZ to {multiples(step, self.gbsz)}"
            if self.gbsz % replicas == 0:
                fix += f", or MBSZ to {math.gcd(self.mbsz, self.gbsz // replicas)}"
            yield self.problem("gbsz", f"must be a multiple of MBSZ*DP={self.mbsz}*{replicas}={step}", fix)
        elif self.vpp and self.pp > 1 and self.num_microbatches % self.pp:
            # Megatron requires (micro-batches mod group size) to be 0 or at least PP. Here the group size is
            # PP, so it must be 0.
            rule = f"requires a multiple of PP={self.pp} micro-batches"
            rule += f", but GBSZ / (MBSZ*DP) is {self.num_microbatches}"
            fix = f"set GBSZ to {multiples(step * self.pp, self.gbsz)}, or VPP=none"
            yield self.problem("vpp", rule, fix)
        if self.rampup_batch_size and (rule := self._broken_ramp_rule(replicas)):
            size = step * self.pp if self.vpp else step
            fix = f"set START INCREMENT SAMPLES, for example '{size} {size} 1000'"
            yield self.problem("rampup_batch_size", rule, "correct GBSZ first" if self.gbsz % size else fix)

    def _broken_ramp_rule(self, replicas: int) -> str:
        """Returns the rule that RAMPUP_BATCH_SIZE breaks, or '' if it breaks none."""
        try:
            start, increment, samples = self.rampup or (0, 0, 0)
        except ValueError:
            start = increment = samples = 0
        if min(start, increment, samples) < 1:
            return "must be three positive whole numbers"
        if start > self.gbsz or (self.gbsz - start) % increment:
            return f"GBSZ={self.gbsz} must be START plus a multiple of INCREMENT"
        if (self.gbsz - start) // increment > _MOST_RAMP_STEPS or samples > _MOST_RAMP_SAMPLES:
            return f"must have at most {_MOST_RAMP_STEPS} steps and {_MOST_RAMP_SAMPLES} samples"
        # without GBSZ itself, the last; a run skips a size whose part of the ramp is shorter than one batch
        step, sizes = self.mbsz * replicas, range(start, self.gbsz, increment)
        for number, size in enumerate(sizes, start=1):
            has = f"step {number} of {len(sizes) + 1} has a batch of {size}"
            if size % step:
                return f"{has}, not a multiple of MBSZ*DP={self.mbsz}*{replicas}={step}"
            if self.vpp and size % (step * self.pp):
                product = f"PP*MBSZ*DP={self.pp}*{self.mbsz}*{replicas}={step * self.pp}"
                return f"{has}, which with VPP={self.vpp} must be a multiple of {product}"
        return ""

    def _schedule_problems(self, decay_name: str) -> Iterator[str]:
        """Checks the learning-rate settings and the number of tokens per micro-batch."""
        decay, style = self.decay_end, self.lr_decay_style
        slots = self.mbsz * self.seq_len * self.topk
        tokens = self.seq_len * self.mbsz // (self.cp * self.tp)
        multiple = SIZE_MULTIPLES[self.fp8_recipe]
        is_fp8 = self.fp8 != "none" and not self.is_fp8_by_kernels and self.impl != "local"
        yield from self.broken(
            (self.use_moe and self.token_rounding > slots, "token_rounding",
             f"must be at most {slots}, the token-expert pairs of a micro-batch (MBSZ * SEQ_LEN * TOPK)",
             "set TOKEN_ROUNDING to the tile size of the kernels (64 or 128), or to 0"),
            (is_fp8 and tokens % multiple, "seq_len",
             f"with MBSZ={self.mbsz} a rank has {tokens} tokens, but FP8_RECIPE={self.fp8_recipe} requires a"
             f" multiple of {multiple}", "change SEQ_LEN or MBSZ, or set FP8=none"),
            (self.warmup_iters >= decay, "warmup_iters",
             f"must be less than {decay_name}={decay}, the end of the decay",
             f"set WARMUP_ITERS below {decay}, or raise {decay_name}"),
            (self.min_lr > self.lr, "min_lr",
             f"must be at most LR={self.lr}", f"lower MIN_LR, for example to {self.lr / 10:g}"),
        )  # fmt: skip
        points = [end for _, end in parsers.value_pieces(str(self.mtp_loss_coeff)) if end]
        if (ends := [iteration_of(end, decay) for end in points]) != sorted(set(ends)):
            rule = f"values end at iterations {', '.join(map(str, ends))}, which are not ascending"
            yield self.problem("mtp_loss_coeff", rule, "make each value end later than the one before it")
        if is_composed(style):
            yield from self._composed_problems(decay_name)
            return
        schedule = SCHEDULES[style]
        least = int(schedule.needs_it)
        if schedule.has_final_decay and not least <= self.wsd_decay_iters <= decay:
            fix = f"set WSD_DECAY_ITERS to a value from {least} to {decay}, or another LR_DECAY_STYLE"
            rule = f"must be from {least} to {decay_name}={decay} with LR_DECAY_STYLE={style}"
            yield self.problem("wsd_decay_iters", rule, fix)
        elif style == "WSD-S":
            yield from self._decay_problems()
        if style == "inverse-square-root" and not self.warmup_iters:
            rule = f"must be positive: LR_DECAY_STYLE={style} is LR * sqrt(WARMUP_ITERS / iteration)"
            yield self.problem("warmup_iters", rule, "set WARMUP_ITERS to 1 or more")

    def _decay_problems(self) -> Iterator[str]:
        """Checks that the decays of WSD-S overlap neither each other nor the warm-up."""
        if not self.wsd_decay_ends:
            rule = "LR_DECAY_STYLE=WSD-S requires the ends of all decays except the final decay"
            yield self.problem("wsd_decay_ends", rule, "set for example WSD_DECAY_ENDS=25%,50%")
            return
        before, what = self.warmup_iters, "the warm-up"
        for end in self.decay_ends:
            begin = end - self.wsd_decay_iters
            if begin < before:
                rule = f"a decay of WSD_DECAY_ITERS={self.wsd_decay_iters} to iteration {end} begins at"
                rule += f" {begin}, before {what} ends at {before}"
                fix = "list iterations in order, at least WSD_DECAY_ITERS apart and before the end of the run"
                yield self.problem("wsd_decay_ends", rule, fix)
                return
            before, what = end, "the previous decay"

    def _composed_problems(self, decay_name: str) -> Iterator[str]:
        """Checks that the pieces end in ascending order, after the warm-up and within the schedule."""
        pieces = self.pieces
        before, what = self.warmup_iters, "the warm-up"
        for number, piece in enumerate(pieces, 1):
            end = piece.end // self.gbsz
            if end <= before:
                rule = f"piece {number} ends at iteration {end}, not after {what}, which ends at {before}"
                yield self.problem("lr_decay_style", rule, "list iterations or fractions in ascending order")
                return
            before, what = end, "the previous piece"
        if before > self.decay_end:
            rule = f"the last piece ends at iteration {before}, after {decay_name}={self.decay_end}"
            yield self.problem("lr_decay_style", rule, f"omit the last piece's end, or raise {decay_name}")
        if pieces[0].style == "inverse-square-root" and not self.warmup_iters:
            rule = "must be positive: an inverse square root decays from the end of the warm-up"
            yield self.problem("warmup_iters", rule, "set WARMUP_ITERS to 1 or more")
