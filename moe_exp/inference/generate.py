"""Generates text with a key/value cache, one prompt after another, without padding. All ranks run the same
loop: the last stage of the first replica samples a token and sends it to all ranks.
"""

import contextlib
import hashlib
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
from torch import Tensor

from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.config import Config, setting_error
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.engine.runtime import Runtime
from moe_exp.inference import ranks
from moe_exp.inference.text import TextStream, decoder_of, encode, tokenizer_for

logger = logging.getLogger("moe_exp.inference.generate")  # by name: torchrun runs this module as __main__


@dataclass(frozen=True)
class Sampling:
    """Sampling settings."""

    temperature: float = 0.0  # divides logits; 0: greedy, always the most probable token
    top_k: int = 0  # sample from the k most probable tokens; 0: from all
    # after `top_k`, sample from the fewest most probable tokens with this total probability (nucleus
    # sampling, Holtzman et al. 2020, arXiv:1904.09751); 1: from all
    top_p: float = 1.0
    seed: int = 1234

    def check(self) -> None:
        """Raises ValueError for the first invalid value."""
        draws, all_tokens = self.temperature != 0, "use a value such as 0.9, or 1 to keep all tokens"
        greedy, fix = "has no effect with temperature 0 (greedy)", "set --temperature to 0.8, or omit it"
        is_number = 0 <= self.temperature < float("inf")
        for name, is_valid, rule, way_out in (
            ("temperature", is_number, "must be a number of at least 0", "use 0 for greedy, or about 0.8"),
            ("top_k", self.top_k >= 0, "must not be negative", "use a number of tokens, or 0 for all"),
            ("top_p", 0 < self.top_p <= 1, "must be greater than 0 and at most 1", all_tokens),
            ("seed", self.seed >= 0, "must not be negative", "use another number"),
            ("top_k", draws or not self.top_k, greedy, fix),
            ("top_p", draws or self.top_p == 1, greedy, fix),
        ):
            if not is_valid:
                raise setting_error(name, getattr(self, name), rule, way_out)


class Sampler:
    """Samples a text's tokens. Each text has its own random stream, equal on every rank and device."""

    def __init__(self, sampling: Sampling, text_index: int = 0):
        self.sampling = sampling
        digest = hashlib.sha256(f"{sampling.seed}:{text_index}".encode()).digest()
        # PyTorch's CPU generator uses only 32 bits of the seed
        self._stream = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))

    def draw(self, logits_V: Tensor) -> tuple[int, float]:
        """Samples a token. Returns its id and log-probability in nats (full vocabulary, temperature 1)."""
        log_probs_V = logits_V.double().log_softmax(0)
        token = int(log_probs_V.argmax())
        if self.sampling.temperature:
            probs_K, tokens_K = candidates(logits_V, self.sampling)
            # Inverse CDF of a random number from the CPU: GPUs have different random streams.
            point = torch.rand((), generator=self._stream, dtype=torch.float64).item() * probs_K.sum().item()
            index = torch.searchsorted(probs_K.cumsum(0), point, right=True).clamp_(max=len(probs_K) - 1)
            token = int(tokens_K[index])
        return token, log_probs_V[token].item()


