"""GGUF files: their types, their headers whatever is in them, their parts, and the folders that are made of them."""

from __future__ import annotations

import json
import os
import random
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire.cli.inspect import describe
from quire.core.sampling_params import SamplingParams
from quire.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptGgufError,
    MissingTensorError,
    TensorDtypeError,
    UnexpectedTensorError,
    UnknownArchitectureError,
)
from quire.llm import LLM
from quire.models.checkpoint import Checkpoint, choose_dtype, content_hash, resolve
from quire.models.gguf.file import TYPES, read_gguf
from quire.models.gguf.hub import choose, types
from quire.models.gguf.types import DECODERS, block_form
from quire.models.layout import LaidOutCheckpoint, Layout
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import BlockWeight, CodedWeight, Mxfp4Weight, choose_kernels
from quire.ops.cpu.library import usable
from quire.ops.cpu.linear import CpuProduct
from tests.gguf_files import (
    HALVES,
    LLAMA,
    NUMBERS,
    Stored,
    gguf_bytes,
    half,
    llama,
    plain,
    random_blocks,
    text,
    value_of,
    write,
)
from tests.published import gemma3_270m, smollm2

QUARTER = torch.arange(256).view(4, 32, 2).transpose(1, 2).flatten()
"""Rows of queries in a file, whose rotated pairs lie side by side, by those of the model."""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "quire" / "gguf"


def dequantized(tensor: Stored) -> np.ndarray[Any, Any]:
    """Its numbers, as the package gguf makes them."""
    gguf = pytest.importorskip("gguf")
    form = TYPES[NUMBERS[tensor.kind]]
    rows = np.frombuffer(tensor.data, np.uint8).reshape(-1, tensor.shape[-1] // form.numbers * form.size)
    found = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(NUMBERS[tensor.kind]))
    return np.asarray(found).reshape(tensor.shape)


# --- types ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", DECODERS)
def test_numbers_are_those_of_the_package_gguf_bit_for_bit(kind: str) -> None:
    form = TYPES[NUMBERS[kind]]
    tensor = random_blocks(kind, (7, 3 * form.numbers), np.random.default_rng(0), scale=1.0)
    blocks = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(7, 3, form.size)
    weight = DECODERS[kind](blocks)
    assert isinstance(weight, Mxfp4Weight) == (kind == "MXFP4")
    np.testing.assert_array_equal(weight.restored().numpy(), dequantized(tensor))


@pytest.mark.parametrize("kind", DECODERS)
def test_blocks_are_packed_as_the_weight_that_they_are_decoded_to(kind: str) -> None:
    """In every byte; with outputs and inputs that fill no panel, with rows in another order, and parts of a rank."""
    form = TYPES[NUMBERS[kind]]
    for rows, count in ((64, 8), (70, 1), (33, 9)):
        tensor = random_blocks(kind, (rows, count * form.numbers), np.random.default_rng(rows))
        blocks = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(rows, count, form.size)
        weight = BlockWeight(block_form(form), blocks, factor=None if kind == "MXFP4" else 0.75)
        order = torch.randperm(rows, generator=torch.Generator().manual_seed(0))
        turned = weight.outputs(order).outputs(range(3, rows))
        assert torch.equal(turned.restored(), weight.restored()[order[3:]])
        for isa in usable():
            kernels = choose_kernels(isa)
            for parts in ([weight], [turned, weight.outputs(range(5, 20))]):
                decoded = [part.decoded() for part in parts]
                in_mxfp4 = [part for part in decoded if isinstance(part, Mxfp4Weight)]
                coded = [part for part in decoded if isinstance(part, CodedWeight)]
                wanted = kernels.pack_mxfp4(in_mxfp4) if in_mxfp4 else kernels.pack_coded(coded)
                found = kernels.pack_blocks(parts)
                assert isinstance(found, CpuProduct) and isinstance(wanted, CpuProduct)
                assert len(found.parts) == len(wanted.parts)
                assert all(map(torch.equal, found.parts, wanted.parts)), (isa, rows, count)


