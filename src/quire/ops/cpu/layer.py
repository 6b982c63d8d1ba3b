"""A whole decoder layer in one call: see layer.cpp."""

from __future__ import annotations

import ctypes

import torch

from quire.ops.cpu import attention, latent
from quire.ops.cpu.experts import CExperts, CpuExperts, CpuHeads, CRouting, described_routing
from quire.ops.cpu.group import Share, share_of
from quire.ops.cpu.library import DTYPES, F32, I32, I64, POINTER, Library, Prototype
from quire.ops.cpu.linear import CpuProduct
from quire.ops.cpu.rows import ACTIVATIONS
from quire.ops.experts import HeadProducts
from quire.ops.kernels import AttentionParts, ExpertsParts, LatentParts, LayerParts, MLPParts
from quire.ops.kv_cache import KVCache
from quire.ops.linear import Product
from quire.ops.memory import Scratch
from quire.ops.ragged import RaggedBatch
from quire.parallel.group import Gather

PROTOTYPES: dict[str, Prototype] = {
    "layer": (I32, (POINTER, POINTER, I32, POINTER, POINTER, POINTER)),
    "layer_workspace": (I64, (POINTER, I64)),
}


OUTSIDE = -1
"""A slot lies outside the cache: `OUTSIDE` in layer.cpp."""


NORMS = ("input_norm", "attended_norm", "mlp_input_norm", "mlp_norm")


class _Attention(ctypes.Structure):
    """`PlainAttention` in layer.cpp."""

    _fields_ = (("heads", I64), ("normed", I64), ("eps", F32), ("norm", POINTER), ("qkv", POINTER))


class _Latent(ctypes.Structure):
    """`LatentAttention` in layer.cpp."""

    _fields_ = (
        *((name, I64) for name in ("heads", "still", "turned", "latent")),
        ("eps", F32),
        *((name, POINTER) for name in ("query_norm", "norm", "compressed_queries", "queries", "compressed")),
        *((name, POINTER) for name in ("into_latent", "out_of_latent")),
    )


class _MLP(ctypes.Structure):
    """`Mlp` in layer.cpp."""

    _fields_ = (("activation", I32), ("active", Share), ("gate_up", POINTER), ("down", POINTER))


class _Sparse(ctypes.Structure):
    """`SparseMlp` in layer.cpp."""

    _fields_ = (
        *(("router", POINTER), ("routing", CRouting), ("experts", CExperts)),
        *(("shared", POINTER), ("load", POINTER)),
    )


class _Layer(ctypes.Structure):
    """`Layer` in layer.cpp."""

    _fields_ = (
        *(("dtype", I32), ("norm_dtype", I32), ("eps", F32), ("layer", I64), ("group", POINTER)),
        *((name, Share) for name in ("hidden", "attended")),
        *((name, POINTER) for name in NORMS),
        *((name, POINTER) for name in ("plain", "latent", "output", "mlp", "sparse")),
    )


class _LayerStep(ctypes.Structure):
    """`LayerStep` in layer.cpp."""

    _fields_ = (
        *(("tokens", I64), ("blocks", I64)),
        *((name, POINTER) for name in ("cos", "sin", "slots", "kv", "plain", "latent")),
    )


class _Step:
    """What all layers of a step share that have the same kind of attention, and what must live as long."""

    def __init__(
        self,
        lib: Library,
        tables: tuple[torch.Tensor, torch.Tensor],
        attend: attention.Step | latent.Step,
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
            plain=attend.pointer if isinstance(attend, attention.Step) else None,
            latent=attend.pointer if isinstance(attend, latent.Step) else None,
        )
        self.pointer = ctypes.addressof(self.struct)
        self.size = len(slots), lib.threads()
        self.held = (tables, cos, sin, slots, cache, attend)


