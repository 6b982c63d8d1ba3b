"""A checkpoint in compressed-tensors, as that library writes it: what vLLM and Quire read from the same file.

usage: python -m benchmarks.peers.make_compressed MODEL_DIR FOLDER --to w8a8|w4a16     needs compressed-tensors
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file, save_file

TILE = 128
"""Inputs that share a scale with 4 bits: what most published checkpoints have."""
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "w8a8": ("int-quantized", {"num_bits": 8, "strategy": "channel"}),
    "w4a16": ("pack-quantized", {"num_bits": 4, "strategy": "group", "group_size": TILE}),
}
"""By form, the library's format and what it says of weights; the scales are the largest number's."""
BY_ROW = {"num_bits": 8, "dynamic": True, "strategy": "token"}


def convert(source: Path, target: Path, to: str) -> None:
    """Write all linear layers but the head in a form, and the rest as it is."""
    form, weights = FORMS[to]
    group: dict[str, Any] = {"targets": ["Linear"], "weights": weights}
    if form == "int-quantized":
        group["input_activations"] = BY_ROW
    library, scheme = BaseCompressor.get_value_from_registry(form), QuantizationScheme(**group)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if not name.endswith("_proj.weight"):
            tensors[name] = tensor
            continue
        each = tensor.shape[1] if form == "int-quantized" else TILE
        scale = tensor.unflatten(1, (-1, each)).abs().amax(2) / (2 ** (weights["num_bits"] - 1) - 1)
        parts = library.compress({"weight": tensor, "weight_scale": scale}, scheme)
        tensors |= {f"{name.removesuffix('weight')}{part}": value.contiguous() for part, value in parts.items()}
    target.mkdir()
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text("utf-8"))
    section = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    section |= {"ignore": ["lm_head"], "quantization_status": "compressed"}
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": section}), "utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--to", choices=list(FORMS), required=True)
    args = parser.parse_args()
    convert(args.source, args.target, args.to)


if __name__ == "__main__":
    main()
