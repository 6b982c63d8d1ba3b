"""Dot products of bytes where AVX-VNNI multiplies them: emulated here, and compiled for a processor that has it."""

from __future__ import annotations

import ctypes
import platform
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from quire.ops.cpu.instruction_sets import INSTRUCTION_SETS, cpu_flags
from tests.compiled import CPP, compiled

pytestmark = [
    pytest.mark.skipif(platform.machine() != "x86_64", reason="an instruction of x86_64"),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler (g++)"),
]


def made(name: str, isa: str, *more: str) -> Path:
    flags = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-psabi", "-Werror", *INSTRUCTION_SETS[isa].options, *more]
    return compiled(name, [CPP / "dots.cpp"], flags)


def add_dots(library: Path, sums: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """sums [n, 16] + the dot products of a and b [n, 16, 4]."""
    sums = sums.clone()
    ctypes.CDLL(str(library)).add_dots(*map(ctypes.c_void_p, addresses(sums, a, b)), ctypes.c_int64(len(sums)))
    return sums


def addresses(*tensors: torch.Tensor) -> Sequence[int]:
    return [tensor.data_ptr() for tensor in tensors]


@pytest.mark.skipif(not INSTRUCTION_SETS["avx2"].needs <= cpu_flags(), reason="this machine has no AVX2")
def test_sums_of_products_of_bytes_are_exact() -> None:
    source = torch.Generator().manual_seed(0)
    a = torch.randint(0, 256, (500, 16, 4), generator=source, dtype=torch.uint8)
    b = torch.randint(-127, 128, (500, 16, 4), generator=source, dtype=torch.int8)
    sums = torch.randint(-(2**24), 2**24, (500, 16), generator=source, dtype=torch.int32)
    a[:2], b[0], b[1] = 255, 127, -127
    expected = sums + (a.int() * b.int()).sum(-1)
    emulated = made("libdots_emulated", "avx2", "-DQUIRE_EMULATE_VNNI", "-shared", "-fPIC")
    assert torch.equal(add_dots(emulated, sums, a, b), expected)
    assert torch.equal(add_dots(made("libdots_avx2", "avx2", "-shared", "-fPIC"), sums, a, b), expected)


def test_avx_vnni_multiplies_in_one_instruction() -> None:
    text = made("dots_avx_vnni", "avx_vnni", "-S").read_text()
    assert text.count("{vex} vpdpbusd") >= 2 and "vpmaddwd" not in text and "%zmm" not in text
