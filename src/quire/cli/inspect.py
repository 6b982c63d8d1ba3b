"""Describe a model without loading it: what it is, whether Quire supports it, and how much memory it needs.

MODEL is a folder, where config.json is enough, a GGUF file, or a name on the Hub, of which only small files are
downloaded (a GGUF file whole). No weights are read. Memory is that of weights and KV cache; activations come on top."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from quire.config import parse_size
from quire.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from quire.models.checkpoint import Checkpoint
    from quire.models.config import DecoderConfig
    from quire.models.formats.quantizing import Quantization
    from quire.models.model import ModelSizes
    from quire.ops import StoredWeight

STORED = "stored"
"""What weights in codes are in the tables of sizes, in place of bf16."""
NUMBER = re.compile(r"\d+")
CACHES = ("auto", "bf16"), ("int8", "int8")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire inspect`."""
    parser.usage = "quire inspect MODEL [--memory SIZE] [--max-model-len N] [--json]"
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, org/name on the hub, or 'demo'")
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit on the hub")
    parser.add_argument("--memory", metavar="SIZE", help="such as 24GiB (default: what is free on this machine)")
    parser.add_argument("--max-model-len", type=int, metavar="N", help="count for contexts of N tokens")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Print the description; raises CheckpointError if Quire does not support the model."""
    from quire.models.hub import resolve

    if args.max_model_len is not None and args.max_model_len < 1:
        raise ConfigError(f"--max-model-len {args.max_model_len} is out of range; allowed: 1 or more")
    folder = resolve(args.model, args.revision, weights=False)  # before torch is imported, to report errors at once

    from quire.cli.terminal import print_table
    from quire.runner.memory_plan import format_size, free_memory

    memory = parse_size(args.memory) if args.memory else free_memory()
    found = describe(folder, memory, args.max_model_len)
    if args.json:
        print(msgspec.json.encode(found).decode())
        return 0
    rows = [
        ("architecture", found["architecture"]),
        ("parameters", f"{found['parameters']:,}" + _active(found)),
        ("layers", found["layers"]),
        ("context", f"{found['max_model_len']:,} tokens"),
        ("weights on disk", found["on_disk"]),
        ("tokenizer", found["tokenizer"]),
        *((_in(name), format_size(size)) for name, size in found["weight_bytes"].items()),
        *([("matrices", _told(found["matrices"]))] if STORED in found["weight_bytes"] else []),
        *((f"KV in {name}", f"{format_size(size)} a token") for name, size in found["kv_bytes_per_token"].items()),
    ]
    if found["state_bytes"]:
        rows.append(("recurrent states", f"{format_size(found['state_bytes'])} a request"))
    if found["kv_saving"]:
        rows.append(("latent attention", f"{found['kv_saving']:.0f} times less than all heads' keys and values"))
    print_table(f"{args.model}", rows, stderr=False)
    fits = [
        (f"{weights} weights, {cache} KV", _fit(count, found["max_model_len"]))
        for weights, cache, count in found["requests_that_fit"]
    ]
    print_table(f"In {format_size(memory)}, requests of {found['max_model_len']:,} tokens at once", fits, stderr=False)
    print(found["advice"])
    return 0


def _in(weights: str) -> str:
    return "weights as stored" if weights == STORED else f"weights in {weights}"


def _told(matrices: dict[str, dict[str, int]]) -> str:
    """What becomes of matrices, by what they are stored in."""
    return "; ".join(
        f"{', '.join(f'{count} in {name}' for name, count in counts.items())}: {what}"
        for what, counts in matrices.items()
        if counts
    )


def _active(found: dict[str, Any]) -> str:
    own = found["active_parameters"]
    return f" ({own:,} for each token)" if own < found["parameters"] else ""


def _fit(count: float, length: int) -> str:
    if count < 0:
        return "the weights do not fit"
    return f"{count:,.1f}" if count >= 1 else f"none: contexts of up to {math.floor(count * length):,} tokens"


def describe(folder: Path, memory: int, max_model_len: int | None) -> dict[str, Any]:
    """The description, from config.json and, if there are weight files, their headers.

    Raises:
        CheckpointError: Quire does not support the model; the message says what it is.
    """
    import torch

    from quire.models.checkpoint import Checkpoint
    from quire.models.fields import Fields
    from quire.models.formats.choose import without_read_formats
    from quire.models.formats.quantizing import QUANTIZATIONS
    from quire.models.identify import identify, tokenizer_of
    from quire.models.model import ModelSizes
    from quire.models.registry import read_config

    if (other := identify(folder)) and not (folder / "config.json").is_file():
        raise CheckpointError(other)
    fields, generation = Fields.read(folder / "config.json"), Fields.read(folder / "generation_config.json")
    checkpoint = Checkpoint(folder) if any(folder.glob("*.safetensors")) or any(folder.glob("*.gguf")) else None
    config = read_config(without_read_formats(fields), generation)
    sizes = ModelSizes(config, torch.bfloat16)
    length = min(max_model_len or config.max_position_embeddings, config.max_position_embeddings)
    stored, matrices = (0, {}) if checkpoint is None else _as_stored(checkpoint, sizes, config)
    plain = {STORED: sizes.weight_bytes - stored} if stored else {"bf16": sizes.weight_bytes}
    weights = plain | {how: _quantized_bytes(sizes, config, how) for how in QUANTIZATIONS}
    kv, full, states = _kept(sizes, length)
    fits = [
        (weight, cache, (memory - size) / full[cache] if memory >= size else -1.0)
        for weight, size in weights.items()
        for _, cache in CACHES
    ]
    return {
        "architecture": (fields.strings("architectures") or ["?"])[0],
        "parameters": sizes.num_parameters,
        "active_parameters": sizes.active_parameters,
        "layers": str(config.num_layers),
        "max_model_len": length,
        "on_disk": "not here: config.json alone was read" if checkpoint is None else _on_disk(checkpoint),
        "tokenizer": tokenizer_of(folder),
        "weight_bytes": weights,
        "matrices": matrices,
        "kv_bytes_per_token": kv,
        "state_bytes": states,
        "kv_saving": sizes.kv_saving,
        "memory": memory,
        "requests_that_fit": fits,
        "advice": _advice(fits, length),
    }


def _on_disk(checkpoint: Checkpoint) -> str:
    """The types of the tensors and their size; of a GGUF model also the bits of a weight."""
    kinds, entries = Counter(checkpoint.types.values()), checkpoint.entries.values()
    stored = sum(entry.num_bytes for entry in entries)
    shown = ", ".join(f"{count} tensor{'s' * (count > 1)} of {kind}" for kind, count in kinds.most_common())
    numbers = sum(math.prod(entry.shape) for entry in entries)
    bits = f", {8 * stored / max(numbers, 1):.2f} bits a weight" if any(checkpoint.folder.glob("*.gguf")) else ""
    return f"{shown} ({stored / 2**30:,.2f} GiB{bits})"


def _kept(sizes: ModelSizes, length: int) -> tuple[dict[str, int], dict[str, int], int]:
    """Bytes of KV per token and per request of `length` tokens, by kind of cache; and bytes of a request's states."""
    from quire.ops.kv_cache import KVShape

    kv: dict[str, int] = {}
    full: dict[str, int] = {}
    states = 0
    for cache, name in CACHES:
        shapes = sizes.kv_shapes(cache)  # type: ignore[arg-type]
        tokens = [
            (shape, group) for shape, group in zip(shapes, sizes.groups, strict=True) if isinstance(shape, KVShape)
        ]
        kept = (shape.bytes_per_token * shape.block_size for shape in shapes if not isinstance(shape, KVShape))
        states = 2 * sum(kept)  # of a request: where it is, and one block before
        kv[name] = sum(shape.bytes_per_token for shape, _ in tokens)
        full[name] = states + sum(
            shape.bytes_per_token * min(length, (group.window or length) + 32) for shape, group in tokens
        )
    return kv, full, states


