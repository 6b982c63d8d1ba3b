"""What a configuration leaves out is what transformers has in its place, or the checkpoint's tensors do not fit."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from quire.engine.loading import LEAST_TOP_P, left_out, sampling_defaults
from quire.errors import ModelConfigError
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.registry import read_config
from tests.oracle import CLASSES, TOWERS, sizes_of
from tests.test_models_families import FAMILIES

TEXTS = {**{name: options["text"] for name, options in FAMILIES.values() if "text" in options}, "mistral3": "mistral"}
TEXTS |= {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
MORE = {"granitemoehybrid": {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
ELSEWHERE = {"architectures", "eos_token_id", "text_config", "vision_config", "intermediate_size"}
"""Fields that are not left out here: what ends a text is in generation_config.json, widths show in the tensors."""
UNREADABLE = {"time_step_limit"}
"""What transformers cannot read as it writes it, since JSON has no infinity."""


def whole(architecture: str, fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration that transformers reads from fields, with all that they leave out."""
    config_name, model_name = CLASSES[architecture]
    passed_over = {"architectures", "model_type", *UNREADABLE}
    given = {name: value for name, value in copy.deepcopy(fields).items() if name not in passed_over}
    text = getattr(transformers, config_name)(**given).to_json_string(use_diff=False)
    return json.loads(text) | {"architectures": [model_name]}


def tiny(architecture: str) -> dict[str, Any]:
    if architecture in TOWERS:
        text = {**sizes_of(TEXTS[architecture]), "model_type": TEXTS[architecture]}
        return whole(architecture, {**TOWERS[architecture], "text_config": text, "tie_word_embeddings": False})
    return whole(architecture, {**sizes_of(architecture), **MORE.get(architecture, {})})


def shortened(fields: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """By name, the fields without one of them, also of the text model's, and of rotary scaling's."""
    for name, value in fields.items():
        if name not in ELSEWHERE:
            yield name, {other: value for other, value in fields.items() if other != name}
        if name in ("text_config", "rope_parameters", "full_attention", "sliding_attention") and value:
            for inner, less in shortened(value):
                yield f"{name}.{inner}", fields | {name: less}


def read(fields: dict[str, Any]) -> DecoderConfig:
    return read_config(Fields(copy.deepcopy(fields), "config.json"), Fields({}, "none"))


@pytest.mark.parametrize("architecture", CLASSES)
def test_a_field_that_is_left_out_has_the_value_that_transformers_gives_it(architecture: str) -> None:
    differing = []
    for name, fields in shortened(tiny(architecture)):
        try:
            ours, theirs = read(fields), read(whole(architecture, fields))
        except (ModelConfigError, KeyError, TypeError, ValueError):  # one of them does without, the other does not
            continue
        if ours != theirs and ours.tensor_shapes() == theirs.tensor_shapes():
            differing.append(name)
    assert not differing


def test_phi_3s_context_before_scaling_is_that_of_transformers_where_nothing_says_it() -> None:
    left_out = ("rope_parameters", "original_max_position_embeddings")
    fields = {name: value for name, value in tiny("phi3").items() if name not in left_out}
    fields |= {"rope_scaling": LONGROPE, "max_position_embeddings": 8192}
    assert read(fields) == read(whole("phi3", fields))
    assert read(fields).rope.original_max_position_embeddings == 4096


@pytest.mark.parametrize("architecture", ["gemma3_text", "olmo3"])
def test_older_rotary_scaling_beside_a_section_for_each_kind_of_layers_is_merged_as_in_transformers(
    architecture: str,
) -> None:
    sections = {
        "full_attention": {"rope_type": "default", "rope_theta": 7000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
    }
    fields = tiny(architecture) | {"rope_theta": 8000.0, "rope_local_base_freq": 200.0, "rope_parameters": sections}
    fields["layer_types"] = ([*sections] * fields["num_hidden_layers"])[: fields["num_hidden_layers"]]
    scaling = {"rope_type": "linear", "factor": 4.0}
    for older, theta in ((scaling, 7000.0), ({**scaling, "rope_theta": 9000.0}, 9000.0)):
        found = read(fields | {"rope_scaling": older})
        assert found == read(whole(architecture, fields | {"rope_scaling": older}))
        assert {(rope.kind, rope.theta) for rope in found.ropes or ()} == {("linear", theta), ("default", 300.0)}


def test_the_base_of_all_of_olmo_3s_layers_may_stand_in_one_section() -> None:
    fields = tiny("olmo3") | {"rope_parameters": {"rope_type": "default", "rope_theta": 7000.0}}
    assert {rope.theta for rope in read(fields).ropes or ()} == {7000.0}


def test_what_generation_config_asks_for_is_applied_or_named(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text(json.dumps({"top_p": 0, "min_length": 0, "num_beams": 1, "stop_strings": None, "max_length": 20}))
    assert sampling_defaults(tmp_path) == {"top_p": LEAST_TOP_P} and left_out(tmp_path) == []
    file.write_text(json.dumps({"suppress_tokens": [5], "min_length": 3, "stop_strings": ["x"], "temperature": 0.5}))
    [note] = left_out(tmp_path)
    assert note.startswith("generation_config.json sets min_length, stop_strings, suppress_tokens, which are not")
    assert left_out(tmp_path / "nothing") == []
