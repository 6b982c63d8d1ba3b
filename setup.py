"""Builds the C++ kernels: the same sources once for each instruction set, each a library of its own.

They are loaded with ctypes and link nothing of torch or Python. Without a C++ compiler the installation succeeds
all the same, and Quire runs on its torch path.
"""

import copy
import platform
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = "src/quire/ops/cpu/src"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"]
AVX512_BF16 = [*AVX512, "-mavx512bf16", "-mavx512vnni"]
INSTRUCTION_SETS: dict[str, dict[str, list[str]]] = {
    "x86_64": {
        "sse2": [],
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_bf16": AVX512_BF16,
        "amx": [*AVX512_BF16, "-mamx-tile", "-mamx-bf16", "-mamx-int8"],
    },
    "aarch64": {"neon": [], "neon_dot": ["-march=armv8.2-a+dotprod"]},
}
FLAGS = [
    *("-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", "-g0"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized"),
]


def extensions() -> list[Extension]:
    """A library for each instruction set of this kind of machine."""
    sets = INSTRUCTION_SETS.get(platform.machine(), {}) if sys.platform == "linux" else {}
    return [
        Extension(
            f"quire.ops.cpu.lib_{name}",
            sorted(str(path) for path in Path(SOURCES).glob("*.cpp")),
            depends=sorted(str(path) for path in Path(SOURCES).glob("*.h")),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
        for name, flags in sets.items()
    ]


class BuildKernels(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Keeps the libraries' object files apart: they are made of the same sources, at the same time."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one library."""
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp) / ext.name)
        own.compiler = copy.copy(self.compiler)
        build_ext.build_extension(own, ext)


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildKernels},
        options={"build_ext": {"parallel": True}},  # the instruction sets side by side
    )
