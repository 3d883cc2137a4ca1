"""Mixture-of-Experts training on Megatron-Core: `train`, `load_run`, `load_model` and `plan`.

See docs/library.md. Importing this package enables megatron-core on hosts without CUDA (see
`moe_exp.host.megatron_cpu`), but imports neither torch nor megatron.
"""

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_exp.api import load_model, load_run, plan, train

__version__ = "0.2.0"
__all__ = ["__version__", "load_model", "load_run", "plan", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from moe_exp import api

    return getattr(api, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _PreparesMegatron(MetaPathFinder):
    """Imports `moe_exp.host.megatron_cpu` (which imports torch) before any megatron module is imported."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith("megatron."):  # `megatron` itself is a namespace without code
            return None
        from moe_exp.host import megatron_cpu

        return megatron_cpu.find_spec(fullname, path, target)


sys.meta_path.insert(0, _PreparesMegatron())
if any(name.startswith("megatron.") for name in sys.modules):
    from moe_exp.host import megatron_cpu

    megatron_cpu.refuse_if_too_late()
