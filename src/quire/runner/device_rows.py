"""A matrix on the device with a row for each request that needs one."""

from __future__ import annotations

import torch

from quire.runner.device import Device


class DeviceRows:
    """A matrix with a row for each request that needs one; it doubles when all rows are in use.

    Args:
        vocab_size: number of columns.
        dtype: the matrix's.
        device: the matrix's; all work is queued there, in order.

    Attributes:
        matrix: [1 + requests, vocab]; the first row belongs to no request.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: Device) -> None:
        self._device = device
        self._free: list[int] = []
        with device.active():
            self.matrix = torch.zeros(1, vocab_size, dtype=dtype, device=device.torch)

    def take_row(self) -> int:
        """A free row, with undefined contents."""
        if not self._free:
            rows, vocab = self.matrix.shape
            grown = max(2 * rows, 8)
            self.matrix = torch.cat([self.matrix, self.matrix.new_zeros(grown - rows, vocab)])
            self._free = list(range(rows, grown))
        return self._free.pop()

    def end(self, row: int) -> None:
        """Free a row; row 0 is ignored."""
        if row:
            self._free.append(row)
