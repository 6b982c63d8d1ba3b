"""The kernels in C++, compiled for this machine's instruction set."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from quire.ops.cpu import (
    attention,
    experts,
    latent,
    layer,
    linear,
    mamba,
    quantize,
    recurrent,
    rows,
    sampling,
    short_conv,
    sparse,
)
from quire.ops.cpu.layer import CpuLayer
from quire.ops.cpu.library import VERSION, Library
from quire.ops.elementwise import Activation
from quire.ops.experts import Experts, ExpertSlots, HeadProducts, LoopedExperts, Routing
from quire.ops.kernels import HeadNorm, Kernels, LayerParts, WholeLayer
from quire.ops.kv_cache import KVCache, KVShape
from quire.ops.linear import Product
from quire.ops.logit_edits import Edits
from quire.ops.mamba import MambaWeights
from quire.ops.memory import Scratch, WeightMemory
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.quantized import Quantization, QuantizedWeight
from quire.ops.ragged import RaggedBatch
from quire.ops.sampling import Filters, TokenScores
from quire.ops.short_conv import ConvCache, ShortConvWeights
from quire.ops.sparse import Choice
from quire.ops.states import DeltaNetWeights, StateCache
from quire.ops.threads import torch_threads
from quire.parallel.group import Gather


class CpuKernels(Kernels):
    """What the C++ library does better than plain torch; all of it row by row independent of the other rows.

    Args:
        isa: the instruction set, one of `library.usable()`.
        deterministic: see `Kernels`.

    Raises:
        ConfigError: it was not built, or this machine cannot run it.
    """

    def __init__(self, isa: str, deterministic: bool = True) -> None:
        super().__init__(deterministic)
        self.name = isa
        modules = (
            *(attention, experts, latent, layer, linear, mamba),
            *(quantize, recurrent, rows, sampling, short_conv, sparse),
        )
        self._lib = Library(isa, {name: what for module in modules for name, what in module.PROTOTYPES.items()})
        self._weights = WeightMemory()
        self._scratch = Scratch()  # of one product
        self._workspace = Scratch()  # of one layer, or of its experts

    def describe(self, dtype: torch.dtype) -> str:
        level = torch.backends.cpu.get_cpu_capability()  # of what is left to torch, such as the rotary tables
        return f"C++ kernels {VERSION} for {self.name}, torch {torch.__version__} with {level}"

    @contextmanager
    def threads(self, count: int) -> Iterator[None]:
        # Torch's own threads would take turns with the team's; what is left to torch is little.
        before = self._lib.set_threads(count)
        try:
            with torch_threads(1):
                yield
        finally:
            self._lib.set_threads(before)

    @contextmanager
    def giving_way(self) -> Iterator[None]:
        before = self._lib.give_way(1)
        try:
            with self.threads(1):
                yield
        finally:
            self._lib.give_way(before)

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        return linear.CpuProduct(self._lib, parts, bias, self._scratch, self._weights)

    def quantize(self, weight: torch.Tensor, how: Quantization) -> QuantizedWeight:
        return quantize.quantize(self._lib, weight, how)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        return linear.CpuProduct(self._lib, weight, bias, self._scratch, self._weights)

    def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
        return linear.CpuProduct(self._lib, parts, bias, self._scratch, self._weights)

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        if parts.shared is not None and parts.shared.hidden.group.address is None:  # C++ cannot gather by itself
            return None
        return CpuLayer(self._lib, parts, self._workspace)

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (
            rows.embed(self._lib, ids, weight, dtype) if rows.can_embed(weight) else super().embed(ids, weight, dtype)
        )

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rows.rms_norm(self._lib, x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rows.add_rms_norm(self._lib, x, residual, weight, eps)

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        return rows.silu_mul(self._lib, x)

    def gelu_tanh_mul(self, x: torch.Tensor) -> torch.Tensor:
        return rows.gelu_tanh_mul(self._lib, x)

    def relu2(self, x: torch.Tensor) -> torch.Tensor:
        return rows.relu2(self._lib, x)

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        return rows.soft_cap(self._lib, logits, cap)

    def rotate_and_store(
        self,
        qkv: torch.Tensor,
        norm: HeadNorm | None,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        return rows.rotate_and_store(self._lib, qkv, norm, tables, kv, batch, layer)

    def attention_scratch(self, shape: KVShape) -> int:
        return attention.most_scratch(self._lib, shape)

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
        return attention.attend(self._lib, q, kv, batch, layer, scale, window, sinks, causal)

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None, batch: RaggedBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return experts.route(self._lib, logits, routing, bias)

    def experts(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> Experts:
        if shared is not None and shared.group.address is None:  # C++ cannot gather by itself
            return LoopedExperts(gate_up, down, shared, activation)
        return experts.CpuExperts(self._lib, gate_up, down, self._workspace, shared, activation)

    def heads(self, products: Sequence[Product]) -> HeadProducts:
        return experts.CpuHeads(self._lib, products, self._scratch)

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
        latent.store_latent(self._lib, compressed, norm, eps, tables, kv, batch, layer, index_keys)

    def rotate_interleaved(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return latent.rotate_interleaved(self._lib, x, tables)

    def attend_latent(
        self, q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
    ) -> torch.Tensor:
        return latent.attend(self._lib, q, kv, batch, layer, scale, width)

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        kv: KVCache,
        batch: RaggedBatch,
        layer: int,
        choice: Choice,
    ) -> None:
        sparse.choose(self._lib, q, weights, kv, batch, layer, choice)

    def attend_chosen(
        self, q: torch.Tensor, choice: Choice, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
    ) -> torch.Tensor:
        return sparse.attend(self._lib, q, choice, kv, batch, layer, scale, width)

    def delta_net(
        self,
        x: torch.Tensor,
        ab: torch.Tensor,
        weights: DeltaNetWeights,
        cache: StateCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        return recurrent.delta_net(self._lib, x, ab, weights, cache, batch, layer, self._workspace)

    def mamba(
        self,
        x: torch.Tensor,
        dt: torch.Tensor,
        weights: MambaWeights,
        cache: StateCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        return mamba.mamba(self._lib, x, dt, weights, cache, batch, layer, self._workspace)

    def grouped_norm(
        self, x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        return mamba.grouped_norm(self._lib, x, weight, groups, eps, dtype)

    def short_conv(
        self, x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int
    ) -> torch.Tensor:
        return short_conv.short_conv(self._lib, x, weights, cache, batch, layer)

    def finite_rows(self, x: torch.Tensor) -> torch.Tensor:
        return sampling.finite_rows(self._lib, x)

    def edit_logits(self, logits: torch.Tensor, edits: Edits) -> torch.Tensor:
        return sampling.edit_logits(self._lib, logits, edits)

    def sample(self, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        return sampling.sample(self._lib, logits, filters)

    def token_scores(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, count: int) -> TokenScores:
        return sampling.token_scores(self._lib, logits, rows, ids, count)
