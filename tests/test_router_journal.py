"""Streams that go on at another server, with its real routes: the two halves are one stream, and nothing is generated
twice."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from quire.engine.outputs import CompletionOutput, Logprob, RequestOutput
from quire.fleet.cached_prompts import CachedPrompts
from quire.router.resume import Journal as Passed
from quire.server.app import create_app
from quire.server.context import AppContext
from quire.server.journal import Journal, Opening, earlier_updates, read_entries
from quire.server.messages import MessagesResponder
from quire.server.openai_responses import ResponseObject, ResponsesResponder
from quire.server.openai_responses_protocol import parse_response
from quire.server.protocol import parse_chat
from quire.text.reply import ContentText, ReasoningText, ReplyEvent, ToolCallArguments, ToolCallBegin
from tests.router_fakes import RouterThread
from tests.server_fakes import AppThread, FakeEngineClient, Script, app_context, wait_until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "seed": 1, "stream": True}
COMPLETION: dict[str, Any] = {"prompt": "abc", "seed": 1, "stream": True, "max_tokens": 40}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", COMPLETION),
    (
        "/v1/completions",
        COMPLETION | {"n": 2, "logprobs": 2, "return_token_ids": True, "echo": True, "prompt_logprobs": 1},
    ),
    ("/v1/completions", COMPLETION | {"prompt": ["abc", "d"], "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", CHAT | {"max_tokens": 40, "logprobs": True, "top_logprobs": 1}),
    ("/v1/messages", CHAT | {"max_tokens": 40}),
    ("/v1/responses", {"input": "hi", "seed": 1, "stream": True, "max_output_tokens": 40}),
]


class Served:
    """A server's routes, with an engine that can be told to wait."""

    def __init__(self) -> None:
        documents = {"prompts": CachedPrompts("1.1").told(-1)}
        self.client = FakeEngineClient(script=Script(seconds=0.002), documents=documents)
        self.context: AppContext = app_context(self.client)
        self.thread = AppThread(lambda: create_app(self.context))

    @property
    def url(self) -> str:
        return self.thread.url


@pytest.fixture
def two() -> Iterator[list[Served]]:
    servers = [Served(), Served()]
    with servers[0].thread, servers[1].thread:
        yield servers


