"""What a request may want of its prompt instead of tokens: an embedding, or how likely some tokens come next.

Hidden states are summed as whole numbers: a sum of integers does not depend on the order of its terms, so a mean is the
same bits whatever the chunks of a prompt, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

UNIT = 2**24
"""Hidden states are counted in parts of 1: those of fp32 at 1, of bf16 much finer."""

MOST = 2**19
"""The largest hidden state that is counted. Sums of 2^20 rows, more than any context, stay within 64 bits."""

MAX_LABELS = 64


class PoolingParams(msgspec.Struct, frozen=True):
    """How to pool a prompt.

    Attributes:
        method: "last": the hidden state of the last token; "mean": the mean of all tokens'; "labels": the
            log-probabilities of `label_token_ids` as the next token, in the raw distribution.
    """

    method: Literal["last", "mean", "labels"]
    label_token_ids: tuple[int, ...] = ()

    def pooled_rows(self, start: int, end: int, prompt: int) -> int:
        """How many of the last rows of a span are pooled, from position `start` to `end` of a prompt of so many."""
        if self.method == "mean":
            return end - start
        return 1 if end == prompt else 0

    def finished(self, pooled: Sequence[float], prompt: int) -> list[float]:
        """The result, of what has been pooled of a prompt of so many tokens."""
        if self.method == "labels":
            return [*pooled]
        unit = UNIT * (prompt if self.method == "mean" else 1)
        return [value / unit for value in pooled]
