"""Loads a checkpoint's tensors into a model's layers. All tensors are checked before the first one is read."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from quire.errors import (
    CheckpointError,
    MissingTensorError,
    TensorDtypeError,
    TensorShapeError,
    UnexpectedTensorError,
)
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.models.checkpoint import Checkpoint
from quire.models.safetensors_file import FLOAT_DTYPES, read_ahead
from quire.ops import BlockWeight, CodedWeight, Fp8Weight, Kernels, Mxfp4Weight, Product, StoredWeight
from quire.parallel.group import Gather, Group, OneRank, Split, share

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
ROUTER = ".gate.weight"
EXPERT = re.compile(r".*\.experts\.\d+\..*")
"""A routed expert; a step reads only the chosen ones."""
NUMBERED = re.compile(r"(.*\.experts\.)\d+(\..*)")
EXPERT_FIELDS = "num_experts (num_local_experts, n_routed_experts)"
ROTARY_BUFFER = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")
"""Buffers in older checkpoints, which follow from the configuration."""
NAMES_SHOWN = 5

Progress = Callable[[int, int], None]
"""Called with (bytes read, total bytes) during loading."""


class Weights:
    """A checkpoint's tensors in the data type of the computation, and the layers made from them.

    Each tensor is mapped when it is used and unmapped when it has been packed, so a model's weights are never in memory
    twice.

    Args:
        checkpoint: has the tensors, see `check_tensors`.
        shapes: every tensor of the model, by name.
        dtype: the data type to convert them to.
        kernels: the implementation for which layers are made.
        progress: called with the progress of loading.
        group: the ranks that share the model; this rank reads its own shard.
        expert_slots, expert_group: see `LayerWeights`.
        norm_offset: see `DecoderConfig`.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        shapes: Mapping[str, tuple[int, ...]],
        dtype: torch.dtype,
        kernels: Kernels,
        progress: Progress | None = None,
        group: Group | None = None,
        expert_slots: int = 0,
        expert_group: Group | None = None,
        norm_offset: float | None = None,
    ) -> None:
        self.dtype, self.kernels, self.quantization = dtype, kernels, checkpoint.quantization
        self.group, self.expert_slots = group or OneRank(), expert_slots
        self.expert_group = expert_group or self.group
        self._norm_offset = norm_offset
        self._checkpoint, self._shapes = checkpoint, shapes
        self._progress = progress
        self._bytes_total = sum(checkpoint.entries[name].num_bytes for name in shapes)
        self._bytes_read = 0
        self._elsewhere: dict[str, int] = {}
        self._saved: dict[str, int] = {}  # by product: bytes saved by computing with weights as they are stored
        self.multiplies_bytes = False
        self._forms: dict[str, type | None] = {}  # by the experts of a layer: what their codes are
        self._taken: set[str] = set()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A tensor in `dtype`, by default that of the computation, on the kernels' device.

        It is a view of the file if nothing has to change.
        """
        return self._on_device(name).to(dtype or self.dtype)

    def _rows(self, name: str, own: range) -> torch.Tensor:
        """Some rows of a tensor, as `tensor` gives it. Only they are sent to a GPU: a view would keep all rows there.
        Those of the embedding table are a view, as all of it is there anyway."""
        if name == EMBEDDING:
            return _of(self.tensor(name), own)
        return _of(self.as_stored(name), own).to(self.kernels.device).to(self.dtype)

    def _on_device(self, name: str) -> torch.Tensor:
        """A tensor on the kernels' device, in the file's data type. On a GPU a tied head shares the embedding table.

        On a CPU each use maps the file again, since packed tensors are unmapped.
        """
        if name == EMBEDDING and self.kernels.device.type != "cpu":
            return self._table
        return self.as_stored(name).to(self.kernels.device)

    @functools.cached_property
    def _table(self) -> torch.Tensor:
        table = self.as_stored(EMBEDDING)
        restored = self._checkpoint.table(EMBEDDING) is not None  # in fp32: no narrower type is stored
        return (table.to(self.dtype) if restored else table).to(self.kernels.device)

    def as_stored(self, name: str) -> torch.Tensor:
        """A tensor as a view of the file, in the file's data type."""
        tensor = self._checkpoint.tensor(name)
        self._count(name)
        return tensor

    def _count(self, *names: str) -> None:
        """Count tensors as read."""
        for name in names:
            if name not in self._taken:
                self._taken.add(name)
                self._bytes_read += self._checkpoint.entries[name].num_bytes
        if self._progress is not None:
            self._progress(self._bytes_read, self._bytes_total)

    def linear(
        self,
        *names: str,
        bias: bool = False,
        split: Split = Split.NONE,
        heads: Sequence[int] | None = None,
        group: Group | None = None,
    ) -> Linear:
        """See `LayerWeights.linear`; `group`: the ranks that share it, by default those of the model."""
        group = group or self.group
        if group.size == 1:
            split = Split.NONE
        elif split is Split.INPUTS and self._adds(names[0]):
            return self._added(names[0], bias, heads[0] if heads else None, group)
        shapes = [self._shapes[f"{name}.weight"] for name in names]
        counts = heads if heads and split is Split.OUTPUTS else [None] * len(names)
        rows = [
            range(shape[0]) if split is Split.NONE else share(shape[0], group, count)
            for shape, count in zip(shapes, counts, strict=True)
        ]
        lacking = sum(shape[0] - len(own) for shape, own in zip(shapes, rows, strict=True))
        self._elsewhere[product_name(names)] = lacking * shapes[0][1] * self.dtype.itemsize
        product = self._product(names, rows, bias)
        if split in (Split.NONE, Split.OUTPUTS):
            return Linear(product)
        (outputs, width), inputs = shapes[0], None
        if split is Split.INPUTS:
            inputs = Gather(group, width, heads[0] if heads else None)
        return Linear(product, inputs, Gather(group, outputs))

    def _adds(self, name: str) -> bool:
        """Whether a product may be row-parallel: then its bits depend on the number of ranks."""
        return not self.kernels.deterministic and self.quantization is None and not EXPERT.fullmatch(f"{name}.weight")

    def _added(self, name: str, bias: bool, heads: int | None, group: Group) -> Linear:
        """A row-parallel product, with this rank's columns of the weight; one rank adds the bias."""
        outputs, inputs = self._shapes[f"{name}.weight"]
        own = share(inputs, group, heads)
        self._elsewhere[name] = outputs * (inputs - len(own)) * self.dtype.itemsize
        added = self.tensor(f"{name}.bias") if bias else None
        columns = self.as_stored(f"{name}.weight")[:, own.start : own.stop].contiguous()
        columns = columns.to(self.kernels.device).to(self.dtype)
        return Linear(self.kernels.pack([columns], added if group.rank == 0 else None), reduces=group)

    def _product(self, names: Sequence[str], rows: Sequence[range], bias: bool) -> Product:
        """A product with these outputs of each weight, concatenated."""
        parts = list(zip(names, rows, strict=True))
        biases = [_of(self.tensor(f"{name}.bias"), own) for name, own in parts] if bias else None
        joined_bias = None if biases is None else _joined(biases)
        whole = sum(self._shapes[f"{name}.weight"][0] for name in names)
        shared = (whole,) if sum(map(len, rows)) < whole else ()
        codes = self._codes(parts)
        self._check_experts(names[0], type(codes[0]) if codes else None)
        if codes:
            return self._coded(product_name(names), codes, joined_bias, *shared)
        own_parts = [self._rows(f"{name}.weight", own) for name, own in parts]
        return self.kernels.pack(own_parts, joined_bias, *shared)

    def _check_experts(self, name: str, form: type | None) -> None:
        """Experts of a layer are computed together, so all have codes of one kind (`form`), or none has."""
        found = NUMBERED.fullmatch(name)
        if found is not None and self._forms.setdefault(found[1] + found[2], form) != form:
            raise CheckpointError(
                f"{self._checkpoint.folder}: {name!r} is stored in another format than the experts before it, but "
                "those of a layer must be alike; quantization='int8' makes them so"
            )

    def _codes(self, parts: Sequence[tuple[str, range]]) -> list[StoredWeight]:
        """Weights that are used as they are stored; empty if one of them cannot be, or is of another kind."""
        codes = [self._as_kernels_take_it(self._checkpoint.coded(f"{name}.weight", own)) for name, own in parts]
        kept = [
            code for code in codes if type(code) is type(codes[0]) and code is not None and self.kernels.keeps(code)
        ]
        if len(kept) < len(parts):
            return []
        self._count(*(f"{name}.weight" for name, _ in parts))
        return kept

    def _as_kernels_take_it(self, code: StoredWeight | None) -> StoredWeight | None:
        return code.decoded() if isinstance(code, BlockWeight) and not self.kernels.takes_blocks else code

    def _coded(
        self, name: str, codes: Sequence[StoredWeight], bias: torch.Tensor | None, outputs: int | None = None
    ) -> Product:
        """A product with weights that are used as they are stored, concatenated."""
        numbers = sum(part.out_features * part.in_features for part in codes)
        self._saved[name] = numbers * self.dtype.itemsize - sum(part.nbytes for part in codes)
        in_mxfp4 = [part for part in codes if isinstance(part, Mxfp4Weight)]
        in_fp8 = [part for part in codes if isinstance(part, Fp8Weight)]
        coded = [part for part in codes if isinstance(part, CodedWeight)]
        blocks = [part for part in codes if isinstance(part, BlockWeight)]
        self.multiplies_bytes |= bool(coded) or any(part.form.name != "MXFP4" for part in blocks)
        try:
            if in_mxfp4:
                return self.kernels.pack_mxfp4(in_mxfp4, bias)
            if coded:
                return self.kernels.pack_coded(coded, bias, outputs)
            if blocks:
                return self.kernels.pack_blocks(blocks, bias)
            return self.kernels.pack_fp8(in_fp8, self.dtype, bias, outputs)
        except CheckpointError as error:
            raise CheckpointError(f"{self._checkpoint.folder}: {name}.weight as it is stored: {error}") from error

    def elsewhere(self, prefix: str) -> None:
        """See `LayerWeights.elsewhere`."""
        sizes = {name: math.prod(shape) for name, shape in self._shapes.items() if name.startswith(prefix)}
        self._elsewhere |= {name: size * self.dtype.itemsize for name, size in sizes.items()}
        self._count(*(name for name in self._checkpoint.entries if name.startswith(prefix)))

    def complete(self) -> None:
        """The model is complete: the progress of what is read later, such as experts from other ranks, is not told."""
        self._progress = None

    def bytes_saved(self, experts: bool = False) -> int:
        """Bytes that this rank's products (with `experts`, only those of experts) take less than all products in the
        computation's data type: by formats with fewer bits, and as other ranks have shards of them.
        """
        found = [*self._elsewhere.items(), *self._saved.items()]
        return sum(size for name, size in found if not experts or EXPERT.fullmatch(name))

    def is_coded(self, *names: str) -> bool:
        """Whether the product of these weights has them as they are stored."""
        return product_name(names) in self._saved

    def norm(self, name: str, eps: float) -> RMSNorm:
        """Load a norm."""
        dtype, offset = None if self._norm_offset is None else torch.float32, self._norm_offset or 0.0
        weight = self.tensor(f"{name}.weight", dtype)
        return RMSNorm(weight + offset if offset else weight, eps, self.kernels)

    def embedding(self, name: str, scale: float = 1.0) -> Embedding:
        """Load an embedding table. On a CPU it remains a view of the file, quantized or not, and the system is asked to
        read that of the tokens ahead."""
        if self.kernels.device.type == "cpu":
            if f"{name}.weight" == EMBEDDING:  # other tables may be most of the file
                read_ahead(self._checkpoint.entries[EMBEDDING])
            if (table := self._checkpoint.table(f"{name}.weight")) is not None:
                self._count(f"{name}.weight")
                return Embedding(table, self.dtype, self.kernels, scale)
        return Embedding(self._on_device(f"{name}.weight"), self.dtype, self.kernels, scale)

    def under(self, prefix: str, group: Group | None = None) -> WeightsUnder:
        """The tensors whose names begin with `prefix`, by the rest of their names; `group`: see `linear`."""
        return WeightsUnder(self, prefix, group or self.group)


