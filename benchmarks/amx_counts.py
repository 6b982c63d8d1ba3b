"""What the kernels for AMX ask of a core, counted: no processor with AMX is needed, and nothing here is a time.

The kernels are compiled with emulated tile registers (`ops/cpu/src/amx.h`) that count their instructions and simulate
where tiles come from: a first-level cache of 48 KB and a second-level one of 2 MB, as a core of Sapphire Rapids has, or
half of each where two threads share it. Both forget what was used the longest ago; what vectors read and write, and
what is asked for ahead, is left out. On a processor with AVX-512 BF16 the vector instructions that run beside the tiles
are counted too, step by step (some minutes; `--tiles` leaves them out).

The share is what the slowest part would leave of the matrix unit if all parts ran beside one another without a gap: at
best so much. A tile product takes 16 cycles and a tile load 8 from the first-level cache, vectors are two a cycle, and
the second-level cache sends 48 bytes a cycle.

usage: python -m benchmarks.amx_counts [--tiles] [--sources FOLDER]
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import re
import runpy
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import torch

from benchmarks.common import Options, Result, tell
from quire.ops import CodedWeight, Kernels, KVCache, RaggedBatch
from quire.ops.coded import Scheme
from quire.ops.cpu import attention, library, linear
from quire.ops.cpu.instruction_sets import INSTRUCTION_SETS, cpu_flags
from quire.ops.cpu.kernels import CpuKernels
from quire.ops.cpu.library import I64, POINTER, Library, Prototype
from quire.ops.cpu.linear import PANEL
from quire.ops.memory import Scratch, WeightMemory

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ROOT / "src" / "quire" / "ops" / "cpu" / "src"
COUNTER = ROOT / "benchmarks" / "amx_counts.cpp"
NAMES = "attention", "library", "linear", "pack", "team"
WATCHING = "-DQUIRE_EMULATE_AMX", "-DQUIRE_WATCH_TILES"
NEEDED = library.NEEDS["amx"]

PRODUCT, LOAD, VECTORS, SECOND = 16, 8, 2, 48
"""Cycles of a tile product and of a tile load, vector instructions and bytes of the second-level cache a cycle: Intel's
optimization manual, chapters on AMX and on the microarchitecture."""
ALONE, SHARED = (48 << 10, 2 << 20), (24 << 10, 1 << 20)
"""Bytes of a thread's caches: where it has a core to itself, and where another thread shares it."""

SHAPES = (
    *((rows, 1024, 4096) for rows in (1, 8, 32, 128, 1024)),
    *((1024, 3072, 1024), (1024, 2048, 1024), (1024, 1024, 6144)),
)
FORMATS: dict[str, Scheme | None] = {
    "bf16": None,
    "8 bits, a scale an output": Scheme("W8", 8, 0),
    **{scheme.name: scheme for scheme in (Scheme("Q8_0", 8, 32), Scheme("Q4_K", 4, 32, block=256))},
    **{scheme.name: scheme for scheme in (Scheme("Q6_K", 8, 16, block=256), Scheme("GPTQ", 4, 128))},
}
HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
PROMPT, REQUESTS, CONTEXT = 1024, 32, 160

TILE_FUNCTIONS = re.compile(r"(load_tile|store_tile|zero_tile|multiply_pairs|multiply_quads|_tiles|Watched|quire_step)")


class Counts(NamedTuple):
    """Of tile instructions; and lines of 64 bytes that came from the second-level cache and from beyond it, and that
    went back to it."""

    loads: int
    stores: int
    products: int
    from_second: int
    from_beyond: int
    to_second: int


PROTOTYPES: dict[str, Prototype] = {"watch": (None, (I64, I64)), "watched": (None, (POINTER,))}
STEPPING: dict[str, Prototype] = {"step": (None, (I64, I64, POINTER))}


def count(lib: Library, call: Callable[[], object], caches: tuple[int, int] = (0, 0)) -> Counts:
    """A call's tile instructions, with caches of these sizes, which are empty at first; 0: without any."""
    found = (I64 * len(Counts._fields))()
    lib.watch(*caches)
    call()
    lib.watched(ctypes.addressof(found))
    return Counts(*found)


