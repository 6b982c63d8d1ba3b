"""What lies in deploy/ is taken by the commands and by the tools that it is for, and the proxies of docs/deploy.md pass
everything on. A tool that is not there skips its test."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import httpx2
import pytest
import yaml

from quire.cli.options import CommandParser
from quire.router.config import RouterConfig
from quire.router.metrics import RouterMetrics
from quire.server.app import create_app
from quire.server.config import ServerConfig
from quire.server.processes import listening
from quire.tls import client_context
from tests.certificates import Files, make_certificate, needs_openssl
from tests.http_tools import free_port
from tests.server_fakes import AppThread, FakeEngineClient, Script, app_context, wait_until

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"


def needs(tool: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(tool) is None, reason=f"there is no {tool} here")


def checked(*command: str | Path) -> str:
    """What a tool prints, which has to be content."""
    done = subprocess.run([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


# -- command lines ---------------------------------------------------------------------------------------------


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of Quire's in the folder."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        if service["image"].startswith("quire"):
            yield f"compose {name}", service["command"]
    for resource in resources():
        for container in containers(resource):
            if container["image"] == "quire":
                yield f"kubernetes {resource['metadata']['name']} {container['args'][0]}", container["args"]


def resources(kind: str = "") -> list[dict[str, Any]]:
    """Those of the folder for Kubernetes, also those that need more than every cluster has."""
    files = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    found = [one for file in files for one in yaml.safe_load_all(file.read_text())]
    return [one for one in found if one.get("kind", "") == kind or not kind]


def pods(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of its pods."""
    spec = resource.get("spec", {})
    groups = spec.get("leaderWorkerTemplate", {})
    found = [spec.get("template"), groups.get("leaderTemplate"), groups.get("workerTemplate")]
    return [one for one in found if one]


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    return [container for pod in pods(resource) for container in pod["spec"]["containers"]]


@pytest.mark.parametrize(("name", "command"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_every_command_line_has_flags_that_there_are(name: str, command: list[str]) -> None:
    module = importlib.import_module(f"quire.cli.{command[0]}")
    parser = CommandParser(prog=f"quire {command[0]}", description="")
    module.add_arguments(parser)
    given = vars(parser.parse([argument.replace("${MODEL:-demo}", "demo") for argument in command[1:]]))
    if command[0] == "rank":
        return
    assert given["api_key"]
    config = RouterConfig if command[0] == "route" else ServerConfig
    assert given.get("port", config.__dataclass_fields__["port"].default) == 8000  # what is published, and asked


def test_containers_run_without_root_and_with_probes() -> None:
    for resource in resources():
        assert all(pod["spec"]["securityContext"]["runAsNonRoot"] for pod in pods(resource))
        for container in containers(resource):
            assert "readinessProbe" in container or container["args"][0] == "rank"  # which nobody asks anything
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_prometheus_is_let_in_with_a_key_that_opens_nothing_else() -> None:
    [monitor] = resources("PodMonitor")
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    file = endpoint["authorization"]["credentials"]["key"]
    asked = [each for one in resources() for each in containers(one) if each["args"][0] in ("serve", "route")]
    assert len(asked) == 4
    for container in asked:
        assert f"--metrics-key=@/keys/{file}" in container["args"]
        assert {"name": endpoint["port"], "containerPort": 8000} in container["ports"]
    [kustomization] = resources("Kustomization")
    assert file in kustomization["secretGenerator"][0]["files"]
    annotated = [pod for one in resources() for pod in pods(one) if "annotations" in pod["metadata"]]
    assert not annotated  # what looks for annotations sends no key
    [policy] = [one for one in resources("NetworkPolicy") if one["metadata"]["name"] == "metrics"]
    assert policy["spec"]["podSelector"] == {"matchLabels": {"app": "quire"}}
    [rule] = policy["spec"]["ingress"]
    assert "namespaceSelector" in rule["from"][0] and rule["ports"] == [{"port": endpoint["port"]}]


def test_what_chooses_pods_chooses_some() -> None:
    labels = [pod["metadata"]["labels"] for one in resources() for pod in pods(one)]
    budgets, [pool] = resources("PodDisruptionBudget"), resources("InferencePool")
    for one in (*budgets, pool):
        chosen = one["spec"]["selector"]["matchLabels"]
        assert any(chosen.items() <= each.items() for each in labels), one["metadata"]["name"]
    assert len(budgets) == 2 and pool["spec"]["targetPorts"] == [{"number": 8000}]


def test_servers_are_added_by_metrics_that_there_are() -> None:
    [scaled] = resources("ScaledObject")
    target, [trigger] = scaled["spec"]["scaleTargetRef"], scaled["spec"]["triggers"]
    assert target["name"] in [one["metadata"]["name"] for one in resources(target["kind"])]
    exported, _ = RouterMetrics().render([])
    asked = re.findall(r"quire:\w+", trigger["metadata"]["query"])
    assert len(asked) == 2 and all(f"# HELP {name} ".encode() in exported for name in asked)


def test_the_image_has_the_torch_that_is_tested() -> None:
    [tested] = re.findall(r"^torch==(\S+)$", (ROOT / "requirements" / "torch.txt").read_text(), flags=re.MULTILINE)
    assert re.findall(r"torch==(\S+)", (DEPLOY / "Dockerfile").read_text()) == [tested, tested]


# -- the tools that these files are for ------------------------------------------------------------------------


@needs("kubectl")
def test_kustomize_renders_everything_once_the_keys_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder, ignore=shutil.ignore_patterns("*.key"))
    missing = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)
    assert missing.returncode != 0 and "cluster.key" in missing.stderr
    for name in ("cluster.key", "api.key", "metrics.key"):
        (folder / name).write_text("made up\n")
    rendered = checked("kubectl", "kustomize", folder)
    kustomization = folder / "kustomization.yaml"
    kustomization.write_text(re.sub(r"^#(  - \w+\.yaml)", r"\1", kustomization.read_text(), flags=re.MULTILINE))
    plain, more = (list(yaml.safe_load_all(text)) for text in (rendered, checked("kubectl", "kustomize", folder)))
    assert {one["kind"] for one in more} - {one["kind"] for one in plain} == {
        "PodMonitor",
        "ScaledObject",
        "InferencePool",
        "LeaderWorkerSet",
    }
    [secret] = [one for one in more if one["kind"] == "Secret"]
    assert set(secret["data"]) == {"cluster.key", "api.key", "metrics.key"}
    used = [
        volume["secret"]["secretName"]
        for one in more
        for pod in pods(one)
        for volume in pod["spec"].get("volumes", [])
        if "secret" in volume
    ]
    [monitor] = [one for one in more if one["kind"] == "PodMonitor"]
    used.append(monitor["spec"]["podMetricsEndpoints"][0]["authorization"]["credentials"]["name"])
    assert len(used) == 6 and set(used) == {secret["metadata"]["name"]}  # with the hash that kustomize adds
    images = {container["image"] for one in more for container in containers(one)}
    assert "quire:cpu" in images and "quire" not in images
    if shutil.which("kubernetes-validate"):
        (tmp_path / "all.yaml").write_text(rendered)
        checked("kubernetes-validate", "--strict", tmp_path / "all.yaml")


