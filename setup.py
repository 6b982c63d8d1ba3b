"""Builds the C++ kernels: the same sources once for each instruction set, each a library of its own.

They are loaded with ctypes and link nothing of torch or Python. Without a C++ compiler the installation succeeds
all the same, and Quire runs on its torch path. Of the environment, CXX names the compiler, and QUIRE_KERNELS what is
built: "all" (the default, so that a wheel runs anywhere), "native" (this processor's best alone, in a fifth of the
time) or "none".
"""

import os
import platform
import runpy
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = runpy.run_path("scripts/compile_kernels.py", run_name="setup")


def wanted() -> list[str]:
    """The instruction sets to build, or "native".

    Raises:
        SystemExit: QUIRE_KERNELS has no such value.
    """
    known = KERNELS["SETS"]["for_machine"](platform.machine()) if sys.platform == "linux" else []
    choices = {"all": known, "native": ["native"] if known else [], "none": []}
    asked = os.environ.get("QUIRE_KERNELS", "all")
    if asked not in choices:
        sys.exit(f"QUIRE_KERNELS={asked!r} is not supported; allowed: {', '.join(choices)}")
    return choices[asked]


def extensions() -> list[Extension]:
    """The libraries that there may be: which of them this processor runs, or cannot be compiled, turns out later."""
    names = wanted()
    return [
        Extension(
            f"quire.ops.cpu.lib_{name}",
            sorted(os.path.relpath(path) for path in KERNELS["SOURCES"].glob("*.cpp")),
            depends=sorted(os.path.relpath(path) for path in KERNELS["SOURCES"].glob("*.h")),
            optional=True,
        )
        for name in (KERNELS["SETS"]["for_machine"](platform.machine()) if names == ["native"] else names)
    ]


class BuildKernels(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Compiles all libraries at once, file by file on all cores."""

    def build_extensions(self) -> None:
        """Compile; what fails is told, and left out."""
        folder = Path(self.get_ext_fullpath(self.extensions[0].name)).parent
        failures = KERNELS["compile_kernels"](folder, wanted(), os.environ.get("CXX", "g++"))
        for name, said in failures.items():
            self.warn(f"the kernels for {name} were not compiled:\n{said}")


if __name__ == "__main__":
    setup(ext_modules=extensions(), cmdclass={"build_ext": BuildKernels})
