"""Checkpoints in compressed-tensors' formats (https://github.com/vllm-project/compressed-tensors), as llm-compressor
and others write them.

A module's weight is one of

- pack-quantized: weight_packed int32 [out, in x bits / 32], a stream of bits along the inputs; weight_scale
  [out, groups]; weight_shape; weight_zero_point int32 [out x bits / 32, groups], packed along the outputs; and, of
  files that order inputs by their activations, weight_g_idx int32 [in], the group of each input.
- int-quantized or naive-quantized: weight int8 [out, in]; weight_scale [out, groups], or one; weight_zero_point.
- float-quantized, naive-quantized or mxfp8-quantized: weight F8_E4M3 with weight_scale: see `fp8`.
- nvfp4-pack-quantized, mxfp4-pack-quantized: weight_packed uint8 [out, in / 2]: see `fp4`.

Its tensors say which, whatever the lists of targets and ignored modules are. The configuration says in which blocks
fp8 weights have scales, whether activations are quantized row by row, and what is refused: sparse weights, and weights
that only fit transformed activations.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quire.errors import ModelConfigError, TensorShapeError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.fp4 import find_fp4
from quire.models.formats.fp8 import Block, find_fp8, read_block
from quire.models.formats.integers import WORD, IntegerWeight, as_codes, centered, in_groups, order_of, unpacked
from quire.models.formats.stored import FLOATS, TYPES, Contents, check_shape, find_parts, matrix, unused_scales
from quire.models.safetensors_file import map_tensor
from quire.models.safetensors_header import TensorEntry

FORMATS = {
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
}
STRATEGIES = {"tensor", "channel", "group", "block", "tensor_group"}
KNOWN = {
    *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder"),
    *("scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
"""Fields of how a group's weights are quantized; another one may change what they mean."""


@dataclass(frozen=True, kw_only=True)
class PlainIntegers(IntegerWeight):
    """int-quantized, naive-quantized."""

    def codes(self) -> torch.Tensor:
        """See `IntegerWeight`; a view of the file."""
        return self.part("weight")

    def scales(self) -> torch.Tensor:
        """See `IntegerWeight`."""
        return in_groups(self.part("weight_scale"), self.shape[0])

    def zeros(self) -> torch.Tensor | None:
        """See `IntegerWeight`."""
        return in_groups(self.part("weight_zero_point"), self.shape[0]) if "weight_zero_point" in self.parts else None


@dataclass(frozen=True, kw_only=True)
class PackedIntegers(PlainIntegers):
    """pack-quantized."""

    def codes(self) -> torch.Tensor:
        """See `IntegerWeight`. With 4 bits a view of the file."""
        words, inputs = self.part("weight_packed"), self.shape[1]
        if self.bits == 4 and words.shape[1] * 8 == inputs:
            return words.view(torch.uint8)
        return as_codes(unpacked(words, self.bits, inputs), self.bits)

    def zeros(self) -> torch.Tensor | None:
        """See `IntegerWeight`."""
        if "weight_zero_point" not in self.parts:
            return None
        zeros = unpacked(self.part("weight_zero_point").mT, self.bits, self.shape[0]).mT.contiguous()
        return zeros if self.bits <= 4 else centered(zeros, self.bits)

    def order(self) -> torch.Tensor | None:
        """See `IntegerWeight`."""
        if "weight_g_idx" not in self.parts:
            return None
        return order_of(self.part("weight_g_idx"), in_groups(self.part("weight_scale"), self.shape[0]).shape[1])