class WeightsUnder:
    """A layer's weights: see `Weights`, whose methods these are, for names that begin with `prefix`."""

    def __init__(self, weights: Weights, prefix: str, group: Group) -> None:
        self._weights, self._prefix = weights, prefix
        self.kernels, self.dtype = weights.kernels, weights.dtype
        self.group, self.expert_group = group, weights.expert_group
        self.expert_slots = weights.expert_slots if group in (weights.group, weights.expert_group) else 0

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._weights.tensor(self._prefix + name, dtype)

    def linear(
        self, *names: str, bias: bool = False, split: Split = Split.NONE, heads: Sequence[int] | None = None
    ) -> Linear:
        names = tuple(self._prefix + name for name in names)
        return self._weights.linear(*names, bias=bias, split=split, heads=heads, group=self.group)

    def elsewhere(self, prefix: str) -> None:
        self._weights.elsewhere(self._prefix + prefix)

    def norm(self, name: str, eps: float) -> RMSNorm:
        return self._weights.norm(self._prefix + name, eps)


def product_name(names: Sequence[str]) -> str:
    """The name of the product of several concatenated weights: "a.q_proj+k_proj" for "a.q_proj" and "a.k_proj"."""
    return "+".join([names[0], *(name.rpartition(".")[2] for name in names[1:])])


