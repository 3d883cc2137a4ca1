"""Prompts to text, token by token. Prompts follow each other, so that none is padded; their tokens are kept
in a cache.

Every rank runs the same loop: the first replica's last stage draws a token and tells it to all.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config
from moe_exp.config import Config, problem
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.engine.runtime import Runtime
from moe_exp.inference.jobs import planned_quietly, run_rank
from moe_exp.inference.layout import Layout, config_for_use
from moe_exp.inference.loading import load_model
from moe_exp.inference.sampling import Sampler, Sampling
from moe_exp.inference.stage import Stage
from moe_exp.inference.text import TextStream, decoder_of, encode, tokenizer_for

logger = logging.getLogger("moe_exp.inference.generate")  # by name: torchrun runs this module as __main__


@dataclass(frozen=True)
class GenerateRequest:
    """What is to be generated.

    Args:
        checkpoint: an iter_ folder, a checkpoints folder or a run folder.
        prompts: texts to go on with.
        sampling: how tokens are drawn.
        max_new_tokens: per prompt.
        max_positions: tokens of prompt and text together; 0: SEQ_LEN of the training, beyond which the model
            has seen nothing.
        stops: texts at which a text ends.
        tokenizer: see `text.tokenizer_for`.
        allow_special: special tokens in a prompt are read as such.
        dtype: compute type; empty: that of the training.
        as_json: print one JSON object per prompt instead of the text.
        layout: of the ranks.
    """

    checkpoint: str
    prompts: tuple[str, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    max_positions: int = 0
    stops: tuple[str, ...] = ()
    tokenizer: str = ""
    allow_special: bool = False
    dtype: str = ""
    as_json: bool = False
    layout: Layout = field(default_factory=Layout)

    @classmethod
    def from_json(cls, text: str) -> "GenerateRequest":
        """From what `to_json` wrote."""
        values = json.loads(text)
        kinds: dict[str, Callable[[Any], Any]] = {
            "sampling": lambda fields: Sampling(**fields), "layout": lambda fields: Layout(**fields),
            "prompts": tuple, "stops": tuple,
        }  # fmt: skip
        return cls(**{name: kinds[name](value) if name in kinds else value for name, value in values.items()})

    def to_json(self) -> str:
        """For the ranks of a job."""
        return json.dumps(asdict(self))


@dataclass
class Generated:
    """A text, as `--json` prints it.

    Args:
        prompt: the text before.
        prompt_tokens: its tokens.
        text: what follows.
        tokens: its tokens, with the one that ended the document.
        logprobs: of each of them, nats, by the model itself (temperature 1, all tokens).
        finish_reason: `end_of_document`, `stop` or `length`.
    """

    prompt: str
    prompt_tokens: list[int]
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str = "length"


@dataclass(frozen=True)
class Plan:
    """A request that was checked: settings, tokenizer, and the prompts' tokens."""

    request: GenerateRequest
    folder: Path
    config: Config
    tokenizer: TextTokenizer
    prompt_tokens: list[list[int]]
    max_positions: int


def plan_generation(request: GenerateRequest) -> Plan:
    """Checks a request without loading weights.

    Raises:
        ValueError: one line for what cannot be.
    """
    request.sampling.check()
    if request.max_new_tokens < 1:
        raise ValueError(
            problem(
                "max_new_tokens",
                request.max_new_tokens,
                "must be at least 1",
                "give the number of tokens to generate",
            )
        )
    folder = one_checkpoint(Path(request.checkpoint).expanduser())
    saved = saved_config(folder)
    config = config_for_use(folder, request.layout, dtype=request.dtype or None)
    tokenizer = tokenizer_for(saved, request.tokenizer, allow_special=request.allow_special)
    max_positions = request.max_positions or saved.seq_len
    prompts = [_prompt_tokens(tokenizer, text, max_positions, saved.seq_len) for text in request.prompts]
    if max_positions > saved.seq_len:
        logger.warning(
            "max_positions=%d: the model was trained on SEQ_LEN=%d, beyond it may talk nonsense",
            max_positions,
            saved.seq_len,
        )
    if saved.use_moe and saved.moe_type == "moe":
        logger.info("MOE_TYPE=moe: no token is dropped here, every token's experts are computed")
    return Plan(request, folder, config, tokenizer, prompts, max_positions)


def _prompt_tokens(tokenizer: TextTokenizer, text: str, max_positions: int, seq_len: int) -> list[int]:
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    tokens = encode(tokenizer, text)
    if not tokens:
        raise ValueError(
            problem("prompt", repr(shown), "has no token to go on from", "give at least a character")
        )
    if len(tokens) >= max_positions:
        rule = (
            f"has {len(tokens)} tokens, and with one more that is over the {max_positions} positions"
            " there are"
        )
        raise ValueError(
            problem(
                "prompt",
                repr(shown),
                rule,
                f"shorten it, or give --max-positions; the training had SEQ_LEN={seq_len}",
            )
        )
    return tokens