@pytest.mark.skipif(not usable(), reason="no compiled kernels")
@pytest.mark.parametrize("kind", HALVES)
def test_scales_that_are_no_numbers_are_refused(kind: str) -> None:
    form = TYPES[NUMBERS[kind]]
    for at in HALVES[kind] or [0]:
        tensor = random_blocks(kind, (40, 4 * form.numbers), np.random.default_rng(0))
        blocks = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(40, 4, form.size)
        choose_kernels().pack_blocks([BlockWeight(block_form(form), blocks)])
        if HALVES[kind]:
            blocks[37, 2, at : at + 2] = torch.tensor([0x00, 0x7C], dtype=torch.uint8)
        elif kind == "MXFP4":
            blocks[37, 2, 0] = 255
        else:
            continue  # NVFP4's all are
        with pytest.raises(CheckpointError, match=r"are not all finite|must be from 2 to 252, found 255"):
            choose_kernels().pack_blocks([BlockWeight(block_form(form), blocks)])


def test_every_type_of_the_package_gguf_is_known_with_its_size() -> None:
    gguf = pytest.importorskip("gguf")
    for kind, (numbers, size) in gguf.GGML_QUANT_SIZES.items():
        if kind.name == "Q8_1":
            continue  # of activations; the package once had another size than ggml
        assert (TYPES[kind.value].name, TYPES[kind.value].numbers, TYPES[kind.value].size) == (kind.name, numbers, size)


def test_a_tensor_of_many_chunks_is_the_same_as_in_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama())
    folder, name = resolve(str(file)), "model.layers.0.self_attn.q_proj.weight"
    whole, coded = Checkpoint(folder).tensor(name), Checkpoint(folder).coded(name)
    monkeypatch.setattr("quire.models.gguf.types.CHUNK", 700)
    assert coded is not None and torch.equal(coded.restored(), whole)
    again = Checkpoint(folder).coded(name)
    assert again is not None and torch.equal(again.restored(), whole)
    assert torch.equal(Checkpoint(folder).tensor(name), whole)


def test_a_type_that_is_not_read_is_refused_with_others_to_choose(tmp_path: Path) -> None:
    tensors = llama() | {"blk.0.ffn_up.weight": Stored("IQ2_XS", (256, 256), bytes(256 * 74))}
    file = write(tmp_path / "m.gguf", LLAMA, tensors)
    with pytest.raises(TensorDtypeError, match=r"ffn_up\.weight' is in IQ2_XS.*Choose .*Q4_K_M"):
        Checkpoint(resolve(str(file)))


# --- a model ----------------------------------------------------------------------------------------------


def test_a_models_tensors_have_the_models_names_rows_and_numbers(tmp_path: Path) -> None:
    tensors = llama()
    checkpoint = Checkpoint(resolve(str(write(tmp_path / "m.gguf", LLAMA, tensors))))
    layer = "model.layers.0."
    wanted = {
        "model.embed_tokens.weight": ("token_embd.weight", None),
        f"{layer}self_attn.q_proj.weight": ("blk.0.attn_q.weight", QUARTER),
        f"{layer}self_attn.k_proj.weight": ("blk.0.attn_k.weight", QUARTER[:128]),
        f"{layer}self_attn.v_proj.weight": ("blk.0.attn_v.weight", None),
        f"{layer}mlp.down_proj.weight": ("blk.0.ffn_down.weight", None),
        f"{layer}input_layernorm.weight": ("blk.0.attn_norm.weight", None),
    }
    for name, (stored, order) in wanted.items():
        numbers = torch.from_numpy(dequantized(tensors[stored]).copy())
        numbers = numbers if order is None else numbers[order]
        assert checkpoint.entries[name].shape == tuple(numbers.shape)
        assert torch.equal(checkpoint.tensor(name), numbers), name
        if numbers.ndim == 2:
            coded = checkpoint.coded(name)
            assert coded is not None and torch.equal(coded.restored(), numbers)
    assert len(checkpoint.entries) == len(tensors) and checkpoint.notes[0].startswith("the GGUF file's metadata")


