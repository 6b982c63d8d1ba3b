"""Mamba 2 in place of attention (https://arxiv.org/abs/2405.21060), as in Granite 4 and Nemotron-H.

It is a linear attention: C is a token's query, B its key, x its value, and z the gate. Heads of queries and keys (one
or more) are called groups.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.layers.weights import LayerWeights
from quire.ops.kv_cache import KVCache
from quire.ops.mamba import MambaWeights
from quire.ops.ragged import RaggedBatch
from quire.ops.states import StateCache, StateShape
from quire.parallel.group import Gather, Group, Split, own_heads, share

PREFIX = "mamba."
CBXZ = tuple(f"{PREFIX}in_proj_{name}" for name in "cbxz")
DT = f"{PREFIX}in_proj_dt"


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """Sizes of a layer.

    Attributes:
        groups: heads of B and C, each for heads / groups consecutive heads; also the groups of the last norm.
        heads, head_dim: of x, and their width.
        state_dim: width of B and C.
        taps: width of the convolution, in tokens.
        eps: of the norm.
        bias, conv_bias: whether both projections, and the convolution, have a bias.
    """

    groups: int
    heads: int
    head_dim: int
    state_dim: int
    taps: int
    eps: float
    bias: bool = False
    conv_bias: bool = True

    @property
    def width(self) -> int:
        """See `RecurrentConfig`: of x, of the gate, and of the result."""
        return self.heads * self.head_dim

    @property
    def row(self) -> int:
        """See `RecurrentConfig`."""
        return 4 * self.groups * self.state_dim + 2 * self.width

    @property
    def projections(self) -> tuple[tuple[str, int], ...]:
        """The parts of a checkpoint's `in_proj` in order, with their numbers of rows."""
        keys = self.groups * self.state_dim
        rows = {"z": self.width, "x": self.width, "b": keys, "c": keys, "dt": self.heads}
        return tuple((f"{PREFIX}in_proj_{name}", count) for name, count in rows.items())

    def tensor_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """A layer's tensors by name, with their shapes."""
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, hidden) for name, rows in self.projections}
        channels = self.width + 2 * self.groups * self.state_dim
        shapes[f"{PREFIX}conv1d.weight"] = (channels, 1, self.taps)
        if self.conv_bias:
            shapes[f"{PREFIX}conv1d.bias"] = (channels,)
        if self.bias:
            shapes |= {f"{name}.bias": (rows,) for name, rows in self.projections}
            shapes[f"{PREFIX}out_proj.bias"] = (hidden,)
        shapes |= {f"{PREFIX}{name}": (self.heads,) for name in ("A_log", "D", "dt_bias")}
        shapes[f"{PREFIX}norm.weight"] = (self.width,)
        shapes[f"{PREFIX}out_proj.weight"] = (hidden, self.width)
        return shapes

    def state_shape(self, layers: int, block_size: int, dtype: torch.dtype, group: Group) -> StateShape:
        """See `RecurrentConfig`."""
        groups, heads = own_heads(self.groups, group), own_heads(self.heads, group)
        return StateShape(layers, groups, heads, self.state_dim, self.head_dim, self.taps, dtype, block_size)

    def layer(self, weights: LayerWeights, layer: int, eps: float) -> Mamba:
        """See `RecurrentConfig`; its norm has an eps of its own."""
        return Mamba(self, weights, layer)

    def cut_by(self, ranks: int) -> str:
        """See `RecurrentConfig`. Ranks may share a group."""
        if self.heads % ranks or (self.groups % ranks and ranks % self.groups):
            return f"the {self.heads} heads and {self.groups} groups"
        return ""


class Mamba:
    """The layer. Ranks share its heads; see `RecurrentConfig.layer`."""

    query_factors = None

    def __init__(self, config: MambaConfig, weights: LayerWeights, layer: int) -> None:
        group, heads = weights.group, config.heads
        counts = (config.groups, config.groups, heads, heads)
        self._cbxz = weights.linear(*CBXZ, bias=config.bias, split=Split.OUTPUTS, heads=counts)
        own = share(heads, group, heads)
        bias = weights.tensor(f"{DT}.bias")[own.start : own.stop] if config.bias else None
        self._dt = weights.kernels.pack([weights.tensor(f"{DT}.weight")[own.start : own.stop]], bias, heads)
        self.output = weights.linear(f"{PREFIX}out_proj", bias=config.bias, split=Split.INPUTS, heads=(heads,))
        self._weights = _layer_weights(config, weights, own)
        self._norm = GroupedNorm(config, weights)
        self._layer, self._kernels = layer, weights.kernels

    def __call__(
        self, x: torch.Tensor, tables: tuple[torch.Tensor, torch.Tensor], kv: KVCache, batch: RaggedBatch
    ) -> torch.Tensor:
        """See `RecurrentLayer`."""
        if not isinstance(kv, StateCache):
            raise TypeError(f"a Mamba layer needs a cache of states, not {type(kv).__name__}")
        dt = self._dt.matmul(x, torch.float32)
        gated = self._kernels.mamba(self._cbxz(x), dt, self._weights, kv, batch, self._layer)
        return self.output(self._norm(gated, x.dtype))


def _layer_weights(config: MambaConfig, weights: LayerWeights, own: range) -> MambaWeights:
    """The weights of this rank's heads. A checkpoint's channels are x, B, C; here they are C, B, x."""
    keys = share(config.groups * config.state_dim, weights.group, config.groups)
    values = share(config.width, weights.group, config.heads)
    second = config.width + config.groups * config.state_dim
    parts = [(keys, second), (keys, config.width), (values, 0)]

    def of_channels(name: str) -> torch.Tensor:
        whole = weights.tensor(f"{PREFIX}conv1d.{name}", torch.float32)
        return torch.cat([whole[first + part.start : first + part.stop] for part, first in parts])

    conv = of_channels("weight")[:, 0].T.contiguous()
    decay, shift, skip = (
        weights.tensor(PREFIX + name, torch.float32)[own.start : own.stop].clone() for name in ("A_log", "dt_bias", "D")
    )
    bias = of_channels("bias") if config.conv_bias else conv.new_zeros(conv.shape[1])
    return MambaWeights(conv, bias, -decay.exp(), shift, skip)


class GroupedNorm:
    """An RMS norm over each group of heads, in fp32. Ranks that share a group gather it."""

    def __init__(self, config: MambaConfig, weights: LayerWeights) -> None:
        group, width = weights.group, config.width
        self._kernels, self._eps = weights.kernels, config.eps
        self._own = share(width, group, config.heads)
        apart = config.groups % group.size == 0
        self._gather = None if apart else Gather(group, width, config.heads)
        self._groups = config.groups // group.size if apart else config.groups
        weight = weights.tensor(f"{PREFIX}norm.weight", torch.float32)
        self._weight = (weight[self._own.start : self._own.stop] if apart else weight).clone()

    def __call__(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """x: [tokens, own heads * head_dim] fp32. Same shape, in `dtype`."""
        if self._gather is None:
            return self._kernels.grouped_norm(x, self._weight, self._groups, self._eps, dtype)
        whole = self._kernels.grouped_norm(self._gather(x), self._weight, self._groups, self._eps, dtype)
        return whole[:, self._own.start : self._own.stop].contiguous()