def check_tensors(
    checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]], tied: bool, skipped: tuple[str, ...] = ()
) -> None:
    """Check that a checkpoint has the tensors of a model, and no others.

    Args:
        shapes: every tensor of the model, by name.
        tied: the head is the embedding table.
        skipped: prefixes of tensors that the model may ignore.

    Attributes:
        multiplies_bytes: a product so far has weights in codes, which meet activations of 8 bits.

    Raises:
        MissingTensorError, TensorShapeError, TensorDtypeError, UnexpectedTensorError: the checkpoint does not match its
            configuration; the message names the tensors.
    """
    _check_missing(checkpoint, shapes)
    _check_shapes(checkpoint, shapes)
    passed_over = [name for name in checkpoint.entries if name.startswith(skipped)]
    _check_left_over(checkpoint, {*shapes, *passed_over}, tied)


def _of(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    """Some rows, as a view."""
    return tensor[rows.start : rows.stop]


def _joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(repr(name) for name in names[:NAMES_SHOWN]) + more


def _check_missing(checkpoint: Checkpoint, shapes: Mapping[str, tuple[int, ...]]) -> None:
    missing = [name for name in shapes if name not in checkpoint.entries]
    if missing:
        hint = " If the head is the embedding table, say tie_word_embeddings: true." if missing == [HEAD] else ""
        if any(re.search(r"\.codes(_of_\d_bits)?$", name) for name in checkpoint.entries):
            hint = " Its tensors are quantized: copy quire_quantization.json, which belongs to them, too."
        if all(EXPERT.fullmatch(name) for name in missing):
            hint += f" Are there as many experts as {EXPERT_FIELDS} says?"
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


def _check_left_over(checkpoint: Checkpoint, known: Collection[str], tied: bool) -> None:
    left_over = sorted(name for name in checkpoint.entries if name not in known and not ROTARY_BUFFER.fullmatch(name))
    left_over = [name for name in left_over if not _is_bias_of_0(checkpoint, name)]
    if tied and HEAD in left_over:
        if not _same(checkpoint, HEAD, EMBEDDING):
            raise UnexpectedTensorError(
                f"{checkpoint.folder}: config.json says tie_word_embeddings: true, but {HEAD!r} is there and "
                f"differs from {EMBEDDING!r}. Say false in config.json to use it, or remove it."
            )
        left_over.remove(HEAD)
    if left_over:
        raise _no_place(checkpoint, left_over)


def _is_bias_of_0(checkpoint: Checkpoint, name: str) -> bool:
    """A bias that changes nothing: AutoGPTQ writes one for every weight."""
    is_bias = name.endswith(".bias") and checkpoint.entries[name].dtype in FLOAT_DTYPES
    return is_bias and not bool(checkpoint.tensor(name).any())


def _no_place(checkpoint: Checkpoint, names: list[str]) -> UnexpectedTensorError:
    return UnexpectedTensorError(
        f"{checkpoint.folder}: the model has no place for {len(names)} tensors: {_listed(names)}. "
        "Is config.json that of these weights?"
    )


def _same(checkpoint: Checkpoint, first: str, second: str) -> bool:
    a, b = checkpoint.entries[first], checkpoint.entries[second]
    return (a.shape, a.dtype) == (b.shape, b.dtype) and torch.equal(checkpoint.tensor(first), checkpoint.tensor(second))
