"""What weights meet over a text, and rounding by it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError
from quire.models.calibration import WINDOW, calibrate
from quire.models.checkpoint import Checkpoint
from quire.models.formats import write_compressed_tensors
from quire.models.gguf.encode import encoded
from quire.models.gguf.search import GRIDS, quantized
from quire.models.gguf.types import decoded
from quire.models.gguf.write import Planned
from quire.models.gptq import LIMITS
from quire.models.met import Met, fitted
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops.coded import CodedWeight
from quire.ops.quantize_groups import eight_bits, four_bits, quantize_groups, six_bits
from tests.oracle import VOCAB, chunked_logits, load_reference, save_checkpoint


def test_what_weights_meet_is_what_transformers_gives_them(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    text = torch.randint(VOCAB, (WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()
    met = calibrate(Checkpoint(folder), [text], True, lambda done, total: None)
    reference, inputs = load_reference(folder), {}
    for name, module in reference.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            module.register_forward_pre_hook(lambda _, given, name=name: inputs.update({f"{name}.weight": given[0][0]}))
    with torch.inference_mode():
        reference(torch.tensor([text]))
    assert inputs.keys() <= met.keys()
    for name, x in inputs.items():
        importance, products = met[name].importance, met[name].products
        assert importance is not None and products is not None and met[name].tokens == WINDOW
        torch.testing.assert_close(importance, x.square().mean(0), rtol=1e-3, atol=1e-5 * float(x.square().mean()))
        torch.testing.assert_close(products, x.T @ x, rtol=1e-3, atol=1e-3 * float(x.square().sum(0).max()))


def test_texts_that_say_nothing_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    for texts, words in (([[1] * 100], "has 100 tokens, too few"), ([[VOCAB] * WINDOW], f"has the token {VOCAB}")):
        with pytest.raises(ConfigError, match=words):
            calibrate(Checkpoint(folder), texts, False, lambda done, total: None)


SCHEMES = {"int4": four_bits(512), "int6": six_bits(512), "int8": eight_bits(512)}
SCHEMES |= {kind: grid.scheme for kind, grid in GRIDS.items()}
SCHEMES |= {f"{bits} bits of compressed-tensors": scheme for bits, scheme in write_compressed_tensors.SCHEMES.items()}


@pytest.mark.parametrize("kind", SCHEMES)
def test_gptq_rounds_so_that_outputs_err_less(kind: str) -> None:
    scheme = SCHEMES[kind]
    assert scheme is not None

    def quantize(weight: torch.Tensor, importance: torch.Tensor | None) -> CodedWeight:
        if kind in GRIDS:
            return quantized(kind, weight, importance)
        return quantize_groups(weight, scheme, importance=importance)

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2048, 32, generator=generator) @ torch.randn(32, 512, generator=generator)
    x = x + 0.5 * torch.randn(2048, 512, generator=generator)  # inputs that go together, as a model's do
    weight, met = torch.randn(48, 512, generator=generator), Met(torch.zeros(512), torch.zeros(512, 512))
    met.add(x)
    made = fitted(weight, scheme, met, quantize)
    nearest = fitted(weight, scheme, Met(met.squares, None, met.tokens), quantize)
    errors = [((other.restored() - weight) @ x.T).norm() for other in (made, nearest)]
    assert errors[0] < 0.8 * errors[1]
    assert torch.equal(nearest.codes, quantize(weight, met.importance).codes)
    if kind in GRIDS:
        assert LIMITS[kind] == (GRIDS[kind].low, GRIDS[kind].high)
        form = Planned("x", kind, (48, 512)).form
        assert torch.equal(decoded(form, encoded(kind, weight, met)).restored(), made.restored())


@pytest.mark.parametrize("how", ["int8", "int4", "compressed-tensors"])
def test_a_calibrated_folder_is_nearer_to_the_model_on_its_text(
    how: Literal["int8", "int4", "compressed-tensors"], tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, "qwen3", hidden_size=128, intermediate_size=256)
    tensors = load_file(folder / "model.safetensors")
    for name, norm in tensors.items():
        if name.endswith("layernorm.weight"):
            norm[:4] *= 16  # inputs that count more than others, as some of a model's do
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    text = torch.randint(VOCAB, (2 * WINDOW,), generator=torch.Generator().manual_seed(0)).tolist()
    quantize_folder(folder, tmp_path / "plain", how)
    quantize_folder(folder, tmp_path / "calibrated", how, None, [text])
    quantize_folder(folder, tmp_path / "gptq", how, None, [text], gptq=True)
    folders = (folder, *(tmp_path / name for name in ("plain", "calibrated", "gptq")))
    exact, *found = (chunked_logits(load_model(each, "float32"), text[:WINDOW], WINDOW) for each in folders)
    plain, calibrated, gptq = (float((each - exact).norm()) for each in found)
    if how == "int8":  # scales are those of the largest numbers, whatever counts
        assert calibrated == plain and gptq < plain
    else:
        assert gptq < calibrated < plain


def test_a_model_without_a_head_is_calibrated(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma3_model")
    met = calibrate(Checkpoint(folder), [[7] * WINDOW], False, lambda done, total: None)
    assert met["model.layers.0.mlp.down_proj.weight"].tokens == WINDOW
