"""How fast a GPU's clocks run while something is measured: a figure at a lower clock is one of another device."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass, field
from typing import Any

BETWEEN_SECONDS = 3.0

FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
"""What nvidia-smi is asked for; the last is a mask, of which bit 0 says that the device is idle."""

IDLE = 1


@dataclass
class Looks:
    """Looks at the first GPU every few seconds; nothing is found where there is no nvidia-smi.

    Attributes:
        found: least and greatest clock of the multiprocessors and of the memory in MHz, greatest temperature in degrees
            Celsius and power in W, and all reasons that held the clocks down, as a mask.
    """

    found: dict[str, Any] = field(default_factory=dict)
    _next: float = 0.0

    def look(self) -> None:
        """Look once more, if it is time; returns within a second."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + BETWEEN_SECONDS
        command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        try:
            text = subprocess.run(command, capture_output=True, text=True, timeout=1).stdout
            self.take(text)
        except (OSError, ValueError, subprocess.TimeoutExpired):
            self._next = float("inf")  # it would be no better the next time

    def take(self, text: str) -> None:
        """What nvidia-smi has printed. Raises ValueError if it is something else."""
        sm, memory, temperature, power, reasons = (part.strip() for part in text.strip().split(","))
        mask = int(reasons, 16)
        if mask & IDLE:  # between two sections, or while one starts
            return
        now = {"sm": float(sm), "memory": float(memory), "temperature": float(temperature), "power": float(power)}
        for name in ("sm", "memory"):
            self.found[f"least_{name}"] = min(self.found.get(f"least_{name}", now[name]), now[name])
        for name, value in now.items():
            self.found[f"most_{name}"] = max(self.found.get(f"most_{name}", value), value)
        self.found["reasons"] = self.found.get("reasons", 0) | mask
