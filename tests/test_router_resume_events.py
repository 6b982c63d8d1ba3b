"""Streams of Messages and Responses that go on at another server: the two halves are one, however either was cut."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from quire.engine.outputs import CompletionOutput, RequestOutput
from quire.router.resume import CannotResumeError
from quire.router.resume_events import EventsPosition
from quire.server.messages import MessagesResponder
from quire.server.openai_responses import ResponseObject, ResponsesResponder
from quire.server.openai_responses_protocol import parse_response
from quire.server.protocol import parse_chat
from quire.text.reply import ContentText, ReasoningText, ReplyEvent, ToolCallArguments, ToolCallBegin

REPLY: list[ReplyEvent] = [
    *map(ReasoningText, "so then"),
    *map(ContentText, "I äsk 😀."),
    ToolCallBegin(0, "a1", "weather"),
    *(ToolCallArguments(0, letter) for letter in '{"city":"Oslo"}'),
    ToolCallBegin(1, "a2", "time"),
    *(ToolCallArguments(1, letter) for letter in "{}"),
]


def responder(path: str, server: int, fingerprint: str = "f") -> Any:
    if path == "/v1/messages":
        call = parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}')
        return MessagesResponder(call, "msg-1", "m", fingerprint)
    asked = parse_response(b'{"input": "x", "stream": true, "seed": 1}', find=lambda name: b"[]")
    store: Any = None
    return ResponsesResponder(ResponseObject(asked, f"resp_{server:032x}", "m", fingerprint), store, None)


def stream(path: str, server: int, chance: random.Random, fingerprint: str = "f") -> list[bytes]:
    """A server's events, a piece of text in each as long as timing may have it."""
    made, made_by, count = [], responder(path, server, fingerprint), 0
    while count < len(REPLY):
        count = min(len(REPLY), count + chance.randint(1, 6))
        reason = "stop" if count == len(REPLY) else None
        choice = CompletionOutput(0, token_ids=[1] * count, finish_reason=reason, events=REPLY[:count])
        made += made_by.chunks(0, RequestOutput("r", None, [1, 2, 3], [choice], seed=0))
    return [b"event: %b\ndata: %b\n\n" % (json.loads(body)["type"].encode(), body) for body in made]


def joined(events: list[bytes]) -> list[dict[str, Any]]:
    """The events, with pieces of one text made one."""
    found: list[dict[str, Any]] = []
    for event in events:
        body = json.loads(event.partition(b"data: ")[2])
        body.pop("sequence_number", None)
        for head in (body.get("response", {}), body):
            head.pop("created_at", None)
        last = found[-1] if found else {}
        pieces = "delta" in body and last.get("type") == body["type"] != "message_delta"
        if pieces:
            if isinstance(body["delta"], str):
                last["delta"] += body["delta"]
            else:
                last["delta"] |= {
                    key: last["delta"][key] + text for key, text in body["delta"].items() if key != "type"
                }
        else:
            found.append(body)
    return found


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("seed", range(15))
def test_two_halves_of_a_stream_of_named_events_make_one(path: str, seed: int) -> None:
    chance, position, sent = random.Random(seed), EventsPosition(), []
    part = stream(path, 1, chance)
    for server in range(2, 2 + chance.randint(1, 3)):  # it is lost so many times
        for event in part[: chance.randrange(server == 2, len(part))]:
            sent.append(event)
            position.sent(event)
        continued = position.follow()
        part = [new for event in stream(path, server, chance) if (new := continued.events(event))]
        last = server
    assert not position.has_finished
    sent += part
    whole, found = joined(stream(path, 1, chance)), joined(sent)
    if path == "/v1/responses":  # a stored one is found by the id at its end
        assert found[-1]["response"]["id"] == f"resp_{last:032x}"
        found[-1]["response"]["id"] = whole[-1]["response"]["id"]
        numbers = [json.loads(event.partition(b"data: ")[2])["sequence_number"] for event in sent]
        assert numbers == [*range(len(numbers))]
    assert found == whole


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_a_stream_of_named_events_does_not_go_on_where_other_kernels_compute(path: str) -> None:
    chance, position = random.Random(1), EventsPosition()
    position.sent(stream(path, 1, chance)[0])
    with pytest.raises(CannotResumeError, match="compute in another way"):
        position.follow().events(stream(path, 2, chance, "other")[0])


def test_a_response_that_its_server_gives_up_goes_on_and_one_that_failed_does_not() -> None:
    for code, lost in (("shutting_down", "bye"), ("generation_failed", None)):
        error = {"type": "response.failed", "response": {"error": {"code": code, "message": "bye"}}}
        data = b"event: response.failed\ndata: %b\n\n" % json.dumps(error).encode()
        before, message = EventsPosition().before_loss(b"event: x\ndata: {}\n\n" + data)
        assert message == lost and (before == b"event: x\ndata: {}\n\n") == (lost is not None)
