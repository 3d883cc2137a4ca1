"""What has to hold between the settings of attention and of its position embedding; a part of checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from moe_exp.config import Config, problem


def check_attention(c: Config) -> Iterator[str]:
    """Lines of all problems (name, value, rule, fix)."""
    yield from _qk_norm(c)


def _qk_norm(c: Config) -> Iterator[str]:
    if c.qk_norm_scope == "head":
        return
    if not c.qk_norm:
        yield problem("qk_norm_scope", "all", "has no effect while QK_NORM=false", "set QK_NORM=true, or QK_NORM_SCOPE=head")
    if c.normalization != "RMSNorm":
        rule = f"there is no NORMALIZATION={c.normalization} over all heads"
        yield problem("qk_norm_scope", "all", rule, "set NORMALIZATION=RMSNorm, or QK_NORM_SCOPE=head")
