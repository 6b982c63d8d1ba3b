"""SamplingParams: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy
import pytest

from quire.core.sampling_params import MAX_LOGPROBS, UNSUPPORTED, SamplingParams
from quire.errors import RequestError, SamplingParamsError, TokenOutOfRangeError


def test_defaults_are_valid_and_leave_the_rest_to_the_checkpoint() -> None:
    params = SamplingParams()
    assert (params.n, params.max_tokens, params.temperature, params.top_k) == (1, None, None, None)


def test_resolving_fills_from_the_checkpoint_then_with_neutral_values() -> None:
    params = SamplingParams(top_p=0.5).resolved({"temperature": 0.6, "top_k": 20, "top_p": 0.9, "do_sample": True})
    assert (params.temperature, params.top_k, params.top_p) == (0.6, 20, 0.5)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    neutral = SamplingParams().resolved()
    assert (neutral.temperature, neutral.top_p, neutral.top_k) == (1.0, 1.0, 0)
    assert SamplingParams().resolved({"temperature": None}).temperature == 1.0


def test_a_bad_value_in_the_checkpoint_is_blamed_on_the_checkpoint() -> None:
    with pytest.raises(SamplingParamsError, match=r"generation_config\.json: top_p is 1\.5"):
        SamplingParams().resolved({"top_p": 1.5})


@pytest.mark.parametrize("value", [0, 0.0, 1e-6, 1e-300])
def test_temperature_zero_and_next_to_zero_are_greedy(value: float) -> None:
    assert SamplingParams(temperature=value).greedy


def test_ordinary_temperatures_are_not_greedy() -> None:
    assert not SamplingParams(temperature=0.01).greedy


BAD: list[tuple[str, Any]] = [
    ("n", 0), ("n", 129), ("n", 1.0), ("n", True), ("n", None), ("n", "2"),
    ("temperature", -0.1), ("temperature", math.nan), ("temperature", math.inf), ("temperature", False),
    ("temperature", "hot"), ("temperature", 10**5000),
    ("top_p", 0.0), ("top_p", 1.01), ("top_p", math.nan), ("top_p", -math.inf),
    ("top_k", -2), ("top_k", 1.5), ("top_k", True), ("top_k", 2**31),
    ("min_p", -0.01), ("min_p", 1.01), ("min_p", math.nan),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("presence_penalty", None),
    ("frequency_penalty", -2.1), ("frequency_penalty", math.inf),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.nan),
    ("seed", 2**63), ("seed", 1.0), ("seed", True),
    ("stop", 5), ("stop", [""]), ("stop", ["a"] * 65), ("stop", "x" * 1025), ("stop", [b"x"]),
    ("cache_salt", "\ud800"), ("cache_salt", "\udfff"),
    ("stop_token_ids", [-1]), ("stop_token_ids", [True]), ("stop_token_ids", 3), ("stop_token_ids", ["a"]),
    ("include_stop_str_in_output", 1),
    ("min_tokens", -1), ("min_tokens", True), ("max_tokens", -1), ("max_tokens", math.nan),
    ("ignore_eos", None), ("skip_special_tokens", "yes"),
    ("logit_bias", {1: math.nan}), ("logit_bias", {1: 101}), ("logit_bias", {-1: 1.0}), ("logit_bias", [1]),
    ("logit_bias", dict.fromkeys(range(5000), 1.0)),
    ("allowed_token_ids", []), ("allowed_token_ids", [1.5]), ("bad_words", [""]), ("bad_words", ["w"] * 300),
    ("logprobs", -1), ("logprobs", MAX_LOGPROBS + 1), ("logprobs", True), ("prompt_logprobs", 1.0),
    ("priority", 2**40), ("cache_salt", ""), ("cache_salt", "s" * 300), ("cache_salt", 7),
    ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", "all"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{n}-{i}" for i, (n, _) in enumerate(BAD)])
def test_a_bad_value_is_refused_by_the_name_of_its_field(name: str, value: Any) -> None:
    with pytest.raises(SamplingParamsError, match=name) as caught:
        SamplingParams(**{name: value})
    assert isinstance(caught.value, RequestError)
    assert caught.value.param == name
    assert len(str(caught.value)) < 300


def test_the_message_says_value_range_and_hint() -> None:
    with pytest.raises(
        SamplingParamsError, match=r"top_k is -2; it must be an integer from -1 .*\(0 and -1 turn it off\)"
    ):
        SamplingParams(top_k=-2)
    with pytest.raises(SamplingParamsError, match=r"top_p is 0; it must be a number above 0 and at most 1 "):
        SamplingParams(top_p=0)
    with pytest.raises(SamplingParamsError, match=r"min_p is -1; it must be a number from 0 to 1 "):
        SamplingParams(min_p=-1)
    with pytest.raises(SamplingParamsError, match="the whole vocabulary, vLLM's -1, is not supported"):
        SamplingParams(logprobs=-1)


def test_min_tokens_beyond_max_tokens_are_refused() -> None:
    with pytest.raises(SamplingParamsError, match="min_tokens is 5 but max_tokens is 4"):
        SamplingParams(min_tokens=5, max_tokens=4)


def test_zero_max_tokens_only_score_the_prompt_and_leave_no_room_for_min_tokens() -> None:
    assert SamplingParams(max_tokens=0).max_tokens == 0
    with pytest.raises(SamplingParamsError, match="min_tokens is 1 but max_tokens is 0"):
        SamplingParams(max_tokens=0, min_tokens=1)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="tempreature"):
        SamplingParams(tempreature=1.0)  # type: ignore[call-arg]


def test_lists_are_copied_so_that_a_checked_object_stays_checked() -> None:
    stops, bias = [3], {5: 1}
    params = SamplingParams(stop_token_ids=stops, logit_bias=bias, stop="end")
    stops.append(-1)
    bias[-1] = 0
    assert params.stop_token_ids == (3,)
    assert params.logit_bias == {5: 1.0}
    assert params.stop_strings == ("end",)


def test_numpy_numbers_become_plain_ones() -> None:
    params = SamplingParams(temperature=numpy.float32(0.5), top_k=numpy.int64(3))  # type: ignore[arg-type]
    assert (type(params.temperature), type(params.top_k)) == (float, int)


def test_parameters_survive_the_wire_and_bad_ones_do_not_pass_it() -> None:
    params = SamplingParams(stop=["a", "b"], logit_bias={7: -1.5}, allowed_token_ids=[1, 2], seed=-3, top_p=0.9)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    with pytest.raises(ValueError, match="top_k is -2"):
        msgspec.json.decode(b'{"top_k": -2}', type=SamplingParams)


def test_vllms_spelling_of_off_is_taken() -> None:
    assert SamplingParams(top_k=-1) == SamplingParams(top_k=0)
    assert SamplingParams().resolved({"top_k": -1}).top_k == 0
    assert SamplingParams(max_tokens=None, stop="end", logprobs=None, min_p=0.0).stop_strings == ("end",)


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_vllm_has_beside_is_taken_where_it_asks_for_nothing_and_else_refused_by_name(name: str) -> None:
    for value in (None, *UNSUPPORTED[name]):
        assert SamplingParams(seed=1, **{name: value}) == SamplingParams(seed=1)
    for value in (17, "x"):
        with pytest.raises(
            SamplingParamsError, match=f"{name} is {value!r}, which is not supported; leave it"
        ) as caught:
            SamplingParams(**{name: value})
        assert caught.value.param == name


def test_what_looks_like_a_value_that_asks_for_nothing_does_not_pass_for_it() -> None:
    with pytest.raises(SamplingParamsError, match=r"detokenize is 1, .* or set it to True"):
        SamplingParams(detokenize=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_token_ids_are_checked_against_the_vocabulary(field: str) -> None:
    ids: Any = {99: 1.0, 100: 1.0} if field == "logit_bias" else [99, 100]
    params = SamplingParams(**{field: ids})
    params.check_against(101)
    with pytest.raises(TokenOutOfRangeError, match=f"{field} has the token id 100, .* 0 to 99"):
        params.check_against(100)
