"""A checkpoint as a GGUF file for llama.cpp, in bf16 or in a form that llama.cpp itself makes of that.

usage: python -m benchmarks.peers.make_gguf MODEL_DIR FILE                   bf16; needs gguf
       python -m benchmarks.peers.make_gguf BF16_FILE FILE --to q8_0|q4_0|q4_k_m|f32    needs llama_cpp

`gguf_layout` says which architectures. Without a tokenizer the vocabulary is made up, since prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

from benchmarks.peers import gguf_layout

FORMATS = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
    "f32": llama_cpp.LLAMA_FTYPE_ALL_F32,
}


def convert(folder: Path, file: Path) -> None:
    """Write a bf16 checkpoint as GGUF. Without a head of its own, the embedding table is the head too."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    arch = gguf_layout.architecture(config)
    writer = gguf.GGUFWriter(str(file), arch)
    add_metadata(writer, gguf_layout.metadata(config))
    if (folder / "tokenizer.json").exists():
        _add_tokenizer(writer, json.loads((folder / "tokenizer.json").read_text("utf-8")), config["eos_token_id"])
    else:
        add_vocabulary(writer, config["vocab_size"])
    for name, bits in gguf_layout.tensors(config, dict(bf16_tensors(folder / "model.safetensors"))):
        if gguf_layout.kept_in_fp32(name, bits):
            numbers = (bits.astype(np.uint32) << 16).view(np.float32)
            writer.add_tensor(name, gguf_layout.adjusted(name, numbers, arch))
        else:
            writer.add_tensor(name, bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_metadata(writer: Any, values: Mapping[str, Any], form: Any = gguf.LlamaFileType.MOSTLY_BF16) -> None:
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}
    add[list] = writer.add_array
    for name, value in values.items():
        add[type(value)](name, value)
    writer.add_file_type(form)


def add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"t%d" % i for i in range(size - 3))])
    writer.add_token_scores([0.0] * size)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.NORMAL] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def _add_tokenizer(writer: Any, tokenizer: Mapping[str, Any], eos: int) -> None:
    """A tokenizer of merged bytes, as `checkpoints` writes it."""
    model, special = tokenizer["model"], {token["id"] for token in tokenizer["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    writer.add_token_list(tokens)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.CONTROL if i in special else kinds.NORMAL for i in range(len(tokens))])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(eos)


def bf16_tensors(file: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Each tensor's name and bits, as uint16 of its shape. NumPy has no bf16, so the file is read by hand.

    The format: https://huggingface.co/docs/safetensors/index#format
    """
    with file.open("rb") as opened:
        [length] = struct.unpack("<Q", opened.read(8))
        header = json.loads(opened.read(length))
    header.pop("__metadata__", None)
    data = np.memmap(file, dtype=np.uint8, mode="r", offset=8 + length)
    for name, entry in header.items():
        if entry["dtype"] != "BF16":
            raise ValueError(f"{name} is {entry['dtype']}; only BF16 is converted")
        begin, end = entry["data_offsets"]
        yield name, data[begin:end].view(np.uint16).reshape(entry["shape"])


def quantize(source: Path, file: Path, to: str, threads: int) -> None:
    """Let llama.cpp make another form of a bf16 GGUF file."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FORMATS[to], threads
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params):
        raise RuntimeError(f"llama.cpp could not make {to} of {source}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("file", type=Path)
    parser.add_argument("--to", choices=list(FORMATS))
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.to:
        quantize(args.source, args.file, args.to, args.threads)
    else:
        convert(args.source, args.file)


if __name__ == "__main__":
    main()
