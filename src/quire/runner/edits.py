"""Changes of a request's logits before filtering: penalties, bias, allowed tokens, `min_tokens`, bad words, grammars.

A kernel applies a step's `Edits` (`ops/logit_edits.py`). This module has the state of each request, and makes the edits
of a step from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.step import RequestInfo
from quire.grammar import grammars
from quire.grammar.grammars import Matcher, masks
from quire.ops.logit_edits import BitMasks, Edits, Lists, Masks, list_arrays
from quire.runner.device import Device
from quire.runner.device_rows import DeviceRows
from quire.runner.penalties import DevicePenalties, ListedPenalties, has_penalties

_NO_IDS = np.zeros(0, np.int64)

NOTHING_LEFT = (
    "no token is left: allowed_token_ids, bad_words, logit_bias, min_tokens, structured_outputs and "
    "thinking_token_budget mask all"
)


@dataclass(slots=True)
class EditedRequest:
    """The state of a request whose logits are edited, besides its rows in tables.

    Attributes:
        prompt_length: number of prompt tokens.
        known: number of tokens, of prompt and output, that the host knows.
        output: output tokens so far; maintained only for `bad_words`.
        stop_ids: banned before `min_tokens`.
        matcher: follows the output's grammar; None without a grammar.
    """

    prompt_length: int
    known: int
    output: list[int]
    bias_ids: NDArray[np.int64]
    biases: NDArray[np.float32]
    stop_ids: list[int]
    min_tokens: int
    bad_words: list[list[int]]
    matcher: Matcher | None = None

    @property
    def follows(self) -> bool:
        """Whether the masks depend on earlier tokens."""
        return bool(self.bad_words) or self.matcher is not None

    def needs_host(self, length: int) -> bool:
        """Whether the masks after at least `length` tokens depend on these tokens or their number."""
        return self.follows or (bool(self.stop_ids) and length - self.prompt_length < self.min_tokens)

    def append(self, token: int) -> None:
        """Add the next token; a negative one means none, and later results are not used."""
        self._note(token)
        if token >= 0 and self.matcher is not None:
            self.matcher.append(token)

    def _note(self, token: int) -> None:
        self.known += 1
        if token >= 0 and self.bad_words:
            self.output.append(token)

    def why_nothing_is_left(self) -> str:
        """The error if all tokens are masked."""
        failed = self.matcher and self.matcher.error
        return f"structured_outputs: {failed}" if failed else NOTHING_LEFT

    def check_known(self, position: int, ahead: Sequence[int]) -> None:
        """Raises RuntimeError: this request's edits depend on a token before `position` that is not known yet."""
        if self.follows and self.known + len(ahead) != position:
            raise RuntimeError(
                f"position {position} of a request whose masks depend on its tokens is sampled while only {self.known} "
                "before it are known: its last launch must be finished first"
            )

    def banned(self, position: int, ahead: Sequence[int]) -> NDArray[np.int64]:
        """Ids that are banned next: stop ids before `min_tokens`, and last tokens of bad words."""
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


def append(tokens: Sequence[tuple[EditedRequest, int]]) -> None:
    """Add the next tokens of different requests: `EditedRequest.append` for each, with one call for all matchers."""
    for request, token in tokens:
        request._note(token)
    grammars.append([(each.matcher, token) for each, token in tokens if token >= 0 and each.matcher is not None])


