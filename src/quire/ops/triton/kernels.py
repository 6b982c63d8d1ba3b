"""The kernels in Triton: one launch each, whatever mixture of spans a step holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
import triton

from quire.ops.coded import CodedWeight
from quire.ops.elementwise import Activation
from quire.ops.experts import Experts, ExpertSlots, HeadProducts
from quire.ops.fp8 import Fp8Weight
from quire.ops.kernels import Kernels, StoredWeight
from quire.ops.kv_cache import KVCache
from quire.ops.linear import Product
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import RecurrentCache
from quire.ops.triton import (
    attention,
    cache,
    coded,
    latent,
    linear,
    routing,
    rows,
    sampling,
    short_conv,
    sparse,
    states,
)
from quire.ops.triton.experts import GroupedExperts
from quire.ops.triton.experts_coded import CodedExperts
from quire.ops.triton.heads import GroupedHeads
from quire.ops.triton.linear_coded import CodedProduct
from quire.ops.triton.linear_dense import DenseProduct
from quire.ops.triton.linear_fp8 import Fp8Product, adds_up_as_dense, can_multiply
from quire.ops.triton.linear_mxfp4 import Mxfp4Product
from quire.ops.triton.linear_vendor import Library, VendorProduct
from quire.parallel.group import Gather

VERSION = 7
"""Grows with every change of a kernel's bits."""


class TritonKernels(Kernels):
    """What a GPU runs; on a CPU tensor, Triton's interpreter computes the same, for tests.

    Args:
        device: where it runs.
        deterministic: every row's bits are independent of the other rows. Otherwise plain products are cuBLAS's.

    Attributes:
        library: what of cuBLAS may be used where rows must be independent; None: nothing, or all.
    """

    name = "triton"
    reads_spans = True

    def __init__(self, device: torch.device | str = "cuda", deterministic: bool = False) -> None:
        self.device = torch.device(device)
        self.deterministic = deterministic
        on_gpu = self.device.type == "cuda"
        self.library = Library.settled() if deterministic and on_gpu else None

    def describe(self, dtype: torch.dtype) -> str:
        gpu = "Triton's interpreter" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)
        products = "batch-invariant products" if self.deterministic else "cuBLAS products, no promise of equal bits"
        if note := self.note():
            products += f" ({note})"
        versions = f"Triton {triton.__version__}, torch {torch.__version__}, CUDA {torch.version.cuda}"
        return f"Triton kernels {VERSION} on {gpu} with {products}, {versions}"

    def note(self) -> str:
        return self.library.describe() if self.library else ""

    def warm_up(self, vocab_size: int) -> None:
        if self.device.type == "cuda":  # the interpreter compiles nothing
            sampling.warm_up(vocab_size, self.device)

    def threads(self, count: int) -> AbstractContextManager[None]:
        """Nothing that a step computes on the host needs several, and setting their number takes time."""
        return nullcontext() if self.device.type == "cuda" else super().threads(count)

    # -- weights -------------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        make: linear.Make = VendorProduct
        if self.deterministic:
            make = functools.partial(self.library.product if self.library else DenseProduct, outputs=outputs)
        return linear.pack(parts, bias, self.device, make)

    def keeps(self, weight: StoredWeight) -> bool:
        if isinstance(weight, CodedWeight):
            return coded.can_multiply(weight)
        return isinstance(weight, Mxfp4Weight) or (isinstance(weight, Fp8Weight) and can_multiply(weight))

    def pack_fp8(
        self,
        parts: Sequence[Fp8Weight],
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        outputs: int | None = None,
    ) -> Product:
        many: linear.Make | None = VendorProduct
        if self.deterministic:
            many = functools.partial(DenseProduct, outputs=outputs) if adds_up_as_dense(self.device) else None
        return Fp8Product(parts, bias, self.device, dtype, many, outputs)

    def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
        return Mxfp4Product(parts, bias, self.device)

    def pack_coded(
        self, parts: Sequence[CodedWeight], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        return CodedProduct(parts, None if bias is None else bias.to(self.device), self.device, outputs)

    # -- a step's inputs -----------------------------------------------------------------------------------

    place = staticmethod(cache.place)

    def copy_blocks(self, kv: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
        kv.copy(copies) if isinstance(kv, RecurrentCache) else cache.copy_blocks(kv, copies)

    # -- row by row ----------------------------------------------------------------------------------------

    embed = staticmethod(rows.embed)
    rms_norm = staticmethod(rows.rms_norm)
    add_rms_norm = staticmethod(rows.add_rms_norm)
    activate = staticmethod(rows.activate)

    # -- attention -----------------------------------------------------------------------------------------

    rotate_and_store = staticmethod(cache.rotate_and_store)

    def attend(
        self,
        q: torch.Tensor,
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
        scale: float,
        window: int | None,
        sinks: torch.Tensor | None = None,
        causal: bool = True,
    ) -> torch.Tensor:
        return attention.attend(q, kv, batch, layer, scale, window, sinks, causal)

    # -- mixture of experts --------------------------------------------------------------------------------

    route = staticmethod(routing.route)
    count_experts = staticmethod(routing.count_experts)

    def experts(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> Experts:
        if isinstance(gate_up[0], CodedProduct):
            return CodedExperts(gate_up, down, shared, activation)
        return GroupedExperts(gate_up, down, shared, activation)

    def heads(self, products: Sequence[Product]) -> HeadProducts:
        return GroupedHeads(products)

    # -- latent and sparse attention -----------------------------------------------------------------------

    store_latent = staticmethod(latent.store_latent)
    rotate_interleaved = staticmethod(latent.rotate_interleaved)
    attend_latent = staticmethod(latent.attend_latent)
    choose = staticmethod(sparse.choose)
    attend_chosen = staticmethod(sparse.attend_chosen)

    # -- recurrent layers ----------------------------------------------------------------------------------

    delta_net = staticmethod(states.delta_net)
    mamba = staticmethod(states.mamba)
    grouped_norm = staticmethod(rows.grouped_norm)
    short_conv = staticmethod(short_conv.short_conv)

    # -- sampling ------------------------------------------------------------------------------------------

    finite_rows = staticmethod(rows.finite_rows)
    edit_logits = staticmethod(sampling.edit_logits)
    sample = staticmethod(sampling.sample)
    token_scores = staticmethod(sampling.token_scores)
