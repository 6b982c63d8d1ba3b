"""The requests' sampling parameters in one table, so that a step is prepared for all rows at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.step import RequestInfo
from quire.ops import sampling as ops
from quire.runner.drafts import Row

STATE = np.dtype(
    [
        ("next", np.int64),  # position of the next token
        ("stream", np.uint64),  # `noise_stream`
        ("accept", np.uint64),  # for rejection sampling
        ("resample", np.uint64),
        ("temperature", np.float32),  # 0: greedy
        ("log_min_p", np.float32),
        ("top_k", np.int64),
        ("top_p", np.float64),
        ("logprobs", np.int64),  # number of top tokens to report besides the sampled one; -1: nothing
        ("edited", np.bool_),
        ("plain", np.bool_),  # nothing is asked for but temperature and min-p
        ("repetition", np.float32),
        ("frequency", np.float32),
        ("presence", np.float32),
        ("history", np.int64),  # row of the penalties; 0: none
        ("mask", np.int64),  # row of the allowed tokens; 0: none
    ]
)
"""A row of the table."""

_STREAMS = {"stream": ops.Purpose.SAMPLE, "accept": ops.Purpose.ACCEPT, "resample": ops.Purpose.RESAMPLE}


class SamplingTable:
    """A row of `STATE` for each request.

    Attributes:
        rows: the table; it grows.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.rows = np.zeros(64, STATE)
        self._free = list(range(len(self.rows)))
        self._slots: dict[int, int] = {}

    def start(self, info: RequestInfo, edited: bool, history: int, mask: int) -> None:
        """Add a request.

        Args:
            edited: whether its logits are edited.
            history: its row in the penalties.
            mask: its row in the allowed tokens.
        """
        params = info.params.resolved()
        state = {
            "next": len(info.prompt_token_ids) + len(info.output_token_ids),
            **{name: ops.noise_stream(params.seed or 0, info.choice, purpose) for name, purpose in _STREAMS.items()},
            "temperature": 0.0 if params.greedy else params.temperature,
            "log_min_p": math.log(params.min_p) if params.min_p else -math.inf,
            "top_k": min(params.top_k or self._vocab_size, self._vocab_size),
            "top_p": params.top_p if params.top_p and params.top_p < 1 else math.inf,
            "logprobs": -1 if params.logprobs is None else params.logprobs,
            "edited": edited,
            "repetition": params.repetition_penalty or 1.0,
            "frequency": params.frequency_penalty,
            "presence": params.presence_penalty,
            "history": history,
            "mask": mask,
        }
        off = state["top_k"] == self._vocab_size and state["top_p"] == math.inf
        state["plain"] = off and params.logprobs is None and not edited
        if not self._free:
            self._free = list(range(len(self.rows), 2 * len(self.rows)))
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        slot = self._slots[info.request] = self._free.pop()
        self.rows[slot] = tuple(state[name] for name in STATE.names or ())

    def end(self, request: int) -> Any | None:
        """Remove a request; returns its row, or None if it is unknown."""
        slot = self._slots.pop(request, None)
        if slot is None:
            return None
        self._free.append(slot)
        return self.rows[slot]

    def slots(self, requests: Sequence[int]) -> NDArray[np.int64]:
        """The indices of the requests' rows."""
        return np.array([self._slots[request] for request in requests], np.int64)

    def next(self, places: Sequence[tuple[int, int]]) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """The indices and contents of rows, given (request, next position).

        Raises:
            ValueError: a request's next position is another one.
        """
        slots = self.slots([request for request, _ in places])
        state = self.rows[slots]
        expected = state["next"]
        if expected.tolist() != [position for _, position in places]:
            pairs = zip(places, expected, strict=True)
            request, position, right = next((*place, at) for place, at in pairs if place[1] != at)
            raise ValueError(f"request {request} samples position {position}, but its next is {right}")
        return slots, state

    def at(self, places: Sequence[tuple[int, int]]) -> NDArray[Any]:
        """Copies of the requests' rows, with these positions in `next`."""
        state = self.rows[self.slots([request for request, _ in places])]
        state["next"] = [position for _, position in places]
        return state

    def with_drafts(self, rows: Sequence[Row]) -> NDArray[Any]:
        """The same for positions after drafts; raises what `next` does."""
        self.next([(row.request, row.position - len(row.ahead)) for row in rows])
        return self.at([(row.request, row.position) for row in rows])


NUM_FILTER_ARRAYS = 5


def filter_arrays(state: NDArray[Any], positions: NDArray[np.int64] | None) -> list[NDArray[Any]]:
    """The arrays for `Filters`. The last one has the noise keys, in the shape of `positions` [..., rows]; without
    positions, the streams from which keys are made.
    """
    temperature = state["temperature"]
    if positions is None:
        keys = state["stream"].view(np.int64)
    elif temperature.any():
        keys = ops.noise_keys(state["stream"], positions)
    else:  # they are not used
        keys = np.zeros(positions.shape, np.int64)
    return [temperature, state["log_min_p"], state["top_k"], state["top_p"], keys]
