"""Two networks on this machine, each with a machine of its own as far as sockets know, and a cable between them."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

CLONE_NEWNET = 0x40000000


def ip(*arguments: str) -> None:
    """iproute2's command.

    Raises:
        CalledProcessError: it does not do so.
    """
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Networks:
    """Network namespaces, joined by a pair of virtual interfaces.

    Attributes:
        names: of the namespaces.
        addresses: of the machine in each of them.
        cables: the end of the cable in each.
    """

    addresses = "10.77.0.1", "10.77.0.2"

    def __init__(self) -> None:
        self.names = f"quire-{os.getpid()}-a", f"quire-{os.getpid()}-b"
        self.cables = f"q{os.getpid()}a", f"q{os.getpid()}b"
        self._threads: list[ThreadPoolExecutor] = []

    def open(self) -> None:
        """Make them.

        Raises:
            CalledProcessError: that is not allowed here.
        """
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, self.addresses, strict=True):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", cable)
            ip("-n", name, "link", "set", cable, "up")
            ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        """End the threads, and the namespaces once no process is left there."""
        for threads in self._threads:
            threads.shutdown()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def thread(self, side: int) -> ThreadPoolExecutor:
        """A thread in one of the networks: what it starts, threads and processes, is there as well. It lives as long as
        the networks, since processes that it has started may end with it."""
        threads = ThreadPoolExecutor(1, f"network-{side}", lambda: enter(self.names[side]))
        self._threads.append(threads)
        return threads

    def pull(self) -> None:
        """The cable: nothing comes through, and nobody is told."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "down")

    def plug(self) -> None:
        """The cable in again."""
        ip("-n", self.names[0], "link", "set", self.cables[0], "up")


def enter(name: str) -> None:
    """Bring the calling thread into a network namespace."""
    with open(f"/var/run/netns/{name}") as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter network {name}")


@pytest.fixture
def networks() -> Iterator[Networks]:
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("network namespaces need root, and iproute2")
    made = Networks()
    try:
        try:
            made.open()
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr}")
        yield made
    finally:
        made.close()
