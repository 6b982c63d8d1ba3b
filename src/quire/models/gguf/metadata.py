"""What a GGUF file's metadata say of a model, as the fields of a config.json that all families have in common.

Keys are those of llama.cpp (https://github.com/ggml-org/llama.cpp, `gguf-py/gguf/constants.py`), fields those of
`transformers`. Bounds of numbers are checked where config.json is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from quire.errors import CheckpointError, ModelConfigError
from quire.models.gguf.file import GgufHeader, GgufTensor

MAX_LAYERS = 1024
FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies."""
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Of Llama 3.1 to 3.3, whose files have only the divisors that follow from it."""
NEAR = 1e-5
WITHOUT_EFFECT = {
    "vocab_size",
    "tensor_data_layout",
    "rope.dimension_sections",
    "rope.scaling.finetuned",
    "expert_group_count",
    "expert_group_used_count",
}
"""Keys that say nothing about the computation that is not said elsewhere, too, in families that do not read them."""


class Said:
    """The metadata and tensors of a model, in one file or several.

    Attributes:
        source: the (first) file.
        architecture: llama.cpp's name, with which the keys of its sizes begin.
        tensors: by name.
        layers: number of decoder layers, without those that predict further tokens (`further`).

    Raises:
        ModelConfigError: a key is missing, or has a value of the wrong type.
    """

    def __init__(self, header: GgufHeader) -> None:
        self.source, self._values, self._read = header.file, header.metadata, {"general.architecture"}
        self.tensors: Mapping[str, GgufTensor] = header.tensors
        self.architecture = str(self._values.get("general.architecture"))
        self.further = self.integer("nextn_predict_layers", 0)
        self.layers = self.integer("block_count") - self.further
        if not 0 < self.layers <= MAX_LAYERS:
            raise self.error("block_count", f"from 1 to {MAX_LAYERS}, besides nextn_predict_layers")

    def error(self, key: str, allowed: str) -> ModelConfigError:
        found = repr(self._values.get(f"{self.architecture}.{key}", "nothing"))[:200]
        return ModelConfigError(f"{self.source}: {self.architecture}.{key} must be {allowed}, found {found}")

    def refusal(self, what: str) -> ModelConfigError:
        return ModelConfigError(f"{self.source}: {what}")

    def value(self, key: str, default: Any = None) -> Any:
        """Any value, unchecked."""
        name = f"{self.architecture}.{key}"
        self._read.add(name)
        found = self._values.get(name)
        return default if found is None else found

    def ignore(self, *keys: str) -> None:
        """Keys that say nothing about this model."""
        self._read |= {f"{self.architecture}.{key}" for key in keys}

    def integer(self, key: str, default: int | None = None) -> int:
        found = self.value(key, default)
        if type(found) is not int or found < 0:
            raise self.error(key, "a whole number")
        return found

    def number(self, key: str, default: float | None = None) -> float:
        found = self.value(key, default)
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise self.error(key, "a number")
        return float(found)

    def flag(self, key: str, default: bool) -> bool:
        found = self.value(key, default)
        if type(found) is not bool:
            raise self.error(key, "true or false")
        return found

    def of_layers(self, key: str, default: int | None = None) -> list[int]:
        """A whole number, or truth value, of each layer; there may be one for all of them."""
        found = self.value(key, default)
        if type(found) is int:
            return [found] * self.layers
        if not isinstance(found, list) or len(found) < self.layers or not all(isinstance(each, int) for each in found):
            raise self.error(key, f"a whole number, or one for each of the {self.layers} layers")
        return [int(each) for each in found[: self.layers]]

    def same(self, key: str, default: int | None = None, *, zero: bool = False) -> int:
        """What all layers have in common, besides those that have 0, if `zero`."""
        found = {each for each in self.of_layers(key, default) if each or not zero}
        if len(found) > 1:
            raise self.error(key, "the same in all layers" + (" that have any" if zero else ""))
        return found.pop() if found else 0

    def has(self, part: str) -> bool:
        """Whether a layer has a tensor of this name, such as "attn_q.bias"."""
        return any(f"blk.{layer}.{part}" in self.tensors for layer in range(self.layers))

    def kinds(self, of: Mapping[str, str], otherwise: str) -> list[str]:
        """Of each layer, its kind: that of the first of these tensors that it has."""
        return [
            next((kind for part, kind in of.items() if f"blk.{layer}.{part}" in self.tensors), otherwise)
            for layer in range(self.layers)
        ]

    def rows(self, part: str) -> int:
        """Rows of the first layer's tensor of this name that has one; 0 if none has."""
        found = (self.tensors.get(f"blk.{layer}.{part}") for layer in range(self.layers))
        return next((tensor.shape[0] for tensor in found if tensor is not None), 0)

    def numbers(self, name: str) -> list[float] | None:
        """A short tensor's numbers, in fp32; None if there is no such tensor."""
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        if tensor.type.name != "F32" or tensor.num_bytes > 1 << 16:
            raise ModelConfigError(f"{tensor.file}: {name!r} must be a short list of F32")
        try:
            with tensor.file.open("rb") as stream:
                stream.seek(tensor.start)
                found = np.frombuffer(stream.read(tensor.num_bytes), "<f4")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{tensor.file} cannot be read: {error}") from error
        if len(found) != math.prod(tensor.shape):
            raise CheckpointError(f"{tensor.file} has become shorter while it was read")
        return [float(text) for text in found.astype(str)]

    def unread(self) -> list[str]:
        """Keys of the architecture that nothing has asked for, besides those that need not be."""
        prefix = f"{self.architecture}."
        own = {key for key in self._values if key.startswith(prefix)} - self._read
        return sorted(own - {prefix + key for key in WITHOUT_EFFECT})


