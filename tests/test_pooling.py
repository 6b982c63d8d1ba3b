"""Embeddings and label scores of the engine: those of transformers, and the same whatever stands around a request."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire import LLM, EngineConfig, RequestError, SamplingParams
from quire.core.pooling import MOST, UNIT, PoolingParams
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError, EmbeddingModelError, ModelConfigError
from quire.models.checkpoint import resolve
from quire.models.dense import Dense
from quire.models.pooling import PoolingConfig
from quire.models.quantize import quantize_folder
from quire.runner.device import Device
from quire.runner.pooling import TOO_LARGE, launch_sum
from tests.oracle import edit_json, load_reference, random_prompt, save_checkpoint

PROMPTS = [random_prompt(length, length) for length in (1, 2, 17, 64, 150, 200)]
SHARED = [*PROMPTS, PROMPTS[-1][:120] + PROMPTS[3]]
PARAMS = SamplingParams(max_tokens=0, seed=0, speculate=False).resolved()
WAYS = [PoolingParams("last"), PoolingParams("mean"), PoolingParams("labels", (5, 9, 77))]


def declare(folder: Path, normalize: bool = True, dense: Sequence[tuple[int, int]] = (), **pooling: Any) -> Path:
    """Makes the folder an embedding model of Sentence Transformers, with dense layers of these inputs and outputs."""
    kinds = ["Transformer", "Pooling", *("Dense" for _ in dense), *(["Normalize"] if normalize else [])]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for place, (inputs, outputs) in enumerate(dense, start=2):
        (folder / f"{place}_Dense").mkdir(exist_ok=True)
        weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(place))
        save_file({"linear.weight": weight}, folder / f"{place}_Dense" / "model.safetensors")
        activation = {"activation_function": "torch.nn.modules.linear.Identity"}
        fields = {"in_features": inputs, "out_features": outputs, "bias": False, **activation}
        (folder / f"{place}_Dense" / "config.json").write_text(json.dumps(fields))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_lasttoken": True}))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("model"), "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="module")
def reference(checkpoint) -> list[torch.Tensor]:
    """Of each prompt, transformers' hidden states after the last norm."""
    model = load_reference(checkpoint).model
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


@pytest.mark.parametrize("method", ["last", "mean"])
@pytest.mark.parametrize("dimensions", [None, 16])
def test_embeddings_are_those_of_transformers(checkpoint, reference, tmp_path, method, dimensions):
    mode = {"last": "pooling_mode_lasttoken", "mean": "pooling_mode_mean_tokens"}[method]
    folder = declare(copy_of(checkpoint, tmp_path), **{mode: True, "word_embedding_dimension": 64})
    with LLM(str(folder), threads=1, max_num_batched_tokens=96) as llm:
        outputs = llm.embed(PROMPTS, dimensions=dimensions)
    for output, hidden in zip(outputs, reference, strict=True):
        pooled = (hidden[-1] if method == "last" else hidden.mean(0))[:dimensions]
        torch.testing.assert_close(torch.tensor(output.embedding), pooled / pooled.norm(), atol=2e-5, rtol=0)


def copy_of(checkpoint: Path, folder: Path) -> Path:
    for file in checkpoint.iterdir():
        (folder / file.name).symlink_to(file)
    return folder


def test_a_checkpoint_that_says_nothing_is_taken_as_vllm_takes_it(checkpoint, reference):
    """The last token, normalized; and one that normalizes nothing keeps its lengths."""
    with LLM(str(checkpoint), threads=1) as llm:
        [output] = llm.embed(PROMPTS[3])
    last = reference[3][-1]
    torch.testing.assert_close(torch.tensor(output.embedding), last / last.norm(), atol=2e-5, rtol=0)


def test_a_model_without_the_normalizing_module_keeps_lengths(checkpoint, reference, tmp_path):
    folder = declare(copy_of(checkpoint, tmp_path), normalize=False, pooling_mode="mean")
    with LLM(str(folder), threads=1) as llm:
        [output] = llm.embed(PROMPTS[4])
    torch.testing.assert_close(torch.tensor(output.embedding), reference[4].mean(0), atol=2e-5, rtol=0)


