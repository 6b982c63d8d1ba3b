"""Check this machine: what Quire uses, whether its kernels are deterministic, and what is missing.

--full tests every kernel, which takes a few seconds more. The exit code is 1 if a requirement is missing or the
self-test fails."""

from __future__ import annotations

import argparse
import os
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from quire.devices import find_device
from quire.errors import ConfigError
from quire.typed_json import BAD_JSON
from quire.version import __version__

INSTRUCTION_SETS = (
    "avx2",
    "avx_vnni",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "avx512vbmi",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "i8mm",
    "bf16",
)
"""Flags of /proc/cpuinfo that torch or the kernels can use; the last four are ARM's."""


@dataclass(frozen=True)
class Package:
    """A dependency: the oldest version that works, and the extra that needs it; "" if it is required."""

    name: str
    oldest: str
    extra: str = ""


def named_packages() -> list[Package]:
    """The packages in Quire's metadata, required ones first."""
    found = []
    for text in metadata.requires("quire-llm") or ():
        requirement, _, marker = text.partition(";")
        name, oldest = re.match(r"([\w.-]+)[^>]*(?:>=\s*([\d.]+))?", requirement).groups()  # type: ignore[union-attr]
        extra = re.search(r"""extra\s*==\s*["']([\w-]+)""", marker)
        found.append(Package(name, oldest or "0", extra[1] if extra else ""))
    return sorted(found, key=lambda package: bool(package.extra))


