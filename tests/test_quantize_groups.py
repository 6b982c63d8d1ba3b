"""`quire quantize --to compressed-tensors`: the grids that are found for groups, and files that others read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file

from quire.cli.main import main
from quire.errors import CheckpointError, ConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.models.formats.write_compressed_tensors import GROUP, Recipe
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import Kernels, Quantization, choose_kernels
from quire.ops.quantize_groups import quantize_groups
from quire.ops.quantized import quantize
from tests.oracle import chunked_logits, random_prompt, save_checkpoint
from tests.quantized import dequantize
from tests.test_quantization import draw

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def hard(outputs: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """A weight with what makes groups hard: zeros, one number, one sign, outliers, tiny and large ones."""
    weight = draw(outputs, inputs, seed=outputs)
    weight[0] = 0
    weight[1] = 3.25
    weight[2] = weight[2].abs() + 1
    weight[3, ::7] *= 300
    weight[4] *= 1e-30 if dtype != torch.float16 else 1e-6
    weight[5, 1:] = 0
    weight[6] *= 1e4
    return weight.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 64), (4, 128), (8, 32)])
def test_kernels_find_the_bits_of_plain_torch(bits: Literal[4, 8], group: int, dtype: torch.dtype) -> None:
    for outputs, stored in ((7, dtype), (37, torch.float16)):
        weight = hard(outputs, 2 * group, dtype)
        expected, found = (
            kernels.quantize_groups(weight, bits, group, stored) for kernels in (Kernels(), choose_kernels())
        )
        assert found.scheme == expected.scheme
        for name in ("codes", "scales", "offsets"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours is theirs or torch.equal(ours, theirs), name
        assert found.restored().isfinite().all()


def error(restored: torch.Tensor, weight: torch.Tensor) -> float:
    return float(((restored - weight) ** 2).mean() / (weight**2).mean())


def test_a_search_for_grids_errs_less_than_symmetric_ones() -> None:
    weight = draw(64, 512) + 0.3 * draw(64, 512, seed=1) ** 2  # which leans to one side, as groups of real weights do
    symmetric = error(dequantize(quantize(weight, Quantization("int4", 32))), weight)
    assert error(quantize_groups(weight, 4, 32).restored(), weight) < 0.85 * symmetric
    assert error(quantize_groups(weight, 8, 32).restored(), weight) < 1e-4


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 1e38])
def test_numbers_that_no_scale_holds_are_an_error(bits: Literal[4, 8], wrong: float) -> None:
    weight = draw(20, 64)
    weight[3, 40] = wrong
    for kernels in (Kernels(), choose_kernels()):
        with pytest.raises(CheckpointError, match="not finite, or too large"):
            kernels.quantize_groups(weight, bits, 32)
        with pytest.raises(CheckpointError, match="groups of 32 do not divide its 33 inputs"):
            kernels.quantize_groups(draw(2, 33), bits, 32)


def test_layers_with_more_bits_are_spread_over_the_model() -> None:
    recipe = Recipe.of(16)
    down = [i for i in range(16) if recipe.bits(f"model.layers.{i}.mlp.down_proj") == 8]
    assert down == [0, 1, 4, 7, 10, 13, 14, 15]
    assert len(Recipe.of(1).eight) == 1, "no target that fits nothing"
    assert recipe.bits("model.layers.12.self_attn.k_proj") == 8
    assert recipe.bits("model.layers.12.self_attn.o_proj") == recipe.bits("model.layers.1.mlp.up_proj") == 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model, and what `quire quantize` makes of it."""
    base = tmp_path_factory.mktemp("compressed") / "model"
    save_checkpoint(base, "qwen3", num_hidden_layers=3, intermediate_size=96, dtype=torch.bfloat16)
    output = base.parent / "small"
    assert main(["quantize", str(base), "--to", "compressed-tensors", "--output", str(output), "--quiet"]) == 0
    return base, output


def test_that_library_restores_what_was_found_and_so_does_quire(folders: tuple[Path, Path]) -> None:
    """It is asked weight by weight: its version 0.20 loads no file with zero points into a model of transformers."""
    base, output = folders
    stored, original, tensors = (
        of_numbers(Checkpoint(output)),
        Checkpoint(base),
        load_file(output / "model.safetensors"),
    )
    config = QuantizationConfig(**json.loads((output / "config.json").read_text())["quantization_config"])
    recipe, coded = Recipe.of(3), 0
    assert stored.entries.keys() == original.entries.keys()
    for name in stored.entries:
        module, weight = name.removesuffix(".weight"), original.tensor(name)
        parts = {part.removeprefix(f"{module}."): part for part in tensors if part.startswith(f"{name}_")}
        if not parts:
            assert torch.equal(stored.tensor(name), weight), name
            continue
        wanted = quantize_groups(weight, recipe.bits(module), GROUP, torch.bfloat16)
        assert torch.equal(stored.tensor(name), wanted.restored()), name
        [target, *_] = match_targets(
            module, torch.nn.Linear(1, 1), [t for g in config.config_groups.values() for t in g.targets]
        )
        [scheme] = [group for group in config.config_groups.values() if target in group.targets]
        theirs = PackedQuantizationCompressor.decompress({part: tensors[of] for part, of in parts.items()}, scheme)
        assert torch.equal(theirs["weight"], wanted.restored().bfloat16()), name
        coded += 1
    assert coded == 3 * 7 and config.ignore == ["lm_head"]


def test_such_a_folder_is_computed_as_it_is_stored(folders: tuple[Path, Path]) -> None:
    prompt = random_prompt(40)
    base, small = (chunked_logits(load_model(folder, "float32"), prompt, 16) for folder in folders)
    assert 0 < (small - base).abs().mean() < 0.4 * base.abs().mean()


def test_what_cannot_be_written_is_refused(
    folders: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    to = ["quantize", str(folders[0]), "--to", "compressed-tensors", "--output", str(tmp_path / "out")]
    assert main([*to, "--group-size", "64"]) == 2
    assert "--group-size 64 is for --to int4" in capsys.readouterr().err
    fused = save_checkpoint(tmp_path / "phi3", "phi3", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="lays weights out in its own way"):
        quantize_folder(fused, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
