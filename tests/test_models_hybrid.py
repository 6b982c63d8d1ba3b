"""Models with short convolutions, Mamba 2 or Kimi delta attention: transformers' logits, and nothing changes a bit."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.cli.inspect import describe
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelConfigError
from quire.models import registry
from quire.models.formats.quantizing import Quantization
from quire.models.random_checkpoint import write_checkpoint
from quire.models.registry import load_model
from quire.ops import choose_kernels
from quire.ops.cpu import library
from quire.ops.experts import LoopedExperts
from quire.ops.linear import Product
from tests.oracle import (
    assert_errs_no_more,
    assert_parity,
    assert_same_when_quantized,
    chunked_logits,
    edit_json,
    random_prompt,
    save_checkpoint,
)
from tests.quantized import coded
from tests.recurrent_engines import (
    ORDER,
    check_drafts,
    check_other_kernels,
    check_ranks,
    check_refusals,
    check_resumption,
    check_switches,
    each_alone,
    greedy_in,
)
from tests.recurrent_layers import drawn
from tests.test_models_deepseek import edit_tensors

PROMPT = random_prompt(90)
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.1,
    "residual_multiplier": 0.22,
    "logits_scaling": 0.5,
}
MIXED = {**MULTIPLIERS, "layer_types": ["linear_attention", "full_attention", "linear_attention"]}
PUBLISHED: dict[str, Any] = {
    "layer_types": ...,
    "mlp_layer_types": ...,
    "linear_num_heads": ...,
    "linear_head_dim": ...,
    "linear_conv_kernel_dim": ...,
    "first_k_dense_replace": 1,
    "moe_router_activation_func": "sigmoid",
    "mla_use_nope": True,
    "rope_theta": 10000.0,
    "linear_attn_config": {
        "full_attn_layers": [2],
        "kda_layers": [1, 3],
        "num_heads": 4,
        "head_dim": 16,
        "short_conv_kernel_size": 4,
    },
}
"""What Kimi Linear's own configuration says, where transformers writes other fields."""
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", {}),
    "nemotron_h-latent": (
        "nemotron_h",
        {"moe_latent_size": 32, "routed_scaling_factor": 2.5, "norm_topk_prob": False, "use_bias": True},
    ),
    "nemotron_h-older": (
        "nemotron_h",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention"],
            "use_conv_bias": False,
            "conv_kernel": 3,
            "edit": {
                "use_conv_bias": ...,
                "mamba_conv_bias": False,
                "conv_kernel": ...,
                "mamba_d_conv": 3,
                "n_groups": ...,
                "mamba_n_groups": 2,
                "mamba_dt_limit": [0.0, math.inf],
                "layers_block_type": ...,
                "hybrid_override_pattern": "M-*",
                "num_hidden_layers": 3,
                "time_step_limit": [0.0, math.inf],
            },
        },
    ),
    "lfm2": ("lfm2", {}),
    "lfm2-biases": ("lfm2", {"conv_bias": True, "conv_L_cache": 4, "block_ffn_dim_multiplier": 0.8}),
    "lfm2-older": (
        "lfm2",
        {
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": False,
            "edit": {
                "layer_types": ...,
                "full_attn_idxs": [1],
                "tie_embedding": False,
                "tie_word_embeddings": ...,
                "block_ff_dim": 96,
                "intermediate_size": ...,
                "rope_parameters": ...,
                "rope_theta": 1000000.0,
            },
        },
    ),
    "kimi_linear": ("kimi_linear", {}),
    "kimi_linear-plain": (
        "kimi_linear",
        {
            "moe_renormalize": False,
            "num_expert_group": 1,
            "topk_group": 1,
            "linear_conv_kernel_dim": 3,
            "v_head_dim": 16,
        },
    ),
    "kimi_linear-published": ("kimi_linear", {"edit": PUBLISHED}),
    "lfm2_moe": ("lfm2_moe", {}),
    "lfm2_moe-plain": (
        "lfm2_moe",
        {"use_expert_bias": False, "norm_topk_prob": False, "routed_scaling_factor": 1.5, "conv_bias": True},
    ),
    "granite-h": ("granitemoehybrid", MIXED),
    "granite-h-experts": (
        "granitemoehybrid",
        {**MIXED, "num_local_experts": 6, "num_experts_per_tok": 2, "intermediate_size": 32},
    ),
    "granite-h-older": (
        "granitemoehybrid",
        {
            **MIXED,
            "mamba_n_groups": 2,
            "mamba_d_conv": 3,
            "mamba_conv_bias": False,
            "mamba_proj_bias": True,
            "position_embedding_type": "rope",
            "edit": {
                "layer_types": ["mamba", "attention", "mamba"],
                "mamba_d_head": "auto",
                "time_step_limit": [0.0, math.inf],
            },
        },
    ),
}


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    assert_parity(folder, PROMPT)


