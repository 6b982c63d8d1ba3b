"""What is kept of a request's tokens: how often each stands in its text, for penalties, and which may be sampled."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.ops.logit_edits import IN_OUTPUT, IN_PROMPT, History, count_tokens
from quire.runner.device import Device


class TokenCounts:
    """The different tokens of one request, on the host.

    Kept as arrays that grow, so that a step does not convert a long history again.
    """

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        counts = Counter(output)
        distinct = list(dict.fromkeys([*prompt, *output]))
        self._place = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, np.int64)
        self._counts = np.array([counts[token] for token in distinct], np.float32)

    def add(self, token: int) -> None:
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    @property
    def ids(self) -> NDArray[np.int64]:
        """Each different token of prompt and output once."""
        return self._ids[: len(self._place)]

    @property
    def counts(self) -> NDArray[np.float32]:
        """How often each of `ids` stands in the output."""
        return self._counts[: len(self._place)]

    def behind(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """`ids` and `counts` as they would be if the drafts were tokens of the output."""
        if not drafts:
            return self.ids, self.counts
        new: dict[int, int] = {}
        places = []
        for token in drafts:
            place = self._place.get(token)
            places.append(new.setdefault(token, len(self._place) + len(new)) if place is None else place)
        ids = np.concatenate([self.ids, np.array(list(new), np.int64)])
        counts = np.concatenate([self.counts, np.zeros(len(new), np.float32)])
        np.add.at(counts, places, 1)
        return ids, counts


class _DeviceRows:
    """A row of one matrix for each request that asks for one; rows double when all are taken.

    Args:
        vocab_size: columns.
        dtype: of an entry.
        device: where they lie. What is done here is queued there, in the order of the calls.
    """

    def __init__(self, vocab_size: int, dtype: torch.dtype, device: Device) -> None:
        self._device = device
        self._free: list[int] = []
        with device.active():
            self._rows = torch.zeros(1, vocab_size, dtype=dtype, device=device.torch)  # the first is nobody's

    def _take(self) -> int:
        if not self._free:
            rows, vocab = self._rows.shape
            grown = max(2 * rows, 8)
            self._rows = torch.cat([self._rows, self._rows.new_zeros(grown - rows, vocab)])
            self._free = list(range(rows, grown))
        return self._free.pop()

    def give_back(self, row: int) -> None:
        """The request has ended; 0 is nobody's row, and ignored."""
        if row:
            self._free.append(row)


class DeviceMasks(_DeviceRows):
    """Which tokens may be sampled, of all requests that allow but some; 4 bytes a token (594 KiB for 151,936).

    They are made and sent once a request, since a step would take longer to do so than to sample.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        super().__init__(vocab_size, torch.float32, device)
        with device.active():
            self._rows.fill_(torch.inf)

    @property
    def masks(self) -> Tensor:
        """[1 + requests, vocab] fp32: see `logit_edits.Masks`."""
        return self._rows

    def take(self, allowed: Collection[int]) -> int:
        """A row that masks all but these; 0 where there are none."""
        if not allowed:
            return 0
        row = self._take()
        [ids] = self._device.upload(np.fromiter(allowed, np.int64, len(allowed)))
        self._rows[row] = -torch.inf
        self._rows[row].scatter_(0, ids, torch.inf)
        return row


class DeviceCounts(_DeviceRows):
    """The tokens of all requests that have penalties, on the device, where a step can count what it has sampled.

    A row has 4 bytes a token of the vocabulary (594 KiB for 151,936). A request without penalties takes none.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        super().__init__(vocab_size, torch.int32, device)

    @property
    def counts(self) -> Tensor:
        """[1 + requests, vocab] int32: see `logit_edits.History`."""
        return self._rows

    def take(self, prompt: Sequence[int], output: Sequence[int]) -> int:
        """A row with the tokens of a request so far."""
        row = self._take()
        values = dict.fromkeys(prompt, IN_PROMPT)
        for token, times in Counter(output).items():
            values[token] = values.get(token, 0) + IN_OUTPUT * times
        self.counts[row] = 0
        ids, numbers = self._device.upload(np.array(list(values), np.int64), np.array(list(values.values()), np.int32))
        self.counts[row].index_copy_(0, ids, numbers)
        return row

    def behind(self, seen: History, drafts: Tensor) -> History:
        """The history of rows that have drafts before them, as if these were tokens of the output; a copy.

        Its first row is nobody's, as in the original, so that rows without penalties stay without.

        Args:
            drafts: [rows, most] int64, -1 where a row has fewer.
        """
        requests = torch.cat([seen.requests.new_zeros(1), seen.requests])
        history = History(self.counts[requests], torch.arange(1, len(requests), device=self.counts.device))
        of_rows = torch.where(seen.requests > 0, history.requests, 0)
        count_tokens(History(history.counts, of_rows.repeat_interleave(drafts.shape[1])), drafts.flatten())
        return history

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Count tokens as the next of a row's output."""
        [ids] = self._device.upload(np.array(tokens, np.int64))
        self.counts[row].index_add_(0, ids, torch.full_like(ids, IN_OUTPUT, dtype=torch.int32))


def padded(drafts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """What stands before some rows, as `DeviceCounts.behind` takes it: [rows, longest]."""
    padded = np.full((len(drafts), max(map(len, drafts))), -1)
    for row, part in enumerate(drafts):
        padded[row, : len(part)] = part
    return padded
