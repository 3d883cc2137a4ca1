"""Makes Triton's interpreter (3.7) spend its time on kernels: the same results, without looking up or
building the same things again at every operation, which took three quarters of the time of a kernel.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any

from moe_exp.layers.kernels.launch import INTERPRETED


def speed_up() -> None:
    """Where kernels are interpreted: patches `triton.language` once per launch, keeps shapes and numpy's
    types, and leaves out the test for overflow, whose result the interpreter ignores.
    """
    if not INTERPRETED:
        return
    from triton.runtime import interpreter

    if hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _Once(interpreter)
    if hasattr(interpreter, "_get_np_dtype"):
        interpreter._get_np_dtype = _NumpyTypes(interpreter)
    if hasattr(interpreter, "_patch_attr"):
        interpreter._patch_attr = _patch_attr
    builder, semantic = interpreter.interpreter_builder, interpreter.interpreter_semantic
    if not builder.options.debug:
        builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    _share_shapes(interpreter.tl.core)
    semantic.cast = _cast_if_needed(semantic.cast)
    semantic.broadcast_impl_value = _broadcast_if_needed(semantic.broadcast_impl_value)
    semantic.binary_op_type_checking_impl = _promote_if_needed(semantic)


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    from triton.runtime.interpreter import interpreter_semantic

    def with_semantic(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, with_semantic)


def _share_shapes(core: ModuleType) -> None:
    """Equal shapes are one object, which is checked once."""
    plain_block, known = core.block_type.__init__, {}
    unwrapped = core._unwrap_if_constexpr

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size if type(size) is int else unwrapped(size) for size in shape])
        if sizes not in known:
            plain_block(self, element_ty, list(sizes))
            known[sizes] = self.shape, self.numel, str(self.shape)
        self.element_ty = element_ty
        self.shape, self.numel, text = known[sizes]
        self.name = f"<{text}, {element_ty}>"

    plain_tensor, of_tensors = core.tensor.__init__, {}

    def tensor(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        if sizes not in of_tensors:
            plain_tensor(self, handle, type)
            of_tensors[sizes] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = of_tensors[sizes]

    core.block_type.__init__, core.tensor.__init__ = block_type, tensor


def _cast_if_needed(cast: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, dtype, *args: x if x.dtype is dtype.scalar else cast(x, dtype, *args)


def _broadcast_if_needed(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    return lambda lhs, rhs: (lhs, rhs) if lhs.shape is rhs.shape else broadcast(lhs, rhs)


def _promote_if_needed(semantic: Any) -> Callable[..., Any]:
    promote, tensor = semantic.binary_op_type_checking_impl, semantic.tensor

    def operands(lhs: Any, rhs: Any, *rules: bool) -> Any:
        divides = len(rules) == 4 and rules[3]  # then fp16 and bf16 become fp32
        if (
            type(lhs) is type(rhs) is tensor
            and lhs.dtype is rhs.dtype
            and not divides
            and not lhs.dtype.is_ptr()
        ):
            return semantic.broadcast_impl_value(lhs, rhs)
        return promote(lhs, rhs, *rules)

    return operands


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