def test_a_quantized_table_stays_in_the_file_and_gives_the_rows_of_tokens(tmp_path: Path) -> None:
    folder = resolve(str(write(tmp_path / "m.gguf", LLAMA, llama())))
    model, whole = load_model(folder, "float32"), Checkpoint(folder).tensor("model.embed_tokens.weight")
    ids = torch.tensor([3, 0, 63, 3])
    assert not isinstance(model.embedding.weight, torch.Tensor)
    assert torch.equal(model.embedding(ids), whole[ids]) and model.table_bytes == 0
    with pytest.raises(IndexError):
        model.embedding(torch.tensor([64]))


def test_a_tokens_row_has_the_same_bits_in_company() -> None:
    form = TYPES[NUMBERS["Q6_K"]]
    tensor = random_blocks("Q6_K", (512, 512), np.random.default_rng(1))
    blocks = torch.frombuffer(bytearray(tensor.data), dtype=torch.uint8).view(512, 2, form.size)
    from quire.models.gguf.types import restored

    many = restored(form, blocks, torch.arange(512))
    assert all(torch.equal(restored(form, blocks, torch.tensor([row]))[0], many[row]) for row in range(0, 512, 37))


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "Q4_K", "Q6_K"])
def test_a_model_answers(kind: str, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama(kind, kind))
    with LLM(str(file), threads=1, kv_cache_memory="4MiB") as llm:
        outputs = llm.generate([[5, 6, 7], [5, 6, 7, 8]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
        alone = llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
    assert outputs[0].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert len(alone[0].outputs[0].token_ids) == 4


def test_it_is_quantized_from_its_numbers(tmp_path: Path) -> None:
    folder = resolve(str(write(tmp_path / "m.gguf", LLAMA, llama())))
    quantize_folder(folder, tmp_path / "int8", "int8")
    model = load_model(tmp_path / "int8")
    assert str(model.quantization) == "int8" and not [*(tmp_path / "int8").glob("*.gguf")]
    assert str(load_model(folder, quantization="int8").quantization) == "int8"


def test_halves_are_computed_in_fp32_and_never_rounded_in_silence(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    halves = {
        name: half(generator.normal(0, 0.1, tensor.shape)) if len(tensor.shape) == 2 else tensor
        for name, tensor in llama().items()
    }
    whole = Checkpoint(resolve(str(write(tmp_path / "a" / "m.gguf", LLAMA, halves))))
    dtype, note = choose_dtype(whole, "auto")
    assert dtype == torch.float32 and "fp16" in str(note)
    assert whole.tensor("model.layers.0.mlp.up_proj.weight").dtype == torch.float16
    few = llama(layers=4) | {"output.weight": half(generator.normal(0, 0.1, (64, 256)))}
    metadata = LLAMA | {"llama.block_count": 4}
    mixed = Checkpoint(resolve(str(write(tmp_path / "b" / "m.gguf", metadata, few))))
    dtype, note = choose_dtype(mixed, "auto")
    assert dtype == torch.bfloat16 and "1 of the checkpoint's weights are fp16, and are rounded" in str(note)


def test_nvfp4_weights_are_multiplied_by_their_scale(tmp_path: Path) -> None:
    tensors = llama("NVFP4")
    scaled = tensors | {
        "blk.0.ffn_up.scale": plain(np.array([0.25])),
        "blk.0.ffn_up.input_scale": plain(np.array([3.0])),
    }
    name = "model.layers.0.mlp.up_proj.weight"
    plainly = Checkpoint(resolve(str(write(tmp_path / "a.gguf", LLAMA, tensors)))).tensor(name)
    checkpoint = Checkpoint(resolve(str(write(tmp_path / "b.gguf", LLAMA, scaled))))
    coded = checkpoint.coded(name)
    assert torch.equal(checkpoint.tensor(name), plainly * 0.25)
    assert coded is not None and torch.equal(coded.restored(), plainly * 0.25)


def test_parts_of_fused_weights_stay_coded(tmp_path: Path) -> None:
    """Whether they lie side by side, or are interleaved by head, as queries and gates of Qwen3.5 are."""
    base = Checkpoint(resolve(str(write(tmp_path / "m.gguf", LLAMA, llama()))))
    halves = (("up_proj", 96), ("gate_proj_2", 160))
    by_heads = ("self_attn.q_proj", 4, (("self_attn.q_proj", 40), ("self_attn.gate_proj", 24)))
    laid = LaidOutCheckpoint(base, Layout(joined=(("up_proj", halves),), by_heads=(by_heads,)))
    for part in ("mlp.up_proj", "mlp.gate_proj_2", "self_attn.q_proj", "self_attn.gate_proj"):
        name = f"model.layers.0.{part}.weight"
        coded = laid.coded(name)
        assert coded is not None and torch.equal(coded.restored(), laid.tensor(name)), part


def test_inspect_shows_the_types_and_the_bits_of_a_weight(tmp_path: Path) -> None:
    found = describe(resolve(str(write(tmp_path / "m.gguf", LLAMA, llama()))), 1 << 30, None)
    assert "7 tensors of Q4_K, 3 tensors of F32, 1 tensor of Q6_K" in found["on_disk"]
    assert found["matrices"] == {"computed as stored": {"Q4_K": 7, "Q6_K": 1}, "restored when loaded": {}}
    assert found["weight_bytes"].keys() == {"stored", "int8", "int4"}
    assert "bits a weight" in found["on_disk"] and found["architecture"] == "LlamaForCausalLM"


def test_its_hash_is_that_of_its_numbers(tmp_path: Path) -> None:
    hashes = set()
    for seed in (0, 1):
        for name in ("a", "b"):
            file = write(tmp_path / f"{seed}{name}" / "m.gguf", LLAMA, llama(seed=seed))
            hashes.add(content_hash(resolve(str(file))))
    assert len(hashes) == 2


@pytest.mark.parametrize(
    ("change", "error", "why"),
    [
        ({"general.architecture": "rwkv6"}, CheckpointError, "rwkv6.block_count must be"),
        ({"general.architecture": "mamba", "mamba.block_count": 2}, UnknownArchitectureError, "known are deepseek2, "),
        ({"llama.block_count": 0}, CheckpointError, r"block_count must be from 1 to 1024.*found 0"),
        ({"llama.attention.head_count": [4, 2]}, CheckpointError, "the same in all layers"),
        ({"llama.attention.head_count": "four"}, CheckpointError, "a whole number, or one for each"),
        ({"llama.rope.dimension_count": 32}, CheckpointError, "must be the width of a head, 64"),
        ({"llama.rope.scaling.type": "dynamic"}, CheckpointError, "none, linear, yarn or longrope"),
        ({"llama.block_count": 2}, MissingTensorError, "tensors that config.json implies are missing"),
    ],
)
def test_metadata_that_do_not_fit_are_refused_by_name(
    change: dict[str, Any], error: type[Exception], why: str, tmp_path: Path
) -> None:
    metadata = LLAMA | change
    if metadata["llama.attention.head_count"] == [4, 2]:
        metadata["llama.block_count"] = 2
    with pytest.raises(error, match=why):
        load_model(resolve(str(write(tmp_path / "m.gguf", metadata, llama()))))


def test_tensors_that_the_family_does_not_have_are_refused_by_name(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama() | {"v.patch_embd.weight": plain(np.ones(3))})
    with pytest.raises(UnexpectedTensorError, match=r"1 tensors .*llama does not have: 'v\.patch_embd\.weight'"):
        Checkpoint(resolve(str(file)))


def test_what_is_not_known_of_the_metadata_is_told(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA | {"llama.attention.novelty": 3}, llama())
    assert "says llama.attention.novelty, which Quire does not know" in Checkpoint(resolve(str(file))).notes[0]


# --- headers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokenizer", [False, True], ids=["without-tokenizer", "with-tokenizer"])
def test_metadata_are_what_the_package_gguf_has_written(tokenizer: bool, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_custom_alignment(64)
    writer.add_float32("a.number", 1e-5)
    writer.add_float64("a.double", 0.1)
    writer.add_bool("a.flag", True)
    writer.add_int64("a.long", -(2**40))
    writer.add_string("a.text", "é")
    writer.add_array("a.words", ["one", "", "drei"])
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("tokenizer.words", ["x", "y"])
    writer.add_array("tokenizer.scores", [0.5])
    writer.add_tensor("t", np.arange(6, dtype=np.float32).reshape(2, 3))
    writer.add_tensor("u", np.arange(8, dtype=np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_gguf(tmp_path / "m.gguf", tokenizer)
    assert dict(header.metadata) == {
        "general.architecture": "llama",
        "general.alignment": 64,
        "a.number": 1e-5,
        "a.double": 0.1,
        "a.flag": True,
        "a.long": -(2**40),
        "a.text": "é",
        "a.words": ["one", "", "drei"],
        "a.numbers": [1, 2, 3],
        "tokenizer.words": ["x", "y"] if tokenizer else [],
        "tokenizer.scores": [0.5] if tokenizer else [],
    }
    assert {name: (each.type.name, each.shape) for name, each in header.tensors.items()} == {
        "t": ("F32", (2, 3)),
        "u": ("F16", (8,)),
    }
    assert header.tensors["u"].start % 64 == 0
    with (tmp_path / "m.gguf").open("rb") as stream:
        stream.seek(header.tensors["u"].start)
        assert np.frombuffer(stream.read(16), np.float16).tolist() == list(range(8))


ONE = {"t": plain(np.ones(8))}
TWO = {"t": plain(np.ones(8)), "u": plain(np.ones(8))}
ARRAYS = struct.pack("<IQ", 9, 1)
CORRUPT: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "takes 4 bytes"),
    "another-format": (b"PK\x03\x04" + bytes(60), "begins with"),
    "first-version": (gguf_bytes({}, ONE, version=1), "version 1; Quire reads versions 2 and 3"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "many-tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "states 1099511627776 tensors"),
    "many-pairs": (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "pairs; at most"),
    "long-text": (gguf_bytes({}, {}, pairs=[text("k") + struct.pack("<IQ", 8, 1 << 62)]), "has 4611686018427387904"),
    "long-key": (gguf_bytes({}, {}, pairs=[struct.pack("<Q", 1 << 20)]), "at most 65536 are allowed"),
    "long-array": (gguf_bytes({}, {}, pairs=[text("k") + struct.pack("<IIQ", 9, 4, 1 << 22)]), "takes 16777216"),
    "too-many-items": (gguf_bytes({}, {}, pairs=[text("k") + struct.pack("<IIQ", 9, 4, 1 << 61)]), "all arrays"),
    "many-texts": (gguf_bytes({}, {}, pairs=[text("k") + struct.pack("<IIQ", 9, 8, 1 << 20)]), "has 1048576 texts"),
    "deep-array": (gguf_bytes({}, {}, pairs=[text("k") + struct.pack("<I", 9) + 9 * ARRAYS]), "too many arrays"),
    "unknown-value": (gguf_bytes({}, {}, pairs=[text("k") + struct.pack("<I", 77)]), "unknown type 77"),
    "twice-a-key": (gguf_bytes({}, {}, pairs=2 * [text("k") + value_of(1)]), "key 'k' stands in it twice"),
    "no-utf-8": (gguf_bytes({}, {}, pairs=[struct.pack("<Q", 2) + b"\xff\xfe" + value_of(1)]), "not UTF-8"),
    "odd-alignment": (gguf_bytes({"general.alignment": 48}, ONE), "not a power of 2"),
    "cut-short": (gguf_bytes({}, ONE)[:-8], "the file has"),
    "beyond-the-end": (gguf_bytes({}, ONE, offsets={"t": 1 << 40}), "the file has"),
    "not-aligned": (gguf_bytes({}, TWO, offsets={"u": 8}), "multiple of 32"),
    "overlapping": (gguf_bytes({}, TWO, offsets={"u": 0}), "overlaps"),
    "no-dimension": (gguf_bytes({}, {"t": Stored("F32", (), bytes(4))}), "has 0 dimensions"),
    "five-dimensions": (gguf_bytes({}, {"t": Stored("F32", (1, 1, 1, 1, 1), bytes(4))}), "has 5 dimensions"),
    "no-numbers": (gguf_bytes({}, {"t": Stored("F32", (2, 0), b"")}), "not rows of blocks"),
    "part-of-a-block": (gguf_bytes({}, {"t": Stored("Q4_K", (2, 100), bytes(400))}), "not rows of blocks of 256"),
    "huge-shape": (gguf_bytes({}, {"t": Stored("F32", (2**62, 2**62), b"")}), "the file has"),
}


@pytest.mark.parametrize("kind", CORRUPT)
def test_a_header_that_is_not_valid_is_refused_with_what_is_wrong(kind: str, tmp_path: Path) -> None:
    data, why = CORRUPT[kind]
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CorruptGgufError, match=why) as caught:
        resolve(str(tmp_path / "m.gguf"))
    assert str(tmp_path / "m.gguf") in str(caught.value)


def test_two_tensors_of_a_name_are_refused(tmp_path: Path) -> None:
    data = gguf_bytes({}, TWO).replace(text("u"), text("t"))
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CorruptGgufError, match="tensor 't' stands in it twice"):
        read_gguf(tmp_path / "m.gguf")


def test_a_type_that_is_not_known_is_refused_with_another_to_choose(tmp_path: Path) -> None:
    data = gguf_bytes({}, ONE).replace(struct.pack("<QIQ", 8, 0, 0), struct.pack("<QIQ", 8, 31, 0))
    (tmp_path / "m.gguf").write_bytes(data)
    with pytest.raises(CorruptGgufError, match=r"has type 31, .*Q4_K_M"):
        read_gguf(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 2100), marks=pytest.mark.slow)], ids=["few", "all"]
)
@pytest.mark.timeout(900)
def test_a_damaged_file_is_read_or_refused_by_an_error_of_ours(seeds: range, tmp_path: Path) -> None:
    """Most of the damage is in the header; some cuts the file short, or makes numbers as large as they can be."""
    whole = gguf_bytes(LLAMA | {"tokenizer.ggml.tokens": ["a", "b"]}, llama())
    length, ends = whole.index(b"ffn_norm.weight") + 60, []
    for seed in seeds:
        draw, data = random.Random(seed), bytearray(whole)
        for _ in range(draw.choice([1, 1, 1, 2])):
            at = draw.randrange(length if draw.random() < 0.7 else len(data))
            kind = draw.choice([0, 0, 0, 1, 2, 3])
            if kind == 0:
                data[at] = draw.randrange(256)
            elif kind == 1:
                data[at : at + 8] = draw.choice([b"\xff" * 8, bytes(8), struct.pack("<Q", 1 << draw.randrange(64))])
            elif kind == 2:
                del data[at : at + draw.randint(1, 40)]
            else:
                data[at:at] = draw.randbytes(draw.randint(1, 40))
        if draw.random() < 0.1:
            del data[draw.randrange(len(data)) :]
        file = tmp_path / f"{seed}.gguf"
        file.write_bytes(data)
        try:
            checkpoint = Checkpoint(resolve(str(file)))
            for name in checkpoint.entries:
                assert tuple(checkpoint.tensor(name).shape) == checkpoint.entries[name].shape
                checkpoint.coded(name)
            ends.append("read")
        except CheckpointError:
            ends.append("refused")
        file.unlink()
    assert min(ends.count("refused"), ends.count("read")) > len(seeds) // 12, "the damage is too little or too much"


