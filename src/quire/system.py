"""Systems other than Linux: what is refused there, and what users are told."""

from __future__ import annotations

import sys

from quire.errors import ConfigError


def require_linux(what: str, system: str = sys.platform) -> None:
    """Refuse what uses calls that other systems do not have: `memfd_create`, `eventfd`, `/proc`.

    Raises:
        ConfigError: this is another system.
    """
    if system != "linux":
        raise ConfigError(f"{what} needs Linux, and this is {system}; leave it out, or use a machine with Linux")


def system_notes(system: str = sys.platform) -> list[str]:
    """What users should know about this system; nothing on Linux."""
    if system == "linux":
        return []
    return [
        f"this is {system}, where nothing was tested: Quire is made for Linux. The size of the KV cache follows from "
        "half of the memory that there is, since what is free is not known; no huge pages are asked for; and processes "
        "of a server that is killed (SIGKILL) may go on"
    ]
