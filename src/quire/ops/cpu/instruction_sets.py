"""The instruction sets that kernels are compiled for, and which of them this machine's processor has.

It imports nothing that has to be installed: setup.py and scripts/compile_kernels.py run it as a file.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import re
from pathlib import Path
from typing import NamedTuple


class InstructionSet(NamedTuple):
    """One of the forms that the kernels are compiled to."""

    machine: str
    """Kind of machine, as `platform.machine` names it."""
    needs: frozenset[str]
    """Flags without which it does not run, as Linux's /proc/cpuinfo names them."""
    options: tuple[str, ...]
    """Of the compiler."""
    wishes: tuple[str, ...] = ()
    """Likewise, where it is new enough to know them: they make the kernels faster, and change no bit."""
    bits: str = ""
    """The set whose bits it has, where they are not its own: it multiplies bytes faster, whose sums are exact."""


_AVX2 = InstructionSet("x86_64", frozenset({"avx2", "fma", "f16c"}), ("-mavx2", "-mfma", "-mf16c", "-mprfchw"))
_AVX512 = InstructionSet(
    "x86_64",
    _AVX2.needs | {"avx512f", "avx512bw", "avx512vl", "avx512dq"},
    (*_AVX2.options, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"),
)
_AVX512_VNNI = InstructionSet(
    "x86_64", _AVX512.needs | {"avx512_vnni"}, (*_AVX512.options, "-mavx512vnni"), bits="avx512"
)
_AVX512_BF16 = InstructionSet(
    "x86_64",
    _AVX512_VNNI.needs | {"avx512_bf16", "avx512vbmi"},
    (*_AVX512_VNNI.options, "-mavx512bf16", "-mavx512vbmi"),
)
_AMX = InstructionSet(
    "x86_64",
    _AVX512_BF16.needs | {"amx_tile", "amx_bf16", "amx_int8"},
    (*_AVX512_BF16.options, "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
)

# Its vectors of 64 bytes are copied in two parts; without the wishes (of GCC 12) in four, for which readers wait.
_AVX2 = _AVX2._replace(wishes=("-mmove-max=256", "-mstore-max=256"))
_AVX_VNNI = _AVX2._replace(needs=_AVX2.needs | {"avx_vnni"}, options=(*_AVX2.options, "-mavxvnni"), bits="avx2")

_DOT = frozenset({"asimddp", "atomics"})
# GCC would first make all that a sum takes, and then find no registers for it.
_ARM = ("-fno-schedule-insns",)

INSTRUCTION_SETS = {
    "amx": _AMX,
    "avx512_bf16": _AVX512_BF16,
    "avx512_vnni": _AVX512_VNNI,
    "avx512": _AVX512,
    "avx_vnni": _AVX_VNNI,
    "avx2": _AVX2,
    "sse2": InstructionSet("x86_64", frozenset({"sse2"}), ()),
    "neon_bf16": InstructionSet("aarch64", _DOT | {"bf16"}, ("-march=armv8.2-a+dotprod+bf16",), _ARM),
    "neon_dot": InstructionSet("aarch64", _DOT, ("-march=armv8.2-a+dotprod",), _ARM),
    "neon": InstructionSet("aarch64", frozenset({"asimd"}), (), _ARM),
}
"""By name, the fastest first."""


def for_machine(machine: str) -> list[str]:
    """The names of those that a kind of machine may have, the fastest first. macOS calls aarch64 arm64."""
    kind = {"arm64": "aarch64"}.get(machine, machine)
    return [name for name, isa in INSTRUCTION_SETS.items() if isa.machine == kind]


def bits_of(name: str) -> str:
    """The set whose bits the kernels of this one have: mostly its own."""
    isa = INSTRUCTION_SETS.get(name)
    return isa.bits or name if isa else name


@functools.cache
def cpu_flags() -> frozenset[str]:
    """What this machine's processor says of itself, less the tile registers where the system does not grant them."""
    flags = _processor_flags()
    return flags - {"amx_tile"} if "amx_tile" in flags and not _granted_tiles() else flags


def _granted_tiles() -> bool:
    """Ask Linux for AMX's tile registers, as every process has to once; its threads and forks have them too.

    It refuses where it is too old (before 5.16), or where a thread's stack for signals is too small for them.
    """
    arch_prctl, request_permission, tile_data = 158, 0x1023, 18  # see arch/x86/include/uapi/asm/prctl.h
    syscall = getattr(ctypes.CDLL(None), "syscall", None)
    arguments = map(ctypes.c_long, (arch_prctl, request_permission, tile_data))
    return syscall is not None and syscall(*arguments) == 0


_ON_MACOS = {"atomics": "FEAT_LSE", "asimddp": "FEAT_DotProd", "bf16": "FEAT_BF16"}
"""What macOS calls ARM's flags, which sysctl has below hw.optional.arm."""


def _processor_flags() -> frozenset[str]:
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        return frozenset({"asimd", *(flag for flag, name in _ON_MACOS.items() if _sysctl(f"hw.optional.arm.{name}"))})
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        text = ""
    found = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    if found:
        return frozenset(found[1].split())
    return frozenset({"sse2"} if platform.machine() in ("x86_64", "AMD64") else {"asimd"})


def _sysctl(name: str) -> int:
    """A number that macOS tells of itself; 0 if it does not."""
    value, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    return 0 if failed else value.value
