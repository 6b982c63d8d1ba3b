"""The kernels in C++, compiled for this machine's instruction set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Concatenate, ParamSpec, TypeVar

import torch

from quire.ops.blocks import BlockWeight
from quire.ops.coded import CodedWeight
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
from quire.ops.cpu.instruction_sets import bits_of
from quire.ops.cpu.layer import CpuLayer
from quire.ops.cpu.library import VERSION, Library
from quire.ops.elementwise import Activation
from quire.ops.experts import Experts, ExpertSlots, HeadProducts, LoopedExperts, Routing
from quire.ops.kernels import Kernels, LayerParts, StoredWeight, WholeLayer
from quire.ops.linear import Product
from quire.ops.mamba import MambaWeights
from quire.ops.memory import Scratch, WeightMemory
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.ragged import RaggedBatch
from quire.ops.states import DeltaNetWeights, StateCache
from quire.ops.threads import torch_threads
from quire.parallel.group import Gather

P = ParamSpec("P")
R = TypeVar("R")


def on_library(function: Callable[Concatenate[Library, P], R]) -> Callable[Concatenate[CpuKernels, P], R]:
    """A method that calls this with the library before its own arguments."""

    def method(self: CpuKernels, /, *args: P.args, **kwargs: P.kwargs) -> R:
        return function(self._lib, *args, **kwargs)

    return method


class CpuKernels(Kernels):
    """What the C++ library does better than plain torch; all of it row by row independent of the other rows.

    Args:
        isa: the instruction set, one of `library.usable()`.
        deterministic: see `Kernels`.

    Raises:
        ConfigError: it was not built, or this machine cannot run it.
    """

    takes_blocks = True

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
        return f"C++ kernels {VERSION} for {bits_of(self.name)}, torch {torch.__version__} with {level}"

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

    quantize_groups = on_library(quantize.quantize_groups)

    def keeps(self, weight: StoredWeight) -> bool:
        stored = isinstance(weight, Mxfp4Weight | BlockWeight)
        return stored or (isinstance(weight, CodedWeight) and linear.can_multiply(weight))

    def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
        return linear.CpuProduct(self._lib, parts, bias, self._scratch, self._weights)

    def pack_coded(
        self, parts: Sequence[CodedWeight], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        return linear.CpuProduct(self._lib, parts, bias, self._scratch, self._weights)

    def pack_blocks(self, parts: Sequence[BlockWeight], bias: torch.Tensor | None = None) -> Product:
        return linear.CpuProduct(self._lib, parts, bias, self._scratch, self._weights)

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        if parts.shared is not None and parts.shared.hidden.group.address is None:  # C++ cannot gather by itself
            return None
        return CpuLayer(self._lib, parts, self._workspace)

    # -- row by row ----------------------------------------------------------------------------------------

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return (
            rows.embed(self._lib, ids, weight, dtype) if rows.can_embed(weight) else super().embed(ids, weight, dtype)
        )

    rms_norm = on_library(rows.rms_norm)
    add_rms_norm = on_library(rows.add_rms_norm)
    activate = on_library(rows.activate)
    soft_cap = on_library(rows.soft_cap)

    # -- attention -----------------------------------------------------------------------------------------

    rotate_and_store = on_library(rows.rotate_and_store)
    attention_scratch = on_library(attention.most_scratch)
    attend = on_library(attention.attend)

    # -- mixture of experts --------------------------------------------------------------------------------

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

    # -- latent and sparse attention -----------------------------------------------------------------------

    store_latent = on_library(latent.store_latent)
    rotate_interleaved = on_library(latent.rotate_interleaved)
    attend_latent = on_library(latent.attend)
    choose = on_library(sparse.choose)
    attend_chosen = on_library(sparse.attend)

    # -- recurrent layers ----------------------------------------------------------------------------------

    grouped_norm = on_library(mamba.grouped_norm)

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

    short_conv = on_library(short_conv.short_conv)

    # -- sampling ------------------------------------------------------------------------------------------

    finite_rows = on_library(sampling.finite_rows)
    edit_logits = on_library(sampling.edit_logits)
    sample = on_library(sampling.sample)
    token_scores = on_library(sampling.token_scores)
