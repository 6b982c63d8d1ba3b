"""A server joins a router: it says that it is there, again and again, and says so when it leaves."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from quire.log import event
from quire.server.processes import host_and_port, url_of

logger = logging.getLogger(__name__)

JOIN_SECONDS = 5.0
POLL_SECONDS = 0.1
ANSWER_SECONDS = 5.0


def url_for(router: str, listener: socket.socket) -> str:
    """Where the router finds this server. One that listens everywhere is found where it would speak to the router."""
    host, port = listener.getsockname()[:2]
    parts = urlsplit(router)
    if host not in ("0.0.0.0", "::"):
        return url_of(listener)
    try:
        with socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
            probe.connect((parts.hostname, parts.port or 80))  # sends nothing
            host = probe.getsockname()[0]
    except OSError:
        return url_of(listener)
    return f"http://{host_and_port(host, port)}"


async def keep_joined(router: str, key: str, url: str, role: str, leaving: Callable[[], bool]) -> None:
    """Join, and join again, in case the router was started anew; until `leaving` says so. Never raises."""
    import httpx2

    told = ""
    async with httpx2.AsyncClient(
        base_url=router.rstrip("/"), headers={"authorization": f"Bearer {key}"}, timeout=ANSWER_SECONDS
    ) as client:

        async def say(leaves: bool) -> str:
            try:
                answer = await client.post("/admin/join", json={"url": url, "role": role, "leaves": leaves})
                found = answer.json()
            except (httpx2.HTTPError, ValueError) as error:
                return f"the router {router} cannot be reached ({type(error).__name__})"
            if answer.status_code in (401, 403):
                return f"the router {router} does not take this server's key: give both the same first --api-key"
            if answer.status_code != 200:
                return f"the router {router} does not take this server ({answer.status_code})"
            if not isinstance(found, dict):
                return f"{router} is no router of Quire's: give the URL of 'quire route'"
            refused = found.get("state") == "refused"
            return f"the router {router} sends nothing here: {found.get('reason')}" if refused else "joined"

        while not leaving():
            now = await say(leaves=False)
            if now != told:
                told = now
                text = f"joined the router {router} as {url}" if now == "joined" else now
                event(logger, "join", text, level=logging.INFO if now == "joined" else logging.WARNING, router=router)
            for _ in range(int(JOIN_SECONDS / POLL_SECONDS)):
                if leaving():
                    break
                await asyncio.sleep(POLL_SECONDS)
        await say(leaves=True)
