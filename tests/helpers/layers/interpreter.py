"""Makes Triton's interpreter (3.7) spend its time on kernels: the same work, without looking up the same
things again at every call of a device function, which took a third of the time of a kernel.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from moe_exp.layers.kernels.launch import INTERPRETED


def speed_up() -> None:
    """Where kernels are interpreted: keeps the names of Triton's builtins and the numpy types of its own."""
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_patch_builtin"):
        interpreter._patch_builtin = _ByName(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _NumpyTypes(interpreter)


class _ByName:
    """`_patch_builtin`: asks only names that were builtins once, not all members of the module or class."""

    def __init__(self, interpreter: ModuleType):
        self._interpreter = interpreter
        self._names: dict[Any, list[str]] = {}

    def __call__(self, package: Any, builder: Any, scope: Any) -> None:
        is_builtin = self._interpreter.tl.core.is_builtin
        if package not in self._names:  # patched members are no builtins: look outside of any kernel
            self._names[package] = [name for name in dir(package) if is_builtin(getattr(package, name, None))]
        for name in self._names[package]:
            member = getattr(package, name)
            if is_builtin(member):
                self._interpreter._patch_attr(package, name, member, builder, scope)


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