@needs("docker-compose")
def test_compose_takes_its_file(tmp_path: Path) -> None:
    shutil.copy(DEPLOY / "compose.yaml", tmp_path)
    read = yaml.safe_load(checked("docker-compose", "--file", tmp_path / "compose.yaml", "config"))
    assert read["services"]["decode"]["build"]["target"] == "cpu"  # what services share has been merged
    assert {name for name, one in read["services"].items() if "ports" in one} == {"router", "grafana"}


@needs("promtool")
def test_prometheus_takes_its_file_and_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    checked("promtool", "check", "config", "--syntax-only", DEPLOY / "prometheus.yaml")
    dashboard = (ROOT / "dashboards" / "grafana.json").read_text()
    expressions = [json.loads(found) for found in re.findall(r'"expr": ("(?:[^"\\]|\\.)*")', dashboard)]
    given = [re.sub(r"\$__\w*interval", "5m", one) for one in expressions]  # which Grafana does
    rules = [{"record": f"panel:{index}", "expr": one} for index, one in enumerate(given)]
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    assert f"SUCCESS: {len(rules)} rules found" in checked("promtool", "check", "rules", tmp_path / "rules.yaml")
    assert len(rules) > 40


@needs("systemd-analyze")
def test_systemd_finds_nothing_in_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "quire.service").read_text()
    quire = tmp_path / "bin" / "quire"
    quire.parent.mkdir()
    quire.symlink_to(sys.executable)
    (tmp_path / "quire.service").write_text(unit.replace("/opt/quire/bin/quire", str(quire)))
    assert checked("systemd-analyze", "verify", tmp_path / "quire.service") == ""


@needs("hadolint")
def test_the_dockerfile_has_but_the_warning_that_is_meant() -> None:
    checked("hadolint", "--ignore", "DL3008", DEPLOY / "Dockerfile")  # Debian's packages are not pinned


