"""The gated short convolution of LFM2, over inputs in blocks (plain torch).

What goes on from one token to the next are the last few inputs: rows in blocks, and no state. See `ops/recurrent.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from quire.ops.ragged import RaggedBatch
from quire.ops.recurrent import Part, RecurrentCache, RecurrentShape, check_no_trees, convolved


@dataclass(frozen=True, slots=True)
class ConvShape(RecurrentShape):
    """What a block of short convolutions holds: the inputs of its tokens.

    Attributes:
        channels: of the convolution, each of which is by itself.
    """

    layers: int
    channels: int
    dtype: torch.dtype
    block_size: int

    @property
    def parts(self) -> list[Part]:
        """Inputs."""
        return [Part(self.dtype, (self.block_size, self.channels), 0, 1, ((self.channels, None),))]

    def cache(self, num_blocks: int, device: torch.device | str = "cpu") -> ConvCache:
        """See `RecurrentShape`."""
        return ConvCache(num_blocks, self, device)


class ConvCache(RecurrentCache):
    """The device's blocks of short convolutions.

    Attributes:
        inputs: [num_blocks, layers, block_size, channels] in the model's data type.
    """

    def __init__(self, num_blocks: int, shape: ConvShape, device: torch.device | str = "cpu") -> None:
        """Raises what `RecurrentCache` does."""
        super().__init__(num_blocks, shape, device)
        self.conv_shape, [self.inputs] = shape, self.views


class ShortConvWeights(NamedTuple):
    """What the convolution needs beside its inputs, fp32.

    Attributes:
        conv: [taps, channels], the last tap is a token's own.
        bias: [channels]; zeros where there is none.
    """

    conv: torch.Tensor
    bias: torch.Tensor


def short_conv(
    x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int
) -> torch.Tensor:
    """Gates, convolves, gates again: `c * conv(b * x)`. What is convolved is rounded to x's data type first.

    Args:
        x: [tokens, 3 * channels]: b, c and x.

    Returns:
        [tokens, channels] in x's data type.

    Raises:
        ValueError: see `check_conv`.
    """
    check_conv(x, weights, cache, batch, layer)
    first, last, inner = x.chunk(3, dim=1)
    inputs = (first.float() * inner.float()).to(x.dtype)
    out = torch.empty(len(x), cache.conv_shape.channels)
    spans = zip(batch.row_starts, batch.row_starts[1:], batch.context_lens, batch.block_tables.tolist(), strict=False)
    for begin, end, context, table in spans:
        stored = cache.inputs[:, layer]
        out[begin:end] = convolved(
            inputs[begin:end], weights.conv, weights.bias, stored, table, context - (end - begin)
        )
    return (out * last.float()).to(x.dtype)


def check_conv(x: torch.Tensor, weights: ShortConvWeights, cache: ConvCache, batch: RaggedBatch, layer: int) -> None:
    """Whether a step fits the cache.

    Raises:
        ValueError: it does not, or the batch has trees, whose rows do not continue one another.
    """
    check_no_trees(batch)
    channels = cache.conv_shape.channels
    if x.shape[1] != 3 * channels or weights.conv.shape[1] != channels or not 0 <= layer < cache.layers:
        raise ValueError(
            f"inputs {list(x.shape)} for layer {layer} do not fit the rows of {cache.layers} layers, whose inputs have "
            f"{3 * channels} columns"
        )
    if not 2 <= len(weights.conv) <= cache.block_size + 1:
        raise ValueError(f"a convolution of {len(weights.conv)} taps does not fit blocks of {cache.block_size} tokens")
