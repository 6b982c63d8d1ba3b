"""Models of quantized weights: quantized as they are loaded, or from a folder that holds them quantized."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM
from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.sampling_params import SamplingParams
from quire.engine import fingerprint
from quire.engine.engine import Engine
from quire.errors import (
    CheckpointError,
    ConfigError,
    CorruptSafetensorsError,
    MissingTensorError,
    ModelConfigError,
    QuireError,
    TensorShapeError,
    UnexpectedTensorError,
)
from quire.models.checkpoint import Checkpoint, content_hash
from quire.models.quantize import quantize_folder
from quire.models.quantized_folder import RECORD_FILE
from quire.models.registry import build_model, load_model
from quire.ops import Kernels, Quantization
from quire.ops.quantized import DEFAULT_GROUP, quantize
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint
from tests.quantized import dequantize

PROMPT = random_prompt(40)
INT8, INT4 = Quantization("int8"), Quantization("int4", 32)
GATE_UP = "model.layers.1.mlp.gate_proj+up_proj"
Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("base") / "qwen3", "qwen3", dtype=torch.bfloat16)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def int4_folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "int4"
    quantize_folder(base, folder, INT4)
    return folder


@pytest.fixture
def folder(int4_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(int4_folder, tmp_path / "copy")


def load(path: Path, quantization: Any = None, group: int | None = None, dtype: str = "auto") -> Any:
    return load_model(path, dtype, None, Kernels(), quantization, group)


def edit_tensors(folder: Path, edit: Edit) -> None:
    """Change tensors of a quantized folder, and make its record agree."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    edit(tensors)
    save_file(tensors, file)
    sign(folder)


def sign(folder: Path) -> None:
    edit_json(folder / RECORD_FILE, {"content_hash": content_hash(folder)})


# As it is loaded


@pytest.mark.parametrize("architecture", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_quantized_model_is_the_model_of_the_rounded_weights(
    architecture: str, is_tied: bool, tmp_path: Path
) -> None:
    """Activations are rounded too, so logits are near those of a checkpoint with the rounded weights, not equal."""
    folder = save_checkpoint(tmp_path / "model", architecture, tie_word_embeddings=is_tied)
    table = "model.embed_tokens.weight" if is_tied else "lm_head.weight"
    rounded = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        is_linear = tensor.ndim == 2 and name not in (table, "model.embed_tokens.weight")
        rounded[name] = dequantize(quantize(tensor, INT4)) if is_linear else tensor
    copy = shutil.copytree(folder, tmp_path / "rounded")
    save_file(rounded, copy / "model.safetensors")
    expected, found = (chunked_logits(model, PROMPT, 40) for model in (load(copy), load(folder, "int4", 32)))
    assert (found - expected).norm() < 0.1 * expected.norm()
    exact = chunked_logits(load(folder), PROMPT, 40)
    assert (chunked_logits(load(folder, "int8"), PROMPT, 40) - exact).norm() < 0.15 * exact.norm()


def test_bytes_are_those_that_memory_holds(base: Path) -> None:
    plain, int8, int4 = load(base), load(base, "int8"), load(base, "int4", 32)
    rest = sum(tensor.nbytes for tensor in load_file(base / "model.safetensors").values() if tensor.ndim == 1)
    linears = {"qkv": (128, 64), "output": (64, 64), "gate_up": (192, 64), "down": (64, 96)}
    body = {
        how: 3 * sum(quantize(torch.zeros(*shape), how).nbytes for shape in linears.values()) for how in (INT8, INT4)
    }
    head = quantize(torch.zeros(160, 64), INT8).nbytes
    assert int8.weight_bytes == rest + body[INT8] + head
    assert int4.weight_bytes == rest + body[INT4] + head
    assert int4.weight_bytes < int8.weight_bytes < plain.weight_bytes
    assert plain.num_parameters == int8.num_parameters == int4.num_parameters


def test_progress_counts_up_to_the_whole(base: Path, folder: Path) -> None:
    for path, how in ((base, "int4"), (folder, None)):
        seen: list[tuple[int, int]] = []
        load_model(path, "auto", lambda done, total, seen=seen: seen.append((done, total)), Kernels(), how, how and 32)
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]


