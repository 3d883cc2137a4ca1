"""Makes Triton's interpreter (3.7) spend its time on kernels: the same work, without looking up the same
things again at every call of a device function, which took a third of the time of a kernel.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from moe_exp.layers.kernels.launch import INTERPRETED


def speed_up() -> None:
    """Where kernels are interpreted: patches `triton.language` once per launch, and keeps numpy's types."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _Once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _NumpyTypes(interpreter)


class _Once:
    """`_patch_lang`, for device functions too: it does nothing while their kernel has patched the same."""

    def __init__(self, interpreter: ModuleType):
        self._patch, self._scope = interpreter._patch_lang, interpreter._LangPatchScope
        self._tl = interpreter.tl
        self._modules: dict[Any, list[Any]] = {}

    def __call__(self, function: Any) -> Any:
        if function not in self._modules:
            values = function.__globals__.values()
            self._modules[function] = [
                value for value in values if value is self._tl or value is self._tl.core
            ]
        modules = self._modules[function]
        if any(self._tl.core.is_builtin(module.load) for module in modules) or not modules:
            return self._patch(function)
        return self._scope()


class _NumpyTypes:
    """`_get_np_dtype`, which builds its table at every call."""

    def __init__(self, interpreter: ModuleType):
        self._find, self._block_type = interpreter._get_np_dtype, interpreter.tl.block_type
        self._found: dict[str, Any] = {}

    def __call__(self, triton_type: Any) -> Any:
        is_block = isinstance(triton_type, self._block_type)
        name = (triton_type.element_ty if is_block else triton_type).name
        if name not in self._found:
            self._found[name] = self._find(triton_type)
        return self._found[name]