# --- parts, folders, names --------------------------------------------------------------------------------


def split(folder: Path, count: int = 3, **change: Any) -> list[Path]:
    """The tiny Llama in parts, as llama-gguf-split makes them."""
    tensors, files = list(llama().items()), []
    for number in range(count):
        own = dict(tensors[number::count])
        metadata = {"split.no": number, "split.count": count, "split.tensors.count": len(tensors)}
        metadata = (LLAMA if number == 0 else {}) | metadata | change
        files.append(write(folder / f"m-{number + 1:05}-of-{count:05}.gguf", metadata, own))
    return files


def test_any_part_of_a_model_stands_for_all_of_it(tmp_path: Path) -> None:
    files = split(tmp_path / "split")
    whole = Checkpoint(resolve(str(write(tmp_path / "m.gguf", LLAMA, llama()))))
    for given in (*files, tmp_path / "split"):
        folder = resolve(str(given))
        assert {*Checkpoint(folder).entries} == {*whole.entries}
        assert len([*folder.glob("*.gguf")]) == 3
    name = "model.layers.0.mlp.gate_proj.weight"
    assert torch.equal(Checkpoint(folder).tensor(name), whole.tensor(name))


def test_parts_that_are_not_those_of_one_model_are_refused(tmp_path: Path) -> None:
    split(tmp_path / "lacking")[1].unlink()
    with pytest.raises(MissingTensorError, match=r"one of 3 parts, of which 1 .* m-00002-of-00003\.gguf"):
        resolve(str(tmp_path / "lacking"))
    first, second, _ = split(tmp_path / "exchanged")
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(CorruptGgufError, match=r"part 1 \(from 0\) of 3, but its name says part 0"):
        resolve(str(first))
    lone = split(tmp_path / "renamed")[0].rename(tmp_path / "renamed" / "lone.gguf")
    with pytest.raises(CorruptGgufError, match="Give files of several parts their names back"):
        resolve(str(lone))
    with pytest.raises(CorruptGgufError, match="says that there are 99 tensors"):
        resolve(str(split(tmp_path / "more", **{"split.tensors.count": 99})[0]))
    for name in ("m-00004-of-00003.gguf", "m-00000-of-00003.gguf", "m-00001-of-99999.gguf"):
        with pytest.raises(CorruptGgufError, match="by its name; from 1 to 1024 are allowed"):
            resolve(str(write(tmp_path / name, LLAMA, llama())))


