"""The kernels behind the layers, each offered once, by what it computes.

`Kernels` is the plain-torch reference: the oracle of the faster ones' tests, and what runs where there is none.
`quire.ops.cpu` and, on a GPU, Triton override what they do better. Which one runs is decided once, at start-up.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F

from quire.ops import (
    attention,
    attention_plan,
    elementwise,
    experts,
    latent,
    logit_edits,
    mamba,
    sampling,
    short_conv,
    sparse,
    states,
    step_inputs,
)
from quire.ops.elementwise import Activation
from quire.ops.experts import Experts, ExpertSlots, HeadProducts, Routing
from quire.ops.fp8 import Fp8Weight
from quire.ops.kv_cache import KVCache, KVShape
from quire.ops.linear import PackedWeight, Product, can_pack
from quire.ops.logit_edits import Edits
from quire.ops.mamba import MambaWeights
from quire.ops.mxfp4 import Mxfp4Product, Mxfp4Weight
from quire.ops.quantized import Quantization, QuantizedProduct, QuantizedWeight, quantize
from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.sampling import Filters, TokenScores
from quire.ops.short_conv import ConvCache, ShortConvWeights
from quire.ops.sparse import Choice
from quire.ops.states import DeltaNetWeights, StateCache
from quire.ops.threads import torch_threads
from quire.parallel.group import Gather


class HeadNorm(NamedTuple):
    """The RMS norm of each query and key head: weight [heads + kv_heads, head_dim], a row a head.

    With kv_heads rows more, values have one, too.
    """

    weight: torch.Tensor
    eps: float


class SharedLayer(NamedTuple):
    """What ranks that share a layer gather of it: the attention's result, and what both halves yield."""

    attended: Gather
    hidden: Gather


class WholeLayer(Protocol):
    """A decoder layer as one kernel: called as `DecoderLayer` is, with the same result."""

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class AttentionParts(NamedTuple):
    """Attention with keys and values of its own, but for its last product.

    Attributes:
        qkv: the product that gives queries, keys and values.
        norm: see `Kernels.rotate_and_store`; None: none.
        heads: query heads, of this rank.
        scale, window, causal: see `Kernels.attend`.
    """

    qkv: Product
    norm: HeadNorm | None
    heads: int
    scale: float
    window: int | None
    causal: bool = True


class LatentParts(NamedTuple):
    """Latent attention, absorbed, but for its last product.

    Attributes:
        compressed_queries, query_norm: a product, and the norm of its result, which `queries` reads; or None.
        queries: the product that gives them, the part of each that does not turn before the one that does.
        compressed: the product that gives what is stored, before its norm, with weight `norm` [latent].
        into_latent, out_of_latent: as `Kernels.heads` makes them.
        eps: of both norms.
        heads: of this rank.
        turned: numbers of a query that turn.
        scale: of the scores.
    """

    compressed_queries: Product | None
    query_norm: torch.Tensor | None
    queries: Product
    compressed: Product
    norm: torch.Tensor
    into_latent: HeadProducts
    out_of_latent: HeadProducts
    eps: float
    heads: int
    turned: int
    scale: float


class MLPParts(NamedTuple):
    """A gated MLP: its activation, its products, and what brings the ranks' inner columns together."""

    activation: Activation
    gate_up: Product
    down: Product
    active: Gather | None


class ExpertsParts(NamedTuple):
    """Experts, all of them here or each shared by ranks.

    Attributes:
        router: the product that gives the logits.
        routing, bias: see `Kernels.route`.
        experts: as `Kernels.experts` makes them.
        shared: the MLP that every token goes through beside them; None: there is none.
        load: see `Kernels.count_experts`.
    """

    router: Product
    routing: Routing
    bias: torch.Tensor | None
    experts: Experts
    shared: MLPParts | None
    load: torch.Tensor


