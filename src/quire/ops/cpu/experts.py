"""Mixture of experts, and the products of heads, in C++: see route.cpp and experts.cpp."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from quire.ops.cpu.group import Share, share_of
from quire.ops.cpu.library import DTYPES, F32, I32, I64, POINTER, Library, Prototype
from quire.ops.cpu.linear import CpuProduct
from quire.ops.cpu.rows import ACTIVATIONS
from quire.ops.elementwise import WITHOUT_GATE, Activation
from quire.ops.experts import ExpertSlots, Routing
from quire.ops.linear import Product
from quire.ops.memory import Scratch
from quire.parallel.group import Gather

PROTOTYPES: dict[str, Prototype] = {
    "experts": (I32, (POINTER, POINTER, POINTER)),
    "experts_workspace": (I64, (POINTER, I64, I64)),
    "heads": (None, (POINTER, POINTER)),
    "heads_workspace": (I64, (POINTER,)),
    "route": (None, (POINTER, POINTER, I64, POINTER, POINTER)),
}

NOT_IN_ORDER = -1
"""A token's ids are not ascending, or not those of experts: see `quire_experts`."""


class CRouting(ctypes.Structure):
    """`Routing` in experts.h."""

    _fields_ = (
        *((name, I32) for name in ("sigmoid", "two_best", "normalize")),
        ("scale", F32),
        *((name, I64) for name in ("experts", "top_k", "groups", "top_groups")),
        ("bias", POINTER),
    )


class _Slots(ctypes.Structure):
    """`Slots` in experts.h."""

    _fields_ = (
        *((name, I64) for name in ("count", "begin", "own")),
        *((name, POINTER) for name in ("first", "of_experts")),
        ("digest", ctypes.c_uint64),
    )


class CExperts(ctypes.Structure):
    """`Experts` in experts.h."""

    _fields_ = (
        *((name, I32) for name in ("dtype", "activation")),
        *((name, I64) for name in ("count", "hidden", "out")),
        *(("group", POINTER), ("inner", Share)),
        *((name, POINTER) for name in ("slots", "gate_up", "down")),
    )


class _Step(ctypes.Structure):
    """`ExpertsStep` in experts.h."""

    _fields_ = (
        *((name, I64) for name in ("tokens", "top_k")),
        *((name, POINTER) for name in ("x", "ids", "weights", "out")),
    )


class _Heads(ctypes.Structure):
    """`Heads` in experts.h."""

    _fields_ = (
        ("dtype", I32),
        *((name, I64) for name in ("count", "tokens", "token_stride", "head_stride", "y_head_stride")),
        *((name, POINTER) for name in ("products", "x", "y")),
    )


def described_routing(routing: Routing, bias: torch.Tensor | None) -> CRouting:
    """How tokens choose, as C++ sees it; `bias`: contiguous fp32, which must live as long."""
    return CRouting(
        sigmoid=routing.scoring == "sigmoid",
        two_best=routing.group_score == "top2",
        normalize=routing.normalize,
        scale=routing.scale,
        experts=routing.num_experts,
        top_k=routing.top_k,
        groups=routing.groups,
        top_groups=routing.top_groups,
        bias=None if bias is None else bias.data_ptr(),
    )


