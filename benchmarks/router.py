"""What `quire route` costs: requests a second on one core, and the time it adds to a stream's first token.

    python -m benchmarks.router [--requests 20000] [--connections 64] [--seconds 20]

Behind the router stand two servers that answer at once, with the same bytes for every request; requests are of 1 KB.
Load and servers take processor time as well, and other programs do, so what counts is the router's own: processor
seconds a request, of which the rate of a core follows. The time to the first token is that of streams which arrive at
100 a second, directly and through the router, in turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

PROMPT = "def f(a, b):\n    return a + b\n"
CARD = {"object": "list", "data": [{"id": "bench", "object": "model", "owned_by": "a stand-in"}]}
CHUNK = b'data: {"id":"c","object":"text_completion","choices":[{"index":0,"text":"x","finish_reason":null}]}\n\n'
TICKS = os.sysconf("SC_CLK_TCK")


# -- the stand-in for a server --------------------------------------------------------------------------------


class StandIn(asyncio.Protocol):
    """Answers whatever is asked, at once."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.data = b""

    def data_received(self, data: bytes) -> None:
        self.data += data
        while (end := self.data.find(b"\r\n\r\n")) >= 0:
            head = self.data[:end].lower()
            at = head.find(b"content-length: ")
            length = int(head[at + 16 :].split(b"\r\n")[0]) if at >= 0 else 0
            if len(self.data) < end + 4 + length:
                return
            body, self.data = self.data[end + 4 : end + 4 + length], self.data[end + 4 + length :]
            self.transport.write(self._answer(head, body))  # type: ignore[attr-defined]

    def _answer(self, head: bytes, body: bytes) -> bytes:
        if b'"stream":true' in body:
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (CHUNK, CHUNK, b"data: [DONE]\n\n"))
            return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n" + (
                chunks + b"0\r\n\r\n"
            )
        answer = json.dumps(CARD if b"/v1/models" in head else ANSWER).encode()
        return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
            len(answer),
            answer,
        )


ANSWER = {
    "id": "cmpl-1",
    "object": "text_completion",
    "choices": [{"index": 0, "text": "x" * 200, "finish_reason": "length"}],
    "usage": {"prompt_tokens": 250, "completion_tokens": 50, "total_tokens": 300},
}


