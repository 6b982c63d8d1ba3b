"""Makes the wheel that runs wherever there is Linux of its kind: `make wheel`.

    python scripts/make_wheel.py dist                                                       # for this kind of machine
    python scripts/make_wheel.py dist --machine aarch64 --compiler aarch64-linux-gnu-g++    # cross-compiled

The kernels are plain libraries that ctypes loads, and know nothing of Python: one wheel is for all its versions. It is
refused unless all that the libraries need of the system is in manylinux_2_28's policy (PEP 600, as auditwheel has it).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import compile_kernels

ROOT = Path(__file__).resolve().parent.parent
POLICY = "manylinux_2_28"
NEWEST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (8, 0, 0)}
"""The newest version of each that the policy allows."""
LIBRARIES = re.compile(r"(libc|libm|libpthread|librt|libdl|libgcc_s|libstdc\+\+|ld-linux-[\w-]+)\.so\.\d+")
"""What it may be linked with."""
EPOCH = (2025, 1, 1, 0, 0, 0)
"""The time of all files, so that equal sources make equal wheels."""


def main(arguments: Sequence[str]) -> int:
    """Make it; 1 where it could not be made, with what was wrong on standard error."""
    parser = argparse.ArgumentParser(description="Make a wheel with compiled kernels.", allow_abbrev=False)
    parser.add_argument("folder", type=Path, help="where it goes")
    parser.add_argument("--machine", default=platform.machine(), help="kind of machine (default: this one's)")
    parser.add_argument("--compiler", default="g++", help="name of the C++ compiler (default: g++)")
    parser.add_argument("--isa", action="append", help="instruction set; may be repeated (default: all)")
    args = parser.parse_args(arguments)
    names = args.isa or compile_kernels.SETS["for_machine"](args.machine)
    with tempfile.TemporaryDirectory() as temporary:
        libraries = Path(temporary) / "libraries"
        more = ("-include", str(ROOT / "scripts" / "old_glibc.h"))
        failures = compile_kernels.compile_kernels(libraries, names, args.compiler, more, args.machine)
        files = {f"lib_{_isa(path)}.so": path for path in sorted(libraries.glob("lib_*.so"))}
        problems = [*failures.values(), *(text for path in files.values() for text in beyond_policy(path))]
        if problems or not files:
            print(*(problems or ["no kernels were compiled"]), sep="\n", file=sys.stderr)
            return 1
        plain = _plain_wheel(Path(temporary))
        args.folder.mkdir(parents=True, exist_ok=True)
        print(_with_libraries(plain, files, args.folder, f"py3-none-{POLICY}_{args.machine}"))
    return 0


def _isa(path: Path) -> str:
    return path.name.partition(".")[0].removeprefix("lib_")


def beyond_policy(library: Path) -> list[str]:
    """What a library needs that machines of the policy need not have."""
    told = subprocess.run(["readelf", "-dVW", str(library)], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", told)
    versions = re.findall(r"Name: ([A-Z]+)_([0-9.]+)", told)
    found = [f"{library.name} needs {name}" for name in needed if not LIBRARIES.fullmatch(name)]
    for name, version in sorted(set(versions)):
        number = tuple(map(int, version.split(".")))
        if name not in NEWEST or number > NEWEST[name]:
            found.append(f"{library.name} needs {name}_{version}, which {POLICY} does not have")
    return found


def _plain_wheel(folder: Path) -> Path:
    """A wheel without kernels."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    subprocess.run(command, check=True, env=os.environ | {"QUIRE_KERNELS": "none"})
    [wheel] = folder.glob("quire_llm-*-py3-none-any.whl")
    return wheel


def _with_libraries(plain: Path, libraries: dict[str, Path], folder: Path, tag: str) -> Path:
    """A copy of a wheel with libraries more, for machines of one kind."""
    name = plain.name.replace("py3-none-any", tag)
    with zipfile.ZipFile(plain) as old, zipfile.ZipFile(folder / name, "w", zipfile.ZIP_DEFLATED) as new:
        contents = {entry: old.read(entry) for entry in old.namelist()}
        contents |= {f"quire/ops/cpu/{name}": path.read_bytes() for name, path in libraries.items()}
        [record] = [entry for entry in contents if entry.endswith(".dist-info/RECORD")]
        wheel = record.removesuffix("RECORD") + "WHEEL"
        text = contents[wheel].decode().replace("Root-Is-Purelib: true", "Root-Is-Purelib: false")
        contents[wheel] = text.replace("Tag: py3-none-any", f"Tag: {tag}").encode()
        rows = [f"{entry},{_digest(data)},{len(data)}" for entry, data in contents.items() if entry != record]
        contents[record] = ("\n".join([*rows, f"{record},,"]) + "\n").encode()
        for entry, data in contents.items():
            info = zipfile.ZipInfo(entry, EPOCH)
            info.external_attr, info.compress_type = 0o644 << 16, zipfile.ZIP_DEFLATED
            new.writestr(info, data)
    return folder / name


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
