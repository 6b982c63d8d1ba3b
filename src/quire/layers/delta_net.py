"""Gated DeltaNet, a recurrent layer in place of attention (https://arxiv.org/abs/2412.06464), as in Qwen3-Next."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.weights import LayerWeights
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch
from quire.ops.states import DeltaNetWeights, StateCache, StateShape
from quire.parallel.group import Group, Split, own_heads, share

PREFIX = "linear_attn."
QKVZ = tuple(f"{PREFIX}in_proj_{name}" for name in "qkvz")


@dataclass(frozen=True, slots=True)
class DeltaNetConfig:
    """Sizes of a Gated DeltaNet.

    Attributes:
        key_heads, key_dim: heads of queries and keys, and their width.
        heads, value_dim: the same of values.
        taps: width of the convolution, in tokens.
    """

    key_heads: int
    heads: int
    key_dim: int
    value_dim: int
    taps: int

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by name, with their shapes."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        shapes: dict[str, tuple[int, ...]] = {
            f"{name}.weight": (rows, hidden) for name, rows in zip(QKVZ, (keys, keys, values, values), strict=True)
        }
        for name in "ab":
            shapes[f"{PREFIX}in_proj_{name}.weight"] = (self.heads, hidden)
        shapes[f"{PREFIX}conv1d.weight"] = (2 * keys + values, 1, self.taps)
        shapes[f"{PREFIX}A_log"] = shapes[f"{PREFIX}dt_bias"] = (self.heads,)
        shapes[f"{PREFIX}norm.weight"] = (self.value_dim,)
        shapes[f"{PREFIX}out_proj.weight"] = (hidden, values)
        return shapes

    def state_shape(self, layers: int, block_size: int, dtype: torch.dtype, group: Group) -> StateShape:
        """See `RecurrentConfig`."""
        key_heads, heads = own_heads(self.key_heads, group), own_heads(self.heads, group)
        return StateShape(layers, key_heads, heads, self.key_dim, self.value_dim, self.taps, dtype, block_size)

    def layer(self, weights: LayerWeights, layer: int, eps: float) -> GatedDeltaNet:
        """See `RecurrentConfig`."""
        return GatedDeltaNet(self, weights, layer, eps)

    def cut_by(self, ranks: int) -> str:
        """See `RecurrentConfig`."""
        return f"the {self.key_heads} key heads" if self.key_heads % ranks else ""

    @property
    def width(self) -> int:
        """See `RecurrentConfig`."""
        return self.heads * self.value_dim

    @property
    def row(self) -> int:
        """See `RecurrentConfig`."""
        return 2 * self.key_heads * self.key_dim + 2 * self.width


class GatedDeltaNet:
    """The layer. Ranks share its heads; every rank computes the inputs of decays and betas for all heads.

    Args:
        config: its sizes.
        weights: gives the layer's parts by name.
        layer: which layer of its cache this is.
        eps: of its norm.
    """

    query_factors = None

    def __init__(self, config: DeltaNetConfig, weights: LayerWeights, layer: int, eps: float) -> None:
        group, keys = weights.group, config.key_heads
        counts = (keys, keys, config.heads, config.heads)
        self._qkvz = weights.linear(*QKVZ, split=Split.OUTPUTS, heads=counts)
        own = share(config.heads, group, config.heads)
        rows = [weights.tensor(f"{PREFIX}in_proj_{name}.weight")[own.start : own.stop] for name in "ab"]
        self._ab = weights.kernels.pack(rows, None, 2 * config.heads)
        self.output = weights.linear(f"{PREFIX}out_proj", split=Split.INPUTS, heads=(config.heads,))
        self._weights = self._rule(config, weights, own, eps)
        self._layer, self._kernels = layer, weights.kernels

    def _rule(self, config: DeltaNetConfig, weights: LayerWeights, own: range, eps: float) -> DeltaNetWeights:
        group, width = weights.group, config.key_heads * config.key_dim
        of_keys = share(width, group, config.key_heads)
        of_values = share(config.heads * config.value_dim, group, config.heads)
        conv = weights.tensor(f"{PREFIX}conv1d.weight", torch.float32)[:, 0]  # [channels, taps]
        parts = [(of_keys, 0), (of_keys, width), (of_values, 2 * width)]
        decay, shift = (
            weights.tensor(PREFIX + name, torch.float32)[own.start : own.stop] for name in ("A_log", "dt_bias")
        )
        return DeltaNetWeights(
            conv=torch.cat([conv[first + part.start : first + part.stop] for part, first in parts]).T.contiguous(),
            decay=-decay.exp(),
            shift=shift.clone(),
            norm=weights.tensor(f"{PREFIX}norm.weight", torch.float32).clone(),
            eps=eps,
        )

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """x: [tokens, hidden]. Same shape and type. Rotary `tables` are not used.

        Raises:
            TypeError: the cache does not contain states.
        """
        if not isinstance(kv, StateCache):
            raise TypeError(f"a recurrent layer needs a cache of states, not {type(kv).__name__}")
        ab = self._ab.matmul(x, torch.float32)
        out = self._kernels.delta_net(self._qkvz(x), ab, self._weights, kv, batch, self._layer)
        return self.output(out)
