"""API keys: who may come in, and as whom.

Every route needs a key but the few in `OPEN_PATHS` and the page's static files. The decision is made on the same
path that the router matches (decoded once by the HTTP server, never normalized), so that no spelling of a path can
reach a route without passing here: what is not spelled exactly like an open path needs a key.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.hosts import HostPolicy
from quire.server.replies import send_error
from quire.server.request_log import summary_of

OPEN_PATHS = frozenset({"/", "/health", "/live"})
OPEN_PREFIX = "/static/"
METRICS_PATH = "/metrics"
TENANT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who sends a request.

    Attributes:
        owner: what their requests are filed under in the engine, and their cached prefixes are kept apart by; ""
            where there are not several tenants.
        is_operator: may use the administrative routes, the live view and the metrics.
        is_scraper: may read the metrics, and nothing else.
        label: what their key is called in the log; "" where there is none.
    """

    owner: str = ""
    is_operator: bool = True
    is_scraper: bool = False
    label: str = ""


class Tenants:
    """The keys of a server. Without any, everybody is the one tenant; with several, each key is its own.

    The processes of one server agree about the tenants' names, since these follow from the keys. No key can be
    guessed from a name by who does not know all the others, or the cluster's key.

    Args:
        keys: the API keys; the first is the operator's.
        metrics_keys: keys that open the metrics alone.
        cluster_key: where servers share KV, a tenant's name follows from this and its own key: it stays the same when
            others come, and is the same on every server. None: from all keys of this server.

    Attributes:
        count: API keys.
    """

    def __init__(self, keys: Sequence[str], metrics_keys: Sequence[str] = (), cluster_key: bytes | None = None) -> None:
        self.count = len(keys)
        apart = len(keys) > 1 or cluster_key is not None
        secret = hashlib.blake2b(cluster_key or "\0".join(keys).encode()).digest()
        self._salt = secrets.token_bytes(32)
        self._tenants: list[tuple[bytes, Tenant]] = []
        for index, key in enumerate(keys):
            name = _named(key, secret) if apart else ""
            tenant = Tenant(name, is_operator=index == 0, label=f"key {index + 1}")
            self._tenants.append((self._digest(key.encode()), tenant))
        for index, key in enumerate(metrics_keys, 1):
            tenant = Tenant(is_operator=False, is_scraper=True, label=f"metrics key {index}")
            self._tenants.append((self._digest(key.encode()), tenant))

    def find(self, authorization: Sequence[bytes]) -> Tenant | None:
        """The tenant whose key the `Authorization` headers carry, or None. Takes equally long for every wrong key."""
        if not self._tenants:
            return Tenant()
        if len(authorization) != 1:
            return None
        scheme, _, key = authorization[0].partition(b" ")
        given = self._digest(key.strip(b" \t"))
        found = None
        for digest, tenant in self._tenants:  # all of them: where it is found must not show in the time
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == b"bearer" else None

    def _digest(self, key: bytes) -> bytes:
        """Digests are of one length, and comparing them tells nothing about the keys' bytes."""
        return hashlib.blake2b(key, key=self._salt).digest()


def _named(key: str, secret: bytes) -> str:
    return hashlib.blake2b(key.encode(), key=secret, digest_size=TENANT_BYTES, person=b"quire tenant").hexdigest()


def is_open(path: str) -> bool:
    """Whether this path, as the router sees it, is served without a key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


class AuthMiddleware:
    """Answers 401 to who has no key, and puts the `Tenant` of who has one into the scope as "quire.tenant".

    Where no key is needed, `policy` says who may come in instead.
    """

    def __init__(
        self, app: ASGIApp, tenants: Tenants, on_refused: Callable[[Scope, ApiError], None], policy: HostPolicy
    ) -> None:
        self.app = app
        self.tenants = tenants
        self.on_refused = on_refused
        self.policy = policy

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            tenant = scope["quire.tenant"] = self.tenants.find(authorization_of(scope))
            if tenant is not None:
                summary_of(scope).key = tenant.label
            refusal = None if is_open(scope["path"]) else self._refusal(scope, tenant)
            if refusal is not None:
                self.on_refused(scope, refusal)
                await send_error(refusal, send, scope["path"])
                return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, tenant: Tenant | None) -> ApiError | None:
        """Why the request may not come in, if so."""
        if tenant is None:
            return unauthorized()
        if tenant.is_scraper and scope["path"] != METRICS_PATH:
            return metrics_only()
        return None if self.tenants.count else self.policy.refusal(scope)


def authorization_of(scope: Mapping[str, Any]) -> list[bytes]:
    """The `Authorization` headers; without any, what Anthropic's clients send in `x-api-key`, as one."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return found or [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]


def tenant_of(scope: Mapping[str, Any]) -> Tenant:
    """Who sends this request. Only routes that need a key ask."""
    tenant = scope["quire.tenant"]
    if not isinstance(tenant, Tenant):
        raise TypeError("a route that needs a tenant was reached without one")
    return tenant


def unauthorized() -> ApiError:
    """The answer to a request without a valid key."""
    message = (
        "no valid API key: this server needs one of its keys in the header 'Authorization: Bearer KEY'; "
        "in OpenAI's clients set api_key"
    )
    headers = {"www-authenticate": 'Bearer realm="quire"'}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def metrics_only() -> ApiError:
    """The answer to a metrics key elsewhere."""
    return ApiError(403, "this key reads /metrics, and nothing else (--metrics-key)", code="metrics_only")


def forbidden(alternative: str = "") -> ApiError:
    """The answer to a tenant who asks for what only the operator may see or do. `alternative`: who else may."""
    message = f"this needs the operator's API key, which is the first of the server's --api-key{alternative}"
    return ApiError(403, message, code="operator_only")