class Counted(CpuKernels):
    """The kernels with emulated tiles, compiled to the library at `path`."""

    def __init__(self, path: Path, stepping: bool) -> None:
        Kernels.__init__(self)
        self.name, self._path = "amx", path
        prototypes = attention.PROTOTYPES | linear.PROTOTYPES | PROTOTYPES | (STEPPING if stepping else {})
        with patch.object(library, "built", lambda: {"amx": path}), patch.object(library, "cpu_flags", lambda: NEEDED):
            self._lib = Library("amx", prototypes)
        self._scratch, self._workspace, self._weights = Scratch(), Scratch(), WeightMemory()

    def count(self, call: Callable[[], object], caches: tuple[int, int]) -> Counts:
        return count(self._lib, call, caches)

    def vectors(self, call: Callable[[], object]) -> int:
        """A call's vector instructions: those of the kernels that name a vector register and are no mere moves."""
        begin, size, named = self._vector_instructions()
        seen = np.zeros(size, dtype=np.uint64)
        self._lib.step(begin, size, seen.ctypes.data)
        call()
        self._lib.step(0, 0, None)
        return int(seen[named].sum())

    def _vector_instructions(self) -> tuple[int, int, list[int]]:
        """Where the library lies, and where in it there are such instructions."""
        mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(self._path))]
        begin = min(int(line.split("-")[0], 16) for line in mapped)
        size = max(int(line.split("-")[1].split()[0], 16) for line in mapped) - begin
        said = subprocess.run(["objdump", "-d", "-C", self._path], check=True, capture_output=True, text=True).stdout
        named, inside = [], False
        for line in said.splitlines():
            if line.endswith(">:"):
                inside = not TILE_FUNCTIONS.search(line)
            elif inside and re.search(r"%[xyz]mm", line) and "\tvmov" not in line:
                named.append(int(line.split(":")[0], 16))
        return begin, size, named


def simplest() -> str | None:
    """The instruction set that the rest of the emulating kernels is compiled for: AMX's own, if it is there."""
    return next((isa for isa in ("avx512_bf16", "avx2", "neon") if INSTRUCTION_SETS[isa].needs <= cpu_flags()), None)


def compiled(folder: Path, isa: str, sources: Path = SOURCES) -> Path:
    script = runpy.run_path(str(ROOT / "scripts" / "compile_kernels.py"), run_name="options")
    files = [*(sources / f"{name}.cpp" for name in NAMES), COUNTER]
    options = [*script["OPTIONS"], *INSTRUCTION_SETS[isa].options, *WATCHING]
    subprocess.run(["g++", *options, f"-I{sources}", "-shared", *files, "-o", folder / "lib_amx.so"], check=True)
    return folder / "lib_amx.so"


# -- what is counted ------------------------------------------------------------------------------------------------


def product(kernels: CpuKernels, scheme: Scheme | None, rows: int, inputs: int, outputs: int) -> Callable[[], object]:
    x = torch.zeros(rows, inputs, dtype=torch.bfloat16)
    if scheme is None:
        packed = kernels.pack([torch.zeros(outputs, inputs, dtype=torch.bfloat16)])
    else:
        packed = kernels.pack_coded([zeros(scheme, outputs, inputs)])
    return lambda: packed.matmul(x)