def new_tokens(
    stage: Stage, prompt: Sequence[int], sampler: Sampler, *, max_positions: int
) -> Generator[tuple[int, float], None, None]:
    """The tokens that follow a prompt, each with its log-probability; without an end before `max_positions`.
    Called by every rank.
    """
    next_tokens, num_tokens = list(prompt), len(prompt)
    with stage.cache(max_positions):
        while num_tokens < max_positions:
            logits = stage.logits(torch.tensor([next_tokens]), last_only=True)
            token, log_prob = _agreed(stage, logits, sampler)
            yield token, log_prob
            next_tokens, num_tokens = [token], num_tokens + 1


def _agreed(stage: Stage, logits: torch.Tensor | None, sampler: Sampler) -> tuple[int, float]:
    """What the last stage of the first replica draws, on every rank."""
    rank, draws = stage.rank, stage.writes and stage.rank.groups.dp.rank() == 0
    drawn = sampler.draw(logits[0, 0]) if draws and logits is not None else (0, 0.0)
    if rank.world_size == 1:
        return drawn
    # All others send zeros.
    box = torch.tensor(drawn, dtype=torch.float64, device=rank.device)
    torch.distributed.all_reduce(box)
    return int(box[0].item()), box[1].item()


def generate(
    plan: Plan, rank: Runtime, *, show: Callable[[str], None] = lambda text: None
) -> Iterator[Generated]:
    """Loads the model and yields a text per prompt; `show` gets each text piece by piece. Called by every
    rank.
    """
    stage = Stage(plan.config, rank, load_model(plan.config, rank, plan.folder))
    decode, eod_id = decoder_of(plan.tokenizer), plan.tokenizer.eod_id
    for index, (prompt, tokens) in enumerate(zip(plan.request.prompts, plan.prompt_tokens, strict=True)):
        result, stream = Generated(prompt, tokens), TextStream(decode, tokens, plan.request.stops)
        last = min(plan.max_positions, len(tokens) + plan.request.max_new_tokens)
        clock = _Clock(len(tokens))
        drawn = new_tokens(stage, tokens, Sampler(plan.request.sampling, index), max_positions=last)
        with contextlib.closing(drawn):  # which gives the cache up
            for token, log_prob in drawn:
                clock.tick()
                result.tokens.append(token)
                result.logprobs.append(log_prob)
                if token == eod_id:
                    result.finish_reason = "end_of_document"
                    break
                _grow(result, stream.push(token), show)
                if stream.stopped:
                    result.finish_reason = "stop"
                    break
        _grow(result, stream.finish(), show)
        logger.info("%s", clock) if rank.is_first else None
        yield result


def _grow(result: Generated, text: str, show: Callable[[str], None]) -> None:
    result.text += text
    if text:
        show(text)


class _Clock:
    """Seconds for the prompt, which are those of the first token, and for the tokens after it."""

    def __init__(self, num_prompt: int):
        self.num_prompt, self.num_tokens = num_prompt, 0
        self.start = self.first = self.last = time.monotonic()

    def tick(self) -> None:
        self.last = time.monotonic()
        self.first = self.last if not self.num_tokens else self.first
        self.num_tokens += 1

    def __str__(self) -> str:
        prompt, rest = self.first - self.start, self.last - self.first
        rate = f", {(self.num_tokens - 1) / rest:,.0f} tokens/s" if rest else ""
        return (
            f"first token after {prompt:.2f} s (prompt of {self.num_prompt} tokens), then"
            f" {self.num_tokens - 1} in {rest:.2f} s{rate}"
        )


def print_generated(plan: Plan, rank: Runtime) -> None:
    """Generates and prints on rank 0: text as it comes, or JSON lines. Called by every rank."""
    as_json, out = plan.request.as_json, sys.stdout

    def show(text: str) -> None:
        if rank.is_first and not as_json:
            out.write(text)
            out.flush()

    for number, result in enumerate(generate(plan, rank, show=show), 1):
        if rank.is_first:
            more = number < len(plan.prompt_tokens)
            print(json.dumps(asdict(result), ensure_ascii=False) if as_json else "\n" * more, flush=True)


def main(request_file: str) -> None:
    """One rank of a job that torchrun started."""
    plan = planned_quietly(
        lambda: plan_generation(GenerateRequest.from_json(Path(request_file).read_text(encoding="utf-8")))
    )
    run_rank(plan.config, lambda rank: print_generated(plan, rank))


if __name__ == "__main__":
    main(sys.argv[1])