def test_a_folder_with_one_model_is_that_model_and_of_several_one_must_be_named(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    write(folder / "mmproj-model-f16.gguf", {}, ONE)
    with pytest.raises(CheckpointNotFoundError, match=r"none of a language model: mmproj-model-f16\.gguf"):
        resolve(str(folder))
    write(folder / "a.gguf", LLAMA, llama())
    for given in (folder, folder / "a.gguf"):
        checkpoint = Checkpoint(resolve(str(given)))
        assert checkpoint.config.integer("hidden_size") == 256
        assert "mmproj-model-f16.gguf beside a.gguf: not used; requests with images are refused" in checkpoint.notes
    write(folder / "b.gguf", LLAMA, llama())
    with pytest.raises(CheckpointNotFoundError, match=r"several GGUF models: a\.gguf, b\.gguf\. Give the path"):
        resolve(str(folder))


def test_the_folder_that_is_made_is_found_again_and_made_anew_when_the_file_changes(
    own_cache: Path, tmp_path: Path
) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama())
    folder = resolve(str(file))
    assert folder.parent == own_cache and resolve(str(folder)) == folder and resolve(str(file)) == folder
    write(file, LLAMA | {"llama.context_length": 64}, llama())
    os.utime(file, ns=(1, 1))
    changed = resolve(str(file))
    assert changed != folder and Checkpoint(changed).config.integer("max_position_embeddings") == 64


