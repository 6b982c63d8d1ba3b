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
)
from quire.models.checkpoint import Checkpoint, content_hash
from quire.models.formats.choose import of_numbers
from quire.models.formats.quantizing import Quantization, Recipe
from quire.models.formats.quire import RECORD_FILE
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import CodedWeight, Kernels
from quire.ops.quantize_groups import quantize_groups
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint

PROMPT = random_prompt(40)
UP = "model.layers.1.mlp.up_proj.weight"
Edit = Callable[[dict[str, torch.Tensor]], object]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_checkpoint(tmp_path_factory.mktemp("base") / "qwen3", "qwen3", dtype=torch.bfloat16)
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


@pytest.fixture(scope="module")
def int4_folder(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized") / "int4"
    quantize_folder(base, folder, "int4")
    return folder


@pytest.fixture
def folder(int4_folder: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return shutil.copytree(int4_folder, tmp_path / "copy")


def load(path: Path, quantization: Any = None, dtype: str = "auto") -> Any:
    return load_model(path, dtype, None, Kernels(), quantization)


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


def test_bytes_are_those_that_memory_holds(base: Path) -> None:
    plain, int8, int4 = load(base), load(base, "int8"), load(base, "int4")
    tensors = load_file(base / "model.safetensors")
    for how, model in (("int8", int8), ("int4", int4)):
        recipe, total = Recipe(how, 3), 0  # type: ignore[arg-type]
        for name, tensor in tensors.items():
            scheme = recipe.scheme(name, tuple(tensor.shape))
            if name != "model.embed_tokens.weight":
                total += tensor.nbytes if scheme is None else quantize_groups(tensor, scheme).nbytes
        assert model.weight_bytes == total
    assert int4.weight_bytes < int8.weight_bytes < plain.weight_bytes
    assert plain.num_parameters == int8.num_parameters == int4.num_parameters


def test_progress_counts_up_to_the_whole(base: Path, folder: Path) -> None:
    for path, how in ((base, "int4"), (folder, None)):
        seen: list[tuple[int, int]] = []
        load_model(path, "auto", lambda done, total, seen=seen: seen.append((done, total)), Kernels(), how)
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1]


def test_names_of_what_tokens_depend_on_differ(base: Path) -> None:
    models = [load(base), load(base, "int8"), load(base, "int4"), load(base, "int4", "float32")]
    assert len({fingerprint.system(fingerprint.parts(base, model, "auto")) for model in models}) == 4
    assert [model.precision for model in models] == [
        "bfloat16",
        "bfloat16, weights int8, activations int8",
        "bfloat16, weights int4, activations int8",
        "float32, weights int4, activations int8",
    ]


def test_cached_blocks_of_another_quantization_have_other_names(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = []

    def hasher(key: bytes, fingerprint: str) -> BlockHasher:
        roots.append(fingerprint)
        return BlockHasher(key, fingerprint)

    monkeypatch.setattr("quire.engine.engine.BlockHasher", hasher)
    for options in ({}, {"quantization": "int8"}, {"quantization": "int4"}):
        engine = Engine(EngineConfig(model=str(base), num_kv_blocks=8, max_model_len=64, **options))
        engine.close()
    assert len(set(roots)) == 3


def test_a_quantization_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="quantization='int2' is not supported; allowed: int8, int4"):
        EngineConfig(model="demo", quantization="int2")  # type: ignore[arg-type]


def test_a_weight_that_no_group_divides_stays_as_it_is_and_a_note_says_so(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model", "llama", intermediate_size=72, dtype=torch.bfloat16)
    model = load(folder, "int4")
    assert "3 weights, such as 'model.layers.0.mlp.down_proj.weight' [64, 72], are not quantized" in model.notes[0]
    quantize_folder(folder, tmp_path / "out", "int4")
    assert torch.equal(chunked_logits(load(tmp_path / "out"), PROMPT, 40), chunked_logits(model, PROMPT, 40))


def test_weights_that_are_not_finite_are_refused_by_name(base: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(base, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = torch.nan
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight cannot be int8.*not finite"):
        load(copy, "int8")


# From a folder


@pytest.mark.parametrize("how", ["int8", "int4"])
@pytest.mark.parametrize("architecture", ["qwen2", "llama"])
def test_a_folder_gives_the_bits_that_quantizing_at_load_does(
    how: Quantization, architecture: str, tmp_path: Path
) -> None:
    source = save_checkpoint(tmp_path / "model", architecture, dtype=torch.bfloat16, shard_size="60KB")
    assert len(list(source.glob("*.safetensors"))) > 1
    quantize_folder(source, tmp_path / "out", how)
    for dtype in ("auto", "float32"):
        stored, fresh = load(tmp_path / "out", dtype=dtype), load(source, how, dtype)
        assert torch.equal(chunked_logits(stored, PROMPT, 40), chunked_logits(fresh, PROMPT, 40))
        assert (stored.quantization, stored.dtype, stored.weight_bytes) == (how, fresh.dtype, fresh.weight_bytes)


def test_a_folder_of_an_fp32_model_without_a_data_type_keeps_it(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "model", "llama", edit={"dtype": ...})
    quantize_folder(source, tmp_path / "out", "int8")
    assert load(tmp_path / "out").dtype == torch.float32


def test_an_engine_quantizes_and_its_memory_plan_says_so() -> None:
    with LLM("demo", quantization="int4", num_kv_blocks=16, max_model_len=128) as llm:
        assert dict(llm.memory_plan.table())["weights"].endswith("MiB, int4")
        tokens = (
            llm.generate(["def main("], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))[0]
            .outputs[0]
            .token_ids
        )
        assert len(tokens) == 8


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_folders_weights_are_views_of_the_mapped_file(folder: Path) -> None:
    weight = of_numbers(Checkpoint(folder)).coded(UP)
    assert isinstance(weight, CodedWeight) and weight.scheme.name == "int4"
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder) in line]
    ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    for tensor in (weight.codes, weight.scales, weight.offsets, weight.block_scales, weight.block_offsets):
        assert tensor is not None and any(low <= tensor.data_ptr() < high for low, high in ranges)


def test_a_folder_holds_what_the_base_model_does_beside_its_weights(base: Path, int4_folder: Path) -> None:
    names = {path.name for path in base.iterdir()} | {RECORD_FILE}
    assert {path.name for path in int4_folder.iterdir()} == names
    assert (int4_folder / "config.json").read_bytes() == (base / "config.json").read_bytes()
    stored, before = load_file(int4_folder / "model.safetensors"), load_file(base / "model.safetensors")
    assert {name for name in before if name in stored} == {name for name in before if before[name].ndim == 1}
    assert sum(".codes" in name for name in stored) == 3 * 7 + 2


@pytest.mark.parametrize("asked", [None, "int4"])
def test_an_option_that_agrees_with_a_folder_is_taken(asked: str | None, folder: Path) -> None:
    assert load(folder, asked).quantization == "int4"


def test_an_option_that_contradicts_a_folder_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="copy is quantized to int4, but int8 was asked for"):
        load(folder, "int8")


