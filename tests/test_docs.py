"""The documentation: every link leads somewhere, the site has every page, the options' reference every option."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path

import pytest
import yaml

from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.router.config import RouterConfig
from quire.server.config import ServerConfig

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    ROOT / "README.md",
    *(ROOT / f / "README.md" for f in ("examples", "benchmarks")),
]


def prose(path: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^(```|~~~).*?^\1", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Names of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ +(.*)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page: Path) -> None:
    wrong = []
    for target in re.findall(r"\]\(([^()\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        found = page.parent / name if name else page
        if not found.exists() or (anchor and found.suffix == ".md" and anchor not in anchors(found)):
            wrong.append(target)
    assert wrong == []


def test_the_site_has_every_page() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w-]+\.md", str(config["nav"])))
    elsewhere = set(runpy_pages().values())
    assert listed == {path.name for path in (ROOT / "docs").glob("*.md")} | elsewhere


def runpy_pages() -> dict[str, str]:
    text = (ROOT / "scripts" / "docs_hooks.py").read_text()
    return dict(re.findall(r'^    "([\w/.]+\.md)": "([\w/.-]+\.md)"', text, flags=re.MULTILINE))


def test_the_reference_has_every_option() -> None:
    text = runpy.run_path(str(ROOT / "scripts" / "options_reference.py"), run_name="reference")["reference"]()
    fields = [
        field.name for config in (EngineConfig, ServerConfig, RouterConfig) for field in dataclasses.fields(config)
    ]
    missing = {name for name in (*fields, *SamplingParams.__struct_fields__) if f"| `{name}` |" not in text}
    assert missing == set()
    assert "| `block_size` | `16`, `32`, `64`, `128`, `256` | `16` | tokens per KV block |" in text
