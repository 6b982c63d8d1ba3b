"""The tensors of a GGUF model under the model's names: coded as they are stored, or their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.errors import CheckpointError, TensorDtypeError
from quire.models.gguf.families import describe
from quire.models.gguf.file import GgufHeader, GgufTensor
from quire.models.gguf.metadata import Said
from quire.models.gguf.names import Source, find_sources
from quire.models.gguf.types import DECODERS, PLAIN, block_form, restored
from quire.models.safetensors_header import TensorEntry
from quire.ops import BlockWeight
from quire.ops.memory import map_file


class GgufTensors:
    """A model's tensors.

    Attributes:
        entries: every tensor by the model's name. `dtype` is F32 if it is quantized: that of the restored numbers.
        types: the types in the file, by the model's names.
        notes: messages for the user about what is not used.

    Raises:
        CheckpointError: one of its kinds: the model's family is not known, or its tensors are not those of the family,
            or of types that are not read.
    """

    def __init__(self, header: GgufHeader) -> None:
        said = Said(header)
        _, naming = describe(said)
        self._sources, further = find_sources(said, naming)
        _check_types([tensor for source in self._sources.values() for tensor in source.tensors])
        self.types = {name: source.tensors[0].type for name, source in self._sources.items()}
        self.entries = {name: _entry(name, source) for name, source in self._sources.items()}
        self.notes = tuple(_notes(said, further))

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor's numbers: a view of the file where they are stored as such, or else restored in fp32.

        Raises:
            CheckpointError: the file can no longer be read, or has become shorter.
        """
        source = self._sources[name]
        return _changed(source, [_numbers(source, tensor) for tensor in source.tensors])

    def coded(self, name: str) -> BlockWeight | None:
        """A tensor as it is stored; None if it is not quantized, or its numbers change.

        Raises:
            CheckpointError: the file can no longer be read.
        """
        source = self._sources[name]
        tensor = source.tensors[0]
        if tensor.type.name not in DECODERS or source.change is not None or source.columns is not None:
            return None
        if len(source.shape) != 2 or (source.scale is not None and tensor.type.name == "MXFP4"):
            return None
        factor = None if source.scale is None else _scale(source, source.scale)
        return BlockWeight(block_form(tensor.type), _blocks(source, tensor), _index(source), factor)

    def table(self, name: str) -> QuantizedTable | None:
        """A quantized matrix whose rows are restored one by one; None if it is not one."""
        source = self._sources[name]
        plain = source.tensors[0].type.name in PLAIN or source.rows is not None or source.change is not None
        return None if plain or len(source.shape) != 2 else QuantizedTable(source.tensors[0])


class QuantizedTable:
    """A matrix of a mapped file, whose rows are restored when they are asked for.

    Attributes:
        shape: rows and columns.
    """

    def __init__(self, tensor: GgufTensor) -> None:
        self._tensor, self.shape = tensor, torch.Size(tensor.shape)
        self._blocks = _mapped(tensor).view(tensor.shape[0], -1, tensor.type.size)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 [n]. Returns fp32 [n, columns]. Raises IndexError for an id outside the table."""
        return restored(self._tensor.type, self._blocks, ids)


def _entry(name: str, source: Source) -> TensorEntry:
    tensor = source.tensors[0]
    dtype = tensor.type.name if tensor.type.name in PLAIN and source.change is None else "F32"
    return TensorEntry(name, dtype, source.shape, tensor.file, tensor.start, source.num_bytes)


def _check_types(tensors: Sequence[GgufTensor]) -> None:
    foreign = sorted({tensor.type.name for tensor in tensors if tensor.type.name not in (*PLAIN, *DECODERS)})
    if foreign:
        first = next(tensor for tensor in tensors if tensor.type.name == foreign[0])
        raise TensorDtypeError(
            f"{first.file}: {first.name!r} is in {foreign[0]}"
            + (f" (others in {', '.join(foreign[1:])})" * (len(foreign) > 1))
            + f"; Quire reads {', '.join((*PLAIN, *DECODERS))}. Choose a file of the model in another type, such as "
            "Q4_K_M, IQ4_XS or Q3_K_M."
        )


def _notes(said: Said, further: Sequence[GgufTensor]) -> list[str]:
    notes = []
    if unread := said.unread():
        notes.append(f"{said.source.name} says {', '.join(unread)}, which Quire does not know and does not use")
    if further:
        size = sum(tensor.num_bytes for tensor in further) / 2**20
        notes.append(f"{len(further)} tensors ({size:,.1f} MiB) of layers that predict further tokens are not loaded")
    return notes


def _mapped(tensor: GgufTensor) -> torch.Tensor:
    """All bytes of a tensor, as a view of the file."""
    try:
        with tensor.file.open("rb") as stream:
            return map_file(stream.fileno(), tensor.start, tensor.num_bytes)
    except OSError as error:
        raise CheckpointError(f"{tensor.file} cannot be read: {error.strerror or error}") from error


def _own(source: Source, tensor: GgufTensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """The bytes of a tensor, or of one expert, and its shape."""
    data, shape = _mapped(tensor), tensor.shape
    if source.expert is None:
        return data, shape
    size = tensor.num_bytes // shape[0]
    return data[source.expert * size : (source.expert + 1) * size], shape[1:]


def _blocks(source: Source, tensor: GgufTensor) -> torch.Tensor:
    """Its blocks, uint8 [rows, blocks, bytes of a block]."""
    data, shape = _own(source, tensor)
    return data.view(math.prod(shape[:-1]), -1, tensor.type.size)


def _index(source: Source) -> torch.Tensor | None:
    return None if source.rows is None else torch.from_numpy(source.rows)


def _numbers(source: Source, tensor: GgufTensor) -> torch.Tensor:
    """A tensor's numbers, before any change."""
    index = _index(source)
    data, shape = _own(source, tensor)
    if tensor.type.name in PLAIN:
        numbers = _aligned(tensor, data).view(PLAIN[tensor.type.name]).view(shape)
        return numbers if index is None else numbers[index]
    try:
        numbers = restored(tensor.type, _blocks(source, tensor), index)
    except CheckpointError as error:
        raise CheckpointError(f"{tensor.file}: {tensor.name!r}: {error}") from error
    return numbers.view(shape if index is None else (len(index), *shape[1:]))


def _aligned(tensor: GgufTensor, data: torch.Tensor) -> torch.Tensor:
    """The data, copied if its numbers are not aligned (by a file's own, small alignment), since kernels rely on it."""
    return data.clone() if tensor.start % tensor.type.size else data


def _changed(source: Source, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    numbers = parts[0]
    if source.change == "keys_and_values":
        numbers = torch.cat([numbers.float().mT, parts[1].float()], dim=1).flatten(0, 1)
    elif source.change == "less_one":
        numbers = numbers.float() - 1
    elif source.change == "log":
        numbers = (-numbers.float()).log().flatten()
    if source.columns is not None:
        numbers = numbers[..., torch.from_numpy(source.columns)]
    if source.scale is not None:
        numbers = numbers.float() * _scale(source, source.scale)
    return numbers.view(source.shape)


def _scale(source: Source, scale: GgufTensor) -> float:
    """The number by which all of a tensor's, or an expert's, are multiplied."""
    if scale.type.name != "F32" or math.prod(scale.shape) not in (1, source.tensors[0].shape[0]):
        raise CheckpointError(f"{scale.file}: {scale.name!r} must be one number in F32, or one for each expert")
    numbers = _aligned(scale, _mapped(scale)).view(torch.float32)
    return float(numbers[0 if len(numbers) == 1 or source.expert is None else source.expert])
