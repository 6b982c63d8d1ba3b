"""Builds the C++ kernels: the same sources once for each instruction set, each a library of its own.

They are loaded with ctypes and link nothing of torch or Python. Without a C++ compiler the installation succeeds
all the same, and Quire runs on its torch path.
"""

import platform
from pathlib import Path

from setuptools import Extension, setup

SOURCES = "src/quire/ops/cpu/src"
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq"]
INSTRUCTION_SETS = {
    "x86_64": {
        "sse2": [],
        "avx2": AVX2,
        "avx512": AVX512,
        "avx512_bf16": [*AVX512, "-mavx512bf16", "-mavx512vnni"],
    },
    "aarch64": {"neon": [], "neon_dot": ["-march=armv8.2-a+dotprod"]},
}
FLAGS = [
    *("-std=c++17", "-O3", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Wno-psabi", "-Wno-maybe-uninitialized"),
]

setup(
    ext_modules=[
        Extension(
            f"quire.ops.cpu.lib_{name}",
            sorted(str(path) for path in Path(SOURCES).glob("*.cpp")),
            depends=sorted(str(path) for path in Path(SOURCES).glob("*.h")),
            extra_compile_args=[*FLAGS, *flags],
            extra_link_args=["-fopenmp"],
            language="c++",
            optional=True,
        )
        for name, flags in INSTRUCTION_SETS.get(platform.machine(), {}).items()
    ]
)