class CpuLayer:
    """A decoder layer as one call; its bits are those of the kernels called one by one.

    Args:
        parts: what it is made of; its products, heads and experts are this implementation's.
        scratch: room for intermediate results, shared by all layers.

    Raises:
        TypeError: one is not.
    """

    def __init__(self, lib: Library, parts: LayerParts, scratch: Scratch) -> None:
        self._lib, self._parts, self._scratch = lib, parts, scratch
        self._dtype = parts.dtype
        attends, mixes = _described_attention(parts.attention), self._described_mlp(parts.mlp)
        self._held = attends, mixes  # what the structure points to
        shared = parts.shared
        self._struct = _Layer(
            dtype=DTYPES[parts.dtype],
            norm_dtype=DTYPES[parts.mlp_input_norm.dtype],
            eps=parts.eps,
            layer=parts.layer,
            group=shared.hidden.group.address if shared else None,
            hidden=_share(shared.hidden if shared else None, len(parts.mlp_input_norm)),
            attended=_share(shared.attended if shared else None, parts.output.in_features),
            **{name: _address(getattr(parts, name)) for name in NORMS},
            output=_product(parts.output),
            plain=_pointer(attends, _Attention),
            latent=_pointer(attends, _Latent),
            mlp=_pointer(mixes, _MLP),
            sparse=_pointer(mixes, _Sparse),
        )
        self._pointer = ctypes.addressof(self._struct)
        self._kind = _kind(parts.attention)
        self._sized, self._workspace = (-1, -1), 0  # what a step needs, and of which size

    def _described_mlp(self, mlp: MLPParts | ExpertsParts) -> _MLP | _Sparse:
        """The layer's second half as C++ sees it."""
        if isinstance(mlp, MLPParts):
            return _MLP(
                activation=ACTIVATIONS[mlp.activation],
                active=_share(mlp.active, mlp.down.in_features),
                gate_up=_product(mlp.gate_up),
                down=_product(mlp.down),
            )
        if not isinstance(mlp.experts, CpuExperts):
            raise TypeError(f"the layer's experts are {type(mlp.experts).__name__}")
        bias = None if mlp.bias is None else mlp.bias.float().contiguous()
        shared = None if mlp.shared is None else self._described_mlp(mlp.shared)
        described = _Sparse(
            router=_product(mlp.router),
            routing=described_routing(mlp.routing, bias),
            experts=mlp.experts.described(self._dtype),
            shared=_pointer(shared, _MLP),
            load=mlp.load.data_ptr(),
        )
        described.points_to = bias, shared
        return described

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
        key = (self._kind, id(tables), id(kv))  # layers may differ in what they rotate; the step holds its tables
        step = batch.once(key, lambda: self._prepare(tables, kv, batch))
        if self._sized != step.size:
            self._sized, self._workspace = step.size, self._lib.layer_workspace(self._pointer, len(residual))
        out = torch.empty_like(residual) if x is None else x
        address = self._scratch.at_least(self._workspace)
        pointers = (out.data_ptr(), residual.data_ptr(), address)
        outcome = self._lib.layer(self._pointer, step.pointer, x is None, *pointers)
        if outcome == OUTSIDE:
            raise IndexError(f"a slot of the step lies outside the cache's {kv.num_blocks} blocks")
        if outcome and self._parts.shared is not None:
            self._parts.shared.hidden.group.ended(outcome)
        return out, residual

    def _prepare(self, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch) -> _Step:
        """The step as this layer and those like it see it."""
        parts = self._parts.attention
        if isinstance(parts, AttentionParts):
            row, stored = parts.qkv.out_features, (parts.heads + 2 * kv.kv_heads) * kv.head_dim
        else:
            row, stored = parts.compressed.out_features, kv.head_dim
        if row != stored:
            raise ValueError(f"rows of {row} numbers do not fit a cache that would take {stored}")
        attend: attention.Step | latent.Step
        if isinstance(parts, AttentionParts):
            heads = parts.heads, self._dtype, parts.scale, parts.window
            attend = attention.prepare(self._lib, *heads, kv, batch, parts.causal)
        else:
            sizes = parts.heads, row, len(parts.norm)
            attend = latent.prepare(self._lib, *sizes, self._dtype, parts.scale, kv, batch)
        return _Step(self._lib, tables, attend, kv, batch)


def _kind(parts: AttentionParts | LatentParts) -> tuple[object, ...]:
    """Layers for which this is the same share what is prepared for a step."""
    if isinstance(parts, AttentionParts):
        return "layer", parts.heads, parts.scale, parts.window, parts.causal
    return "latent layer", parts.heads, parts.scale, parts.compressed.out_features, len(parts.norm)


def _described_attention(parts: AttentionParts | LatentParts) -> _Attention | _Latent:
    """The layer's first half, but for its last product, as C++ sees it."""
    if isinstance(parts, AttentionParts):
        norm = parts.norm
        return _Attention(
            heads=parts.heads,
            normed=len(norm.weight) if norm else 0,
            eps=norm.eps if norm else 0.0,
            norm=_address(norm.weight if norm else None),
            qkv=_product(parts.qkv),
        )
    return _Latent(
        heads=parts.heads,
        still=parts.queries.out_features // parts.heads - parts.turned,
        turned=parts.turned,
        latent=len(parts.norm),
        eps=parts.eps,
        query_norm=_address(parts.query_norm),
        norm=parts.norm.data_ptr(),
        compressed_queries=None if parts.compressed_queries is None else _product(parts.compressed_queries),
        queries=_product(parts.queries),
        compressed=_product(parts.compressed),
        into_latent=_heads(parts.into_latent),
        out_of_latent=_heads(parts.out_of_latent),
    )


def _address(weight: torch.Tensor | None) -> int | None:
    return None if weight is None else weight.data_ptr()


def _product(product: Product) -> int:
    if not isinstance(product, CpuProduct):
        raise TypeError(f"a product of the layer is {type(product).__name__}")
    return product.address


def _heads(heads: HeadProducts) -> int:
    if not isinstance(heads, CpuHeads):
        raise TypeError(f"the products of the layer's heads are {type(heads).__name__}")
    return heads.address


def _share(gather: Gather | None, width: int) -> Share:
    """What this rank has; all of it where nobody shares it."""
    return Share(0, width, width) if gather is None else share_of(gather)


def _pointer(structure: ctypes.Structure | None, kind: type[ctypes.Structure]) -> int | None:
    """The address of a structure of this kind; None of another."""
    return ctypes.addressof(structure) if isinstance(structure, kind) else None