def test_folders_of_models_that_are_gone_are_removed(own_cache: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama())
    gone, unfinished = resolve(str(file)), own_cache / "x.unfinished"
    file.rename(tmp_path / "n.gguf")
    unfinished.mkdir()
    os.utime(unfinished, (1, 1))
    assert {*own_cache.iterdir()} == {gone, unfinished}
    kept = resolve(str(tmp_path / "n.gguf"))
    assert [*own_cache.iterdir()] == [kept]


def test_several_that_start_at_once_share_one_folder(own_cache: Path, tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama())
    with ThreadPoolExecutor(8) as pool:
        found = {*pool.map(lambda _: resolve(str(file)), range(16))}
    assert len(found) == 1 and [*own_cache.iterdir()] == [*found]


def test_a_cache_that_cannot_be_written_is_told_with_what_to_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot be written.*Set XDG_CACHE_HOME"):
        resolve(str(write(tmp_path / "m.gguf", LLAMA, llama())))


def test_small_files_beside_a_model_are_used_instead_of_its_own_and_told(tmp_path: Path) -> None:
    file = write(tmp_path / "m.gguf", LLAMA, llama())
    made = json.loads((resolve(str(file)) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(made | {"max_position_embeddings": 77}))
    checkpoint = Checkpoint(resolve(str(file)))
    assert checkpoint.config.integer("max_position_embeddings") == 77
    assert "config.json beside m.gguf: used instead of its own" in checkpoint.notes


def test_a_type_on_the_hub_means_one_file_or_its_parts() -> None:
    files = [
        "README.md",
        "m-Q4_K_S.gguf",
        "m-Q4_K_M.gguf",
        "m-UD-Q4_K_M.gguf",
        "Q8_0/m-Q8_0-00001-of-00002.gguf",
        "Q8_0/m-Q8_0-00002-of-00002.gguf",
        "mmproj-m-F16.gguf",
        "m.IQ4_XS.gguf",
    ]
    assert choose(files, "Q4_K_M", "o/m") == ["m-Q4_K_M.gguf"]
    assert choose(files, "ud-q4_k_m", "o/m") == ["m-UD-Q4_K_M.gguf"]
    assert choose(files, "Q8_0", "o/m") == files[4:6] and choose(files, "IQ4_XS", "o/m") == ["m.IQ4_XS.gguf"]
    for kind in ("Q4_K", "F16", "Q5_K_M"):
        with pytest.raises(CheckpointNotFoundError, match=r"Give one of o/m:IQ4_XS, o/m:Q4_K_M, .* o/m:UD-Q4_K_M"):
            choose(files, kind, "o/m")
    assert types(["a.safetensors"], "o/m") == ""


# --- published files --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_smollm2_says_what_llama_cpp_says() -> None:
    with LLM(str(smollm2()), kv_cache_memory="64MiB", max_model_len=512) as llm:
        [output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=5))
        assert output.prompt_token_ids == [504, 3575, 282, 4649, 314]
        assert [*output.outputs[0].token_ids] == [7042, 30, 198, 198, 504]  # " Paris.\n\nThe"
        [reply] = llm.chat(
            [[{"role": "user", "content": "What is the capital of France?"}]], SamplingParams(temperature=0)
        )
        assert "Paris" in reply.outputs[0].text


