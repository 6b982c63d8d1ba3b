"""Options: types, ranges, contradictions, presets, and unknown names."""

from __future__ import annotations

import dataclasses

import pytest

from quire.config import PRESETS, EngineConfig, parse_size
from quire.errors import ConfigError
from quire.vllm_options import VLLM_OPTIONS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 17}, "allowed: 16, 32, 64, 128, 256"),
        ({"block_size": "16"}, "'16' is not supported"),
        ({"max_num_seqs": True}, "it must be int"),
        ({"max_num_seqs": 0}, "out of range"),
        ({"max_num_seqs": 1.5}, "it must be int"),
        ({"target_itl_ms": float("nan")}, "out of range"),
        ({"prefix_cache": "tree"}, "allowed: radix, hash, off"),
        ({"dtype": "int8"}, "allowed: auto"),
        ({"kv_cache_memory": "4 bananas"}, "not a size"),
        ({"kv_cache_memory": -5}, "not a size"),
        ({"model": ""}, "model is empty"),
        ({"max_model_len": 10**400}, "out of range"),
        ({"kv_cache_memory": "9" * 400 + "GiB"}, "not a size"),
        ({"max_num_batched_tokens": 70}, "could starve a prompt"),
        ({"long_prefill_token_threshold": 3}, "below min_chunk"),
        ({"enable_chunked_prefill": False, "long_prefill_token_threshold": 64}, "needs chunked prefill"),
        ({"enable_chunked_prefill": False, "target_itl_ms": 50.0}, "since it shrinks prompt chunks"),
        ({"device": "tpu"}, "allowed: auto, cpu, cuda"),
        ({"cuda_graphs": "always"}, "allowed: lazy, eager, off"),
        ({"cuda_graphs": "eager", "enforce_eager": True}, "leave one out"),
        ({"gpu_memory_utilization": 1.2}, "from 0.01 to 1.0"),
    ],
)
def test_a_bad_option_is_refused_with_its_value_and_what_is_allowed(options, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options({"model": "m"} | options)


def test_an_unknown_option_is_refused_with_the_nearest_name():
    with pytest.raises(ConfigError, match="did you mean 'max_num_batched_tokens'"):
        EngineConfig.from_options({"model": "m", "max_batched_tokens": 3})
    with pytest.raises(ConfigError, match="never runs code"):
        EngineConfig.from_options({"model": "m", "trust_remote_code": True})
    with pytest.raises(ConfigError, match="no model"):
        EngineConfig.from_options({})


def configured(**options):
    return EngineConfig.from_options({"model": "m", "device": "cpu"} | options)


@pytest.mark.parametrize("name", [name for name, option in VLLM_OPTIONS.items() if option.ours is None])
def test_what_vllm_can_ask_for_and_quire_does_anyway_is_taken_and_the_rest_refused(name):
    option, plain = VLLM_OPTIONS[name], configured()
    other = {bool: True, int: 2, float: 4.0, str: "other"}.get(option.kind, {"key": 1})
    for value in (None, *(option.same or ())):
        assert configured(**{name: value}) == plain
    if option.same is None:
        assert configured(**{name: other}) == plain
    else:
        with pytest.raises(ConfigError, match=f"{name}=.* is not supported: .*; leave it out"):
            configured(**{name: other})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"enable_prefix_caching": True}, {"prefix_cache": "radix"}),
        ({"enable_prefix_caching": False}, {"prefix_cache": "off"}),
        ({"enable_prefix_caching": None}, {}),
        ({"num_gpu_blocks_override": 40}, {"num_kv_blocks": 40}),
        ({"kv_cache_memory_bytes": 2**20}, {"kv_cache_memory": "1048576"}),
        ({"kv_cache_dtype": "fp8_e4m3"}, {"kv_cache_dtype": "fp8"}),
        ({"dtype": "half"}, {"dtype": "float16"}),
        ({"enable_auto_tool_choice": True, "reasoning_parser": "qwen3"}, {}),
        ({"tool_call_parser": "hermes"}, {"tool_format": "hermes"}),
        ({"tool_call_parser": "openai"}, {"tool_format": "harmony"}),
        ({"dtype": "float"}, {"dtype": "float32"}),
        ({"generation_config": "vllm"}, {"generation_config": "off"}),
        ({"max_num_seqs": None, "max_model_len": None, "enable_chunked_prefill": None}, {}),
        (
            {"speculative_config": {"method": "ngram", "draft_tensor_parallel_size": 1}},
            {"speculative_config": {"method": "ngram"}},
        ),
    ],
)
def test_vllms_names_and_values_are_quires(theirs, ours):
    mine, other = configured(**theirs), configured(**ours)
    assert mine.speculation == other.speculation
    assert dataclasses.replace(mine, speculative_config=None) == dataclasses.replace(other, speculative_config=None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"decode_context_parallel_size": True}, "decode_context_parallel_size=True is not supported"),
        (
            {"decode_context_parallel_size": 2},
            "set tensor_parallel_size, pipeline_parallel_size or data_parallel_size; leave it out, or set it to 1",
        ),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching='yes' is not supported; allowed: True, False"),
        (
            {"enable_prefix_caching": True, "prefix_cache": "hash"},
            "are the same option, prefix_cache; leave one of them out",
        ),
        ({"kv_cache_dtype": "fp8_e5m2"}, "allowed: auto, int8, fp8"),
        ({"disable_log_requests": True}, "unknown option 'disable_log_requests'"),
        ({"speculative_config": {"method": "ngram", "draft_tensor_parallel_size": 2}}, "draft_tensor_parallel_size=2"),
    ],
)
def test_what_vllms_names_ask_for_in_vain_is_said(options, message):
    with pytest.raises(ConfigError, match=message):
        configured(**options)


