"""Under which names, and from which pages, a server without keys is used: raw sockets against a real server."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.server import host_policy
from quire.server.app import create_app
from quire.server.host_policy import Host, HostPolicy, parse_host
from tests.server_fakes import AppThread, FakeEngineClient, app_context

BODY = b'{"prompt": "abc", "max_tokens": 2}'


class Client(FakeEngineClient):
    """The fake engine, with a tokenizer of bytes."""

    tokenizer = SimpleNamespace(token_text=chr, token_bytes=lambda token: bytes([token]))


class Site:
    """A server on 127.0.0.1 that is asked in bytes."""

    def __init__(self, **options: Any) -> None:
        self.client = Client()
        self.context = app_context(self.client, **options)  # type: ignore[arg-type]
        self.thread = AppThread(lambda: create_app(self.context))

    def __enter__(self) -> Site:
        self.thread.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.thread.__exit__(*error)

    def ask(
        self, *headers: str | bytes, target: str = "GET /v1/models", body: bytes = b"", version: str = "1.1"
    ) -> tuple[int, dict[str, Any]]:
        """The status and the JSON of the answer to a request with just these headers."""
        lines = [f"{target} HTTP/{version}".encode(), b"connection: close"]
        lines += [header.encode("latin-1") if isinstance(header, str) else header for header in headers]
        if body:
            lines.append(b"content-length: %d" % len(body))
        with socket.create_connection(("127.0.0.1", self.thread.port), timeout=60) as connection:
            connection.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
            data = b""
            while part := connection.recv(65536):
                data += part
        head, _, content = data.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1]), json.loads(content)

    def post(self, *headers: str, content_type: str | None = "application/json") -> tuple[int, dict[str, Any]]:
        typed = [] if content_type is None else [f"content-type: {content_type}"]
        return self.ask("host: localhost", *typed, *headers, target="POST /v1/completions", body=BODY)


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """On the loopback, without keys."""
    with Site() as site:
        yield site


def code(answer: tuple[int, dict[str, Any]]) -> tuple[int, str]:
    return answer[0], answer[1].get("error", {}).get("code", "")


# -- names ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (b"localhost", Host("localhost", None)),
        (b"LocalHost:8000", Host("localhost", 8000)),
        (b" example.org.:80\t", Host("example.org", 80)),
        (b"10.1.2.3:8000", Host("10.1.2.3", 8000)),
        (b"[::1]:8000", Host("::1", 8000)),
        (b"[FE80::1]", Host("fe80::1", None)),
        (b"[::ffff:127.0.0.1]:1", Host("::ffff:127.0.0.1", 1)),
        (b"my_service:8000", Host("my_service", 8000)),
        (b"x:", Host("x", None)),
        (b"", Host("", None)),
        *((bad, None) for bad in (b"::1", b"[::1", b"::1]", b"[]", b"[1.2.3.4]", b"[::g]", b"[::1]x", b"[v1.x]")),
        *(
            (bad, None)
            for bad in (b"a b", b"a/b", b"a@b", b"a?b", b"a:b", b"a:80:80", b"a:-1", b"a:65536", b"a:999999")
        ),
        *((bad, None) for bad in (b"\xff", b"a\x00", b"a,b:x", b"a" * 254, b"a" * 30_000, b"[" + b":" * 30_000 + b"]")),
    ],
)
def test_a_host_is_a_name_or_an_address_and_perhaps_a_port(value: bytes, found: Host | None) -> None:
    assert parse_host(value) == found


@given(st.one_of(st.binary(max_size=80), st.text("ab.:[]0-9%_@/", max_size=20).map(str.encode)))
@example(b"[" * 20_000)
@example(b"1:" * 20_000)
@settings(max_examples=150, deadline=None)
def test_whatever_a_host_header_holds_only_known_names_and_addresses_come_in(value: bytes) -> None:
    host = parse_host(value)
    if host is None:
        return  # a 400
    policy = HostPolicy("127.0.0.1", ["quire.example"])
    refusal = policy.refusal({"headers": [(b"host", value)]})
    known = host.name in ("localhost", "quire.example", socket.gethostname().lower())
    address = re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,3}){3}|[0-9a-f:.]*:[0-9a-f:.]*", host.name)
    if refusal is None:
        assert known or host.name.endswith(".localhost") or address
    else:
        assert refusal.status == 403 and not known and len(refusal.message) < 500 and refusal.message.isprintable()


@pytest.mark.parametrize(
    "host",
    [
        "host.docker.internal:8000", "quire.internal",
        "localhost", "localhost:8000", "LOCALHOST:1", "localhost.:8000", "chat.localhost", "127.0.0.1",
        "127.0.0.1:8000", "[::1]:8000", "[::1]", "10.42.0.17:8000", "192.168.1.5", "[2001:db8::7]:8000", "0.0.0.0:8000",
        socket.gethostname(),
    ],
)  # fmt: skip
def test_names_of_this_machine_and_addresses_are_known(site: Site, host: str) -> None:
    """An address is what Kubernetes' probes, and people in the same network, have as the host."""
    assert site.ask(f"host: {host}")[0] == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "xlocalhost", ""]
)
def test_a_page_under_a_name_of_its_own_gets_nothing(site: Site, host: str) -> None:
    """DNS rebinding: to the browser the page and this server are of one origin, so all that differs is the name."""
    origin = [f"origin: http://{host}", "sec-fetch-site: same-origin"] if host else []
    for target in ("GET /v1/models", "GET /metrics", "GET /view", "GET /server_info"):
        assert code(site.ask(f"host: {host}", *origin, target=target)) == (403, "unknown_host")
    json_type = "content-type: application/json"
    refused = site.ask(f"host: {host}", json_type, *origin, target="POST /v1/completions", body=BODY)
    assert code(refused) == (403, "unknown_host")
    assert not site.client.calls


