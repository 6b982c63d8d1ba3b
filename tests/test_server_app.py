"""The app around the generation routes: keys, errors, health, models, configuration, metrics, the page."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import APIRouter, FastAPI, Request
from fastapi.routing import APIRoute, iter_route_contexts
from starlette.responses import Response
from starlette.routing import Mount

from quire import __version__
from quire.errors import EngineClosedError, PromptTooLongError, QuireError
from quire.models.hub import resolve
from quire.router.servers import PATIENCE_SECONDS
from quire.server import context, routes_info
from quire.server.app import create_app
from quire.server.auth import Tenants, tenant_of
from quire.server.context import AppContext
from quire.server.dialects import OTHER_ROUTES
from quire.server.metrics import ROUTES
from quire.server.replies import json_reply
from quire.server.routes_info import ROUTER_SECONDS
from tests.server_fakes import AppThread, FakeEngineClient, app_context, wait_until

KEYS = ("sk-first-key", "sk-second-key")


def extra_routes() -> APIRouter:
    """Stand-ins for the generation routes, each of which does one thing."""
    router = APIRouter()

    @router.post("/v1/completions")
    async def completions(request: Request) -> Response:
        tenant = tenant_of(request.scope)
        return json_reply({"owner": tenant.owner, "operator": tenant.is_operator})

    @router.get("/v1/crash")
    async def crash() -> Response:
        raise ValueError("secret /path of a library")

    @router.get("/v1/unexpected")
    async def unexpected() -> Response:
        raise QuireError("secret /path of ours")

    @router.get("/v1/too-long")
    async def too_long() -> Response:
        raise PromptTooLongError("the prompt has 9 tokens, but the context holds 8")

    return router


class Site:
    """A server with fakes, and a client for it."""

    def __init__(self, client: FakeEngineClient | None = None, **options: Any) -> None:
        self.client = client or FakeEngineClient()
        self.context: AppContext = app_context(self.client, **options)
        self.app: FastAPI = create_app(self.context, extra_routes())
        self.thread = AppThread(lambda: self.app)
        self.http = httpx2.Client(base_url=self.thread.url, timeout=60)

    def __enter__(self) -> Site:
        self.thread.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.thread.__exit__(*error)

    def raw(self, method: str, target: str, headers: str = "") -> tuple[int, bytes]:
        """Status and body for a request target that is sent as it stands."""
        with socket.create_connection(("127.0.0.1", self.thread.port), timeout=60) as connection:
            head = f"{method} {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{headers}\r\n"
            connection.sendall(head.encode("latin-1"))
            data = b""
            while part := connection.recv(65536):
                data += part
        return int(data.split(b" ", 2)[1]), data.partition(b"\r\n\r\n")[2]


@pytest.fixture(scope="module")
def site() -> Iterator[Site]:
    """Ready, without keys."""
    with Site() as site:
        yield site


@pytest.fixture(scope="module")
def keyed() -> Iterator[Site]:
    """Ready, with two keys and the administrative routes."""
    with Site(api_key=KEYS, admin=True) as site:
        yield site


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_in(body: bytes) -> dict[str, Any]:
    """The error, which must have OpenAI's shape."""
    content = json.loads(body)
    assert set(content) == {"error"}
    error: dict[str, Any] = content["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"]
    return error


# -- keys ----------------------------------------------------------------------------------------------------


def all_routes(app: FastAPI) -> list[tuple[str, str]]:
    """(method, path) of every route of the app, also those of routers inside."""
    found = []
    for route in iter_route_contexts(app.routes):
        original = getattr(route, "original_route", route)
        path = getattr(route, "path", None) or original.path
        methods = getattr(original, "methods", None) or {"GET"}
        found += [(method, path) for method in methods]
    return found


def test_every_route_but_health_and_page_needs_a_key(keyed: Site) -> None:
    """Walks the route table, so that a new route is checked when it is added."""
    routes = all_routes(keyed.app)
    paths = {path for _, path in routes}
    assert {"/v1/models", "/metrics", "/docs", "/openapi.json", "/view", "/server_info", "/v1/crash"} <= paths
    assert {"/reset_prefix_cache", "/debug/requests", "/debug/steps", "/version", "/v1/models/{id:path}"} <= paths
    for method, path in routes:
        if path == "/static":
            continue
        target = re.sub(r"\{.*?\}", "x", path)
        status, body = keyed.raw(method, target)
        if path in ("/", "/health", "/live"):
            assert status in (200, 404), (method, path)  # 404: the page is not part of every installation
        else:
            assert status == 401, (method, path)
            if method != "HEAD":
                assert error_in(body)["code"] == "invalid_api_key"


