"""What a checkpoint's model is in a GGUF file: metadata, and names and numbers of tensors; `families` in reverse.

The names are found with the same tables, since a family is described by metadata alone (`names.Naming`). Metadata are
written for what the families here have; whether they say all of a model is not known here but checked: the file is read
again, and must give the same model (`export`). So a model with what a file cannot say is refused, not changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quire.errors import ConfigError
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.gguf.families import describe
from quire.models.gguf.file import TYPES, GgufHeader, GgufTensor
from quire.models.gguf.metadata import Said, divisors_of
from quire.models.gguf.names import LAYER, OUTER, Naming

ARCHITECTURES = {
    "Exaone4ForCausalLM": "exaone4",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GraniteForCausalLM": "granite",
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "llama",
    "MixtralForCausalLM": "llama",
    "Olmo2ForCausalLM": "olmo2",
    "Olmo3ForCausalLM": "olmo2",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3moe",
    "SeedOssForCausalLM": "seed_oss",
    "SmolLM3ForCausalLM": "smollm3",
}
"""By name in config.json, llama.cpp's of the architecture."""
MULTIPLIERS = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}
"""Granite's, by key."""
IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OF_EXPERT = re.compile(r"(.*\.experts\.)\d+(\..*)")
F32 = next(form for form in TYPES.values() if form.name == "F32")


@dataclass(frozen=True, slots=True)
class Outward:
    """A tensor of the file.

    Attributes:
        name: in the file, such as "blk.0.ffn_down.weight".
        parts: the model's tensors that it holds: one, or that of each expert, in order.
        shape: the outermost dimension first.
        stem: the name without the layer and ".weight" or ".bias".
    """

    name: str
    parts: tuple[str, ...]
    shape: tuple[int, ...]
    stem: str


def metadata_of(fields: Fields, config: DecoderConfig) -> dict[str, Any]:
    """The metadata of a model, without its tokenizer's.

    Raises:
        ConfigError: its family is not written.
    """
    names = fields.strings("architectures") or []
    known = next((name for name in names if name in ARCHITECTURES), None)
    if known is None:
        raise ConfigError(
            f"{fields.source}: the architecture {', '.join(names)} is not written as GGUF; known are "
            f"{', '.join(ARCHITECTURES)}. --to int4 and --to compressed-tensors take it."
        )
    prefix, layer = ARCHITECTURES[known], config.layer
    fields = fields.section("text_config") if "text_config" in fields else fields
    said: dict[str, Any] = {
        "block_count": config.num_layers,
        # That before linear and yarn scaling, which lengthen it.
        "context_length": fields.integer("max_position_embeddings", default=config.max_position_embeddings),
        "embedding_length": layer.hidden_size,
        "feed_forward_length": layer.intermediate_size,
        "attention.head_count": layer.num_heads,
        "attention.head_count_kv": layer.num_kv_heads,
        "attention.key_length": layer.head_dim,
        "attention.value_length": layer.head_dim,
        "attention.layer_norm_rms_epsilon": fields.number("rms_norm_eps", default=layer.rms_norm_eps),
        "rope.freq_base": config.rope.theta,
        "rope.dimension_count": config.rope.head_dim,
        "vocab_size": config.vocab_size,
    }
    said |= _scaling(config) | _experts(prefix, config) | _windows(prefix, config)
    if prefix == "granite":
        said |= {key: fields.number(field, default=1.0) for key, field in MULTIPLIERS.items()}
    return {"general.architecture": prefix, **{f"{prefix}.{key}": value for key, value in said.items()}}


def _scaling(config: DecoderConfig) -> dict[str, Any]:
    rope = config.rope
    if rope.kind not in ("linear", "yarn"):
        return {}
    said: dict[str, Any] = {"rope.scaling.type": rope.kind, "rope.scaling.factor": rope.factor}
    if rope.kind == "yarn":
        said |= {
            "rope.scaling.original_context_length": rope.original_max_position_embeddings,
            "rope.scaling.yarn_beta_fast": rope.beta_fast,
            "rope.scaling.yarn_beta_slow": rope.beta_slow,
        }
        if rope.attention_factor is not None:
            said["rope.scaling.yarn_attn_factor"] = rope.attention_factor
    return said


