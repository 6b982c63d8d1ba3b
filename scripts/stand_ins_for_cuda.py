"""Makes torch's build for CUDA on aarch64 importable without CUDA's libraries, which are gigabytes.

PyPI has no other build for that kind of machine; pytorch.org's index has one for CPUs, but it is not reachable
everywhere. Libraries of the missing names are made that define every missing symbol: a function that returns an
error, or a name for run-time type information. `torch.distributed`, which would call into them, is switched off.
"""

from __future__ import annotations

import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TOOLS = "aarch64-linux-gnu-"

FUNCTION = """
.text
.balign 16
.globl {name}
.type {name}, %function
{name}: {body}
"""
RETURNS_ZEROS = "adrp x0, zeros\nadd x0, x0, :lo12:zeros\nret"  # C++: perhaps a reference
RETURNS_ERROR = "mov w0, #100\nret"  # C: 100 is "no device"
DATA = """
.data
.balign 16
.globl {name}
.type {name}, %object
{name}: .quad 0
.quad 1f
.zero 240
1: .asciz "{name}"
"""


def make(torch: Path, system: Path) -> None:
    """Add the libraries to torch's folder, unless it is the build for CPUs. `system` holds the C library."""
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        return
    for path in [*torch.glob("lib/libtorch_cuda*.so"), *torch.glob("lib/libtorch_nvshmem.so")]:
        path.unlink()
    _switch_off_distributed(torch / "lib" / "libtorch_python.so")
    files = [*torch.glob("lib/*.so*"), *torch.glob("_C.*.so")]
    there = [*files, *system.glob("**/*.so*"), system / "usr/bin/python3.11"]
    defined = {name for path in there if path.is_file() for name, _ in _symbols(path, "--defined-only")}
    missing: dict[str, set[str]] = {library: set() for path in files for library in _needed(path)}
    for path in there:
        missing.pop(path.name, None)
    missing = {library: names for library, names in missing.items() if not list(system.glob(f"**/{library}"))}
    for path in files:
        for name, version in _symbols(path, "--undefined-only"):
            if name not in defined:
                missing.setdefault(version or "libtorch_cuda.so", set()).add(name)
    for library, names in missing.items():
        _compile(torch / "lib" / library, sorted(names))


def _switch_off_distributed(path: Path) -> None:
    """torch looks for these functions to know whether it was built with `torch.distributed`."""
    content = path.read_bytes()
    for name in (b"_c10d_init", b"_rpc_init", b"_dist_autograd_init"):
        content = content.replace(b"\0" + name + b"\0", b"\0" + name[:-4] + b"none" + b"\0")
    path.write_bytes(content)


def _symbols(path: Path, which: str) -> Iterator[tuple[str, str]]:
    """(name, version) of a library's symbols; weak ones that are missing do not count."""
    done = subprocess.run([f"{TOOLS}nm", "-D", which, str(path)], capture_output=True, text=True)
    for line in done.stdout.splitlines():
        kind, symbol = line.split()[-2:]
        name, _, version = symbol.replace("@@", "@").partition("@")
        if kind not in "wv":
            yield name, version


def _needed(path: Path) -> list[str]:
    done = subprocess.run([f"{TOOLS}objdump", "-p", str(path)], capture_output=True, text=True)
    return [line.split()[1] for line in done.stdout.splitlines() if line.strip().startswith("NEEDED")]


def _compile(path: Path, names: list[str]) -> None:
    """A library that defines these, all under one version: its own name, as CUDA's do."""
    parts: dict[bool, list[str]] = defaultdict(list)
    for name in names:
        data = name.startswith(("_ZTI", "_ZTV"))
        body = RETURNS_ZEROS if name.startswith("_Z") else RETURNS_ERROR
        parts[data].append((DATA if data else FUNCTION).format(name=name, body=body))
    source, versions = path.with_suffix(".s"), path.with_suffix(".map")
    source.write_text(".bss\n.balign 16\nzeros: .zero 4096\n" + "".join(parts[False] + parts[True]))
    versions.write_text(f"{path.name} {{ global: *; }};\n")
    versioned = [] if path.name.startswith("libtorch") else [f"-Wl,--version-script={versions}"]
    command = [f"{TOOLS}gcc", "-shared", "-nostdlib", f"-Wl,-soname,{path.name}", *versioned]
    subprocess.run([*command, str(source), "-o", str(path)], check=True)
    source.unlink()
    versions.unlink()