@pytest.mark.parametrize("target", ["/metrics", "/v1/models", "/v1/completions", "/docs", "/debug/requests"])
def test_no_spelling_of_a_path_gets_around_the_key(keyed: Site, target: str) -> None:
    """Whatever is not an open path to the letter is refused; what the router would make of it does not matter."""
    name = target.lstrip("/")
    spellings = [
        f"/{name}/", f"//{name}", f"/%2F{name}", f"/{name.replace('/', '%2F')}", f"/./{name}", f"/{name.upper()}",
        f"/health/../{name}", f"/health%2F..%2F{name}", f"/{name}?x=/health", f"/{name}#/health", f"/{name};/health",
        f"/%{ord(name[0]):02x}{name[1:]}", f"/live/{name}", f"http://x/{name}", f"/health%3f/{name}", f"/{name}%00",
        f"/static%2F..%2F{name}", f"/static/../{name}%00", f"/static/%2e%2e/{name}", f"/\xe9{name}",
        f"/HEALTH/../{name}",
    ]  # fmt: skip
    for spelling in spellings:
        for method in ("GET", "HEAD", "POST", "OPTIONS", "PUT", "get"):
            status, body = keyed.raw(method, spelling)
            # What begins like the static files is looked for among them, and is not there.
            allowed = (401, 400) if not spelling.startswith(("/static/", "/static%2F")) else (400, 404, 405)
            assert status in allowed, (method, spelling, body[:200])