def common(
    said: Said, architecture: str, model_type: str, width: int | None = None, *, scaled: bool = True
) -> dict[str, Any]:
    """The fields of any decoder.

    Args:
        architecture, model_type: their names in config.json.
        width: of a head; None: as the metadata say.
        scaled: whether the scaling of positions is read.
    """
    heads = said.same("attention.head_count", zero=True)
    table = said.tensors.get("token_embd.weight")
    if not heads or table is None or len(table.shape) != 2:
        raise said.error("attention.head_count", "at least 1, and token_embd.weight a matrix")
    vocabulary, hidden = table.shape
    fields = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": vocabulary,
        "hidden_size": said.integer("embedding_length", hidden),
        "intermediate_size": max(said.of_layers("feed_forward_length", 0)),
        "num_hidden_layers": said.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(said.of_layers("attention.head_count_kv", heads)),
        "head_dim": width or head_dim(said, hidden // heads),
        "rms_norm_eps": said.number("attention.layer_norm_rms_epsilon", 1e-5),
        "max_position_embeddings": said.integer("context_length"),
        "rope_theta": said.number("rope.freq_base", 10000.0),
        "tie_word_embeddings": "output.weight" not in said.tensors,
        "dtype": _dtype(list(said.tensors.values())),
    }
    if not said.flag("attention.causal", True):
        fields["is_causal"] = False
    scaling = rope_scaling(said) if scaled else None
    return fields | ({"rope_scaling": scaling} if scaling else {})


def head_dim(said: Said, default: int) -> int:
    """Width of a head's queries, keys and values, which must be the same."""
    width = said.integer("attention.key_length", default)
    if said.integer("attention.value_length", width) != width:
        raise said.error("attention.value_length", f"that of keys, {width}")
    return width


def whole_heads(said: Said, width: int) -> None:
    """Check that all of each head is rotated, in a family where that is so."""
    if said.integer("rope.dimension_count", width) != width:
        raise said.error("rope.dimension_count", f"the width of a head, {width}")


def _dtype(tensors: Sequence[GgufTensor]) -> str:
    """The type in which to compute: that of most bytes, or bfloat16 if they are quantized."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        sizes[tensor.type.name] = sizes.get(tensor.type.name, 0) + tensor.num_bytes
    largest = max(sizes, key=lambda name: sizes[name], default="BF16")
    return {"F32": "float32", "F16": "float16"}.get(largest, "bfloat16")


def rope_scaling(said: Said) -> dict[str, Any] | None:
    """The section `rope_scaling` of config.json; None if positions are not scaled."""
    kind, factor = said.value("rope.scaling.type", "none"), said.value("rope.scaling.factor")
    older = said.value("rope.scale_linear")
    original = said.value("rope.scaling.original_context_length")
    if kind == "none" and older not in (None, 1.0):
        kind, factor = "linear", older
    if kind == "linear":
        return None if factor in (None, 1.0) else {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn(said, factor, original)
    if kind not in ("none", "longrope"):
        raise said.error("rope.scaling.type", "none, linear, yarn or longrope")
    divisors = said.numbers(FACTORS)
    return None if divisors is None or all(each == 1.0 for each in divisors) else _by_divisors(said, divisors)


def _yarn(said: Said, factor: Any, original: Any) -> dict[str, Any]:
    if said.value("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):
        raise said.error("rope.scaling.yarn_ext_factor", "1")
    optional = {
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
    found = {field: said.value(f"rope.scaling.{key}") for field, key in optional.items()}
    found = {"factor": factor, "original_max_position_embeddings": original} | found
    return {"rope_type": "yarn"} | {field: value for field, value in found.items() if value is not None}


def _by_divisors(said: Said, divisors: list[float]) -> dict[str, Any]:
    """Llama 3's scaling, whose frequencies are divided by these; or else longrope, which has any divisors."""
    width = 2 * len(divisors)
    llama3 = {"rope_type": "llama3", "factor": max(divisors)} | LLAMA3
    expected = divisors_of(llama3, width, said.number("rope.freq_base", 10000.0))
    if np.allclose(divisors, expected, rtol=NEAR, atol=0.0):
        return llama3
    return {
        "rope_type": "longrope",
        "attention_factor": 1.0,
        "short_factor": divisors,
        "long_factor": divisors,
    }


def divisors_of(llama3: Mapping[str, Any], width: int, base: float) -> np.ndarray[Any, Any]:
    """Those that Llama 3's scaling has (https://arxiv.org/abs/2407.21783): none of short waves, all of long ones."""
    waves = 2 * math.pi * base ** (np.arange(0, width, 2) / width)
    low, high = llama3["low_freq_factor"], llama3["high_freq_factor"]
    turns = llama3["original_max_position_embeddings"] / waves
    smooth = np.clip((turns - low) / (high - low), 0.0, 1.0)
    found: np.ndarray[Any, Any] = 1 / ((1 - smooth) / llama3["factor"] + smooth)
    return found
