"""All kernels that layers use, named by what they compute.

`Kernels` is the reference in plain torch: the oracle in tests of the faster kernels, and the fallback without them.
`quire.ops.cpu` and, on a GPU, `quire.ops.triton` override its methods. The implementation is chosen once, at start.
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
from quire.ops.blocks import BlockWeight
from quire.ops.coded import CodedProduct, CodedWeight, Scheme
from quire.ops.elementwise import Activation
from quire.ops.experts import Experts, ExpertSlots, HeadProducts, Routing
from quire.ops.fp8 import Fp8Weight
from quire.ops.kv_cache import KVCache, KVShape
from quire.ops.linear import PackedWeight, Product, can_pack
from quire.ops.logit_edits import Edits
from quire.ops.mamba import MambaWeights
from quire.ops.mxfp4 import Mxfp4Product, Mxfp4Weight
from quire.ops.quantize_groups import quantize_groups
from quire.ops.ragged import DeviceSpans, RaggedBatch
from quire.ops.sampling import Filters, TokenScores
from quire.ops.short_conv import ConvCache, ShortConvWeights
from quire.ops.sparse import Choice
from quire.ops.states import DeltaNetWeights, StateCache
from quire.ops.threads import torch_threads
from quire.parallel.group import Gather

StoredWeight = Mxfp4Weight | Fp8Weight | CodedWeight | BlockWeight
"""A weight as a checkpoint stores it, with fewer bits than the data type of the computation has."""


class HeadNorm(NamedTuple):
    """The RMS norm of each query and key head: weight [heads + kv_heads, head_dim], a row per head.

    With kv_heads more rows, each value head has one, too.
    """

    weight: torch.Tensor
    eps: float


class SharedLayer(NamedTuple):
    """The gathers of a layer that ranks share: of the attention's result, and of the outputs of both halves."""

    attended: Gather
    hidden: Gather


class WholeLayer(Protocol):
    """A decoder layer as one kernel, with the arguments and result of `DecoderLayer`."""

    def __call__(
        self,
        x: torch.Tensor | None,
        residual: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
    ) -> tuple[torch.Tensor, torch.Tensor]: ...


class AttentionParts(NamedTuple):
    """Attention (not latent) without its output projection.

    Attributes:
        qkv: the projection to queries, keys and values.
        norm: see `Kernels.rotate_and_store`; None if there is none.
        heads: number of this rank's query heads.
        scale, window, causal: see `Kernels.attend`.
    """

    qkv: Product
    norm: HeadNorm | None
    heads: int
    scale: float
    window: int | None
    causal: bool = True


