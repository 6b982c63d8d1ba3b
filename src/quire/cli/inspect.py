"""Describe a model without loading it: what it is, whether Quire supports it, and how much memory it needs.

MODEL is a folder, where config.json is enough, a GGUF file, or a name on the Hub, of which only small files are
downloaded (a GGUF file whole). No weights are read. Memory is that of weights and KV cache; activations come on top."""

from __future__ import annotations

import argparse
import math
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
        *((f"weights in {name}", format_size(size)) for name, size in found["weight_bytes"].items()),
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
    weights = {"bf16": sizes.weight_bytes} | {how: _quantized_bytes(sizes, config, how) for how in QUANTIZATIONS}
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
    shown = ", ".join(f"{count} tensors of {kind}" for kind, count in kinds.most_common())
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
    flags = {"bf16": "", "int8": "--quantization int8", "int4": "--quantization int4"}
    for weights, cache, count in fits:
        if count >= 1:
            chosen = " ".join(filter(None, [flags[weights], "--kv-cache-dtype int8" if cache == "int8" else ""]))
            return f"Fits with {chosen}." if chosen else "Fits as it is."
    weights, cache, count = max(fits, key=lambda fit: fit[2])
    if count < 0:
        return "Does not fit: even in int4 the weights are larger than that memory."
    tokens = math.floor(count * length)
    return f"Fits with {flags[weights]} --kv-cache-dtype {cache} --max-model-len {tokens}."
