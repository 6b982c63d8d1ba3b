"""Kimi delta attention (https://arxiv.org/abs/2510.26692): a Gated DeltaNet with a decay per row of the state.

The inputs of the decays, and the gate of the result, are low-rank projections.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.weights import LayerWeights
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch
from quire.ops.states import DeltaNetWeights, StateCache, StateShape
from quire.parallel.group import Group, Split, own_heads, share

PREFIX = "self_attn."
QKV = tuple(f"{PREFIX}{name}_proj" for name in "qkv")


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig:
    """Sizes of Kimi delta attention.

    Attributes:
        heads, head_dim: of queries, keys and values.
        taps: width of the convolutions, in tokens.
    """

    heads: int
    head_dim: int
    taps: int

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by name, with their shapes."""
        inner, small = self.width, self.head_dim
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (inner, hidden) for name in QKV}
        shapes |= {f"{PREFIX}{name}_conv1d.weight": (inner, 1, self.taps) for name in "qkv"}
        for name in "fg":
            shapes[f"{PREFIX}{name}_a_proj.weight"] = (small, hidden)
            shapes[f"{PREFIX}{name}_b_proj.weight"] = (inner, small)
        shapes[f"{PREFIX}b_proj.weight"] = (self.heads, hidden)
        shapes[f"{PREFIX}A_log"], shapes[f"{PREFIX}dt_bias"] = (1, 1, self.heads, 1), (inner,)
        shapes[f"{PREFIX}o_norm.weight"] = (small,)
        shapes[f"{PREFIX}o_proj.weight"] = (hidden, inner)
        return shapes

    def state_shape(self, layers: int, block_size: int, dtype: torch.dtype, group: Group) -> StateShape:
        """See `RecurrentConfig`."""
        heads, dim = own_heads(self.heads, group), self.head_dim
        return StateShape(layers, heads, heads, dim, dim, self.taps, dtype, block_size, decay_dim=dim)

    def layer(self, weights: LayerWeights, layer: int, eps: float) -> KimiDeltaAttention:
        """See `RecurrentConfig`."""
        return KimiDeltaAttention(self, weights, layer, eps)

    def cut_by(self, ranks: int) -> str:
        """See `RecurrentConfig`."""
        return f"the {self.heads} heads" if self.heads % ranks else ""

    @property
    def width(self) -> int:
        """See `RecurrentConfig`."""
        return self.heads * self.head_dim

    @property
    def row(self) -> int:
        """See `RecurrentConfig`: queries, keys, values and the gate, twice, and the inputs of the decays, in fp32."""
        return 10 * self.width


class KimiDeltaAttention:
    """The layer. Ranks share its heads; every rank computes the first halves of the low-rank projections.

    Args:
        config: its sizes.
        weights: gives the layer's parts by name.
        layer: which layer of its cache this is.
        eps: of its norm.
    """

    query_factors = None

    def __init__(self, config: KimiDeltaConfig, weights: LayerWeights, layer: int, eps: float) -> None:
        own = share(config.heads, weights.group, config.heads)
        inner = slice(own.start * config.head_dim, own.stop * config.head_dim)

        def packed(*names: str, rows: slice = slice(None)) -> list[torch.Tensor]:
            return [weights.tensor(f"{PREFIX}{name}_proj.weight")[rows] for name in names]

        pack, width = weights.kernels.pack, config.heads * config.head_dim
        self._qkv = weights.linear(*QKV, split=Split.OUTPUTS, heads=(config.heads,) * 3)
        self._small = pack(packed("f_a", "g_a"))
        self._decay, self._gate = (pack(packed(name, rows=inner), None, width) for name in ("f_b", "g_b"))
        self._beta = pack(packed("b", rows=slice(own.start, own.stop)), None, config.heads)
        self.output = weights.linear(f"{PREFIX}o_proj", split=Split.INPUTS, heads=(config.heads,))
        conv = [weights.tensor(f"{PREFIX}{name}_conv1d.weight", torch.float32)[inner, 0] for name in "qkv"]
        decay = -weights.tensor(f"{PREFIX}A_log", torch.float32).flatten()[own.start : own.stop].exp()
        self._weights = DeltaNetWeights(
            conv=torch.cat(conv).T.contiguous(),
            decay=decay.repeat_interleave(config.head_dim),
            shift=weights.tensor(f"{PREFIX}dt_bias", torch.float32)[inner].clone(),
            norm=weights.tensor(f"{PREFIX}o_norm.weight", torch.float32).clone(),
            eps=eps,
            gate="sigmoid",
        )
        self._layer, self._kernels = layer, weights.kernels

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `RecurrentLayer`."""
        if not isinstance(kv, StateCache):
            raise TypeError(f"a recurrent layer needs a cache of states, not {type(kv).__name__}")
        to_decay, to_gate = (part.contiguous() for part in self._small.matmul(x).chunk(2, dim=1))
        rates = torch.cat([self._decay.matmul(to_decay, torch.float32), self._beta.matmul(x, torch.float32)], dim=1)
        inputs = torch.cat([self._qkv(x), self._gate.matmul(to_gate)], dim=1)
        out = self._kernels.delta_net(inputs, rates, self._weights, kv, batch, self._layer)
        return self.output(out)