def pooled(engine: Engine, prompts: list[list[int]], ways: list[PoolingParams]) -> list[list[float]]:
    """What each prompt is pooled to, in each way, beside one that makes tokens."""
    found: dict[int, list[float]] = {}
    engine.add(Request(0, PROMPTS[2], SamplingParams(seed=1, ignore_eos=True).resolved(), max_tokens=20))
    for number, (way, prompt) in enumerate(((way, prompt) for way in ways for prompt in prompts), start=1):
        engine.add(Request(number, prompt, PARAMS, max_tokens=0, pooling=way))
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            if update.pooled is not None:
                found[update.request] = update.pooled
    return [found[number] for number in range(1, 1 + len(ways) * len(prompts))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_nothing_around_a_request_changes_what_it_is_pooled_to(tmp_path, dtype):
    """Chunks, company, caches, preemption and overlap, bit by bit."""
    save_checkpoint(tmp_path, "qwen3", dtype=dtype, num_hidden_layers=2)
    options = {"model": str(tmp_path), "threads": 1, "max_num_seqs": 8, "max_model_len": 256}
    plain = Engine(EngineConfig(**options, prefix_cache="off"))
    alone = [pooled(plain, [prompt], [way])[0] for way in WAYS for prompt in SHARED]
    preemptions = 0
    for chunk, cache, blocks, overlap in (
        (40, "radix", 17, True),
        (33, "hash", 17, False),
        (64, "off", 18, True),
        (2048, "radix", 200, True),
    ):
        more = {"prefix_cache": cache, "num_kv_blocks": blocks, "async_scheduling": overlap, "check_invariants": True}
        engine = Engine(EngineConfig(**options, **more, max_num_batched_tokens=chunk))
        assert pooled(engine, SHARED, WAYS) == alone, (chunk, cache)
        assert pooled(engine, SHARED, WAYS) == alone, (chunk, cache, "warm")
        preemptions += engine.stats.preemptions
        assert (engine.stats.cached_tokens > 0) == (cache != "off")
    assert preemptions > 0


def test_labels_have_the_log_probabilities_that_they_would_have_in_a_prompt():
    with LLM("demo", threads=1) as llm:
        prompt = llm._frontend.prepare("def f(x):\n    return", SamplingParams(max_tokens=0, speculate=False))
        [output] = llm._run_all([llm._frontend.pooled(prompt, PoolingParams("labels", (5, 300)))], False)
        asked = [[*prompt.token_ids, label] for label in (5, 300)]
        scored = llm.generate(asked, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert output.pooled == [
        one.prompt_logprobs[-1][label].logprob for one, label in zip(scored, (5, 300), strict=True)
    ]


def test_a_mean_reads_no_cache_and_fills_it():
    with LLM("demo", threads=1) as llm:
        [first] = llm.generate("x = 1\n" * 50, SamplingParams(max_tokens=1))
        prompt = llm._frontend.prepare("x = 1\n" * 50, SamplingParams(max_tokens=0))
        for method, cached in (("mean", False), ("last", True)):
            [output] = llm._run_all([llm._frontend.pooled(prompt, PoolingParams(method))], False)
            assert (output.cached_tokens > 0) == cached
        assert first.cached_tokens == 0


def test_sums_do_not_depend_on_how_rows_are_dealt_out():
    rows = torch.randn(333, 32, generator=torch.Generator().manual_seed(1)) * 50

    def total(*parts: torch.Tensor) -> list[float]:
        sums = [launch_sum(Device(), part).finish()[0] for part in parts]
        return [sum(column) for column in zip(*sums, strict=True)]

    whole = total(rows)
    assert whole == total(*rows.split(7)) == total(rows[200:], rows[:200]) == total(rows.flip(0))
    assert torch.allclose(torch.tensor(whole) / UNIT, rows.sum(0), atol=1e-2)


@pytest.mark.parametrize("value", [2.0 * MOST, -2.0 * MOST, math.inf, math.nan])
def test_states_beyond_what_is_counted_are_an_error(value):
    rows = torch.ones(3, 4)
    rows[1, 2] = value
    assert launch_sum(Device(), rows).finish() == (None, TOO_LARGE)


@pytest.mark.parametrize(
    ("pooling", "named"),
    [
        ({"pooling_mode_cls_token": True}, "pooling_mode_cls_token"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        ({"pooling_mode_mean_tokens": False}, "none"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, "include_prompt"),
        ({"pooling_mode": "cls"}, "pooling_mode"),
        ({"pooling_mode_lasttoken": "yes"}, "pooling_mode_lasttoken"),
    ],
)
def test_pooling_that_is_not_offered_is_refused_by_name(tmp_path, pooling, named):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    with pytest.raises(ModelConfigError, match=named):
        PoolingConfig.read(declare(tmp_path, **pooling))


@pytest.mark.parametrize(
    "modules",
    [
        "[]", "{}", "[1, 2]", "[", '[{"type": "sentence_transformers.models.Transformer", "path": ""}]',
        '[{"type": "evil.Transformer", "path": ""}, {"type": "sentence_transformers.models.Pooling", "path": "a"}]',
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "sentence_transformers.models.Pooling", "path": "../a"}]',
        '[{"type": "sentence_transformers.models.Transformer", "path": ""},'
        ' {"type": "sentence_transformers.models.Dense", "path": "a"}]',
    ],
)  # fmt: skip
def test_modules_that_are_not_understood_are_refused(tmp_path, modules):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    (tmp_path / "modules.json").write_text(modules)
    with pytest.raises(ModelConfigError, match=r"modules\.json"):
        PoolingConfig.read(tmp_path)


def test_dimensions_are_those_of_the_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64, "matryoshka_dimensions": [16, 32]}')
    config = PoolingConfig.read(tmp_path)
    config.check_dimensions(32)
    for wrong in (64, 0, -1, 33, True):
        with pytest.raises(RequestError, match="16, 32"):
            config.check_dimensions(wrong)
    assert len(config.embedding([3.0, 4.0, 5.0], 2)) == 2
    assert config.embedding([3.0, 4.0, 5.0], 2)[0] == pytest.approx(0.6)
    assert [*config.embedding([0.0, 0.0])] == [0.0, 0.0]