def edited_request(info: RequestInfo, vocab_size: int, matcher: Matcher | None = None) -> EditedRequest | None:
    """The state of a new request; None if its logits are not edited.

    Args:
        matcher: of its grammar, after its output so far.

    Raises:
        ValueError: a token id is not in the vocabulary.
    """
    params = info.params
    bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
    # Words with tokens that are not in the vocabulary are never completed.
    bad_words = [word for word in info.bad_words if word and max(word) < vocab_size]
    penalized = has_penalties(info)
    if not (penalized or bias or allowed or bad_words or matcher or params.min_tokens > 0):
        return None
    if penalized:
        _check_ids(info, "prompt_token_ids", info.prompt_token_ids, vocab_size)
        _check_ids(info, "output_token_ids", info.output_token_ids, vocab_size)
    _check_ids(info, "logit_bias", bias, vocab_size)
    _check_ids(info, "allowed_token_ids", allowed, vocab_size)
    return EditedRequest(
        prompt_length=len(info.prompt_token_ids),
        known=len(info.prompt_token_ids) + len(info.output_token_ids),
        output=list(info.output_token_ids) if bad_words else [],
        bias_ids=np.array(list(bias), np.int64),
        biases=np.array(list(bias.values()), np.float32),
        stop_ids=sorted(token for token in info.stop_token_ids if 0 <= token < vocab_size),
        min_tokens=params.min_tokens,
        bad_words=bad_words,
        matcher=matcher,
    )


def _check_ids(info: RequestInfo, name: str, ids: Iterable[int], vocab_size: int) -> None:
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"request {info.request}: {name} has the token id {low if low < 0 else high}; "
            f"it must be from 0 to {vocab_size - 1}"
        )


class AllowedTokens(DeviceRows):
    """The masks of all requests with `allowed_token_ids`, of 4 bytes per token (594 KiB for 151,936).

    A mask is made and sent once per request, since that takes longer than sampling a step.

    Attributes:
        matrix: see `Masks.masks`.
    """

    def __init__(self, vocab_size: int, device: Device) -> None:
        super().__init__(vocab_size, torch.float32, device)
        with device.active():
            self.matrix.fill_(torch.inf)

    def start(self, allowed: Collection[int]) -> int:
        """A row that masks all other tokens; 0 if `allowed` is empty."""
        if not allowed:
            return 0
        row = self.take_row()
        [ids] = self._device.upload(np.fromiter(allowed, np.int64, len(allowed)))
        self.matrix[row] = -torch.inf
        self.matrix[row].scatter_(0, ids, torch.inf)
        return row


def edit_arrays(
    state: NDArray[Any], rows: NDArray[np.int64], requests: Sequence[EditedRequest], ahead: Sequence[Sequence[int]]
) -> list[NDArray[Any]]:
    """The arrays for `make_edits`, given some of a step's rows, their requests, and the drafts before them."""
    places = list(zip(requests, state["next"].tolist(), ahead, strict=True))
    for request, position, drafts in places:
        request.check_known(position, drafts)
    banned = [request.banned(position, drafts) for request, position, drafts in places]
    masked = [(row, request.matcher, drafts) for row, (request, _, drafts) in enumerate(places) if request.matcher]
    bits = masks([matcher for _, matcher, _ in masked], [drafts for *_, drafts in masked])
    return [
        *(rows, state["repetition"], state["frequency"], state["presence"], state["mask"]),
        *list_arrays([r.bias_ids for r in requests], [r.biases for r in requests]),
        *list_arrays(banned),
        *(rows[[row for row, *_ in masked]], bits),
    ]


NUM_EDIT_ARRAYS = 13
"""Number of arrays that `edit_arrays` returns."""


def make_edits(
    sent: Sequence[Tensor],
    allowed: AllowedTokens,
    penalties: ListedPenalties | DevicePenalties,
    drafts: Tensor | None,
) -> Edits:
    """The edits, given the tensors of `edit_arrays`, followed by `penalties.arrays`; `drafts`: see `penalties.seen`."""
    rows, repetition, frequency, presence, masks = sent[:5]
    bias, banned = Lists(*sent[5:8]), Lists(*sent[8:11])
    bits = BitMasks(*sent[11:NUM_EDIT_ARRAYS])
    seen = penalties.seen(sent[NUM_EDIT_ARRAYS:], None if drafts is None else drafts.index_select(0, rows))
    return Edits(rows, repetition, frequency, presence, seen, bias, Masks(allowed.matrix, masks), banned, bits)
