"""A whole decoder layer in one call: see layer.cpp."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quire.ops.cpu import attention
from quire.ops.cpu.group import Share, share_of
from quire.ops.cpu.library import DTYPES, F32, I32, I64, POINTER, Library, Prototype
from quire.ops.cpu.linear import CpuProduct
from quire.ops.cpu.rows import ACTIVATIONS
from quire.ops.kernels import LayerParts
from quire.ops.kv_cache import KVCache
from quire.ops.memory import Scratch
from quire.ops.ragged import RaggedBatch

PROTOTYPES: dict[str, Prototype] = {
    "layer": (I32, (POINTER, POINTER, I32, POINTER, POINTER, POINTER)),
    "layer_workspace": (I64, (POINTER, POINTER, I64)),
}


OUTSIDE = -1
"""A slot lies outside the cache: `OUTSIDE` in layer.cpp."""


NORMS = ("input_norm", "attended_norm", "mlp_input_norm", "mlp_norm")


def _address(weight: torch.Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


class _Layer(ctypes.Structure):
    """`Layer` in layer.cpp."""

    _fields_ = (
        *((name, I32) for name in ("dtype", "norm_dtype", "activation")),
        *(("eps", F32), ("head_eps", F32)),
        *((name, I64) for name in ("layer", "heads", "normed")),
        ("group", POINTER),
        *((name, Share) for name in ("hidden", "attended", "active")),
        *((name, POINTER) for name in ("input_norm", "head_norm", "attended_norm", "mlp_input_norm", "mlp_norm")),
        *((name, POINTER) for name in ("qkv", "output", "gate_up", "down")),
    )


class _LayerStep(ctypes.Structure):
    """`LayerStep` in layer.cpp."""

    _fields_ = (
        *(("tokens", I64), ("blocks", I64)),
        *((name, POINTER) for name in ("cos", "sin", "slots", "kv", "attention")),
    )


class _Step:
    """What all layers of a step share, and what must live as long."""

    def __init__(
        self,
        lib: Library,
        tables: tuple[torch.Tensor, torch.Tensor],
        attend: attention.Step,
        kv: KVCache,
        batch: RaggedBatch,
    ) -> None:
        cos, sin = (table.contiguous() for table in tables)
        slots, cache = batch.slots.contiguous(), attention.describe(kv)
        self.struct = _LayerStep(
            tokens=len(slots),
            blocks=kv.num_blocks,
            cos=cos.data_ptr(),
            sin=sin.data_ptr(),
            slots=slots.data_ptr(),
            kv=ctypes.addressof(cache),
            attention=attend.pointer,
        )
        self.pointer = ctypes.addressof(self.struct)
        self.held = (tables, cos, sin, slots, cache, attend)


def _shares(parts: LayerParts) -> dict[str, Any]:
    """What a rank has of the layer; all of it where nobody shares it."""
    if parts.shared is not None:
        shares = {name: share_of(gather) for name, gather in parts.shared._asdict().items()}
        return {"group": parts.shared.hidden.group.address, **shares}
    widths = {"hidden": len(parts.mlp_input_norm), "active": parts.down.in_features}
    widths["attended"] = parts.output.in_features
    return {name: Share(0, width, width) for name, width in widths.items()}


class CpuLayer:
    """A decoder layer as one call; its bits are those of the kernels called one by one.

    Args:
        parts: what it is made of; its products are this implementation's.
        scratch: room for intermediate results, shared by all layers.
    """

    def __init__(self, lib: Library, parts: LayerParts, scratch: Scratch) -> None:
        self._lib, self._parts, self._scratch = lib, parts, scratch
        products = {name: getattr(parts, name) for name in ("qkv", "output", "gate_up", "down")}
        if not all(isinstance(product, CpuProduct) for product in products.values()):
            raise TypeError(f"the layer's products are {[type(product).__name__ for product in products.values()]}")
        self._struct = _Layer(
            dtype=DTYPES[parts.dtype],
            norm_dtype=DTYPES[parts.mlp_input_norm.dtype],
            activation=ACTIVATIONS[parts.activation],
            eps=parts.eps,
            head_eps=parts.head_norm.eps if parts.head_norm else 0.0,
            layer=parts.layer,
            heads=parts.heads,
            normed=len(parts.head_norm.weight) if parts.head_norm else 0,
            **_shares(parts),
            head_norm=parts.head_norm.weight.data_ptr() if parts.head_norm else None,
            **{name: _address(getattr(parts, name)) for name in NORMS},
            **{name: product.address for name, product in products.items()},
        )
        self._pointer = ctypes.addressof(self._struct)
        self._dtype = parts.dtype
        self._key = (
            "layer",
            parts.heads,
            parts.scale,
            parts.window,
            parts.causal,
            len(parts.mlp_input_norm),
            parts.down.in_features,
        )

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `DecoderLayer.__call__`. `x` and `residual` are overwritten.

        Raises:
            IndexError: a slot outside the cache.
            QuireError: what the collectives of `Group` raise, where ranks share the layer.
            ValueError: a cache of another shape or data type, or an `x` in a layer that must be the first.
        """
        if x is not None and self._parts.input_norm is None:
            raise ValueError("a layer without a norm at its input must be the first")
        if self._struct.layer >= kv.layers:
            raise ValueError(f"layer {self._struct.layer} does not fit a cache of {kv.layers} layers")
        key = (self._key, id(tables))  # layers may differ in what they rotate; the step holds its tables
        step, workspace = batch.once(key, lambda: self._prepare(tables, kv, batch))
        out = torch.empty_like(residual) if x is None else x
        address = self._scratch.at_least(workspace)
        pointers = (out.data_ptr(), residual.data_ptr(), address)
        outcome = self._lib.layer(self._pointer, step.pointer, x is None, *pointers)
        if outcome == OUTSIDE:
            raise IndexError(f"a slot of the step lies outside the cache's {kv.num_blocks} blocks")
        if outcome and self._parts.shared is not None:
            self._parts.shared.hidden.group.ended(outcome)
        return out, residual

    def _prepare(self, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch) -> tuple[_Step, int]:
        """The step as this layer and those like it see it, and the bytes of workspace they need."""
        parts = self._parts
        heads = parts.heads, self._dtype, parts.scale, parts.window
        attend = attention.prepare(self._lib, *heads, kv, batch, parts.causal)
        step = _Step(self._lib, tables, attend, kv, batch)
        return step, self._lib.layer_workspace(self._pointer, step.struct.kv, step.struct.tokens)
