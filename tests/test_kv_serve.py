"""`quire serve --role prefill` and `--role decode` as their users meet them: two servers that answer as one does."""

from __future__ import annotations

import itertools
import os
import random
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from quire import LLM, SamplingParams
from quire.kv.transport import installed
from tests.http_tools import ServeProcess, listening_addresses, wait_until
from tests.redis_server import RedisServer, needs_redis

PROMPT = "\n".join(f"def f{index}(a, b):\n    return a + {index} * b\n" for index in range(24))


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("cluster") / "key"
    file.write_text("a secret of this cluster")
    file.chmod(0o644)  # so that there is something to warn of
    return str(file)


@pytest.fixture(scope="module")
def prefill(key: str) -> Iterator[ServeProcess]:
    with ServeProcess("--role", "prefill", "--cluster-key-file", key, "--admin") as server:
        yield server


@pytest.fixture(scope="module")
def decode(key: str, prefill: ServeProcess) -> Iterator[ServeProcess]:
    with decoding(key, prefill) as server:
        yield server


def decoding(key: str, prefill: ServeProcess, *more: str) -> ServeProcess:
    url = f"dns+{prefill.url.replace('127.0.0.1', 'localhost')}"  # all addresses of a name, which is one here
    return ServeProcess("--role", "decode", "--prefill-url", url, "--cluster-key-file", key, "--admin", *more)


def ready(server: ServeProcess) -> None:
    wait_until(lambda: "ready, by" in server.stderr)


def fetched(server: ServeProcess) -> int:
    """Blocks that came from another engine."""
    return int(server.json("/view")["stats"]["kv_tiers"]["peer"]["loaded"])


def test_a_key_that_all_users_can_read_is_one_warning(prefill: ServeProcess) -> None:
    prefill.wait_ready()
    assert prefill.stderr.count("can be read by every user of this machine") == 1