def test_the_refusal_of_a_name_says_which_flag_allows_it(site: Site) -> None:
    message = site.ask("host: Quire.Example:8000")[1]["error"]["message"]
    assert "--allowed-host quire.example " in message and "--api-key" in message
    long = site.ask(f"host: {'a' * 250}")[1]["error"]["message"]
    assert "--allowed-host NAME " in long


def test_names_that_were_allowed_are_known_and_no_others() -> None:
    with Site(allowed_host=("quire", "Chat.Example.org."), host="0.0.0.0") as site:
        for host in ("quire:8000", "QUIRE", "chat.example.org", "chat.example.org.:443", "localhost", "10.0.0.1"):
            assert site.ask(f"host: {host}")[0] == 200
        for host in ("quire2", "example.org", "x.chat.example.org"):
            assert code(site.ask(f"host: {host}")) == (403, "unknown_host")


def test_a_server_on_every_address_asks_for_its_names_too_and_every_name_can_be_allowed() -> None:
    with Site(host="0.0.0.0") as site:
        assert code(site.ask("host: quire:8000")) == (403, "unknown_host")
    with Site(host="0.0.0.0", allowed_host=("*",)) as site:
        assert site.ask("host: anything.example:8000")[0] == 200
        other = "origin: http://other.example"
        assert code(site.ask("host: anything.example:8000", other)) == (403, "foreign_origin")


def test_the_name_that_the_server_listens_on_is_known() -> None:
    with Site(host="Quire.Internal") as site:
        assert site.ask("host: quire.internal:8000")[0] == 200


def test_probes_and_the_pages_files_are_served_under_any_name(site: Site) -> None:
    for target in ("GET /health", "GET /live"):
        assert site.ask("host: quire.default.svc.cluster.local", target=target)[0] == 200


def test_where_a_key_is_needed_any_name_will_do() -> None:
    with Site(api_key=("secret",)) as site:
        key = "authorization: Bearer secret"
        assert (
            site.ask("host: evil.example", key, "origin: http://evil.example", "sec-fetch-site: cross-site")[0] == 200
        )
        assert site.ask("host: evil.example")[0] == 401


@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_a_request_has_one_valid_host(keys: tuple[str, ...]) -> None:
    with Site(api_key=keys) as site:
        key = ["authorization: Bearer secret"] if keys else []
        for bad in (
            [],
            ["host: localhost", "host: localhost"],
            ["host: localhost", "Host: evil.example"],
            ["host: local host"],
            ["host: [::1"],
            ["host: localhost:99999"],
            [b"host: \xff\xfe"],
            ["host: " + "a" * 20_000],
        ):
            for target in ("GET /v1/models", "GET /health"):
                assert code(site.ask(*bad, *key, target=target)) == (400, "invalid_http")
        assert site.ask(*key, version="1.0")[0] == 200  # HTTP/1.0 has no Host
        assert code(site.ask("host: a", "host: b", *key, version="1.0")) == (400, "invalid_http")


