"""Options: types, ranges, contradictions, presets, and unknown names."""

from __future__ import annotations

import dataclasses

import pytest

from quire.config import PRESETS, EngineConfig, parse_size
from quire.errors import ConfigError


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
        ({"enable_chunked_prefill": False, "target_itl_ms": 50.0}, "shrinking prompt chunks"),
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