def test_the_official_client_gets_one_servers_tokens(decode: ServeProcess, prefill: ServeProcess) -> None:
    ready(decode)
    params = {"max_tokens": 24, "temperature": 0.8, "seed": 11}
    with LLM("demo", threads=1) as llm:
        expected = llm.generate(PROMPT, SamplingParams(**params, logprobs=0))[0]
    with openai.OpenAI(base_url=f"{decode.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt=PROMPT, logprobs=0, **params)
        parts = list(client.completions.create(model="demo", prompt=PROMPT, stream=True, **params))
    choice = answer.choices[0]
    assert choice.text == expected.outputs[0].text == "".join(part.choices[0].text for part in parts)
    of_tokens = expected.outputs[0].token_ids, expected.outputs[0].logprobs or []
    values = [entry[token].logprob for token, entry in zip(*of_tokens, strict=True)]
    assert choice.logprobs.token_logprobs == values
    blocks = (len(expected.prompt_token_ids) - 1) // 16
    assert fetched(decode) == blocks and answer.usage.prompt_tokens_details.cached_tokens == 16 * blocks
    assert prefill.json("/view")["stats"]["kv_tiers"]["peer"]["stored"] == blocks
    prompt = len(expected.prompt_token_ids)
    begins = f"0 of {prompt:,} prompt tokens cached here, {16 * blocks:,} from {prefill.url} in "
    ends = f", {prompt - 16 * blocks:,} computed"
    wait_until(lambda: re.search(f"{re.escape(begins)}[0-9.]+ m?s{ends},", decode.stderr))
    [request] = [each for each in decode.json("/view")["finished"] if each["fetches"]]
    assert [each["source"] for each in request["fetches"]] == ["peer", "host"]
    assert request["origins"].startswith(begins) and request["origins"].endswith(ends)


def by_proxy(prefill: ServeProcess, decode: ServeProcess, path: str, body: dict[str, Any], **told: Any) -> Any:
    """As vLLM's example proxy and llm-d's sidecar have a request computed by two servers, one after the other."""
    nothing = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    asked = {"do_remote_decode": True, "do_remote_prefill": False, **nothing}
    first = body | {"kv_transfer_params": asked, "stream": False, "max_tokens": 1}
    first |= {"max_completion_tokens": 1} if "chat" in path else {}
    params = prefill.json(path, first)["kv_transfer_params"]
    assert params.keys() == asked.keys() and params["do_remote_prefill"] and params["remote_host"] == "127.0.0.1"
    return decode.json(path, body | {"kv_transfer_params": params | told})


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_proxy_of_vllms_or_llm_ds_may_stand_before_them(
    path: str, decode: ServeProcess, prefill: ServeProcess
) -> None:
    ready(decode)
    text = "import sys\n" * 11 + path  # too short to be sent elsewhere by itself
    chat = {"messages": [{"role": "user", "content": text}]}
    body = {
        "model": "demo",
        "temperature": 0,
        "seed": 1,
        "max_tokens": 9,
        **(chat if "chat" in path else {"prompt": text}),
    }

    def computed() -> int:
        stats = prefill.json("/view")["stats"]
        return int(stats["prompt_tokens"] - stats["cached_tokens"])

    before, alone = fetched(decode), prefill.json(path, body | {"cache_salt": "another"})
    begin = computed()
    here = by_proxy(prefill, decode, path, body)
    prompt, blocks = here["usage"]["prompt_tokens"], (here["usage"]["prompt_tokens"] - 1) // 16
    assert here["choices"] == alone["choices"] and 2 <= blocks == fetched(decode) - before
    assert here["usage"]["prompt_tokens_details"]["cached_tokens"] == 16 * blocks
    assert prompt <= computed() - begin <= prompt + 17, "it computed the prompt once"


def test_a_host_that_a_request_names_and_that_is_not_allowed_is_not_contacted(
    decode: ServeProcess, prefill: ServeProcess
) -> None:
    ready(decode)
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        stranger.settimeout(0.3)
        host, port = "localhost.localdomain", stranger.getsockname()[1]
        body = {"model": "demo", "temperature": 0, "max_tokens": 2, "prompt": "import re\n" * 12}
        named = {"remote_engine_id": "stranger", "remote_host": host, "remote_port": port}
        assert by_proxy(prefill, decode, "/v1/completions", body, **named)["choices"][0]["text"]
        with pytest.raises(TimeoutError):
            stranger.accept()
    wait_until(lambda: f"ask for a prompt from stranger at {host}, and that is none of --prefill-url" in decode.stderr)
    assert 'quire:kv_transfer_unmet_total{engine="0",reason="not allowed"} 1.0' in decode.get("/metrics")[2].decode()


@pytest.mark.slow
@pytest.mark.parametrize("transport", [name for name in installed() if name != "shared_memory"])
def test_every_transport_and_who_only_decodes_listens_for_nothing(key: str, transport: str) -> None:
    role = "--role", "prefill", "--cluster-key-file", key, "--kv-transport", transport
    with ServeProcess(*role) as prefill, decoding(key, prefill, "--kv-transport", transport) as decode:
        ready(decode)
        asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 9}
        assert decode.json("/v1/completions", asked)["choices"] == prefill.json("/v1/completions", asked)["choices"]
        assert fetched(decode) > 16
        if transport == "socket":
            assert len(listening_addresses(decode.pids("all"))) == 1
            assert all("127.0.0.1" in each for each in listening_addresses(prefill.pids("all")))


def test_a_prefill_engine_that_dies_is_done_without_and_found_again(
    decode: ServeProcess, prefill: ServeProcess
) -> None:
    ready(decode)
    met = decode.stderr.count("ready, by")
    asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 9}
    expected = decode.json("/v1/completions", asked)["choices"]
    prefill.kill("engine")
    wait_until(lambda: "prompts are computed here meanwhile" in decode.stderr)
    again = asked | {"cache_salt": "computed anew"}
    assert decode.json("/v1/completions", again)["choices"] == expected
    wait_until(lambda: decode.stderr.count("ready, by") == met + 1)
    before, once_more = fetched(decode), asked | {"cache_salt": "and again"}
    assert decode.json("/v1/completions", once_more)["choices"] == expected and fetched(decode) > before


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(2))
def test_twenty_times_kill_9_of_either_engine_under_load_and_every_stream_ends_right(seed: int, key: str) -> None:
    rnd = random.Random(seed)
    often = "--restart-limit", "100"
    with (
        ServeProcess("--role", "prefill", "--cluster-key-file", key, *often) as prefill,
        decoding(key, prefill, *often) as decode,
    ):
        ready(decode)
        asked = {"model": "demo", "prompt": PROMPT, "temperature": 0.8, "seed": 5, "max_tokens": 60}
        expected = decode.json("/v1/completions", asked)["choices"][0]["text"]
        over, right = threading.Event(), []

        def stream(number: int) -> None:
            with openai.OpenAI(base_url=f"{decode.url}/v1", api_key="none", max_retries=0) as client:
                while not over.is_set():
                    own = {"cache_salt": f"{number} {len(right)}"}  # computed anew
                    parts = list(client.completions.create(**asked, stream=True, extra_body=own))
                    assert "".join(part.choices[0].text for part in parts) == expected
                    right.append(number)

        with ThreadPoolExecutor(4) as callers:
            calls = [callers.submit(stream, number) for number in range(4)]
            try:
                for _ in range(20):
                    time.sleep(rnd.uniform(0.2, 3.0))
                    kill(rnd.choice([prefill, decode]))
                    wait_until(lambda: prefill.health() == decode.health() == 200)
                ended = len(right)
                wait_until(lambda: len(right) > ended)
            finally:
                over.set()
            for call in calls:
                call.result()
        wait_until(lambda: not decode.held_blocks() and not prefill.held_blocks())
        before = fetched(decode)
        assert decode.json("/v1/completions", asked | {"cache_salt": "last"})["choices"][0]["text"] == expected
        assert fetched(decode) > before
        for server in (decode, prefill):
            assert server.terminate() == 0 and not server.survivors()


