"""Systems other than Linux, as far as Linux can stand in for one: what works without what only Linux has, and what is
refused by name."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.system import require_linux, system_notes

ELSEWHERE = """
import builtins, io, json, os, sys, sysconfig
import numpy, tokenizers, torch, uvloop, zmq

sysconfig.get_config_vars()  # of this interpreter
sys.platform = "darwin"
for name in ("memfd_create", "eventfd", "eventfd_write", "posix_fadvise", "MFD_CLOEXEC", "EFD_NONBLOCK", "O_PATH"):
    delattr(os, name)
real = io.open

def guarded(file, *args, **kwargs):
    if str(file).startswith(("/proc", "/sys")):
        raise FileNotFoundError(2, "there is none", str(file))
    return real(file, *args, **kwargs)

io.open = builtins.open = guarded

from quire import LLM, SamplingParams
from quire.errors import ConfigError

with LLM("demo", threads=1, cpu_kernels="torch") as llm:
    [output] = llm.generate("def f", SamplingParams(max_tokens=8, temperature=0.0))
    found = {"tokens": output.outputs[0].token_ids, "notes": list(llm.notes), "refused": []}
shared = {"kv_role": "decode"}
for options in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 3}, shared):
    try:
        LLM("demo", **options)
    except ConfigError as error:
        found["refused"].append(str(error))
print(json.dumps(found))
"""


def test_one_engine_runs_without_what_only_linux_has_and_what_needs_it_is_refused() -> None:
    done = subprocess.run([sys.executable, "-c", ELSEWHERE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    with LLM("demo", threads=1, cpu_kernels="torch") as llm:
        [here] = llm.generate("def f", SamplingParams(max_tokens=8, temperature=0.0))
        assert not any("Linux" in note for note in llm.notes)
    assert found["tokens"] == here.outputs[0].token_ids
    assert any("this is darwin, where nothing was tested" in note for note in found["notes"])
    ranks, stages, shared = found["refused"]
    assert ranks.startswith("an engine of 2 ranks needs Linux, and this is darwin")
    assert stages.startswith("an engine of 3 ranks needs Linux")
    assert shared.startswith("kv_role=decode needs Linux")


def test_on_linux_nothing_is_refused_or_said() -> None:
    require_linux("quire rank")
    assert system_notes() == []
    with pytest.raises(ConfigError, match=r"^quire rank needs Linux, and this is freebsd14; leave it out, or use"):
        require_linux("quire rank", "freebsd14")


def test_an_import_where_there_is_no_posix_says_what_to_do() -> None:
    code = "import ctypes, os, pathlib, importlib.metadata\nos.name = 'nt'\nimport quire"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert done.stderr.strip().splitlines()[-1] == "ImportError: Quire needs Linux; on Windows, install it in WSL 2"