def route(
    lib: Library, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `experts.route`: the same ids, unless scores agree to their last bits or are next to 0 (below 1e-37).

    Raises:
        ValueError: logits or a bias of another shape, or more experts or groups to choose than there are.
    """
    if routing.top_k > routing.num_experts or routing.top_groups > routing.groups:
        raise ValueError(f"more to choose than there is to choose from: {routing}")
    shapes = list(logits.shape[1:]), [routing.num_experts] if bias is None else list(bias.shape)
    if shapes != ([routing.num_experts], [routing.num_experts]):
        raise ValueError(f"logits of {shapes[0]} and a bias of {shapes[1]} for {routing.num_experts} experts")
    logits, bias = logits.float().contiguous(), None if bias is None else bias.float().contiguous()
    ids = torch.empty(len(logits), routing.top_k, dtype=torch.int64)
    weights = torch.empty(len(logits), routing.top_k)
    how = described_routing(routing, bias)
    tensors = ids.data_ptr(), weights.data_ptr()
    lib.route(ctypes.addressof(how), logits.data_ptr(), len(logits), *tensors)
    return ids, weights


class _Products:
    """Products of one shape, as an array of the addresses of their weights.

    Raises:
        TypeError: one is not this implementation's.
        ValueError: there is none, or they differ in shape or in the data types that they take.
    """

    def __init__(self, products: Sequence[Product]) -> None:
        ours = [product for product in products if isinstance(product, CpuProduct)]
        if len(ours) < len(products):
            raise TypeError(f"the products are {sorted({type(product).__name__ for product in products})}")
        kinds = {(product.out_features, product.in_features, product.dtypes) for product in ours}
        if len(kinds) != 1:
            raise ValueError(f"products that are computed in one call must be alike, found {sorted(kinds, key=str)}")
        [(self.out_features, self.in_features, self.dtypes)] = kinds
        self._array = (POINTER * len(ours))(*(product.address for product in ours))
        self.products = ours  # what the addresses point to
        self.address = ctypes.addressof(self._array)

    def __len__(self) -> int:
        return len(self.products)


class CpuExperts:
    """All experts of a layer in one call; the bits are those of `LoopedExperts` with this implementation's kernels.

    Weights that are too small for huge pages come into some, side by side.

    Args:
        gate_up: per expert, the product [2 * intermediate, hidden].
        down: per expert, the product [hidden, intermediate].
        scratch: room for intermediate results, shared by all layers.
        shared, activation: see `Kernels.experts`.

    Raises:
        TypeError: a product is not this implementation's.
        ValueError: products that are not alike, or do not fit together.
    """

    def __init__(
        self,
        lib: Library,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        scratch: Scratch,
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> None:
        self._lib, self._scratch, self._shared, self._activation = lib, scratch, shared, ACTIVATIONS[activation]
        self._gate_up, self._down = up, out = _Products(gate_up), _Products(down)
        self._inner = share_of(shared) if isinstance(shared, Gather) else Share(0, out.in_features, out.in_features)
        self._slots = _described(shared) if isinstance(shared, ExpertSlots) else None
        self._count = len(shared.replicas) if isinstance(shared, ExpertSlots) else len(out)
        halves = 1 if activation in WITHOUT_GATE else 2
        wanted = len(out) if self._slots is None else self._slots.own, halves * self._inner.own
        whole = isinstance(shared, Gather) or up.in_features == out.out_features
        if (len(out), up.out_features) != wanted or len(up) != len(out) or not whole:
            raise ValueError(
                f"{len(up)} products of {up.in_features} inputs and {up.out_features} outputs, and {len(out)} of "
                f"{out.in_features} and {out.out_features}, are not experts' gate_up and down"
            )
        self._dtypes = tuple(dtype for dtype in up.dtypes if dtype in out.dtypes)

    def __call__(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts`.

        Raises:
            ValueError: tensors of other shapes or data types.
            IndexError: a token's ids are not experts in ascending order.
            QuireError: what the collectives of `Group` raise, where ranks share the experts.
        """
        self._check(x, ids, weights)
        x, ids, weights = x.contiguous(), ids.contiguous(), weights.contiguous()
        tokens, top_k = ids.shape
        out = x.new_empty(tokens, self._down.out_features)
        if tokens == 0:
            return out
        experts = self.described(x.dtype)
        step = _Step(tokens, top_k, x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        pointer = ctypes.addressof(experts)
        workspace = self._scratch.at_least(self._lib.experts_workspace(pointer, tokens, top_k))
        outcome = self._lib.experts(pointer, ctypes.addressof(step), workspace)
        if outcome == NOT_IN_ORDER:
            raise IndexError(f"a token's ids must be ascending and below {self._count}, found {ids.tolist()}")
        if self._shared is not None:
            self._shared.group.ended(outcome)
        return out

    def workspace(self, tokens: int, top_k: int, dtype: torch.dtype) -> int:
        """See `CountedExperts`."""
        experts = self.described(dtype)
        size: int = self._lib.experts_workspace(ctypes.addressof(experts), tokens, top_k)
        return size

    def described(self, dtype: torch.dtype) -> CExperts:
        """The experts as C++ sees them, for rows in `dtype`."""
        return CExperts(
            dtype=DTYPES[dtype],
            activation=self._activation,
            count=self._count,
            hidden=self._gate_up.in_features,
            out=self._down.out_features,
            group=None if self._shared is None else self._shared.group.address,
            inner=self._inner,
            slots=None if self._slots is None else ctypes.addressof(self._slots),
            gate_up=self._gate_up.address,
            down=self._down.address,
        )

    def _check(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
        if x.dim() != 2 or x.shape[1] != self._gate_up.in_features or x.dtype not in self._dtypes:
            wanted = f"[tokens, {self._gate_up.in_features}] of {self._dtypes}"
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; the experts take {wanted}")
        fits = ids.dim() == 2 and len(ids) == len(x) and ids.shape[1] > 0 and ids.shape == weights.shape
        if not fits or (ids.dtype, weights.dtype) != (torch.int64, torch.float32):
            raise ValueError(
                f"ids are {ids.dtype} {list(ids.shape)} and weights {weights.dtype} {list(weights.shape)}; expected "
                f"int64 and float32, [{len(x)}, top_k] both"
            )


def _described(slots: ExpertSlots) -> _Slots:
    """The slots as C++ sees them. What they point to lives as long as they do."""
    first = np.cumsum([0, *map(len, slots.replicas)], dtype=np.int64)
    of_experts = np.array([slot for replicas in slots.replicas for slot in replicas], dtype=np.int64)
    pointers = first.ctypes.data, of_experts.ctypes.data
    digest = zlib.crc32(np.array(slots.experts, dtype=np.int64).tobytes())
    described = _Slots(len(slots.experts), slots.own.start, len(slots.own), *pointers, digest)
    described.points_to = first, of_experts
    return described


class CpuHeads:
    """A product of its own for each head, all in one call; the bits are those of the products one by one.

    Args:
        scratch: what all products share for the length of a call.

    Raises:
        TypeError: a product is not this implementation's.
        ValueError: products that are not alike.
    """

    def __init__(self, lib: Library, products: Sequence[Product], scratch: Scratch) -> None:
        self._lib, self._scratch, self._products = lib, scratch, _Products(products)

    @property
    def address(self) -> int:
        """Of the array of the products' addresses."""
        return self._products.address

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See `HeadProducts`.

        Raises:
            ValueError: x of another shape or data type.
        """
        heads, inputs = len(self._products), self._products.in_features
        if x.dim() != 3 or x.shape[1:] != (heads, inputs) or x.dtype not in self._products.dtypes:
            wanted = f"[tokens, {heads}, {inputs}] of {self._products.dtypes}"
            raise ValueError(f"x is {x.dtype} {list(x.shape)}; the heads take {wanted}")
        if x.stride(2) != 1:
            x = x.contiguous()
        out = x.new_empty(len(x), heads, self._products.out_features)
        if len(x) == 0:
            return out
        step = _Heads(
            dtype=DTYPES[x.dtype],
            count=heads,
            tokens=len(x),
            token_stride=x.stride(0),
            head_stride=x.stride(1),
            y_head_stride=self._products.out_features,
            products=self._products.address,
            x=x.data_ptr(),
            y=out.data_ptr(),
        )
        pointer = ctypes.addressof(step)
        self._lib.heads(pointer, self._scratch.at_least(self._lib.heads_workspace(pointer)))
        return out
