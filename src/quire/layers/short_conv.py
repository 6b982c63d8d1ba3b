"""LFM2's gated short convolution in place of attention, as in transformers' `modeling_lfm2.py`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.weights import LayerWeights
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch
from quire.ops.short_conv import ConvCache, ConvShape, ShortConvWeights
from quire.parallel.group import Group, Split, share

PREFIX = "short_conv."
GATES = tuple(f"{PREFIX}in_proj_{name}" for name in "bcx")


@dataclass(frozen=True, slots=True)
class ShortConvConfig:
    """Sizes of a short convolution.

    Attributes:
        channels: the hidden size.
        taps: width of the convolution, in tokens.
        bias: whether its two projections and the convolution have one.
    """

    channels: int
    taps: int
    bias: bool

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by name, with their shapes."""
        inner = self.channels
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (inner, hidden) for name in GATES}
        shapes[f"{PREFIX}conv1d.weight"] = (inner, 1, self.taps)
        shapes[f"{PREFIX}out_proj.weight"] = (hidden, inner)
        if self.bias:
            shapes |= {f"{name}.bias": (inner,) for name in (*GATES, f"{PREFIX}conv1d")}
            shapes[f"{PREFIX}out_proj.bias"] = (hidden,)
        return shapes

    def state_shape(self, layers: int, block_size: int, dtype: torch.dtype, group: Group) -> ConvShape:
        """See `RecurrentConfig`."""
        return ConvShape(layers, len(share(self.channels, group)), dtype, block_size)

    def layer(self, weights: LayerWeights, layer: int, eps: float) -> ShortConv:
        """See `RecurrentConfig`."""
        return ShortConv(self, weights, layer)

    def cut_by(self, ranks: int) -> str:
        """See `RecurrentConfig`."""
        return ""

    @property
    def width(self) -> int:
        """See `RecurrentConfig`."""
        return self.channels

    @property
    def row(self) -> int:
        """See `RecurrentConfig`."""
        return 3 * self.channels


class ShortConv:
    """The layer. Ranks share its channels; see `RecurrentConfig.layer`."""

    query_factors = None

    def __init__(self, config: ShortConvConfig, weights: LayerWeights, layer: int) -> None:
        self._gates = weights.linear(*GATES, bias=config.bias, split=Split.OUTPUTS)
        self.output = weights.linear(f"{PREFIX}out_proj", bias=config.bias, split=Split.INPUTS)
        own = share(config.channels, weights.group)
        conv = weights.tensor(f"{PREFIX}conv1d.weight", torch.float32)[own.start : own.stop, 0]  # [channels, taps]
        bias = conv.new_zeros(len(own))
        if config.bias:
            bias = weights.tensor(f"{PREFIX}conv1d.bias", torch.float32)[own.start : own.stop].clone()
        self._weights = ShortConvWeights(conv.T.contiguous(), bias)
        self._layer, self._kernels = layer, weights.kernels

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `RecurrentLayer`."""
        if not isinstance(kv, ConvCache):
            raise TypeError(f"a short convolution needs a cache of its inputs, not {type(kv).__name__}")
        out = self._kernels.short_conv(self._gates(x), self._weights, kv, batch, self._layer)
        return self.output(out)
