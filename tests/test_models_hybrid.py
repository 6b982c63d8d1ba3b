"""Short convolutions and Mamba 2: transformers' logits, the layers themselves, and that nothing changes a bit."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.bamba.modeling_bamba import mamba2_selective_state_update

from quire.cli.inspect import describe
from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelConfigError
from quire.models import registry
from quire.models.quantize import quantize_folder
from quire.models.random_checkpoint import write_checkpoint
from quire.models.registry import load_model
from quire.ops import Kernels, Quantization, RaggedBatch, choose_kernels, self_test
from quire.ops.cpu import library
from quire.ops.experts import LoopedExperts
from quire.ops.linear import Product
from quire.ops.mamba import MambaWeights
from quire.ops.recurrent import RecurrentCache, RecurrentShape
from quire.ops.short_conv import ConvShape, ShortConvWeights
from quire.ops.states import StateCache, StateShape
from tests.oracle import (
    chunked_logits,
    edit_json,
    greedy,
    load_reference,
    random_prompt,
    reference_choices,
    reference_logits,
    save_checkpoint,
)
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
    reference, model = load_reference(folder), load_model(folder)
    expected = reference_logits(reference, PROMPT)
    assert expected.abs().max() > 0.5, "the logits tell models apart"
    torch.testing.assert_close(chunked_logits(model, PROMPT, 37), expected, rtol=0, atol=1e-4)
    output = greedy(model, PROMPT, 64)
    assert output == reference_choices(reference, PROMPT, output)


@pytest.mark.parametrize("case", ["lfm2", "kimi_linear", "granite-h", "nemotron_h"])
def test_a_half_precision_model_errs_no_more_than_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16, **options)
    exact = reference_logits(load_reference(folder), PROMPT)
    theirs = reference_logits(load_reference(folder, torch.bfloat16), PROMPT)
    ours = chunked_logits(load_model(folder, "bfloat16"), PROMPT, 37)
    assert (ours - exact).square().mean().sqrt() < 1.1 * (theirs - exact).square().mean().sqrt()


@pytest.mark.parametrize(
    "case", ["lfm2", "kimi_linear-plain", "lfm2_moe", "granite-h-older", "granite-h-experts", "nemotron_h-latent"]
)
def test_a_quantized_folder_is_read_as_it_was_quantized(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "model", architecture, **options)
    quantize_folder(folder, tmp_path / "int4", Quantization("int4", 32))
    here = load_model(folder, quantization="int4", group=32)
    assert torch.equal(chunked_logits(load_model(tmp_path / "int4"), PROMPT, 37), chunked_logits(here, PROMPT, 37))


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


# -- the layers ----------------------------------------------------------------------------------------------------

IMPLEMENTATIONS = [*library.usable(), "torch"]
Step = Callable[[Kernels, torch.Tensor, RecurrentCache, RaggedBatch], torch.Tensor]


class Kind:
    """One kind of recurrent layer, with random weights.

    Attributes:
        width: columns of its input.
        step: its kernel, of layer 1 of 2.
    """

    def __init__(self, shape: RecurrentShape, width: int, step: Step) -> None:
        self.shape, self.width, self.step = shape, width, step


def drawn(generator: torch.Generator, *size: int) -> torch.Tensor:
    return torch.randn(*size, generator=generator)


def conv_kind(block_size: int = 16, dtype: torch.dtype = torch.float32) -> Kind:
    generator = torch.Generator().manual_seed(1)
    shape = ConvShape(2, 40, dtype, block_size)
    weights = ShortConvWeights(drawn(generator, 4, 40), drawn(generator, 40))
    return Kind(shape, 120, lambda kernels, x, cache, batch: kernels.short_conv(x, weights, cache, batch, 1))


def mamba_weights(shape: StateShape) -> MambaWeights:
    generator = torch.Generator().manual_seed(2)
    conv, bias = 0.5 * drawn(generator, shape.taps, shape.channels), drawn(generator, shape.channels)
    decay = -torch.exp(3 * drawn(generator, shape.heads) - 2)  # heads that forget at once, and that hardly do
    return MambaWeights(conv, bias, decay, drawn(generator, shape.heads), drawn(generator, shape.heads))


def mamba_kind(block_size: int = 16, dtype: torch.dtype = torch.float32) -> Kind:
    shape = StateShape(2, 2, 6, 20, 40, 4, dtype, block_size)
    weights, heads = mamba_weights(shape), shape.heads

    def step(kernels: Kernels, x: torch.Tensor, cache: RecurrentCache, batch: RaggedBatch) -> torch.Tensor:
        assert isinstance(cache, StateCache)
        return kernels.mamba(x[:, heads:].contiguous(), x[:, :heads].float(), weights, cache, batch, 1)

    return Kind(shape, heads + shape.channels + heads * shape.value_dim, step)


KINDS = {"short convolution": conv_kind, "Mamba": mamba_kind}


class Sequences:
    """Spans of some requests through one layer, as an engine would have them, with blocks anywhere."""

    def __init__(self, kernels: Kernels, kind: Kind, length: int, requests: int = 1, seed: int = 0) -> None:
        self.kernels, self.kind, self.length = kernels, kind, length
        shape, generator = kind.shape, torch.Generator().manual_seed(seed)
        self.x = drawn(generator, requests, length, kind.width).to(shape.dtype)
        each = -(-length // shape.block_size)
        self.cache = shape.cache(1 + each * requests)
        self.cache.memory.fill_(255)  # NaN everywhere: what is read before it is written shows
        order = list(range(1, 1 + each * requests))
        random.Random(seed).shuffle(order)
        self.tables = torch.tensor(order).view(requests, each)

    def step(self, spans: list[tuple[int, int, int]], x: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Spans (request, start, end); `x`: inputs in place of the requests' own."""
        inputs = x if x is not None else torch.cat([self.x[r, start:end] for r, start, end in spans])
        starts = [0]
        for _, start, end in spans:
            starts.append(starts[-1] + end - start)
        size = self.kind.shape.block_size
        width = max(-(-end // size) for _, _, end in spans)
        batch = RaggedBatch(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]),
            slots=torch.zeros(starts[-1], dtype=torch.int64),
            row_starts=starts,
            context_lens=[end for _, _, end in spans],
            block_tables=self.tables[[request for request, _, _ in spans], :width].clone(),
            block_size=size,
        )
        with self.kernels.threads(2), torch.inference_mode():
            out = self.kind.step(self.kernels, inputs, self.cache, batch)
        return list(torch.split(out, [end - start for _, start, end in spans]))

    def whole(self, request: int = 0) -> torch.Tensor:
        [out] = self.step([(request, 0, self.length)])
        return out

    def random_steps(self, rnd: random.Random) -> list[torch.Tensor]:
        """All of each request in random spans, beside others in any order, with rejected rows that are no numbers."""
        places = [0] * len(self.x)
        found: list[list[torch.Tensor]] = [[] for _ in places]
        while min(places) < self.length:
            spans, inputs, kept = [], [], []
            for request in rnd.sample(range(len(places)), len(places)):
                start = places[request]
                if start == self.length or rnd.random() < 0.3:
                    continue
                end = min(self.length, start + rnd.choice([1, 1, 2, 5, 16, 17, 40]))
                last = min(self.length, end + rnd.choice([0, 0, 3, 20]))
                spans.append((request, start, last))
                poison = torch.full_like(self.x[request, end:last], float("nan"))
                inputs.append(torch.cat([self.x[request, start:end], poison]))
                kept.append(end - start)
                places[request] = end
            if spans:
                outs = self.step(spans, torch.cat(inputs))
                for (request, _, _), count, out in zip(spans, kept, outs, strict=True):
                    found[request].append(out[:count])
        return [torch.cat(parts) for parts in found]


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_short_convolution_is_gated_twice(name: str) -> None:
    sequences = Sequences(choose_kernels(name), conv_kind(), 50)
    generator = torch.Generator().manual_seed(1)
    conv, bias = drawn(generator, 4, 40).double(), drawn(generator, 40).double()
    first, last, inner = sequences.x[0].double().chunk(3, dim=1)
    padded = torch.nn.functional.pad((first * inner).T[None], (3, 0))
    expected = last * torch.nn.functional.conv1d(padded, conv.T[:, None], bias, groups=40)[0].T
    torch.testing.assert_close(sequences.whole().double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_mamba_is_transformers_recurrence(name: str) -> None:
    sequences = Sequences(choose_kernels(name), mamba_kind(), 150)
    shape = sequences.kind.shape
    assert isinstance(shape, StateShape)
    weights, x = mamba_weights(shape), sequences.x[0].double()
    dt, inputs, gate = torch.split(x, [shape.heads, shape.channels, shape.heads * shape.value_dim], dim=1)
    padded = torch.nn.functional.pad(inputs.T[None], (shape.taps - 1, 0))
    conv = weights.conv.double().T[:, None], weights.bias.double()
    mixed = torch.nn.functional.silu(torch.nn.functional.conv1d(padded, *conv, groups=shape.channels)[0].T)
    keys = shape.key_heads * shape.key_dim
    c, b, values = torch.split(mixed, [keys, keys, shape.heads * shape.value_dim], dim=1)
    state, found = torch.zeros(1, shape.heads, shape.value_dim, shape.key_dim, dtype=torch.float64), []
    wide = [part.double()[:, None].expand(-1, shape.value_dim) for part in (weights.skip, weights.shift)]
    decay = weights.decay.double()[:, None, None].expand(-1, shape.value_dim, shape.key_dim)
    for row in range(len(x)):
        token = values[row].view(1, shape.heads, shape.value_dim)
        step = dt[row].view(1, -1, 1).expand(-1, -1, shape.value_dim)
        by_group = [part[row].view(1, shape.key_heads, shape.key_dim) for part in (b, c)]
        found.append(
            mamba2_selective_state_update(state, token, step, decay, *by_group, *wide, dt_softplus=True).flatten()
        )
    expected = torch.stack(found) * torch.nn.functional.silu(gate)
    largest = float(expected.abs().max())
    torch.testing.assert_close(sequences.whole().double(), expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_norm_of_groups_is_each_ones(name: str) -> None:
    generator, kernels = torch.Generator().manual_seed(0), choose_kernels(name)
    x, weight = drawn(generator, 5, 120), drawn(generator, 120)
    found = kernels.grouped_norm(x, weight, 3, 1e-5, torch.float32)
    parts = torch.nn.functional.rms_norm(x.view(5, 3, 40).double(), (40,), eps=1e-5)
    torch.testing.assert_close(found.double(), parts.flatten(1) * weight, rtol=1e-5, atol=1e-6)
    assert torch.equal(kernels.grouped_norm(x[2:3], weight, 3, 1e-5, torch.float32), found[2:3])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_no_cut_no_neighbour_and_no_rejected_row_changes_a_bit(kind: str, block_size: int, name: str) -> None:
    kernels, rnd = choose_kernels(name), random.Random(block_size)
    length, times = (70, 1) if name == "torch" else (200, 10)
    made = KINDS[kind](block_size, torch.bfloat16)
    alone = Sequences(kernels, made, length, requests=3)
    expected = [alone.whole(request) for request in range(3)]
    for _ in range(times):
        found = Sequences(kernels, made, length, requests=3).random_steps(rnd)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_are_not_there_are_neither_read_nor_written(kind: str, name: str) -> None:
    sequences = Sequences(choose_kernels(name), KINDS[kind](), 100)
    expected = sequences.whole()
    sequences.cache.memory.fill_(255)
    sequences.tables[0, :4] = 0  # the blocks at the end are there, those before them are not
    found = sequences.step([(0, 0, 83)]) + sequences.step([(0, 83, 100)])
    assert torch.equal(torch.cat(found), expected)
    assert (sequences.cache.memory[0] == 255).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_block_can_be_copied(kind: str, name: str) -> None:
    """A prompt that leaves another one in mid-block goes on from its rows."""
    sequences = Sequences(choose_kernels(name), KINDS[kind](), 64)
    expected, before = sequences.whole(), int(sequences.tables[0, 2])
    spare = sequences.kind.shape.cache(sequences.cache.num_blocks + 1)
    spare.memory.fill_(255)
    spare.memory[:-1] = sequences.cache.memory
    spare.copy([(before, spare.num_blocks - 1, 9)])
    sequences.cache, sequences.tables[0, 2] = spare, spare.num_blocks - 1
    assert torch.equal(sequences.step([(0, 41, 64)])[0], expected[41:])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_squared_relu_is_exact_and_keeps_what_is_not_a_number(dtype: torch.dtype, name: str) -> None:
    x = (3 * drawn(torch.Generator().manual_seed(0), 4, 37)).to(dtype)
    x[1, 36] = torch.nan
    found = choose_kernels(name).relu2(x)
    expected = x.double().relu().square().to(dtype)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("how", [None, Quantization("int8"), Quantization("int4", 32)], ids=str)
@pytest.mark.parametrize("name", library.usable())
def test_experts_without_a_gate_are_those_one_by_one(name: str, how: Quantization | None) -> None:
    kernels, generator = choose_kernels(name), torch.Generator().manual_seed(0)

    def products(outputs: int, inputs: int) -> list[Product]:
        weights = [drawn(generator, outputs, inputs) / 8 for _ in range(4)]
        if how is None:
            return [kernels.pack([weight.bfloat16()]) for weight in weights]
        return [kernels.pack_quantized(kernels.quantize(weight, how)) for weight in weights]

    up, down = products(96, 64), products(64, 96)
    x, weights = drawn(generator, 30, 64).bfloat16(), drawn(generator, 30, 2).abs()
    ids = torch.tensor([sorted(random.Random(row).sample(range(4), 2)) for row in range(30)])
    found = kernels.experts(up, down, None, "relu2")(x, ids, weights)
    assert torch.equal(found, LoopedExperts(up, down, None, "relu2")(x, ids, weights))
    with pytest.raises(ValueError, match="are not experts' gate_up and down"):
        kernels.experts(up, down)


def test_trees_and_inputs_of_other_widths_are_refused() -> None:
    sequences = Sequences(choose_kernels("torch"), conv_kind(), 16)
    batch = RaggedBatch(*[torch.zeros(1, dtype=torch.int64)] * 3, [0, 1], [1], torch.ones(1, 1, dtype=torch.int64), 16)
    with pytest.raises(ValueError, match="do not fit the rows of 2 layers"):
        sequences.kind.step(sequences.kernels, sequences.x[0, :1, :100], sequences.cache, batch)
    batch.trees = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="draft without trees"):
        sequences.kind.step(sequences.kernels, sequences.x[0, :1], sequences.cache, batch)


def test_quire_doctor_tries_the_layers() -> None:
    for of in (self_test.check_short_conv, self_test.check_mamba):
        check = of(choose_kernels("auto"), torch.bfloat16)
        assert check.passed and check.cases > 1


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


def test_nothing_around_a_request_changes_its_tokens(folder: str, alone: dict[int, Any]) -> None:
    check_switches(folder, alone)


def test_drafts_change_no_token(folder: str, alone: dict[int, Any]) -> None:
    check_drafts(folder, alone)


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


def test_plain_torch_changes_nothing_either(folder: str) -> None:
    check_other_kernels(folder, "torch", ORDER[:2] + ORDER[6:])


def test_what_is_not_there_yet_is_refused(folder: str) -> None:
    check_refusals(folder)
