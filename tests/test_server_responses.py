"""Answers: OpenAI's shapes, and a stream that adds up to the whole answer."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from quire.core.sampling_params import KV_TRANSFER_FIELDS
from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.server.logprobs import LEAST, offsets
from quire.server.protocol import parse_chat, parse_completion
from quire.server.responses import ChatResponder, CompletionResponder

Responder = CompletionResponder | ChatResponder


def token_text(token: int) -> str:
    """Token ids are characters here."""
    return chr(token)


def responder(chat: bool, **fields: Any) -> Responder:
    described: dict[str, Any] = {
        "response_id": "id-1", "created": 17, "model": "demo", "system_fingerprint": "fp_1", "token_text": token_text,
        "token_bytes": lambda token: bytes([token]),
        "kv_transfer": {"remote_engine_id": "a:1", "remote_host": "a", "remote_port": 7},
    }  # fmt: skip
    if chat:
        fields = {"messages": [{"role": "user", "content": "hi"}], **fields}
        return ChatResponder(parse_chat(json.dumps(fields).encode()), **described)
    return CompletionResponder(parse_completion(json.dumps({"prompt": "hi", **fields}).encode()), **described)


def entry(token: int, rank: int = 1, others: int = 2) -> dict[int, Logprob]:
    """A position's log-probabilities: the token that stands there, then the best ones, as the frontend makes them."""
    best = {1000 + i: Logprob(-0.25 * i, i, chr(1000 + i)) for i in range(1, others + 1) if i != rank}
    return {token: Logprob(-0.25 * rank, rank, token_text(token)), **best}


def output_of(prompt: str = "hi", choices: int = 1, *, logprobs: bool = False, scored: bool = False) -> RequestOutput:
    ids = [ord(letter) for letter in prompt]
    output = RequestOutput("id-1", prompt, ids, [CompletionOutput(i) for i in range(choices)], seed=5, cached_tokens=1)
    for choice in output.outputs:
        choice.logprobs = [] if logprobs else None
    if scored:
        output.prompt_logprobs = [None, *(entry(token, rank=2) for token in ids[1:])]
    return output


def grow(choice: CompletionOutput, text: str, held: int = 0) -> None:
    """Add tokens, one a character; the last `held` characters of all are not shown yet."""
    choice.token_ids += [ord(letter) for letter in text]
    whole = "".join(map(chr, choice.token_ids))
    choice.text = whole[: max(len(choice.text), len(whole) - held)]
    if choice.logprobs is not None:
        choice.logprobs += [entry(ord(letter), rank=index % 4 + 1) for index, letter in enumerate(text)]


def end(choice: CompletionOutput, reason: str = "stop", stop_reason: str | int | None = None) -> None:
    choice.text = "".join(map(chr, choice.token_ids))
    choice.finish_reason, choice.stop_reason = reason, stop_reason


def loads(data: bytes) -> dict[str, Any]:
    """Strict JSON: no NaN, no Infinity."""

    def refuse(constant: str) -> Any:
        raise AssertionError(constant)

    found: dict[str, Any] = json.loads(data, parse_constant=refuse)
    return found


# -- whole answers -------------------------------------------------------------------------------------------