def zeros(scheme: Scheme, outputs: int, inputs: int) -> CodedWeight:
    """A weight of zeros, but for one code of 8 bits, since others would be packed to 6. There are offsets with codes
    of 4 bits in groups, as in Q4_K and GPTQ."""

    def some(each: int, dtype: torch.dtype) -> torch.Tensor | None:
        return torch.zeros(outputs, inputs // each, dtype=dtype) if each else None

    whole, floats, block = torch.uint8, torch.float16, scheme.block or 0
    codes = torch.zeros(outputs, inputs * scheme.bits // 8, dtype=whole if scheme.bits == 4 else torch.int8)
    if scheme.bits == 8 and not block:
        codes[0, 0] = 127
    with_offsets = scheme.bits == 4
    return CodedWeight(
        scheme,
        codes,
        some(scheme.group, whole if block else floats),
        some(scheme.group, whole) if with_offsets else None,
        some(block, floats),
        some(block, floats) if with_offsets else None,
        None if scheme.group else torch.zeros(outputs),
    )


def attended(kernels: CpuKernels, requests: int, rows: int, context: int, kv_heads: int) -> Callable[[], object]:
    """The last `rows` tokens of each request's context."""
    size, blocks = 16, -(-context // 16)
    kv = KVCache(1 + requests * blocks, 1, kv_heads, HEAD_DIM, size, torch.bfloat16)
    kv.numbers.copy_(torch.randn(kv.numbers.shape))
    positions = torch.arange(context - rows, context).repeat(requests)
    batch = RaggedBatch(
        token_ids=torch.zeros_like(positions),
        positions=positions,
        slots=torch.zeros_like(positions),
        row_starts=list(itertools.accumulate([rows] * requests, initial=0)),
        context_lens=[context] * requests,
        block_tables=torch.arange(1, 1 + requests * blocks).view(requests, blocks),
        block_size=size,
    )
    q = torch.randn(len(positions), kv_heads * HEADS // KV_HEADS, HEAD_DIM).bfloat16()
    return lambda: kernels.attend(q, kv, batch, 0, HEAD_DIM**-0.5, None)


def least_products(scheme: Scheme | None, rows: int, inputs: int, outputs: int) -> int:
    """Tile products that a product needs at least: each takes 64 bytes of a row, and no more than a segment."""
    deep = 32 if scheme is None else min(scheme.segment, 64)
    return -(-rows // 16) * -(-outputs // 16) * -(-inputs // deep)


def product_vectors(kernels: Counted, scheme: Scheme | None, rows: int, inputs: int, outputs: int) -> int:
    """Of a part of the rows and two panels, for all: what a row takes, and what it takes with a panel, is the same."""
    some = min(rows, 32)
    one, two = (kernels.vectors(product(kernels, scheme, some, inputs, count)) for count in (PANEL, 2 * PANEL))
    return ((two - one) * (outputs // PANEL) + 2 * one - two) * rows // some


def shares(counts: Counts, vectors: int | None) -> dict[str, float]:
    """Cycles that each part takes, in those of the products."""
    cycles = {
        "loads": counts.loads * LOAD,
        "second": 64 * (counts.from_second + counts.to_second) / SECOND,
        "vectors": (vectors or 0) / VECTORS,
    }
    return {name: each / (counts.products * PRODUCT) for name, each in cycles.items()}


HEADINGS = (
    *("what", "tile products", "loads", "stores", "vectors", "from 2nd level", "from beyond", "share at most"),
    *("shared: from 2nd level", "from beyond", "share at most"),
)


def add(result: Result, name: str, kernels: Counted, call: Callable[[], object], vectors: int | None) -> None:
    alone, shared = kernels.count(call, ALONE), kernels.count(call, SHARED)

    def a_cycle(lines: int) -> str:
        return f"{64 * lines / (alone.products * PRODUCT):.1f}"

    row = [name, f"{alone.products:,}", f"{alone.loads / alone.products:.2f}", f"{alone.stores / alone.products:.2f}"]
    row.append("" if vectors is None else f"{vectors / alone.products:.1f}")
    for counts in (alone, shared):
        most = max(1.0, *shares(counts, vectors).values())
        row += [a_cycle(counts.from_second + counts.to_second), a_cycle(counts.from_beyond), f"{1 / most:.0%}"]
    result.add(row, what=name, alone=alone._asdict(), shared=shared._asdict(), vectors=vectors)
    tell("amx_counts: " + ", ".join(row))


def run(options: Options, sources: Path = SOURCES, tiles: bool = False) -> Result:
    isa = simplest()
    if isa is None:
        raise RuntimeError("this machine has no fused multiply-adds to emulate with")
    stepping = isa == "avx512_bf16" and not (tiles or options.quick)
    with tempfile.TemporaryDirectory() as folder:
        kernels = Counted(compiled(Path(folder), isa, sources), INSTRUCTION_SETS[isa].machine == "x86_64")
        return table(kernels, stepping, SHAPES[2:4] if options.quick else SHAPES)


def table(kernels: Counted, stepping: bool, shapes: Sequence[tuple[int, int, int]]) -> Result:
    result = Result(HEADINGS)
    for (form, scheme), (rows, inputs, outputs) in itertools.product(FORMATS.items(), shapes):
        if scheme is not None and rows < 8:
            continue  # not in tiles: they would wait for memory, too
        if scheme is not None and scheme.group and inputs != shapes[0][1]:
            continue  # what stays in a cache does not depend on groups
        vectors = product_vectors(kernels, scheme, rows, inputs, outputs) if stepping else None
        call = product(kernels, scheme, rows, inputs, outputs)
        add(result, f"{form}, {rows:,} x {inputs:,} x {outputs:,}", kernels, call, vectors)
    for name, requests, rows, context in (
        (f"attention of a prompt of {PROMPT:,}", 1, PROMPT, PROMPT),
        (f"attention of {REQUESTS} tokens, each to {CONTEXT:,}", REQUESTS, 1, CONTEXT),
    ):
        vectors = None
        if stepping:
            vectors = kernels.vectors(attended(kernels, 1, rows, context, 1)) * requests * KV_HEADS
        add(result, name, kernels, attended(kernels, requests, rows, context, KV_HEADS), vectors)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiles", action="store_true", help="leave the vector instructions out")
    parser.add_argument("--sources", type=Path, default=SOURCES, help="of the kernels, to compare")
    args = parser.parse_args()
    print(run(Options(""), args.sources, args.tiles).table())
    return 0


if __name__ == "__main__":
    sys.exit(main())
