"""The path under which a proxy exposes a server (`root_path`), as in https://example.org/llm/v1/models.

It is stripped if present, so the proxy may strip it or not. Everything inside sees paths without it; the page and the
API reference use relative URLs, and the OpenAPI document names it.
"""

from __future__ import annotations

from urllib.parse import quote

from starlette.types import ASGIApp, Receive, Scope, Send


class PrefixMiddleware:
    """Strips `root_path` from the paths of requests."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self.app = app
        self._prefix = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._prefix:  # relative URLs of the page need the slash
                return await _redirect(send, f"{path}/")
            if path.startswith(f"{self._prefix}/"):
                scope["path"], raw = path.removeprefix(self._prefix), scope.get("raw_path") or b""
                known = raw.startswith(self._prefix.encode())  # otherwise it is spelled differently
                scope["raw_path"] = raw[len(self._prefix) :] if known else quote(scope["path"]).encode()
        await self.app(scope, receive, send)


async def _redirect(send: Send, location: str) -> None:
    headers = [(b"location", location.encode()), (b"content-length", b"0")]
    await send({"type": "http.response.start", "status": 308, "headers": headers})
    await send({"type": "http.response.body", "body": b""})