@dataclass(frozen=True, slots=True)
class LayerParts:
    """What a decoder layer is made of: see `quire.layers.decoder`.

    Attributes:
        input_norm, mlp_input_norm: weights of the norms before attention and MLP, [hidden]; a layer that is always
            first may lack the former.
        attended_norm, mlp_norm: the same of what attention and MLP yield; None: there is none.
        eps: of all of these.
        dtype: of the residual stream; norms' weights may be in fp32.
        layer: which one of the cache it is.
        attention, output: its attention, and the product that ends it.
        mlp: what follows.
        shared: what ranks gather of it; None: one process computes all of it.
    """

    input_norm: torch.Tensor | None
    attended_norm: torch.Tensor | None
    mlp_input_norm: torch.Tensor
    mlp_norm: torch.Tensor | None
    eps: float
    dtype: torch.dtype
    layer: int
    attention: AttentionParts | LatentParts
    output: Product
    mlp: MLPParts | ExpertsParts
    shared: SharedLayer | None = None


class Kernels:
    """One implementation of every kernel. Holds no state of a step: what a kernel reads, it is given.

    Args:
        deterministic: see the attribute; a CPU's kernels are the same without it, but layers may choose among them.
    """

    name = "torch"
    device = torch.device("cpu")
    """Where weights, KV and activations lie."""
    deterministic = True
    """Whether every row's bits are independent of the other rows, and of how its request was cut into steps."""
    reads_spans = False
    """Whether kernels read a step's spans from the device's memory: see `RaggedBatch.spans`."""

    def __init__(self, deterministic: bool = True) -> None:
        self.deterministic = deterministic

    def describe(self, dtype: torch.dtype) -> str:
        """What the bits depend on, in words: implementation, instruction set and versions, for `dtype`.

        The number of threads is not among them: no kernel's bits depend on it (`quire doctor` checks).
        """
        linear = "oneDNN packed linear" if can_pack(dtype, torch.device("cpu")) else "torch linear in tiles"
        level = torch.backends.cpu.get_cpu_capability()
        tile = attention_plan.KEY_TILE
        return f"{linear}, torch attention in tiles of {tile} keys, {level}, torch {torch.__version__}"

    def note(self) -> str:
        """What was found about the machine while kernels ran, for people; empty: nothing that needs to be said."""
        return ""

    def warm_up(self, vocab_size: int) -> None:
        """Compile what would otherwise be compiled when a request first needs it, for logits of this width."""

    def threads(self, count: int) -> AbstractContextManager[None]:
        """For a while, what this thread of the program computes with these kernels, so many threads compute."""
        return torch_threads(count)

    def giving_way(self) -> AbstractContextManager[None]:
        """For a while, what this thread computes it computes alone, and lets others run as often as it can.

        For work beside steps: a step whose ranks wait for one another takes the processor back at once.
        """
        return torch_threads(1)

    # -- weights -------------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        """The product with a weight, copied into the layout in which this implementation multiplies.

        Args:
            parts: [out, in] each, with the same inputs; their outputs come side by side.
            outputs: of the whole weight, if these are a rank's: its sums are cut as the whole's are.
        """
        return PackedWeight(parts[0] if len(parts) == 1 else torch.cat(list(parts)), bias)

    def quantize(self, weight: torch.Tensor, how: Quantization) -> QuantizedWeight:
        """See `quantized.quantize`."""
        return quantize(weight, how)

    def pack_quantized(
        self, weight: QuantizedWeight, bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        """The product with a quantized weight, whose tensors are used where they lie; `outputs`: see `pack`."""
        return QuantizedProduct(weight, bias)

    def keeps(self, weight: Mxfp4Weight | Fp8Weight) -> bool:
        """Whether such a weight stays in its codes; otherwise it is restored when it is loaded."""
        return isinstance(weight, Mxfp4Weight)

    def pack_fp8(
        self,
        parts: Sequence[Fp8Weight],
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        outputs: int | None = None,
    ) -> Product:
        """The product with a weight in fp8, whose numbers are rounded to `dtype`: see `pack`."""
        return self.pack([part.restored().to(dtype) for part in parts], bias, outputs)

    def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
        """The product with a weight in MXFP4, copied into the layout of this implementation: see `pack`."""
        return Mxfp4Product(parts, bias)

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        """A decoder layer in one call, where there is such a kernel; None: its kernels are called one by one."""
        return None

    # -- a step's inputs -----------------------------------------------------------------------------------

    def place(
        self,
        tokens: torch.Tensor,
        span_of_row: torch.Tensor,
        recent: torch.Tensor,
        spans: DeviceSpans,
        block_size: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Token ids, positions and slots of a step's rows, [rows] int64 each, for kernels that read spans.

        Args:
            tokens: [rows] int32, ids; -1 stands for the one in `recent` for the row's slot (`FROM_PREVIOUS`), -2 for
                the one after it, and so on.
            span_of_row: [rows] int32; 0 in rows of padding.
            recent: [requests, size] int64, tokens of each row of the block tables by position modulo `size`; a negative
                one (that step failed, and this one's result will not be used) counts as 0.
            spans: `context_lens` is written here: start + rows. A row's slot is start + its number in the span; so is
                its position, unless it has a depth in `spans.trees`.

        Rows of padding (those from `row_starts[-1]` on) get token 0, position 0 and slot 0.
        """
        return step_inputs.place(tokens, span_of_row, recent, spans, block_size)

    def copy_blocks(self, kv: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy block heads: (source, destination, tokens) each; no destination is another's source or destination.

        Of the draft model, too.
        """
        kv.copy(copies)

    def move_rows(
        self,
        kv: KVCache,
        sources: torch.Tensor | Sequence[int],
        destinations: torch.Tensor | Sequence[int],
    ) -> None:
        """Copy tokens from slots to slots: see `KVCache.move`."""
        kv.move(sources, destinations)

    # -- row by row ----------------------------------------------------------------------------------------

    def embed(self, ids: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Rows of weight [vocabulary, hidden] for ids [tokens] int64, in `dtype`."""
        return F.embedding(ids, weight).to(dtype)

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """See `elementwise.rms_norm`."""
        return elementwise.rms_norm(x, weight, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add, then normalize: (normalized sum, sum), both [rows, size]. Both inputs may be overwritten."""
        total = residual + x
        return elementwise.rms_norm(total, weight, eps), total

    def activate(self, x: torch.Tensor, activation: Activation) -> torch.Tensor:
        """See `elementwise.activate`."""
        return elementwise.activate(x, activation)

    def soft_cap(self, logits: torch.Tensor, cap: float) -> torch.Tensor:
        """See `elementwise.soft_cap`."""
        return elementwise.soft_cap(logits, cap)

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
        """Normalize and turn queries and keys, and write keys and values into the cache's slots.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim], may be overwritten.
            norm: of each query and key head, before it is rotated, and perhaps of each value; None: none.
            tables: cos and sin of the step's positions, [tokens, head_dim / 2] fp32 each.

        Returns:
            The queries, [tokens, heads, head_dim].
        """
        heads = qkv.view(len(qkv), -1, kv.head_dim)  # [tokens, heads + 2 * kv_heads, head_dim]
        if norm is not None:
            normed, plain = heads[:, : len(norm.weight)], heads[:, len(norm.weight) :]
            heads = torch.cat([elementwise.rms_norm(normed, norm.weight, norm.eps), plain], dim=1)
        qk, v = heads[:, : -kv.kv_heads], heads[:, -kv.kv_heads :]
        qk = elementwise.rotate(qk, *tables)
        attention.store_kv(qk[:, -kv.kv_heads :], v, kv, batch, layer)
        return qk[:, : -kv.kv_heads]

    def attention_scratch(self, shape: KVShape) -> int:
        """Most bytes that `attend` needs beside its result, as far as they do not grow with the step."""
        return 0

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
        """See `attention.paged_attention`. Returns [tokens, heads * head_dim]."""
        return attention.paged_attention(q, kv, batch, layer, scale, window, sinks, causal).flatten(1)

    # -- mixture of experts --------------------------------------------------------------------------------

    def route(
        self, logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None, batch: RaggedBatch | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Experts and weights of each token: see `experts.route`.

        Args:
            batch: whose rows these are. Rows of padding may go anywhere; a GPU sends them where the last real row goes,
                so that no expert is read for their sake.
        """
        return experts.route(logits, routing, bias)

    def count_experts(self, ids: torch.Tensor, batch: RaggedBatch, load: torch.Tensor) -> None:
        """Add to the load of each expert: see `experts.count_experts`."""
        experts.count_experts(ids, batch, load)

    def experts(
        self,
        gate_up: Sequence[Product],
        down: Sequence[Product],
        shared: Gather | ExpertSlots | None = None,
        activation: Activation = "silu",
    ) -> Experts:
        """All experts of a layer, one product of either kind an expert (made by `pack` or `pack_quantized`).

        Args:
            activation: of the gates; where it has none (`relu2`), the first products are those of `up` alone.
            shared: how ranks share them. Each expert: brings together the columns that they have between the products.
                Or slots: the products are those of this rank's, and the result is whole. None: all are here.
        """
        return experts.LoopedExperts(gate_up, down, shared, activation)

    # -- latent attention ----------------------------------------------------------------------------------

    def heads(self, products: Sequence[Product]) -> HeadProducts:
        """A product of its own for each head."""
        return experts.LoopedHeads(products)

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
        """See `latent.store_latent`."""
        latent.store_latent(compressed, norm, eps, tables, kv, batch, layer, index_keys)

    def rotate_interleaved(self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """See `latent.rotate_interleaved`."""
        return latent.rotate_interleaved(x, tables)

    def attend_latent(
        self, q: torch.Tensor, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
    ) -> torch.Tensor:
        """See `latent.latent_attention`."""
        return latent.latent_attention(q, kv, batch, layer, scale, width)

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
        """See `sparse.choose`."""
        sparse.choose(q, weights, kv, batch, layer, choice)

    def attend_chosen(
        self, q: torch.Tensor, choice: Choice, kv: KVCache, batch: RaggedBatch, layer: int, scale: float, width: int
    ) -> torch.Tensor:
        """See `sparse.attend`."""
        return sparse.attend(self, q, choice, kv, layer, scale, width)

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
        """See `states.delta_net`."""
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
        """See `mamba.mamba`."""
        return mamba.mamba(x, dt, weights, cache, batch, layer)

    def grouped_norm(
        self, x: torch.Tensor, weight: torch.Tensor, groups: int, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `elementwise.grouped_norm`."""
        return elementwise.grouped_norm(x, weight, groups, eps, dtype)

    def short_conv(
        self, x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int
    ) -> torch.Tensor:
        """See `short_conv.short_conv`."""
        return short_conv.short_conv(x, weights, cache, batch, layer)

    # -- sampling ------------------------------------------------------------------------------------------

    def finite_rows(self, x: torch.Tensor) -> torch.Tensor:
        """Whether all of each row of x [rows, size] is finite: [rows] bool."""
        return torch.isfinite(x).all(-1)

    def edit_logits(self, logits: torch.Tensor, edits: Edits) -> torch.Tensor:
        """Penalties, bias and masks, in place: see `logit_edits.edit_logits`."""
        return logit_edits.edit_logits(logits, edits)

    def sample(self, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        """A token a row: see `sampling.sample`. Tokens are the same in every implementation but for rare rounding.

        That is where the top-p mass ahead of a token equals top_p to 6 digits, or two scores agree to 15.
        """
        return sampling.sample(logits, filters)

    def token_scores(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, count: int) -> TokenScores:
        """Log-probabilities of tokens: see `sampling.token_scores`."""
        return sampling.token_scores(logits, rows, ids, count)
