"""The kernels in Triton: one launch each, whatever mixture of spans a step holds."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import triton

from quire.ops.elementwise import Activation
from quire.ops.experts import Experts, ExpertSlots, HeadProducts, Routing
from quire.ops.fp8 import Fp8Weight
from quire.ops.kernels import HeadNorm, Kernels
from quire.ops.kv_cache import KVCache
from quire.ops.linear import Product
from quire.ops.logit_edits import Edits
from quire.ops.mamba import MambaWeights
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.quantized import Quantization, QuantizedWeight
from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.recurrent import RecurrentCache
from quire.ops.sampling import Filters, TokenScores
from quire.ops.short_conv import ConvCache, ShortConvWeights
from quire.ops.sparse import Choice
from quire.ops.states import DeltaNetWeights, StateCache
from quire.ops.triton import (
    attention,
    cache,
    experts,
    experts_quantized,
    heads,
    latent,
    linear,
    rows,
    sampling,
    short_conv,
    sparse,
    states,
)
from quire.ops.triton.linear_dense import DenseProduct
from quire.ops.triton.linear_fp8 import Fp8Product, can_multiply
from quire.ops.triton.linear_mxfp4 import Mxfp4Product
from quire.ops.triton.linear_quantized import QuantizedProduct
from quire.ops.triton.linear_vendor import Library, VendorProduct
from quire.ops.triton.routing import count_experts, route
from quire.parallel.group import Gather

VERSION = 4
"""Grows with every change of a kernel's bits."""


class TritonKernels(Kernels):
    """What a GPU runs; on a CPU tensor, Triton's interpreter computes the same, for tests.

    Args:
        device: where it runs.
        deterministic: every row's bits are independent of the other rows. Otherwise plain products are cuBLAS's and
            attention takes the tiles that suit the step.

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

    # -- weights -------------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        make: linear.Make = VendorProduct
        if self.deterministic:
            make = functools.partial(self.library.product if self.library else DenseProduct, outputs=outputs)
        return linear.pack(parts, bias, self.device, make)

    def quantize(self, weight: torch.Tensor, how: Quantization) -> QuantizedWeight:
        return linear.quantize(weight, how, self.device)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        return linear.pack_quantized(weight, bias, self.device, outputs)

    def keeps(self, weight: Mxfp4Weight | Fp8Weight) -> bool:
        return isinstance(weight, Mxfp4Weight) or can_multiply(weight)

    def pack_fp8(
        self,
        parts: Sequence[Fp8Weight],
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        outputs: int | None = None,
    ) -> Product:
        many = functools.partial(DenseProduct, outputs=outputs) if self.deterministic else VendorProduct
        return Fp8Product(parts, bias, self.device, dtype, many, outputs)

    def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
        return Mxfp4Product(parts, bias, self.device)

    # -- a step's inputs -----------------------------------------------------------------------------------

    def place(
        self,
        tokens: torch.Tensor,
        span_of_row: torch.Tensor,
        recent: torch.Tensor,
        spans: DeviceSpans,
        block_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return cache.place(tokens, span_of_row, recent, spans, block_size)

    def copy_blocks(self, kv: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
        kv.copy(copies) if isinstance(kv, RecurrentCache) else cache.copy_blocks(kv, copies)

    # -- row by row ----------------------------------------------------------------------------------------

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return rows.embed(ids, weight, dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.add_rms_norm(x, residual, weight, eps)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return rows.silu_mul(x)

    def gelu_tanh_mul(self, x: torch.Tensor) -> torch.Tensor:
        return rows.gelu_tanh_mul(x)

    def relu2(self, x: torch.Tensor) -> torch.Tensor:
        return rows.gate_mul(x, "relu2")

    # -- attention -----------------------------------------------------------------------------------------

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        return cache.rotate_and_store(qkv, norm, tables, kv, batch, layer)

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
        return attention.attend(q, kv, batch, layer, scale, window, self.deterministic, sinks, causal)

    # -- mixture of experts --------------------------------------------------------------------------------

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None, batch: RaggedBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return route(logits, routing, bias, batch)

    def count_experts(self, ids: torch.Tensor, batch: RaggedBatch, load: torch.Tensor) -> None:
        count_experts(ids, batch, load)

    def experts(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> Experts:
        if isinstance(gate_up[0], QuantizedProduct):
            return experts_quantized.QuantizedExperts(gate_up, down, shared, activation)
        return experts.GroupedExperts(gate_up, down, shared, activation)

    def heads(self, products: Sequence[Product]) -> HeadProducts:
        return heads.GroupedHeads(products)

    # -- latent attention ----------------------------------------------------------------------------------

    def store_latent(
        self,
        compressed: torch.Tensor,
        norm: torch.Tensor,
        eps: float,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
        index_keys: torch.Tensor | None = None,
    ) -> None:
        latent.store_latent(compressed, norm, eps, tables, kv, batch, layer, index_keys)

    def rotate_interleaved(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return latent.rotate_interleaved(x, tables)

    def attend_latent(
        self, q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
    ) -> torch.Tensor:
        return latent.attend_latent(q, kv, batch, layer, scale, width)

    # -- sparse attention ----------------------------------------------------------------------------------

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
        choice: Choice,
    ) -> None:
        sparse.choose(q, weights, kv, batch, layer, choice)

    def attend_chosen(
        self, q: torch.Tensor, choice: Choice, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
    ) -> torch.Tensor:
        return sparse.attend_chosen(q, choice, kv, batch, layer, scale, width)

    # -- recurrent layers ----------------------------------------------------------------------------------

    def delta_net(
        self,
        x: torch.Tensor,
        ab: torch.Tensor,
        weights: DeltaNetWeights,
        cache: StateCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        return states.delta_net(x, ab, weights, cache, batch, layer)

    def mamba(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        weights: MambaWeights,
        cache: StateCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        return states.mamba(x, dt, weights, cache, batch, layer)

    def grouped_norm(
        self, x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return rows.grouped_norm(x, weight, groups, eps, dtype)

    def short_conv(
        self, x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int
    ) -> torch.Tensor:
        return short_conv.short_conv(x, weights, cache, batch, layer)

    # -- sampling ------------------------------------------------------------------------------------------

    def finite_rows(self, x: torch.Tensor) -> torch.Tensor:
        return rows.finite_rows(x)

    def edit_logits(self, logits: torch.Tensor, edits: Edits) -> torch.Tensor:
        return sampling.edit_logits(logits, edits)

    def sample(self, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        return sampling.sample(logits, filters)

    def token_scores(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, count: int) -> TokenScores:
        return sampling.token_scores(logits, rows, ids, count)
