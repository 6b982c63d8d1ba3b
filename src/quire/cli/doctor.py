"""Look at this machine: what Quire uses of it, whether its kernels keep their promise, and what is missing.

The exit code is 1 if something that Quire needs is missing or the self-test fails."""

from __future__ import annotations

import argparse
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from quire.devices import find_device

INSTRUCTION_SETS = (
    "avx2",
    "avx512f",
    "avx512_bf16",
    "avx512_vnni",
    "amx_tile",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "asimddp",
    "bf16",
)
"""Flags of /proc/cpuinfo that torch or the kernels can make use of; the last three are ARM's."""


def needed_packages() -> dict[str, str]:
    """What Quire's METADATA names, without extras: each package, and the oldest version that works."""
    matches = (re.match(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?[^;]*$", text) for text in metadata.requires("quire") or ())
    return {match[1]: match[2] or "0" for match in matches if match}


class Problem(msgspec.Struct, frozen=True):
    """Something missing or slow: what, and what to do. `fatal` means that Quire does not work without."""

    what: str
    remedy: str
    fatal: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `quire doctor`."""
    parser.usage = "quire doctor [--json] [--device DEVICE] [--cpu-kernels NAME]"
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="test this device's kernels (default: auto)"
    )
    parser.add_argument(
        "--cpu-kernels", default="auto", metavar="NAME", help="test these kernels: an instruction set, torch, or auto"
    )


def run(args: argparse.Namespace) -> int:
    """Print what was found; 1 if anything is fatal."""
    cpuinfo = _read("/proc/cpuinfo")
    versions = package_versions()
    report: dict[str, Any] = {
        "machine": machine(cpuinfo),
        "memory": memory(_read("/proc/meminfo")),
        "versions": {"quire": metadata.version("quire"), "python": platform.python_version(), **versions},
    }
    problems = missing_packages(versions)
    if not any(problem.fatal for problem in problems):
        report |= _of_torch(args.cpu_kernels, args.device)
        problems += unused_kernels() + unused_gpu()
        problems += slow_instruction_sets(report["machine"]["instruction_sets"])
        problems += _failed(report)
    report["problems"] = [msgspec.to_builtins(problem) for problem in problems]
    report["ok"] = not any(problem.fatal for problem in problems)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report, problems)
    return 0 if report["ok"] else 1


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def machine(cpuinfo: str) -> dict[str, Any]:
    """System, CPU, cores that this process may use, and instruction sets, from the text of /proc/cpuinfo."""
    name = re.search(r"^model name\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", cpuinfo, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    cores = set(re.findall(r"^physical id\s*:\s*(\d+)[\s\S]*?^core id\s*:\s*(\d+)", cpuinfo, re.MULTILINE))
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": name[1].strip() if name else platform.processor() or "unknown",
        "cores": len(cores) or usable,
        "usable_threads": usable,
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in present],
    }


def memory(meminfo: str) -> dict[str, int | None]:
    """Bytes in all, and bytes that could be taken now, from the text of /proc/meminfo; None where unknown."""

    def size(name: str) -> int | None:
        match = re.search(rf"^{name}:\s*(\d+) kB", meminfo, re.MULTILINE)
        return int(match[1]) * 1024 if match else None

    return {"total": size("MemTotal"), "available": size("MemAvailable")}


def package_versions() -> dict[str, str | None]:
    """The installed version of every package that Quire needs; None where it is not installed."""
    versions: dict[str, str | None] = {}
    for name in needed_packages():
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def missing_packages(versions: dict[str, str | None]) -> list[Problem]:
    """A fatal problem for every package that is not there or too old."""
    problems, needed = [], needed_packages()
    for name, version in versions.items():
        oldest = needed.get(name, "0")
        if version is None:
            problems.append(Problem(f"{name} is not installed", f"pip install {name}", fatal=True))
        elif _numbers(version) < _numbers(oldest):
            problems.append(Problem(f"{name} {version} is too old", f"pip install '{name}>={oldest}'", fatal=True))
    return problems


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, which is as much of it as minima have."""
    return tuple(map(int, re.match(r"[\d.]*", version)[0].strip(".").split(".")))  # type: ignore[index]


def slow_instruction_sets(present: list[str]) -> list[Problem]:
    """What the CPU lacks that would make bf16 fast: nothing that can be installed, but good to know."""
    if {"avx512_bf16", "amx_bf16", "bf16"} & set(present):
        return []
    return [
        Problem(
            "the CPU has no bf16 arithmetic (avx512_bf16, amx_bf16), so bfloat16 models run slowly",
            "try --dtype float32 and compare with 'quire bench'",
        )
    ]


def unused_kernels() -> list[Problem]:
    """Compiled kernels that would be the fastest here, and that are not there, or not right."""
    from quire.ops import lost_kernels

    lost = lost_kernels()
    return [Problem(lost.what, lost.remedy)] if lost else []


def unused_gpu() -> list[Problem]:
    """A GPU that Quire could use if torch could."""
    note = find_device()[1]
    return [Problem(note, "pip install torch (the build with CUDA)")] if note else []


def _of_torch(cpu_kernels: str, device: str) -> dict[str, Any]:
    """Device, threads, kernels, self-test and demo model: all that needs torch.

    Raises:
        ConfigError: these kernels were not built, or this machine cannot run them.
        DeviceError: the device is not there, or too old.
    """
    import torch

    from quire.models.hub import resolve
    from quire.ops import choose_kernels, self_test
    from quire.ops.cpu import library
    from quire.runner.device import open_device

    found = open_device(find_device()[0] if device == "auto" else device)
    kernels = choose_kernels(cpu_kernels, found.torch)
    demo = resolve("demo") / "model.safetensors"
    return {
        "device": found.describe(),
        "threads": torch.get_num_threads(),
        "torch_instruction_set": torch.backends.cpu.get_cpu_capability(),
        "kernels": {
            "built": list(library.built()),
            "usable": library.usable(),
            "chosen": kernels.name,
            "described": {
                str(dtype).removeprefix("torch."): kernels.describe(dtype)
                for dtype in (torch.bfloat16, torch.float16, torch.float32)
            },
        },
        "self_test": [
            {"name": check.name, "cases": check.cases, "passed": check.passed, "failures": list(check.failures)}
            for check in self_test.run(kernels)
        ],
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


def _print(report: dict[str, Any], problems: list[Problem]) -> None:
    from quire.cli.terminal import print_table

    print_table("Machine", _machine_rows(report), stderr=False)
    versions = report["versions"].items()
    print_table("Versions", [(name, version or "not installed") for name, version in versions], stderr=False)
    if "kernels" in report:
        print_table("Kernels", _kernel_rows(report["kernels"]), stderr=False)
        print_table("Row-invariance self-test", [_check_row(check) for check in report["self_test"]], stderr=False)
    for problem in problems:
        print(f"{'PROBLEM' if problem.fatal else 'note'}: {problem.what}\n  -> {problem.remedy}")
    print("Quire is ready." if report["ok"] else "Quire is not ready.", file=sys.stdout)


def _machine_rows(report: dict[str, Any]) -> list[tuple[str, str]]:
    found = report["machine"]
    rows = [
        ("system", found["system"]),
        ("CPU", found["cpu"]),
        ("cores", f"{found['cores']} ({found['usable_threads']} threads usable)"),
        ("instruction sets", ", ".join(found["instruction_sets"]) or "none that help"),
        ("memory", f"{_gib(report['memory']['available'])} free of {_gib(report['memory']['total'])}"),
    ]
    if "kernels" in report:
        demo = report["demo_model"]
        rows += [
            ("device", report["device"]),
            ("torch uses", f"{report['threads']} threads, {report['torch_instruction_set']}"),
            ("demo model", "present" if demo["present"] else f"missing: {demo['path']}"),
        ]
    return rows


def _kernel_rows(kernels: dict[str, Any]) -> list[tuple[str, str]]:
    names = [("built", kernels["built"]), ("usable here", kernels["usable"]), ("chosen", [kernels["chosen"]])]
    rows = [(name, ", ".join(sets) or "none: only plain torch") for name, sets in names]
    texts: dict[str, list[str]] = {}  # data types that have the same description stand in one row
    for dtype, text in kernels["described"].items():
        texts.setdefault(text, []).append(dtype)
    return rows + [(", ".join(dtypes), text) for text, dtypes in texts.items()]


def _check_row(check: dict[str, Any]) -> tuple[str, str]:
    bad = len(check["failures"])
    return check["name"], f"bit-equal in {check['cases']} cases" if not bad else f"DIFFERS in {bad} of {check['cases']}"


def _gib(size: int | None) -> str:
    return "unknown" if size is None else f"{size / 2**30:.1f} GiB"
