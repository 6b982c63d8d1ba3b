"""A Qwen3 checkpoint as a GGUF file for llama.cpp, in bf16 or quantized by llama.cpp itself.

usage: python -m benchmarks.peers.make_gguf MODEL_DIR FILE                   bf16; needs gguf
       python -m benchmarks.peers.make_gguf BF16_FILE FILE --to q8_0|q4_0    needs llama_cpp

The vocabulary is made up, since prompts are token ids.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np

LAYER_NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTER_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
FORMATS = {"q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "q4_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def convert(folder: Path, file: Path) -> None:
    """Write a bf16 checkpoint as GGUF. The embedding table is the head too."""
    config = json.loads((folder / "config.json").read_text("utf-8"))
    writer = gguf.GGUFWriter(str(file), "qwen3")
    _add_config(writer, config)
    _add_vocabulary(writer, config["vocab_size"])
    for name, bits in bf16_tensors(folder / "model.safetensors"):
        if bits.ndim == 1:  # norms are kept in fp32
            writer.add_tensor(gguf_name(name), (bits.astype(np.uint32) << 16).view(np.float32))
        else:
            raw = bits.view(np.uint8)
            writer.add_tensor(gguf_name(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_config(writer: Any, config: dict[str, Any]) -> None:
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)


def _add_vocabulary(writer: Any, size: int) -> None:
    writer.add_tokenizer_model("llama")
    writer.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"t%d" % i for i in range(size - 3))])
    writer.add_token_scores([0.0] * size)
    kinds = gguf.TokenType
    writer.add_token_types([kinds.UNKNOWN, kinds.CONTROL, kinds.CONTROL, *[kinds.NORMAL] * (size - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


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


def gguf_name(name: str) -> str:
    """A tensor's name in GGUF, by its name in the checkpoint."""
    if name in OUTER_NAMES:
        return OUTER_NAMES[name]
    _, _, layer, *parts = name.removesuffix(".weight").split(".")
    return f"blk.{layer}.{LAYER_NAMES['.'.join(parts)]}.weight"


def quantize(source: Path, file: Path, to: str, threads: int) -> None:
    """Let llama.cpp quantize a bf16 GGUF file."""
    llama_cpp.llama_backend_init()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread = FORMATS[to], threads
    if llama_cpp.llama_model_quantize(str(source).encode(), str(file).encode(), params):
        raise RuntimeError(f"llama.cpp could not quantize {source} to {to}")


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
