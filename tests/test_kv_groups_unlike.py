"""Layers whose keys and values have unlike shapes: each kind is a KV group of its own.

The models that have such layers have more besides, so a configuration is made up. What it should give is known, since
a model that is the same in all layers can compute the same: with numbers that are 0 where a narrow head has none, and a
key head that is there twice.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.kv.layout import KVLayout
from quire.layers.rotary import RopeConfig
from quire.models import llama
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.layer_groups import LayerGroup
from quire.models.registry import check_ranks, load_model
from quire.ops import KVShape, choose_kernels
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import VOCAB, chunked_logits, random_prompt, save_checkpoint

WINDOW = 24
KEPT = [0, 1, 2, 3, 8, 9, 10, 11]
"""Dimensions of a head that a narrow one has: the first pairs that turn together."""
PROMPT = random_prompt(90)


def unlike(fields: Fields, generation: Fields) -> DecoderConfig:
    """The first and the last of three layers see a window, with one key head of half the width."""
    config = READ(fields, generation)
    config = replace(
        config,
        layer=replace(config.layer, scale=0.25),
        windows=(WINDOW, None, WINDOW),
        ropes=(RopeConfig(8, 500.0), config.rope, RopeConfig(8, 500.0)),
    )
    return with_heads(config, (1, 8), (2, 16), (1, 8))


def with_heads(config: DecoderConfig, *heads: tuple[int, int]) -> DecoderConfig:
    """With so many key heads, of such a width, in each layer."""
    layers = tuple(replace(config.layer, num_kv_heads=count, head_dim=width) for count, width in heads)
    return replace(config, layers=layers)


def alike(fields: Fields, generation: Fields) -> DecoderConfig:
    """The same with layers of one shape."""
    config = unlike(fields, generation)
    still = RopeConfig(8, 500.0, still=8)
    return replace(config, layers=None, ropes=(still, config.rope, still))


READ = llama.read_config


@contextlib.contextmanager
def read_as(read: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "read_config", read)
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Checkpoints of the two."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("unlike", "alike")}
    for folder in made.values():
        save_checkpoint(folder, "llama", num_hidden_layers=3)
    stored = load_file(made["unlike"] / "model.safetensors")
    narrow, wide = dict(stored), dict(stored)
    for name, weight in stored.items():
        kind = name.split(".")[-2]
        if "layers.1." in name or kind not in ("q_proj", "k_proj", "v_proj", "o_proj"):
            continue
        heads = (weight.t() if kind == "o_proj" else weight).reshape(-1, 16, 64)
        own = heads[:1] if kind in ("k_proj", "v_proj") else heads
        padded = torch.zeros_like(heads)
        padded[:, KEPT] = own[:, KEPT]
        for tensors, each in ((narrow, own[:, KEPT]), (wide, padded)):
            flat = each.reshape(-1, 64)
            tensors[name] = (flat.t() if kind == "o_proj" else flat).contiguous()
    for name, tensors in (("unlike", narrow), ("alike", wide)):
        save_file(tensors, made[name] / "model.safetensors", metadata={"format": "pt"})
    return {name: str(folder) for name, folder in made.items()}


def test_each_group_has_a_shape_of_its_own(folders):
    with read_as(unlike):
        model = load_model(folders["unlike"], "bfloat16")
    assert model.groups == (LayerGroup(None, (1,)), LayerGroup(WINDOW, (0, 2)))
    assert model.kv_shapes() == [KVShape(1, 2, 16, torch.bfloat16), KVShape(2, 1, 8, torch.bfloat16)]
    assert [shape.bytes_per_token for shape in model.kv_shapes("int8")] == [2 * 2 * 20, 2 * 2 * 12]
    caches = model.new_caches([4, 9], 16, "fp8")
    assert [cache.numbers.shape for cache in caches] == [(4, 1, 2, 2, 16, 16), (9, 2, 1, 2, 16, 8)]
    layouts = [KVLayout.of(cache, model, group).shape for group, cache in enumerate(caches)]
    assert [(shape.layers, shape.kv_heads, shape.head_dim) for shape in layouts] == [(1, 2, 16), (2, 1, 8)]


def test_layers_that_see_the_same_are_two_groups_where_their_shapes_differ(folders):
    with read_as(lambda *fields: replace(unlike(*fields), windows=(None, None, None))):
        model = load_model(folders["unlike"])
    assert model.groups == (LayerGroup(None, (0, 2)), LayerGroup(None, (1,)))
    with read_as(lambda *fields: replace(unlike(*fields), windows=(None, None, None))):
        engine = engine_of(folders["unlike"])
        alone = engine_of(folders["unlike"], prefix_cache="off", max_num_seqs=1)
    assert run(engine, 1) == run(alone, 1)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_logits_are_those_of_a_model_of_one_shape_that_computes_the_same(folders, kernels):
    with read_as(unlike):
        narrow = chunked_logits(load_model(folders["unlike"], kernels=choose_kernels(kernels)), PROMPT, 37)
    with read_as(alike):
        wide = chunked_logits(load_model(folders["alike"], kernels=choose_kernels(kernels)), PROMPT, 37)
    assert wide.abs().max() > 0.5
    torch.testing.assert_close(narrow, wide, rtol=0, atol=1e-4)


def engine_of(folder: str, **options: Any) -> Engine:
    defaults = {"threads": 1, "max_num_seqs": 16, "max_model_len": 200, "check_invariants": True}
    return Engine(EngineConfig(model=folder, **defaults | options))


def run(engine: Engine, seed: int) -> dict[int, list[tuple[int, float]]]:
    """Requests of any length that share heads, a few steps apart: tokens and their log-probabilities."""
    rnd = random.Random(seed)
    prompts = [rnd.choices(range(3, VOCAB), k=rnd.randrange(1, 150)) for _ in range(6)]
    prompts += [[*rnd.choice(prompts)[: rnd.randrange(1, 150)], 4] for _ in range(6)]
    params = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=0).resolved()
    made: dict[int, list[tuple[int, float]]] = {id: [] for id in range(len(prompts))}

    def step() -> None:
        for update in engine.step():
            entries = zip(update.tokens, update.logprobs or [], strict=True)
            made[update.request] += [(token, entry.values[0]) for token, entry in entries]

    for id, prompt in enumerate(prompts):
        engine.add(Request(id, prompt, params, max_tokens=12))
        for _ in range(rnd.randrange(3)):
            step()
    while not engine.idle:
        step()
    return made


@pytest.mark.quick("auto")
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8", "fp8"])
def test_nothing_around_a_request_changes_its_tokens(folders, kv_cache_dtype):
    """In caches of every kind: chunks, block sizes, prefix hits, preemption, steps in flight and drafts."""
    folder, options = folders["unlike"], {"kv_cache_dtype": kv_cache_dtype, "dtype": "bfloat16"}
    with read_as(unlike):
        expected = run(engine_of(folder, prefix_cache="off", max_num_seqs=1, **options), 0)
        for size in (16, 32):
            small = engine_of(folder, block_size=size, num_kv_blocks=224 // size, max_num_batched_tokens=48, **options)
            assert run(small, 0) == expected
            assert small.stats.preemptions > 0
        drafting = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
        engine = engine_of(folder, async_scheduling=True, speculative_config=drafting, **options)
        assert run(engine, 0) == expected
        assert run(engine, 0) == expected and engine.stats.cached_tokens > 0 and engine.stats.drafted > 0


def test_where_the_device_reads_the_spans_tokens_are_the_same(folders):
    with read_as(unlike):
        with on_device(DelayedDevice(), SpanKernels()):
            engine = engine_of(folders["unlike"], cpu_kernels="torch", max_num_batched_tokens=64, num_kv_blocks=40)
        alone = engine_of(folders["unlike"], cpu_kernels="torch", prefix_cache="off", max_num_seqs=1)
    assert run(engine, 0) == run(alone, 0)


def test_ranks_must_share_the_heads_of_every_layer(folders):
    with read_as(lambda *fields: with_heads(unlike(*fields), (1, 8), (4, 16), (1, 8))):
        check_ranks(folders["unlike"], 2)
    with (
        read_as(lambda *fields: with_heads(unlike(*fields), (2, 8), (4, 16), (2, 8))),
        pytest.raises(ConfigError, match="4 attention heads \\(2 or 4 of keys and values\\); allowed: 1, 2, 4"),
    ):
        check_ranks(folders["unlike"], 3)


def test_such_a_model_is_refused_where_it_would_draft(folders):
    """Its keys and values would lie in the blocks of one of the target's groups."""
    spec = {"method": "draft_model", "model": folders["unlike"], "num_speculative_tokens": 2}
    with read_as(unlike), pytest.raises(ConfigError, match="keys and values of unlike shapes"):
        engine_of(folders["unlike"], speculative_config=spec)