@pytest.mark.slow
def test_gemma_3_says_what_llama_cpp_says() -> None:
    """Its first eleven tokens, after which two are almost equally likely."""
    with LLM(str(gemma3_270m()), kv_cache_memory="64MiB", max_model_len=512) as llm:
        [output] = llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=11))
        assert output.prompt_token_ids == [2, 818, 5279, 529, 7001, 563]
        assert [*output.outputs[0].token_ids] == [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563, 506]


@pytest.mark.slow
@pytest.mark.parametrize("file", [smollm2, gemma3_270m])
def test_a_published_files_numbers_are_those_of_the_package_gguf(file: Any) -> None:
    gguf = pytest.importorskip("gguf")
    checkpoint, reader = Checkpoint(resolve(str(file()))), gguf.GGUFReader(file())
    stored = {tensor.name: tensor for tensor in reader.tensors}
    for name, own in {
        "attn_output": "self_attn.o_proj",
        "ffn_down": "mlp.down_proj",
        "attn_v": "self_attn.v_proj",
    }.items():
        for layer in (0, 7, 15):
            tensor = stored[f"blk.{layer}.{name}.weight"]
            found = checkpoint.tensor(f"model.layers.{layer}.{own}.weight").numpy()
            np.testing.assert_array_equal(found, gguf.quants.dequantize(tensor.data, tensor.tensor_type))
