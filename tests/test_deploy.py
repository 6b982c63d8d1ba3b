"""What lies in deploy/ says what the commands take and the servers tell."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.cli.options import CommandParser
from quire.router.config import RouterConfig
from quire.server.config import ServerConfig

DEPLOY = Path(__file__).parent.parent / "deploy"


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every command line of Quire's in the folder."""
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        if service["image"].startswith("quire"):
            yield f"compose {name}", service["command"]
    for file in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for resource in yaml.safe_load_all(file.read_text()):
            for container in containers(resource):
                if container["image"] == "quire":
                    yield f"kubernetes {resource['metadata']['name']}", container["args"]


def containers(resource: dict[str, Any]) -> list[dict[str, Any]]:
    template = resource.get("spec", {}).get("template", {})
    return list(template.get("spec", {}).get("containers", []))


@pytest.mark.parametrize(("name", "command"), [pytest.param(*one, id=one[0]) for one in commands()])
def test_every_command_line_has_flags_that_there_are(name: str, command: list[str]) -> None:
    module = importlib.import_module(f"quire.cli.{command[0]}")
    parser = CommandParser(prog=f"quire {command[0]}", description="")
    module.add_arguments(parser)
    given = vars(parser.parse([argument.replace("${MODEL:-demo}", "demo") for argument in command[1:]]))
    assert given["api_key"]
    config = RouterConfig if command[0] == "route" else ServerConfig
    assert given.get("port", config.__dataclass_fields__["port"].default) == 8000  # what is published, and asked


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl here")
def test_kustomize_renders_everything_once_the_keys_are_there(tmp_path: Path) -> None:
    folder = tmp_path / "kubernetes"
    shutil.copytree(DEPLOY / "kubernetes", folder, ignore=shutil.ignore_patterns("*.key"))

    def render() -> subprocess.CompletedProcess[str]:
        return subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True)

    missing = render()
    assert missing.returncode != 0 and "cluster.key" in missing.stderr
    for name in ("cluster.key", "api.key"):
        (folder / name).write_text("made up\n")
    rendered = render()
    assert rendered.returncode == 0, rendered.stderr
    resources = list(yaml.safe_load_all(rendered.stdout))
    [secret] = [one for one in resources if one["kind"] == "Secret"]
    assert set(secret["data"]) == {"cluster.key", "api.key"}
    volumes = [
        volume["secret"]["secretName"]
        for one in resources
        for volume in one.get("spec", {}).get("template", {}).get("spec", {}).get("volumes", [])
        if "secret" in volume
    ]
    assert volumes and set(volumes) == {secret["metadata"]["name"]}  # with the hash that kustomize adds
    images = {container["image"] for one in resources for container in containers(one)}
    assert "quire:cpu" in images and "quire" not in images


def test_containers_run_without_root_and_with_probes() -> None:
    for file in (DEPLOY / "kubernetes").glob("*.yaml"):
        for resource in yaml.safe_load_all(file.read_text()):
            for container in containers(resource):
                assert resource["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]
                assert "readinessProbe" in container and container["securityContext"]["capabilities"] == {
                    "drop": ["ALL"]
                }
