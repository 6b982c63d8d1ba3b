"""API keys and tenants.

Every route requires a key except those in `OPEN_PATHS` and the page's static files. The decision is made on the path
that the router matches (decoded once by the HTTP server, never normalized), so no spelling of a path can bypass it:
whatever is not exactly an open path requires a key.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from quire.server.errors import ApiError
from quire.server.host_policy import HostPolicy
from quire.server.replies import send_error
from quire.server.request_log import summary_of

OPEN_PATHS = frozenset({"/", "/health", "/live"})
OPEN_PREFIX = "/static/"
METRICS_PATH = "/metrics"
TENANT_BYTES = 8


@dataclass(frozen=True, slots=True)
class Tenant:
    """The sender of a request.

    Attributes:
        owner: identifies the tenant in the engine, and separates its cached prefixes; "" unless there are several
            tenants.
        is_operator: may use the administrative routes, the live view and the metrics.
        is_scraper: may only read the metrics.
        label: the key's name in the log; "" if there is none.
        address: without keys, the network address that takes a turn of its own; "" if there is none.
    """

    owner: str = ""
    is_operator: bool = True
    is_scraper: bool = False
    label: str = ""
    address: str = ""

    @property
    def queue(self) -> str:
        """Who takes turns with others: the key, or without keys the address. It separates nothing else."""
        return self.owner or self.address


class Tenants:
    """The keys of a server. Without keys, everybody is one tenant; with several, each key is a tenant.

    Tenants' names are derived from the keys, so all processes of a server agree on them. Nobody can guess a key from a
    name without knowing all other keys, or the cluster's key.

    Args:
        keys: the API keys; the first is the operator's.
        metrics_keys: keys that only give access to the metrics.
        cluster_key: if servers share KV, names are derived from this and the tenant's own key, so that they are the
            same on every server and do not change with other keys. None: from all keys of this server.

    Attributes:
        count: number of API keys.
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

    def find(self, authorization: Sequence[bytes], address: str = "") -> Tenant | None:
        """The tenant whose key is in the `Authorization` headers, or None. Takes the same time for every wrong key.

        Args:
            address: the client's.
        """
        if not self._tenants:
            return Tenant(address=_network(address))
        if len(authorization) != 1:
            return None
        scheme, _, key = authorization[0].partition(b" ")
        given = self._digest(key.strip(b" \t"))
        found = None
        for digest, tenant in self._tenants:  # all of them, so that timing does not reveal where it is found
            if hmac.compare_digest(digest, given):
                found = tenant
        return found if scheme.lower() == b"bearer" else None

    def _digest(self, key: bytes) -> bytes:
        """Digests have one length, and comparing them reveals nothing about the keys' bytes."""
        return hashlib.blake2b(key, key=self._salt).digest()


def _named(key: str, secret: bytes) -> str:
    return hashlib.blake2b(key.encode(), key=secret, digest_size=TENANT_BYTES, person=b"quire tenant").hexdigest()


def _network(address: str) -> str:
    """An address; of IPv6, whose hosts have as many as they like, the network."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return ""
    return address if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))


def is_open(path: str) -> bool:
    """Whether this path, as the router sees it, needs no key."""
    return path in OPEN_PATHS or path.startswith(OPEN_PREFIX)


class AuthMiddleware:
    """Returns 401 without a valid key; otherwise puts the `Tenant` into the scope as "quire.tenant".

    If the server has no keys, `policy` decides instead.
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
            address = (scope.get("client") or ("",))[0]
            tenant = scope["quire.tenant"] = self.tenants.find(authorization_of(scope), address)
            if tenant is not None:
                summary_of(scope).key = tenant.label
            refusal = None if is_open(scope["path"]) else self._refusal(scope, tenant)
            if refusal is not None:
                self.on_refused(scope, refusal)
                await send_error(refusal, send, scope["path"])
                return
        await self.app(scope, receive, send)

    def _refusal(self, scope: Scope, tenant: Tenant | None) -> ApiError | None:
        """Why the request is refused, if it is."""
        if tenant is None:
            return unauthorized()
        if tenant.is_scraper and scope["path"] != METRICS_PATH:
            return metrics_only()
        return None if self.tenants.count else self.policy.refusal(scope)


def authorization_of(scope: Mapping[str, Any]) -> list[bytes]:
    """The `Authorization` headers; without any, `x-api-key` of Anthropic's clients in their form."""
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    return found or [b"Bearer " + value for name, value in scope["headers"] if name == b"x-api-key"]


def tenant_of(scope: Mapping[str, Any]) -> Tenant:
    """The sender of this request. Only for routes that require a key."""
    tenant = scope["quire.tenant"]
    if not isinstance(tenant, Tenant):
        raise TypeError("a route that needs a tenant was reached without one")
    return tenant


def unauthorized() -> ApiError:
    """401: no valid key."""
    message = (
        "no valid API key: this server needs one of its keys in the header 'Authorization: Bearer KEY'; "
        "in OpenAI's clients set api_key"
    )
    headers = {"www-authenticate": 'Bearer realm="quire"'}
    return ApiError(401, message, code="invalid_api_key", headers=headers)


def metrics_only() -> ApiError:
    """403: a metrics key on another route."""
    return ApiError(403, "this key reads /metrics, and nothing else (--metrics-key)", code="metrics_only")


def forbidden(alternative: str = "") -> ApiError:
    """403: only the operator may do this. `alternative`: who else may."""
    message = f"this needs the operator's API key, which is the first of the server's --api-key{alternative}"
    return ApiError(403, message, code="operator_only")
