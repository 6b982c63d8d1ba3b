"""What is packed: wheels that any Linux of their kind can install, and what libraries may need of it."""

from __future__ import annotations

import importlib.util
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
make_wheel = importlib.import_module("make_wheel")


def library(folder: Path, source: str, *options: str) -> Path:
    (folder / "lib.cpp").write_text(source)
    command = ["g++", "-shared", "-fPIC", str(folder / "lib.cpp"), "-o", str(folder / "lib_x.so"), *options]
    subprocess.run(command, check=True)
    return folder / "lib_x.so"


THREADS = '#include <pthread.h>\nextern "C" int f(pthread_t t) { return pthread_detach(t); }\n'


def test_a_library_that_needs_a_newer_system_than_the_policy_is_refused(tmp_path: Path) -> None:
    assert make_wheel.beyond_policy(library(tmp_path, "int f() { return 1; }")) == []
    own = library(tmp_path, THREADS, "-include", str(ROOT / "scripts" / "old_glibc.h"))
    assert make_wheel.beyond_policy(own) == []
    linked = library(tmp_path, "int g() { return 1; }", "-Wl,--no-as-needed", "-lz", "-l:libz.so.1")
    assert any("libz" in text for text in make_wheel.beyond_policy(linked))


def test_a_library_of_a_newer_glibc_is_named(tmp_path: Path) -> None:
    found = make_wheel.beyond_policy(library(tmp_path, THREADS))
    newer = (
        "pthread_detach@GLIBC_2.34"
        in subprocess.run(
            ["readelf", "--dyn-syms", "-W", str(tmp_path / "lib_x.so")], capture_output=True, text=True
        ).stdout
    )
    assert any("GLIBC_2.34" in text for text in found) == newer


def test_a_wheel_with_libraries_has_a_record_and_a_tag_for_any_python(tmp_path: Path) -> None:
    plain = tmp_path / "quire-1-py3-none-any.whl"
    with zipfile.ZipFile(plain, "w") as wheel:
        wheel.writestr("quire/__init__.py", "")
        wheel.writestr("quire-1.dist-info/WHEEL", "Root-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("quire-1.dist-info/RECORD", "old")
    (tmp_path / "x.so").write_bytes(b"code")
    made = make_wheel._with_libraries(plain, {"lib_x.so": tmp_path / "x.so"}, tmp_path, "py3-none-manylinux_2_28_riscv")
    with zipfile.ZipFile(made) as wheel:
        assert wheel.read("quire/ops/cpu/lib_x.so") == b"code"
        text = wheel.read("quire-1.dist-info/WHEEL").decode()
        assert "Root-Is-Purelib: false" in text and "Tag: py3-none-manylinux_2_28_riscv" in text
        record = wheel.read("quire-1.dist-info/RECORD").decode().splitlines()
        assert [row.partition(",")[0] for row in record] == sorted(
            wheel.namelist(), key=lambda name: name.endswith("RECORD")
        )
        assert record[-1] == "quire-1.dist-info/RECORD,," and "old" not in record


def test_what_an_index_shows_of_the_readme_leads_to_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    description = runpy.run_path("setup.py")["description"]
    text = (ROOT / "README.md").read_text()
    assert description(text, {}) == text
    made = description(text, {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": "v1"})
    pictures = re.findall(r"!\[[^\]]*\]\(([^)]*)\)", made)
    assert len(pictures) == text.count("![") > 1
    files = [link for link in re.findall(r"(?<!!)\[[^\]]*\]\(([^)]*)\)", made) if "/owner/name/" in link]
    places = {
        "https://raw.githubusercontent.com/owner/name/v1/": pictures,
        "https://github.com/owner/name/blob/v1/": files,
    }
    for place, found in places.items():
        assert found and all((ROOT / link.removeprefix(place).partition("#")[0]).is_file() for link in found)
    assert not re.search(r"\]\((?!https?:|#)", made)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="this is no checkout")
def test_the_source_distribution_has_all_that_the_checkout_has() -> None:
    """Its tests read more than the package: pages, workflows, what makes the site."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    lines = [line.split() for line in (ROOT / "MANIFEST.in").read_text().splitlines()]
    packed = {"src", "pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", ".gitignore"}
    packed |= {name for command, *names in lines if command in ("include", "graft") for name in names}
    assert {path.partition("/")[0] for path in tracked} - packed == set()


def test_the_workflow_calls_targets_that_there_are() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yaml").read_text())
    steps = [step.get("run", "") for job in workflow["jobs"].values() for step in job["steps"]]
    called = {word for run in steps if run.startswith("make ") for word in run.split()[1:]}
    targets = {line.partition(":")[0] for line in (ROOT / "Makefile").read_text().splitlines() if ":" in line}
    assert called and called <= targets


@pytest.mark.slow
def test_the_wheel_is_made(tmp_path: Path) -> None:
    assert make_wheel.main([str(tmp_path), "--isa", "sse2"]) == 0
    [wheel] = tmp_path.glob("*.whl")
    assert "py3-none-manylinux_2_28_" in wheel.name


@pytest.mark.parametrize("name", ["runtime", "dev", "docs", "mutants"])
def test_every_package_of_a_lock_has_its_version_and_the_hashes_of_its_files(name: str) -> None:
    """So that `pip install --require-hashes` takes it."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text()
    entries = [entry for entry in re.split(r"\n(?=\S)", text) if not entry.startswith("#")]
    assert entries and all(
        re.fullmatch(r"[\w.-]+(\[\w,]+\])?==[\w.+]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+\n?", entry)
        for entry in entries
    )
