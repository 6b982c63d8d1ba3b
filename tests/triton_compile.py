"""Compiles Triton kernels for GPUs that are not there: `python -m tests.triton_compile MODULE[:FUNCTION] [ARCH ...]`.

FUNCTION (`launch_all` unless said) calls the kernels as the product does, with tensors on the CPU. Each launch
is compiled to the machine code of the given architectures (80, 90 and 100 unless said) and not run. One line of JSON
a compiled kernel is printed: its name, types, and what it uses. This needs Triton without its interpreter, so it is a
process of its own.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

ARCHITECTURES = (80, 90, 100)
EACH_ARCHITECTURE = pytest.mark.parametrize(
    "arch", [pytest.param(arch, marks=pytest.mark.slow) for arch in ARCHITECTURES]
)


class NoDevice:
    """Stands for Triton's driver where only its compiler is wanted."""

    def __init__(self, arch: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", arch, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return self.target.arch  # what was compiled for one is not taken for another

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_all(module: str, arch: int, seconds: float = 280.0) -> list[dict[str, Any]]:
    """What each compiled kernel uses; runs in a process of its own, so many seconds at most.

    Raises:
        AssertionError: it fails; with what it printed.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.triton_compile", module, str(arch)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def main(module: str, *architectures: str) -> None:
    import triton
    from triton.runtime.jit import JITFunction

    found: dict[str, Any] = {}
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        kernel = kernel.result() if hasattr(kernel, "result") else kernel
        found.setdefault(f"{self.__name__} {kernel.hash}", (self.__name__, kernel))
        return kernel

    JITFunction.run = compile_only  # type: ignore[method-assign]
    name, _, function = module.partition(":")
    launch_all = getattr(importlib.import_module(name), function or "launch_all")
    for arch in map(int, architectures or ARCHITECTURES):
        found.clear()
        triton.runtime.driver.set_active(NoDevice(arch))  # type: ignore[arg-type]
        launch_all()
        for name, kernel in found.values():
            print(json.dumps({"kernel": name, "arch": arch, **_usage(kernel)}), flush=True)


def _usage(kernel: Any) -> dict[str, Any]:
    """Bytes of shared memory, registers a thread, bytes spilled, matrix instructions, and how these lay out K.

    Also how many of `wgmma` there are, and how often the machine code waits for some: as often where each is awaited
    by itself, which ptxas makes of code that uses a result before it says that it waits.
    """
    ptx = kernel.asm["ptx"]
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        dump = functools.partial(subprocess.run, capture_output=True, text=True)
        text = dump([tool, "--dump-resource-usage", file.name]).stdout
        code = dump([tool, "-sass", file.name]).stdout if "wgmma" in ptx else ""
    numbers = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", text))
    return {
        "registers": int(numbers.get("REG", 0)),
        "stack": int(numbers.get("STACK", 0)),
        "shared": kernel.metadata.shared,
        "warps": kernel.metadata.num_warps,
        "matrix": sorted({word for word in ("wgmma", "mma.sync", "tcgen05") if word in ptx}),
        "asynchronous": ptx.count("cp.async"),
        "wgmma": len(re.findall(r"\b[HIQ]GMMA\b", code)),
        "waits": code.count("WARPGROUP.DEPBAR"),
        "k_widths": _k_widths(kernel.asm["ttgir"]),
    }


def _k_widths(ttgir: str) -> dict[str, list[int]]:
    """Of `mma.sync`, by the type of what is summed: how many numbers beside each other along K a thread takes at once.

    It multiplies those of all threads in one instruction, so this is the order of the sum. wgmma and tcgen05 read
    their operands as they lie.
    """
    found: dict[str, set[int]] = {}
    for operands, sums in re.findall(r"= tt\.dot .* : (.*) -> tensor<[\dx]+x([fi]\d+),", ttgir):
        for width in re.findall(r"kWidth = (\d+)", operands):
            found.setdefault(sums, set()).add(int(width))
    return {sums: sorted(widths) for sums, widths in found.items()}


if __name__ == "__main__":
    main(*sys.argv[1:])
