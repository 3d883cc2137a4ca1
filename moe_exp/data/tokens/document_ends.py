"""Documents of token files, for DOCUMENT_MASK and EOD_MASK_LOSS: what ends them, and how long they are. No
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from moe_exp.config import Config, problem
from moe_exp.data.samples.packing import attended_share
from moe_exp.data.tokens.files import TokenFiles
from moe_exp.data.tokens.tokens import parse_blend

_FIX = "tokenize with --append-eod, or set DOCUMENT_MASK=false and EOD_MASK_LOSS=false"


def check_ends(config: Config, prefixes: Sequence[str]) -> tuple[list[str], int | None]:
    """A line for each of the token files that has no end-of-document token, or another one; and the token."""
    name = "document_mask" if config.document_mask else "eod_mask_loss"
    problems, found = [], {}
    for prefix in dict.fromkeys(prefixes):
        files = TokenFiles(prefix)
        eod_id, how = files.end_of_document
        if eod_id is None:
            problems.append(problem(name, "true", f"{prefix} has no end-of-document token: {how}", _FIX))
        elif (share := files.share_ending_with(eod_id)) < 0.5:
            rule = f"{share:.0%} of the documents of {prefix} end with the end-of-document token {eod_id}"
            problems.append(problem(name, "true", rule, _FIX))
        else:
            found[prefix] = eod_id
    if len(set(found.values())) > 1:
        listed = ", ".join(f"{eod_id} in {prefix}" for prefix, eod_id in found.items())
        rule = f"documents end with different tokens: {listed}"
        problems.append(problem(name, "true", rule, "tokenize all of them with the same tokenizer"))
    return problems, next(iter(found.values()), None)


def with_document_tokens(config: Config, blend: str) -> Config:
    """`config` with DOCUMENT_TOKENS as the token files of `blend` have it, if it is needed and not given."""
    if not config.document_mask or config.document_tokens or not blend:
        return config
    members = parse_blend(blend)
    shares = [
        (weight, attended_share(TokenFiles(prefix), config.seq_len, config.document_packing))
        for weight, prefix in members
    ]
    mean = sum(weight * share for weight, share in shares) / sum(weight for weight, _ in shares)
    return config.model_copy(update={"document_tokens": max(1.0, mean * config.seq_len)})
