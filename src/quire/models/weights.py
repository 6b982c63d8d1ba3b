"""From a checkpoint's tensors to a model's: all are checked before the first one is read."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

from quire.errors import MissingTensorError, TensorDtypeError, TensorShapeError, UnexpectedTensorError
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.checkpoint import Checkpoint
from quire.models.safetensors_file import FLOAT_DTYPES
from quire.ops import Kernels

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers that older checkpoints hold; they follow from the configuration."""
NAMES_SHOWN = 5

Progress = Callable[[int, int], None]
"""Told (bytes read, bytes to read in all) as loading goes on."""


class Weights:
    """A checkpoint's tensors, in the data type of the computation, and the layers made of them.

    Each is mapped when it is asked for and unmapped when it has been packed, so a model's weights are never
    held twice.

    Args:
        checkpoint: where they lie.
        shapes: every tensor that the model needs, by name.
        dtype: what they are converted to.
        kernels: the implementation that the layers are made for.
        tied: the head is the embedding table.
        progress: told how far loading is.

    Raises:
        MissingTensorError, TensorShapeError, TensorDtypeError, UnexpectedTensorError: the checkpoint is not
            the one that its configuration describes; the message names the tensors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        kernels: Kernels,
        tied: bool,
        progress: Progress | None = None,
    ) -> None:
        self.dtype, self.kernels = dtype, kernels
        self._checkpoint = checkpoint
        self._progress = progress
        _check_missing(checkpoint, shapes)
        _check_shapes(checkpoint, shapes)
        _check_left_over(checkpoint, shapes, tied)
        self._bytes_total = sum(checkpoint.entries[name].num_bytes for name in shapes)
        self._bytes_read = 0
        self._taken: set[str] = set()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor in `dtype`; a view of the file where it has that type already."""
        return self.as_stored(name).to(self.dtype)

    def as_stored(self, name: str) -> torch.Tensor:
        """A tensor as a view of the file, in the file's type."""
        tensor = self._checkpoint.tensor(name)
        if name not in self._taken:
            self._taken.add(name)
            self._bytes_read += self._checkpoint.entries[name].num_bytes
            if self._progress is not None:
                self._progress(self._bytes_read, self._bytes_total)
        return tensor

    def linear(self, *names: str, bias: bool = False) -> Linear:
        """The product with a weight; with several that read the same input, their outputs side by side."""
        weights = [self.tensor(f"{name}.weight") for name in names]
        biases = [self.tensor(f"{name}.bias") for name in names] if bias else None
        return Linear(self.kernels.pack(_joined(weights), None if biases is None else _joined(biases)))

    def norm(self, name: str, eps: float) -> RMSNorm:
        """A norm."""
        return RMSNorm(self.tensor(f"{name}.weight"), eps, self.kernels)

    def embedding(self, name: str) -> Embedding:
        """An embedding table, which stays a view of the file."""
        return Embedding(self.as_stored(f"{name}.weight"), self.dtype, self.kernels)

    def under(self, prefix: str) -> WeightsUnder:
        """The tensors whose names begin with `prefix`, by the rest of their names."""
        return WeightsUnder(self, prefix)


class WeightsUnder:
    """A layer's weights: see `Weights`, whose methods these are, for names that begin with `prefix`."""

    def __init__(self, weights: Weights, prefix: str) -> None:
        self._weights, self._prefix = weights, prefix
        self.kernels = weights.kernels

    def tensor(self, name: str) -> torch.Tensor:
        return self._weights.tensor(self._prefix + name)

    def linear(self, *names: str, bias: bool = False) -> Linear:
        return self._weights.linear(*(self._prefix + name for name in names), bias=bias)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return self._weights.norm(self._prefix + name, eps)


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(repr(name) for name in names[:NAMES_SHOWN]) + more


def _check_missing(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in shapes if name not in checkpoint.entries]
    if missing:
        hint = " If the head is the embedding table, say tie_word_embeddings: true." if missing == [HEAD] else ""
        raise MissingTensorError(
            f"{checkpoint.folder}: {len(missing)} of the {len(shapes)} tensors that config.json implies are "
            f"missing: {_listed(missing)}. Is the download complete, and config.json its own?{hint}"
        )


def _check_shapes(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    entries = checkpoint.entries
    wrong = [name for name, shape in shapes.items() if entries[name].shape != shape]
    if wrong:
        first = wrong[0]
        raise TensorShapeError(
            f"{checkpoint.folder}: {len(wrong)} tensors have another shape than config.json implies: "
            f"{_listed(wrong)}. {first!r} is {list(entries[first].shape)}, not {list(shapes[first])}. "
            "Is config.json that of these weights?"
        )
    foreign = [name for name in shapes if entries[name].dtype not in FLOAT_DTYPES]
    if foreign:
        raise TensorDtypeError(
            f"{checkpoint.folder}: {len(foreign)} tensors have a data type that is not one of "
            f"{', '.join(sorted(FLOAT_DTYPES))}: {_listed(foreign)} ({entries[foreign[0]].dtype}). Quantized "
            "checkpoints are not supported; use the one that it was made from."
        )


def _check_left_over(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], tied: bool) -> None:
    left_over = sorted(name for name in checkpoint.entries if name not in shapes and not ROTARY_BUFFER.fullmatch(name))
    if tied and HEAD in left_over:
        if not _same(checkpoint, HEAD, EMBEDDING):
            raise UnexpectedTensorError(
                f"{checkpoint.folder}: config.json says tie_word_embeddings: true, but {HEAD!r} is there and "
                f"differs from {EMBEDDING!r}. Say false in config.json to use it, or remove it."
            )
        left_over.remove(HEAD)
    if left_over:
        raise UnexpectedTensorError(
            f"{checkpoint.folder}: the model has no place for {len(left_over)} tensors: {_listed(left_over)}. "
            "Is config.json that of these weights?"
        )


def _same(checkpoint: Checkpoint, first: str, second: str) -> bool:
    a, b = checkpoint.entries[first], checkpoint.entries[second]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(checkpoint.tensor(first), checkpoint.tensor(second))
