"""The server beside the engine alone: throughput, a token's way through HTTP, streams beside a long prompt, starts.

Every server is `quire serve` in processes of its own, and clients are in this process or in `quire bench serve`, all
on the same cores. Rows with 0.6B use random weights of Qwen3-0.6B's shape, the others the embedded model.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import Options, Result, checkpoint, greedy, main, tell, tokens
from quire import LLM

BATCH, PROMPT = 32, 128
STREAMS, LONG_PROMPT, TARGET_MS = 8, 4096, 200
QUIRE = [sys.executable, "-m", "quire.cli.main"]


def run(options: Options) -> Result:
    result = Result(("what", "measured", "beside", "ratio"))
    _starts(result)
    _way_of_a_token(result, options)
    _throughput(result, options, "demo", "demo", 128)
    folder = str(with_tokenizer(checkpoint(options)))
    _throughput(result, options, "0.6B", folder, 16 if options.quick else 32, times=3)
    _beside_a_long_prompt(result, options, folder)
    return result


def with_tokenizer(folder: Path) -> Path:
    """Give a random checkpoint a tokenizer of one word a token, so that the server has text to make."""
    path = folder / "tokenizer.json"
    if not path.exists():
        import tokenizers

        size = json.loads((folder / "config.json").read_text())["vocab_size"]
        vocabulary = {f"w{index}": index for index in range(size)}
        tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0")).save(str(path))
    return folder


# -- servers and streams ------------------------------------------------------------------------------------------


class Server:
    """A running `quire serve`."""

    def __init__(self, model: str, arguments: Sequence[str]) -> None:
        self.began = time.monotonic()
        command = [*QUIRE, "serve", model, "--port", "0", "--disable-log-requests", *arguments]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        for line in self.process.stderr:
            if found := re.search(r"http://127.0.0.1:(\d+)", line):
                self.port = int(found[1])
                break
        else:
            raise RuntimeError("the server told no address")
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def get(self, path: str) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=600)
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def wait(self) -> None:
        while self.get("/health")[0] != 200:
            time.sleep(0.05)

    async def stream(self, prompt: list[int], count: int) -> list[tuple[float, str]]:
        """(when it came, the response's id) for each token; raises where the answer is no stream."""
        body = {"prompt": prompt, "max_tokens": count, "ignore_eos": True, "temperature": 0, "stream": True}
        data = json.dumps(body | {"return_token_ids": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(data) + data)
        if b" 200 " not in await reader.readline():
            writer.close()
            raise ConnectionError("the server does not take requests yet")
        lines = []
        while not (line := await reader.readline()).startswith(b"data: [DONE]"):
            lines.append((time.monotonic(), line))
        writer.close()
        found = []
        for when, line in lines:  # parsed behind the end, so that it delays no measurement
            if line.startswith(b"data: {"):
                chunk = json.loads(line[6:])
                found += [(when, chunk["id"])] * len(chunk["choices"][0].get("token_ids") or ())
        return found


@contextmanager
def serving(options: Options, model: str, *arguments: str) -> Iterator[Server]:
    threads = ["--threads", str(options.threads)] if options.threads else []
    server = Server(model, [*threads, *arguments])
    try:
        server.wait()
        yield server
    finally:
        server.process.terminate()
        server.process.wait()


def together(server: Server, prompts: list[list[int]], count: int) -> list[list[tuple[float, str]]]:
    """Run streams at once."""

    async def run() -> list[list[tuple[float, str]]]:
        return await asyncio.gather(*(server.stream(prompt, count) for prompt in prompts))

    return asyncio.run(run())


# -- what is measured ---------------------------------------------------------------------------------------------


def _starts(result: Result, times: int = 3) -> None:
    """From the command to an open port, an HTTP answer, and the first token, with files in the page cache."""
    found: dict[str, list[float]] = {"port open": [], "first HTTP answer": [], "first token": []}
    for _ in range(times):
        tell("server: start")
        server = Server("demo", [])
        socket.create_connection(("127.0.0.1", server.port)).close()
        found["port open"].append(time.monotonic() - server.began)
        server.get("/health")
        found["first HTTP answer"].append(time.monotonic() - server.began)
        while True:
            try:
                [(when, _)] = asyncio.run(server.stream([5, 6, 7], 1))
                break
            except ConnectionError:
                time.sleep(0.02)
        found["first token"].append(when - server.began)
        server.process.terminate()
        server.process.wait()
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        result.add(
            (f"`quire serve demo`: {name} after", f"{middle:.2f} s", "", ""),
            what=f"start: {name}",
            seconds=[round(one, 3) for one in seconds],
        )


def _way_of_a_token(result: Result, options: Options) -> None:
    """From the end of the step that made a token to its arrival at the client, 8 streams; beside `LLM` in-process."""
    tell("server: a token's way")
    generator = random.Random(1)
    with serving(options, "demo", "--admin") as server:
        together(server, [tokens(generator, 32) for _ in range(STREAMS)], 20)  # warm up
        streams = together(server, [tokens(generator, 32) for _ in range(STREAMS)], 100)
        made: dict[str, list[float]] = {}
        for step in server.get("/debug/steps")[1]["steps"]:
            end = step["begin"] + step["schedule_seconds"] + step["seconds"]
            for name, _, _, _, sampled, _ in step["spans"]:
                made.setdefault(name, []).extend([end] * sampled)
    ways = [when - end for one in streams for (when, name), end in zip(one, made[one[0][1]], strict=True)]
    direct = _way_in_process(options, generator)
    middle, beside = statistics.median(ways) * 1e3, statistics.median(direct) * 1e3
    result.add(
        (
            "a token's way from its step's end to its reader, 8 streams, median: over HTTP beside `LLM.step`",
            f"{middle:.2f} ms",
            f"{beside:.2f} ms",
            "",
        ),
        what="way of a token",
        median_ms=round(middle, 3),
        p99_ms=round(sorted(ways)[int(0.99 * len(ways))] * 1e3, 3),
        in_process_median_ms=round(beside, 3),
        tokens=len(ways),
    )


def _way_in_process(options: Options, generator: random.Random) -> list[float]:
    with LLM("demo", threads=options.threads) as llm:
        for _ in range(STREAMS):
            llm.add_request(tokens(generator, 32), greedy(100))
        ways = []
        while not llm.idle:
            before = llm.stats.prefill_seconds + llm.stats.decode_seconds
            begin = time.monotonic()
            llm.step()
            computed = llm.stats.prefill_seconds + llm.stats.decode_seconds - before
            ways.append(time.monotonic() - begin - computed)
    return ways


def _throughput(result: Result, options: Options, name: str, model: str, count: int, times: int = 5) -> None:
    """Output tokens a second of 32 requests at once: `llm.generate`, and streams over HTTP, in turns."""
    generator = random.Random(2)
    direct, served = [], []
    with (
        LLM(model, threads=options.threads, prefix_cache="off") as llm,
        serving(options, model, "--prefix-cache", "off") as server,
        tempfile.TemporaryDirectory() as folder,
    ):
        for turn in range(times):
            tell(f"server: throughput of {name}, turn {turn + 1} of {times}")
            if not turn:
                llm.generate([tokens(generator, PROMPT) for _ in range(BATCH)], greedy(4))
            prompts = [tokens(generator, PROMPT) for _ in range(BATCH)]
            begin = time.perf_counter()
            llm.generate(prompts, greedy(count))
            direct.append(BATCH * count / (time.perf_counter() - begin))
            path = Path(folder) / "result.json"
            arguments = ["--url", f"http://127.0.0.1:{server.port}", "--concurrency", str(BATCH)]
            arguments += ["--num-requests", str(BATCH), "--warmup", "0" if turn else "4", "--input-len", str(PROMPT)]
            arguments += ["--output-len", str(count), "--seed", str(turn), "--json", str(path)]
            subprocess.run([*QUIRE, "bench", "serve", *arguments], check=True, capture_output=True)
            served.append(json.loads(path.read_text())["result"]["output_per_s"])
    best, beside = max(served), max(direct)
    result.add(
        (
            f"{name}, 32 streams over HTTP beside `llm.generate`, output tokens/s, the best of {times} turns",
            f"{best:,.1f}",
            f"{beside:,.1f}",
            f"{best / beside:.2f}",
        ),
        what=f"throughput {name}",
        served=[round(one, 1) for one in served],
        direct=[round(one, 1) for one in direct],
    )


def _beside_a_long_prompt(result: Result, options: Options, folder: str) -> None:
    """p99 of the gaps between tokens of 8 streams, alone and while a prompt of 4,096 tokens is computed."""
    tell("server: streams beside a long prompt")
    generator = random.Random(3)
    length = 256 if options.quick else LONG_PROMPT
    arguments = ["--target-itl-ms", str(TARGET_MS), "--prefix-cache", "off", "--max-model-len", str(length + 512)]
    with serving(options, folder, *arguments) as server:
        prompts = [tokens(generator, 32) for _ in range(STREAMS)]
        together(server, prompts, 8)  # warm up
        span: list[float] = []

        def intrude() -> None:
            time.sleep(1 if options.quick else 8)
            span.append(time.monotonic())
            asyncio.run(server.stream(tokens(generator, length), 1))
            span.append(time.monotonic())

        intruder = threading.Thread(target=intrude)
        intruder.start()
        streams = together(server, prompts, 40 if options.quick else 420)
        intruder.join()
    gaps: dict[bool, list[float]] = {True: [], False: []}
    for stream in streams:
        times = [when for when, _ in stream]
        for before, after in itertools.pairwise(times):
            gaps[span[0] <= after <= span[1]].append(after - before)
    alone, beside = (sorted(gaps[inside])[int(0.99 * len(gaps[inside]))] * 1e3 for inside in (False, True))
    result.add(
        (
            f"0.6B, 8 streams, p99 gap between tokens while {length:,} prompt tokens are computed, beside without; "
            f"target_itl_ms={TARGET_MS}",
            f"{beside:,.0f} ms",
            f"{alone:,.0f} ms",
            f"{beside / alone:.2f}",
        ),
        what="beside a long prompt",
        p99_alone_ms=round(alone, 1),
        p99_beside_ms=round(beside, 1),
        long_prompt_s=round(span[1] - span[0], 2),
        gaps=len(gaps[True]),
    )


if __name__ == "__main__":
    main(run)
