"""A rank whose device is a `DelayedDevice`: what `quire.engine.rank` is on a GPU."""

from __future__ import annotations

from unittest import mock

from quire.engine import loading, rank
from quire.runner import device
from tests.devices import DelayedDevice, SpanKernels


def main() -> int:
    with (
        mock.patch.object(device, "open_device", lambda kind, number: DelayedDevice()),
        mock.patch.object(loading, "choose_kernels", lambda *args: SpanKernels()),
    ):
        return rank.main()
