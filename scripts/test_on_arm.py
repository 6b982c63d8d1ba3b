"""Runs tests as an ARM machine would, under QEMU's emulation of one: `make test-arm`.

Nothing is installed: Debian's Python for arm64 is unpacked into build/arm/root, and the wheels for aarch64 beside
it (some 600 MB, fetched once). The kernels are cross-compiled at every run. Needs Debian 12 or what has its tools,
with the packages qemu-user and g++-aarch64-linux-gnu, and Python 3.11, which is that Debian's.

    python scripts/test_on_arm.py tests/test_cpu_rows.py -x                    # arguments are pytest's
    python scripts/test_on_arm.py --cpu cortex-a72 tests/test_cpu_rows.py      # an older processor, with fewer sets
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import compile_kernels
import stand_ins_for_cuda

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "build" / "arm"
SYSTEM, SITE, TREE = FOLDER / "root", FOLDER / "site", FOLDER / "tree"

TESTS = ("tests/test_cpu_*.py", "tests/test_ops*.py")

COPIED = ("src", "tests", "scripts", "benchmarks")
"""What those tests import, and read."""

DEBIAN_PACKAGES = (
    *("libc6", "libgcc-s1", "libstdc++6", "libgomp1", "zlib1g", "libbz2-1.0", "liblzma5", "libssl3", "libexpat1"),
    *("libffi8", "libuuid1", "libsqlite3-0", "libdb5.3", "libcrypt1"),
    *("libpython3.11-minimal", "python3.11-minimal", "libpython3.11-stdlib"),
)

OLDEST = "fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid"
FEATURES = {
    "max,sve=off,sme=off": f"{OLDEST} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp i8mm bf16",
    "neoverse-n1": f"{OLDEST} atomics fphp asimdhp asimdrdm lrcpc dcpop asimddp",
    "cortex-a72": OLDEST,
}
"""Of what QEMU emulates, as /proc/cpuinfo tells them. The first has all that kernels are compiled for."""

PROCESSOR = """\
processor\t: {number}
BogoMIPS\t: 100.00
Features\t: {features}
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x4
CPU part\t: 0xd0c
CPU revision\t: 1

"""


def main(arguments: Sequence[str]) -> int:
    """pytest's exit code."""
    for tool in ("apt-get", "dpkg", "qemu-aarch64", "aarch64-linux-gnu-g++"):
        if not shutil.which(tool):
            print(f"{tool} is not there: on Debian, apt-get install qemu-user g++-aarch64-linux-gnu", file=sys.stderr)
            return 1
    if sys.version_info[:2] != (3, 11):
        print("the arm64 Python is 3.11, and pip fetches for its own version: use Python 3.11", file=sys.stderr)
        return 1
    _once(SYSTEM, _unpack_system)
    _once(SITE, _unpack_wheels)
    shutil.rmtree(TREE, ignore_errors=True)
    for name in COPIED:
        shutil.copytree(ROOT / name, TREE / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", TREE)
    options = ["--compiler", "aarch64-linux-gnu-g++", "--machine", "aarch64", "--", "-Werror"]
    if status := compile_kernels.main([str(TREE / "src" / "quire" / "ops" / "cpu"), *options]):
        return status
    cpu = next(iter(FEATURES))
    if arguments[:1] == ["--cpu"]:
        if arguments[1:2] not in [[name] for name in FEATURES]:
            print(f"--cpu: {' '.join(arguments[1:2])!r} is not known; allowed: {', '.join(FEATURES)}", file=sys.stderr)
            return 2
        cpu, arguments = arguments[1], arguments[2:]
    # QEMU shows it in place of the host's: torch and Quire read it.
    processors = (PROCESSOR.format(number=number, features=FEATURES[cpu]) for number in range(2))
    (SYSTEM / "proc/cpuinfo").write_text("".join(processors))
    tests = arguments or sorted(str(path.relative_to(TREE)) for pattern in TESTS for path in TREE.glob(pattern))
    python = ["qemu-aarch64", "-cpu", cpu, "-L", str(SYSTEM), "-E", f"PYTHONPATH={TREE / 'src'}:{SITE}"]
    python += [str(SYSTEM / "usr/bin/python3.11"), "-B", "-m", "pytest", "-o", "timeout=3600", "-p", "no:cacheprovider"]
    return subprocess.run([*python, *tests], cwd=TREE).returncode


def _once(folder: Path, make: Callable[[Path], None]) -> None:
    """Make a folder unless it is there; one that was left half done does not count."""
    if not folder.exists():
        unfinished = folder.with_suffix(".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        unfinished.mkdir(parents=True)
        make(unfinished)
        unfinished.rename(folder)


def _unpack_system(folder: Path) -> None:
    """Debian's arm64 Python, by apt-get with lists and a cache of its own, and what a kernel tells of its processor."""
    apt = FOLDER / "apt"
    for name in ("lists/partial", "cache/archives/partial", "packages"):
        (apt / name).mkdir(parents=True, exist_ok=True)
    settings = {
        "APT::Architecture": "arm64",
        "APT::Architectures": "arm64",
        "APT::Sandbox::User": "",
        "Dir::State::lists": apt / "lists",
        "Dir::State::status": "/dev/null",
        "Dir::Cache": apt / "cache",
    }
    command = ["apt-get", "-qq", *(f"-o{name}={value}" for name, value in settings.items())]
    subprocess.run([*command, "update"], check=True)
    subprocess.run([*command, "download", *DEBIAN_PACKAGES], check=True, cwd=apt / "packages")
    for package in sorted((apt / "packages").glob("*.deb")):
        subprocess.run(["dpkg", "-x", str(package), str(folder)], check=True)
    (folder / "proc").mkdir()
    identification = folder / "sys/devices/system/cpu/cpu0/regs/identification"
    identification.mkdir(parents=True)
    (identification / "midr_el1").write_text("0x00000000413fd0c1\n")


def _unpack_wheels(folder: Path) -> None:
    """What Quire and its tests need, for aarch64, in the versions of `requirements`."""
    platforms = [f"--platform=manylinux_{version}_aarch64" for version in ("2_17", "2_27", "2_28", "2_31")]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--target", str(folder)]
    pip += ["--no-deps", "--no-compile", "--only-binary", ":all:", "--platform=manylinux2014_aarch64", *platforms]
    for name in ("runtime", "dev", "torch"):
        subprocess.run([*pip, "-r", str(ROOT / "requirements" / f"{name}.txt")], check=True)
    stand_ins_for_cuda.make(folder / "torch", SYSTEM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
