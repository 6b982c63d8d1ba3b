"""Builds the C++ kernels: the same sources once for each instruction set, each a library of its own.

They are loaded with ctypes and link nothing of torch or Python. Without a C++ compiler the installation succeeds
all the same, and Quire runs on its torch path. Of the environment, CXX names the compiler, and QUIRE_KERNELS what is
built: "all" (the default, so that a wheel runs anywhere), "native" (this processor's best alone, in a fifth of the
time) or "none".

Links and pictures of README.md are relative, and an index such as PyPI has no files beside it. Where GITHUB_REPOSITORY
(owner/name) says where the sources are, as in a workflow's environment, the package's description leads there.
"""

import os
import platform
import re
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

KERNELS = runpy.run_path("scripts/compile_kernels.py", run_name="setup")


def wanted() -> list[str]:
    """The instruction sets to build, or "native".

    Raises:
        SystemExit: QUIRE_KERNELS has no such value.
    """
    known: list[str] = KERNELS["SETS"]["for_machine"](platform.machine())
    if sys.platform != "linux" and (sys.platform, platform.machine()) != ("darwin", "arm64"):
        known = []
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


def description(text: str, environment: Mapping[str, str]) -> str:
    """README.md, whose links lead to the repository that the environment names, if it does."""
    repository = environment.get("GITHUB_REPOSITORY")
    if not repository:
        return text
    version = environment.get("GITHUB_REF_NAME", "main")
    files = f"https://github.com/{repository}/blob/{version}/"
    pictures = f"https://raw.githubusercontent.com/{repository}/{version}/"
    relative = r"\]\((?!https?:|#)([^)\s]+)\)"
    text = re.sub(rf"(!\[[^\]]*){relative}", rf"\1]({pictures}\2)", text)
    return re.sub(relative, rf"]({files}\1)", text)


def links(environment: Mapping[str, str]) -> dict[str, str]:
    """Where the project is, as an index shows it."""
    repository = environment.get("GITHUB_REPOSITORY")
    if not repository:
        return {}
    home = f"https://github.com/{repository}"
    changes = f"{home}/blob/{environment.get('GITHUB_REF_NAME', 'main')}/CHANGELOG.md"
    return {"Source": home, "Issues": f"{home}/issues", "Changelog": changes}


if __name__ == "__main__":
    setup(
        ext_modules=extensions(),
        cmdclass={"build_ext": BuildKernels},
        long_description=description(Path("README.md").read_text("utf-8"), os.environ),
        long_description_content_type="text/markdown",
        project_urls=links(os.environ),
    )
