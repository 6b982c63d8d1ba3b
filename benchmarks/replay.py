"""Drafts from a recording: what speculation brings can be measured at any acceptance, without a model that drafts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from quire.core.step import RequestInfo
from quire.runner.draft_context import DraftContext
from quire.runner.drafts import Computed, Drafts, Wanted


class ReplayProposer:
    """Proposes what a recorded run went on with, each token replaced with probability 1 - `accuracy`.

    Args:
        recordings: prompt and output of each; a request is told by its prompt.
        accuracy: the share of drafts that are right.
        vocab_size: replacements are others of it.

    Attributes:
        recordings, accuracy: the same; they may be changed.
    """

    def __init__(self, recordings: Sequence[Sequence[int]], accuracy: float, vocab_size: int, seed: int = 0) -> None:
        self.recordings, self.accuracy, self._vocab_size = recordings, accuracy, vocab_size
        self._random = np.random.default_rng(seed)
        self._texts: dict[int, Sequence[int]] = {}

    def start(self, info: RequestInfo) -> None:
        """See `Proposer`."""
        prompt = info.prompt_token_ids
        self._texts[info.request] = next(
            (text for text in self.recordings if list(text[: len(prompt)]) == prompt), prompt
        )

    def end(self, request: int) -> None:
        """See `Proposer`."""
        del self._texts[request]

    def propose(self, wanted: Sequence[Wanted], context: DraftContext) -> list[Drafts]:
        """See `Proposer`."""
        return [Drafts(self._spoiled(self._texts[want.request][want.position :][: want.count])) for want in wanted]

    def _spoiled(self, tokens: Sequence[int]) -> list[int]:
        wrong = self._random.random(len(tokens)) >= self.accuracy
        return [(token + 1) % self._vocab_size if bad else token for token, bad in zip(tokens, wrong, strict=True)]

    def follow(self, computed: Sequence[Computed], features: Tensor, context: DraftContext) -> None:
        """See `Proposer`."""
