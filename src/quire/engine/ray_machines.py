"""Ray finds the other machines and starts `quire rank` on them. Nothing else goes through it: ranks communicate as they
do without Ray. Imported only when used, and `ray` with it (extra `ray`).
"""

from __future__ import annotations

import subprocess
import sys
from typing import Any

from quire.config import EngineConfig
from quire.curve import Address
from quire.errors import ConfigError

try:
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise ConfigError(f"distributed_executor_backend=ray needs Ray: {error}; pip install '.[ray]'") from error

PORTS = (
    "Ray listens on its own ports on all addresses, and anyone who reaches them can run programs; do not expose them "
    "to other networks"
)


def address() -> str:
    """This machine's address in Ray; connects to the cluster that Ray finds (`ray start`, RAY_ADDRESS)."""
    if not ray.is_initialized():
        ray.init(log_to_driver=False, include_dashboard=False)
    return str(ray.util.get_node_ip_address())


class Starter:
    """A Ray actor on another machine."""

    def run(self, address: str, token: bytes) -> int:
        """Run `quire rank` until the engine ends; returns its exit code."""
        command = [sys.executable, "-P", "-m", "quire.cli.main", "rank", "--join", address, "--once"]
        process = subprocess.Popen([*command, "--token-file", "/dev/stdin"], stdin=subprocess.PIPE)
        process.communicate(token)
        return process.returncode


class RayMachines:
    """Lets `nnodes` - 1 machines of the Ray cluster join the engine at an address; they leave when it ends.

    Raises:
        ConfigError: the cluster does not have that many machines.
    """

    def __init__(self, config: EngineConfig, address: Address, token: bytes) -> None:
        here = {"CPU": 1.0, f"node:{address.host}": 0.001}
        bundles = [here, *[{"CPU": 1.0}] * (config.nnodes - 1)]
        self._group = placement_group(bundles, strategy="STRICT_SPREAD")
        if not self._group.wait(config.join_timeout_s):
            remove_placement_group(self._group)
            raise ConfigError(
                f"nnodes={config.nnodes}: Ray did not have that many machines with a free CPU, including this one, "
                f"within {config.join_timeout_s:g} seconds (join_timeout_s); it has {len(ray.nodes())} machines"
            )
        self._ends: list[Any] = []
        self._actors = []
        for bundle in range(1, config.nnodes):
            where = PlacementGroupSchedulingStrategy(self._group, bundle)
            actor = ray.remote(num_cpus=1, scheduling_strategy=where)(Starter).remote()
            self._actors.append(actor)
            self._ends.append(actor.run.remote(str(address), token))

    def check(self) -> None:
        """Check that no machine has failed while joining.

        Raises:
            ConfigError: one has ended.
        """
        ended, _ = ray.wait(self._ends, timeout=0)
        if ended:
            try:
                how = f"ended with exit code {ray.get(ended[0])}"
            except Exception as error:
                how = f"could not be started: {error}"
            raise ConfigError(f"'quire rank' {how} on a machine of the Ray cluster; see Ray's worker log there")

    def close(self) -> None:
        """Release Ray's actors; the processes that they started end with the engine."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)