# Folders that are not right


def test_a_folder_of_another_version_is_refused(folder: Path) -> None:
    edit_json(folder / RECORD_FILE, {"format_version": 2})
    with pytest.raises(CheckpointError, match=r"in format version 2, and Quire .* reads version 3\. Quantize"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "a file cut short"])
def test_a_base_model_that_changed_is_refused_and_one_that_is_gone_is_not(
    name: str, base: Path, tmp_path: Path
) -> None:
    source, output = shutil.copytree(base, tmp_path / "base"), tmp_path / "out"
    quantize_folder(source, output, "int8")
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
    assert load(output).quantization == "int8"


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
    ({"quantization": "int2"}, "'quantization' must be 'int4' or 'int8', found 'int2'"),
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


def test_codes_of_any_bytes_are_computed_with_and_scales_are_finite(folder: Path) -> None:
    def scramble(tensors: dict[str, torch.Tensor]) -> None:
        for tensor in tensors.values():
            if not tensor.is_floating_point():
                tensor.view(torch.uint8).fill_(0x80)

    edit_tensors(folder, scramble)
    chunked_logits(load(folder), PROMPT, 40)
    edit_tensors(folder, lambda tensors: tensors[UP + ".block_scales"].fill_(torch.inf))
    with pytest.raises(CheckpointError, match="block_scales are not all finite"):
        load(folder)


# Writing


def test_nothing_is_ever_overwritten(base: Path, folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.iterdir())
    for output in (folder, folder / "config.json"):
        with pytest.raises(ConfigError, match="exists and is not an empty folder; nothing is overwritten"):
            quantize_folder(base, output, "int8")
    assert sorted(path.name for path in folder.iterdir()) == before
    (tmp_path / "empty").mkdir()
    quantize_folder(base, tmp_path / "empty", "int8")
    assert load(tmp_path / "empty").quantization == "int8"


def test_a_quantized_folder_is_not_quantized_again(base: Path, int4_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantized already, to int4; give .*qwen3$"):
        quantize_folder(int4_folder, tmp_path / "out", "int8")
    assert not (tmp_path / "out").exists()


def test_an_interruption_leaves_nothing(base: Path, tmp_path: Path) -> None:
    def interrupt(name: str, share: float) -> None:
        if name.startswith("quantizing") and share > 0.4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(base, tmp_path / "out", "int8", interrupt)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_is_named(base: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/out cannot be (read|written)"):
        quantize_folder(base, tmp_path / "file" / "out", "int8")


def test_the_record_says_how_the_folder_was_made(base: Path, int4_folder: Path) -> None:
    record = json.loads((int4_folder / RECORD_FILE).read_text())
    assert (record["format_version"], record["quantization"]) == (3, "int4")
    assert record["base"] == str(base.resolve())
    assert record["base_hash"] == content_hash(base) and record["content_hash"] == content_hash(int4_folder)