def candidates(logits_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """The K tokens to draw from, most probable first: float64 probabilities (not renormalized) and ids."""
    logits_V = logits_V.double() / sampling.temperature
    probs_V, tokens_V = logits_V.softmax(0).sort(descending=True, stable=True)
    if sampling.top_k:
        probs_V, tokens_V = probs_V[: sampling.top_k], tokens_V[: sampling.top_k]
    if sampling.top_p < 1:
        share_V = probs_V / probs_V.sum()
        # A token is kept if the tokens before it have less than `top_p`, so the first one always is.
        kept = int((share_V.cumsum(0) - share_V < sampling.top_p).sum())
        probs_V, tokens_V = probs_V[:kept], tokens_V[:kept]
    return probs_V, tokens_V


@dataclass(frozen=True)
class GenerateRequest(ranks.Request):
    """Settings of a generation job."""

    prompts: tuple[str, ...]
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128  # per prompt
    max_positions: int = 0  # limit of tokens in prompt and text; 0: the training's SEQ_LEN
    stops: tuple[str, ...] = ()  # stop texts
    tokenizer: str = ""  # see `text.tokenizer_for`
    allow_special: bool = False  # parse special tokens in prompts
    as_json: bool = False  # print one JSON object per prompt instead of the text


@dataclass
class Generated:
    """A generated text. `--json` prints its fields."""

    prompt: str
    prompt_tokens: list[int]
    text: str = ""  # without the prompt
    tokens: list[int] = field(default_factory=list)  # tokens of the text, and the end-of-document token
    logprobs: list[float] = field(default_factory=list)  # for `tokens`, in nats, at temperature 1
    finish_reason: str = "length"  # `end_of_document`, `stop` or `length`


@dataclass(frozen=True)
class GenerationPlan:
    """A checked request."""

    request: GenerateRequest
    folder: Path
    config: Config
    tokenizer: TextTokenizer
    prompt_tokens: list[list[int]]
    max_positions: int


def plan_generation(request: GenerateRequest) -> GenerationPlan:
    """Checks a request without loading weights; raises ValueError for the first problem."""
    request.sampling.check()
    if request.max_new_tokens < 1:
        fix = "use the number of tokens to generate"
        raise setting_error("max_new_tokens", request.max_new_tokens, "must be at least 1", fix)
    folder = request.folder
    saved, config = saved_config(folder), request.config_for(folder)
    tokenizer = tokenizer_for(
        saved, request.tokenizer, order=saved_order(folder), allow_special=request.allow_special
    )
    seq_len = saved.longest_sample
    max_positions = request.max_positions or seq_len
    prompts = []
    for prompt in request.prompts:
        shown = repr(prompt if len(prompt) <= 40 else f"{prompt[:40]}...")
        prompts.append(tokens := encode(tokenizer, prompt))
        if not tokens:
            raise setting_error("prompt", shown, "must have at least one token", "use at least one character")
        if len(tokens) >= max_positions:
            rule = f"has {len(tokens)} tokens, but must have fewer than max_positions={max_positions}"
            fix = f"shorten the prompt, or raise --max-positions; training used SEQ_LEN={seq_len}"
            raise setting_error("prompt", shown, rule, fix)
    if max_positions > seq_len:
        text = "max_positions=%d: the model was trained with SEQ_LEN=%d; longer text may be nonsense"
        logger.warning(text, max_positions, seq_len)
    if saved.use_moe and saved.moe_type == "moe":
        logger.info("MOE_TYPE=moe: generating without dropped tokens")
    return GenerationPlan(request, folder, config, tokenizer, prompts, max_positions)


def new_tokens(
    stage: ranks.Stage, prompt: Sequence[int], sampler: Sampler, *, max_positions: int
) -> Generator[tuple[int, float], None, None]:
    """Yields new tokens and their log-probabilities until prompt and new text have
    `max_positions` tokens in total. All ranks must call this.
    """
    next_tokens, num_tokens = list(prompt), len(prompt)
    with stage.cache(max_positions):
        while num_tokens < max_positions:
            logits = stage.logits(torch.tensor([next_tokens]), last_only=True)
            # One rank samples. All others contribute zeros, so that the sum broadcasts its token.
            draws = stage.writes and stage.rank.groups.dp.rank() == 0
            token, log_prob = sampler.draw(logits[0, 0]) if draws and logits is not None else (0, 0.0)
            if stage.rank.world_size > 1:
                # float64 represents every token id exactly
                box = torch.tensor([token, log_prob], dtype=torch.float64, device=stage.rank.device)
                torch.distributed.all_reduce(box)
                token, log_prob = int(box[0].item()), box[1].item()
            yield token, log_prob
            next_tokens, num_tokens = [token], num_tokens + 1


def generate(
    plan: GenerationPlan, stage: ranks.Stage, *, begin: Callable[[str], None] = lambda prompt: None,
    show: Callable[[str], None] = lambda text: None,
) -> Iterator[Generated]:  # fmt: skip
    """Yields a result per prompt. Calls `begin` with the prompt, then `show` with each new piece of text."""
    decode, eod_id = decoder_of(plan.tokenizer), plan.tokenizer.eod_id

    def grow(result: Generated, text: str) -> None:
        result.text += text
        if text:
            show(text)

    for index, (prompt, tokens) in enumerate(zip(plan.request.prompts, plan.prompt_tokens, strict=True)):
        result, stream = Generated(prompt, tokens), TextStream(decode, tokens, plan.request.stops)
        last = min(plan.max_positions, len(tokens) + plan.request.max_new_tokens)
        begin(prompt)
        times = [time.monotonic()]  # start time, then the time of each token
        drawn = new_tokens(stage, tokens, Sampler(plan.request.sampling, index), max_positions=last)
        with contextlib.closing(drawn):  # frees the cache
            for token, log_prob in drawn:
                times.append(time.monotonic())
                result.tokens.append(token)
                result.logprobs.append(log_prob)
                if token == eod_id:
                    result.finish_reason = "end_of_document"
                    break
                grow(result, stream.push(token))
                if stream.stopped:
                    break
        grow(result, stream.finish())
        if stream.stopped:  # text that was held back may also complete a stop text
            result.finish_reason = "stop"
        yield result
        if stage.rank.is_first:  # after the caller has printed the end of the line
            later, rest = len(times) - 2, times[-1] - times[1]
            rate = f", {later / rest:,.0f} tokens/s" if rest else ""
            what = "first token after %.2f s (prompt: %d tokens), then %d tokens in %.2f s%s"
            logger.info(what, times[1] - times[0], len(tokens), later, rest, rate)


def print_generated(plan: GenerationPlan, rank: Runtime) -> None:
    """Generates text. Rank 0 prints JSON lines or streams text; a terminal also shows the prompt."""
    as_json, out = plan.request.as_json, sys.stdout
    is_terminal = out.isatty() and not as_json

    def begin(prompt: str) -> None:
        if rank.is_first and is_terminal:
            Console().print(Text(prompt, style="bold"), end="", soft_wrap=True)

    def show(text: str) -> None:
        if rank.is_first and not as_json:
            out.write(text)
            out.flush()

    stage = ranks.Stage(plan.config, rank, ranks.load_model(plan.config, rank, plan.folder))
    for number, result in enumerate(generate(plan, stage, begin=begin, show=show), 1):
        if rank.is_first:
            more = number < len(plan.prompt_tokens) and not is_terminal
            print(json.dumps(asdict(result), ensure_ascii=False) if as_json else "\n" * more, flush=True)


if __name__ == "__main__":
    ranks.run_rank(lambda file: plan_generation(GenerateRequest.read(file)), print_generated)
