"""The file of results: a line of JSON each, to which several processes append."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def append(file: Path, record: dict[str, Any]) -> None:
    """Add one; it is on the disk when this returns, whatever becomes of the process."""
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(record) + "\n")


def read(file: Path) -> list[dict[str, Any]]:
    """All so far. A line that a process could not finish before it was ended is left out."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found