# -- pages ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host", "origin", "own"),
    [
        ("localhost:8000", "http://localhost:8000", True),
        ("localhost", "http://localhost", True),
        ("localhost", "https://localhost", True),  # a proxy before this server ended TLS
        ("localhost:443", "https://localhost", True),
        ("LOCALHOST:8000", "http://localhost:8000", True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("localhost:8000", "http://localhost:3000", False),
        ("localhost:8000", "http://127.0.0.1:8000", False),
        ("localhost:8000", "http://evil.example", False),
        ("localhost:8000", "http://localhost:8000.evil.example", False),
        ("localhost:8000", "http://evil.example@localhost:8000", False),
        ("0.0.0.0:8000", "http://evil.example", False),
        ("localhost:8000", "null", False),
        ("localhost:8000", "", False),
        ("localhost:8000", "file://", False),
        ("localhost:8000", "chrome-extension://abc", False),
        ("localhost:8000", "\xff", False),
        ("127.0.0.1:8000", "https://chat.example.org", True),  # a proxy that puts its own Host
        ("127.0.0.1:8000", "https://org.example.chat", False),
    ],
)
def test_only_pages_of_this_server_may_use_it_without_a_key(host: str, origin: str, own: bool) -> None:
    policy = HostPolicy("127.0.0.1", ["chat.example.org"])
    headers = [(b"host", host.encode()), (b"origin", origin.encode("latin-1"))]
    refusal = policy.refusal({"headers": headers})
    assert (refusal is None) == own
    assert refusal is None or refusal.code == "foreign_origin"


def test_two_origins_are_no_origin() -> None:
    policy = HostPolicy("127.0.0.1")
    headers = [(b"host", b"localhost"), (b"origin", b"http://localhost"), (b"origin", b"http://localhost")]
    assert policy.refusal({"headers": headers}) is not None


def test_a_post_from_a_page_elsewhere_does_not_run_though_nothing_says_that_it_is_cross_site(site: Site) -> None:
    """Browsers leave `Sec-Fetch-Site` out where a server is another machine without TLS, and old ones always."""
    runs = len(site.client.calls)
    assert code(site.post("origin: http://evil.example")) == (403, "foreign_origin")
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", None):
        assert code(site.post("origin: http://evil.example", content_type=content_type))[0] == 403
        assert code(site.post(content_type=content_type)) == (415, "unsupported_media_type")
    assert len(site.client.calls) == runs


def test_an_origin_that_was_allowed_may_use_the_server_whatever_its_scheme() -> None:
    with Site(cors_origin=("http://good.example:3000", "chrome-extension://abc")) as site:
        for origin in ("http://good.example:3000", "chrome-extension://abc"):
            assert site.post(f"origin: {origin}", "sec-fetch-site: cross-site")[0] == 200
        for origin in ("http://good.example", "https://good.example:3000", "http://evil.example"):
            assert code(site.post(f"origin: {origin}")) == (403, "foreign_origin")
    with Site(cors_origin=("*",)) as site:
        assert site.post("origin: http://evil.example", "sec-fetch-site: cross-site")[0] == 200


# -- bodies --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content_type", ["application/json", "Application/JSON; charset=utf-8", "application/json;x"])
def test_a_body_that_says_it_is_json_is_read(site: Site, content_type: str) -> None:
    assert site.post(content_type=content_type)[0] == 200


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("content_type", ["text/plain", "application/jsonp", "application/", "", "x" * 5000, None])
def test_a_body_that_does_not_say_that_it_is_json_is_a_415_that_helps(
    site: Site, path: str, content_type: str | None
) -> None:
    typed = [] if content_type is None else [f"content-type: {content_type}"]
    answer = site.ask("host: localhost", *typed, target=f"POST {path}", body=BODY)
    assert code(answer) == (415, "unsupported_media_type")
    message = answer[1]["error"]["message"]
    assert "Content-Type: application/json" in message and len(message) < 300


@pytest.mark.parametrize(
    ("coding", "status"), [("gzip", 415), ("identity", 200), ("zstd, gzip", 415), ("Identity", 200)]
)
def test_a_body_that_is_compressed_is_refused_by_name(site: Site, coding: str, status: int) -> None:
    found, document = site.post(f"content-encoding: {coding}")
    assert found == status
    assert status == 200 or (document["error"]["code"], coding in document["error"]["message"]) == (
        "unsupported_media_type",
        True,
    )


def test_two_content_types_are_none(site: Site) -> None:
    assert site.post("content-type: text/plain")[0] == 415


def test_keys_change_nothing_of_what_a_body_must_say() -> None:
    with Site(api_key=("secret",)) as site:
        assert site.post("authorization: Bearer secret", content_type="text/plain")[0] == 415
        assert site.post("authorization: Bearer secret")[0] == 200


def test_the_bound_on_names_is_that_of_dns() -> None:
    assert parse_host(b"a" * host_policy.MAX_NAME_LENGTH) and not parse_host(b"a" * (host_policy.MAX_NAME_LENGTH + 1))
