"""The ways in: https, Unix sockets, a path before all routes; and clients that come in by them."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import socket
import stat
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest

from quire.address import Address
from quire.cli import serve
from quire.cli.main import main
from quire.cli.options import CommandParser
from quire.cli.remote import RemoteTalker
from quire.errors import ConfigError, RemoteError, ServerError
from quire.http_client import Connections, HttpClient, HttpError
from quire.router.app import create_app as create_router
from quire.router.config import RouterConfig
from quire.router.run import make_site
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.joining import Registration, url_for
from quire.server.processes import is_loopback, listen, listening, url_of
from quire.tls import client_context
from tests.certificates import Files, make_certificate, needs_openssl
from tests.router_fakes import FakeServer, Loop, RouterThread, answer_text, text_of
from tests.server_fakes import AppThread, app_context, wait_until


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_certificate(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_certificate(tmp_path_factory.mktemp("others"), "other")


@pytest.fixture(scope="module")
def site(files: Files) -> Iterator[AppThread]:
    """A server that speaks https."""
    with AppThread(lambda: create_app(app_context()), certificate=files.loaded) as thread:
        yield thread


def client(site: AppThread, files: Files) -> httpx2.Client:
    return httpx2.Client(base_url=site.url, verify=client_context(str(files.cert)), timeout=60)


# -- https -----------------------------------------------------------------------------------------------------


@needs_openssl
def test_https_answers_whom_its_certificate_satisfies_and_nobody_over_http(site: AppThread, files: Files) -> None:
    with client(site, files) as http:
        assert http.get("/health").status_code == 200
        assert http.get("/v1/models").json()["data"][0]["id"] == "demo"
        assert http.get("/v1/models").http_version == "HTTP/1.1"
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{site.url}/health")
    with socket.create_connection(("127.0.0.1", site.port), timeout=60) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert not plain.recv(100).startswith(b"HTTP")


@needs_openssl
def test_an_answer_within_tls_reaches_a_client_that_is_still_sending(site: AppThread, files: Files) -> None:
    context = client_context(str(files.cert))
    with context.wrap_socket(
        socket.create_connection(("127.0.0.1", site.port), timeout=60), server_hostname="localhost"
    ) as connection:
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(head + b"content-length: 99999999\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
        for _ in range(20):
            connection.sendall(bytes(65536))


@needs_openssl
def test_a_page_under_http_is_no_page_of_a_server_that_speaks_https(site: AppThread, files: Files) -> None:
    with client(site, files) as http:
        own = {"origin": site.url, "host": f"127.0.0.1:{site.port}"}
        assert http.get("/v1/models", headers=own).status_code == 200
        foreign = own | {"origin": site.url.replace("https", "http")}
        assert http.get("/v1/models", headers=foreign).json()["error"]["code"] == "foreign_origin"


@needs_openssl
def test_a_renewed_certificate_is_shown_and_a_broken_one_is_not(
    tmp_path: Path, other: Files, caplog: pytest.LogCaptureFixture
) -> None:
    files = make_certificate(tmp_path)
    certificate = files.loaded
    with AppThread(lambda: create_app(app_context()), certificate=certificate) as site:

        def trusted(by: Files) -> bool:
            try:
                return httpx2.get(f"{site.url}/live", verify=client_context(str(by.cert))).status_code == 200
            except httpx2.ConnectError:
                return False

        first = Files(tmp_path / "first.pem", files.key)
        first.cert.write_bytes(files.cert.read_bytes())
        site.loop.call_soon_threadsafe(certificate.refresh)
        assert trusted(first)
        files.cert.write_bytes(other.cert.read_bytes())  # and not its key
        with caplog.at_level(logging.ERROR):
            site.call(_called(certificate.refresh))
        assert "the old one stays in use" in caplog.text
        assert trusted(first) and not trusted(other)
        files.key.write_bytes(other.key.read_bytes())
        site.call(_called(certificate.refresh))
        assert trusted(other) and not trusted(first)


async def _called(function: Any) -> None:
    function()


@needs_openssl
def test_files_that_will_not_do_are_one_clear_error(tmp_path: Path, files: Files, other: Files) -> None:
    encrypted = tmp_path / "encrypted.key"
    command = ["openssl", "pkey", "-in", str(files.key), "-aes256", "-passout", "pass:secret", "-out", str(encrypted)]
    subprocess.run(command, check=True, capture_output=True)
    broken = tmp_path / "broken.pem"
    broken.write_text("-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n")
    cert, key = str(files.cert), str(files.key)
    for options, message in (
        ({"ssl_certfile": str(tmp_path / "nothing")}, "ssl_certfile=.*nothing cannot be read: No such file"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(tmp_path)}, "ssl_keyfile=.* cannot be read: Is a directory"),
        ({"ssl_certfile": cert}, "without an ssl_keyfile, has no private key"),
        ({"ssl_certfile": key, "ssl_keyfile": key}, "has no certificate; it must be PEM"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(other.key)}, "does not belong to the first certificate in"),
        ({"ssl_certfile": cert, "ssl_keyfile": str(encrypted)}, "is encrypted.*openssl pkey"),
        ({"ssl_certfile": str(broken), "ssl_keyfile": key}, "cannot be used"),
        ({"ssl_keyfile": key}, "ssl_keyfile needs ssl_certfile"),
        ({"cacert": key}, "cacert=.* is not a file of certificates"),
        ({"cacert": str(tmp_path / "nothing")}, "cacert=.*nothing cannot be read"),
    ):
        with pytest.raises(ConfigError, match=message):
            ServerConfig.from_options(options)
        with pytest.raises(ConfigError, match=message):
            RouterConfig.from_options({"server": ["http://127.0.0.1:1"], **options})


@needs_openssl
def test_the_ways_in_are_flags_variables_and_in_server_info(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    def options_of(*flags: str) -> ServerConfig:
        parser = CommandParser("quire serve", "")
        serve.add_arguments(parser)
        return serve.read_options(parser.parse(["demo", *flags]))[1].server

    monkeypatch.setenv("QUIRE_ROOT_PATH", "/llm")
    monkeypatch.setenv("QUIRE_CACERT", str(files.cert))
    found = options_of("--ssl-certfile", str(files.cert), "--ssl-keyfile", str(files.key))
    assert (found.ssl_certfile, found.ssl_keyfile) == (str(files.cert), str(files.key))
    assert (found.root_path, found.cacert, found.uds) == ("/llm", str(files.cert), None)
    assert options_of("--uds", "/run/quire.sock").uds == "/run/quire.sock"
    names = {"uds", "ssl_certfile", "ssl_keyfile", "root_path", "cacert"}
    options = {name: getattr(found, name) for name in names - {"uds"}}
    with (
        AppThread(lambda: create_app(app_context(**options))) as site,
        httpx2.Client(base_url=site.url, timeout=60) as http,
    ):
        told = http.get("/server_info").json()["server_options"]
    assert {name: told[name]["value"] for name in names} == options | {"uds": None}


@needs_openssl
def test_a_key_in_the_certificates_file_will_do(tmp_path: Path, files: Files) -> None:
    both = tmp_path / "both.pem"
    both.write_bytes(files.key.read_bytes() + files.cert.read_bytes())
    assert ServerConfig.from_options({"ssl_certfile": str(both)}).ssl_certfile == str(both)


@needs_openssl
def test_the_clients_verify_and_take_a_named_authority(site: AppThread, files: Files) -> None:
    with pytest.raises(RemoteError, match=r"certificate is not trusted: self-signed certificate; .*--cacert"):
        RemoteTalker(site.url)
    talker = RemoteTalker(site.url, cacert=str(files.cert))
    assert talker.model == "demo"
    talker.close()


@needs_openssl
def test_the_http_client_verifies_servers_behind_tls(site: AppThread, files: Files) -> None:
    async def ask(cacert: str | None) -> int:
        upstream = HttpClient(Address(site.url), Connections(9), cacert)
        try:
            return (await upstream.fetch("GET", "/v1/models", seconds=60))[0]
        finally:
            upstream.break_off()

    assert asyncio.run(ask(str(files.cert))) == 200
    with pytest.raises(HttpError, match="certificate is not trusted"):
        asyncio.run(ask(None))


@needs_openssl
def test_a_server_joins_a_router_behind_tls(files: Files) -> None:
    config = RouterConfig(api_key=("k",))
    router = make_site(config)
    with AppThread(lambda: create_router(router), lambda: router.servers.close(), files.loaded) as thread:

        async def join(cacert: str | None) -> str:
            host = Registration(thread.url, "k", "http://127.0.0.1:1", "serve", cacert)
            try:
                return await host.say(leaves=False)
            finally:
                host.close()

        assert "certificate is not trusted" in asyncio.run(join(None))
        assert "certificate" not in asyncio.run(join(str(files.cert)))
        assert "127.0.0.1:1" in router.servers.by_name


@needs_openssl
def test_urls_of_a_server_with_a_certificate_are_https_and_name_what_it_is_for(files: Files) -> None:
    place = ServerConfig(host="localhost", ssl_certfile=str(files.cert), ssl_keyfile=str(files.key))
    with listen(place.host, 0) as listener:
        port = listener.getsockname()[1]
        assert url_of(listener, place) == f"https://127.0.0.1:{port}"
        assert url_for("https://127.0.0.1:1", listener, place) == f"https://localhost:{port}"
        assert url_for("http://127.0.0.1:1", listener, ServerConfig(host="localhost")) == f"http://127.0.0.1:{port}"


# -- a Unix socket ---------------------------------------------------------------------------------------------


def test_a_unix_socket_is_served_and_gone_afterwards(tmp_path: Path) -> None:
    place = ServerConfig(uds=str(tmp_path / "q.sock"))
    mask = os.umask(0o117)
    try:
        with listening(place) as listener:
            status = (tmp_path / "q.sock").stat()
            assert stat.S_ISSOCK(status.st_mode) and status.st_mode & 0o777 == 0o660
            assert is_loopback(listener)
            assert url_of(listener, place) == f"unix:{place.uds}"
            with AppThread(lambda: create_app(app_context()), listener=listener):
                talker = RemoteTalker(f"unix:{place.uds}")
                assert talker.model == "demo"
                talker.close()
                transport = httpx2.HTTPTransport(uds=place.uds)
                with httpx2.Client(transport=transport, base_url="http://localhost") as http:
                    assert http.get("/health").status_code == 200
                    foreign = http.get("/v1/models", headers={"host": "evil.example"})
                    assert foreign.json()["error"]["code"] == "unknown_host"
    finally:
        os.umask(mask)
    assert not (tmp_path / "q.sock").exists()


def test_what_a_killed_server_left_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "q.sock"
    place = ServerConfig(uds=str(path))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with listening(place):
        with pytest.raises(ServerError, match="another program listens there; stop it"), listening(place):
            pass
        assert path.exists()
        path.unlink()  # somebody else takes the place
        path.write_text("mine")
    assert path.read_text() == "mine"
    with pytest.raises(ServerError, match="a file of that name exists"), listening(place):
        pass
    with pytest.raises(ServerError, match="No such file"), listening(ServerConfig(uds=str(tmp_path / "no" / "q"))):
        pass


def test_a_unix_socket_is_the_only_place(tmp_path: Path) -> None:
    path = str(tmp_path / "q.sock")
    with pytest.raises(ConfigError, match="uds and port cannot be combined"):
        ServerConfig.from_options({"uds": path, "port": 8000})
    with pytest.raises(ConfigError, match="uds and host and port cannot be combined"):
        RouterConfig.from_options({"server": ["http://127.0.0.1:1"], "uds": path, "port": 8080, "host": "127.0.0.1"})
    with pytest.raises(ConfigError, match="join needs a port"):
        ServerConfig(uds=path, join="http://127.0.0.1:1", api_key=("k",))
    with pytest.raises(ConfigError, match="cannot be combined"):
        ServerConfig(uds=path, ssl_certfile="cert.pem")
    with pytest.raises(ConfigError, match="has 120 bytes; paths of Unix sockets may have 1 to 107"):
        ServerConfig(uds="/" + 119 * "x")
    with pytest.raises(RemoteError, match="no server answers at unix:"):
        RemoteTalker(f"unix:{path}")


def test_a_router_has_servers_at_unix_sockets(loop: Loop, tmp_path: Path) -> None:
    server = FakeServer(loop, uds=str(tmp_path / "q.sock"))
    with RouterThread([server], admin=True, api_key=["k"]) as router:
        assert router.states == {f"unix:{server.uds}": "up"}
        assert text_of(router.stream()) == answer_text(server.requests[-1])
        assert router.http.post(f"/admin/drain/{server.address}").json()["draining"] is True
        assert router.complete().status_code == 503
        router.http.post(f"/admin/undrain/{server.address}")
        assert router.complete().status_code == 200
        server.stop()
        assert wait_until(lambda: router.states == {server.address: "down"}), router.states


def test_sockets_that_are_no_servers_are_refused_by_name() -> None:
    for url, told in (
        ("unix:", "is no Unix socket of a server"),
        ("dns+unix:/run/q.sock", "use dns\\+http://NAME:PORT"),
    ):
        with pytest.raises(ConfigError, match=told):
            RouterConfig.from_options({"server": [url]})
    with RouterThread(api_key=["k"]) as router:  # one that joins could name what is none of its business
        answer = router.http.post("/admin/join", json={"url": "unix:/run/docker.sock"})
        assert answer.status_code == 400 and "is a Unix socket, and servers join from a port" in answer.text
        assert router.states == {}


# -- health checks ---------------------------------------------------------------------------------------------


def health(*arguments: str) -> int:
    return main(["health", *arguments])


@needs_openssl
def test_one_health_check_asks_over_http_https_and_unix_sockets(
    site: AppThread, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    over_tls = ["--host", "0.0.0.0", "--port", str(site.port), "--ssl-certfile", str(files.cert)]
    assert health(*over_tls) == health(*over_tls, "--live") == 0
    assert health("--port", str(site.port)) == 1  # it speaks https
    place = ServerConfig(uds=str(tmp_path / "q.sock"))
    with listening(place) as listener, AppThread(lambda: create_app(app_context(root_path="/llm")), listener=listener):
        monkeypatch.setenv("QUIRE_UDS", str(place.uds))
        assert health() == 0
        monkeypatch.delenv("QUIRE_UDS")
        file = tmp_path / "quire.yaml"
        file.write_text(f"model: demo\nuds: {place.uds}\npolicy: cost\n")  # a server's options, or a router's
        assert health("--config", str(file)) == health("--url", f"unix:{place.uds}") == 0
        assert (
            capsys.readouterr().out.splitlines()
            == [f"https://127.0.0.1:{site.port}: ok"] * 2 + [f"unix:{place.uds}: ok"] * 3
        )
    assert health("--uds", str(place.uds)) == 1
    assert "q.sock does not answer: no connection: No such file or directory" in capsys.readouterr().err


def test_a_server_that_loads_is_alive_and_not_well_until_it_is(
    loop: Loop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = app_context()
    engine = cast(Any, context.client)
    engine.state = "restarting"
    with AppThread(lambda: create_app(context)) as site:
        monkeypatch.setenv("QUIRE_PORT", str(site.port))
        assert health() == 1
        assert f"{site.url}/health answers 503: restarting" in capsys.readouterr().err
        assert health("--live") == health("--live", "--url", f"{site.url}/v1") == 0
        assert health("--live", "--url", f"{site.url}/nowhere") == 1
        assert health("--url", site.url, "--port", "1") == health("--url", "localhost") == 2
        threading.Timer(0.2, setattr, (engine, "state", "ready")).start()
        assert health("--wait", "60") == 0
    assert health("--wait", "0.1") == 1


def test_what_is_no_server_is_not_well(capsys: pytest.CaptureFixture[str]) -> None:
    for answer in (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok", b"SSH-2.0-OpenSSH\r\n", b""):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = str(other.getsockname()[1])

            def serve_once(other: socket.socket = other, answer: bytes = answer) -> None:
                with other.accept()[0] as connection:
                    connection.recv(1 << 16)
                    connection.sendall(answer)

            thread = threading.Thread(target=serve_once)
            thread.start()
            assert health("--port", port) == 1
            thread.join()
    told = capsys.readouterr().err
    assert "answers 200: is it another program?" in told and told.count("does not answer: ") == 2
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert health("--port", str(silent.getsockname()[1]), "--timeout", "0.1") == 1
    assert "does not answer: no answer within 0.1 s" in capsys.readouterr().err
    for wrong in (["--port", "0"], ["--timeout", "0"], ["--timeout", "inf"], ["--wait", "nan"], ["--uds", "x" * 200]):
        assert health(*wrong) == 2


# -- a path before all routes ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def below() -> Iterator[httpx2.Client]:
    """A server that a proxy offers under /a/llm."""
    with (
        AppThread(lambda: create_app(app_context(root_path="/a/llm"))) as site,
        httpx2.Client(base_url=site.url, timeout=60) as http,
    ):
        yield http


@pytest.mark.parametrize("prefix", ["/a/llm", ""])  # as the proxy passes it on, or without it
def test_routes_answer_with_the_prefix_and_without(below: httpx2.Client, prefix: str) -> None:
    assert below.get(f"{prefix}/health").status_code == 200
    assert below.get(f"{prefix}/v1/models").json()["data"][0]["id"] == "demo"
    assert below.get(f"{prefix}/models/demo").json()["id"] == "demo"  # without /v1
    assert below.get(f"{prefix}/").text.startswith("<!doctype html>")
    assert below.get(f"{prefix}/static/js/main.js").status_code == 200
    assert below.get(f"{prefix}/nothing").status_code == 404
    assert below.get(f"{prefix}/openapi.json").json()["servers"] == [{"url": "/a/llm"}]


def test_only_the_whole_prefix_is_taken_off(below: httpx2.Client) -> None:
    for path in ("/a/v1/models", "/a/llmv1/models", "/a/llm/a/llm/v1/models"):
        assert below.get(path).status_code == 404
    answer = below.get("/a/llm")
    assert (answer.status_code, answer.headers["location"]) == (308, "/a/llm/")
    assert "servers" not in create_app(app_context()).openapi()


def test_the_pages_load_everything_from_below_the_prefix(below: httpx2.Client) -> None:
    for start in ("/a/llm/", "/a/llm/docs"):
        page = below.get(start, follow_redirects=True)
        assert page.status_code == 200
        loaded = [url for url in re.findall(r'(?:src|href)="([^"#]+)"', page.text) if not url.startswith("data:")]
        assert len(loaded) > 2
        for url in loaded:
            found = page.url.join(url)
            assert found.path.startswith("/a/llm/")
            assert below.get(found, follow_redirects=True).status_code == 200


@pytest.mark.parametrize("root_path", ["llm", "/llm/", "/", "", "/a//b", "/a/../b", "/a b", "https://x/llm"])
def test_what_is_no_prefix_is_refused(root_path: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"root_path={root_path!r} is not a valid path")):
        ServerConfig(root_path=root_path)


def test_a_router_has_a_prefix_too_and_paths_without_v1(loop: Loop) -> None:
    server = FakeServer(loop)
    try:
        with RouterThread([server], root_path="/llm") as router:
            for path in ("/llm/v1/completions", "/llm/completions", "/completions", "/v1/completions"):
                answer = router.http.post(path, json={"prompt": "p"})
                assert answer.status_code == 200
            for path in ("/models/m", "/llm/v1/models/m"):
                assert router.http.get(path).json()["id"] == "m"
            assert router.http.get("/models").json() == router.http.get("/v1/models").json()
            missing = router.http.get("/v1/models/other")
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
            page = router.http.get("/llm/")
            assert 'src="static/router.js"' in page.text
            assert router.http.get("/llm/static/router.js").status_code == 200
            told = json.loads(router.http.post("/llm/tokenize", json={"prompt": "x"}).text)
            assert told["path"] == "/tokenize"  # which the server is asked
    finally:
        server.stop()
