"""The prefill process of `bench/kv.py`: an engine with `kv_role=prefill`, without a server."""

from __future__ import annotations

import contextlib
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from quire.child import begin, python, spawn_quietly
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.errors import BenchmarkError, ConfigError
from quire.models.checkpoint import resolve

START_SECONDS = 600.0
"""Timeout for starting; long enough for a model on a slow disk."""

WAIT_SECONDS = 0.05
"""How long it waits for messages while idle; they wake it at once."""


class Start(msgspec.Struct):
    """The process's task: run an engine, and write its address to `fd`."""

    config: dict[str, Any]
    fd: int


class Said(msgspec.Struct):
    """The engine's address and longest prompt; or the error."""

    address: str = ""
    most_tokens: int = 0
    error: str = ""


class PrefillProcess(msgspec.Struct):
    """Attributes:
    address: where its engine listens (for `prefill_url`).
    key_file: the shared secret (for `cluster_key_file`).
    most_tokens: longest prompt whose blocks it can keep.
    process: for tests.
    """

    address: str
    key_file: str
    most_tokens: int
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def prefill_process(options: Mapping[str, Any]) -> Iterator[PrefillProcess]:
    """Start a process with a prefill engine, with a new cluster key. It ends with this process.

    Args:
        options: fields of its `EngineConfig`, except its role.

    Raises:
        ConfigError: it does not start; the message says why.
        BenchmarkError: it does not answer.
    """
    own, others = socket.socketpair()
    with own, others, tempfile.TemporaryDirectory(prefix="quire-bench-") as folder:
        key = Path(folder) / "cluster-key"
        key.touch(0o600)
        key.write_text(secrets.token_hex(32))
        config = {**options, "kv_role": "prefill", "kv_port": 0, "cluster_key_file": str(key)}
        process = spawn_quietly(
            python("quire.bench.kv_prefill"), Start(config, others.fileno()), fds=(others.fileno(),)
        )
        try:
            others.close()
            own.settimeout(START_SECONDS)
            with own.makefile("rb") as lines:
                line = lines.readline()
            said = msgspec.json.decode(line, type=Said) if line else Said(error="it has died")
            if said.error:
                raise ConfigError(f"the engine that is to compute prompts did not start: {said.error}")
            yield PrefillProcess(said.address, str(key), said.most_tokens, process)
        except TimeoutError as error:
            raise BenchmarkError(f"the other engine has not begun within {START_SECONDS:g} seconds") from error
        finally:
            process.kill()
            process.wait()


# -- in the process --------------------------------------------------------------------------------------


def main() -> None:
    start = begin(Start)
    with socket.socket(fileno=start.fd) as link:
        try:
            config = EngineConfig(**start.config)
            engine = Engine(replace(config, model=str(resolve(config.model, config.revision)), revision=None))
        except Exception as error:  # nobody reads its standard error
            link.sendall(msgspec.json.encode(Said(error=str(error))) + b"\n")
            return
        exporter, host = engine.tiers.exporter, engine.tiers.host
        if exporter is None or host is None:
            raise RuntimeError("an engine with kv_role=prefill exports nothing")
        slots = min(host.num_slots, engine.memory_plan.num_usable - 1)
        most = min(slots * engine.config.block_size, engine.max_model_len - 1)
        link.sendall(msgspec.json.encode(Said(str(exporter.address), most)) + b"\n")
        while True:
            serve(engine)


def serve(engine: Engine) -> None:
    """Take in messages from other engines, and run a step; if there is none to run, wait for messages."""
    tiers = engine.tiers
    tiers.exchange(WAIT_SECONDS if engine.idle else 0.0)
    engine.exchange()
    for number, want in tiers.to_compute:
        engine.add(Request(number, want.tokens, SamplingParams(seed=0).resolved(), max_tokens=0, scope=want.scope))
    tiers.to_compute.clear()
    for number in tiers.dropped:
        engine.abort(number)
    tiers.dropped.clear()
    ended = engine.take_updates() if engine.idle else engine.step()
    engine.prefilled([update.request for update in ended if update.finish_reason])


if __name__ == "__main__":
    main()
