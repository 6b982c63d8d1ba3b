"""Which activations meet a model's weights, measured over texts: where errors of weights cost most.

The model runs with plain kernels, whose products note what they are given. Importance is the mean square of each input;
GPTQ's rounding (`models.gptq`) needs the products of each pair of inputs, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch

from quire.errors import ConfigError
from quire.layers.linear import Linear
from quire.models.checkpoint import Checkpoint, choose_dtype
from quire.models.met import Calibration, Met
from quire.models.model import Model
from quire.models.registry import in_layout
from quire.models.sharing import Sharing
from quire.models.weights import Weights, check_tensors
from quire.ops import Kernels, Product, RaggedBatch, StoredWeight

WINDOW = 512
"""Tokens that are computed with those before them alone."""
MAX_TOKENS = 1 << 16
"""Most that are computed; more change little."""
BLOCK = 16
"""Tokens of a block of the KV cache."""


def calibrate(
    checkpoint: Checkpoint, texts: Sequence[Sequence[int]], pairs: bool, progress: Callable[[int, int], None]
) -> Calibration:
    """Run a checkpoint's model over texts.

    Args:
        texts: token ids; they are cut into windows of `WINDOW`, of which all, up to `MAX_TOKENS`, are computed.
        pairs: also sum products of pairs of inputs.
        progress: called with (tokens done, all tokens).

    Raises:
        ConfigError: there is no text, a token is none of the model's, or the sums would not fit into memory.
        CheckpointError: one of its kinds, for whatever is wrong with the checkpoint.
    """
    laid_out, config, _ = in_layout(checkpoint)
    windows = _windows(texts, config.vocab_size)
    shapes, dtype = config.tensor_shapes(), choose_dtype(checkpoint, "auto")[0]
    check_tensors(laid_out, shapes, config.tie_word_embeddings, config.skipped())
    weights = _Watched(laid_out, shapes, dtype, _Plain(), norm_offset=config.norm_offset)
    if pairs:
        weights.check_room(shapes)
    weights.pairs, weights.met = pairs, {}
    model = Model(config, weights, Sharing())
    total, done = sum(map(len, windows)), 0
    for window in windows:
        _run(model, window)
        done += len(window)
        progress(done, total)
    return weights.met


class _Plain(Kernels):
    """Plain kernels that compute with the numbers for which codes stand."""

    def keeps(self, weight: StoredWeight) -> bool:
        return False


class _Watched(Weights):
    """Weights whose products note what they are given."""

    pairs: bool
    met: Calibration

    def check_room(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Check that the sums of pairs fit into half of the machine's memory; raises ConfigError."""
        needed = sum(4 * shape[1] ** 2 for name, shape in shapes.items() if len(shape) == 2 and ".layers." in name)
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if needed > memory // 2:
            raise ConfigError(
                f"--rounding gptq needs up to {needed >> 20:,} MiB for this model, and half of this machine's memory "
                f"is {memory >> 21:,} MiB; leave it out: --calibrate alone needs little"
            )

    def linear(self, *names: str, **options: Any) -> Linear:
        """See `Weights.linear`."""
        made = super().linear(*names, **options)
        inputs = made.product.in_features
        met = Met(torch.zeros(inputs), torch.zeros(inputs, inputs) if self.pairs else None)
        self.met |= {f"{name}.weight": met for name in names}
        made.product = _Noting(made.product, met)
        return made


class _Noting:
    """A product that notes what it is given."""

    def __init__(self, product: Product, met: Met) -> None:
        self._product, self._met = product, met
        self.in_features, self.out_features = product.in_features, product.out_features

    def matmul(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See `Product`."""
        self._met.add(x)
        return self._product.matmul(x, out_dtype)


def _windows(texts: Sequence[Sequence[int]], vocabulary: int) -> list[list[int]]:
    windows: list[list[int]] = []
    for text in texts:
        if wrong := [token for token in text if not 0 <= token < vocabulary]:
            raise ConfigError(f"the calibration text has the token {wrong[0]}, and the model has {vocabulary}")
        windows += [[*text[first : first + WINDOW]] for first in range(0, len(text), WINDOW)]
    windows = windows[: MAX_TOKENS // WINDOW]
    if sum(map(len, windows)) < WINDOW:
        raise ConfigError(
            f"the calibration text has {sum(map(len, windows))} tokens, too few to tell which inputs matter; give at "
            f"least {WINDOW}, better tens of thousands, of what the model is used for"
        )
    return windows


@torch.inference_mode()
def _run(model: Model, window: Sequence[int]) -> None:
    blocks = -(-len(window) // BLOCK)
    caches = model.new_caches([blocks + 1] * len(model.groups), BLOCK)
    positions = torch.arange(len(window))
    batches = [
        RaggedBatch(
            token_ids=torch.tensor(window),
            positions=positions,
            slots=positions + BLOCK,
            row_starts=[0, len(window)],
            context_lens=[len(window)],
            block_tables=torch.arange(1, blocks + 1)[None],
            block_size=BLOCK,
        )
        for _ in caches
    ]
    model.forward(batches, caches)