def test_a_whole_completion_has_openais_shape() -> None:
    output = output_of()
    grow(output.outputs[0], "abc")
    end(output.outputs[0], "stop", "X")
    found = loads(responder(False, seed=5).full([output]))
    assert found == {
        "id": "id-1", "object": "text_completion", "created": 17, "model": "demo", "system_fingerprint": "fp_1",
        "seed": 5,
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": "X"}],
        "usage": {
            "prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }  # fmt: skip
    Completion.model_validate(found, strict=True)


def test_a_whole_chat_has_openais_shape() -> None:
    output = output_of()
    grow(output.outputs[0], "abc")
    end(output.outputs[0], "length")
    found = loads(responder(True, seed=5).full([output]))
    message = {"role": "assistant", "content": "abc", "refusal": None}
    assert found["choices"] == [
        {"index": 0, "message": message, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]
    assert (found["object"], found["seed"]) == ("chat.completion", 5)
    ChatCompletion.model_validate(found, strict=True)


def test_choices_of_several_prompts_are_numbered_through_and_prompts_count_once() -> None:
    outputs = [output_of("hi", 2), output_of("you", 2)]
    for letter, choice in zip("abcd", (c for output in outputs for c in output.outputs), strict=True):
        grow(choice, letter)
        end(choice)
    found = loads(responder(False, prompt=["hi", "you"], n=2).full(outputs))
    assert [(choice["index"], choice["text"]) for choice in found["choices"]] == [*enumerate("abcd")]
    usage = found["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 4)
    assert usage["prompt_tokens_details"]["cached_tokens"] == 2


def test_completion_logprobs_hold_the_token_and_the_best_ones() -> None:
    output = output_of(logprobs=True)
    grow(output.outputs[0], "ab")  # of ranks 1 and 2
    grow(output.outputs[0], "c")
    output.outputs[0].logprobs[2] = entry(ord("c"), rank=9)  # type: ignore[index]
    end(output.outputs[0])
    found = loads(responder(False, logprobs=2).full([output]))
    logprobs = found["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-0.25, -0.5, -2.25]
    assert logprobs["text_offset"] == [0, 1, 2]
    first, second = chr(1001), chr(1002)
    assert logprobs["top_logprobs"] == [
        {"a": -0.25, second: -0.5},
        {first: -0.25, "b": -0.5},
        {first: -0.25, second: -0.5, "c": -2.25},
    ]
    Completion.model_validate(found)


def test_logprobs_0_tell_of_the_token_alone() -> None:
    output = output_of(logprobs=True)
    grow(output.outputs[0], "a")
    end(output.outputs[0])
    assert loads(responder(False, logprobs=0).full([output]))["choices"][0]["logprobs"]["top_logprobs"] == [
        {"a": -0.25}
    ]
    content = loads(responder(True, logprobs=True).full([output]))["choices"][0]["logprobs"]["content"]
    assert content[0]["top_logprobs"] == []


def test_chat_logprobs_have_bytes_and_the_best_ones_only() -> None:
    output = output_of(logprobs=True)
    grow(output.outputs[0], "\u00e9")
    output.outputs[0].logprobs = [entry(ord("\u00e9"), rank=9)]
    end(output.outputs[0])
    found = loads(responder(True, logprobs=True, top_logprobs=1).full([output]))
    [item] = found["choices"][0]["logprobs"]["content"]
    best = {"token": chr(1001), "logprob": -0.25, "bytes": [*chr(1001).encode()]}
    assert item == {"token": "\u00e9", "logprob": -2.25, "bytes": [195, 169], "top_logprobs": [best]}
    assert found["choices"][0]["logprobs"]["refusal"] is None
    ChatCompletion.model_validate(found, strict=True)


def test_a_token_that_is_part_of_a_character_has_its_own_bytes() -> None:
    output = output_of(logprobs=True)
    choice = output.outputs[0]
    grow(choice, "\xc3\xa9")
    choice.logprobs = [{0xC3: Logprob(-1.0, 1, "\ufffd")}, {0xA9: Logprob(-1.0, 1, "\ufffd")}]
    end(choice)
    items = loads(responder(True, logprobs=True).full([output]))["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(item["bytes"]) for item in items).decode() == "\u00e9"


def test_impossible_tokens_and_tokens_without_a_text_are_valid_json() -> None:
    output = output_of(logprobs=True)
    choice = output.outputs[0]
    grow(choice, "a")
    choice.logprobs = [{ord("a"): Logprob(-math.inf, 2, None), 98: Logprob(-0.0, 1, None)}]
    end(choice)
    completion = loads(responder(False, logprobs=1).full([output]))["choices"][0]["logprobs"]
    assert completion["token_logprobs"] == [LEAST] and completion["top_logprobs"] == [{"b": 0.0, "a": LEAST}]
    chat = loads(responder(True, logprobs=True, top_logprobs=1).full([output]))["choices"][0]["logprobs"]["content"]
    assert (chat[0]["logprob"], chat[0]["token"]) == (LEAST, "a")


def test_of_tokens_with_equal_texts_the_likelier_is_told() -> None:
    output = output_of(logprobs=True)
    choice = output.outputs[0]
    grow(choice, "a")
    choice.logprobs = [{ord("a"): Logprob(-3.0, 2, "\ufffd"), 7: Logprob(-0.1, 1, "\ufffd")}]
    end(choice)
    logprobs = loads(responder(False, logprobs=2).full([output]))["choices"][0]["logprobs"]
    assert (logprobs["token_logprobs"], logprobs["top_logprobs"]) == ([-3.0], [{"\ufffd": -0.1}])


def test_echo_puts_the_prompt_and_its_logprobs_before_the_text() -> None:
    output = output_of("hey", logprobs=True, scored=True)
    grow(output.outputs[0], "a")
    end(output.outputs[0], "length")
    found = loads(responder(False, prompt="hey", echo=True, logprobs=1, max_tokens=1).full([output]))
    choice = found["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "heya" and "prompt_logprobs" not in choice
    assert logprobs["tokens"] == ["h", "e", "y", "a"] and logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"] == [None, -0.5, -0.5, -0.25]
    assert logprobs["top_logprobs"][:2] == [None, {chr(1001): -0.25, "e": -0.5}]


def test_a_scored_prompt_without_any_token_is_an_answer() -> None:
    output = output_of("hey", logprobs=True, scored=True)
    end(output.outputs[0], "length")
    maker = responder(False, prompt="hey", echo=True, logprobs=1, max_tokens=0)
    choice = loads(maker.full([output]))["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hey", "length")
    assert len(choice["logprobs"]["tokens"]) == 3
    [chunk] = maker.chunks(0, output)
    assert loads(chunk)["choices"] == [choice]


def test_an_echoed_prompt_of_token_ids_has_their_texts() -> None:
    output = output_of("hey")
    output.prompt = None
    end(output.outputs[0], "length")
    assert loads(responder(False, echo=True).full([output]))["choices"][0]["text"] == "hey"


@pytest.mark.parametrize("chat", [False, True])
def test_prompt_logprobs_have_vllms_shape(chat: bool) -> None:
    output = output_of("hey", scored=True)
    grow(output.outputs[0], "a")
    end(output.outputs[0])
    found = loads(responder(chat, prompt_logprobs=1).full([output]))
    scored = found["prompt_logprobs"] if chat else found["choices"][0]["prompt_logprobs"]
    assert scored[0] is None and len(scored) == 3
    assert scored[1] == {
        str(ord("e")): {"logprob": -0.5, "rank": 2, "decoded_token": "e"},
        "1001": {"logprob": -0.25, "rank": 1, "decoded_token": chr(1001)},
    }


@pytest.mark.parametrize("chat", [False, True])
def test_token_ids_are_returned_where_asked_for(chat: bool) -> None:
    output = output_of("hi")
    grow(output.outputs[0], "ab")
    end(output.outputs[0])
    found = loads(responder(chat, return_token_ids=True).full([output]))
    assert found["choices"][0]["token_ids"] == [97, 98]
    assert (found if chat else found["choices"][0])["prompt_token_ids"] == [104, 105]
    assert "token_ids" not in loads(responder(chat).full([output]))["choices"][0]


def test_seeds_of_63_bits_are_told_exactly() -> None:
    output = output_of()
    end(output.outputs[0])
    assert loads(responder(False, seed=2**63 - 1).full([output]))["seed"] == 2**63 - 1


# -- where echoed tokens stand -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pieces", "expected"),
    [
        ("ab cd", ["ab", " cd"], [0, 2]),
        ("ab cd", ["<s>", " ab", " cd"], [0, 0, 2]),  # a token that is not in the text, and a space that it lost
        ("a\U0001f600b", ["a", "\ufffd", "\ufffd", "b"], [0, 1, 1, 2]),  # a character of two tokens
        ("", ["<s>"], [0]),
        ("aaaa", ["a", "a", "a", "a"], [0, 1, 2, 3]),
        ("ab", ["", "ab"], [0, 0]),
    ],
)
def test_offsets_follow_the_text(text: str, pieces: list[str], expected: list[int]) -> None:
    assert offsets(text, pieces) == expected


@given(st.lists(st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=4), max_size=20))
def test_offsets_are_exact_where_the_pieces_are_the_text(pieces: list[str]) -> None:
    assert offsets("".join(pieces), pieces) == [len("".join(pieces[:i])) for i in range(len(pieces))]


# -- streams -------------------------------------------------------------------------------------------------


def run(maker: Responder, outputs: list[RequestOutput], steps: list[tuple[int, int, str, int]]) -> list[dict[str, Any]]:
    """Grow outputs step by step (prompt, choice, text, characters held back), end them, and gather the chunks."""
    chunks: list[bytes] = []
    for prompt, choice, text, held in steps:
        grow(outputs[prompt].outputs[choice], text, held)
        chunks += maker.chunks(prompt, outputs[prompt])
    for number, output in enumerate(outputs):
        for choice in output.outputs:
            end(choice, "stop", choice.index)
            chunks += maker.chunks(number, output)
        assert maker.chunks(number, output) == []
    return [loads(chunk) for chunk in chunks]


def added_up(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """One choice of a stream as a choice of a whole answer."""
    whole: dict[str, Any] = {"index": index, "text": "", "logprobs": None}
    for chunk in chunks:
        [choice] = chunk["choices"]
        if choice["index"] != index:
            continue
        assert "finish_reason" not in whole or whole["finish_reason"] is None, "something came behind the end"
        whole["text"] += choice.get("text", choice.get("delta", {}).get("content", ""))
        for name, values in (choice["logprobs"] or {}).items():
            whole["logprobs"] = whole["logprobs"] or {}
            whole["logprobs"][name] = None if values is None else whole["logprobs"].get(name, []) + values
        for name in choice.keys() & {"prompt_token_ids", "prompt_logprobs"}:
            assert name not in whole
            whole[name] = choice[name]
        if "token_ids" in choice:
            whole["token_ids"] = whole.get("token_ids", []) + choice["token_ids"]
        whole.update({name: choice[name] for name in ("finish_reason", "stop_reason") if name in choice})
    return whole


STEPS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.text('ab\u00e9\n"\\', max_size=3), st.integers(0, 3)),
    max_size=15,
)


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, logprobs=st.none() | st.integers(0, 3), ids=st.booleans(), echo=st.booleans(), scored=st.booleans())
def test_a_completions_stream_adds_up_to_the_whole_answer(
    steps: list[tuple[int, int, str, int]], logprobs: int | None, ids: bool, echo: bool, scored: bool
) -> None:
    fields: dict[str, Any] = {
        "prompt": ["hi", "you"],
        "n": 2,
        "logprobs": logprobs,
        "return_token_ids": ids,
        "echo": echo,
    }
    if scored:
        fields["prompt_logprobs"] = 1
    needs = scored or (echo and logprobs is not None)
    outputs = [output_of(prompt, 2, logprobs=logprobs is not None, scored=needs) for prompt in ("hi", "you")]
    maker = responder(False, seed=1, stream=True, **fields)
    chunks = run(maker, outputs, steps)
    whole = loads(maker.full(outputs))
    assert [added_up(chunks, index) for index in range(4)] == whole["choices"]
    for chunk in chunks:
        assert (chunk["id"], chunk["object"], chunk["seed"]) == ("id-1", "text_completion", 1)
    assert "usage" not in chunks[0]


@settings(max_examples=100, deadline=None)
@given(steps=STEPS, logprobs=st.none() | st.integers(0, 3), ids=st.booleans(), scored=st.booleans())
def test_a_chats_stream_adds_up_to_the_whole_answer(
    steps: list[tuple[int, int, str, int]], logprobs: int | None, ids: bool, scored: bool
) -> None:
    fields: dict[str, Any] = {"n": 2, "return_token_ids": ids, "prompt_logprobs": 1 if scored else None}
    if logprobs is not None:
        fields |= {"logprobs": True, "top_logprobs": logprobs}
    outputs = [output_of("hi", 2, logprobs=logprobs is not None, scored=scored)]
    maker = responder(True, seed=1, stream=True, **fields)
    chunks = run(maker, outputs, [(0, choice, text, held) for _, choice, text, held in steps])
    whole = loads(maker.full(outputs))
    for index, choice in enumerate(whole["choices"]):
        choice["text"] = choice.pop("message")["content"]
        assert added_up(chunks, index) == choice
        first = next(chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index)
        assert first["delta"] == {"role": "assistant", "content": ""} and first["finish_reason"] is None
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [chunk[name] for chunk in chunks if name in chunk] == ([whole[name]] if name in whole else [])
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)


@pytest.mark.parametrize("chat", [False, True])
def test_chunks_are_what_openais_client_reads(chat: bool) -> None:
    output = output_of(logprobs=True)
    maker = responder(chat, stream=True, **({"logprobs": True, "top_logprobs": 1} if chat else {"logprobs": 1}))
    chunks = run(maker, [output], [(0, 0, "ab", 0), (0, 0, "c", 1)])
    kind: Callable[[Any], Any] = ChatCompletionChunk.model_validate if chat else Completion.model_validate
    for chunk in chunks[:-1]:
        if chat:
            kind(chunk)
        assert chunk["choices"][0]["finish_reason"] is None
    assert kind(chunks[-1]).choices[0].finish_reason == "stop"


@pytest.mark.parametrize("chat", [False, True])
def test_a_choice_without_news_makes_no_chunk(chat: bool) -> None:
    output = output_of(choices=2)
    maker = responder(chat, n=2, stream=True)
    maker.chunks(0, output)
    grow(output.outputs[1], "abc", held=3)  # all of it could still become a stop string
    assert maker.chunks(0, output) == []
    grow(output.outputs[1], "d")
    assert [loads(chunk)["choices"][0]["index"] for chunk in maker.chunks(0, output)] == [1]


@pytest.mark.parametrize("chat", [False, True])
def test_a_failed_choice_gets_its_text_and_no_end(chat: bool) -> None:
    output = output_of()
    maker = responder(chat, stream=True)
    grow(output.outputs[0], "ab")
    output.outputs[0].finish_reason, output.outputs[0].error = "error", "it broke"
    chunks = [loads(chunk)["choices"][0] for chunk in maker.chunks(0, output)]
    assert all(choice["finish_reason"] is None for choice in chunks)
    assert "".join(choice.get("text", choice.get("delta", {}).get("content", "")) for choice in chunks) == "ab"
    assert maker.chunks(0, output) == []


@pytest.mark.parametrize("chat", [False, True])
def test_an_aborted_choice_says_so(chat: bool) -> None:
    output = output_of()
    end(output.outputs[0], "abort")
    last = loads(responder(chat, stream=True).chunks(0, output)[-1])["choices"][0]
    assert last["finish_reason"] == "abort"


def test_nothing_is_said_before_the_prompt_is_scored() -> None:
    output = output_of("hey", choices=2, logprobs=True, scored=True)
    scored, output.prompt_logprobs = output.prompt_logprobs, [None]
    maker = responder(False, prompt="hey", n=2, stream=True, echo=True, logprobs=1)
    grow(output.outputs[1], "ab")
    assert maker.chunks(0, output) == []
    output.prompt_logprobs = scored
    chunks = [loads(chunk)["choices"][0] for chunk in maker.chunks(0, output)]
    assert [(choice["index"], choice["text"]) for choice in chunks] == [(0, "hey"), (1, "heyab")]


@pytest.mark.parametrize("chat", [False, True])
def test_usage_comes_behind_all_choices(chat: bool) -> None:
    output = output_of()
    maker = responder(chat, stream=True, stream_options={"include_usage": True})
    chunks = run(maker, [output], [(0, 0, "abc", 0)])
    assert all(chunk["usage"] is None for chunk in chunks)
    [last] = map(loads, maker.closing([output]))
    assert last["choices"] == [] and last["id"] == "id-1"
    assert last["usage"] == loads(maker.full([output]))["usage"]
    (ChatCompletionChunk if chat else Completion).model_validate(last)


@pytest.mark.parametrize("chat", [False, True])
def test_continuous_usage_counts_what_has_gone_out(chat: bool) -> None:
    output = output_of()
    maker = responder(chat, stream=True, stream_options={"continuous_usage_stats": True})
    chunks = run(maker, [output], [(0, 0, "a", 0), (0, 0, "bc", 0)])
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == ([0] if chat else []) + [1, 3, 3]


@pytest.mark.parametrize("chat", [False, True])
def test_an_answer_that_is_decoded_elsewhere_says_where_its_blocks_are(chat: bool) -> None:
    made = responder(chat, kv_transfer_params={"do_remote_decode": True, "remote_engine_id": None})
    told = json.loads(made.full([output_of()]))["kv_transfer_params"]
    assert told == {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": None,
        "remote_engine_id": "a:1",
        "remote_host": "a",
        "remote_port": 7,
    }
    again = responder(chat, kv_transfer_params=told)._call.params.kv_transfer_params
    assert again == {each: told[each] for each in KV_TRANSFER_FIELDS}
    assert "kv_transfer_params" not in json.loads(responder(chat).full([output_of()]))
