"""What compiled kernels take of a GPU (registers, spills, shared memory, matrix instructions), beside a table of it.

    python -m tests.test_triton_usage            # compile everything again with the Triton that is installed, and write
    python -m tests.test_triton_usage states     # the launches of tests/test_triton_states.py alone
    PYTHONPATH=FOLDER python -m tests.test_triton_usage    # the same with another Triton, unpacked there

A line of triton_usage.jsonl is a kernel as a launch of `launch_all` in a test module compiles it. No GPU is needed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.triton_compile import ARCHITECTURES, EACH_ARCHITECTURE, compile_all

TABLE = Path(__file__).with_name("triton_usage.jsonl")
MODULES = tuple(
    path.stem.removeprefix("test_triton_")
    for path in sorted(TABLE.parent.glob("test_triton_*.py"))
    if "\ndef launch_all(" in path.read_text("utf-8")
)
KEPT = ("kernel", "registers", "stack", "shared", "warps", "matrix")
SLACK = 64
"""Bytes a thread that may be spilled where none were: no loop suffers from a few numbers that are kept outside it."""
QUICK = ("attention", "experts")
"""Modules of which some kernels are compiled in the quick tests, too: what the interpreter runs, the compiler may
refuse. The others of theirs are compiled where they are compared with the table."""
ONE_TILE = ("_score",)
"""Kernels whose tile is a matter of the model, never of the step: there is no other whose sums theirs must equal."""

Usage = dict[str, Any]


def compiled(module: str, arch: int, seconds: float = 280.0) -> list[Usage]:
    """What each kernel of the module's launches takes."""
    return [{name: use[name] for name in KEPT} for use in compile_all(f"tests.test_triton_{module}", arch, seconds)]


def table() -> dict[tuple[str, str, int], list[Usage]]:
    """What is written, by version of Triton, module, and compute capability."""
    found: dict[tuple[str, str, int], list[Usage]] = {}
    for line in TABLE.read_text("utf-8").splitlines():
        row = json.loads(line)
        key = (row.pop("triton"), row.pop("module"), row.pop("arch"))
        found.setdefault(key, []).append(row)
    return found


@EACH_ARCHITECTURE
@pytest.mark.parametrize("module", MODULES)
def test_no_kernel_takes_much_more_than_the_table_says(module: str, arch: int) -> None:
    written = table().get((triton.__version__, module, arch))
    if written is None:
        pytest.skip(f"triton_usage.jsonl has nothing of Triton {triton.__version__}")
    found = compiled(module, arch)
    assert [use["kernel"] for use in found] == [use["kernel"] for use in written], "write the table anew"
    for now, before in zip(found, written, strict=True):
        assert now["stack"] <= max(2 * before["stack"] - 1, before["stack"] + SLACK), (now, before)
        assert now["shared"] <= before["shared"] * 1.5, (now, before)
        assert now["matrix"] == before["matrix"], (now, before)


@pytest.mark.slow
@pytest.mark.parametrize(
    "launches",
    [*(f"{each}:launch_few" for each in QUICK), *(pytest.param(each, marks=pytest.mark.slow) for each in MODULES)],
)
def test_products_of_few_rows_add_up_as_those_of_many_do(launches: str) -> None:
    """On sm_90, where few rows may be computed with mma.sync and many with wgmma, and must have the same bits.

    Both add up 16 consecutive numbers an instruction, if Triton lays 16-bit operands out as such: 2 beside each other.
    Of operands that were loaded as bytes and widened it lays out 4. Then the 16 of an instruction of mma.sync are
    others, and so are the sums (as seen on an H200). Sums of whole numbers are exact, in any order.
    """
    for use in compile_all(f"tests.test_triton_{launches}", 90):
        assert use["k_widths"] or "mma.sync" not in use["matrix"], use
        if use["kernel"] not in ONE_TILE:
            assert use["k_widths"].get("f32", [2]) == [2], use


def test_the_table_has_every_module_for_every_gpu_and_two_versions_of_triton() -> None:
    versions = {version for version, _, _ in table()}
    assert len(versions) >= 2
    assert set(table()) == {
        (version, module, arch) for version in versions for module in MODULES for arch in ARCHITECTURES
    }


@pytest.mark.parametrize("module", MODULES)
def test_the_versions_of_triton_have_the_same_kernels_in_the_table(module: str) -> None:
    """Otherwise one of them was not compiled again when a launch came or went."""
    names = {key: [use["kernel"] for use in uses] for key, uses in table().items() if key[1] == module}
    for arch in ARCHITECTURES:
        found = {version: each for (version, _, its), each in names.items() if its == arch}
        assert len({tuple(each) for each in found.values()}) == 1, {key: len(each) for key, each in found.items()}


def main(*modules: str) -> None:
    for module in modules or MODULES:
        for arch in ARCHITECTURES:
            found = compiled(module, arch, 3600.0)
            before = table() if TABLE.exists() else {}
            kept = {key: rows for key, rows in before.items() if key[1] in MODULES}
            _write(kept | {(triton.__version__, module, arch): found})
            print(triton.__version__, module, arch, flush=True)


def _write(found: dict[tuple[str, str, int], list[Usage]]) -> None:
    """All at once: whoever is stopped leaves a whole table."""
    unfinished = TABLE.with_suffix(".unfinished")
    with unfinished.open("w", encoding="utf-8") as file:
        for (version, module, arch), rows in sorted(found.items()):
            for row in rows:
                file.write(json.dumps({"triton": version, "module": module, "arch": arch, **row}) + "\n")
    unfinished.replace(TABLE)


if __name__ == "__main__":
    main(*sys.argv[1:])