async def stand_in() -> None:
    server = await asyncio.get_running_loop().create_server(StandIn, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# -- the load -------------------------------------------------------------------------------------------------


def request(number: int, stream: bool) -> bytes:
    """A request of 1 KB with a prompt of its own."""
    prompt = f"# {number}\n" + PROMPT * 32
    fields = {"model": "bench", "stream": stream, "max_tokens": 50, "prompt": prompt}
    body = json.dumps(fields, separators=(",", ":")).encode()
    body = body[: body.index(b'"prompt"')] + b'"prompt":' + json.dumps(prompt[:900]).encode() + b"}"
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


@dataclass
class Client(asyncio.Protocol):
    """One connection, of which the first byte and the end of each answer are waited for."""

    first: float = 0.0
    ended: asyncio.Future[None] | None = None
    data: bytearray = field(default_factory=bytearray)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.first and b"data: " in self.data:
            self.first = time.perf_counter()
        if self.ended is None or self.ended.done():
            return
        if b"\r\n" in self.data and not self.data.startswith(b"HTTP/1.1 200"):
            self.ended.set_exception(RuntimeError(f"the answer was {bytes(self.data[:400])!r}"))
        elif self._is_whole():
            self.ended.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended is not None and not self.ended.done():
            self.ended.set_exception(ConnectionError("the router closed a connection"))

    def _is_whole(self) -> bool:
        head, found, body = bytes(self.data).partition(b"\r\n\r\n")
        if not found:
            return False
        at = head.lower().find(b"content-length: ")
        if at >= 0:
            return len(body) >= int(head[at + 16 :].split(b"\r\n")[0])
        return body.endswith(b"0\r\n\r\n")

    async def ask(self, data: bytes) -> float:
        """Seconds to the first byte of a stream's first event, or to the end of a whole answer."""
        self.data.clear()
        self.first, self.ended = 0.0, asyncio.get_running_loop().create_future()
        began = time.perf_counter()
        self.transport.write(data)  # type: ignore[attr-defined]
        await self.ended
        return (self.first or time.perf_counter()) - began


async def connect(port: int) -> Client:
    _, client = await asyncio.get_running_loop().create_connection(Client, "127.0.0.1", port)
    return client


async def rate(port: int, requests: int, connections: int) -> float:
    """Seconds for so many requests, over so many connections that each wait for their answers."""
    numbers = iter(range(requests))
    clients = [await connect(port) for _ in range(connections)]

    async def run(client: Client) -> None:
        for number in numbers:
            await client.ask(request(number, stream=False))

    began = time.perf_counter()
    await asyncio.gather(*map(run, clients))
    return time.perf_counter() - began


async def first_tokens(port: int, seconds: float, per_second: int) -> list[float]:
    """Times to first tokens of streams that arrive evenly."""
    idle = [await connect(port) for _ in range(32)]
    found: list[float] = []
    tasks = set()

    async def one(number: int) -> None:
        client = idle.pop() if idle else await connect(port)
        found.append(await client.ask(request(number, stream=True)))
        idle.append(client)

    began = time.perf_counter()
    for number in range(int(seconds * per_second)):
        await asyncio.sleep(max(0.0, began + number / per_second - time.perf_counter()))
        task = asyncio.create_task(one(number))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    return found


# -- the measurement ------------------------------------------------------------------------------------------


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def started(*command: str) -> tuple[subprocess.Popen[str], int]:
    """A process, and the port that it tells."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    stream = process.stdout if "--stand-in" in command else process.stderr
    assert stream is not None
    line = stream.readline()
    digits = line.strip() if "--stand-in" in command else line.partition("127.0.0.1:")[2].partition(",")[0]
    return process, int(digits)


async def until_up(port: int, servers: int) -> None:
    import httpx2

    async with httpx2.AsyncClient() as client:
        for _ in range(300):
            found = (await client.get(f"http://127.0.0.1:{port}/health")).json()
            if found.get("servers_up") == servers:
                return
            await asyncio.sleep(0.1)
    raise RuntimeError("the router's servers did not come up")


async def measure(arguments: argparse.Namespace, router: tuple[int, int], server: int) -> dict[str, object]:
    pid, port = router
    await until_up(port, arguments.servers)
    await rate(port, arguments.requests // 10, arguments.connections)  # warm
    before = processor_seconds(pid)
    seconds = await rate(port, arguments.requests, arguments.connections)
    spent = processor_seconds(pid) - before
    direct: list[float] = []
    through: list[float] = []
    for _ in range(4):
        direct += await first_tokens(server, arguments.seconds / 8, 100)
        through += await first_tokens(port, arguments.seconds / 8, 100)
    return {
        "requests": arguments.requests,
        "requests_per_second": round(arguments.requests / seconds),
        "router_processor_us_per_request": round(spent / arguments.requests * 1e6, 1),
        "requests_per_second_of_one_core": round(arguments.requests / spent),
        "first_token_ms": {name: _quantiles(times) for name, times in (("direct", direct), ("router", through))},
        "added_ms": {key: round(_quantiles(through)[key] - _quantiles(direct)[key], 3) for key in ("median", "p99")},
        "load_average": os.getloadavg()[0],
    }


def _quantiles(times: list[float]) -> dict[str, float]:
    cuts = statistics.quantiles(times, n=100)
    return {"median": round(cuts[49] * 1e3, 3), "p99": round(cuts[98] * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--connections", type=int, default=64)
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0, help="of streams, half of them directly")
    parser.add_argument("--log-requests", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--stand-in", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.stand_in:
        return uvloop.run(stand_in())
    children = [started(sys.executable, "-m", "benchmarks.router", "--stand-in") for _ in range(arguments.servers)]
    urls = [f"--server=http://127.0.0.1:{port}" for _, port in children]
    log = "--log-requests" if arguments.log_requests else "--no-log-requests"
    router, port = started(sys.executable, "-m", "quire.cli.main", "route", "--port", "0", *urls, log)
    drain = subprocess.Popen(["cat"], stdin=router.stderr, stdout=subprocess.DEVNULL)
    try:
        print(json.dumps(uvloop.run(measure(arguments, (router.pid, port), children[0][1])), indent=1))
    finally:
        for process in (router, *(child for child, _ in children)):
            process.kill()
            process.wait()
        drain.wait()


if __name__ == "__main__":
    main()
