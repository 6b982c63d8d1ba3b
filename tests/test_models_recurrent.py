"""Models with recurrent layers: transformers' logits, the rule itself, and that nothing changes a bit."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelConfigError, TensorShapeError
from quire.models.quantize import quantize_folder
from quire.models.random_checkpoint import write_checkpoint
from quire.models.registry import load_model
from quire.ops import Kernels, Quantization, RaggedBatch, choose_kernels
from quire.ops.cpu import library
from quire.ops.states import DeltaNetWeights, Gate, StateCache, StateShape
from tests import test_determinism as product
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
SECTIONS = {
    "rope_type": "default",
    "rope_theta": 5000.0,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_next": ("qwen3_next", {}),
    "qwen3_next-some-dense": ("qwen3_next", {"mlp_only_layers": [1], "norm_topk_prob": False}),
    "qwen3_next-dense": ("qwen3_next", {"num_experts": 0}),
    "qwen3_5": ("qwen3_5", {"text": "qwen3_5_text", "rope_parameters": SECTIONS}),
    "qwen3_5_text": ("qwen3_5_text", {"tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3_5_moe": ("qwen3_5_moe", {"text": "qwen3_5_moe_text", "rope_parameters": SECTIONS}),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", {"linear_num_key_heads": 4}),
}
TWO = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}


@pytest.mark.parametrize("case", FAMILIES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    reference, model = load_reference(folder), load_model(folder)
    expected = reference_logits(reference, PROMPT)
    assert expected.abs().max() > 0.5, "the logits tell models apart"
    # What differs is the error of transformers' chunks as much as ours, which grows with a logit.
    torch.testing.assert_close(chunked_logits(model, PROMPT, 37), expected, rtol=2e-5, atol=1e-4)
    output = greedy(model, PROMPT, 64)
    assert output == reference_choices(reference, PROMPT, output)


@pytest.mark.parametrize("architecture", ["qwen3_5_text", "qwen3_next"])
def test_a_half_precision_model_errs_no_more_than_transformers(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture, dtype=torch.bfloat16)
    exact = reference_logits(load_reference(folder), PROMPT)
    theirs = reference_logits(load_reference(folder, torch.bfloat16), PROMPT)
    ours = chunked_logits(load_model(folder, "bfloat16"), PROMPT, 37)
    assert (ours - exact).square().mean().sqrt() < 1.1 * (theirs - exact).square().mean().sqrt()


def test_layers_that_predict_further_tokens_are_passed_over(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_next")
    before = chunked_logits(load_model(folder), PROMPT, 37)
    edit_tensors(folder, **{"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)})
    model = load_model(folder)
    assert torch.equal(chunked_logits(model, PROMPT, 37), before)
    assert "2 tensors" in model.notes[0] and "predict further tokens are not loaded" in model.notes[0]


@pytest.mark.parametrize("case", ["qwen3_next", "qwen3_5_moe_text"])
def test_a_quantized_folder_is_read_as_it_was_quantized(case: str, tmp_path: Path) -> None:
    architecture, options = FAMILIES[case]
    folder = save_checkpoint(tmp_path / "model", architecture, **options)
    quantize_folder(folder, tmp_path / "int4", Quantization("int4", 32))
    here = load_model(folder, quantization="int4", group=32)
    assert torch.equal(chunked_logits(load_model(tmp_path / "int4"), PROMPT, 37), chunked_logits(here, PROMPT, 37))


@pytest.mark.parametrize("architecture", ["qwen3_next", "qwen3_5_text"])
def test_random_weights_are_those_of_a_model_that_runs(architecture: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "saved", architecture)
    made = write_checkpoint(tmp_path / "made", json.loads((folder / "config.json").read_text()))
    assert chunked_logits(load_model(made), PROMPT, 37).isfinite().all()


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "layer_types": ({"layer_types": ["linear_attention"]}, "'layer_types' must be 3 of 'linear_attention' or"),
    "attention": ({"layer_types": ["linear_attention"] * 3}, "at least one is 'full_attention'"),
    "heads": ({"linear_num_value_heads": 3}, r"a multiple of linear_num_key_heads \(2\)"),
    "taps": ({"linear_conv_kernel_dim": 1}, "'linear_conv_kernel_dim'"),
    "bias": ({"attention_bias": True}, "'attention_bias' is True"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_configuration_that_is_not_supported_is_refused_by_the_fields_name(case: str, tmp_path: Path) -> None:
    edit, words = BAD[case]
    folder = save_checkpoint(tmp_path, "qwen3_next", edit=edit)
    with pytest.raises(ModelConfigError, match=words):
        load_model(folder)


def test_tensors_of_other_sizes_than_the_configuration_says_are_refused(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "qwen3_next")
    edit_json(folder / "config.json", {"linear_value_head_dim": 32})
    with pytest.raises(TensorShapeError, match=r"in_proj_qkvz.weight.*of 2 heads, which have"):
        load_model(folder)


# -- the rule ------------------------------------------------------------------------------------------------------

SHAPE = StateShape(2, 2, 4, 32, 40, 4, torch.float32, 16)
SHAPES = {"": SHAPE, "-by-channel": replace(SHAPE, key_heads=4, decay_dim=32)}
"""Of a gated delta net, and of Kimi delta attention."""
IMPLEMENTATIONS = [*library.usable(), "torch"]


def implementation(name: str) -> Kernels:
    return choose_kernels(name)


class Sequences:
    """Spans of some requests through one layer, as an engine would have them, with blocks anywhere."""

    def __init__(self, kernels: Kernels, shape: StateShape, length: int, requests: int = 1, seed: int = 0) -> None:
        self.kernels, self.shape, self.length = kernels, shape, length
        generator = torch.Generator().manual_seed(seed)
        width = shape.channels + shape.heads * shape.value_dim

        def drawn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator)

        self.x = drawn(requests, length, width).to(shape.dtype)
        self.ab, decays = drawn(requests, length, shape.rates), shape.heads * shape.decay_dim
        conv, decay, shift = 0.5 * drawn(shape.taps, shape.channels), -torch.exp(3 * drawn(decays) - 2), drawn(decays)
        gate: Gate = "silu" if shape.decay_dim == 1 else "sigmoid"
        self.weights = DeltaNetWeights(conv, decay, shift, 1 + drawn(shape.value_dim), 1e-6, gate)
        each = -(-length // shape.block_size)
        self.cache = StateCache(1 + each * requests, shape)
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
        size = self.shape.block_size
        width = max(-(-end // size) for _, _, end in spans)
        tables = self.tables[[request for request, _, _ in spans], :width].clone()
        batch = RaggedBatch(
            token_ids=torch.zeros(starts[-1], dtype=torch.int64),
            positions=torch.cat([torch.arange(start, end) for _, start, end in spans]),
            slots=torch.zeros(starts[-1], dtype=torch.int64),
            row_starts=starts,
            context_lens=[end for _, _, end in spans],
            block_tables=tables,
            block_size=size,
        )
        ab = torch.cat([self.ab[r, start:end] for r, start, end in spans])
        with self.kernels.threads(2), torch.inference_mode():
            out = self.kernels.delta_net(inputs, ab, self.weights, self.cache, batch, 1)
        return list(torch.split(out, [end - start for _, start, end in spans]))

    def whole(self, request: int = 0) -> torch.Tensor:
        [out] = self.step([(request, 0, self.length)])
        return out


def by_the_recurrence(sequences: Sequences, request: int = 0) -> torch.Tensor:
    """The layer in float64: transformers' convolution, recurrence, norm and gate."""
    shape, weights = sequences.shape, sequences.weights
    x, ab = sequences.x[request].double(), sequences.ab[request].double()
    mixed, gate = x[:, : shape.channels], x[:, shape.channels :]
    padded = torch.nn.functional.pad(mixed.T[None], (shape.taps - 1, 0))
    conv = torch.nn.functional.conv1d(padded, weights.conv.double().T[:, None], groups=shape.channels)[0].T
    keys = shape.key_heads * shape.key_dim
    q, k, v = torch.split(torch.nn.functional.silu(conv), [keys, keys, shape.heads * shape.value_dim], dim=1)
    a, b = ab.split([shape.heads * shape.decay_dim, shape.heads], dim=1)
    g = weights.decay.double() * torch.nn.functional.softplus(a + weights.shift.double())
    heads = [part.view(1, len(x), -1, size) for part, size in ((q, 32), (k, 32), (v, 40))]
    heads = [*(part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in heads[:2]), heads[2]]
    if shape.decay_dim == 1:
        out, _ = torch_recurrent_gated_delta_rule(*heads, g=g[None], beta=b.sigmoid()[None])
    else:
        settings = {"initial_state": None, "output_final_state": False}
        by_channel = g.view(1, len(x), shape.heads, shape.decay_dim)
        out, _ = recurrent_kimi_delta_attention(*heads, g=by_channel, beta=b.sigmoid()[None], **settings)
    out = out[0].double()
    normed = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + weights.eps) * weights.norm.double()
    through = torch.nn.functional.silu if weights.gate == "silu" else torch.sigmoid
    return (normed * through(gate.view_as(out))).flatten(1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_rule_is_the_recurrence(name: str, shape: str) -> None:
    sequences = Sequences(implementation(name), SHAPES[shape], 150)
    torch.testing.assert_close(sequences.whole().double(), by_the_recurrence(sequences), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_no_cut_no_neighbour_and_no_rejected_row_changes_a_bit(name: str, block_size: int, kind: str) -> None:
    """Rows that are rejected later, and what lies in blocks that nobody has written, are not numbers."""
    kernels, rnd = implementation(name), random.Random(block_size)
    length, times = (70 if kind == "" else 37, 1) if name == "torch" else (200, 10 if kind == "" else 3)
    shape = replace(SHAPES[kind], block_size=block_size, dtype=torch.bfloat16)
    alone = Sequences(kernels, shape, length, requests=3)
    expected = [alone.whole(request) for request in range(3)]
    for _ in range(times):
        sequences = Sequences(kernels, shape, length, requests=3)
        places, found = [0, 0, 0], [[], [], []]
        while min(places) < length:
            spans, inputs, kept = [], [], []
            for request in rnd.sample(range(3), 3):
                start = places[request]
                if start == length or rnd.random() < 0.3:
                    continue
                end = min(length, start + rnd.choice([1, 1, 2, 5, 16, 17, 40]))
                drafts = rnd.choice([0, 0, 3, 20])
                last = min(length, end + drafts)
                spans.append((request, start, last))
                poison = torch.full_like(sequences.x[request, end:last], float("nan"))
                inputs.append(torch.cat([sequences.x[request, start:end], poison]))
                kept.append(end - start)
                places[request] = end
            if not spans:
                continue
            for (request, _, _), count, out in zip(spans, kept, sequences.step(spans, torch.cat(inputs)), strict=True):
                found[request].append(out[:count])
        for request in range(3):
            assert torch.equal(torch.cat(found[request]), expected[request])


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_blocks_that_are_not_there_are_neither_read_nor_written(name: str) -> None:
    sequences = Sequences(implementation(name), SHAPE, 100)
    expected = sequences.whole()
    sequences.cache.memory.fill_(255)
    sequences.tables[0, :4] = 0  # the state after 80 tokens is there, those before it are not
    found = sequences.step([(0, 0, 83)]) + sequences.step([(0, 83, 100)])
    assert torch.equal(torch.cat(found), expected)
    assert (sequences.cache.memory[0] == 255).all()


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_rows_of_a_block_can_be_copied(name: str) -> None:
    """A prompt that leaves another one in mid-block goes on from its rows."""
    sequences = Sequences(implementation(name), SHAPE, 64)
    expected, before = sequences.whole(), sequences.tables[0, 2].item()
    spare = StateCache(sequences.cache.num_blocks + 1, SHAPE)
    spare.memory.fill_(255)
    spare.memory[:-1] = sequences.cache.memory
    spare.copy([(before, spare.num_blocks - 1, 9)])
    sequences.cache, sequences.tables[0, 2] = spare, spare.num_blocks - 1
    assert torch.equal(sequences.step([(0, 41, 64)])[0], expected[41:])


def test_trees_are_refused() -> None:
    sequences = Sequences(choose_kernels("torch"), SHAPE, 16)
    batch = RaggedBatch(*[torch.zeros(1, dtype=torch.int64)] * 3, [0, 1], [1], torch.ones(1, 1, dtype=torch.int64), 16)
    batch.trees = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="draft without trees"):
        sequences.kernels.delta_net(
            sequences.x[0, :1], sequences.ab[0, :1], sequences.weights, sequences.cache, batch, 0
        )


# -- the engine ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_5_text", dtype=torch.bfloat16, **TWO))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[int, Any]:
    return each_alone({"model": folder, "threads": 1}, ORDER)


def test_nothing_around_a_request_changes_its_tokens(folder: str, alone: dict[int, Any]) -> None:
    check_switches(folder, alone)


def test_drafts_change_no_token(folder: str, alone: dict[int, Any]) -> None:
    check_drafts(folder, alone)


def test_a_new_engine_goes_on_with_a_reply_in_mid_tile(folder: str) -> None:
    check_resumption(folder)


def test_hits_at_a_prompts_end_at_a_branch_and_at_periodic_marks(folder: str) -> None:
    common = {"model": folder, "threads": 1, "max_model_len": 512, "check_invariants": True}
    with_cache, without = Engine(EngineConfig(**common)), Engine(EngineConfig(**common, prefix_cache="off"))
    interval = 16 * with_cache.scheduler.kv.groups[1].states.interval
    assert interval == 160, "keys of so many tokens are as large as a state"
    head = random_prompt(200, seed=1)
    prompts = [head + random_prompt(40, seed=seed) for seed in range(2, 6)]
    prompts += [prompts[0], head[:175] + random_prompt(30, seed=9)]
    found = []
    for id, prompt in enumerate(prompts):
        tokens, cached = greedy_in(with_cache, id, prompt)
        assert (tokens, 0) == greedy_in(without, id, prompt)
        found.append(cached)
    assert found == [0, 160, 192, 192, 239, 160]


def test_the_plan_says_what_states_take_and_how_many_requests_fit(folder: str) -> None:
    engine = Engine(EngineConfig(model=folder, threads=1, kv_cache_memory="2MiB"))
    assert engine.config.max_num_seqs < 64 and engine.scheduler.config.max_num_seqs == engine.config.max_num_seqs
    [note] = [note for note in engine.notes if "max_num_seqs is" in note]
    assert f"max_num_seqs is {engine.config.max_num_seqs}, not 64" in note
    assert dict(engine.memory_plan.table())["recurrent states"].endswith("the rest is cache")
    assert engine.memory_plan.kv_bytes <= 2 * 2**20
    for index in ORDER:
        engine.add(Request(index, product.prompts()[index], product.params(index), max_tokens=4))
    while not engine.idle:
        assert all(update.error is None for update in engine.step())


def test_what_is_not_there_yet_is_refused(folder: str) -> None:
    check_refusals(folder)


@pytest.mark.parametrize(
    "ranks", [{"tensor_parallel_size": 2}, pytest.param({"pipeline_parallel_size": 2}, marks=pytest.mark.slow)]
)
def test_ranks_change_nothing(ranks: dict[str, Any], folder: str, alone: dict[int, Any]) -> None:
    check_ranks(folder, alone, ranks)


@pytest.mark.parametrize("isa", [*library.usable()[1:], "torch"])
@pytest.mark.slow
def test_nothing_around_a_request_changes_its_tokens_on_other_instruction_sets(isa: str, folder: str) -> None:
    check_other_kernels(folder, isa, ORDER[:3] + ORDER[5:])


def test_ranks_that_would_cut_a_head_are_refused(folder: str) -> None:
    with pytest.raises(ConfigError, match=r"and the 2 key heads of its recurrent layers; allowed: 1, 2"):
        Engine(EngineConfig(model=folder, threads=1, tensor_parallel_size=4))
