"""What the sampler keeps of a request whose logits are edited: penalties, bias, masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.step import RequestInfo
from quire.runner.token_counts import TokenCounts

_NO_IDS = np.zeros(0, np.int64)
_NO_VALUES = np.zeros(0, np.float32)


@dataclass(slots=True)
class Edited:
    """What the sampler keeps of a request whose logits are edited, beside its row of the table.

    Attributes:
        prompt_length: tokens before the output.
        known: tokens of prompt and output that the host knows of.
        output: tokens so far; kept only for `bad_words`.
        counts: for penalties; None: there are none, or the device counts.
        stop_ids: banned before `min_tokens`.
    """

    prompt_length: int
    known: int
    output: list[int]
    counts: TokenCounts | None
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    stop_ids: list[int]
    min_tokens: int
    bad_words: list[list[int]]

    @property
    def needs_tokens(self) -> bool:
        """Whether its edits depend on tokens that the host must know."""
        return bool(self.bad_words) or self.counts is not None

    def needs_host(self, length: int) -> bool:
        """Whether what is masked behind `length` tokens or more depends on what these are, or how many."""
        return self.needs_tokens or (bool(self.stop_ids) and length - self.prompt_length < self.min_tokens)

    def append(self, token: int) -> None:
        """Learn the next token; a negative one is none, and nobody will see what comes after it."""
        self.known += 1
        if token < 0:
            return
        if self.bad_words:
            self.output.append(token)
        if self.counts is not None:
            self.counts.add(token)

    def seen(self, ahead: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """The tokens so far and how often each stands in the output, drafts included; none without penalties."""
        return (_NO_IDS, _NO_VALUES) if self.counts is None else self.counts.behind(ahead)

    def banned(self, position: int, ahead: Sequence[int]) -> NDArray[np.int64]:
        """Ids that must not come next: stop ids before `min_tokens`, ends of bad words.

        Raises:
            RuntimeError: this request's edits depend on a token before `position` that is not known yet.
        """
        if self.needs_tokens and self.known + len(ahead) != position:
            raise RuntimeError(
                f"position {position} of a request with bad_words or penalties is sampled while only {self.known} "
                "tokens before it are known: its last launch must be finished first"
            )
        ids = self.stop_ids if position - self.prompt_length < self.min_tokens else []
        if not self.bad_words and not ids:
            return _NO_IDS
        found = set(ids)
        for word in self.bad_words:
            before = len(word) - 1
            last = [*self.output[-before:], *ahead][-before:] if before else []
            if last == word[:-1]:
                found.add(word[-1])
        return np.array(sorted(found), np.int64)


def has_penalties(info: RequestInfo) -> bool:
    """Whether the request has penalties."""
    params = info.params
    repetition = params.repetition_penalty or 1.0
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or repetition != 1
