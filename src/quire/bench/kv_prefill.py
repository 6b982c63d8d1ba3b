"""A process that computes prompts for the engine that measures (`bench/kv.py`): an engine with `kv_role=prefill` alone,
without a server.
"""

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
"""For a model that has to be read from a slow disk."""

WAIT_SECONDS = 0.05
"""How long it waits for news while there is nothing to compute; it is woken at once."""


class Start(msgspec.Struct):
    """What the process is to do: run an engine, and say its address to `fd`."""

    config: dict[str, Any]
    fd: int


class Said(msgspec.Struct):
    """Where prompts are computed, and how long they may be; or why they are not."""

    address: str = ""
    most_tokens: int = 0
    error: str = ""


class PrefillProcess(msgspec.Struct):
    """Attributes:
    address: where its engine listens for others (`prefill_url`).
    key_file: the secret that it shares with them (`cluster_key_file`).
    most_tokens: of a prompt whose blocks it can keep.
    process: for tests.
    """

    address: str
    key_file: str
    most_tokens: int
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def prefill_process(options: Mapping[str, Any]) -> Iterator[PrefillProcess]:
    """Another process with an engine that computes prompts, with a cluster key of its own. It ends with this one.

    Args:
        options: fields of its `EngineConfig`, but for its role.

    Raises:
        ConfigError: it does not start, and says why.
        BenchmarkError: it says nothing.
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


# -- the process's side --------------------------------------------------------------------------------------


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
    """Take in what other engines want, and run a step; where there is none, wait for them."""
    tiers = engine.tiers
    tiers.exchange(engine.scheduler, WAIT_SECONDS if engine.idle else 0.0)
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
