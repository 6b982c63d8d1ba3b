"""`quire route` in front of real servers, as their users meet them: joined, killed, drained."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from quire import LLM, SamplingParams
from tests.http_tools import EventStream, ServeProcess, wait_until

KEY = "sk-of-the-fleet"
PROMPT = "class Tree:\n    def insert(self, key):\n"
PARAMS: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 200}


class RouteProcess(ServeProcess):
    """`quire route ... --port 0`."""

    def __init__(self, *arguments: str, key: str = "") -> None:
        super().__init__(wait="url", key=key)
        self.command = [sys.executable, "-m", "quire.cli.main", "route", *arguments, "--port", "0"]

    def up(self) -> set[str]:
        """Servers that take requests."""
        return {one["server"] for one in self.json("/router/status")["servers"] if one["state"] == "up"}


class Fleet:
    """A router, and two servers that have joined it; those that were killed are replaced."""

    def __init__(self) -> None:
        self.router = RouteProcess("--api-key", KEY, key=KEY)
        self.servers: list[ServeProcess] = []

    def __enter__(self) -> Fleet:
        self.router.__enter__()
        self.fill()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (*self.servers, self.router):
            one.stop()

    def fill(self) -> None:
        """Two servers are up."""
        self.servers = [one for one in self.servers if one.process.poll() is None]
        while len(self.servers) < 2:
            server = ServeProcess("--api-key", KEY, "--admin", "--join", self.router.url, key=KEY, wait="nothing")
            server.__enter__()
            self.servers.append(server)
        for one in self.servers:
            one.wait_for_url()
            one.wait_ready()
        wait_until(lambda: len(self.router.up()) == 2)

    def kill(self, address: str) -> None:
        """`kill -9` of all of a server."""
        [server] = [one for one in self.servers if address.endswith(f":{one.port}")]
        for pid in reversed(server.pids("all")):
            os.kill(pid, signal.SIGKILL)
        server.process.wait()

    def busy(self) -> list[str]:
        """Servers that have a request."""
        found = self.router.json("/router/status")["servers"]
        return [one["server"] for one in found if one["running"] + one["waiting"]]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as one:
        yield one


@pytest.fixture(scope="module")
def expected() -> str:
    with LLM("demo", threads=1) as llm:
        return llm.generate(PROMPT, SamplingParams(**PARAMS))[0].outputs[0].text


def test_a_stream_has_the_same_text_although_its_server_is_killed(fleet: Fleet, expected: str) -> None:
    fleet.fill()
    body = {"prompt": PROMPT, **PARAMS}
    with EventStream(fleet.router.port, "/v1/completions", {"stream": True, **body}, _headers()) as stream:
        events, text = stream.chunks(), ""
        while len(text) < 80:
            text += _text(next(events))
        [server] = fleet.busy()
        fleet.kill(server)
        ids = set()
        for event in events:
            text += _text(event)
            ids.add((event["id"], event["created"], event["system_fingerprint"]))
    assert text == expected
    assert len(ids) == 1
    status = fleet.router.json("/router/status")
    assert status["requests"][0]["resumed"] is True
    wait_until(lambda: "then to" in fleet.router.stderr)


@pytest.mark.slow
def test_a_stream_whose_engine_hangs_goes_on_at_another_server_within_ten_seconds(fleet: Fleet, expected: str) -> None:
    fleet.fill()
    body = {"prompt": PROMPT, "stream": True, **PARAMS}
    with EventStream(fleet.router.port, "/v1/completions", body, _headers()) as stream:
        events = stream.chunks()
        text = _text(next(events))
        [address] = fleet.busy()
        [server] = [one for one in fleet.servers if address.endswith(f":{one.port}")]
        stopped, begin = server.kill("engine", number=signal.SIGSTOP), time.monotonic()
        try:
            text += "".join(map(_text, events))
            assert time.monotonic() - begin < 15
        finally:
            os.kill(stopped, signal.SIGCONT)
    assert text == expected


@pytest.mark.slow
def test_the_official_client_talks_to_a_fleet_of_which_one_is_killed_under_load(fleet: Fleet, expected: str) -> None:
    fleet.fill()
    client = openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key=KEY, max_retries=0)
    texts: list[str] = []

    def ask() -> None:
        stream = client.completions.create(model="demo", prompt=PROMPT, stream=True, **PARAMS)
        texts.append("".join(chunk.choices[0].text for chunk in stream))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(fleet.busy()) == 2)
    fleet.kill(fleet.busy()[0])
    for thread in threads:
        thread.join()
    client.close()
    assert texts == [expected] * 8


def test_a_router_hears_what_servers_have_cached_also_of_what_it_did_not_send(fleet: Fleet) -> None:
    fleet.fill()
    prompt = "".join(f"def add{index}(a, b):\n    return a + {index} * b\n" for index in range(12))
    body = {"prompt": prompt, "max_tokens": 1}
    fleet.router.json("/v1/completions", body)
    first = fleet.router.json("/router/status")["requests"][0]["server"]
    urls = [f"--server=http://{address}" for address in fleet.router.up()]
    with RouteProcess(*urls, "--api-key", KEY, key=KEY) as other:
        wait_until(lambda: len(other.up()) == 2)
        wait_until(lambda: _known(other)[first] >= len(prompt) // 128)
        with EventStream(other.port, "/v1/completions", {"stream": True, **body}, _headers()) as stream:
            assert list(stream.chunks())
        assert other.json("/router/status")["bytes_per_token"] != 4.0, "the stream has told how many tokens it has"
        request = other.json("/router/status")["requests"][0]
        assert request["server"] == first
        assert next(cost["held"] for cost in request["costs"] if cost["server"] == first) > 80
        [server] = [one for one in fleet.servers if first.endswith(f":{one.port}")]
        server.json("/reset_prefix_cache", {})
        wait_until(lambda: _known(other)[first] == _known(fleet.router)[first] == 0)


def _known(router: RouteProcess) -> dict[str, int]:
    return {one["server"]: one["known_chunks"] for one in router.json("/router/status")["servers"]}


def test_anthropics_client_talks_to_a_fleet(fleet: Fleet) -> None:
    fleet.fill()
    asked: dict[str, Any] = {
        "model": "demo",
        "max_tokens": 30,
        "messages": [{"role": "user", "content": PROMPT}],
        "extra_body": {"seed": 5},
    }
    with anthropic.Anthropic(base_url=fleet.router.url, api_key=KEY, max_retries=0) as client:
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [block.to_dict() for block in whole.content]
        del asked["max_tokens"], asked["extra_body"]
        assert client.messages.count_tokens(**asked).input_tokens > 0
        with pytest.raises(anthropic.NotFoundError):
            client.messages.create(**asked | {"model": "other", "max_tokens": 1})
    wrong = anthropic.Anthropic(base_url=fleet.router.url, api_key="wrong", max_retries=0)
    with wrong as client, pytest.raises(anthropic.AuthenticationError):
        client.messages.count_tokens(**asked)


def test_responses_are_found_on_the_server_that_stored_them(fleet: Fleet) -> None:
    fleet.fill()
    with openai.OpenAI(base_url=f"{fleet.router.url}/v1", api_key=KEY, max_retries=0) as client:
        asked: dict[str, Any] = {"model": "demo", "max_output_tokens": 8}
        stored = [client.responses.create(**asked, input=f"{PROMPT} {index}") for index in range(4)]
        for one in stored:
            assert client.responses.retrieve(one.id) == one
            events = list(client.responses.create(**asked, input="more", previous_response_id=one.id, stream=True))
            assert events[-1].response.previous_response_id == one.id
            client.responses.delete(one.id)
            with pytest.raises(openai.NotFoundError):
                client.responses.retrieve(one.id)
            with pytest.raises(openai.BadRequestError) as refused:
                client.responses.create(**asked, input="more", previous_response_id=one.id)
            assert refused.value.code == "previous_response_not_found"
        with pytest.raises(openai.BadRequestError):
            client.get(f"/responses/{stored[0].id}?stream=true", cast_to=object)
        embedded = client.embeddings.create(model="demo", input=["x = 1\n" * 20] * 300)
        assert len(embedded.data) == 300


def test_a_message_and_a_response_go_on_with_the_same_text_although_their_servers_are_killed(fleet: Fleet) -> None:
    common = {"ignore_eos": True, "seed": 3, "stream": True}
    message = {"max_tokens": 400, "messages": [{"role": "user", "content": PROMPT}], **common}
    response = {"max_output_tokens": 400, "input": PROMPT, **common}
    for path, body, delta in (
        ("/v1/messages", message, "content_block_delta"),
        ("/v1/responses", response, "response.output_text.delta"),
    ):
        texts = []
        for kills in (False, True):
            fleet.fill()
            with EventStream(fleet.router.port, path, body, _headers()) as stream:
                events = stream.chunks()
                found = [next(event for event in events if event["type"] == delta)]
                if kills:
                    fleet.kill(fleet.busy()[0])
                found += events
            pieces = [event["delta"] for event in found if event["type"] == delta]
            texts.append("".join(piece if isinstance(piece, str) else piece["text"] for piece in pieces))
            assert found[-1]["type"] in ("message_stop", "response.incomplete")
        assert texts[0] == texts[1] and len(texts[0]) > 200


@pytest.mark.slow
def test_a_server_that_ends_leaves_the_router_and_its_streams_go_on(fleet: Fleet, expected: str) -> None:
    fleet.fill()
    body = {"prompt": PROMPT, **PARAMS}
    with EventStream(fleet.router.port, "/v1/completions", {"stream": True, **body}, _headers()) as stream:
        events = stream.chunks()
        text = _text(next(events))
        [address] = fleet.busy()
        [server] = [one for one in fleet.servers if address.endswith(f":{one.port}")]
        server.process.send_signal(signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)  # at once
        text += "".join(map(_text, events))
    assert text == expected
    server.wait()
    wait_until(lambda: address not in {one["server"] for one in fleet.router.json("/router/status")["servers"]})


@pytest.mark.slow
def test_a_router_that_is_told_to_leave_lets_its_streams_end(expected: str, fleet: Fleet) -> None:
    fleet.fill()
    url = f"http://{next(iter(fleet.router.up()))}"
    with RouteProcess("--server", url, "--api-key", KEY, key=KEY) as router:
        wait_until(lambda: router.up())
        with EventStream(
            router.port, "/v1/completions", {"stream": True, "prompt": PROMPT, **PARAMS}, _headers()
        ) as stream:
            events = stream.chunks()
            text = _text(next(events))
            router.process.send_signal(signal.SIGTERM)
            text += "".join(map(_text, events))
        assert text == expected
        assert router.wait() == 0


@pytest.mark.slow
def test_a_router_picks_the_prefill_server_of_a_long_prompt_and_survives_its_death(cluster_key: str) -> None:
    cluster = ("--cluster-key-file", cluster_key, "--admin")
    long = "\n".join(f"def f{index}(a, b):\n    return a + {index} * b\n" for index in range(40))
    body = {"prompt": long, "max_tokens": 24, "temperature": 0.8, "seed": 11}
    with LLM("demo", threads=1) as llm:
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=11)
        expected = llm.generate(long, params)[0].outputs[0].text
    with (
        ServeProcess("--role", "prefill", *cluster) as prefill,
        ServeProcess(
            "--role", "decode", "--prefill-url", prefill.url, "--prefill-min-tokens", "100000", *cluster
        ) as decode,
        RouteProcess("--server", decode.url, "--prefill-server", prefill.url) as router,
    ):
        wait_until(lambda: len(router.up()) == 2)
        wait_until(lambda: "ready, by" in decode.stderr)
        assert router.json("/v1/completions", body)["choices"][0]["text"] == expected
        wait_until(lambda: router.json("/router/status")["requests"])
        assert router.json("/router/status")["requests"][0]["prefill"] == f"127.0.0.1:{prefill.port}"
        assert decode.json("/view")["stats"]["kv_tiers"]["peer"]["loaded"] > 0  # although it would not ask by itself
        for pid in reversed(prefill.pids("all")):
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: len(router.up()) == 1)
        assert router.json("/v1/completions", {**body, "prompt": f"# again\n{long}"})["choices"][0]["text"]
        assert router.json("/router/status")["requests"][0]["prefill"] is None


def _headers() -> dict[str, str]:
    return {"authorization": f"Bearer {KEY}"}


def _text(event: dict[str, Any]) -> str:
    return "".join(choice["text"] for choice in event["choices"])