@pytest.mark.parametrize("case", ["lfm2", "kimi_linear", "granite-h", "nemotron_h"])
def test_a_half_precision_model_errs_no_more_than_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **options)
    assert_errs_no_more(folder, PROMPT, 1.1)


@pytest.mark.parametrize(
    "case", ["lfm2", "kimi_linear-plain", "lfm2_moe", "granite-h-older", "granite-h-experts", "nemotron_h-latent"]
)
def test_a_quantized_folder_is_read_as_it_was_quantized(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "model", architecture, **options)
    assert_same_when_quantized(folder, tmp_path / "int4", PROMPT)


@pytest.mark.parametrize("case", ["lfm2-biases", "kimi_linear", "lfm2_moe", "granite-h", "nemotron_h-latent"])
def test_random_weights_are_those_of_a_model_that_runs(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "saved", architecture, **options)
    made = write_checkpoint(tmp_path / "made", json.loads((folder / "config.json").read_text()))
    assert chunked_logits(load_model(made), PROMPT, 37).isfinite().all()


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "nemotron_h")
    before = chunked_logits(load_model(folder), PROMPT, 37)
    edit_tensors(folder, **{"mtp.layers.0.norm.weight": torch.zeros(64), "mtp.layers.0.eh_proj.weight": torch.zeros(4)})
    model = load_model(folder)
    assert torch.equal(chunked_logits(model, PROMPT, 37), before)
    assert "2 tensors" in model.notes[0] and "predict further tokens are not loaded" in model.notes[0]