def test_static_files_do_not_reach_outside_their_folder(keyed: Site) -> None:
    for target in ("/static/../routes_info.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert keyed.raw("GET", target)[0] == 404
    assert keyed.raw("GET", "/static/docs/docs.js")[0] == 200


@pytest.mark.parametrize(
    "headers",
    [
        "",
        "Authorization: Bearer\r\n",
        "Authorization: Bearer \r\n",
        "Authorization: Bearer wrong\r\n",
        "Authorization: Bearer sk-first-ke\r\n",
        "Authorization: Bearer sk-first-key2\r\n",
        "Authorization: Bearer SK-FIRST-KEY\r\n",
        "Authorization: sk-first-key\r\n",
        "Authorization: Basic sk-first-key\r\n",
        "Authorization: Bearer sk-first-key, Bearer sk-second-key\r\n",
        "Authorization: Bearer sk-first-key\r\nAuthorization: Bearer sk-first-key\r\n",
        "Authorization: Bearer \xff\xfe\r\n",
        "X-Api-Key: sk-first-ke\r\n",
        "X-Api-Key: Bearer sk-first-key\r\n",
        "X-Api-Key: sk-first-key\r\nX-Api-Key: sk-first-key\r\n",
        "X-Api-Key: sk-first-key\r\nAuthorization: Bearer wrong\r\n",
        "Cookie: Authorization=Bearer sk-first-key\r\n",
    ],
)
def test_what_is_not_a_key_is_refused(keyed: Site, headers: str) -> None:
    status, body = keyed.raw("GET", "/v1/models", headers)
    assert status == 401
    assert "sk-first" not in error_in(body)["message"]


def test_the_answer_to_a_missing_key_says_how_to_send_one(keyed: Site) -> None:
    answer = keyed.http.get("/v1/models")
    assert answer.headers["www-authenticate"].startswith("Bearer")
    assert answer.json()["error"]["type"] == "authentication_error"
    assert "Authorization: Bearer" in answer.json()["error"]["message"]


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
def test_each_key_opens_the_api(keyed: Site, scheme: str) -> None:
    for key in KEYS:
        answer = keyed.http.get("/v1/models", headers={"authorization": f"{scheme} {key}"})
        assert answer.status_code == 200


def test_each_of_several_keys_is_its_own_tenant_and_the_first_is_the_operator(keyed: Site) -> None:
    first, second = (keyed.http.post("/v1/completions", headers=bearer(key)).json() for key in KEYS)
    assert (first["operator"], second["operator"]) == (True, False)
    assert first["owner"] != second["owner"]
    assert all(re.fullmatch(r"[0-9a-f]{16}", tenant["owner"]) for tenant in (first, second))


def test_processes_of_one_server_agree_on_the_tenants_and_other_servers_do_not() -> None:
    def owner(*keys: str) -> str:
        tenant = Tenants(keys).find([f"Bearer {keys[0]}".encode()])
        assert tenant is not None
        return tenant.owner

    assert owner("a", "b") == owner("a", "b")
    assert owner("a", "b") != owner("a", "c")
    assert owner("a") == ""  # one key is one tenant


def test_servers_with_one_cluster_key_agree_on_a_tenant_whoever_else_is_one() -> None:
    def owner(*keys: str, secret: bytes = b"a cluster's key") -> str:
        tenant = Tenants(keys, cluster_key=secret).find([f"Bearer {keys[0]}".encode()])
        assert tenant is not None
        return tenant.owner

    assert owner("a") == owner("a", "b") == owner("a", "c") != ""
    assert owner("a") != owner("b") and owner("a") != owner("a", secret=b"another cluster's")


def test_without_keys_everybody_is_the_operator(site: Site) -> None:
    for headers in ({}, bearer("anything")):
        assert site.http.post("/v1/completions", headers=headers).json() == {"owner": "", "operator": True}


def test_only_the_operator_may_look_at_everybodys_requests_and_change_the_engine(keyed: Site) -> None:
    for method, path in (
        ("POST", "/reset_prefix_cache"),
        ("GET", "/debug/requests"),
        ("GET", "/debug/steps"),
        ("GET", "/view"),
    ):
        assert keyed.http.request(method, path, headers=bearer(KEYS[0])).status_code == 200
        refused = keyed.http.request(method, path, headers=bearer(KEYS[1]))
        assert refused.status_code == 403
        assert error_in(refused.content)["code"] == "operator_only"
    assert keyed.client.resets == 1


def test_load_tells_a_router_what_it_must_know_and_nobody_else(keyed: Site) -> None:
    for path in ("/load", "/load/prompts", "/load/requests/x"):
        assert keyed.http.get(path, headers=bearer(KEYS[1])).status_code == 403
    found = keyed.http.get("/load", headers=bearer(KEYS[0])).json()
    info = keyed.client.info
    assert info is not None
    assert (found["fingerprint"], found["block_size"]) == (info.fingerprint, info.block_size)
    assert found["engines"][0]["up"] is True
    assert found["prefill_tokens_per_second"] is None  # too little was computed to say


def test_metrics_are_the_operators_or_a_scrape_keys_where_there_are_several_tenants() -> None:
    """They tell of everybody's prompts and cache hits."""
    with Site(api_key=KEYS, metrics_key=("scrape",), admin=True) as site:
        for key, status in ((KEYS[0], 200), (KEYS[1], 403), ("scrape", 200), ("scrape2", 401)):
            assert site.http.get("/metrics", headers=bearer(key)).status_code == status
        refused = site.http.get("/metrics", headers=bearer(KEYS[1]))
        assert error_in(refused.content)["code"] == "operator_only" and "--metrics-key" in refused.text


def test_a_scrape_key_opens_nothing_but_the_metrics() -> None:
    with Site(api_key=KEYS, metrics_key=("scrape",), admin=True) as site:
        for method, path in all_routes(site.app):
            if path in ("/metrics", "/static", "/", "/health", "/live"):
                continue
            refused = site.http.request(method, re.sub(r"\{.*?\}", "x", path), headers=bearer("scrape"))
            assert refused.status_code == 403, (method, path)
            if method != "HEAD":
                assert error_in(refused.content)["code"] == "metrics_only"
        info = site.http.get("/server_info", headers=bearer(KEYS[0])).json()["server_options"]
        assert info["metrics_key"]["value"] == "1 set" and info["api_key"]["value"] == "2 set"


def test_the_holder_of_the_only_key_reads_the_metrics() -> None:
    with Site(api_key=KEYS[:1]) as site:
        assert site.http.get("/metrics", headers=bearer(KEYS[0])).status_code == 200
        assert site.http.get("/metrics").status_code == 401


def test_administrative_routes_do_not_exist_unless_asked_for(site: Site) -> None:
    for method, path in (("POST", "/reset_prefix_cache"), ("GET", "/debug/requests"), ("GET", "/debug/steps")):
        answer = site.http.request(method, path)
        assert answer.status_code == 404
        assert error_in(answer.content)["code"] == "unknown_url"
    assert site.client.resets == 0


def test_the_live_view_is_there_for_one_tenant_and_off_for_several_without_admin(site: Site) -> None:
    assert site.http.get("/view?since=7").status_code == 200
    assert site.client.inspected[-1] == ("live", 7)
    with Site(api_key=KEYS) as several:
        refused = several.http.get("/view", headers=bearer(KEYS[0]))
        assert refused.status_code == 403
        assert "--admin" in error_in(refused.content)["message"]
    with Site(api_key=KEYS[:1]) as one:
        assert one.http.get("/view", headers=bearer(KEYS[0])).status_code == 200


# -- errors --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/nothing", "/v1", "/v1/nothing", "/v1/models/", "/health/", "//health", "/v1/chat"])
def test_an_unknown_path_is_a_404_in_openais_shape(site: Site, path: str) -> None:
    status, body = site.raw("GET", path)
    assert status == 404
    error = error_in(body)
    assert error["code"] in ("unknown_url", "model_not_found")


@pytest.mark.parametrize(
    ("method", "path", "word"),
    [
        ("POST", "/generate", "/v1/completions"),  # SGLang
        ("POST", "/api/chat", "/v1/chat/completions"),  # Ollama
        ("GET", "/ping", "/health"),  # vLLM
        ("POST", "/sleep", "start it again"),
        ("POST", "/update_weights", "that checkpoint"),
        ("POST", "/init_weights_update_group", "that checkpoint"),  # SGLang
        ("POST", "/update_weights_from_disk", "that checkpoint"),
        ("POST", "/release_memory_occupation", "start it again"),
        ("POST", "/pause_generation", "/abort"),
        ("POST", "/v1/classify", "/v1/score"),
        ("POST", "/v1/audio/transcriptions", "only text"),  # OpenAI
        ("POST", "/v1/files", "quire batch"),
        ("POST", "/reset_prefix_cache", "--admin"),
        ("POST", "/v1//chat/completions", "use /v1/chat/completions"),
        ("GET", "/health/", "use /health"),
        ("GET", "/generated", "/docs"),
        ("GET", "/nothing/", "/docs"),
    ],
)
def test_a_route_of_another_engine_is_a_404_that_says_what_to_use(
    site: Site, method: str, path: str, word: str
) -> None:
    status, body = site.raw(method, path)
    assert status == 404 and word in error_in(body)["message"]


def test_each_route_is_counted_under_its_own_name_and_none_is_one_of_another_engine() -> None:
    known = create_app(app_context(admin=True)).openapi()["paths"].keys()
    admins = {"/reset_prefix_cache", "/debug/requests", "/debug/steps"}
    assert admins <= known <= set(ROUTES) and not known & (OTHER_ROUTES.keys() - admins)


def test_a_path_in_a_message_is_short_and_printable(site: Site) -> None:
    status, body = site.raw("GET", "/" + "%1b%0a%e2%80%ae" * 200)
    assert status == 404
    message = error_in(body)["message"]
    assert len(message) < 500 and message.isascii() and message.isprintable()


def test_models_may_be_asked_for_by_head(site: Site) -> None:
    for path in ("/v1/models", "/models"):
        answer = site.http.request("HEAD", path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert answer.headers["content-length"] == site.http.get(path).headers["content-length"]


@pytest.mark.parametrize(
    ("method", "path"), [("DELETE", "/v1/models"), ("GET", "/v1/completions"), ("POST", "/health")]
)
def test_a_wrong_method_is_a_405_that_names_the_right_ones(site: Site, method: str, path: str) -> None:
    answer = site.http.request(method, path)
    assert answer.status_code == 405
    assert answer.headers["allow"] in error_in(answer.content)["message"]


@pytest.mark.parametrize("query", ["since=x", "since=-1", "since=1e400", f"since={10**30}", "since=", "since=%00"])
def test_a_bad_query_is_a_400_and_never_a_422(site: Site, query: str) -> None:
    answer = site.http.get(f"/view?{query}")
    assert answer.status_code == 400
    assert error_in(answer.content)["param"] == "since"


def test_the_unexpected_is_a_500_whose_cause_stays_in_the_log(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    for path in ("/v1/crash", "/v1/unexpected"):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            answer = site.http.get(path, headers={"x-request-id": "find-me"})
        assert answer.status_code == 500
        error = error_in(answer.content)
        assert error["type"] == "server_error"
        assert "secret" not in answer.text
        [record] = [record for record in caplog.records if record.exc_info]
        assert "find-me" in record.getMessage()
        assert "secret" in str(record.exc_info)
        assert answer.headers["x-request-id"] == "find-me"


def test_an_error_of_ours_keeps_its_text_and_code(site: Site) -> None:
    answer = site.http.get("/v1/too-long")
    assert answer.status_code == 400
    error = error_in(answer.content)
    assert error["code"] == "context_length_exceeded"
    assert "9 tokens" in error["message"]


# -- labels and headers --------------------------------------------------------------------------------------


def test_the_request_id_is_echoed_or_made(site: Site) -> None:
    assert site.http.get("/live", headers={"x-request-id": "abc-123"}).headers["x-request-id"] == "abc-123"
    made = {site.http.get("/live").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3 and all(re.fullmatch(r"req-[0-9a-f]{24}", label) for label in made)


@pytest.mark.parametrize("given", [b"a" * 129, b"a b\tc", b"\xffx\xc3\xa9y", b"<script>", b"", b"-x"])
def test_an_id_that_is_not_valid_is_replaced(site: Site, given: bytes) -> None:
    answer = site.http.get("/live", headers=[(b"x-request-id", given)])
    assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"])


def test_of_two_ids_none_is_taken(site: Site) -> None:
    answer = site.http.get("/live", headers=[(b"x-request-id", b"one"), (b"x-request-id", b"two")])
    assert re.fullmatch(r"req-[0-9a-f]{24}", answer.headers["x-request-id"])


def test_also_errors_before_the_router_carry_an_id(keyed: Site) -> None:
    answer = keyed.http.get("/v1/models", headers={"x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (401, "mine")


def test_pages_may_load_nothing_from_elsewhere(site: Site) -> None:
    for path in ("/", "/static/docs/index.html", "/static/docs/docs.js"):
        answer = site.http.get(path)
        assert answer.status_code == 200
        policy = answer.headers["content-security-policy"]
        assert "default-src 'self'" in policy and "script-src" not in policy and "unsafe-eval" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"
    assert "content-security-policy" not in site.http.get("/v1/models").headers


def test_cors_is_off_unless_an_origin_is_named(site: Site) -> None:
    origin = {"origin": "https://page.example"}
    asked = origin | {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert "access-control-allow-origin" not in site.http.get("/v1/models", headers=origin).headers
    assert site.http.options("/v1/completions", headers=asked).status_code == 403
    with Site(api_key=KEYS, cors_origin=("https://page.example",)) as open_site:
        granted = open_site.http.options("/v1/completions", headers=asked)
        assert granted.status_code == 200
        assert granted.headers["access-control-allow-origin"] == "https://page.example"
        answer = open_site.http.get("/v1/models", headers=origin | bearer(KEYS[0]))
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        shown = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
        assert {"x-quire-ignored", "x-quire-clamped", "x-quire-loosened", "retry-after"} <= shown
        assert open_site.http.get("/v1/models", headers=origin).status_code == 401
        other = open_site.http.options("/v1/completions", headers=asked | {"origin": "https://other.example"})
        assert "access-control-allow-origin" not in other.headers


# -- health, and the gate ------------------------------------------------------------------------------------


def test_ready_and_alive(site: Site) -> None:
    for path in ("/health", "/live"):
        answer = site.http.get(path)
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert site.http.head(path).status_code == 200
        assert answer.headers["cache-control"] == "no-store"


def test_while_loading_health_tells_the_phase_and_the_api_asks_to_come_again() -> None:
    with Site(FakeEngineClient.loading()) as site:
        answer = site.http.get("/health")
        assert answer.status_code == 503
        assert answer.json() == {"status": "loading", "phase": "reading weights", "percent": 40}
        for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/view")):
            refused = site.http.request(method, path, headers={"connection": "close"})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            error = error_in(refused.content)
            assert (error["type"], error["code"]) == ("service_unavailable", "model_loading")
            assert "40 %" in error["message"]
        for path in ("/live", "/version", "/server_info", "/metrics", "/docs", "/openapi.json"):
            assert site.http.get(path, follow_redirects=True).status_code == 200, path
        assert site.http.get("/nothing").status_code == 404
        assert b'reason="not_ready"} 3.0' in site.http.get("/metrics").content


def test_before_there_is_a_board_health_still_answers() -> None:
    client = FakeEngineClient.loading()
    client.board = None
    with Site(client) as site:
        assert site.http.get("/health").json() == {"status": "loading", "phase": "starting", "percent": 0}


def test_an_engine_without_tokenizers_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "REST_SECONDS", 0.1)
    with Site() as site:
        site.context.pool = None
        assert site.http.get("/health").json()["status"] == "loading"
        assert site.http.get("/v1/models").status_code == 503


def test_a_request_is_held_until_the_tokenizers_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context, "REST_SECONDS", 600.0)
    with Site() as site, ThreadPoolExecutor(1) as thread:
        pool, site.context.pool = site.context.pool, None
        held = thread.submit(site.http.get, "/v1/models")
        assert wait_until(lambda: site.thread.num_tasks == 1)
        site.context.pool = pool
        assert held.result(60).status_code == 200


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"healthy": False}, "stalled", None),
        ({"state": "restarting"}, "restarting", "engine_restarting"),
        ({"state": "failed", "cause": "killed by SIGKILL"}, "failed", "engine_failed"),
        ({"draining": True}, "draining", "shutting_down"),
    ],
)
def test_health_tells_what_is_wrong(changes: dict[str, Any], status: str, code: str | None) -> None:
    client = FakeEngineClient()
    with Site(client) as site:
        for name, value in changes.items():
            setattr(client, name, value)
        answer = site.http.get("/health")
        assert (answer.status_code, answer.json()["status"]) == (503, status)
        assert site.http.get("/live").status_code == 200
        refused = site.http.get("/v1/models")
        if code is None:  # a stalled engine may come back: requests are still taken
            assert refused.status_code == 200
        else:
            assert (refused.status_code, error_in(refused.content)["code"]) == (503, code)
            assert "SIGKILL" not in refused.text
        if status == "draining":
            assert refused.headers["connection"] == "close"
            assert "retry-after" in refused.headers


def test_an_engine_that_dies_under_a_question_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    client = FakeEngineClient()

    async def inspect(what: str, since: int = 0, replica: int | None = None) -> bytes:
        raise EngineClosedError("the engine died: secret cause")

    monkeypatch.setattr(client, "inspect", inspect)
    with Site(client) as site:
        answer = site.http.get("/view")
        assert answer.status_code == 503
        assert "secret" not in answer.text and "retry-after" in answer.headers
        assert site.http.get("/metrics").status_code == 200


def busy_client(monkeypatch: pytest.MonkeyPatch) -> FakeEngineClient:
    """One of an engine that is in a long step."""
    client = FakeEngineClient()

    async def inspect(what: str, since: int = 0, replica: int | None = None, seconds: float = 60.0) -> bytes:
        await asyncio.sleep(seconds)
        raise EngineClosedError("the engine did not answer")

    monkeypatch.setattr(client, "inspect", inspect)
    return client


def test_a_router_is_answered_while_an_engine_is_in_a_long_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would take the server for lost, though it is well and streams go on."""
    monkeypatch.setattr(routes_info, "ROUTER_SECONDS", 0.05)
    assert ROUTER_SECONDS < PATIENCE_SECONDS
    with Site(busy_client(monkeypatch)) as site:
        [told] = site.http.get("/load", timeout=30).json()["engines"]
        assert (told["engine"], told["up"]) == (None, True)
        assert site.http.get("/load/prompts", params={"since": "0"}, timeout=30).json() == {"engines": [None]}


def test_metrics_do_not_wait_for_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    client = busy_client(monkeypatch)
    monkeypatch.setattr(routes_info, "STATS_SECONDS", 0.05)
    with Site(client) as site:
        answer = site.http.get("/metrics", timeout=30)
        assert answer.status_code == 200 and "quire:http_requests_total" in answer.text


# -- what the server says of itself --------------------------------------------------------------------------


def test_models_are_listed_under_every_name_with_the_longest_context() -> None:
    with Site(model_names=("demo", "org/other-name")) as site:
        listed = site.http.get("/v1/models").json()
        assert listed["object"] == "list"
        assert [model["id"] for model in listed["data"]] == ["demo", "org/other-name"]
        assert {model["max_model_len"] for model in listed["data"]} == {256}
        assert listed["data"][0]["sampling_suggestions"] == {"temperature": 0.7}
        assert listed["data"][0]["sampling_defaults"]["temperature"] == 1
        for name in ("org/other-name", "org%2Fother-name"):
            one = site.http.get(f"/v1/models/{name}")
            assert (one.status_code, one.json()) == (200, listed["data"][1])


def test_an_embedded_model_is_described_and_another_of_its_name_is_not() -> None:
    with Site() as site:
        assert site.http.get("/v1/models").json()["data"][0]["description"] is None
        assert site.context.client.info
        site.context.client.info.path = str(resolve("demo"))
        description = site.http.get("/v1/models").json()["data"][0]["description"]
        assert "4 million parameters" in description and "not an assistant" in description


def test_a_model_that_is_not_served_is_a_404_that_names_those_that_are(site: Site) -> None:
    answer = site.http.get("/v1/models/gpt-4")
    assert answer.status_code == 404
    error = error_in(answer.content)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "demo" in error["message"]


def test_server_info_has_every_option_with_its_origin_and_no_key(keyed: Site) -> None:
    answer = keyed.http.get("/server_info", headers=bearer(KEYS[0]))
    info = answer.json()
    assert info["server_options"]["api_key"] == {"value": "2 set", "origin": "file"}
    assert info["server_options"]["admin"]["value"] is True
    assert info["engine_options"]["model"] == {"value": "demo", "origin": "flag"}
    assert info["engine_options"]["max_model_len"] == {"value": 256, "origin": "found at start"}
    assert info["engine_options"]["max_num_seqs"] == {"value": 64, "origin": "default"}
    assert info["engine"]["dtype"] == "bfloat16" and info["engine"]["memory_plan"]
    assert not any(key in answer.text for key in KEYS)


def test_version(site: Site) -> None:
    assert site.http.get("/version").json() == {"version": __version__}


def test_metrics_have_what_the_engine_tells_and_which_routes_were_asked(site: Site) -> None:
    site.client.documents["stats"] = {"running": 3, "waiting": 5, "num_blocks": 10, "held_blocks": 4}
    site.http.get("/v1/models/none")
    site.http.get("/what/is/this")
    answer = site.http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    text = answer.text
    assert re.search(r"^vllm:num_requests_running\{.*\} 3\.0$", text, re.MULTILINE)
    assert re.search(r'^quire:http_requests_total\{route="/v1/models/\{id\}",status="404"\} \d', text, re.MULTILINE)
    assert re.search(r'^quire:http_requests_total\{route="other",status="404"\} \d', text, re.MULTILINE)
    assert re.search(r'^quire:engine_state\{engine="0",state="ready"\} 1', text, re.MULTILINE)
    assert "what/is" not in text


def test_debug_documents_are_the_engines(keyed: Site) -> None:
    keyed.client.documents["steps"] = {"steps": [1, 2]}
    answer = keyed.http.get("/debug/steps?since=4", headers=bearer(KEYS[0]))
    assert answer.json() == {"steps": [1, 2]}
    assert keyed.client.inspected[-1] == ("steps", 4)
    assert keyed.http.get("/debug/requests", headers=bearer(KEYS[0])).json()["what"] == "requests"


# -- documents -----------------------------------------------------------------------------------------------


def test_the_openapi_document_covers_every_route_of_the_api(keyed: Site) -> None:
    document = keyed.http.get("/openapi.json", headers=bearer(KEYS[0])).json()
    hidden = {"/", "/docs", "/openapi.json", "/static"}
    expected = {
        (m.lower(), p.replace(":path", "")) for m, p in all_routes(keyed.app) if p not in hidden and m != "HEAD"
    }
    described = {(method, path) for path, methods in document["paths"].items() for method in methods}
    assert described == expected
    for path, methods in document["paths"].items():
        for operation in methods.values():
            assert "422" not in operation["responses"]
            assert operation["responses"]["default"]["content"]["application/json"]["schema"]
            assert operation.get("summary")
            assert bool(operation.get("security")) == (path not in ("/health", "/live"))
    assert document["paths"]["/v1/completions"]["post"]["requestBody"]["required"] is True


def test_the_openapi_document_asks_for_a_key_only_where_there_is_one(site: Site) -> None:
    document = site.http.get("/openapi.json").json()
    assert "securitySchemes" not in document["components"]
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    assert operations and not any("security" in operation for operation in operations)
    assert [*document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]] == ["text/plain"]


def test_paths_without_v1_are_the_same_routes(keyed: Site) -> None:
    assert keyed.http.post("/completions", headers=bearer(KEYS[0]), json={}).json()["operator"] is True
    assert keyed.http.post("/completions", json={}).status_code == 401
    for path in ("/models", "/models/demo"):
        found = keyed.http.get(path, headers=bearer(KEYS[0])).json()
        assert found == keyed.http.get("/v1" + path, headers=bearer(KEYS[0])).json()
    assert keyed.http.post("/messages", json={}).json()["type"] == "error"  # in Anthropic's shape
    assert keyed.http.get("/modelsx", headers=bearer(KEYS[0])).status_code == 404


def test_every_reference_in_the_openapi_document_leads_somewhere(keyed: Site) -> None:
    text = keyed.http.get("/openapi.json", headers=bearer(KEYS[0])).text
    schemas = json.loads(text)["components"]["schemas"]
    references = set(re.findall(r'"\$ref":"#/components/schemas/([^"]+)"', text))
    assert "Error" in references
    assert references <= set(schemas)


def test_the_docs_page_and_all_that_it_loads_come_from_this_server(site: Site) -> None:
    page = site.http.get("/docs", follow_redirects=True)
    assert page.headers["content-type"].startswith("text/html")
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(loaded) >= 3
    for url in loaded:
        if not url.startswith("data:"):
            found = page.url.join(url)
            assert found.path.startswith("/static/docs/")
            assert site.http.get(found).status_code == 200
    assert re.search(r"<script(?! src=)", page.text) is None  # the policy allows no inline script


def test_the_bundled_files_are_small_and_have_their_licences() -> None:
    folder = routes_info.STATIC / "docs"
    assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
    assert "Apache License" in (folder / "LICENSE").read_text()


def test_the_page_is_served_or_its_absence_is_told(site: Site, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(routes_info, "STATIC", tmp_path)
    assert site.http.get("/").status_code == 404
    (tmp_path / "index.html").write_text("<!DOCTYPE html><title>Quire</title>")
    answer = site.http.get("/")
    assert answer.status_code == 200
    assert "default-src 'self'" in answer.headers["content-security-policy"]


def test_mounts_are_the_static_files_alone(site: Site) -> None:
    assert [route.path for route in site.app.routes if isinstance(route, Mount)] == ["/static"]
    assert not [route for route in site.app.routes if isinstance(route, APIRoute) and route.path.startswith("/static")]
    assert msgspec.json.encode(site.app.openapi())


def test_pages_of_other_origins_may_not_use_a_server_without_keys(site: Site) -> None:
    for path in ("/v1/models", "/server_info"):
        for foreign in ("cross-site", "same-site"):
            answer = site.http.get(path, headers={"sec-fetch-site": foreign, "origin": "http://evil.example"})
            assert answer.status_code == 403 and answer.json()["error"]["code"] == "foreign_origin"
        for own in ({"sec-fetch-site": "same-origin"}, {"sec-fetch-site": "none"}, {}):
            assert site.http.get(path, headers=own).status_code == 200
    assert site.http.get("/health", headers={"sec-fetch-site": "cross-site"}).status_code == 200


def test_an_origin_that_is_allowed_may_use_a_server_without_keys() -> None:
    with Site(cors_origin=("http://good.example",)) as site:
        for origin, status in (("http://good.example", 200), ("http://evil.example", 403)):
            assert (
                site.http.get("/v1/models", headers={"sec-fetch-site": "cross-site", "origin": origin}).status_code
                == status
            )


def test_the_folders_in_server_info_are_the_operators_where_there_are_several_tenants(keyed: Site) -> None:
    assert keyed.http.get("/server_info", headers=bearer(KEYS[0])).status_code == 200
    assert keyed.http.get("/server_info", headers=bearer(KEYS[1])).status_code == 403
