"""Generates text from prompts, one at a time (so none is padded), with a key/value cache. Every rank runs the
same loop: the first replica's last stage draws a token and sends it to all.
"""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.console import Console
from rich.text import Text

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.config import Config, problem
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.engine.runtime import Runtime
from moe_exp.host.files import expanded
from moe_exp.inference.jobs import Request, planned_quietly, run_rank
from moe_exp.inference.layout import Layout, config_for_use, longest_sample
from moe_exp.inference.loading import load_model
from moe_exp.inference.sampling import Sampler, Sampling
from moe_exp.inference.stage import Stage
from moe_exp.inference.text import TextStream, decoder_of, encode, tokenizer_for

logger = logging.getLogger("moe_exp.inference.generate")  # by name: torchrun runs this module as __main__


@dataclass(frozen=True)
class GenerateRequest(Request):
    """Settings of a generation."""

    checkpoint: str  # an iter_ folder, a checkpoints folder or a run folder
    prompts: tuple[str, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128  # per prompt
    max_positions: int = 0  # tokens of prompt and text; 0: the training's SEQ_LEN, the most the model saw
    stops: tuple[str, ...] = ()  # stop texts
    tokenizer: str = ""  # see `text.tokenizer_for`
    allow_special: bool = False  # parse special tokens in prompts
    dtype: str = ""  # compute type; empty: the training's
    as_json: bool = False  # print one JSON object per prompt instead of the text
    layout: Layout = field(default_factory=Layout)  # of the ranks


@dataclass
class Generated:
    """A text, as `--json` prints it."""

    prompt: str
    prompt_tokens: list[int]
    text: str = ""  # after the prompt
    tokens: list[int] = field(default_factory=list)  # of the text, and end of document
    logprobs: list[float] = field(default_factory=list)  # of `tokens`, nats, temperature 1 among all tokens
    finish_reason: str = "length"  # `end_of_document`, `stop` or `length`


@dataclass(frozen=True)
class Plan:
    """A checked request."""

    request: GenerateRequest
    folder: Path
    config: Config
    tokenizer: TextTokenizer
    prompt_tokens: list[list[int]]
    max_positions: int


def plan_generation(request: GenerateRequest) -> Plan:
    """Checks a request without loading weights; ValueError with one line."""
    request.sampling.check()
    if request.max_new_tokens < 1:
        fix = "give the number of tokens to generate"
        raise ValueError(problem("max_new_tokens", request.max_new_tokens, "must be at least 1", fix))
    folder = one_checkpoint(expanded(request.checkpoint))
    saved = saved_config(folder)
    config = config_for_use(folder, request.layout, dtype=request.dtype or None)
    tokenizer = tokenizer_for(
        saved, request.tokenizer, order=saved_order(folder), allow_special=request.allow_special
    )
    seq_len = longest_sample(saved)
    max_positions = request.max_positions or seq_len
    prompts = [_prompt_tokens(tokenizer, text, max_positions, seq_len) for text in request.prompts]
    if max_positions > seq_len:
        text = "max_positions=%d: the model was trained on SEQ_LEN=%d, beyond it may talk nonsense"
        logger.warning(text, max_positions, seq_len)
    if saved.use_moe and saved.moe_type == "moe":
        logger.info("MOE_TYPE=moe: no token is dropped here, every token's experts are computed")
    return Plan(request, folder, config, tokenizer, prompts, max_positions)


def _prompt_tokens(tokenizer: TextTokenizer, text: str, max_positions: int, seq_len: int) -> list[int]:
    shown = repr(text if len(text) <= 40 else f"{text[:40]}...")
    tokens = encode(tokenizer, text)
    if not tokens:
        raise ValueError(
            problem("prompt", shown, "has no token to continue from", "give at least a character")
        )
    if len(tokens) >= max_positions:
        limit = f"the {max_positions} positions there are"
        rule = f"has {len(tokens)} tokens, and with one more that is over {limit}"
        fix = f"shorten it, or give --max-positions; the training had SEQ_LEN={seq_len}"
        raise ValueError(problem("prompt", shown, rule, fix))
    return tokens


def new_tokens(
    stage: Stage, prompt: Sequence[int], sampler: Sampler, *, max_positions: int
) -> Generator[tuple[int, float], None, None]:
    """Yields tokens after a prompt, with log-probabilities, up to `max_positions`. Called by every rank."""
    next_tokens, num_tokens = list(prompt), len(prompt)
    with stage.cache(max_positions):
        while num_tokens < max_positions:
            logits = stage.logits(torch.tensor([next_tokens]), last_only=True)
            token, log_prob = _agreed(stage, logits, sampler)
            yield token, log_prob
            next_tokens, num_tokens = [token], num_tokens + 1


def _agreed(stage: Stage, logits: torch.Tensor | None, sampler: Sampler) -> tuple[int, float]:
    """The draw of the first replica's last stage, on every rank."""
    rank, draws = stage.rank, stage.writes and stage.rank.groups.dp.rank() == 0
    drawn = sampler.draw(logits[0, 0]) if draws and logits is not None else (0, 0.0)
    if rank.world_size == 1:
        return drawn
    # all others contribute zeros
    box = torch.tensor(drawn, dtype=torch.float64, device=rank.device)
    torch.distributed.all_reduce(box)
    return int(box[0].item()), box[1].item()


def generate(
    plan: Plan,
    rank: Runtime,
    *,
    begin: Callable[[str], None] = lambda prompt: None,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Generated]:
    """Loads the model and yields a result per prompt. `begin` gets each prompt first, then `show` its text as
    it comes. Called by every rank.
    """
    stage = Stage(plan.config, rank, load_model(plan.config, rank, plan.folder))
    return continue_prompts(plan, stage, begin=begin, show=show)


def continue_prompts(
    plan: Plan,
    stage: Stage,
    *,
    begin: Callable[[str], None] = lambda prompt: None,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Generated]:
    """Like `generate`, with a model that is loaded. Called by every rank."""
    decode, eod_id = decoder_of(plan.tokenizer), plan.tokenizer.eod_id
    for index, (prompt, tokens) in enumerate(zip(plan.request.prompts, plan.prompt_tokens, strict=True)):
        result, stream = Generated(prompt, tokens), TextStream(decode, tokens, plan.request.stops)
        last = min(plan.max_positions, len(tokens) + plan.request.max_new_tokens)
        begin(prompt)
        clock = _Clock(len(tokens))
        drawn = new_tokens(stage, tokens, Sampler(plan.request.sampling, index), max_positions=last)
        with contextlib.closing(drawn):  # frees the cache
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
        if stream.stopped:  # also by what was held back, as it ended in part of a character
            result.finish_reason = "stop"
        yield result
        logger.info("%s", clock) if stage.rank.is_first else None  # after the caller has ended the line


def _grow(result: Generated, text: str, show: Callable[[str], None]) -> None:
    result.text += text
    if text:
        show(text)


class _Clock:
    """Times the prompt (up to the first token) and the later tokens."""

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
        first = f"first token after {prompt:.2f} s (prompt of {self.num_prompt} tokens)"
        return f"{first}, then {self.num_tokens - 1} in {rest:.2f} s{rate}"


def print_generated(plan: Plan, rank: Runtime) -> None:
    """Generates, and prints text as it comes, or JSON lines, on rank 0; a terminal also shows the prompts.
    Called by every rank.
    """
    as_json, out = plan.request.as_json, sys.stdout
    is_terminal = out.isatty() and not as_json

    def begin(prompt: str) -> None:
        if rank.is_first and is_terminal:
            Console().print(Text(prompt, style="bold"), end="", soft_wrap=True)

    def show(text: str) -> None:
        if rank.is_first and not as_json:
            out.write(text)
            out.flush()

    for number, result in enumerate(generate(plan, rank, begin=begin, show=show), 1):
        if rank.is_first:
            more = number < len(plan.prompt_tokens) and not is_terminal
            print(json.dumps(asdict(result), ensure_ascii=False) if as_json else "\n" * more, flush=True)


def main(request_file: str) -> None:
    """Runs one rank of a torchrun job."""
    plan = planned_quietly(lambda: plan_generation(GenerateRequest.read(request_file)))
    run_rank(plan.config, lambda rank: print_generated(plan, rank))


if __name__ == "__main__":
    main(sys.argv[1])
