"""Writes a model as one GGUF file, quantized, which llama.cpp reads.

Types of tensors are those of llama.cpp's Q4_K_M (`llama-quant.cpp`): Q4_K, and Q6_K where 4 bits cost most, which are
the head, and values and down projections of half the layers; where a row is not whole blocks of 256, Q5_0 and Q8_0.
Norms, biases and routers stay fp32.

Before anything is quantized, the file's header is read again, and must describe the same computation: what metadata
cannot say is refused.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError, ConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.formats.choose import of_numbers
from quire.models.gguf.encode import encoded
from quire.models.gguf.families import describe
from quire.models.gguf.file import read_gguf
from quire.models.gguf.metadata import FACTORS, Said
from quire.models.gguf.names import Naming, find_sources
from quire.models.gguf.outward import Outward, divisors, metadata_of, naming_of, numbers_of, outward
from quire.models.gguf.tokenizer import ENDS, ending_files
from quire.models.gguf.tokenizer_metadata import tokenizer_metadata
from quire.models.gguf.write import GgufWriter, Planned
from quire.models.layout import LaidOutCheckpoint, Layout
from quire.models.met import Calibration
from quire.models.registry import read_config
from quire.version import __version__

Progress = Callable[[int, int], None]
FILE_TYPE, QUANTIZATION_VERSION = 15, 2
"""Of Q4_K_M, and of ggml's types as they are now."""
TABLES = ("token_embd", "output")
FALLBACK = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""Where blocks do not divide a row."""


def export(
    checkpoint: Checkpoint,
    file: Path,
    templates: Mapping[str, str],
    progress: Progress,
    calibration: Calibration | None = None,
) -> None:
    """Write a checkpoint as a GGUF file, which gets its name when it is complete.

    Args:
        file: must not exist.
        templates: chat templates by name; "default" is the main one.
        progress: called with (numbers done, all numbers).
        calibration: which activations its weights meet, if that is known.

    Raises:
        ConfigError: the family, or something of the model or its tokenizer, cannot be written.
        CheckpointError: a weight has numbers that are not finite.
        OSError: the file cannot be written.
    """
    numbers = of_numbers(checkpoint)
    config = read_config(numbers.config, numbers.generation)
    laid = LaidOutCheckpoint(numbers, config.layout or Layout())
    shapes = config.tensor_shapes()
    metadata = metadata_of(numbers.config, config)
    naming = naming_of(metadata, shapes["model.embed_tokens.weight"])
    metadata |= {
        "general.type": "model",
        "general.name": checkpoint.folder.name,
        "general.file_type": FILE_TYPE,
        "general.quantization_version": QUANTIZATION_VERSION,
        "general.quantized_by": f"Quire {__version__}",
        **_with_ends(tokenizer_metadata(checkpoint.folder, config.vocab_size, templates), config),
    }
    tensors = outward(naming, shapes)
    planned = [Planned(each.name, type_of(each, config), each.shape) for each in tensors]
    factors = divisors(config)
    extra = [] if factors is None else [Planned(FACTORS, "F32", tuple(factors.shape))]
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.partial")
    try:
        with GgufWriter(partial, metadata, [*extra, *planned]) as writer:
            if factors is not None:
                writer.write(FACTORS, factors)
            _check(partial, config)
            _write(writer, planned, tensors, naming, laid, progress, calibration or {})
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def _write(
    writer: GgufWriter,
    planned: list[Planned],
    tensors: list[Outward],
    naming: Naming,
    laid: Checkpoint,
    progress: Progress,
    calibration: Calibration,
) -> None:
    total, done = sum(plan.num_bytes for plan in planned), 0
    for plan, tensor in zip(planned, tensors, strict=True):
        whole = numbers_of(tensor, naming, laid.tensor)
        try:
            rows = torch.split(whole.view(-1, whole.shape[-1]), whole.shape[-2] if whole.dim() > 1 else 1)
            each = [
                encoded(plan.type, part, calibration.get(name)) for part, name in zip(rows, tensor.parts, strict=True)
            ]
            writer.write(plan.name, torch.cat(each))
        except CheckpointError as error:
            raise CheckpointError(f"{plan.name}: {error}") from error
        done += plan.num_bytes
        progress(done, total)


def type_of(tensor: Outward, config: DecoderConfig) -> str:
    """The type in which a tensor is written."""
    if len(tensor.shape) < 2 or tensor.stem == "ffn_gate_inp" or not tensor.name.endswith(".weight"):
        return "F32"
    best = "Q6_K" if _matters(tensor, config) else "Q4_K"
    if tensor.shape[-1] % 256 == 0:
        return best
    return FALLBACK[best] if tensor.shape[-1] % 32 == 0 else "F16"


def _matters(tensor: Outward, config: DecoderConfig) -> bool:
    """Whether a tensor gets more bits."""
    if tensor.stem in TABLES:
        return tensor.stem == "output" or config.tie_word_embeddings
    if tensor.stem not in ("attn_v", "ffn_down", "ffn_down_exps"):
        return False
    layer, layers = int(tensor.name.split(".")[1]), config.num_layers
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _with_ends(metadata: dict[str, Any], config: DecoderConfig) -> dict[str, Any]:
    """With the ids that end a text, as far as they do not follow from their texts. Raises ConfigError."""
    for key in ENDS:
        ends = json.loads(ending_files(metadata)["generation_config.json"])["eos_token_id"]
        missing = [token for token in config.eos_token_ids if token not in ends]
        if missing and f"tokenizer.ggml.{key}" not in metadata:
            metadata |= {f"tokenizer.ggml.{key}": missing[0]}
    ends = json.loads(ending_files(metadata)["generation_config.json"])["eos_token_id"]
    if missing := [token for token in config.eos_token_ids if token not in ends]:
        raise ConfigError(
            f"the tokens {missing} end a text, too, and GGUF metadata have place for {len(ENDS)} ids besides those "
            "known by their text; remove some from eos_token_id in generation_config.json"
        )
    return metadata


def _check(file: Path, config: DecoderConfig) -> None:
    """Check that a header describes this model. Raises ConfigError."""
    said = Said(read_gguf(file))
    fields, naming = describe(said)
    again = read_config(Fields(fields, str(file)), Fields({}, str(file)))
    alike: dict[str, Any] = {"layout": None, "eos_token_ids": (), "num_mtp_layers": 0, "passed_over": ()}
    own, theirs = replace(config, **alike), replace(again, **alike)
    if own != theirs:
        raise ConfigError(
            f"a GGUF file of the architecture {said.architecture} cannot say all of this model: it would have "
            f"{_difference(own, theirs)}. --to int4 and --to compressed-tensors take it."
        )
    if again.layout is not None or find_sources(said, naming)[0].keys() != config.tensor_shapes().keys():
        raise ConfigError(f"tensors of the architecture {said.architecture} are not written as GGUF")
    if unread := said.unread():
        raise ConfigError(f"keys of the new file that are not read again: {', '.join(unread)}")


def _difference(own: DecoderConfig, theirs: DecoderConfig) -> str:
    """The first field, also of the layers, that is not the same."""
    for ours, found in ((own.layer, theirs.layer), (own.rope, theirs.rope), (own, theirs)):
        for name in type(ours).__slots__:
            first, second = getattr(ours, name), getattr(found, name)
            if first != second:
                return f"{name} {str(second)[:100]} in place of {str(first)[:100]}"
    return "other fields"
