"""The grids that are found for groups of weights; `quire quantize --to compressed-tensors`, whose files others read."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_targets
from safetensors.torch import load_file

from quire.cli.main import main
from quire.errors import CheckpointError, ConfigError
from quire.models.calibration import calibrate
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.models.formats.write_compressed_tensors import SCHEMES, Recipe
from quire.models.met import fitted
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import Kernels, choose_kernels
from quire.ops.coded import CodedWeight, Scheme
from quire.ops.cpu import library
from quire.ops.quantize_groups import eight_bits, four_bits, quantize_groups, six_bits
from tests.oracle import chunked_logits, random_prompt, save_checkpoint
from tests.quantized import coded
from tests.test_coded import draw

QUIRES = {8: eight_bits, 6: six_bits, 4: four_bits}
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


FINDABLE = {
    **{
        f"{bits} bits of {inputs}": (scheme(inputs), inputs)
        for bits, scheme in QUIRES.items()
        for inputs in (96, 144, 512)
    },
    **{f"zeros by {group}": (Scheme("int4", 4, group), 2 * group) for group in (32, 64, 128)},
}


@pytest.mark.parametrize("isa", library.usable() or [pytest.param("none", marks=pytest.mark.skip("no library"))])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FINDABLE)
def test_kernels_find_the_bits_of_plain_torch(case: str, dtype: torch.dtype, isa: str) -> None:
    scheme, inputs = FINDABLE[case]
    assert scheme is not None
    for outputs, stored, importance in ((7, dtype, None), (37, torch.bfloat16, draw(inputs).abs())):
        weight = hard(outputs, inputs, dtype)
        expected, found = (
            kernels.quantize_groups(weight, scheme, stored, importance) for kernels in (Kernels(), choose_kernels(isa))
        )
        assert found.scheme == expected.scheme == scheme
        for name in ("codes", "scales", "offsets", "block_scales", "block_offsets"):
            ours, theirs = getattr(found, name), getattr(expected, name)
            assert ours is theirs or torch.equal(ours, theirs), name
        assert found.restored().isfinite().all()


def error(restored: torch.Tensor, weight: torch.Tensor) -> float:
    return float(((restored - weight) ** 2).mean() / (weight**2).mean())


def test_a_search_for_grids_errs_less_than_the_plain_choice() -> None:
    weight = draw(64, 512) + 0.3 * draw(64, 512, seed=1) ** 2  # which leans to one side, as groups of real weights do
    groups = weight.view(64, -1, 32)
    step = groups.abs().amax(2, keepdim=True) / 7
    symmetric = error(((groups / step).round() * step).view_as(weight), weight)
    zeros = error(quantize_groups(weight, Scheme("int4", 4, 32)).restored(), weight)
    four, six, eight = (error(coded(weight, how).restored(), weight) for how in ("int4", "int6", "int8"))
    assert four < 0.9 * zeros < 0.7 * symmetric
    assert six < 0.1 * four and eight < 1e-4


def test_inputs_of_more_importance_err_less() -> None:
    weight, importance = draw(64, 512), torch.ones(512)
    importance[::4] = 100
    scheme = four_bits(512)
    assert scheme is not None
    plain, weighed = (
        (quantize_groups(weight, scheme, importance=given).restored() - weight).square() for given in (None, importance)
    )
    assert weighed[:, ::4].mean() < 0.7 * plain[:, ::4].mean()
    assert weighed.mean() < 2 * plain.mean()


@pytest.mark.parametrize("case", FINDABLE)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf"), 3e38])
def test_numbers_that_no_scale_holds_are_an_error(case: str, wrong: float) -> None:
    scheme, inputs = FINDABLE[case]
    assert scheme is not None
    weight = draw(20, inputs)
    weight[3, 40] = wrong
    for kernels in (Kernels(), choose_kernels()):
        if wrong == 3e38 and scheme.name == "int8":  # others square it
            assert kernels.quantize_groups(weight, scheme).restored().isfinite().all()
            continue
        with pytest.raises(CheckpointError, match="not finite, or too large"):
            kernels.quantize_groups(weight, scheme)
        with pytest.raises(CheckpointError, match="do not divide its 33 inputs"):
            kernels.quantize_groups(draw(2, 33), scheme)


def test_kernels_refuse_a_weight_without_numbers_in_memory() -> None:
    if library.usable():
        with pytest.raises(ValueError, match=r"\[2, 64\] on meta, a Tensor, has no numbers that a CPU can read"):
            choose_kernels().quantize_groups(torch.empty(2, 64, device="meta"), Scheme("int4", 4, 32))


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
    quantize_folder(base, output, "compressed-tensors", None, [random_prompt(512)], gptq=True)
    return base, output


def quantized(scheme: Scheme, weight: torch.Tensor, importance: torch.Tensor | None) -> CodedWeight:
    return quantize_groups(weight, scheme, importance=importance)


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
    met = calibrate(original, [random_prompt(512)], True, lambda done, total: None)
    assert stored.entries.keys() == original.entries.keys()
    for name in stored.entries:
        module, weight = name.removesuffix(".weight"), original.tensor(name)
        parts = {part.removeprefix(f"{module}."): part for part in tensors if part.startswith(f"{name}_")}
        if not parts:
            assert torch.equal(stored.tensor(name), weight), name
            continue
        scheme = SCHEMES[recipe.bits(module)]
        wanted = fitted(weight, scheme, met[name], partial(quantized, scheme))
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
    assert main([*to, "--threads", "0"]) == 2
    assert "--threads 0 is out of range" in capsys.readouterr().err
    fused = save_checkpoint(tmp_path / "phi3", "phi3", num_hidden_layers=1)
    with pytest.raises(ConfigError, match="lays weights out in its own way"):
        quantize_folder(fused, tmp_path / "out", "compressed-tensors")
    assert not (tmp_path / "out").exists()
