"""What `mkdocs.yml` needs beside mkdocs: pages that lie elsewhere in the repository, and links out of docs/.

A link to a file of the repository that is no page is checked and shown as the file's name: the site has no copy of the
sources. Links to files that are not there are warnings, with which the build fails.
"""

from __future__ import annotations

import logging
import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parent.parent
PAGES = {
    "README.md": "index.md",
    "examples/README.md": "examples.md",
    "benchmarks/README.md": "benchmarks.md",
    "CHANGELOG.md": "changelog.md",
    "build/docs/options.md": "options.md",
}
"""Pages that lie elsewhere, by their path from the root."""

logger = logging.getLogger("mkdocs.hooks.repository")
_CODE = re.compile(r"^(```|~~~).*?^\1|`[^`\n]+`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that lie elsewhere."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Point links at pages, wherever their files lie."""
    sources = {name: source for source, name in PAGES.items()}
    source = sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    known = {file.src_uri for file in files}

    def link(match: re.Match[str]) -> str:
        mark, text, target = match.groups()
        if re.match(r"[a-z]+:|#", target):
            return match[0]
        path, _, anchor = target.partition("#")
        found = os.path.normpath(os.path.join(os.path.dirname(source), path))
        name = PAGES.get(found, found.removeprefix("docs/"))
        if name in known and (found in PAGES or found.startswith("docs/")):
            return f"{mark}[{text}]({name}{'#' + anchor if anchor else ''})"
        if not (ROOT / found).exists():
            logger.warning("%s links to %s, which is not there", source, target)
        return text if "`" in text or found.endswith(text) else f"{text} (`{found}`)"

    return _outside_code(markdown, lambda part: _LINK.sub(link, part))


def _outside_code(text: str, change: Any) -> str:
    parts, end = [], 0
    for match in _CODE.finditer(text):
        inside_link = "](" in text[match.end() : match.end() + 2]  # [`name`](target): the link is wanted
        if inside_link:
            continue
        parts += [change(text[end : match.start()]), match[0]]
        end = match.end()
    return "".join([*parts, change(text[end:])])
