"""What the page uses of others is what its authors published, listed with licence and hash."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
VENDORED = runpy.run_path(str(ROOT / "scripts" / "vendored.py"), run_name="vendored")
PACKAGES = VENDORED["read_list"]()
WRITTEN_HERE = {"LICENSE.dependencies", "README.md"}
LICENCES = {
    "MIT": "Permission is hereby granted",
    "BSD-3-Clause": "Redistribution and use",
    "Apache-2.0": "Apache License",
    "MPL-2.0": "Mozilla Public License",
}


def test_stored_files_are_those_of_the_list() -> None:
    assert VENDORED["offline_problems"](PACKAGES) == []


def test_a_changed_and_a_missing_file_are_named(tmp_path: Path) -> None:
    one = PACKAGES[0]
    for name in list(one.files)[1:]:
        path = tmp_path / one.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((ROOT / one.folder / name).read_bytes() + b" ")
    found = VENDORED["offline_problems"]([one], tmp_path)
    assert len(found) == len(one.files)
    assert "is missing" in found[0] and "is not what" in found[1]


@pytest.mark.parametrize("folder", ["src/quire/server/static/vendor", "tests/vendor"])
def test_every_file_of_others_is_in_the_list(folder: str) -> None:
    listed = {f"{one.folder}/{name}" for one in PACKAGES for name in one.files}
    there = {str(path.relative_to(ROOT)) for path in (ROOT / folder).rglob("*") if path.is_file()}
    assert {path for path in there - listed if Path(path).name not in WRITTEN_HERE} == set()


@pytest.mark.parametrize("package", PACKAGES, ids=lambda one: one.name)
def test_every_package_carries_its_licence(package: object) -> None:
    text = (ROOT / package.folder / "LICENSE").read_text()  # type: ignore[attr-defined]
    assert LICENCES[package.licence] in text  # type: ignore[attr-defined]


def test_the_list_is_written_as_it_is_read(tmp_path: Path) -> None:
    VENDORED["write_list"](PACKAGES, tmp_path / "list.toml")
    assert (tmp_path / "list.toml").read_bytes() == VENDORED["LIST"].read_bytes()


def test_comments_that_name_a_source_map_are_left_out() -> None:
    cut = VENDORED["fetch"].__globals__["_SOURCE_MAP"]
    assert cut.sub(b"\n", b"code\n//# sourceMappingURL=a.map") == b"code\n"
    assert cut.sub(b"\n", b"a{}\n/*# sourceMappingURL=a.map*/") == b"a{}\n"
    assert cut.sub(b"\n", b"a{}\n/*# sourceMappingURL=a.map */\n") == b"a{}\n"
