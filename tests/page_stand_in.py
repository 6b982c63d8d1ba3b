"""A stand-in for the server behind the web page: its files with their headers, and scripted answers."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import quire.server

STATIC = Path(quire.server.__file__).parent / "static"
TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".woff2": "font/woff2",
}
POLICY = (
    "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
STEP = 0.02
BLOCK = 16


@dataclass
class Script:
    """What the stand-in does; tests change it while it runs.

    Attributes:
        health: what /health answers, with 200 for the status "ok" alone.
        key: the API key that is asked for, if any.
        model: its name. description: what it is, if it is an embedded one. defaults: its sampling parameters.
            suggestions: those that suit people.
        pieces: an answer, piece by piece; or whole deltas of a chat. pause: seconds before each. headers: beside it.
        late: seconds that a refusal for want of a key takes.
        refusal: (status, error) that requests are answered with instead.
        view_status: what /view answers with.
        bodies: (path, body) of the requests that came.
        breaks_off: answers end after their first piece, without a word.
        gone: connections are closed without an answer, those that were open before, too.
        hung_up: an answer's client went away before its end.
        num_blocks, boot, first_step: of the engine that /view shows; its steps are numbered from `first_step` on.
        speculates: it drafts tokens: each decoding step of a request verifies four.
        engines: states of the replicas, where there are several.
        imbalance: its ranks have experts of their own, and the busiest has so many times the mean to do; 0: none.
    """

    health: dict[str, Any] = field(default_factory=lambda: {"status": "ok"})
    key: str = ""
    model: str = "stand-in"
    description: str | None = None
    defaults: dict[str, float] = field(default_factory=dict)
    suggestions: dict[str, float] = field(default_factory=dict)
    pieces: list[str | dict[str, Any]] = field(default_factory=lambda: ["Hello", ", **wor", "ld**."])
    pause: float = 0.01
    finish_reason: str = "stop"
    headers: dict[str, str] = field(default_factory=dict)
    late: float = 0.0
    refusal: tuple[int, dict[str, Any]] | None = None
    view_status: int = 200
    bodies: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    breaks_off: bool = False
    gone: bool = False
    hung_up: threading.Event = field(default_factory=threading.Event)
    num_blocks: int = 8192
    boot: int = 1
    first_step: int = 0
    speculates: bool = False
    imbalance: float = 0.0
    engines: list[str] = field(default_factory=list)


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a browser that went away


class StandIn:
    """Serves on a port of the loopback interface; 0: a free one."""

    def __init__(self, port: int = 0) -> None:
        self.script = script = Script()

        class Handler(_Handler):
            pass

        Handler.script = script
        self._server = _Server(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(BaseHTTPRequestHandler):
    script: Script
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_GET(self) -> None:
        if self.script.gone:
            self.close_connection = True
            return
        path = urlsplit(self.path).path
        if path == "/" or path.startswith("/static/"):
            self._send_file("index.html" if path == "/" else path.removeprefix("/static/"))
        elif path == "/health":
            self._send_json(200 if self.script.health["status"] == "ok" else 503, self.script.health)
        elif not self._has_key():
            time.sleep(self.script.late)
            self._send_json(401, {"error": {"message": "an API key is needed", "code": "invalid_api_key"}})
        elif path == "/v1/models":
            model: dict[str, Any] = {
                "id": self.script.model,
                "max_model_len": 4096,
                "description": self.script.description,
            }
            model["sampling_defaults"] = self.script.defaults
            model["sampling_suggestions"] = self.script.suggestions
            self._send_json(200, {"data": [model]})
        elif path == "/view" and self.script.view_status == 200:
            asked = parse_qs(urlsplit(self.path).query)
            document = view_document(time.monotonic(), int(asked.get("since", ["0"])[0]), self.script)
            if self.script.engines:
                document |= {"engine": int(asked.get("engine", ["0"])[0]), "engines": self.script.engines}
            self._send_json(200, document)
        else:
            status = self.script.view_status if path == "/view" else 404
            self._send_json(status, {"error": {"message": "not for you", "code": None}})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.script.bodies.append((self.path, body))
        if not self._has_key():
            self._send_json(401, {"error": {"message": "an API key is needed", "code": "invalid_api_key"}})
        elif self.script.refusal:
            status, error = self.script.refusal
            self._send_json(status, {"error": error})
        else:
            self._stream(chat=self.path.endswith("/chat/completions"))

    def _has_key(self) -> bool:
        return not self.script.key or self.headers.get("authorization") == f"Bearer {self.script.key}"

    def _stream(self, chat: bool) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        for name, value in self.script.headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.close_connection = True
        try:
            self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}] if chat else []})
            for piece in self.script.pieces:
                time.sleep(self.script.pause)
                delta = piece if isinstance(piece, dict) else {"content": piece}
                text: dict[str, Any] = {"delta": delta} if chat else {"text": piece}
                self._event({"choices": [{"index": 0, "finish_reason": None} | text]})
                if self.script.breaks_off:
                    return
            last: dict[str, Any] = {"delta": {}} if chat else {"text": ""}
            self._event({"choices": [{"index": 0, "finish_reason": self.script.finish_reason} | last]})
            usage = {"prompt_tokens": 1234, "completion_tokens": 56, "prompt_tokens_details": {"cached_tokens": 1024}}
            self._event({"choices": [], "usage": usage})
            self.wfile.write(b": alive\n\ndata: [DONE]\n\n")
        except OSError:
            self.script.hung_up.set()

    def _event(self, chunk: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps({"id": "chatcmpl-stand-in-7"} | chunk).encode() + b"\n\n")

    def _send_file(self, name: str) -> None:
        path = STATIC / name
        if ".." in name or not path.is_file():
            self._send_json(404, {"error": {"message": "no such file", "code": None}})
            return
        headers = {"content-security-policy": POLICY, "x-content-type-options": "nosniff"}
        self._send(200, path.read_bytes(), TYPES.get(path.suffix, "text/plain"), headers)

    def _send_json(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, json.dumps(document).encode(), "application/json", {"x-request-id": "req-stand-in"})

    def _send(self, status: int, data: bytes, media_type: str, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"content-type": media_type, "content-length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


# -- an engine's life, as a function of time --------------------------------------------------------------------


def view_document(now: float, since: int, script: Script) -> dict[str, Any]:
    """What /view answers: an engine that is always busy, with one step each `STEP` seconds.

    A request arrives every 15 steps, is prefilled over two steps, and decodes for 100 to 340 more.
    """
    current = int(now / STEP)
    requests = [_request(born, current) for born in range((current - 700) // 15 * 15, current + 1, 15)]
    open_requests = [one for one in requests if one["age"] >= 0 and not one["over"]]
    over = [one for one in requests if one["over"]]
    return {
        "now": now,
        "boot": script.boot,
        "uptime": 3000.0 + script.boot,
        "model": "stand-in",
        "max_num_seqs": 64,
        "max_num_batched_tokens": 2048,
        "stats": _stats(current, len(open_requests), len(over), script.speculates)
        | ({"rank_imbalance": script.imbalance, "expert_moves": 3} if script.imbalance else {}),
        "kv": _pool(current, script.num_blocks),
        "tree": _tree(),
        "requests": [
            {name: value for name, value in one.items() if name not in ("over", "born")} | _drafts(one, script)
            for one in open_requests
        ],
        "steps": [
            _step(number, script.speculates) | {"number": number - script.first_step}
            for number in range(max(since + script.first_step, current - 255), current)
        ],
        "finished": [_finished(one) | _drafts(one, script) for one in over[-64:]],
    }


def _life(born: int) -> int:
    """How many steps it decodes."""
    return 100 + (born * 37) % 240


def _request(born: int, current: int) -> dict[str, Any]:
    passed = current - born
    prompt, cached = 600 + born % 900, 256 if born % 2 else 0
    output = max(0, min(passed - 2, _life(born)))
    return {
        "id": f"chatcmpl-{born * 2654435761 % 2**32:08x}{born:08x}",
        "choice": 0,
        "status": "waiting" if passed == 0 else "running",
        "prompt": prompt,
        "cached": cached,
        "computed": cached if passed == 0 else (prompt + cached) // 2 if passed == 1 else prompt + output,
        "output": output,
        "max_tokens": _life(born) + born % 90,
        "blocks": 0 if passed == 0 else (prompt + output) // BLOCK + 1,
        "age": passed * STEP,
        "priority": 0,
        "preemptions": 1 if born % 7 == 0 else 0,
        "over": passed > _life(born) + 2,
        "born": born,
    }


def _drafts(one: dict[str, Any], script: Script) -> dict[str, int]:
    return {"drafted": 4 * one["output"], "accepted": 3 * one["output"]} if script.speculates else _NO_DRAFTS


_NO_DRAFTS = {"drafted": 0, "accepted": 0}


def _step(number: int, speculates: bool) -> dict[str, Any]:
    spans: list[tuple[str, int, int, int, int, int]] = []
    drafts = 4 if speculates else 0
    for born in range((number - 700) // 15 * 15, number, 15):
        one = _request(born, number)
        if one["over"]:
            continue
        half = (one["prompt"] - one["cached"]) // 2
        if number - born <= 2:
            start = one["cached"] + half * (number - born - 1)
            spans.append((one["id"], 0, start, half, int(number - born == 2), 0))
        else:
            start = one["prompt"] + one["output"]
            spans.append((one["id"], 0, start, 1 + drafts, 1 + drafts * 3 // 4, drafts))
    return {
        "number": number,
        "begin": number * STEP,
        "seconds": STEP * (0.6 + 0.03 * (number % 11)),
        "schedule_seconds": 0.0004,
        "tokens": sum(span[3] for span in spans),
        "drafted": sum(span[5] for span in spans),
        "accepted": sum(span[5] * 3 // 4 for span in spans),
        "spans": spans,
    }


def _stats(current: int, running: int, over: int, speculates: bool) -> dict[str, int | float]:
    verifications = current * 10 if speculates else 0
    return ({"draft_depth": 4} if speculates else {}) | {
        "steps": current,
        "prompt_tokens": current * 60,
        "cached_tokens": current * 21,
        "output_tokens": current * 14 + (current // 40 % 9) * 30,
        "prefill_tokens": current * 39 + (current // 60 % 5) * 200,
        "preemptions": current // 900,
        "verifications": verifications,
        "drafted": 4 * verifications,
        "accepted": 3 * verifications,
        "running": running,
        "waiting": current % 3,
        "finished": over,
        "aborted": 1,
        "failed": 0,
    }


def _pool(current: int, num_blocks: int) -> dict[str, Any]:
    per_cell = -(-num_blocks // 8192)
    cells = []
    for i in range(-(-num_blocks // per_cell)):
        zone = (i * 7 + i // 53) % 97
        if i < 300:
            cells.append("9" if zone < 60 else "5")
        elif i < 1400:
            cells.append("432"[zone % 3] if zone < 30 else "1")
        elif i < 3000 + current % 200:
            cells.append("1" if zone < 70 else "c")
        else:
            cells.append("c" if zone < 38 and i < 6200 else "f")
    text = "".join(cells)
    free, cached = text.count("f") * per_cell, text.count("c") * per_cell
    return {
        "num_blocks": num_blocks,
        "block_size": BLOCK,
        "free": free,
        "cached": cached,
        "held": num_blocks - free - cached,
        "blocks_per_cell": per_cell,
        "cells": text,
    }


def _tree() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = []

    def add(parent: int | None, blocks: int, references: int) -> int:
        number = len(nodes) + 1
        node = {"id": number, "parent": parent, "tokens": blocks * BLOCK, "blocks": blocks, "references": references}
        nodes.append(node)
        return number

    system = add(None, 32, 9)
    for branch in range(5):
        child = add(system, 6 + 5 * branch, branch)
        for leaf in range(2 + branch % 3):
            add(child, 3 + 4 * leaf + branch, max(0, branch - leaf - 1))
    for lone in range(6):
        add(None, 8 + 9 * lone % 40, lone % 2)
    return nodes


def _finished(one: dict[str, Any]) -> dict[str, Any]:
    arrived = one["born"] * STEP - 0.012
    half = (one["prompt"] - one["cached"]) // 2
    return {
        "id": one["id"],
        "choice": 0,
        "reason": ("stop", "length", "stop", "abort")[one["born"] // 15 % 4],
        "prompt": one["prompt"],
        "cached": one["cached"],
        "output": one["output"],
        "arrived": arrived,
        "tokenize_seconds": 0.004,
        "queue_seconds": 0.031,
        "match_seconds": 0.0006,
        "prefill_seconds": 0.034,
        "decode_seconds": one["output"] * 0.016,
        "detokenize_seconds": 0.012,
        "ttft_seconds": 0.07,
        "total_seconds": 0.07 + one["output"] * STEP,
        "preemptions": one["preemptions"],
        "chunks": [[arrived + 0.032, 0.016, half], [arrived + 0.052, 0.018, half]],
    }