def _as_stored(
    checkpoint: Checkpoint, sizes: ModelSizes, config: DecoderConfig
) -> tuple[int, dict[str, dict[str, int]]]:
    """Bytes that computing with codes as they are stored saves over bf16; and how many matrices are computed so, or
    restored when they are loaded, by what they are stored in. One matrix of each kind is looked at.
    """
    from quire.models.formats.choose import of_numbers
    from quire.models.formats.quantizing import TABLES, is_plain
    from quire.models.registry import in_layout
    from quire.models.safetensors_file import FLOAT_DTYPES
    from quire.ops import choose_kernels

    (laid_out, _, _), kernels = in_layout(checkpoint), choose_kernels()
    formed = of_numbers(checkpoint).entries.keys() - checkpoint.entries.keys()  # stored as several tensors each
    kinds: dict[tuple[str, tuple[int, ...], str], list[str]] = {}
    for name, shape in config.tensor_shapes().items():
        there = name in laid_out.entries and not is_plain(name, shape)
        if there or (name == TABLES[0] and config.tie_word_embeddings):
            kinds.setdefault((NUMBER.sub("", name), shape, checkpoint.types.get(name, "")), []).append(name)
    saved, computed, restored = 0, Counter[str](), Counter[str]()
    for (_, shape, kind), names in kinds.items():
        code = laid_out.coded(names[0])
        if code is not None and kernels.keeps(code):
            saved += len(names) * (2 * math.prod(shape) - code.nbytes)
            computed[_name_of(code)] += len(names)
        elif code is not None or names[0] in formed or (kind and kind not in FLOAT_DTYPES):
            restored[kind or "another format" if code is None else _name_of(code)] += len(names)
    return saved, {"computed as stored": dict(computed), "restored when loaded": dict(restored)}


def _name_of(code: StoredWeight) -> str:
    """What a weight is stored in."""
    from quire.ops import CodedWeight
    from quire.ops.blocks import BlockWeight

    if isinstance(code, BlockWeight):
        return code.form.name
    return code.scheme.name if isinstance(code, CodedWeight) else type(code).__name__.removesuffix("Weight").upper()


def _quantized_bytes(sizes: ModelSizes, config: DecoderConfig, how: Quantization) -> int:
    """Bytes of the weights that a step reads if they are quantized, with the table only if it is the head, too."""
    from quire.models.formats.quantizing import TABLES, Recipe

    recipe, saved = Recipe(how, config.num_layers), 0
    for name, shape in config.tensor_shapes().items():
        if name not in TABLES or (name == TABLES[0] and config.tie_word_embeddings):
            saved += 2 * math.prod(shape) - recipe.num_bytes(name, shape)
    return sizes.weight_bytes - saved


def _advice(fits: list[tuple[str, str, float]], length: int) -> str:
    """The options with which one request of full length fits, the least change first."""
    flags = {STORED: "", "bf16": "", "int8": "--quantization int8", "int4": "--quantization int4"}
    for weights, cache, count in fits:
        if count >= 1:
            chosen = " ".join(filter(None, [flags[weights], "--kv-cache-dtype int8" if cache == "int8" else ""]))
            return f"Fits with {chosen}." if chosen else "Fits as it is."
    weights, cache, count = max(fits, key=lambda fit: fit[2])
    if count < 0:
        return "Does not fit: even in int4 the weights are larger than that memory."
    tokens = math.floor(count * length)
    return f"Fits with {flags[weights]} --kv-cache-dtype {cache} --max-model-len {tokens}."