def _experts(prefix: str, config: DecoderConfig) -> dict[str, Any]:
    experts = config.layer.experts
    if experts is None:
        return {}
    said = {"expert_count": experts.routing.num_experts, "expert_used_count": experts.routing.top_k}
    inner = {} if prefix == "llama" else {"expert_feed_forward_length": experts.intermediate_size}
    return said | inner


def _windows(prefix: str, config: DecoderConfig) -> dict[str, Any]:
    """Which layers have a window; Gemma 3's are every sixth in llama.cpp, whatever a file says."""
    windows = {window for window in config.windows if window is not None}
    if len(windows) != 1:
        return {}
    said: dict[str, Any] = {"attention.sliding_window": windows.pop()}
    if prefix != "gemma3":
        said["attention.sliding_window_pattern"] = [window is not None for window in config.windows]
    bases = {rope.theta for rope, window in zip(config.ropes or (), config.windows, strict=False) if window}
    if len(bases) == 1:
        said["rope.freq_base_swa"] = bases.pop()
    return said


def divisors(config: DecoderConfig) -> torch.Tensor | None:
    """The numbers of the tensor `metadata.FACTORS`, by which rotary frequencies are divided; None if there is none."""
    rope = config.rope
    if rope.kind != "llama3":
        return None
    said = {
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
    return torch.from_numpy(divisors_of(said, rope.head_dim, rope.theta)).float()


def naming_of(metadata: Mapping[str, Any], table: Sequence[int]) -> Naming:
    """What a model's tensors are called, given its metadata and its table's shape."""
    stand_in = GgufTensor("token_embd.weight", F32, tuple(table), Path("the new file"), 0, 0)
    return describe(Said(GgufHeader(stand_in.file, metadata, {stand_in.name: stand_in})))[1]


def outward(naming: Naming, shapes: Mapping[str, tuple[int, ...]]) -> list[Outward]:
    """The tensors of a file, in order, that hold a model's.

    Args:
        shapes: of the model's tensors, by name.

    Raises:
        ConfigError: some have no name in GGUF, or change in a way that is not undone.
    """
    outer = {model: own for own, model in {**OUTER, **naming.outer}.items()}
    inner = {model: own for own, model in LAYER.items()} | {model: own for own, model in naming.layer.items()}
    found: dict[str, Outward] = {}
    for name, shape in shapes.items():
        in_layer = IN_LAYER.fullmatch(name)
        if in_layer is None:
            own, prefix = outer.get(name), ""
        else:
            own, prefix = _own(inner, in_layer[2]), f"blk.{in_layer[1]}."
        if own is None:
            raise ConfigError(f"the model's tensor {name!r} has no name in GGUF files of this family")
        stem = own.rpartition(".")[0]
        if stem in naming.columns or own in naming.joins or naming.changes.get(own, "less_one") != "less_one":
            raise ConfigError(f"the model's tensor {name!r} is stored otherwise in GGUF, which is not written")
        before = found.get(prefix + own)
        parts = (*before.parts, name) if before else (name,)
        whole = (len(parts), *shape) if OF_EXPERT.fullmatch(name) else shape
        found[prefix + own] = Outward(prefix + own, parts, whole, stem)
    return list(found.values())


def _own(inner: Mapping[str, str], name: str) -> str | None:
    """llama.cpp's name of a layer's tensor, without the layer."""
    if name in inner:
        return inner[name]
    stem, _, kind = name.rpartition(".")
    expert = OF_EXPERT.fullmatch(stem)
    stem = f"{expert[1]}{{}}{expert[2]}" if expert else stem
    return f"{inner[stem]}.{kind}" if stem in inner else None


def numbers_of(tensor: Outward, naming: Naming, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """A tensor's numbers in fp32 as they are in the file; `read` gives the model's."""
    parts = [read(part).float() for part in tensor.parts]
    if (order := naming.orders.get(tensor.stem)) is not None:
        rows = torch.from_numpy(order(len(parts[0]))).argsort()
        parts = [part[rows] for part in parts]
    whole = parts[0] if len(tensor.shape) == parts[0].dim() else torch.stack(parts)
    changed = f"{tensor.stem}.{tensor.name.rpartition('.')[2]}" in naming.changes
    return whole + 1.0 if changed else whole
