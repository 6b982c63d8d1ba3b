"""Published formats of quantized weights: what is refused, and what is done with those that are read."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.cli.main import main
from quire.errors import CheckpointError, ModelConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.formats.choose import of_numbers
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from tests.checkpoints import Tensors, under, write
from tests.mutations import mutate_json
from tests.oracle import chunked_logits, edit_json, random_prompt, save_checkpoint
from tests.test_bitsandbytes import NAME as NAME_4_BIT
from tests.test_bitsandbytes import SECTION as SECTION_4_BIT
from tests.test_bitsandbytes import stored
from tests.test_compressed_tensors import CASES, SEVERAL, compressed, section_of
from tests.test_gptq_awq import AWQ, GPTQ, numbers, pack_awq, pack_gptq

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
    assert load_model(folder / "coded").multiplies_bytes and not load_model(folder / "plain").multiplies_bytes
    quantize_folder(folder / "coded", tmp_path / "int8", "int8")
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
    assert "tensors of I32" in out and "Qwen3ForCausalLM" in out and "weights as stored" in out
    assert "computed as stored" in out and "restored when loaded" not in out


def small(draw: random.Random) -> tuple[str, Tensors, dict[str, Any]]:
    """A weight's name, its tensors and the configuration, in one of the formats."""
    kind = draw.choice(["gptq", "awq", "bitsandbytes", "fp8", *SEVERAL])
    codes, zeros = torch.randint(0, 16, (32, 64)), torch.randint(1, 16, (32, 2))
    scales = {"scales": torch.rand(2, 32).half()}
    if kind == "gptq":
        parts = pack_gptq(codes, zeros, 4, 1) | scales | {"g_idx": (torch.arange(64) // 32).int()}
        return "m.weight", under("m", parts), GPTQ | {"desc_act": True}
    if kind == "awq":
        return "m.weight", under("m", pack_awq(codes, zeros) | scales), AWQ
    if kind == "bitsandbytes":
        return NAME_4_BIT, stored("nf4", draw.random() < 0.5), SECTION_4_BIT
    if kind == "fp8":
        parts = {"weight": torch.randn(32, 64).to(torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)}
        return "m.weight", under("m", parts), {"quant_method": "fp8", "weight_block_size": [16, 32]}
    format, args = CASES[kind]
    return "m.weight", under("m", compressed(torch.randn(32, 64), format, args)[0]), section_of(format, args)


def damage(tensors: Tensors, draw: random.Random) -> None:
    """One tensor is removed, renamed, cut, reshaped, or of another type or content."""
    name = draw.choice(sorted(tensors))
    tensor = tensors.pop(name)
    ways: list[Callable[[], torch.Tensor]] = [
        lambda: tensor[: len(tensor) // 2] if tensor.dim() else tensor,
        lambda: tensor[None],
        lambda: tensor.flatten(),
        lambda: tensor.float().to(draw.choice([torch.float16, torch.int32, torch.uint8, torch.int64, torch.bfloat16])),
        lambda: torch.randint(0, 256, (tensor.nbytes,), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape),
        lambda: torch.zeros_like(tensor)[:0] if tensor.dim() else tensor,
    ]
    kind = draw.randrange(len(ways) + 2)
    if kind < len(ways):
        tensors[name] = ways[kind]()
    elif kind == len(ways):
        tensors[name + draw.choice(["x", ".weight", "_scale"])] = tensor


@pytest.mark.parametrize(
    "seeds", [range(150), pytest.param(range(150, 4000), marks=pytest.mark.slow)], ids=["few", "all"]
)
def test_damaged_weights_and_configurations_are_read_or_refused_by_name(seeds: range, tmp_path: Path) -> None:
    ends = []
    for seed in seeds:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        name, tensors, section = small(draw)
        if draw.random() < 0.5:
            damage(tensors, draw)
        write(tmp_path, tensors, section)
        config = tmp_path / "config.json"
        if draw.random() < 0.6:
            config.write_bytes(mutate_json(config.read_text(), draw).encode("utf-8", "surrogatepass"))
        try:
            checkpoint = of_numbers(Checkpoint(tmp_path))
            if name in checkpoint.entries and checkpoint.entries[name].dtype == "F32":
                coded, tensor = checkpoint.coded(name), checkpoint.tensor(name)
                assert tensor.dtype == torch.float32 and tuple(tensor.shape) == checkpoint.entries[name].shape
                assert coded is None or torch.equal(coded.restored(), tensor) or not tensor.isfinite().all()
            ends.append("read")
        except CheckpointError as error:
            assert str(tmp_path) in str(error), error
            ends.append("refused")
    assert min(ends.count("refused"), ends.count("read")) > len(seeds) // 6, "the damage is too little or too much"
