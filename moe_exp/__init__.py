"""Mixture-of-Experts training on Megatron-Core.

Importing anything of this package lets megatron-core run on a host without CUDA, see
`moe_exp.host.megatron_cpu`; neither torch nor megatron is imported for that before somebody imports a module
of megatron.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _PreparesMegatron(MetaPathFinder):
    """Imports `moe_exp.host.megatron_cpu`, and with it torch, when the first module of megatron is looked
    for.
    """

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
