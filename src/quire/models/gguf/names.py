"""Where each tensor of a checkpoint is in a GGUF file: llama.cpp's names, and the model's.

What llama.cpp's converter has done to a tensor besides is undone when it is read: it stacks a layer's experts, puts
rows in another order, joins tensors, and adds 1 to some norms' weights (https://github.com/ggml-org/llama.cpp, the
folder `conversion`). Rows of a quantized tensor may be taken in any order without loss.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np

from quire.errors import TensorShapeError, UnexpectedTensorError
from quire.models.gguf.file import GgufTensor
from quire.models.gguf.metadata import Said

Indices = np.ndarray[Any, np.dtype[np.int64]]
Order = Callable[[int], Indices]
"""Given the number of rows, the row of the file for each row of the model's tensor."""
Described = tuple[dict[str, Any], "Naming"]
"""Of a family: the fields of config.json, and its tensors' names."""
Family = Callable[[Said], Described]
Change = Literal["less_one", "log", "flat", "taps", "row", "keys_and_values"]
"""What becomes of the numbers: 1 is subtracted; of -x the logarithm; all in one dimension; channels of a convolution
[channels, 1, taps]; one row; or the two halves of latent attention's `kv_b_proj` are joined."""

BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
}
"""A layer's tensors, without or with ".weight" or ".bias"; "{}" is an expert's number."""
EXTRAS = re.compile(r"rope_(freqs|factors_\w+)\.weight|.*\.rope_(freqs|factors_\w+)\.weight|.*\.input_scale")
"""Read with the metadata, or, the scales of activations, not used."""


@dataclass(frozen=True, slots=True)
class Naming:
    """What a family's tensors are called, and what is to be undone.

    Attributes:
        layer: as `LAYER`, what is otherwise.
        outer: as `OUTER`.
        splits: of a joined tensor, by its name: its parts' names (again llama.cpp's) and their numbers of rows.
        orders: of rows, by name.
        columns: of columns, by name; these are restored, since a quantized block is a run of columns.
        changes: by name.
        joins: by the first of several tensors, the others that it is joined with.
        left_out: names that begin like this are of no use to the model, with the reason.
    """

    layer: Mapping[str, str] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    splits: Mapping[str, tuple[tuple[str, int], ...]] = field(default_factory=dict)
    orders: Mapping[str, Order] = field(default_factory=dict)
    columns: Mapping[str, Order] = field(default_factory=dict)
    changes: Mapping[str, Change] = field(default_factory=dict)
    joins: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Source:
    """Where a tensor's numbers are, and what becomes of them.

    Attributes:
        tensors: one, unless `change` joins several.
        shape: of the model's tensor.
        expert: index of the outermost dimension; None for all of it.
        rows, columns: of these, in this order; None for all.
        scale: a tensor with a number, or one for each expert, by which all numbers are multiplied.
    """

    tensors: tuple[GgufTensor, ...]
    shape: tuple[int, ...]
    expert: int | None = None
    rows: Indices | None = None
    columns: Indices | None = None
    change: Change | None = None
    scale: GgufTensor | None = None

    @property
    def num_bytes(self) -> int:
        """Of the file, about."""
        count = self.tensors[0].shape[0] if self.expert is not None else 1
        whole = sum(tensor.num_bytes for tensor in self.tensors) // count
        if self.rows is None:
            return whole
        return whole * len(self.rows) // max(self.tensors[0].shape[0 if self.expert is None else 1], 1)


def turned(heads: int) -> Order:
    """The order of queries' or keys' rows in Llama: pairs that are rotated lie side by side in the file."""

    def order(rows: int) -> Indices:
        return np.arange(rows).reshape(heads, -1, 2).swapaxes(1, 2).ravel()

    return order


def untiled(groups: int, each: int, before: int = 0) -> Order:
    """The order of heads' rows after the first `before`, of which the file has the first head of every group, then all
    second ones, and so on; the model has one group after the other."""

    def order(rows: int) -> Indices:
        heads = np.arange(before, rows).reshape(each, groups, -1)
        return np.concatenate([np.arange(before), heads.swapaxes(0, 1).ravel()])

    return order


