"""docs/reading.md, which lists the files on the plain way from a prompt to its tokens, and the numbers it claims."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.ops.cpu import library

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(
    not library.usable(), reason="the plain way goes through the C++ kernels, which were not built here"
)
def test_the_list_to_read_is_that_of_the_files_that_run_and_its_numbers_are_right() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "reading.py"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