@pytest.mark.slow
def test_an_engine_that_waits_for_another_one_rests(key: str) -> None:
    with ServeProcess("--role", "prefill", "--cluster-key-file", key) as prefill, decoding(key, prefill) as decode:
        ready(decode)
        asked = {"model": "demo", "prompt": PROMPT, "temperature": 0, "max_tokens": 9}
        expected = prefill.json("/v1/completions", asked | {"cache_salt": "another"})["choices"]
        stopped, [engine] = prefill.kill("engine", number=signal.SIGSTOP), decode.pids("engine")
        with ThreadPoolExecutor(1) as caller:
            answer = caller.submit(decode.json, "/v1/completions", asked)
            wait_until(lambda: [each["status"] for each in decode.json("/view")["requests"]] == ["awaiting"])
            before, begin = cpu_seconds(engine), time.monotonic()
            wait_until(lambda: time.monotonic() > begin + 1.5)
            assert cpu_seconds(engine) - before < 0.5 and not answer.done()
            assert answer.result()["choices"] == expected, "computed here, once the other engine is given up"
        os.kill(stopped, signal.SIGCONT)


@needs_redis
def test_servers_of_a_pool_read_what_another_one_has_and_tell_of_it(key: str) -> None:
    with RedisServer("--requirepass", "sesame") as redis:
        url = redis.url.replace("//", "//:sesame@")
        role = "--role", "both", "--kv-directory", url, "--cluster-key-file", key, "--admin"
        with ServeProcess(*role) as first, ServeProcess(*role) as second:
            asked: dict[str, object] = {"model": "demo", "temperature": 0, "max_tokens": 9}
            tries = itertools.count()

            def remote(counter: str) -> int:
                return int(second.json("/view")["stats"]["kv_tiers"]["remote"][counter])

            def read() -> bool:  # of another prompt each time: the directory may not have heard of it yet, or be late
                asked["prompt"] = f"# {next(tries)}\n{PROMPT}"
                expected = first.json("/v1/completions", asked)["choices"]
                assert second.json("/v1/completions", asked)["choices"] == expected
                return remote("loaded") >= 16

            wait_until(read)
            wait_until(lambda: re.search(r" from 127\.0\.0\.1:\d+ in [0-9.]+ m?s, ", second.stderr))
            metrics = second.get("/metrics")[2].decode()
            assert (
                f'quire:kv_tier_blocks_total{{engine="0",event="loaded",tier="remote"}} {remote("loaded")}.0' in metrics
            )
            options = second.json("/server_info")["engine_options"]
            assert options["kv_directory"]["value"] == redis.url.replace("//", "//:***@")
            assert "sesame" not in second.stderr + str(second.json("/view"))
            expected = second.json("/v1/completions", asked)["choices"]
            first.kill("engine")
            second.json("/reset_prefix_cache", {})
            assert second.json("/v1/completions", asked)["choices"] == expected


def kill(server: ServeProcess) -> None:
    """`kill -9` of its engine, which its supervisor replaces."""
    killed = server.kill("engine")
    wait_until(lambda: server.pids("engine") not in ([], [killed]))


def cpu_seconds(pid: int) -> float:
    """That a process has computed."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
