"""Published formats of quantized weights: what is refused, and what is done with those that are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.errors import CheckpointError, ModelConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import Quantization
from tests.checkpoints import write
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint
from tests.test_gptq_awq import GPTQ, numbers, pack_gptq

REFUSED = {
    "aqlm": "AQLM weights",
    "bitblas": "'bitblas' weights",
    "bitnet": "BitNet weights",
    "exl2": "EXL2 weights",
    "exl3": "EXL3 weights",
    "fp_quant": "'fp_quant' weights",
    "higgs": "HIGGS weights",
    "hqq": "HQQ weights",
    "quark": "Quark weights",
    "quanto": "Quanto weights",
    "torchao": "torchao weights",
    "vptq": "VPTQ weights",
    "": "'' weights",
}
README = "---\nlicense: mit\nbase_model:{}\ntags:\n- quantized\n---\n# A model\n\nbase_model: not/this\n"


@pytest.mark.parametrize("method, name", REFUSED.items())
def test_other_formats_are_refused_by_name(method: str, name: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, {"x": torch.ones(1)}, {"quant_method": method, "bits": 3})
    with pytest.raises(ModelConfigError, match=f"config.json, quantization_config: {name} of 3 bits, which Quire does"):
        of_numbers(checkpoint)


@pytest.mark.parametrize(
    "readme, config, named",
    [
        (README.format(" Qwen/Qwen3-8B"), {}, ", Qwen/Qwen3-8B, and"),
        (README.format("\n- org/name.v2\n- org/b"), {}, ", org/name.v2, and"),
        (README.format(' "org/a"'), {"_name_or_path": "org/b"}, ", org/a, and"),
        ("# base_model: org/a", {"_name_or_path": "org/b"}, ", org/b, and"),
        ("", {"_name_or_path": "/home/me/model"}, "made from, and"),
        (None, {}, "made from, and"),
    ],
)
def test_a_refusal_names_the_model_that_it_was_made_from(
    readme: str | None, config: dict[str, str], named: str, tmp_path: Path
) -> None:
    write(tmp_path, {"x": torch.ones(1)}, {})
    edit_json(tmp_path / "config.json", {"quantization_config": {"quant_method": "hqq"}, **config})
    if readme is not None:
        (tmp_path / "README.md").write_text(readme)
    with pytest.raises(ModelConfigError, match=named):
        of_numbers(Checkpoint(tmp_path))


def in_gptq(folder: Path, architecture: str = "qwen3", but: str = "none") -> Path:
    """A tiny model in GPTQ's format, in `folder`/coded, and the numbers that it stands for, in `folder`/plain."""
    coded, plain = (save_checkpoint(folder / name, architecture, dtype=torch.bfloat16) for name in ("coded", "plain"))
    stored, restored = load_file(coded / "model.safetensors"), load_file(plain / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight") and but not in name]:
        weight = stored.pop(name).float()
        order = torch.arange(weight.shape[1]) // 32
        scales = (weight.unflatten(1, (-1, 32)).abs().amax(-1) / 8).half()
        zeros = torch.randint(5, 12, scales.shape)
        codes = (weight / scales.float()[:, order] + zeros[:, order]).round().clamp(0, 15).long()
        parts = pack_gptq(codes, zeros, 4, 1) | {"scales": scales.mT, "g_idx": order.int()}
        stored |= {name.replace("weight", part): tensor.contiguous() for part, tensor in parts.items()}
        restored[name] = numbers(codes, zeros, scales, order)
    for each, content in ((coded, stored), (plain, restored)):
        save_file(content, each / "model.safetensors", metadata={"format": "pt"})
    edit_json(coded / "config.json", {"quantization_config": GPTQ})
    return folder


def test_int8_is_made_of_the_numbers_at_load_or_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder, prompt = in_gptq(tmp_path), random_prompt(40)
    expected = chunked_logits(load_model(folder / "plain", quantization="int8"), prompt, 17)
    assert torch.equal(chunked_logits(load_model(folder / "coded", quantization="int8"), prompt, 17), expected)
    quantize_folder(folder / "coded", tmp_path / "int8", Quantization("int8"))
    assert torch.equal(chunked_logits(load_model(tmp_path / "int8"), prompt, 17), expected)


def test_experts_of_a_layer_that_are_not_alike_are_named(tmp_path: Path) -> None:
    folder = in_gptq(tmp_path, "qwen3_moe", but="layers.1.mlp.experts.3.down_proj") / "coded"
    with pytest.raises(CheckpointError, match=r"layers.1.mlp.experts.3.down_proj' is stored in another format than"):
        load_model(folder)
    load_model(folder, quantization="int8")


def test_a_checkpoint_in_such_a_format_is_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = in_gptq(tmp_path) / "coded"
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "tensors of I32" in out and "Qwen3ForCausalLM" in out