# -- behind a proxy, as docs/deploy.md has it ------------------------------------------------------------------


def example(start: str) -> str:
    """The block of the page that begins so."""
    blocks = re.findall(r"(?:^ {4}.*\n|^\n)+", (ROOT / "docs" / "deploy.md").read_text(), flags=re.MULTILINE)
    [found] = [block for block in blocks if block.strip().startswith(start)]
    return found


@contextlib.contextmanager
def running(*command: str | Path, port: int, log: Path) -> Iterator[None]:
    """A proxy that listens there; what it says goes to `log`."""

    def is_up() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    kept = {name: str(log.parent) for name in ("XDG_CONFIG_HOME", "XDG_DATA_HOME")}  # what Caddy keeps
    with (
        log.open("w") as out,
        subprocess.Popen([*map(str, command)], stdout=out, stderr=out, env=os.environ | kept) as process,
    ):
        try:
            assert wait_until(lambda: is_up() or process.poll() is not None), log.read_text()
            assert process.poll() is None, log.read_text()
            yield
        finally:
            process.terminate()


def check_proxied(http: httpx2.Client, engine: FakeEngineClient) -> None:
    """The page and what it loads, the reference, and a stream whose first token comes before the second is made."""
    page = http.get("")
    assert page.status_code == 200
    for path in re.findall(r'(?:src|href)="((?!data:)[^"#]+)"', page.text):
        assert http.get(path).status_code == 200, path
    assert http.get("docs").status_code == 200
    gate = threading.Event()
    engine.script = Script(gate=cast(Any, gate), gate_at=1)
    body = {"model": "demo", "prompt": "p", "max_tokens": 3, "stream": True}
    headers = {"origin": str(http.base_url).removesuffix("/llm/").removesuffix("/")}  # as the page's own requests have
    with http.stream("POST", "v1/completions", json=body, headers=headers) as answer:
        lines = answer.iter_lines()
        assert answer.status_code == 200 and '"text"' in next(lines)
        gate.set()
        assert "data: [DONE]" in list(lines)


@needs("nginx")
@needs_openssl
@pytest.mark.parametrize("taken_off", [True, False])
def test_nginx_as_documented_passes_everything_on(tmp_path: Path, taken_off: bool) -> None:
    files: Files = make_certificate(tmp_path)
    place = ServerConfig(uds=str(tmp_path / "quire.sock"))
    port, server = free_port(), example("server {")
    for text, other in (
        ("listen 443 ssl", f"listen 127.0.0.1:{port} ssl"),
        ("server_name quire.example.org", "server_name localhost"),
        ("fullchain.pem", str(files.cert)),
        ("privkey.pem", str(files.key)),
        ("unix:/run/quire/quire.sock:/;", f"unix:{place.uds}:/;" if taken_off else f"unix:{place.uds};"),
    ):
        assert text in server
        server = server.replace(text, other)
    paths = "".join(
        f"{name}_temp_path {tmp_path}/{name};\n" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"daemon off; master_process off; pid {tmp_path}/pid; error_log stderr;\nevents {{}}\n"
        f"http {{ access_log off;\n{paths}{server}}}\n"
    )
    engine = FakeEngineClient()
    app = app_context(engine, root_path="/llm", allowed_host=("localhost",))
    with (
        listening(place) as listener,
        AppThread(lambda: create_app(app), listener=listener),
        running("nginx", "-p", tmp_path, "-e", "stderr", "-c", config, port=port, log=tmp_path / "log"),
        httpx2.Client(
            base_url=f"https://localhost:{port}/llm/",
            verify=client_context(str(files.cert)),
            timeout=60,
            follow_redirects=True,
        ) as http,
    ):
        check_proxied(http, engine)


@needs("caddy")
def test_caddy_as_documented_passes_everything_on(tmp_path: Path) -> None:
    engine, port = FakeEngineClient(), free_port()
    config = tmp_path / "Caddyfile"
    with AppThread(lambda: create_app(app_context(engine, allowed_host=("localhost",)))) as site:
        own = example("quire.example.org {")  # https needs a name that is known in DNS
        own = own.replace("quire.example.org", f"http://localhost:{port}").replace(
            "127.0.0.1:8000", f"127.0.0.1:{site.port}"
        )
        config.write_text(f"{{\n    admin off\n}}\n{own}")
        with (
            running("caddy", "run", "--config", config, "--adapter", "caddyfile", port=port, log=tmp_path / "log"),
            httpx2.Client(base_url=f"http://localhost:{port}/", timeout=60, follow_redirects=True) as http,
        ):
            check_proxied(http, engine)
