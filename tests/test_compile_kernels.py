"""scripts/compile_kernels.py and what setup.py makes of it, with a compiler that writes down what it is asked for."""

from __future__ import annotations

import ast
import os
import platform
import re
import runpy
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent

COMPILER = """\
#!/bin/sh
echo "$@" >> "{log}"
for word in "$@"; do
    [ "$word" != -mamx-tile ] || {{ echo "error: unknown option -mamx-tile" >&2; exit 1; }}
done
while [ "$1" != -o ]; do shift; done
echo made > "$2"
"""
"""One that is too old for AMX."""


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The script's functions, on a machine with all that x86_64 has."""
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    script = runpy.run_path(str(ROOT / "scripts" / "compile_kernels.py"), run_name="kernels")
    everything = frozenset().union(*(isa.needs for isa in script["SETS"]["INSTRUCTION_SETS"].values()))
    script["SETS"]["cpu_flags"] = lambda: everything
    return script


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "g++"
    path.write_text(COMPILER.format(log=tmp_path / "log"))
    path.chmod(0o755)
    return path


def compiled(compiler: Path) -> list[str]:
    """The sources that were compiled since last asked."""
    log = compiler.with_name("log")
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [word for line in lines for word in line.split() if word.endswith(".cpp")]


def libraries(folder: Path) -> set[str]:
    return {path.name.partition(".")[0].removeprefix("lib_") for path in folder.glob("lib_*")}


def test_the_best_set_that_compiles_is_made_for_this_processor(
    script: dict[str, Any], compiler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert script["main"]([str(folder), "--isa", "native", "--compiler", str(compiler), "--optional"]) == 0
    assert libraries(folder) == {"avx512_bf16"}
    assert "The kernels for amx were not compiled: error: unknown option -mamx-tile" in capfd.readouterr().err


def test_all_sets_are_made_unless_one_is_named_and_what_fails_is_an_error_unless_optional(
    script: dict[str, Any], compiler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "made"
    assert script["main"]([str(folder), "--compiler", str(compiler)]) == 1
    assert libraries(folder) == {"avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "sse2"}
    assert "unknown option -mamx-tile" in capfd.readouterr().err
    assert script["main"]([str(tmp_path / "other"), "--isa", "sse2", "--compiler", str(compiler)]) == 0
    assert libraries(tmp_path / "other") == {"sse2"}
    with pytest.raises(SystemExit):
        script["main"]([str(folder), "--isa", "avx1024"])
    known = "amx, avx512_bf16, avx512_vnni, avx512, avx_vnni, avx2, sse2"
    assert f"no kernels for avx1024; known: {known}" in capfd.readouterr().err


def test_what_a_compiler_does_not_know_of_a_set_s_wishes_is_left_out(
    script: dict[str, Any], compiler: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    compiler.write_text(compiler.read_text().replace("-mamx-tile", "-mstore-max=256"))
    assert script["main"]([str(tmp_path / "made"), "--isa", "avx2", "--compiler", str(compiler)]) == 0
    made = [line.split() for line in compiler.with_name("log").read_text().splitlines() if ".cpp" in line]
    assert made and all("-mmove-max=256" in words and "-mstore-max=256" not in words for words in made)
    assert capfd.readouterr().err == ""


def test_only_what_is_older_than_its_sources_is_made_again(
    script: dict[str, Any], compiler: Path, tmp_path: Path
) -> None:
    def make(*names: str, more: tuple[str, ...] = ()) -> None:
        assert script["compile_kernels"](tmp_path, names, str(compiler), more) == {}

    make("avx2")
    each = len(compiled(compiler))
    assert each == len(list(script["SOURCES"].glob("*.cpp")))
    make("avx2", "sse2")
    assert len(compiled(compiler)) == each  # sse2's
    make("avx2", more=("-g",))
    assert len(compiled(compiler)) == each  # with options, whatever is there
    for path in tmp_path.glob("lib_*"):
        os.utime(path, (0, 0))
    make("avx2")
    assert len(compiled(compiler)) == each
    assert libraries(tmp_path) == {"avx2"}  # the other was of older sources


def test_headers_of_all_sources_are_read_once_for_a_set(
    script: dict[str, Any], compiler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0}, raising=False)  # more cores do not wait for the headers
    assert script["compile_kernels"](tmp_path, ["avx2", "sse2"], str(compiler)) == {}
    lines = [line.split() for line in compiler.with_name("log").read_text().splitlines()]
    assert sum("c++-header" in words for words in lines) == 2
    sources = [words for words in lines if any(word.endswith(".cpp") for word in words)]
    assert sources and all("-include" in words for words in sources)


def test_without_a_compiler_the_torch_path_is_announced(
    script: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert script["main"]([str(tmp_path), "--isa", "native", "--compiler", "no-such-compiler", "--optional"]) == 0
    told = capfd.readouterr().err.splitlines()
    assert len(told) == 2 and told[0].endswith("were not compiled: no-such-compiler: No such file or directory")
    assert "torch path" in told[1]


def test_the_environment_says_what_an_installation_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("setuptools")
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.delenv("QUIRE_KERNELS", raising=False)
    setup = runpy.run_path("setup.py", run_name="setup")
    names = ["amx", "avx512_bf16", "avx512_vnni", "avx512", "avx_vnni", "avx2", "sse2"]
    for given, wanted in ((None, names), ("all", names), ("native", ["native"]), ("none", [])):
        if given:
            monkeypatch.setenv("QUIRE_KERNELS", given)
        assert setup["wanted"]() == wanted
        libraries = [extension.name for extension in setup["extensions"]()]
        assert libraries == [f"quire.ops.cpu.lib_{name}" for name in (names if wanted else [])]
    monkeypatch.setenv("QUIRE_KERNELS", "some")
    with pytest.raises(SystemExit, match="QUIRE_KERNELS='some' is not supported; allowed: all, native, none"):
        setup["wanted"]()


def imported(files: Iterable[Path]) -> Iterator[str]:
    """The modules that these files import, and the files of tests/ that they import in turn."""
    left, seen = list(files), set[Path]()
    while left:
        file = left.pop()
        if file in seen or not file.exists():
            continue
        seen.add(file)
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{name}" for name in names)]
            yield from names
            left += [ROOT / f"{name.replace('.', '/')}.py" for name in names if name.startswith("tests.")]


def test_where_kernels_are_tested_in_another_form_all_that_their_tests_import_is_copied() -> None:
    """`make sanitize` and `make test-arm` do that in a tree of their own."""
    files = [file for pattern in ("cpu_*", "ops*") for file in (ROOT / "tests").glob(f"test_{pattern}.py")]
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()}
    needed = {"src"} | folders & {name.partition(".")[0] for name in imported(files)}
    assert {"tests", "benchmarks"} <= needed
    sanitized = re.search(r"cp -r (.*) \$\(SANITIZED\)", (ROOT / "Makefile").read_text())
    on_arm = re.search(r"^COPIED = (.*)$", (ROOT / "scripts" / "test_on_arm.py").read_text(), re.MULTILINE)
    assert sanitized and needed <= set(sanitized[1].split())
    assert on_arm and needed <= set(ast.literal_eval(on_arm[1]))