def read(router: RouterThread, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a stream; what follows is checked of each: whole JSON, in order."""
    with router.http.stream("POST", path, json=body, headers={"x-request-id": "mine"}) as answer:
        assert answer.status_code == 200, answer.read()
        lines = [*answer.iter_lines()]
        assert "x-quire-journal" not in answer.headers and not any("quire-" in line for line in lines)
    datas = [line[6:] for line in lines if line.startswith("data: ")]
    if path not in ("/v1/messages", "/v1/responses"):
        assert datas.pop() == "[DONE]" and "[DONE]" not in datas
    return [json.loads(data) for data in datas]


def joined(events: list[dict[str, Any]]) -> list[Any]:
    """What the events say, however they were cut: all texts and lists appended by where they are."""
    found: dict[str, Any] = {}

    def add(at: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{at}.{key}", each)
        elif (
            isinstance(value, str | list)
            and found.get(at) is not None
            and at.rpartition(".")[2] not in ("type", "id", "object")
        ):
            found[at] += value
        else:
            found[at] = value

    kinds: list[str] = []
    for event in events:
        event.pop("created", None)
        kind = event.pop("type", "")
        kinds += [kind] if kinds[-1:] != [kind] or not kind.endswith("delta") else []
        for name in ("sequence_number", "usage"):
            event.pop(name, None) if name != "usage" or event.get("choices") != [] else None
        if "response" in event:
            event["response"].pop("created_at")
            event["response"].pop("id")
        text = json.dumps(event)
        where = kind if not kind.endswith("delta") else f"{kind}{event.get('index', event.get('output_index'))}"
        for choice in event.pop("choices", ()):
            add(f"{choice.pop('index')}", choice)
        if kind.endswith("delta") and kind != "message_delta":
            add(where, event["delta"])
        elif kind:
            found.setdefault("all", []).append(text.replace("resp_", ""))
    return [found, kinds]


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=range(len(REQUESTS)))
def test_a_stream_goes_on_at_another_server_after_its_last_token(
    two: list[Served], path: str, body: dict[str, Any]
) -> None:
    with RouterThread(two) as router, ThreadPoolExecutor(1) as pool:  # type: ignore[arg-type]
        stream = pool.submit(read, router, path, body)
        assert wait_until(lambda: any(len(one.outputs_so_far()) >= 9 for one in map(Progress, two)))
        first = next(one for one in two if one.client.calls)
        second = two[1 - two.index(first)]
        first.thread.call(_stop(first.context))
        events = stream.result()
        assert sum(call.earlier for call in second.client.calls) >= 9, "what is known was generated again"
        assert sum(call.output.metrics.total_seconds > 0 for call in second.client.calls) >= 1
        whole = read(router, path, body)
        numbers = [event["sequence_number"] for event in events if "sequence_number" in event]
        assert numbers == [*range(len(numbers))]
        ids = {str(event.get("id") or event.get("response", {}).get("id")) for event in events} - {"None"}
        assert len(ids) <= 1, "one stream has one id"
        assert len({event.get("created") for event in events}) == 1
        if path != "/v1/responses":  # whose items have random ids
            assert joined(events) == joined(whole)
        assert len(joined(events)[1]) == len(joined(whole)[1])


class Progress:
    """How far a server's engine has come."""

    def __init__(self, server: Served) -> None:
        self._server = server

    def outputs_so_far(self) -> list[int]:
        calls = self._server.client.calls
        return calls[0].output.outputs[0].token_ids if calls else []


async def _stop(context: AppContext) -> None:
    context.stop()


def test_a_journal_of_other_kernels_or_of_another_request_is_refused(two: list[Served]) -> None:
    fingerprint = two[0].client.info.fingerprint  # type: ignore[union-attr]

    def ask(journal: bytes, **more: Any) -> httpx2.Response:
        content = json.dumps(COMPLETION | more).encode() + journal
        headers = {"content-type": "application/json", "x-quire-journal": str(len(journal))}
        return httpx2.post(f"{two[0].url}/v1/completions", content=content, headers=headers)

    def entry(pieces: Any, fingerprint: str = fingerprint) -> bytes:
        return json.dumps([[pieces, 0, {"id": "a", "created": 1, "fingerprint": fingerprint}]]).encode()

    assert ask(b"").status_code == 200 and ask(entry([[0, [97, 98]]])).status_code == 200
    assert ask(entry([], "other")).status_code == 409
    wrong: list[Any] = [
        [[1, [97]]],  # a choice that it has not
        [[0, [300]]],  # a token that there is not
        [[0, [97] * 40]],  # it would have ended
        [[0, [97], "error"]],
        [[0, [97], None, None, 0, [[[97], [-1.0], [1]]]]],  # log-probabilities that nobody asked for
        [[-1, [97]]],
        7,
    ]
    for pieces in wrong:
        assert ask(entry(pieces)).status_code == 400, pieces
    assert ask(b"[").status_code == 400


REPLY: list[ReplyEvent] = [
    *map(ReasoningText, "so then"),
    *map(ContentText, "I äsk 😀."),
    ToolCallBegin(0, "a1", "weather"),
    *(ToolCallArguments(0, letter) for letter in '{"city":"Oslo"}'),
    ToolCallBegin(1, "a2", "time"),
    *(ToolCallArguments(1, letter) for letter in "{}"),
]


def responder(path: str) -> Any:
    if path == "/v1/messages":
        return MessagesResponder(parse_chat(b'{"messages": [{"role": "user", "content": "x"}]}'), "msg-1", "m", "f")
    asked = parse_response(b'{"input": "x", "stream": true, "seed": 1}', find=lambda name: b"[]")
    store: Any = None
    return ResponsesResponder(ResponseObject(asked, f"resp_{1:032x}", "m", "f", created=1), store, None)


def output(count: int) -> RequestOutput:
    """The first tokens of a reply, one for each of its parts."""
    ends = "stop" if count == len(REPLY) else None
    choice = CompletionOutput(0, token_ids=[1] * count, finish_reason=ends, events=REPLY[:count])
    return RequestOutput("r", None, [1, 2, 3], [choice], seed=0)


def told(made: list[bytes]) -> list[Any]:
    """The events, with pieces of one text made one, and without their numbers."""
    found: list[Any] = []
    for body in map(json.loads, made):
        body.pop("sequence_number", None)
        delta = body.pop("delta", None)
        pieces = delta if isinstance(delta, dict) else {"": delta}
        text = "".join(str(value) for key, value in pieces.items() if key != "type")
        if found and found[-1][0] == body and delta is not None:
            found[-1][1] += text
        else:
            found.append([body, text])
    return found


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("seed", range(10))
def test_reasoning_and_tool_calls_go_on_in_the_second_half(path: str, seed: int) -> None:
    chance, count, sent = random.Random(seed), 0, list[bytes]()
    made_by = responder(path)
    while count < len(REPLY):
        count = min(len(REPLY), count + chance.randint(1, 6))
        sent += made_by.chunks(0, output(count))
        if chance.random() < 0.2:  # it is lost: another one replays what is known
            events, made_by = made_by.num_events, responder(path)
            made_by.chunks(0, output(count))
            made_by.num_events = events
    whole = responder(path).chunks(0, output(len(REPLY)))
    assert told(sent) == told(whole)
    if path == "/v1/responses":
        assert [json.loads(event)["sequence_number"] for event in sent] == [*range(len(sent))]


def test_what_a_journal_says_is_what_was_noted() -> None:
    choice = CompletionOutput(0, logprobs=[])
    output, journal = RequestOutput("r", None, [1, 2], [choice], seed=0), Journal(1, Opening("i", 3, "f"))
    output.prompt_logprobs = [None]
    comments = []
    for token in range(5):
        choice.token_ids.append(token)
        assert choice.logprobs is not None
        choice.logprobs.append({token: Logprob(-0.1 * token, 2), 9: Logprob(-0.01, 1)})
        if token == 2:
            output.prompt_logprobs.append({2: Logprob(-1.5, 1)})
        journal.note(0, output)
        comments.append(journal.comment())
    choice.finish_reason, choice.stop_reason = "stop", "x"
    journal.note(0, output)
    comments.append(journal.end())

    passed = Passed()
    data = b"".join(b"data: %d\n\n%b" % each for each in enumerate(comments))
    got = b"".join(passed.events(data[at : at + 7]) for at in range(0, len(data), 7))
    assert got == b"".join(b"data: %d\n\n" % number for number in range(6)) and passed.has_ended
    entries = read_entries(passed.body())
    assert entries[0].opening == Opening("i", 3, "f") and entries[1].opening is None
    prepared = type("P", (), {"params": type("Q", (), {"n": 1, "logprobs": 1, "prompt_logprobs": 1})})()
    prepared.max_tokens, prepared.token_ids = 9, [1, 2]
    [update] = earlier_updates(entries, [prepared], 10)[0]
    assert (update.tokens, update.finish_reason) == ([0, 1, 2, 3, 4], "stop")
    assert update.logprobs and [each.values for each in update.logprobs][1] == [-0.1, -0.01]
    assert update.prompt_logprobs and update.prompt_logprobs[0].ids == [2]


def test_what_has_no_entry_behind_it_is_not_passed_on() -> None:
    passed = Passed()
    assert passed.events(b'data: {"text": ": quire-end"}\n\n: quire-entry ') == b""
    assert passed.events(b"[1]\n\ndata: b\n\n") == b'data: {"text": ": quire-end"}\n\n'
    assert passed.events(b": quire-lost bye\n\n") == b"" and passed.lost == "bye"
    passed.begin()
    assert passed.events(b": waiting\n\n: quire-entry \n\n") == b": waiting\n\n" and not passed.lost
    assert passed.body() == b"[[1]]"


def test_a_journal_that_grows_too_large_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.router.resume.MAX_JOURNAL_BYTES", 100)
    passed = Passed()
    for number in range(100):
        assert passed.events(b"data: x\n\n: quire-entry [%d]\n\n" % number) == b"data: x\n\n"
        assert len(passed.body()) <= 100
    assert not passed.is_kept and passed.body() == b""
