"""Reads what Megatron-LM saves unsharded (arguments, objects of its classes) as inert copies that run no
code.
"""

from __future__ import annotations

import pickle
import types
from collections import OrderedDict
from typing import IO, Any

import torch

_PLAIN = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("builtins", "set"): set,
    ("builtins", "slice"): slice,
}


class Inert:
    """Inert copy of an object: its attributes, or the arguments that it was made from."""

    def __init__(self, *arguments: Any):
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def __repr__(self) -> str:
        values = {name: value for name, value in vars(self).items() if name != "arguments"}
        return f"{type(self).__name__}{values or self.arguments}"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module == "torch" and isinstance(value := getattr(torch, name, None), torch.dtype):
            return value
        if (module, name) == ("argparse", "Namespace") or module.partition(".")[0] == "megatron":
            return type(name, (Inert,), {})
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is no plain value")


# torch.load takes a module with these two names.
_INERT_PICKLE = types.SimpleNamespace(
    Unpickler=_Unpickler, load=lambda file, **options: _Unpickler(file, **options).load(), __name__="inert"
)


def read_inert(file: IO[bytes]) -> Any:
    """Reads a torch.save file, with `Inert` for objects of argparse or Megatron; UnpicklingError for
    others.
    """
    return torch.load(file, map_location="cpu", pickle_module=_INERT_PICKLE, weights_only=False)
