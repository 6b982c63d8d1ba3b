"""Ranks that are placed by another program: torchrun's processes, or Ray's machines."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping

from quire.config import EngineConfig
from quire.curve import Address, read_token
from quire.engine.joining import Joining
from quire.errors import ConfigError

logger = logging.getLogger(__name__)

LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Environment variables that torchrun sets."""

TORCHRUN = (
    "torchrun's own store listens at MASTER_PORT on all addresses, without authentication; Quire does not use it, "
    "but let no other network reach it"
)


def placed(config: EngineConfig, environment: Mapping[str, str] = os.environ) -> EngineConfig:
    """The options with which this process runs the engine.

    With `ray`, Ray starts `quire rank` on other machines, and knows this one's address.
    With `external_launcher`, torchrun has started one process per rank, each of which counts as a machine: the first
    one runs the engine; every other one contributes a rank to it, and ends with it.

    Raises:
        ConfigError: Ray is not there; or the processes are not as many as the ranks, or were not started by torchrun.
        SystemExit: this process was not the first one, and the engine has ended.
    """
    if config.distributed_executor_backend == "ray":
        from quire.engine.ray_machines import address as address_of_ray

        found = address_of_ray()
        return dataclasses.replace(config, master_addr=found) if config.master_addr == "127.0.0.1" else config
    if missing := [name for name in LAUNCHED if not environment.get(name)]:
        raise ConfigError(
            f"distributed_executor_backend=external_launcher, but {missing[0]} is not set: start this program with "
            "torchrun, or leave the option out"
        )
    number, size, host = (environment[name] for name in LAUNCHED)
    if size != str(config.num_ranks):
        sizes = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        product = " x ".join(f"{getattr(config, name)} ({name})" for name in sizes)
        raise ConfigError(
            f"torchrun has started {size} processes (WORLD_SIZE) for {config.num_ranks} ranks: {product}; start one "
            "for each"
        )
    if config.nnodes not in (1, config.num_ranks):
        raise ConfigError(
            f"nnodes={config.nnodes}: torchrun has placed the processes already; leave it out, or leave out "
            "distributed_executor_backend=external_launcher"
        )
    if number == "0":
        return dataclasses.replace(config, nnodes=config.num_ranks, master_addr=host)
    address, token = Address(host, config.master_port), read_token(config.token_file or "", "token_file")
    Joining(address, token, 1, "", lambda what: logger.info("process %s of torchrun: %s", number, what)).run_once()
    raise SystemExit(0)


def notes_of(config: EngineConfig) -> list[str]:
    """Notes for the user about several machines and their ports."""
    address = Address(config.master_addr, config.master_port)
    notes = [
        f"the ranks are on {config.nnodes} machines; what passes between them goes through {address} alone (ZeroMQ "
        "with CURVE, keys made from the token)"
    ]
    if config.distributed_executor_backend == "external_launcher":
        notes.append(TORCHRUN)
    if config.distributed_executor_backend == "ray":
        from quire.engine.ray_machines import PORTS

        notes.append(PORTS)
    return notes