@dataclass(frozen=True)
class _Said:
    """What the configuration says.

    Attributes:
        blocks: rows and columns that share a scale of an fp8 weight.
        by_row: bits of integer weights that meet activations in int8.
        with_zeros: bits of integer weights that have zero points.
        ordered: inputs are ordered by their activations.
    """

    blocks: list[Block]
    by_row: set[int]
    with_zeros: set[int]
    ordered: bool


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights in these formats.

    Raises:
        ModelConfigError: the configuration asks for something that is not supported.
        MissingTensorError, TensorShapeError, TensorDtypeError: a weight's tensors are missing, or do not fit.
    """
    said = _read_section(section)
    weights = [
        *(
            _packed(base, name, said)
            for name, entry in base.entries.items()
            if _is(name, entry, "weight_packed", "I32")
        ),
        *find_integers(base, 8 in said.by_row, 8 in said.with_zeros),
        *find_fp4(base),
        *find_fp8(base, said.blocks),
    ]
    unused, notes = unused_scales(base)
    if said.ordered:
        notes = (
            *notes,
            "weights whose groups are not of consecutive inputs (actorder) are restored when they are read",
        )
    return Contents(weights, unused, notes)


def find_integers(base: Checkpoint, by_row: bool, with_zeros: bool = False) -> Iterator[PlainIntegers]:
    """The weights in int8, not packed. Raises MissingTensorError, TensorShapeError, TensorDtypeError.

    Args:
        by_row: activations are quantized row by row.
        with_zeros: there are zero points.
    """
    optional = "" if with_zeros else "?"
    for name, entry in base.entries.items():
        if not _is(name, entry, "weight", "I8"):
            continue
        wanted = {"weight": ("I8",), "weight_scale": FLOATS, f"weight_zero_point{optional}": ("I8",)}
        parts, shape = find_parts(base, name.removesuffix("weight"), wanted), matrix(entry)
        scale = parts["weight_scale"]
        _check_scale(scale, entry, shape)
        if "weight_zero_point" in parts:
            check_shape(parts["weight_zero_point"], scale.shape, why=f"{scale.name!r} of {list(scale.shape)}")
        how: Literal["row", "block"] = "row" if by_row else "block"
        yield PlainIntegers(name=name, shape=shape, parts=parts, kind="int8", bits=8, activations=how)


def _is(name: str, entry: TensorEntry, part: str, dtype: str) -> bool:
    return entry.dtype == dtype and name.endswith(f".{part}")


def _read_section(section: Fields) -> _Said:
    section.choice("format", FORMATS)
    for name in ("sparsity_config", "transform_config"):
        inner = section.section(name)
        if inner.names() and inner.picked(["format"]) != {"format": "dense"}:
            why = "sparse weights" if "sparsity" in name else "weights that only fit transformed (rotated) activations"
            section.refuse(name, (), why)
    section.refuse("moe_sparsity_config", (), "sparse experts")
    groups = section.section("config_groups")
    if not groups.names():
        raise section.error("config_groups", "an object with at least one group")
    said, without_zeros = _Said([], set(), set(), False), set[int]()
    ordered = False
    for name in sorted(groups.names()):
        group = groups.section(name)
        weights, inputs = group.section("weights"), group.section("input_activations")
        if unknown := weights.names() - KNOWN:
            raise ModelConfigError(
                f"{weights.source}: the field {sorted(unknown)[0]!r} is not known; a newer compressed-tensors may "
                f"have written this checkpoint. Known are: {', '.join(sorted(KNOWN))}"
            )
        if not weights.names():
            continue
        bits = weights.integer("num_bits", max=8)
        if weights.choice("type", {"int", "float"}, default="int") == "int":
            integers = inputs.names() and inputs.choice("type", {"int", "float"}, default="int") == "int"
            if integers and inputs.integer("num_bits", max=8) == 8:
                said.by_row.add(bits)
            (without_zeros if weights.flag("symmetric", default=True) else said.with_zeros).add(bits)
        if weights.choice("strategy", STRATEGIES, default="tensor") == "block":
            said.blocks.append(read_block(weights, "block_structure"))
        ordered |= weights.picked(["actorder"]).get("actorder") in ("group", "dynamic", True)
    return replace(said, with_zeros=said.with_zeros - without_zeros, ordered=ordered)


def _packed(base: Checkpoint, name: str, said: _Said) -> PackedIntegers:
    """A weight in pack-quantized."""
    prefix = name.removesuffix("weight_packed")
    wanted = {"weight_packed": ("I32",), "weight_scale": FLOATS, "weight_shape": ("I64", "I32")}
    optional = {"weight_zero_point?": ("I32",), "weight_g_idx?": ("I32", "I64")}
    parts = find_parts(base, prefix, wanted | optional)
    words, scale = parts["weight_packed"], parts["weight_scale"]
    outputs, width = matrix(words)
    check_shape(parts["weight_shape"], (2,), why="a matrix")
    shape = tuple(map_tensor(parts["weight_shape"], TYPES).tolist())
    bits = width * WORD // max(shape[1], 1)
    if shape[0] != outputs or not 1 <= bits <= 8 or -(-shape[1] * bits // WORD) != width:
        raise TensorShapeError(
            f"{words.file}: {words.name!r} is {list(words.shape)}, but {parts['weight_shape'].name!r} says that the "
            f"weight is {list(shape)}; each row must be a stream of codes of 1 to 8 bits"
        )
    groups = _check_scale(scale, words, shape)
    if bits in said.with_zeros:
        find_parts(base, prefix, wanted | {"weight_zero_point": ("I32",)})
    if "weight_zero_point" in parts:
        zeros = -(-outputs * bits // WORD), groups
        check_shape(parts["weight_zero_point"], zeros, why=f"{scale.name!r} of {list(scale.shape)}")
    if "weight_g_idx" in parts:
        check_shape(parts["weight_g_idx"], (shape[1],), why=f"a weight of {list(shape)}")
    return PackedIntegers(
        name=prefix + "weight",
        shape=shape,
        parts=parts,
        kind=f"int{bits}",
        bits=bits,
        activations="row" if bits in said.by_row else "block",
    )


def _check_scale(scale: TensorEntry, weight: TensorEntry, shape: tuple[int, ...]) -> int:
    """The number of groups of a weight's inputs."""
    outputs, inputs = shape
    groups = scale.shape[1] if len(scale.shape) == 2 and scale.shape[0] == outputs else 1
    grouped = [(outputs, groups)] if groups and inputs % groups == 0 else []
    why = f"{weight.name!r} of {list(weight.shape)} in groups of inputs"
    check_shape(scale, (), (1,), (1, 1), (outputs,), (outputs, 1), *grouped, why=why)
    return groups