class LatentParts(NamedTuple):
    """Latent attention in its absorbed form, without its output projection.

    Attributes:
        compressed_queries, query_norm: the projection to compressed queries, from which `queries` projects, and its
            norm; None if queries are not compressed.
        queries: the projection to queries, in each the dimensions that are not rotated before those that are.
        compressed: the projection to the cached rows, before their norm with weight `norm` [latent].
        into_latent, out_of_latent: made by `Kernels.heads`.
        eps: of both norms.
        heads: number of this rank's heads.
        turned: number of rotated dimensions of a query.
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
    """A gated MLP: its activation, its products, and the gather of its inner columns from the ranks."""

    activation: Activation
    gate_up: Product
    down: Product
    active: Gather | None


class ExpertsParts(NamedTuple):
    """Experts, without expert parallelism.

    Attributes:
        router: the projection to the router's logits.
        routing, bias: see `Kernels.route`.
        experts: made by `Kernels.experts`.
        shared: the shared experts' MLP; None if there is none.
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
    """The parts of a decoder layer: see `quire.layers.decoder`.

    Attributes:
        input_norm, mlp_input_norm: weights of the norms before attention and MLP, [hidden]; the former may be None in a
            layer that is always the first.
        attended_norm, mlp_norm: the same for the outputs of attention and MLP; None if there is none.
        eps: of all norms.
        dtype: of the residual stream; norms' weights may be in fp32.
        layer: its index in the cache.
        attention, output: its attention, and the output projection.
        mlp: its MLP or experts.
        shared: its gathers if ranks share it; None with a single rank.
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
    """One implementation of every kernel. It has no state of a step: kernels get all that they read as arguments.

    Args:
        deterministic: see the attribute. On a CPU it does not change kernels, but which of them layers use.
    """

    name = "torch"
    device = torch.device("cpu")
    """The device of weights, KV and activations."""
    deterministic = True
    """Whether a row's bits are independent of other rows, and of how its request was divided into steps."""
    takes_blocks = False
    """Whether they take the blocks of GGUF files apart themselves."""
    reads_spans = False
    """Whether kernels read a step's spans from the device's memory: see `RaggedBatch.spans`."""

    def __init__(self, deterministic: bool = True) -> None:
        self.deterministic = deterministic

    def describe(self, dtype: torch.dtype) -> str:
        """A description of what bits depend on: implementation, instruction set and versions, for `dtype`.

        Bits do not depend on the number of threads (`quire doctor` checks that).
        """
        linear = "oneDNN packed linear" if can_pack(dtype, torch.device("cpu")) else "torch linear in tiles"
        level = torch.backends.cpu.get_cpu_capability()
        tile = attention_plan.KEY_TILE
        return f"{linear}, torch attention in tiles of {tile} keys, {level}, torch {torch.__version__}"

    def note(self) -> str:
        """What was found about the machine while kernels ran, for people; may be empty."""
        return ""

    def warm_up(self, vocab_size: int) -> None:
        """Compile the kernels a request would otherwise be the first to need, for logits of this width."""

    def threads(self, count: int) -> AbstractContextManager[None]:
        """A context in which kernels called by this thread use `count` threads."""
        return torch_threads(count)

    def giving_way(self) -> AbstractContextManager[None]:
        """A context in which kernels called by this thread use only this thread, and yield to others often.

        For work besides steps, whose ranks wait for one another and so need the processor back quickly.
        """
        return torch_threads(1)

    # -- weights -------------------------------------------------------------------------------------------

    def pack(
        self, parts: Sequence[torch.Tensor], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        """The product with a weight, packed for this implementation.

        Args:
            parts: [out, in] each, with the same inputs; their outputs are concatenated.
            outputs: number of outputs of the whole weight, if these are a rank's shard, so that sums are divided alike.
        """
        return PackedWeight(parts[0] if len(parts) == 1 else torch.cat(list(parts)), bias)

    def quantize_groups(
        self,
        weight: torch.Tensor,
        scheme: Scheme,
        scale_dtype: torch.dtype = torch.bfloat16,
        importance: torch.Tensor | None = None,
    ) -> CodedWeight:
        """See `quantize_groups.quantize_groups`."""
        return quantize_groups(weight, scheme, scale_dtype, importance)

    def keeps(self, weight: StoredWeight) -> bool:
        """Whether such a weight is used as it is stored; otherwise it is dequantized when it is loaded."""
        return not isinstance(weight, Fp8Weight)

    def pack_fp8(
        self,
        parts: Sequence[Fp8Weight],
        dtype: torch.dtype,
        bias: torch.Tensor | None = None,
        outputs: int | None = None,
    ) -> Product:
        """The product with a weight in fp8, dequantized to `dtype`: see `pack`."""
        return self.pack([part.restored().to(dtype) for part in parts], bias, outputs)

    def pack_mxfp4(self, parts: Sequence[Mxfp4Weight], bias: torch.Tensor | None = None) -> Product:
        """The product with a weight in MXFP4, packed for this implementation: see `pack`."""
        return Mxfp4Product(parts, bias)

    def pack_coded(
        self, parts: Sequence[CodedWeight], bias: torch.Tensor | None = None, outputs: int | None = None
    ) -> Product:
        """The product with coded weights, packed for this implementation: see `pack`. Their schemes may differ.

        Raises:
            CheckpointError: see `CodedProduct`.
        """
        return CodedProduct(parts, bias)

    def pack_blocks(self, parts: Sequence[BlockWeight], bias: torch.Tensor | None = None) -> Product:
        """The product with weights in blocks, for kernels that take such (`takes_blocks`): see `pack_coded`."""
        raise NotImplementedError(f"{self.name} kernels take no blocks")

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        """A kernel for a whole decoder layer; None if there is none, so that its kernels are called one by one."""
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
            tokens: [rows] int32, ids; -1 is a placeholder for the one in `recent` at the row's slot (`FROM_PREVIOUS`),
                -2 for the one after it, and so on.
            span_of_row: [rows] int32; 0 in rows of padding.
            recent: [requests, size] int64, recent tokens for each row of the block tables, by position modulo `size`;
                negative ones (of a step that failed, so that this one's result is not used) count as 0.
            spans: `context_lens` is written here: start + rows. A row's slot is start + its index in the span; so is
                its position, unless it has a depth in `spans.trees`.

        Rows of padding (those from `row_starts[-1]` on) get token 0, position 0 and slot 0.
        """
        return step_inputs.place(tokens, span_of_row, recent, spans, block_size)

    def copy_blocks(self, kv: KVCache, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copy the first tokens of blocks: (source, destination, tokens) each; no destination is in another copy.

        This includes the draft model's KV.
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
        """Normalize and rotate queries and keys, and write keys and values into the cache's slots.

        Args:
            qkv: [tokens, (heads + 2 * kv_heads) * head_dim], may be overwritten.
            norm: of each query and key head, before rotation, and optionally of each value head; None if there is none.
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
        """Most bytes that `attend` needs besides its result, regardless of the size of the step."""
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
            batch: the step of these rows. Rows of padding may get any experts; on a GPU they get those of the last real
                row, so that no additional expert is read.
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
        """All experts of a layer, with two products each (made by `pack` or its like).

        Args:
            activation: of the gates; without a gate (`relu2`), the first products are only `up`.
            shared: how ranks share them. A gather of the inner columns, if each expert is sharded; slots, if the
                products are this rank's experts; None if there is a single rank.
        """
        return experts.LoopedExperts(gate_up, down, shared, activation)

    # -- latent attention ----------------------------------------------------------------------------------

    def heads(self, products: Sequence[Product]) -> HeadProducts:
        """A separate product for each head."""
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
        return sparse.attend(self.attend_latent, q, choice, kv, layer, scale, width)

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
        """Whether each row of x [rows, size] is finite: [rows] bool."""
        return torch.isfinite(x).all(-1)

    def edit_logits(self, logits: torch.Tensor, edits: Edits) -> torch.Tensor:
        """Penalties, bias and masks, in place: see `logit_edits.edit_logits`."""
        return logit_edits.edit_logits(logits, edits)

    def sample(self, logits: torch.Tensor, filters: Filters) -> torch.Tensor:
        """Sample a token per row: see `sampling.sample`. All implementations give the same tokens, except for rounding:
        if the top-p mass before a token equals top_p to 6 digits, or two scores agree to 15.
        """
        return sampling.sample(logits, filters)

    def token_scores(self, logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, count: int) -> TokenScores:
        """Log-probabilities of tokens: see `sampling.token_scores`."""
        return sampling.token_scores(logits, rows, ids, count)
