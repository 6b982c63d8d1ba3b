"""The documentation: every link leads somewhere, the site has every page, the options' reference every option."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import re
import runpy
from pathlib import Path

import pytest
import yaml

from quire.cli.main import COMMANDS, SUBCOMMANDS
from quire.cli.options import CommandParser
from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.router.config import RouterConfig
from quire.server.config import ServerConfig

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "quire"
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


# -- what pages name is there ----------------------------------------------------------------------------------


def code(page: Path) -> list[str]:
    """What a page shows as code: its blocks, with lines that end in a backslash joined, and what is in backticks."""
    text = page.read_text()
    fenced = re.findall(r"^(?:```|~~~)\w*\n(.*?)^(?:```|~~~)", text, flags=re.MULTILINE | re.DOTALL)
    rest = prose(page)
    indented = re.findall(r"(?:^ {4,}.*\n)+", rest, flags=re.MULTILINE)
    blocks = "\n".join([*fenced, *indented]).replace("\\\n", " ")
    return [line.strip() for line in blocks.splitlines()] + [
        " ".join(found.split()) for found in re.findall(r"`([^`]+)`", rest)
    ]


@functools.cache
def flags_of(*words: str) -> frozenset[str]:
    """The flags of a command of one or two words; none: there is no such command."""
    name = "chat" if words[0] == "run" else words[0]
    module = SUBCOMMANDS.get((name, words[1] if len(words) > 1 else ""), name if name in COMMANDS else "")
    if not module:
        return frozenset()
    parser = CommandParser(prog="quire", description="")
    importlib.import_module(f"quire.cli.{module}").add_arguments(parser)
    return frozenset(flag for action in parser._actions for flag in action.option_strings)


def what_is_wrong(line: str) -> list[str]:
    """What a line of code names that is not there."""
    wrong = []
    if match := re.match(r"(?:\S+=\S+ +)*(?:\$ |\.venv/bin/)?quire +([a-z]+)(?: +([a-z]+))?", line):
        known = flags_of(*filter(None, match.groups()))
        given = re.findall(r"(?<![\w-])--[a-z][a-z0-9_-]*", re.split(r" -- |  +#", line)[0])
        wrong += [flag for flag in given if flag.replace("_", "-") not in known] if known else [match[1]]
    if (match := re.match(r"make +([a-z-]+)", line)) and f"\n{match[1]}:" not in (ROOT / "Makefile").read_text():
        wrong.append(match[0])
    if match := re.match(r"python -m ((?:benchmarks|quire)[\w.]*)", line):
        path = ROOT / ("src" if match[1].startswith("quire") else "") / match[1].replace(".", "/")
        wrong += [] if path.with_suffix(".py").exists() or (path / "__main__.py").exists() else [match[1]]
    if re.fullmatch(
        r"(?:src|tests|scripts|examples|benchmarks|deploy|requirements)/[a-z0-9_/.-]+\.(?!key)[a-z]+", line
    ):
        wrong += [] if (ROOT / line).exists() else [line]
    return wrong


@pytest.mark.parametrize(
    "page",
    [*PAGES, *map(ROOT.joinpath, ("CONTRIBUTING.md", "SECURITY.md", "dashboards/README.md"))],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_commands_options_and_files_that_a_page_names_are_there(page: Path) -> None:
    assert [f"{wrong} in: {line}" for line in code(page) for wrong in what_is_wrong(line)] == []


def test_what_is_not_there_is_noticed() -> None:
    for line, wrong in (
        ("quire sevre demo", "sevre"),
        ("quire serve demo --max-sequences 4  # --none", "--max-sequences"),
        ("QUIRE_PORT=1 .venv/bin/quire bench kv demo --rate 4", "--rate"),
        ("make tests", "make tests"),
        ("python -m benchmarks.nothing", "benchmarks.nothing"),
        ("tests/test_nothing.py", "tests/test_nothing.py"),
    ):
        assert what_is_wrong(line) == [wrong]
    assert what_is_wrong("quire serve demo --max-num-seqs 4 -- --none") == []