def test_replicas_are_engines_of_their_own_unless_they_share_experts():
    plain, experts = configured(data_parallel_size=3), configured(data_parallel_size=3, enable_expert_parallel=True)
    assert (plain.replicas, plain.num_ranks) == (3, 1)
    assert (experts.replicas, experts.num_ranks) == (1, 3)
    assert configured(data_parallel_size=3, tensor_parallel_size=2).num_ranks == 2
    assert configured(data_parallel_size=2, host_kv_memory="1GiB", kv_role="decode").replicas == 2


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"tensor_parallel_size": 2, "nnodes": 2, "token_file": "x"}, "nnodes=2"),
        ({"distributed_executor_backend": "ray"}, "distributed_executor_backend=ray"),
        ({"kv_role": "prefill"}, "kv_role=prefill"),
    ],
)
def test_what_replicas_cannot_have_is_refused_by_name(more, message):
    with pytest.raises(
        ConfigError, match=f"^data_parallel_size=2 with {message} is not supported yet; .* start 2 servers"
    ):
        configured(data_parallel_size=2, **more)


@pytest.mark.parametrize("preset", list(PRESETS))
def test_a_preset_gives_valid_options_and_those_given_by_hand_win(preset):
    config = EngineConfig.from_options({"model": "m"}, preset)
    assert all(getattr(config, name) == value for name, value in PRESETS[preset].items())
    assert EngineConfig.from_options({"model": "m", "max_num_seqs": 3}, preset).max_num_seqs == 3


def test_an_unknown_preset_is_refused():
    with pytest.raises(ConfigError, match="known: chat, batch, long-context"):
        EngineConfig.from_options({"model": "m"}, "fast")


def test_a_configuration_cannot_change():
    with pytest.raises(dataclasses.FrozenInstanceError):
        EngineConfig(model="m").block_size = 32


@pytest.mark.parametrize(("text", "size"), [("4GiB", 2**32), ("512MB", 512 * 10**6), ("1.5k", 1500), ("77", 77)])
def test_sizes_have_units(text, size):
    assert parse_size(text) == size


def test_every_option_has_a_help_text():
    assert all(field.metadata.get("help") for field in dataclasses.fields(EngineConfig))
