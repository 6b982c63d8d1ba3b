"""A decoder layer in one call has the bits of its kernels called one by one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.registry import load_model
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.kernels import LayerParts, WholeLayer
from quire.ops.quantized import Scheme
from quire.speculate.load_draft import load_eagle
from tests.oracle import Driver, save_checkpoint
from tests.test_models_eagle import HIDDEN, batch_of, eagle_tensors, write

pytestmark = pytest.mark.skipif(not library.usable(), reason="the C++ kernels were not built here")

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "window": ("mistral", {"sliding_window": 20}),
    "norms after, too": ("glm4", {}),
    "gelu, norms in fp32": (
        "gemma3_text",
        {"sliding_window": 20, "layer_types": ["sliding_attention"] * 2 + ["full_attention"]},
    ),
    "odd sizes": ("qwen3", {"hidden_size": 72, "intermediate_size": 100, "head_dim": 24}),
}


class OneByOne(CpuKernels):
    """Without the kernel for a whole layer."""

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        return None


@pytest.mark.parametrize("isa", library.usable())
@pytest.mark.parametrize("case", CASES)
def test_a_whole_layer_has_the_bits_of_its_kernels(case: str, isa: str, tmp_path: Path) -> None:
    architecture, options = CASES[case]
    for dtype in (torch.bfloat16, torch.float32):
        folder = save_checkpoint(tmp_path / str(dtype), architecture, dtype=dtype, **options)
        compare(folder, isa, None)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_whole_quantized_layer_has_the_bits_of_its_kernels(scheme: Scheme, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16)
    compare(folder, library.usable()[0], scheme)


def compare(folder: Path, isa: str, scheme: Scheme | None) -> None:
    whole, apart = (
        Driver(
            load_model(folder, kernels=kernels, quantization=scheme, group=32 if scheme == "int4" else None),
            capacity=64,
        )
        for kernels in (CpuKernels(isa), OneByOne(isa))
    )
    tokens = torch.randint(0, 160, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    for part in (tokens[:30], tokens[30:31], tokens[31:47], tokens[47:]):
        assert torch.equal(whole.feed(part), apart.feed(part))


def test_an_eagle_heads_layer_which_has_no_norm_at_its_input_has_the_bits_of_its_kernels(tmp_path: Path) -> None:
    target_folder = save_checkpoint(tmp_path / "target", "llama", dtype=torch.bfloat16)
    head_folder = write(tmp_path / "head", eagle_tensors())
    hidden = torch.randn(40, HIDDEN, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    tokens = torch.arange(40)
    made = []
    for kernels in (CpuKernels(library.usable()[0]), OneByOne(library.usable()[0])):
        target = load_model(target_folder, kernels=kernels)
        head, kv = load_eagle(head_folder, target), target.new_caches([8], 16)[0]
        with torch.inference_mode():
            parts = [head.forward(hidden[a:b], batch_of(tokens[a:b], a), kv) for a, b in ((0, 30), (30, 31), (31, 40))]
        made.append(torch.cat(parts))
    assert torch.equal(*made)
