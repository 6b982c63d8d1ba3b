"""Counts for penalties: how often each token occurs in a request's prompt and output.

There are two implementations with the same interface, for two kinds of kernels. On a CPU they read lists of the tokens
that occur (`Lists`), since a row of the vocabulary's width would cost up to 30 times as much. On a GPU they read a
matrix (`History`), in which a step can count its tokens before the host knows them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo
from quire.ops.logit_edits import IN_OUTPUT, IN_PROMPT, History, Lists, count_tokens, list_arrays
from quire.runner.device import Device
from quire.runner.device_rows import DeviceRows

_NOTHING_SEEN = np.zeros(0, np.int64), np.zeros(0, np.float32)


def has_penalties(info: RequestInfo) -> bool:
    """Whether the request has penalties."""
    params = info.params
    repetition = params.repetition_penalty or 1.0
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or repetition != 1


class TokenCounts:
    """The distinct tokens of one request, in growing arrays, so that long texts are not converted in every step."""

    def __init__(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        counts = Counter(output)
        distinct = list(dict.fromkeys([*prompt, *output]))
        self._place = {token: i for i, token in enumerate(distinct)}
        self._ids = np.array(distinct, np.int64)
        self._counts = np.array([counts[token] for token in distinct], np.float32)

    def add(self, token: int) -> None:
        """Add the next output token."""
        place = self._place.setdefault(token, len(self._place))
        if place == len(self._ids):
            room = max(64, place)
            self._ids = np.concatenate([self._ids, np.zeros(room, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(room, np.float32)])
        self._ids[place] = token
        self._counts[place] += 1

    def with_drafts(self, drafts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The distinct tokens and their counts in the output, as if drafts were part of it."""
        count = len(self._place)
        ids, counts = self._ids[:count], self._counts[:count]
        if not drafts:
            return ids, counts
        new: dict[int, int] = {}
        places = []
        for token in drafts:
            place = self._place.get(token)
            places.append(new.setdefault(token, count + len(new)) if place is None else place)
        ids = np.concatenate([ids, np.array(list(new), np.int64)])
        counts = np.concatenate([counts, np.zeros(len(new), np.float32)])
        np.add.at(counts, places, 1)
        return ids, counts


class ListedPenalties:
    """The counts of all requests that have penalties, for kernels that read lists."""

    def __init__(self) -> None:
        self._counts: dict[int, TokenCounts] = {}  # by row
        self._next = 1

    def start(self, info: RequestInfo) -> int:
        """Add a request with its tokens so far; returns its row, or 0 without penalties."""
        if not has_penalties(info):
            return 0
        row, self._next = self._next, self._next + 1
        self._counts[row] = TokenCounts(info.prompt_token_ids, info.output_token_ids)
        return row

    def end(self, row: int) -> None:
        """The request has ended; 0 is ignored."""
        self._counts.pop(row, None)

    def arrays(self, rows: NDArray[np.int64], ahead: Sequence[Sequence[int]]) -> list[NDArray[np.generic]]:
        """The arrays to upload for `seen`, given rows and the drafts before each."""
        seen = [
            self._counts[row].with_drafts(drafts) if row else _NOTHING_SEEN
            for row, drafts in zip(rows.tolist(), ahead, strict=True)
        ]
        return list(list_arrays([ids for ids, _ in seen], [counts for _, counts in seen]))

    def seen(self, sent: Sequence[Tensor], drafts: Tensor | None) -> Lists:
        """See `Edits.seen`; given the tensors of `arrays`.

        Args:
            drafts: [rows, most] int64, the drafts before each row, padded with -1, if only the device knows them.
        """
        return Lists(*sent)

    def count(self, rows: NDArray[np.int64], tokens: Tensor) -> None:
        """Count the next output tokens of each row: [rows, most], padded with -1."""
        for row, line in zip(rows.tolist(), tokens.tolist(), strict=True) if rows.any() else ():
            self.add(row, [token for token in line if token >= 0])

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """Count the next output tokens of one row, given on the host; row 0 is ignored."""
        for token in tokens if row else ():
            self._counts[row].add(token)


class DevicePenalties(DeviceRows):
    """Counts on the device, where a step can count the tokens that it has sampled.

    A row has 4 bytes per token of the vocabulary (594 KiB for 151,936). A request without penalties has none.

    Attributes:
        matrix: see `History.counts`.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        super().__init__(vocab_size, torch.int32, device)

    def start(self, info: RequestInfo) -> int:
        """See `ListedPenalties`."""
        if not has_penalties(info):
            return 0
        row = self.take_row()
        values = dict.fromkeys(info.prompt_token_ids, IN_PROMPT)
        for token, times in Counter(info.output_token_ids).items():
            values[token] = values.get(token, 0) + IN_OUTPUT * times
        self.matrix[row] = 0
        ids, numbers = self._device.upload(np.array(list(values), np.int64), np.array(list(values.values()), np.int32))
        self.matrix[row].index_copy_(0, ids, numbers)
        return row

    def arrays(self, rows: NDArray[np.int64], ahead: Sequence[Sequence[int]]) -> list[NDArray[np.generic]]:
        """See `ListedPenalties`."""
        return [rows, padded(ahead)] if any(ahead) else [rows]

    def seen(self, sent: Sequence[Tensor], drafts: Tensor | None) -> History:
        """See `ListedPenalties`."""
        seen = History(self.matrix, sent[0])
        drafts = sent[1] if len(sent) > 1 else drafts
        return seen if drafts is None else self._with_drafts(seen, drafts)

    def _with_drafts(self, seen: History, drafts: Tensor) -> History:
        """A copy of the rows' history, as if the drafts [rows, most] before them were part of the output.

        Its first row belongs to no request, as in the original, for rows without penalties.
        """
        requests = torch.cat([seen.requests.new_zeros(1), seen.requests])
        history = History(self.matrix[requests], torch.arange(1, len(requests), device=self.matrix.device))
        of_rows = torch.where(seen.requests > 0, history.requests, 0)
        count_tokens(History(history.counts, of_rows.repeat_interleave(drafts.shape[1])), drafts.flatten())
        return history

    def count(self, rows: NDArray[np.int64], tokens: Tensor) -> None:
        """See `ListedPenalties`."""
        if rows.any():
            [places] = self._device.upload(rows)
            count_tokens(History(self.matrix, places.repeat_interleave(tokens.shape[1])), tokens.flatten())

    def add(self, row: int, tokens: Sequence[int]) -> None:
        """See `ListedPenalties`."""
        if row:
            [ids] = self._device.upload(np.array(tokens, np.int64))
            self.matrix[row].index_add_(0, ids, torch.full_like(ids, IN_OUTPUT, dtype=torch.int32))


def padded(drafts: Sequence[Sequence[int]]) -> NDArray[np.int64]:
    """What stands before some rows, as `Ahead.drafts`: [rows, longest]."""
    padded = np.full((len(drafts), max(map(len, drafts))), -1)
    for row, part in enumerate(drafts):
        padded[row, : len(part)] = part
    return padded
