"""A GGUF file of a model's shape in Q4_0 with random weights, for llama.cpp: speed does not depend on what they say.

usage: python -m benchmarks.peers.random_gguf FOLDER FILE        needs gguf

FOLDER has the model's config.json, and shapes.json: each tensor's shape by its name in a checkpoint. Tensors are
written one at a time, and never in bf16. As llama.cpp does, the head is in Q6_K.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import gguf
import numpy as np

from benchmarks.peers import gguf_layout
from benchmarks.peers.make_gguf import add_metadata, add_vocabulary


def write(folder: Path, file: Path) -> None:
    """Write the file."""
    config, shapes = (json.loads((folder / name).read_text("utf-8")) for name in ("config.json", "shapes.json"))
    stored = {name: np.broadcast_to(np.uint8(0), shape) for name, shape in shapes.items()}  # its memory is one byte
    writer = gguf.GGUFWriter(str(file), gguf_layout.architecture(config))
    add_metadata(writer, gguf_layout.metadata(config), gguf.LlamaFileType.MOSTLY_Q4_0)
    add_vocabulary(writer, config["vocab_size"])
    formats = gguf_layout.random_formats(config, stored)
    for name, (form, shape) in formats.items():
        kind, sizes = gguf.GGMLQuantizationType[form], gguf_layout.byte_shape(form, shape)
        writer.add_tensor_info(name, sizes, np.dtype(np.uint8), int(np.prod(sizes)), kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    generator = np.random.default_rng(0)
    for form, shape in formats.values():
        writer.write_tensor_data(gguf_layout.random_blocks(form, shape, generator))
    writer.close()


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:3]))
