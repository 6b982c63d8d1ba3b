"""Rows of one matrix on the device, one for each request that asks for one."""

from __future__ import annotations

import torch

from quire.runner.device import Device


class DeviceRows:
    """A row of one matrix for each request that asks for one; rows double when all are taken.

    Args:
        vocab_size: columns.
        dtype: of an entry.
        device: where they lie. What is done here is queued there, in the order of the calls.

    Attributes:
        matrix: [1 + requests, vocab]; the first row is no request's.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: Device) -> None:
        self._device = device
        self._free: list[int] = []
        with device.active():
            self.matrix = torch.zeros(1, vocab_size, dtype=dtype, device=device.torch)

    def take_row(self) -> int:
        """One that is free; what is in it is anything."""
        if not self._free:
            rows, vocab = self.matrix.shape
            grown = max(2 * rows, 8)
            self.matrix = torch.cat([self.matrix, self.matrix.new_zeros(grown - rows, vocab)])
            self._free = list(range(rows, grown))
        return self._free.pop()

    def end(self, row: int) -> None:
        """The request has ended; row 0 is no request's, and ignored."""
        if row:
            self._free.append(row)
