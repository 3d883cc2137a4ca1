"""A trained model in this process (`moe_exp.load_model`)."""

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from moe_exp.checkpoint.format.folders import one_checkpoint
from moe_exp.checkpoint.format.settings import saved_config, saved_order
from moe_exp.config import setting_error
from moe_exp.data.tokens.tokenizer import TextTokenizer
from moe_exp.engine import runtime
from moe_exp.host.files import expanded
from moe_exp.inference.generate import Generated, GenerateRequest, Sampling, generate, plan_generation
from moe_exp.inference.ranks import Layout, Stage, batch_size_of, check_files, config_for_use, load_model
from moe_exp.inference.text import decoder_of, encode, tokenizer_for


class Model:
    """A checkpoint's model on one GPU or on the CPU. It never drops tokens, even if the training did.

    Args:
        path: run folder, checkpoints folder or iter_ folder.
        dtype: compute dtype, fp32, bf16 or fp16; empty: the training's.
        tokenizer: tokenizer.json or its folder, a SentencePiece .model file, or `bytes`; empty: the
            training's.

    Attributes:
        config: the model's settings.
        folder: iter_ folder of the checkpoint.
        module: Megatron's GPTModel, in eval mode.

    Raises:
        ValueError: if the checkpoint cannot be used, or the process is one of several ranks.
    """

    def __init__(self, path: str | os.PathLike[str], *, dtype: str = "", tokenizer: str = ""):
        self.folder = one_checkpoint(expanded(path))
        self._dtype, self._tokenizer = dtype, tokenizer
        check_files(self.folder)
        self.config = config_for_use(self.folder, Layout(), dtype=dtype or None)
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
            max_new_tokens: maximum number of new tokens; the text also ends at the training's SEQ_LEN.
            temperature: divisor of the logits; 0 always chooses the most probable token.
            top_k: sample from the k most probable tokens; 0: from all.
            top_p: sample from the most probable tokens that add up to this probability.
            seed: seed of the random stream.
            stop: text or texts before which the output ends.

        Returns:
            `text` after the prompt, with its `tokens`, their `logprobs` and the `finish_reason`.

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
        """Logits for the token after each of `tokens`.

        Attention is not limited to a document, even if the model was trained with DOCUMENT_MASK. `moe-exp
        score` limits attention as in the training.

        Args:
            tokens: ids, integers [B, S].

        Returns:
            float32 [B, S, V], on the CPU.

        Raises:
            ValueError: if an id is not in the vocabulary, or the shape or dtype is wrong.
        """
        ids, vocab_size = torch.as_tensor(tokens), self.config.vocab_size
        if ids.dim() != 2 or not ids.numel() or ids.is_floating_point():
            what = f"{ids.dtype} {list(ids.shape)}"
            raise setting_error("tokens", what, "must be integers [B, S]", "pass a row of ids for each text")
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
