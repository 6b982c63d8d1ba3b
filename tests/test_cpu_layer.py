"""A decoder layer in one call has the bits of its kernels called one by one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.models.formats.quantizing import Quantization
from quire.models.registry import load_model
from quire.ops.cpu import library
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.experts import LoopedExperts
from quire.ops.kernels import Kernels, LayerParts, WholeLayer
from quire.ops.kv_cache import KVCache
from quire.ops.ragged import RaggedBatch
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
    "experts": ("qwen3_moe", {}),
    "experts, odd sizes": ("qwen3_moe", {"hidden_size": 72, "moe_intermediate_size": 20, "head_dim": 24}),
    "experts by sigmoid with a bias, and a shared one": ("glm4_moe", {}),
    "latent, experts in groups, dense at first": ("deepseek_v2", {}),
    "latent, by sigmoid with a bias": ("deepseek_v3", {}),
    "latent, queries not compressed": ("deepseek_v2", {"q_lora_rank": None}),
    "latent, queries that grow": ("mistral4", {}),
}
NOT_WHOLE = {"sinks": "gpt_oss", "positions are chosen": "deepseek_v32", "a gate of the shared one": "qwen3_next"}


class OneByOne(CpuKernels):
    """Without the kernel for a whole layer."""

    def whole_layer(self, parts: LayerParts) -> WholeLayer | None:
        return None


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("isa", library.usable())
@pytest.mark.parametrize("case", CASES)
def test_a_whole_layer_has_the_bits_of_its_kernels(case: str, isa: str, tmp_path: Path) -> None:
    architecture, options = CASES[case]
    for dtype in (torch.bfloat16, torch.float32):
        folder = save_checkpoint(tmp_path / str(dtype), architecture, dtype=dtype, **options)
        compare(folder, isa, None)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("isa", library.usable())
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("scheme", ["int8", "int4"])
def test_a_whole_quantized_layer_has_the_bits_of_its_kernels(
    scheme: Quantization, architecture: str, isa: str, tmp_path: Path
) -> None:
    # What products read is a multiple of int4's groups.
    sizes = {"v_head_dim": 16, "q_lora_rank": 32} if architecture == "deepseek_v2" else {}
    compare(save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **sizes), isa, scheme)


@pytest.mark.parametrize("case", NOT_WHOLE)
def test_other_kinds_of_layers_stay_calls_of_their_kernels(case: str, tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, NOT_WHOLE[case], dtype=torch.bfloat16))
    assert all(layer._whole is None for layer in model.layers)


def compare(folder: Path, isa: str, scheme: Quantization | None) -> None:
    whole, apart = (
        Driver(
            load_model(folder, kernels=kernels, quantization=scheme),
            capacity=64,
        )
        for kernels in (CpuKernels(isa), OneByOne(isa))
    )
    assert all(layer._whole for layer in whole.model.layers) and not any(layer._whole for layer in apart.model.layers)
    tokens = torch.randint(0, 160, (48,), generator=torch.Generator().manual_seed(0)).tolist()
    for part in (tokens[:30], tokens[30:31], tokens[31:47], tokens[47:]):
        for threads in (1, 2):  # the second time the same keys are written once more
            with whole.model.kernels.threads(threads):
                logits = whole.feed(part)
            assert torch.equal(logits, apart.feed(part)), threads
            whole.length = apart.length = whole.length - len(part)
        whole.length = apart.length = whole.length + len(part)
    loads, expected = whole.model.expert_loads, apart.model.expert_loads
    assert loads.keys() == expected.keys() and all(torch.equal(loads[i], expected[i]) for i in loads)
    assert all(load.sum() > 0 for load in loads.values())


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


@pytest.mark.parametrize("architecture", ["qwen3_moe", "deepseek_v2"])
def test_what_does_not_fit_a_whole_layer_is_refused(architecture: str, tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16))
    [kv] = model.new_caches([3], 16)
    tables, slots = torch.tensor([[1, 2]]), torch.tensor([3 * 16])
    batch = RaggedBatch(torch.tensor([1]), torch.tensor([0]), slots, [0, 1], [1], tables, 16)
    with pytest.raises(IndexError, match="a slot of the step lies outside the cache's 3 blocks"):
        model.forward([batch], [kv])
    sequence = Driver(model, capacity=32)
    sequence.caches = [KVCache(kv.num_blocks, kv.layers, kv.kv_heads, 8, 16, kv.dtype, sides=kv.sides)]
    with pytest.raises(ValueError, match="fit"):
        sequence.feed([1])
    sequence.caches = [KVCache(kv.num_blocks, 1, kv.kv_heads, kv.head_dim, 16, kv.dtype, sides=kv.sides)]
    with pytest.raises(ValueError, match="does not fit a cache of 1 layers"):
        sequence.feed([1])


def test_products_of_others_are_refused(tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "deepseek_v2", dtype=torch.bfloat16))
    parts, torch_product = model.layers[1]._parts(torch.bfloat16), Kernels().pack([torch.zeros(8, 8)])
    looped = LoopedExperts([torch_product], [torch_product])
    heads = Kernels().heads([torch_product])
    for wrong in (
        replace(parts, output=torch_product),
        replace(parts, mlp=parts.mlp._replace(experts=looped)),
        replace(parts, attention=parts.attention._replace(into_latent=heads)),
    ):
        with pytest.raises(TypeError, match=r"of the layer is|the layer's .* are"):
            model.kernels.whole_layer(wrong)
