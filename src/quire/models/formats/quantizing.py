"""Presents a checkpoint as one with weights in int8 or int4, each quantized when it is asked for: a format like those
of published files, which is made and not read.

Which weight is in which scheme (see `ops.quantize_groups`) depends on its name, layer and shape alone:

- **int8**: all in 8 bits.
- **int4**: in 4 bits; where these cost most, which are the head, keys and values, and the down projections of half of
  the layers, in 6 bits, and embedding tables in 8, since rows of theirs are quantized when they are looked up.

What is no matrix stays as it is, as do small weights that choose or accumulate (`is_plain`), and one with a number of
inputs that no group divides.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quire.errors import CheckpointError
from quire.layers.embedding import Table
from quire.models.checkpoint import Checkpoint
from quire.models.config import PER_LAYER_TABLE
from quire.models.met import Calibration, fitted
from quire.models.safetensors_file import FLOAT_DTYPES
from quire.models.weights import EMBEDDING, HEAD, ROUTER
from quire.ops import CodedWeight, Kernels
from quire.ops.coded import Scheme
from quire.ops.quantize_groups import bits_of, eight_bits, four_bits, six_bits

Quantization = Literal["int8", "int4"]
QUANTIZATIONS: tuple[Quantization, ...] = ("int8", "int4")

RECURRENT = (
    *("linear_attn.in_proj_a.weight", "linear_attn.in_proj_b.weight", ".in_proj_dt.weight"),
    *(f"self_attn.{name}_proj.weight" for name in ("f_a", "f_b", "g_a", "g_b", "b")),
)
"""Weights of a recurrent layer's decays, betas and gates: small, and small errors in them accumulate."""
INDEXER = tuple(f".indexer.{name}.weight" for name in ("wq_b", "wk", "weights_proj"))
"""Weights that select positions: a small error would change the selection."""
BY_HEADS = ".kv_b_proj.weight"
"""Latent attention's, which is split into a small product per head."""
TABLES = EMBEDDING, PER_LAYER_TABLE
DOWN = re.compile(r".*\.layers\.(\d+)\..*(down_proj|\bw2)\.weight")


def is_plain(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a tensor stays as it is in a quantized model: what is no matrix, routers, `BY_HEADS`, `RECURRENT`,
    `INDEXER`."""
    return len(shape) != 2 or name.endswith((ROUTER, BY_HEADS, *RECURRENT, *INDEXER))


def layers_with_more(layers: int) -> list[int]:
    """Of so many layers, those whose down projections get more bits: the first and last eighth, and every third
    between, as in llama.cpp's Q4_K_M."""
    eighth = layers // 8
    return [i for i in range(layers) if i < eighth or i >= layers - eighth or (i - eighth) % 3 == 2]


@dataclass(frozen=True, slots=True)
class Recipe:
    """The scheme of each weight of a model with so many layers."""

    how: Quantization
    layers: int

    def scheme(self, name: str, shape: tuple[int, ...]) -> Scheme | None:
        """That of a weight [out, in]; None where it stays as it is."""
        if is_plain(name, shape):
            return None
        if self.how == "int8" or name in TABLES:
            return eight_bits(shape[1])
        return six_bits(shape[1]) if self._is_hard(name) else four_bits(shape[1])

    def num_bytes(self, name: str, shape: tuple[int, ...], itemsize: int = 2) -> int:
        """What it takes; itemsize: of its numbers where it stays as it is."""
        numbers, scheme = 1, self.scheme(name, shape)
        for size in shape:
            numbers *= size
        return numbers * itemsize if scheme is None else round(numbers * bits_of(scheme, shape[1]) / 8)

    def _is_hard(self, name: str) -> bool:
        if name == HEAD or name.endswith((".k_proj.weight", ".v_proj.weight")):
            return True
        layer = DOWN.fullmatch(name)
        return layer is not None and int(layer[1]) in layers_with_more(self.layers)


class QuantizingCheckpoint(Checkpoint):
    """A checkpoint whose weights are quantized when they are asked for.

    Args:
        base: the checkpoint, with the model's names.
        recipe: see `Recipe`.
        kernels: quantize.
        calibration: which activations its weights meet, if that is known.

    Raises:
        CheckpointError: a weight has numbers that are not finite; where it is asked for.
    """

    def __init__(
        self, base: Checkpoint, recipe: Recipe, kernels: Kernels, calibration: Calibration | None = None
    ) -> None:
        self.folder, self.config, self.generation = base.folder, base.config, base.generation
        self.entries, self.notes, self.quantization = base.entries, base.notes, recipe.how
        self._base, self._recipe, self._kernels, self._calibration = base, recipe, kernels, calibration or {}

    def scheme(self, name: str) -> Scheme | None:
        """That of a tensor; None where it stays as it is."""
        return self._recipe.scheme(name, self.entries[name].shape)

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """See `Checkpoint`: what a quantized weight stands for, in fp32."""
        coded = self.coded(name)
        return self._base.tensor(name, dtypes) if coded is None else coded.restored()

    def coded(self, name: str, rows: range | None = None) -> CodedWeight | None:
        """See `Checkpoint`. The stored numbers count, so the data type of the computation does not."""
        scheme = self.scheme(name)
        if scheme is None:
            return None
        weight = self._base.tensor(name)
        return self.quantized(name, weight if rows is None else weight[rows.start : rows.stop], scheme)

    def quantized(self, name: str, weight: torch.Tensor, scheme: Scheme) -> CodedWeight:
        """Some rows of a weight in a scheme."""

        def quantize(some: torch.Tensor, importance: torch.Tensor | None) -> CodedWeight:
            return self._kernels.quantize_groups(some, scheme, importance=importance)

        try:
            return fitted(weight, scheme, self._calibration.get(name), quantize)
        except CheckpointError as error:
            raise CheckpointError(f"{self.folder}: {name} cannot be {scheme.name}: {error}") from error

    def table(self, name: str) -> Table | None:
        """See `Checkpoint`."""
        scheme = self.scheme(name)
        return self._base.table(name) if scheme is None else _Table(self, name, self._base.tensor(name), scheme)


class _Table:
    """A matrix whose rows are quantized when they are looked up: see `layers.embedding.Table`."""

    def __init__(self, owner: QuantizingCheckpoint, name: str, weight: torch.Tensor, scheme: Scheme) -> None:
        self.shape, self._weight = weight.shape, weight
        self._owner, self._name, self._scheme = owner, name, scheme

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self._owner.quantized(self._name, self._weight[ids], self._scheme).restored()
