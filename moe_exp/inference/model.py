"""A trained model loaded into this process (`moe_exp.load_model`), and a layer-by-layer comparison of a
converted model with transformers' model (`convert from-hf --verify`).
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.checkpoint.hf.model_folder import is_mxfp4, read_json
from moe_exp.config import setting_error
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.engine import runtime
from moe_exp.host.files import expanded
from moe_exp.inference.generate import Generated, GenerateRequest, Sampling, generate, plan_generation
from moe_exp.inference.ranks import Layout, Stage, batch_size_of, check_files, config_for_use, load_model
from moe_exp.inference.text import decoder_of, encode, tokenizer_for

NUM_TOKENS = 64
LIMIT = 1e-4  # relative, in fp32; the models tested have at most 4e-7


class Model:
    """A checkpoint's model on one GPU or on the CPU; `moe_exp.load_model` explains the arguments. The
    model never drops tokens, even if tokens were dropped in training.

    Attributes:
        config: the model's settings.
        folder: iter_ folder of the checkpoint.
        module: Megatron's GPTModel, in eval mode.
    """

    def __init__(self, path: str | os.PathLike[str], *, dtype: str = "", tokenizer: str = ""):
        self.folder = one_checkpoint(expanded(path))
        self._dtype, self._tokenizer = dtype, tokenizer
        check_files(self.folder)
        self.config = config_for_use(self.folder, Layout(), dtype=dtype)
        rank = runtime.share_alone(self.config)
        self.module = load_model(self.config, rank, self.folder)
        self._stage = Stage(self.config, rank, self.module)

    def __repr__(self) -> str:
        return f"<Model {self.folder}>"

    def generate(
        self, prompt: str, *, max_new_tokens: int = 128, temperature: float = 0.0, top_k: int = 0,
        top_p: float = 1.0, seed: int = 1234, stop: str | Sequence[str] = (),
    ) -> Generated:  # fmt: skip
        """Continues a prompt; docs/inference.md describes the options.

        Args:
            prompt: the text to continue, at least one token.
            max_new_tokens: maximum number of new tokens; prompt + text never exceed the training's SEQ_LEN.
            temperature: divisor of the logits; 0 always chooses the most probable token.
            top_k: sample from the k most probable tokens; 0: from all tokens.
            top_p: sample from the most probable tokens whose probabilities add up to this value.
            seed: seed of the random stream.
            stop: one or more stop texts; the output is cut before the first stop text that appears.

        Returns:
            The `text` after the prompt, the text's `tokens`, their `logprobs`, and the `finish_reason`.

        Raises:
            ValueError: if an argument is invalid, or no tokenizer is found.
        """
        request = GenerateRequest(
            checkpoint=str(self.folder),
            prompts=(prompt,),
            sampling=Sampling(temperature, top_k, top_p, seed),
            max_new_tokens=max_new_tokens,
            stops=tuple(filter(None, (stop,) if isinstance(stop, str) else stop)),
            tokenizer=self._tokenizer,
            dtype=self._dtype,
        )
        (result,) = generate(plan_generation(request), self._stage)
        return result

    def score(self, tokens: Tensor | Sequence[Sequence[int]]) -> Tensor:
        """Next-token logits at each position of `tokens`.

        Attention crosses document boundaries, even if the model was trained with DOCUMENT_MASK. The
        command `moe-exp score` instead limits attention as in training.

        Args:
            tokens: integer ids, [B, S].

        Returns:
            float32 [B, S, V], on the CPU.

        Raises:
            ValueError: if an id is not in the vocabulary, or the shape or dtype is wrong.
        """
        ids, vocab_size = torch.as_tensor(tokens), self.config.vocab_size
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            what = f"{ids.dtype} {list(ids.shape)}"
            fix = "pass a row of ids for each text"
            raise setting_error("tokens", what, "must be integers of shape [B, S]", fix)
        ids = ids.long()
        if ids.min() < 0 or ids.max() >= vocab_size:
            wrong = int(ids.max() if ids.max() >= vocab_size else ids.min())
            fix = "use the training's tokenizer, as `encode` does"
            raise setting_error("tokens", wrong, f"must be from 0 to {vocab_size - 1}", fix)
        rows = batch_size_of(self.config, ids.size(1), len(ids), capacity=False)
        logits = (self._stage.logits(batch) for batch in ids.split(rows))
        return torch.cat([part.cpu() for part in logits if part is not None])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        return encode(self._text_tokenizer(), text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of token ids."""
        return decoder_of(self._text_tokenizer())(tokens)

    def _text_tokenizer(self) -> TextTokenizer:
        return tokenizer_for(saved_config(self.folder), self._tokenizer, order=saved_order(self.folder))


def check_transformers() -> None:
    """Raises ValueError if transformers is not installed."""
    try:
        import transformers  # noqa: F401
    except ImportError:
        rule, fix = "requires transformers, which is not installed", "pip install transformers, or omit it"
        raise setting_error("verify", True, rule, fix) from None


@torch.no_grad()
def compare(source: Path, target: Path) -> tuple[list[str], bool]:
    """Compares both models in fp32 on random tokens; returns lines to print, and whether the logits agree.

    Args:
        source: Hugging Face folder.
        target: checkpoints folder converted from `source`.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils.quantization_config import Mxfp4Config

    model = Model(target, dtype="fp32")
    config, parts = model.config, model.module
    length = min(NUM_TOKENS, config.seq_len)
    tokens = torch.randint(config.vocab_size, (1, length), generator=torch.Generator().manual_seed(0))
    found: list[Tensor] = []  # outputs of the embedding, the layers but the last, the final norm; logits

    def keep(_: Any, __: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        found.append(hidden.transpose(0, 1).float().cpu())

    for part in (parts.embedding, *list(parts.decoder.layers)[:-1], parts.decoder.final_layernorm):
        part.register_forward_hook(keep)
    found.append(model.score(tokens))
    del model, parts  # the other model needs as much memory
    runtime.stop()
    is_packed = is_mxfp4(read_json(source / "config.json"))
    options = {"quantization_config": Mxfp4Config(dequantize=True)} if is_packed else {}
    theirs: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options).eval()
    result = theirs(tokens.clamp(max=theirs.config.vocab_size - 1), output_hidden_states=True)
    layers = [f"layer {number}" for number in range(1, config.num_layers)]
    names = ["embedding", *layers, "last layer, norm", "logits"]
    differences = {}
    for name, ours, other in zip(names, found, (*result.hidden_states, result.logits), strict=True):
        other = other[..., : ours.size(-1)]
        norms = torch.linalg.vector_norm(ours - other), torch.linalg.vector_norm(other)
        differences[name] = float(norms[0] / norms[1])
    agrees = differences["logits"] <= LIMIT
    lines = [f"{length} random tokens in fp32, relative difference from transformers:"]
    lines += [f"  {name:<20}{value:.1e}" for name, value in differences.items()]
    begins = next((name for name, value in differences.items() if not value <= LIMIT), "")
    lines.append(f"differs from {begins} on (limit {LIMIT:.0e})" if begins else "the models agree")
    return lines, agrees
