"""Mooncake Store's master, on a port of the tests' own."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.http_tools import free_port
from tests.redis_server import listening


def _why_not() -> str:
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        return f"Mooncake Store cannot be loaded ({error}): pip install '.[mooncake]', and libibverbs1"
    return ""


WHY_NOT = _why_not()
needs_mooncake_store = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "it is there")


@contextlib.contextmanager
def mooncake_master() -> Iterator[str]:
    """The URL of one."""
    module = importlib.import_module("mooncake.store")
    binary = Path(str(module.__file__)).with_name("mooncake_master")
    port, metrics = free_port(), free_port()
    options = [f"-rpc_port={port}", f"-metrics_port={metrics}", "-enable_metric_reporting=false"]
    process = subprocess.Popen([str(binary), *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        listening(port, process)
        yield f"mooncake://127.0.0.1:{port}?memory=64MiB"
    finally:
        process.kill()
        process.wait()
