"""How long one more request waits for its first token behind a flood of slow anonymous readers (Linux).

    python -m benchmarks.flood [--readers 300] [--tokens 1000] [--model demo] [--seconds 240]

A server without keys gets streams from 127.0.0.2 whose client takes 1 KiB of each a second, then one request from
another address, and one from the same: without keys turns go by address, so the first does not wait behind the flood.
"""

from __future__ import annotations

import argparse
import http.client
import json
import select
import socket
import threading
import time

from tests.http_tools import ServeProcess

FLOOD, OTHER = "127.0.0.2", "127.0.0.1"
TAKEN = 1024
"""Bytes a second that a slow reader takes."""


class Readers:
    """The flood: streams whose answers are taken slowly, by one thread."""

    def __init__(self, port: int, count: int, tokens: int) -> None:
        self._over = threading.Event()
        self.sockets = [self._begun(port, tokens, seed) for seed in range(count)]
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _begun(self, port: int, tokens: int, seed: int) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2 * TAKEN)
        made.bind((FLOOD, 0))
        made.connect((OTHER, port))
        body = {"prompt": f"def f{seed}(", "stream": True, "max_tokens": tokens, "ignore_eos": True, "seed": seed}
        content = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {OTHER}\r\ncontent-type: application/json\r\n"
        made.sendall(head.encode() + b"content-length: %d\r\n\r\n" % len(content) + content)
        return made

    def _read(self) -> None:
        while not self._over.wait(1.0):
            ready, _, _ = select.select(self.sockets, [], [], 0)
            for each in ready:
                each.recv(TAKEN)

    def close(self) -> None:
        """Hang up."""
        self._over.set()
        self._thread.join()
        for each in self.sockets:
            each.close()


def first_token(port: int, address: str, seconds: float) -> float | None:
    """Seconds to the first event of a short stream that is asked for from an address; None if it did not come."""
    connection = http.client.HTTPConnection(OTHER, port, timeout=seconds, source_address=(address, 0))
    begin = time.monotonic()
    try:
        body = json.dumps({"prompt": "import os", "stream": True, "max_tokens": 4, "ignore_eos": True})
        connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"the request was answered {answer.status}: {answer.read()[:200]!r}")
        while (line := answer.readline()) and not line.startswith(b"data:"):  # comments keep the connection alive
            if time.monotonic() - begin > seconds:
                return None
        return time.monotonic() - begin
    except TimeoutError:
        return None
    finally:
        connection.close()


def main() -> None:
    """Run the flood, and print how long the others waited."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--readers", type=int, default=300, help="slow readers (default: 300)")
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of each of their streams (default: 1000)")
    parser.add_argument("--model", default="demo", help="the model (default: demo)")
    parser.add_argument("--seconds", type=float, default=240.0, help="longest wait for a first token (default: 240)")
    given = parser.parse_args()
    with ServeProcess("--max-num-seqs", "16", model=given.model, deadline=300.0) as server:
        print(f"alone: {first_token(server.port, OTHER, given.seconds):.2f} s", flush=True)
        flood = Readers(server.port, given.readers, given.tokens)
        time.sleep(2.0)
        try:
            for what, address in (("another address", OTHER), ("the flood's own address", FLOOD)):
                waited = first_token(server.port, address, given.seconds)
                shown = f"more than {given.seconds:g} s" if waited is None else f"{waited:.2f} s"
                print(f"behind {given.readers} slow readers, from {what}: {shown}", flush=True)
        finally:
            flood.close()


if __name__ == "__main__":
    main()
