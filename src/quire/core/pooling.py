"""Pooling: requests that want an embedding of their prompt, or the probabilities of some next tokens, instead of text.

Hidden states are summed as integers, whose sum does not depend on the order of its terms, so a mean has the same bits
whatever the chunks of a prompt, on every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

UNIT = 2**24
"""Hidden states are multiplied by this and rounded: 2^-24 is fp32's precision below 1, and much finer than bf16's."""

MOST = 2**19
"""Hidden states are clamped to this, so that sums of 2^20 rows, more than any context, stay within 64 bits."""

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
        """How many of the last rows of a span, from position `start` to `end` of the prompt, are pooled."""
        if self.method == "mean":
            return end - start
        return 1 if end == prompt else 0

    def finished(self, pooled: Sequence[float], prompt: int) -> list[float]:
        """The result, given the sum over a prompt's rows."""
        if self.method == "labels":
            return [*pooled]
        unit = UNIT * (prompt if self.method == "mean" else 1)
        return [value / unit for value in pooled]