def less_one(*norms: str) -> dict[str, Change]:
    """The changes of norms with 1 added."""
    return dict.fromkeys((f"{name}.weight" for name in norms), "less_one")


@dataclass(frozen=True, slots=True)
class Attention:
    """Numbers of query heads and of key heads, and a head's width."""

    heads: int
    kv_heads: int
    width: int

    @classmethod
    def of(cls, fields: dict[str, Any]) -> Attention:
        return cls(fields["num_attention_heads"], fields["num_key_value_heads"], fields["head_dim"])

    @property
    def joined(self) -> dict[str, tuple[tuple[str, int], ...]]:
        """The parts of a tensor of queries, keys and values."""
        keys = self.kv_heads * self.width
        return {"attn_qkv": (("attn_q", self.heads * self.width), ("attn_k", keys), ("attn_v", keys))}


def joined_experts(said: Said, inner: int) -> dict[str, tuple[tuple[str, int], ...]]:
    """The parts of a tensor of all experts' gates and inputs."""
    return {"ffn_gate_up_exps": (("ffn_gate_exps", inner), ("ffn_up_exps", inner))}


def layer_types(windowed: list[int]) -> list[str]:
    """The field of that name, given which layers have a window."""
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def find_sources(said: Said, naming: Naming) -> tuple[dict[str, Source], list[GgufTensor]]:
    """By the model's names, where its tensors are; and the tensors of layers that predict further tokens, if the family
    has no names for them.

    Raises:
        UnexpectedTensorError: a tensor has a name that the family does not have, or two are the same of the model's.
        TensorShapeError: a tensor does not have the rows of its parts or heads, or not two or three dimensions.
    """
    found: dict[str, Source] = {}
    further: list[GgufTensor] = []
    unknown: list[str] = []
    for tensor in said.tensors.values():
        if EXTRAS.fullmatch(tensor.name) or _is_part(said, naming, tensor.name):
            continue
        named = list(_named(said, naming, tensor))
        if not named and _layer_of(tensor.name) >= said.layers:
            further.append(tensor)
        elif not named:
            unknown.append(tensor.name)
        for name, source in named:
            if name in found:
                first = found[name].tensors[0].name
                raise UnexpectedTensorError(f"{tensor.file}: {tensor.name!r} and {first!r} are both the model's {name}")
            found[name] = source
    if unknown:
        shown = ", ".join(map(repr, unknown[:5])) + (" ..." if len(unknown) > 5 else "")
        file = said.tensors[unknown[0]].file
        raise UnexpectedTensorError(
            f"{file}: {len(unknown)} tensors have names that a model of architecture {said.architecture} does not "
            f"have: {shown}. Was the file made for something else?"
        )
    return found, further


def _layer_of(name: str) -> int:
    found = BLOCK.fullmatch(name)
    return int(found[1]) if found else -1


def _is_part(said: Said, naming: Naming, name: str) -> bool:
    """Whether a tensor belongs to another one: what it is joined with, or multiplied by."""
    found = BLOCK.fullmatch(name)
    own, prefix = (found[2], f"blk.{found[1]}.") if found else (name, "")
    if any(own in others for others in naming.joins.values()):
        return True
    stem, _, kind = own.rpartition(".")
    return kind == "scale" and own not in naming.layer and f"{prefix}{stem}.weight" in said.tensors


def _named(said: Said, naming: Naming, tensor: GgufTensor) -> Iterator[tuple[str, Source]]:
    """A tensor's places in the model; none if it has no name there."""
    if (name := {**OUTER, **naming.outer}.get(tensor.name)) is not None:
        yield from _placed(said, naming, tensor, "", tensor.name, name, None)
        return
    found = BLOCK.fullmatch(tensor.name)
    if found is None:
        return
    layer, (stem, dot, kind) = f"model.layers.{found[1]}.", found[2].rpartition(".")
    parts = naming.splits.get(stem)
    if parts is None:
        if (name := _name(naming, found[2])) is not None:
            yield from _placed(said, naming, tensor, layer, found[2], name, None)
        return
    _check_rows(tensor, sum(rows for _, rows in parts))
    start = 0
    for part, rows in parts:
        name = _name(naming, f"{part}{dot}{kind}")
        if name is None:
            raise UnexpectedTensorError(f"{tensor.file}: {tensor.name!r} is not known in {said.architecture}")
        yield from _placed(said, naming, tensor, layer, f"{part}{dot}{kind}", name, np.arange(start, start + rows))
        start += rows


