"""Triton's interpreter, which prepares a launch once and asks once what each operation makes of its operands' types.

It replaces the language's functions by its own at the start of a launch, and again at every call of a function within
the kernel, which changes nothing and takes a quarter of the time; and it makes a table of all of numpy's types whenever
it needs one. It computes whether a sum of integers overflows, and asks nobody but a debugger what came out: as much
again. It checks the shape of each result, of which there are few different ones; and for each operation it derives by
many rules which type and shape the operands have in common, of which there are few different ones, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

# -- launches ------------------------------------------------------------------------------------------------------

_replace, _number_type = interpreter._patch_lang, interpreter._get_np_dtype
_replaced: set[str] = set()
"""Names of the modules that hold the interpreter's functions, while a launch is under way."""
_modules: dict[Any, set[str]] = {}
_number_types: dict[str, Any] = {}


class _Launch:
    """What a launch has replaced."""

    def __init__(self, scope: Any) -> None:
        self._scope = scope

    def restore(self) -> None:
        _replaced.clear()
        self._scope.restore()


def _replace_once(fn: Any) -> Any:
    if fn not in _modules:
        _modules[fn] = {value.__name__ for value in fn.__globals__.values() if value is tl or value is tl.core}
    modules = _modules[fn]
    if modules and modules <= _replaced:
        return interpreter._LangPatchScope()
    is_launch = not _replaced
    _replaced.update(modules)
    return _Launch(_replace(fn)) if is_launch else _replace(fn)


_CHECKS = core.builtin(lambda: None).__code__
"""Of what stands around a function of the language: it looks whether it is called in a kernel."""
_functions: dict[Any, list[tuple[str, Callable[..., Any]]]] = {}


def _replace_functions(holder: Any, builder: Any, scope: Any) -> None:
    if holder not in _functions:
        members = [(name, each) for name, each in inspect.getmembers(holder) if core.is_builtin(each)]
        _functions[holder] = [(name, _in_kernel(each)) for name, each in members]
    for name, function in _functions[holder]:
        scope.set_attr(holder, name, function)


def _in_kernel(function: Any) -> Callable[..., Any]:
    inner = function.__wrapped__ if function.__code__ is _CHECKS else function

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return inner(*args, **kwargs)

    return call


# -- types and shapes ----------------------------------------------------------------------------------------------


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


def _key(type: Any) -> tuple[int, ...]:
    """A type's shape; scalars have none."""
    return type.key if type.is_block() else ()  # type: ignore[no-any-return]


def _tensor_of_known_shape(self: tl.tensor, handle: Any, type: Any) -> None:
    key = _key(type)
    if key not in _shapes:
        _make_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[key]


_broadcast = semantic.TritonSemantic.broadcast_impl_value
_common: dict[Any, tuple[int, ...]] = {}


def _of_one_shape(self: Any, lhs: tl.tensor, rhs: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    left, right = _key(lhs.type), _key(rhs.type)
    if left == right:
        return lhs, rhs
    if not right:
        return lhs, _filled(rhs, left)
    if not left:
        return _filled(lhs, right), rhs
    if (shape := _common.get((left, right))) is None:
        shape = _common[left, right] = _key(_broadcast(self, lhs, rhs)[0].type)
    return _spread(lhs, left, shape), _spread(rhs, right, shape)


def _filled(scalar: tl.tensor, shape: tuple[int, ...]) -> tl.tensor:
    """A block of a number; that of a constant is made once."""
    made = getattr(scalar, "filled", None)
    if made is not None and shape in made:
        return made[shape]
    handle = interpreter.TensorHandle(np.full(shape, scalar.handle.data), scalar.handle.dtype.scalar)
    block = tl.tensor(handle, tl.block_type(scalar.dtype, list(shape)))
    if made is not None:
        handle.data.flags.writeable = False
        made[shape] = block
    return block


def _spread(tensor: tl.tensor, before: tuple[int, ...], shape: tuple[int, ...]) -> tl.tensor:
    if before == shape:
        return tensor
    handle = interpreter.TensorHandle(np.broadcast_to(tensor.handle.data, shape), tensor.handle.dtype.scalar)
    return tl.tensor(handle, tl.block_type(tensor.dtype, list(shape)))


_compute, _cast = semantic.TritonSemantic.computation_type_impl, semantic.TritonSemantic._cast_to_computation_type
_computed: dict[Any, tl.dtype] = {}


def _known_computation_type(
    self: Any, left: tl.dtype, left_is_scalar: bool, right: tl.dtype, right_is_scalar: bool, divides: bool
) -> tl.dtype:
    key = left.name, left_is_scalar, right.name, right_is_scalar, divides
    if (found := _computed.get(key)) is None:
        found = _computed[key] = _compute(self, left, left_is_scalar, right, right_is_scalar, divides)
    return found


_constants: dict[Any, tl.tensor] = {}


def _cast_what_differs(self: Any, value: Any, dtype: tl.dtype) -> tl.tensor:
    if isinstance(value, tl.tensor):
        return value if value.dtype.name == dtype.name else _cast(self, value, dtype)
    key = type(value), repr(value), dtype.name  # 0.0 is not -0.0
    if (constant := _constants.get(key)) is None:
        constant = _constants[key] = _cast(self, value, dtype)
        constant.handle.data.flags.writeable = False
        constant.filled = {}
    return constant


_UNMIXED = {"fp32", "int1", "int8", "uint8", "int32", "uint32", "int64", "uint64"}
"""Of two operands of these types the result's is no other one, whatever is done with them."""
_check_operands = semantic.TritonSemantic.binary_op_type_checking_impl


def _operands(self: Any, lhs: Any, rhs: Any, *how: bool, **more: bool) -> tuple[tl.tensor, tl.tensor]:
    both = isinstance(lhs, tl.tensor) and isinstance(rhs, tl.tensor)
    if both and lhs.dtype.name in _UNMIXED and lhs.dtype.name == rhs.dtype.name:
        return _of_one_shape(self, lhs, rhs)
    return _check_operands(self, lhs, rhs, *how, **more)  # type: ignore[no-any-return]


_unwrap, _equal = core._unwrap_if_constexpr, tl.dtype.__eq__
_PLAIN = {tl.tensor, int, float, bool, str, type(None), tl.dtype}


def _unwrap_what_is_wrapped(value: Any) -> Any:
    return value if type(value) in _PLAIN else _unwrap(value)


def _same_or_equal(self: tl.dtype, other: Any) -> bool:
    return self is other or _equal(self, other)


tl.block_type.__init__, tl.tensor.__init__ = _block_of_known_shape, _tensor_of_known_shape
tl.dtype.__eq__ = _same_or_equal
core._unwrap_if_constexpr = _unwrap_what_is_wrapped
semantic.TritonSemantic.broadcast_impl_value = _of_one_shape
semantic.TritonSemantic.binary_op_type_checking_impl = _operands
semantic.TritonSemantic.computation_type_impl = _known_computation_type
semantic.TritonSemantic._cast_to_computation_type = _cast_what_differs
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter._patch_lang, interpreter._get_np_dtype = _replace_once, _number_type_by_name
interpreter._patch_builtin = _replace_functions
interpreter.TensorHandle.__post_init__ = lambda self: None  # each is as large as its type says