def test_names_of_what_tokens_depend_on_differ(base: Path) -> None:
    models = [load(base), load(base, "int8"), load(base, "int4", 32), load(base, "int4", 32, "float32")]
    assert len({fingerprint.system(fingerprint.parts(base, model, "auto")) for model in models}) == 4
    assert [model.precision for model in models] == [
        "bfloat16",
        "bfloat16, weights int8, activations int8 by 256",
        "bfloat16, weights int4 in groups of 32, activations int8 by 256",
        "float32, weights int4 in groups of 32, activations int8 by 256",
    ]


def test_cached_blocks_of_another_quantization_have_other_names(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = []

    def hasher(key: bytes, fingerprint: str) -> BlockHasher:
        roots.append(fingerprint)
        return BlockHasher(key, fingerprint)

    monkeypatch.setattr("quire.engine.engine.BlockHasher", hasher)
    for options in ({}, {"quantization": "int8"}, {"quantization": "int4", "quantization_group_size": 32}):
        engine = Engine(EngineConfig(model=str(base), num_kv_blocks=8, max_model_len=64, **options))
        engine.close()
    assert len(set(roots)) == 3


@pytest.mark.parametrize(
    "options, words",
    [
        ({"quantization": "int2"}, "quantization='int2' is not supported; allowed: int8, int4"),
        ({"quantization": "int4", "quantization_group_size": 48}, "allowed: 32, 64, 128"),
        ({"quantization": "int8", "quantization_group_size": 64}, "is for int4, but quantization=int8"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EngineConfig(model="demo", **options)


def test_a_group_size_without_int4_is_refused(base: Path) -> None:
    with pytest.raises(ConfigError, match="quantization_group_size=32 is for int4, but quantization=none"):
        load(base, None, 32)


def test_a_group_size_that_does_not_divide_is_refused_by_the_tensors_name_before_any_is_read(base: Path) -> None:
    seen: list[int] = []
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.down_proj\.weight.*64.*96 inputs.*that do are: 32$"):
        load_model(base, "auto", lambda done, total: seen.append(done), Kernels(), "int4")
    assert DEFAULT_GROUP == 64 and seen == []


def test_weights_that_are_not_finite_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.gate_proj\+up_proj\.weight cannot be int8.*not finite"):
        load(copy, "int8")


# From a folder


@pytest.mark.parametrize("how", [INT8, INT4])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_folder_gives_the_bits_that_quantizing_at_load_does(
    how: Quantization, architecture: str, tmp_path: Path
) -> None:
    source = save_checkpoint(tmp_path / "model", architecture, dtype=torch.bfloat16, shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    quantize_folder(source, tmp_path / "out", how)
    for dtype in ("auto", "float32"):
        stored, fresh = load(tmp_path / "out", dtype=dtype), load(source, how.scheme, how.group, dtype)
        assert torch.equal(chunked_logits(stored, PROMPT, 40), chunked_logits(fresh, PROMPT, 40))
        assert (stored.quantization, stored.dtype, stored.weight_bytes) == (how, fresh.dtype, fresh.weight_bytes)


def test_a_folder_of_an_fp32_model_without_a_data_type_keeps_it(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "llama", edit={"dtype": ...})
    quantize_folder(source, tmp_path / "out", INT8)
    assert load(tmp_path / "out").dtype == torch.float32


def test_an_engine_quantizes_and_its_memory_plan_says_so() -> None:
    with LLM("demo", quantization="int4", num_kv_blocks=16, max_model_len=128) as llm:
        assert dict(llm.memory_plan.table())["weights"].endswith("MiB, int4 in groups of 64, the head int8")
        tokens = (
            llm.generate(["def main("], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
        )
        assert len(tokens) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_folders_weights_are_used_where_they_are_mapped(folder: Path) -> None:
    _, weights = build_model(Checkpoint(folder), "auto", None, Kernels(), INT4, stored=True)
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    assert len(weights.products) == 3 * 4 + 1
    for tensor in (part for weight in weights.products.values() for part in (weight.packed, weight.scales)):
        assert any(low <= tensor.data_ptr() < high for low, high in ranges)
        assert tensor.data_ptr() % 64 == 0


def test_a_folder_holds_what_the_base_model_does_beside_its_weights(base: Path, int4_folder: Path) -> None:
    names = {path.name for path in base.iterdir()} | {RECORD_FILE}
    assert {path.name for path in int4_folder.iterdir()} == names
    assert (int4_folder / "config.json").read_bytes() == (base / "config.json").read_bytes()
    stored, before = load_file(int4_folder / "model.safetensors"), load_file(base / "model.safetensors")
    assert torch.equal(stored["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    assert sum(name.endswith(".packed") for name in stored) == 3 * 4 + 1


@pytest.mark.parametrize("scheme, group", [(None, None), ("int4", None), ("int4", 32), (None, 32)])
def test_options_that_agree_with_a_folder_are_taken(scheme: str | None, group: int | None, folder: Path) -> None:
    assert load(folder, scheme, group).quantization == INT4


@pytest.mark.parametrize("scheme, group", [("int8", None), ("int4", 64), (None, 128)])
def test_options_that_contradict_a_folder_are_refused(scheme: str | None, group: int | None, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"copy is quantized to int4 in groups of 32, but .* was asked for"):
        load(folder, scheme, group)


# Folders that are not right


def test_a_folder_of_another_version_is_refused(folder: Path) -> None:
    edit_json(folder / RECORD_FILE, {"format_version": 1})
    with pytest.raises(CheckpointError, match=r"in format version 1, and Quire .* reads version 2\. Quantize"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "a file cut short"])
def test_a_base_model_that_changed_is_refused_and_one_that_is_gone_is_not(
    name: str, base: Path, tmp_path: Path
) -> None:
    source, output = shutil.copytree(base, tmp_path / "base"), tmp_path / "out"
    quantize_folder(source, output, INT8)
    if name == "config.json":
        edit_json(source / name, {"rope_theta": 5000.0})
    elif name == "a file cut short":
        os.truncate(source / "model.safetensors", 100)
    else:
        tensors = load_file(source / name)
        tensors["model.norm.weight"][0] += 1
        save_file(tensors, source / name)
    with pytest.raises(CheckpointError, match=r"out was quantized from .*base, which has changed since"):
        load(output)
    shutil.rmtree(source)
    assert load(output).quantization == INT8


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_folder_that_was_edited_is_refused(name: str, folder: Path) -> None:
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content + b"\n" if name == "config.json" else content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"config\.json or the weights have changed since"):
        load(folder)


def test_a_file_cut_short_is_refused(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CorruptSafetensorsError, match="cut short"):
        load(folder)


BAD_RECORDS: list[tuple[dict[str, Any], str]] = [
    ({"format_version": "1"}, "'format_version' must be a whole number"),
    ({"scheme": "int2"}, "'scheme' must be 'int4' or 'int8', found 'int2'"),
    ({"group": 48}, "'group' must be one of 32, 64, 128, found 48"),
    ({"group": None}, "'group' must be a whole number"),
    ({"base": 3}, "'base' must be a string"),
    ({"content_hash": ...}, "'content_hash' must be a string"),
]


@pytest.mark.parametrize("edit, words", BAD_RECORDS)
def test_a_bad_record_is_refused_by_field(edit: dict[str, Any], words: str, folder: Path) -> None:
    edit_json(folder / RECORD_FILE, edit)
    with pytest.raises(ModelConfigError, match=words):
        load(folder)


def test_a_record_that_is_no_json_is_refused(folder: Path) -> None:
    (folder / RECORD_FILE).write_text("{")
    with pytest.raises(ModelConfigError, match="not valid JSON"):
        load(folder)


def test_a_folder_without_its_record_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / RECORD_FILE).unlink()
    with pytest.raises(MissingTensorError, match=f"copy {RECORD_FILE}"):
        load(folder)


def _retyped(name: str, dtype: torch.dtype) -> Edit:
    return lambda tensors: tensors.update({name: tensors[name].to(dtype)})


BAD_TENSORS: dict[str, tuple[Edit, type[QuireError], str]] = {
    "packed missing": (lambda t: t.pop(GATE_UP + ".packed"), MissingTensorError, r"up_proj\.packed' is missing"),
    "scales missing": (lambda t: t.pop("lm_head.scales"), MissingTensorError, "scales' is missing"),
    "norm missing": (lambda t: t.pop("model.norm.weight"), MissingTensorError, "model.norm.weight"),
    "packed short": (
        lambda t: t.update({GATE_UP + ".packed": t[GATE_UP + ".packed"][:-1].clone()}),
        TensorShapeError,
        r"up_proj\.packed' is U8 \[5, 8, 32, 4\].*uint8 \[6, 8, 32, 4\]",
    ),
    "scales of fewer groups": (
        lambda t: t.update({GATE_UP + ".scales": t[GATE_UP + ".scales"][:, :1].clone()}),
        TensorShapeError,
        r"up_proj\.scales' is F16 \[6, 1, 32\]",
    ),
    "packed of another type": (_retyped(GATE_UP + ".packed", torch.int8), TensorShapeError, "is I8"),
    "scales of another type": (_retyped(GATE_UP + ".scales", torch.float32), TensorShapeError, "is F32"),
    "norm of another type": (_retyped("model.norm.weight", torch.int8), CheckpointError, r"'model\.norm\.weight' \(I8"),
    "packed left over": (
        lambda t: t.update({"x.packed": torch.zeros(2)}),
        UnexpectedTensorError,
        "no place for 1 tensors: 'x.packed'",
    ),
    "tensor left over": (lambda t: t.update({"x": torch.zeros(2)}), UnexpectedTensorError, "no place for 1 .*'x'"),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_tensors_that_do_not_fit_are_refused_by_name(case: str, folder: Path) -> None:
    edit, error, words = BAD_TENSORS[case]
    edit_tensors(folder, edit)
    with pytest.raises(error, match=words):
        load(folder)


def test_a_group_size_that_the_record_makes_up_is_refused(folder: Path) -> None:
    edit_json(folder / RECORD_FILE, {"group": 64})
    with pytest.raises(CheckpointError, match="64"):
        load(folder)


def test_codes_and_scales_of_any_bytes_are_computed_with(folder: Path) -> None:
    def scramble(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".packed"):
                tensor.view(torch.uint8).fill_(0x80)
            elif name.endswith(".scales"):
                tensor.fill_(torch.inf)

    edit_tensors(folder, scramble)
    assert not chunked_logits(load(folder), PROMPT, 40).isfinite().all()


# Writing


def test_nothing_is_ever_overwritten(base: Path, folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    for output in (folder, folder / "config.json"):
        with pytest.raises(ConfigError, match="exists and is not an empty folder; nothing is overwritten"):
            quantize_folder(base, output, INT8)
    assert sorted(path.name for path in folder.iterdir()) == before
    (tmp_path / "empty").mkdir()
    quantize_folder(base, tmp_path / "empty", INT8)
    assert load(tmp_path / "empty").quantization == INT8


def test_a_quantized_folder_is_not_quantized_again(base: Path, int4_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantized already, to int4 in groups of 32; give .*qwen3$"):
        quantize_folder(int4_folder, tmp_path / "out", INT8)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("phase", ["quantizing", "writing"])
def test_an_interruption_leaves_nothing(phase: str, base: Path, tmp_path: Path) -> None:
    def interrupt(name: str, share: float) -> None:
        if name.startswith(phase) and share > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(base, tmp_path / "out", INT8, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out cannot be (read|written)"):
        quantize_folder(base, tmp_path / "file" / "out", INT8)


def test_the_record_says_how_the_folder_was_made(base: Path, int4_folder: Path) -> None:
    record = json.loads((int4_folder / RECORD_FILE).read_text())
    assert (record["format_version"], record["scheme"], record["group"]) == (2, "int4", 32)
    assert record["base"] == str(base.resolve())
    assert record["base_hash"] == content_hash(base) and record["content_hash"] == content_hash(int4_folder)