@pytest.mark.parametrize(
    "pooling",
    [
        PoolingParams("labels"),
        PoolingParams("labels", (10**6,)),
        PoolingParams("labels", (-1,)),
        PoolingParams("last", (1,)),
        PoolingParams("labels", tuple(range(100))),
    ],
)
def test_what_cannot_be_pooled_is_refused(pooling):
    with LLM("demo", threads=1) as llm:
        prompt = llm._frontend.prepare("x", SamplingParams(max_tokens=0))
        with pytest.raises(RequestError):
            llm._frontend.pooled(prompt, pooling)
        with pytest.raises(RequestError, match="max_tokens"):
            llm._frontend.pooled(llm._frontend.prepare("x", SamplingParams(max_tokens=1)), WAYS[0])


EMBEDDER = {
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "query_pre_attn_scalar": 24,
    "use_bidirectional_attention": True,
}


def embedding_gemma(folder: Path, dtype: torch.dtype = torch.float32, window: int = 20) -> Path:
    """A tiny EmbeddingGemma: a Gemma 3 without a head, whose tokens see what follows; a mean, two dense layers."""
    save_checkpoint(folder, "gemma3_model", dtype=dtype, **{**EMBEDDER, "sliding_window": window})
    declare(folder, dense=[(64, 96), (96, 48)], pooling_mode_mean_tokens=True, include_prompt=True)
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    settings = {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": "cosine"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Path:
    return embedding_gemma(tmp_path_factory.mktemp("embedder"))


@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_attention_both_ways_and_dense_layers_are_those_of_transformers(gemma, kernels):
    model = load_reference(gemma)
    first, second = (load_file(gemma / f"{place}_Dense" / "model.safetensors")["linear.weight"] for place in (2, 3))
    with LLM(str(gemma), threads=1, cpu_kernels=kernels) as llm:
        outputs = llm.embed(PROMPTS)
        cut = llm.embed(PROMPTS[3], dimensions=16)[0].embedding
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        with torch.inference_mode():
            pooled = model(torch.tensor([prompt])).last_hidden_state[0].mean(0)
        expected = torch.nn.functional.normalize(second @ (first @ pooled), dim=0)
        torch.testing.assert_close(torch.tensor(output.embedding), expected, atol=1e-5, rtol=0)
        assert len(output.embedding) == 48
    head = torch.tensor(outputs[3].embedding[:16])
    torch.testing.assert_close(torch.tensor(cut), head / head.norm(), atol=1e-6, rtol=0)


def test_tokens_see_a_window_ahead_as_far_as_back(tmp_path):
    """What changes a token's state is at most half a window away, either way, in a model of windowed layers alone."""
    folder = save_checkpoint(tmp_path, "gemma3_model", **{**EMBEDDER, "layer_types": ["sliding_attention"] * 3})
    (folder / "modules.json").unlink(missing_ok=True)
    prompt, last = PROMPTS[4], len(PROMPTS[4]) - 1
    reach = 3 * (EMBEDDER["sliding_window"] // 2)  # of three layers
    with LLM(str(folder), threads=1) as llm:
        changed = [
            llm.embed([*prompt[:at], prompt[at] ^ 1, *prompt[at + 1 :]])[0].embedding
            for at in (0, last - reach - 1, last - reach)
        ]
        [same] = llm.embed(prompt)
    assert changed[0] == changed[1] == same.embedding != changed[2]


def test_nothing_around_a_whole_prompt_changes_its_embedding(tmp_path):
    """Company, order, block sizes, preemption, threads, ranks, one of two kinds of layers or both."""
    folder = embedding_gemma(tmp_path, torch.bfloat16, 60)
    alone = [embedded(folder, [prompt])[0] for prompt in SHARED]
    for options in (
        {},
        {"block_size": 64, "max_num_seqs": 3, "threads": 2},
        {"num_kv_blocks": 17, "async_scheduling": False, "max_num_batched_tokens": 300},
        {"prefix_cache": "hash"},
    ):
        assert embedded(folder, SHARED, **options) == alone, options
        assert embedded(folder, SHARED[::-1], **options) == alone[::-1], options


@pytest.mark.slow
def test_ranks_change_no_embedding(tmp_path):
    folder = embedding_gemma(tmp_path, torch.bfloat16, 60)
    alone = embedded(folder, SHARED)
    for ranks in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        assert embedded(folder, SHARED, **ranks) == alone


def embedded(folder: Path, prompts: list[list[int]], **options: Any) -> list[list[float]]:
    options = {"threads": 1, "max_model_len": 256, "check_invariants": True, **options}
    with LLM(str(folder), **options) as llm:
        return [output.embedding for output in llm.embed(prompts)]


def test_a_model_that_embeds_alone_refuses_everything_else_by_name(gemma):
    with pytest.raises(ConfigError, match="speculative_config"):
        LLM(str(gemma), threads=1, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        LLM(str(gemma), threads=1, max_num_batched_tokens=128, max_num_seqs=4)
    with LLM(str(gemma), threads=1) as llm:
        assert any("an embedding model" in note for note in llm.notes)
        for params in (SamplingParams(), SamplingParams(max_tokens=0, prompt_logprobs=1)):
            with pytest.raises(EmbeddingModelError, match=r"LLM\.embed"):
                llm.generate([1, 2, 3], params)
        prompt = llm._frontend.prepare([1, 2, 3], SamplingParams(max_tokens=0))
        with pytest.raises(EmbeddingModelError):
            llm._frontend.pooled(prompt, WAYS[2])
        with pytest.raises(RequestError, match="context length"):
            llm.embed([1] * 600)
        assert len(llm.embed([1, 2, 3])) == 1


def test_a_quantized_copy_embeds_as_what_is_quantized_at_load(gemma, tmp_path):
    quantize_folder(gemma, tmp_path / "quantized", "int8")
    made = embedded(gemma, PROMPTS, quantization="int8")
    assert embedded(tmp_path / "quantized", PROMPTS) == made != embedded(gemma, PROMPTS)


def test_prompts_stand_before_texts(tmp_path):
    """As Sentence Transformers has them: by name, and a default one where none is asked for."""
    folder = declare(copy_of(resolve("demo"), tmp_path), pooling_mode_lasttoken=True)
    file = folder / "config_sentence_transformers.json"
    with LLM(str(folder), threads=1) as llm:
        plain = [one.embedding for one in llm.embed(["x = 1", "q: x = 1", "d: x = 1"])]
        with pytest.raises(RequestError, match="prompts are: none"):
            llm.embed("x = 1", prompt_name="query")
        file.write_text(json.dumps({"prompts": {"query": "q: ", "document": "d: "}, "default_prompt_name": "document"}))
        assert llm.embed("x = 1", prompt_name="query")[0].embedding == plain[1]
        assert llm.embed("x = 1")[0].embedding == plain[2]
        tokens = llm._frontend.prepare("x = 1", SamplingParams(max_tokens=0)).token_ids
        assert llm.embed(tokens)[0].embedding == plain[0]
        with pytest.raises(RequestError, match="'query', 'document'"):
            llm.embed("x = 1", prompt_name="passage")
        with pytest.raises(RequestError, match="texts"):
            llm.embed(tokens, prompt_name="query")


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        ({"activation_function": "torch.nn.modules.activation.GELU"}, "activation_function"),
        ({"in_features": 63}, "in_features"),
        ({"out_features": 95}, "linear.weight"),
        ({"bias": True}, "linear.bias"),
        ({"module_input_name": "token_embeddings"}, "module_input_name"),
    ],
)
def test_dense_layers_that_are_not_what_they_say_are_refused(tmp_path, edit, named):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    declare(tmp_path, dense=[(64, 96)], pooling_mode_mean_tokens=True)
    edit_json(tmp_path / "2_Dense" / "config.json", edit)
    with pytest.raises(ModelConfigError, match=named):
        PoolingConfig.read(tmp_path)


def test_dense_layers_without_their_file_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"hidden_size": 64}')
    declare(tmp_path, dense=[(64, 96)], pooling_mode_mean_tokens=True)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(ModelConfigError, match=r"model\.safetensors"):
        PoolingConfig.read(tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_dense_layer_has_a_bias_and_a_tanh(tmp_path, dtype):
    weight, bias, x = torch.randn(5, 7).to(dtype), torch.randn(5).to(dtype), torch.randn(7)
    fields = {
        "in_features": 7,
        "out_features": 5,
        "bias": True,
        "activation_function": "torch.nn.modules.activation.Tanh",
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    save_file({"linear.weight": weight, "linear.bias": bias}, tmp_path / "model.safetensors")
    made = Dense.read(tmp_path, 7)(x.numpy())
    torch.testing.assert_close(torch.from_numpy(made), torch.tanh(weight.float() @ x + bias.float()), atol=1e-6, rtol=0)