def _name(naming: Naming, own: str) -> str | None:
    names = {**LAYER, **naming.layer}
    if own in names:
        return names[own]
    stem, _, kind = own.rpartition(".")
    return f"{names[stem]}.{kind}" if stem in names and kind in ("weight", "bias") else None


def _placed(
    said: Said, naming: Naming, tensor: GgufTensor, layer: str, own: str, name: str, rows: Indices | None
) -> Iterator[tuple[str, Source]]:
    """A tensor, or some rows of it, as one of the model's, or as one of each expert."""
    stem = own.rpartition(".")[0] or own
    prefix = tensor.name.removesuffix(own) if rows is None else tensor.name[: tensor.name.index(".", 4) + 1]
    whole = ".experts.{}." not in f".{name}"
    shape = tensor.shape if whole else tensor.shape[1:]
    if not shape:
        raise TensorShapeError(f"{tensor.file}: {tensor.name!r} is {list(tensor.shape)}, and must be of all experts")
    if (order := naming.orders.get(stem)) is not None:
        rows = _ordered(tensor, order, rows, shape[0])
    shape = shape if rows is None else (len(rows), *shape[1:])
    columns = naming.columns.get(stem)
    source = Source(
        (tensor, *(said.tensors[prefix + other] for other in naming.joins.get(own, ()))),
        shape,
        rows=rows,
        columns=None if columns is None else _ordered(tensor, columns, None, shape[-1]),
        change=naming.changes.get(own),
        scale=said.tensors.get(f"{prefix}{stem}.scale") if own.endswith(".weight") else None,
    )
    if f"{stem}.scale" in naming.layer:
        source = replace(source, scale=None)
    source = replace(source, shape=_changed(source))
    if whole:
        yield layer + name, source
        return
    for expert in range(tensor.shape[0]):
        yield layer + name.format(expert), replace(source, expert=expert)


def _ordered(tensor: GgufTensor, order: Order, rows: Indices | None, count: int) -> Indices:
    try:
        found = order(count if rows is None else len(rows))
    except ValueError as error:
        raise TensorShapeError(
            f"{tensor.file}: {tensor.name!r} is {list(tensor.shape)}, which its heads do not divide"
        ) from error
    return found if rows is None else rows[found]


def _check_rows(tensor: GgufTensor, rows: int) -> None:
    """Check the rows of a joined tensor; of experts, of each."""
    if tensor.shape[0 if len(tensor.shape) < 3 else 1] != rows:
        raise TensorShapeError(
            f"{tensor.file}: {tensor.name!r} is {list(tensor.shape)}; its parts have {rows} rows together"
        )


def _changed(source: Source) -> tuple[int, ...]:
    """The shape after the change."""
    shape, change = source.shape, source.change
    if change in ("log", "flat"):
        return (int(np.prod(shape)),)
    if change == "taps" and len(shape) == 2:
        return (shape[0], 1, shape[1])
    if change == "row":
        return (1, int(np.prod(shape)))
    if change == "keys_and_values":
        keys, values = (tensor.shape for tensor in source.tensors)
        if len(keys) != 3 or len(values) != 3 or (keys[0], keys[1]) != (values[0], values[2]):
            raise TensorShapeError(
                f"{source.tensors[0].file}: {source.tensors[0].name!r} is {list(keys)}, and "
                f"{source.tensors[1].name!r} {list(values)}; they must be [heads, latent, keys] and [heads, values, "
                "latent]"
            )
        return (keys[0] * (keys[2] + values[1]), keys[1])
    return shape
