"""Triton's interpreter, which prepares a launch once.

It replaces the language's functions by its own at the start of a launch, and again at every call of a function within
the kernel, which changes nothing and takes a quarter of the time; and it makes a table of all of numpy's types whenever
it needs one. It computes whether a sum of integers overflows, and asks nobody but a debugger what came out: as much
again. And it checks the shape of each result, of which there are few different ones.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_replace, _number_type = interpreter._patch_lang, interpreter._get_np_dtype
_replaced: set[str] = set()
"""Names of the modules that hold the interpreter's functions, while a launch is under way."""
_number_types: dict[str, Any] = {}


class _Launch:
    """What a launch has replaced."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        _replaced.clear()
        self._scope.restore()


def _replace_once(fn: Any) -> Any:
    modules = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
    if modules and modules <= _replaced:
        return interpreter._LangPatchScope()
    is_launch = not _replaced
    _replaced.update(modules)
    return _Launch(_replace(fn)) if is_launch else _replace(fn)


def _number_type_by_name(dtype: Any) -> Any:
    name = dtype.scalar.name
    if name not in _number_types:
        _number_types[name] = _number_type(dtype)
    return _number_types[name]


_make_block, _make_tensor = tl.block_type.__init__, tl.tensor.__init__
_blocks: dict[Any, dict[str, Any]] = {}
_shapes: dict[Any, tuple[Any, Any]] = {}


def _block_of_known_shape(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    key = (element_ty.name, *(getattr(size, "value", size) for size in shape))
    if key not in _blocks:
        _make_block(self, element_ty, shape)
        _blocks[key] = {**vars(self), "key": key[1:]}
    self.__dict__.update(_blocks[key])
    self.element_ty = element_ty


def _tensor_of_known_shape(self: tl.tensor, handle: Any, type: Any) -> None:
    key = type.key if type.is_block() else ()
    if key not in _shapes:
        _make_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[key]


tl.block_type.__init__, tl.tensor.__init__ = _block_of_known_shape, _tensor_of_known_shape
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._patch_lang, interpreter._get_np_dtype = _replace_once, _number_type_by_name
