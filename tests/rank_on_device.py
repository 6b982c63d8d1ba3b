"""The program of a rank whose device is a `DelayedDevice`: what `quire.engine.rank` is on a GPU."""

from __future__ import annotations

import os
from unittest import mock

from quire.engine import loading, rank
from quire.runner import device
from tests.devices import DelayedDevice, SpanKernels

if __name__ == "__main__":
    with (
        mock.patch.object(device, "open_device", lambda kind, number: DelayedDevice()),
        mock.patch.object(loading, "choose_kernels", lambda *args: SpanKernels()),
    ):
        code = rank.main()
    os._exit(code)
