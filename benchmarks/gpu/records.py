"""The file of results: a line of JSON each, to which several processes append as results come."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

NAME = "records.jsonl"

ENDED = ("done", "failed")
"""How a section ends that is not run again; others were cut off."""

Record = dict[str, Any]


def append(file: Path, record: Record) -> None:
    """Add one; it is the system's when this returns, whatever becomes of the process.

    Written at once, so that what others add meanwhile stands before it or after it.
    """
    with file.open("ab", buffering=0) as lines:
        lines.write(json.dumps(record).encode() + b"\n")


def read(file: Path) -> list[Record]:
    """All so far. A line that a process could not finish before it was ended is left out."""
    found = []
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def whole(records: Iterable[Record], key: str) -> list[Record]:
    """What an earlier run of the same sources on a device of the same kind has done: all of its sections that ended.

    Of a section that was cut off nothing is kept, since it runs again.
    """
    found = list(records)
    begins = [index for index, record in enumerate(found) if record["kind"] == "run"]
    if not begins or found[begins[-1]]["key"] != key:
        return []
    ended = {one["section"] for one in found if one["kind"] == "section" and one["status"] in ENDED}
    return [one for one in found if one.get("section") in ended and one["kind"] != "run"]