BAD: dict[str, tuple[str, dict[str, Any], str]] = {
    "types": ("lfm2", {"layer_types": ["conv"]}, "'layer_types' must be 3 of 'conv' or 'full_attention'"),
    "no attention": ("lfm2", {"layer_types": ["conv"] * 3}, "at least one is 'full_attention'"),
    "other types": ("lfm2", {"layer_types": ["mamba", "conv", "full_attention"]}, "'layer_types' must be 3 of"),
    "taps": ("lfm2", {"conv_L_cache": 40}, "'conv_L_cache' must be a whole number from 2 to 16"),
    "eps": ("lfm2", {"norm_eps": 1.0}, "'norm_eps'"),
    "experts": ("lfm2", {"num_experts": 4}, "'num_experts' is 4"),
    "kinds": ("granitemoehybrid", {"layer_types": ["mamba"] * 3}, "at least one is attention"),
    "limits": ("granitemoehybrid", {"time_step_limit": [0.001, 0.1]}, "'time_step_limit' is"),
    "older limits": ("nemotron_h", {"mamba_dt_limit": [0.001, 0.1]}, "'time_step_limit' is"),
    "groups": (
        "granitemoehybrid",
        {"mamba_n_groups": 3},
        r"'mamba_n_heads' must be a multiple of mamba_n_groups \(3\)",
    ),
    "head": ("granitemoehybrid", {"mamba_d_head": 32}, "'mamba_d_head' is 32"),
    "letters": (
        "nemotron_h",
        {"layers_block_type": ..., "hybrid_override_pattern": "M*X"},
        "1024 letters of M",
    ),
    "no layers": ("nemotron_h", {"layers_block_type": ...}, "'hybrid_override_pattern' must be a string"),
    "names": ("nemotron_h", {"layers_block_type": ["mamba", "moe"]}, "at least one is attention"),
    "activation": ("nemotron_h", {"mlp_hidden_act": "silu"}, "'mlp_hidden_act' is 'silu'"),
    "width": ("nemotron_h", {"attention_head_dim": 32}, "'attention_head_dim' is 32"),
    "stream": ("nemotron_h", {"residual_in_fp32": True}, "'residual_in_fp32' is True"),
    "positions": ("kimi_linear", {"mla_use_nope": False}, "'mla_use_nope' is False"),
    "drafting": ("kimi_linear", {"num_nextn_predict_layers": 1}, "'num_nextn_predict_layers' is 1"),
    "twice": (
        "kimi_linear",
        {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 2]}},
        "'full_attn_layers' must be with kda_layers each of the layers 1 to 3, once",
    ),
    "all linear": ("kimi_linear", {"layer_types": ["linear_attention"] * 3}, "at least one is 'full_attention'"),
    "routing": ("lfm2_moe", {"num_experts_per_tok": 9}, "'num_experts_per_tok'"),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder for each architecture, made when it is asked for."""
    made: dict[str, Path] = {}

    def of(architecture: str) -> Path:
        if architecture not in made:
            options = MIXED if architecture == "granitemoehybrid" else {}
            made[architecture] = save_checkpoint(tmp_path_factory.mktemp(architecture), architecture, **options)
        return made[architecture]

    return of


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_is_not_supported_is_refused_by_the_fields_name(
    case: str, saved: Callable[[str], Path]
) -> None:
    architecture, edit, words = BAD[case]
    file = saved(architecture) / "config.json"
    before = file.read_text()
    edit_json(file, edit)
    try:
        with pytest.raises(ModelConfigError, match=words):
            load_model(file.parent)
    finally:
        file.write_text(before)


def test_inspect_says_what_a_request_keeps_in_recurrent_layers(saved: Callable[[str], Path]) -> None:
    found = describe(saved("lfm2"), 1 << 34, None)
    assert found["state_bytes"] == 2 * 2 * 16 * 64 * 2, "two blocks of two layers, 16 inputs of 64 numbers in bf16"
    assert found["kv_bytes_per_token"]["bf16"] == 2 * 2 * 16 * 2, "of the one layer with attention"


# -- kernels that only these have ---------------------------------------------------------------------------------

IMPLEMENTATIONS = [*library.usable(), "torch"]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_norm_of_groups_is_each_ones(name: str) -> None:
    generator, kernels = torch.Generator().manual_seed(0), choose_kernels(name)
    x, weight = drawn(generator, 5, 120), drawn(generator, 120)
    found = kernels.grouped_norm(x, weight, 3, 1e-5, torch.float32)
    parts = torch.nn.functional.rms_norm(x.view(5, 3, 40).double(), (40,), eps=1e-5)
    torch.testing.assert_close(found.double(), parts.flatten(1) * weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(kernels.grouped_norm(x[2:3], weight, 3, 1e-5, torch.float32), found[2:3])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_squared_relu_is_exact_and_keeps_what_is_not_a_number(dtype: torch.dtype, name: str) -> None:
    x = (3 * drawn(torch.Generator().manual_seed(0), 4, 37)).to(dtype)
    x[1, 36] = torch.nan
    found = choose_kernels(name).activate(x, "relu2")
    expected = x.double().relu().square().to(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", [None, "int8", "int4"], ids=str)
@pytest.mark.parametrize("name", library.usable())
def test_experts_without_a_gate_are_those_one_by_one(name: str, how: Quantization | None) -> None:
    kernels, generator = choose_kernels(name), torch.Generator().manual_seed(0)

    def products(outputs: int, inputs: int) -> list[Product]:
        weights = [drawn(generator, outputs, inputs) / 8 for _ in range(4)]
        if how is None:
            return [kernels.pack([weight.bfloat16()]) for weight in weights]
        return [kernels.pack_coded([coded(weight, how)]) for weight in weights]

    up, down = products(96, 64), products(64, 96)
    x, weights = drawn(generator, 30, 64).bfloat16(), drawn(generator, 30, 2).abs()
    ids = torch.tensor([sorted(random.Random(row).sample(range(4), 2)) for row in range(30)])
    found = kernels.experts(up, down, None, "relu2")(x, ids, weights)
    assert torch.equal(found, LoopedExperts(up, down, None, "relu2")(x, ids, weights))
    with pytest.raises(ValueError, match="are not experts' gate_up and down"):
        kernels.experts(up, down)


# -- the engine ----------------------------------------------------------------------------------------------------

ENGINES: dict[str, dict[str, Any]] = {
    "lfm2": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]},
    "kimi_linear": {
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "granitemoehybrid": {**MIXED, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {"moe_latent_size": 32, "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"]},
}
"""Models that go through all switches: as few layers as show."""


@pytest.fixture(scope="module", params=ENGINES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    return str(save_checkpoint(path, request.param, dtype=torch.bfloat16, **ENGINES[request.param]))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[int, Any]:
    return each_alone({"model": folder, "threads": 1}, ORDER)


@pytest.mark.quick("lfm2", "kimi_linear")
def test_nothing_around_a_request_changes_its_tokens(folder: str, alone: dict[int, Any]) -> None:
    check_switches(folder, alone)


@pytest.mark.quick("lfm2")
def test_drafts_change_no_token(folder: str, alone: dict[int, Any]) -> None:
    check_drafts(folder, alone)


@pytest.mark.quick("lfm2", "nemotron_h")
def test_a_new_engine_goes_on_with_a_reply_in_mid_tile(folder: str) -> None:
    check_resumption(folder)


def test_what_is_cached_changes_no_token_and_is_used(folder: str) -> None:
    """At the end of an equal prompt, and from the third request on where prompts leave one another."""
    common = {"model": folder, "threads": 1, "max_model_len": 512, "check_invariants": True}
    with_cache, without = Engine(EngineConfig(**common)), Engine(EngineConfig(**common, prefix_cache="off"))
    head = random_prompt(170, seed=1)
    prompts = [head + random_prompt(40, seed=seed) for seed in range(2, 5)]
    found = []
    for number, prompt in enumerate([*prompts, prompts[0]]):
        tokens, cached = greedy_in(with_cache, number, prompt)
        assert (tokens, 0) == greedy_in(without, number, prompt)
        found.append(cached)
    assert found[0] == 0 and found[2] >= 160 and found[3] == 209


TWO, STAGES = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
OTHERS = [(name, ranks) for name in ENGINES for ranks in (TWO, STAGES) if (name, ranks) != ("granitemoehybrid", TWO)]


@pytest.mark.parametrize(
    ("folder", "ranks"),
    [("granitemoehybrid", TWO), *(pytest.param(*other, marks=pytest.mark.slow) for other in OTHERS)],
    indirect=["folder"],
)
def test_ranks_change_nothing(ranks: dict[str, Any], folder: str, alone: dict[int, Any]) -> None:
    check_ranks(folder, alone, ranks)


def test_ranks_that_would_cut_a_head_or_a_group_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "nemotron_h")
    for size in (1, 2, 4):
        registry.check_ranks(folder, size)  # ranks may share a group
    edit_json(folder / "config.json", {"mamba_num_heads": 6, "n_groups": 3})
    with pytest.raises(ConfigError, match=r"and the 6 heads and 3 groups of its recurrent layers; allowed: 1$"):
        registry.check_ranks(folder, 2)


@pytest.mark.quick("lfm2")
def test_plain_torch_changes_nothing_either(folder: str) -> None:
    check_other_kernels(folder, "torch", ORDER[:2] + ORDER[6:])


def test_what_is_not_there_yet_is_refused(folder: str) -> None:
    check_refusals(folder)