class Problem(msgspec.Struct, frozen=True):
    """Something missing or slow, and what to do about it. `fatal`: Quire does not work without it."""

    what: str
    remedy: str
    fatal: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire doctor`."""
    parser.usage = "quire doctor [--full] [--json] [--device DEVICE] [--cpu-kernels NAME] [--fleet FILE ...]"
    parser.add_argument("--full", action="store_true", help="try every kernel, not just the products of matrices")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="test this device's kernels (default: auto)"
    )
    parser.add_argument(
        "--cpu-kernels", default="auto", metavar="NAME", help="test these kernels: an instruction set, torch, or auto"
    )
    parser.add_argument(
        "--fleet",
        nargs="+",
        metavar="FILE",
        help="reports of several machines (quire doctor --json > FILE): say which kernels all of them have",
    )


def run(args: argparse.Namespace) -> int:
    """Print each finding as soon as it is known; returns 1 if any problem is fatal."""
    if args.fleet:
        return _compare(args.fleet, args.json)
    show: Show = (lambda name, value: None) if args.json else _show
    report: dict[str, Any] = _machine(show)
    packages = named_packages()
    report["versions"] = _versions(packages, show)
    problems = missing_packages(packages, report["versions"])
    if not any(problem.fatal for problem in problems):
        report |= _of_torch(args, show)
        problems += unused_kernels() + unused_gpu()
        problems += slow_instruction_sets(report["machine"]["instruction_sets"])
        problems += _failed(report)
    report["problems"] = [msgspec.to_builtins(problem) for problem in problems]
    report["ok"] = not any(problem.fatal for problem in problems)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        _close(problems, report["ok"], args.full)
    return 0 if report["ok"] else 1


def _compare(paths: Sequence[str], as_json: bool) -> int:
    """Print the kernels that each of these machines can use, and those with whose bits all can compute; returns 1 if
    there are none.

    Raises:
        ConfigError: a file is no report.
    """
    from quire.ops.cpu.instruction_sets import bits_of

    usable = {path: _usable_in(path) for path in paths}
    bits = [dict.fromkeys(map(bits_of, names)) for names in usable.values()]
    common = [name for name in bits[0] if all(name in others for others in bits)]
    if as_json:
        print(msgspec.json.encode({"machines": usable, "common": common}).decode())
        return 0 if common else 1
    for path, names in usable.items():
        _show(path, ", ".join(names) or "none")
    if common:
        same = sorted({name for names in usable.values() for name in names if bits_of(name) == common[0] != name})
        faster = f", or where there is {' or '.join(same)}, that: its bits are the same" if same else ""
        print(f"\nAll of them have {', '.join(common)}; for equal tokens give all servers --cpu-kernels ", end="")
        print(common[0] + faster)
    else:
        print("\nThey have no kernels in common; give all servers --cpu-kernels torch, and compare system_fingerprint")
    return 0 if common else 1


def _usable_in(path: str) -> list[str]:
    """The kernels that a report says its machine can use, the fastest first."""
    try:
        found = msgspec.json.decode(Path(path).read_bytes())["kernels"]["usable"]
        return [str(name) for name in found]
    except (OSError, *BAD_JSON, TypeError, KeyError) as error:
        raise ConfigError(
            f"{path} is not a report of 'quire doctor --json' ({type(error).__name__}); run that on each machine"
        ) from None


Show = Callable[[str, str], None]
"""Called with each finding: a name and a value, or a heading and ""."""


def _show(name: str, value: str) -> None:
    print(f"  {name:38} {value}" if value else name, flush=True)


def _machine(show: Show) -> dict[str, Any]:
    cpuinfo = _read("/proc/cpuinfo")
    found, size = machine(cpuinfo), memory(_read("/proc/meminfo"))
    show("Machine", "")
    show("system", found["system"])
    show("CPU", found["cpu"])
    show("cores", f"{found['cores']} ({found['usable_threads']} threads usable)")
    show("instruction sets", ", ".join(found["instruction_sets"]) or "none that help")
    show("memory", f"{_gib(size['available'])} free of {_gib(size['total'])}")
    return {"machine": found, "memory": size}


def _versions(packages: Sequence[Package], show: Show) -> dict[str, str | None]:
    versions: dict[str, str | None] = {"quire": __version__, "python": platform.python_version()}
    show("Packages", "")
    show("quire", f"{versions['quire']}, on Python {versions['python']}")
    for package in packages:
        found = versions[package.name] = installed(package)
        optional = f" (optional: pip install '.[{package.extra}]')" if package.extra else ""
        show(package.name, found or f"not installed{optional}")
    return versions


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_name(cpuinfo: str) -> str:
    """The processor's name, family and model, from the text of /proc/cpuinfo.

    In a virtual machine the name alone ("AMD EPYC") may be that of processors half as fast as one another.
    """
    keys = ("model name", "cpu family", "model")
    found = [re.search(rf"^{key}\s*:\s*(.+)$", cpuinfo, re.MULTILINE) for key in keys]
    name, family, model = [match[1].strip() if match else "" for match in found]
    name = name or platform.processor() or "unknown"
    return f"{name}, family {family} model {model}" if family and model else name


def machine(cpuinfo: str) -> dict[str, Any]:
    """System, CPU, cores usable by this process, and instruction sets, from the text of /proc/cpuinfo."""
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    cores = set(re.findall(r"^physical id\s*:\s*(\d+)[\s\S]*?^core id\s*:\s*(\d+)", cpuinfo, re.MULTILINE))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": cpu_name(cpuinfo),
        "cores": len(cores) or usable,
        "usable_threads": usable,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in present],
    }


def memory(meminfo: str) -> dict[str, int | None]:
    """Total and available bytes, from the text of /proc/meminfo; None if unknown."""

    def size(name: str) -> int | None:
        match = re.search(rf"^{name}:\s*(\d+) kB", meminfo, re.MULTILINE)
        return int(match[1]) * 1024 if match else None

    return {"total": size("MemTotal"), "available": size("MemAvailable")}


def installed(package: Package) -> str | None:
    """The installed version; None if it is not installed."""
    try:
        return metadata.version(package.name)
    except metadata.PackageNotFoundError:
        return None


def missing_packages(packages: Sequence[Package], versions: Mapping[str, str | None]) -> list[Problem]:
    """A problem for each package that is too old, or required and missing; fatal if it is required."""
    problems = []
    for package in packages:
        name, version, needed = package.name, versions[package.name], not package.extra
        if version is None and needed:
            problems.append(Problem(f"{name} is not installed", f"pip install {name}", fatal=True))
        elif version is not None and _numbers(version) < _numbers(package.oldest):
            remedy = f"pip install '{name}>={package.oldest}'"
            problems.append(Problem(f"{name} {version} is too old", remedy, fatal=needed))
    return problems


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers at the beginning of a version."""
    return tuple(map(int, re.match(r"[\d.]*", version)[0].strip(".").split(".")))  # type: ignore[index]


def slow_instruction_sets(present: list[str]) -> list[Problem]:
    """A note if the CPU has no instructions that make bf16 fast."""
    if {"avx512_bf16", "amx_bf16", "bf16"} & set(present):
        return []
    return [
        Problem(
            "the CPU has no bf16 arithmetic (avx512_bf16, amx_bf16), so bfloat16 models run slowly",
            "try --dtype float32 and compare with 'quire bench'",
        )
    ]


def unused_kernels() -> list[Problem]:
    """A problem if the fastest compiled kernels for this CPU are missing or wrong."""
    from quire.ops import lost_kernels

    lost = lost_kernels()
    return [Problem(lost.what, lost.remedy)] if lost else []


def unused_gpu() -> list[Problem]:
    """A problem if there is a GPU that torch cannot use."""
    note = find_device()[1]
    return [Problem(note, "pip install torch (the build with CUDA)")] if note else []


def _of_torch(args: argparse.Namespace, show: Show) -> dict[str, Any]:
    """Device, threads, kernels, self-test and demo model, which need torch.

    Raises:
        ConfigError: these kernels were not built, or this machine cannot run them.
        DeviceError: the device is missing, or too old.
    """
    show("Kernels", "")
    import torch

    from quire.models.hub import resolve
    from quire.ops import choose_kernels, self_test
    from quire.ops.cpu import library
    from quire.runner.device import open_device

    device = open_device(find_device()[0] if args.device == "auto" else args.device)
    capability = torch.backends.cpu.get_cpu_capability()
    show("device", device.describe())
    show("torch uses", f"{torch.get_num_threads()} threads, {capability}")
    kernels = choose_kernels(args.cpu_kernels, device.torch)
    dtypes = (torch.bfloat16, torch.float16, torch.float32)
    found = {
        "built": list(library.built()),
        "usable": library.usable(),
        "chosen": kernels.name,
        "described": {str(dtype).removeprefix("torch."): kernels.describe(dtype) for dtype in dtypes},
    }
    for name, value in _kernel_rows(found):
        show(name, value)
    demo = resolve("demo") / "model.safetensors"
    show("demo model", "present" if demo.is_file() else f"missing: {demo}")
    show("Self-test: are a row's bits independent of the other rows?", "")
    checks = []
    for check in self_test.run(kernels) if args.full else self_test.run_short(kernels):
        told = {"name": check.name, "cases": check.cases, "passed": check.passed, "failures": list(check.failures)}
        checks.append(told)
        show(*_check_row(told))
    if note := kernels.note():
        show("dense products", note)
    return {
        "device": device.describe(),
        "threads": torch.get_num_threads(),
        "torch_instruction_set": capability,
        "kernels": found,
        "self_test": checks,
        "products": note or None,
        "demo_model": {"path": str(demo), "present": demo.is_file()},
    }


def _failed(report: dict[str, Any]) -> list[Problem]:
    problems = []
    for check in report["self_test"]:
        if not check["passed"]:
            name, bad, cases = check["name"], len(check["failures"]), check["cases"]
            what = f"row-invariance self-test: {name} differs in {bad} of {cases} cases"
            remedy = "results may depend on what else runs; report it with the output of 'quire doctor --json'"
            problems.append(Problem(what, remedy, fatal=True))
    if not report["demo_model"]["present"]:
        remedy = "install Quire again, or train it: python scripts/train_demo.py"
        problems.append(Problem("the demo model is not there", remedy))
    return problems


def _close(problems: Sequence[Problem], ok: bool, full: bool) -> None:
    for problem in problems:
        print(f"{'PROBLEM' if problem.fatal else 'note'}: {problem.what}\n  -> {problem.remedy}")
    if ok and not full:
        print("'quire doctor --full' tests every kernel.")
    print("Quire is ready." if ok else "Quire is not ready.")


def _kernel_rows(kernels: dict[str, Any]) -> list[tuple[str, str]]:
    names = [("built", kernels["built"]), ("usable here", kernels["usable"]), ("chosen", [kernels["chosen"]])]
    rows = [(name, ", ".join(sets) or "none: only plain torch") for name, sets in names]
    texts: dict[str, list[str]] = {}  # data types with the same description share a row
    for dtype, text in kernels["described"].items():
        texts.setdefault(text, []).append(dtype)
    return rows + [(", ".join(dtypes), text) for text, dtypes in texts.items()]


def _check_row(check: dict[str, Any]) -> tuple[str, str]:
    bad = len(check["failures"])
    return check["name"], f"bit-equal in {check['cases']} cases" if not bad else f"DIFFERS in {bad} of {check['cases']}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
