"""The journal of a stream, with which a router continues it at another server: comments between the events.

A router asks for it. Each write of the stream then ends with a comment that has the tokens whose events precede it. If
the server is lost, another one gets these entries behind the request's body. Its frontend takes the tokens as if its
engine had generated them, its responder makes their events, which are not sent, and the rest follows: nothing is
computed twice but the prefill, and nothing has to be cut off. To a router, entries are bytes that it collects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Struct

from quire.core.request import RequestUpdate
from quire.core.step import TokenLogprobs
from quire.engine.frontend import Prepared
from quire.engine.outputs import Logprob, RequestOutput
from quire.server.errors import ApiError, invalid
from quire.typed_json import BAD_JSON

JOURNAL = "x-quire-journal"
"""Request header of a router that asks for a journal: how many bytes at the end of the body are the entries so far, a
JSON array. As a response header: the stream has a journal."""

MAX_JOURNAL_BYTES = 16 << 20
"""The largest journal that is kept and accepted: some million tokens."""

ENTRY, END, LOST = b": quire-entry ", b": quire-end", b": quire-lost "
"""What comments begin with: an entry (or nothing), the end of the stream, and that the server gives up, with a message.
What precedes an entry or the end is for the client."""

GONE = frozenset({"shutting_down", "engine_failed", "engine_unavailable", "engine_restarting"})
"""Codes of errors after which another server can continue."""

_REASONS = (None, "stop", "length", "abort")


class Opening(Struct, frozen=True):
    """What all events of a stream share: the response's id, Unix time in whole seconds, and what tokens depend on."""

    id: str
    created: int
    fingerprint: str


class Piece(Struct, array_like=True, omit_defaults=True):
    """What is new of one choice; of the first one of a prompt, also the log-probabilities of that.

    Attributes:
        number: the choice's, counted through all prompts.
    """

    number: int
    tokens: list[int] = []
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


class Entry(Struct, array_like=True, omit_defaults=True):
    """What the events since the last entry were made of.

    Attributes:
        events: number of events so far, where they are numbered.
        opening: in the first entry.
    """

    pieces: list[Piece]
    events: int = 0
    opening: Opening | None = None


_decoder = msgspec.json.Decoder(list[Entry])
_encode = msgspec.json.Encoder().encode


def read_entries(data: bytes) -> list[Entry]:
    """The entries behind a body.

    Raises:
        ApiError: they are something else.
    """
    try:
        return _decoder.decode(data)
    except BAD_JSON as error:
        raise invalid(f"the last bytes of the body are no journal: {error}", JOURNAL) from None


def split_body(body: bytes, size: int) -> tuple[bytes, list[Entry]]:
    """A body without the journal of this many bytes behind it, and its entries.

    Raises:
        ApiError: this is no journal.
    """
    if size > len(body):
        raise invalid(f"{JOURNAL} is {size}, but the body has {len(body)} bytes", JOURNAL)
    return (body[:-size], read_entries(body[-size:])) if size else (body, [])


class Journal:
    """Writes the journal of one stream.

    Args:
        choices: of each prompt.

    Attributes:
        events: see `Entry`.
    """

    def __init__(self, choices: int, opening: Opening | None) -> None:
        self.events = 0
        self._choices, self._opening = choices, opening
        self._counts: dict[int, int] = {}
        self._ended: set[int] = set()
        self._scored: set[int] = set()
        self._pieces: list[Piece] = []

    def note(self, prompt: int, output: RequestOutput) -> None:
        """The events of all that the output has are about to be sent."""
        for choice in output.outputs:
            number = prompt * self._choices + choice.index
            before = self._counts.get(number)
            ends = choice.completed and number not in self._ended
            scores = self._scores(number, output) if choice.index == 0 else None
            if before == len(choice.token_ids) and not ends and scores is None:
                continue
            piece = Piece(number, choice.token_ids[before or 0 :], prompt_logprobs=scores)
            if ends:
                self._ended.add(number)
                piece.finish_reason, piece.stop_reason = choice.finish_reason, choice.stop_reason
            if before is None:
                piece.cached_tokens = output.cached_tokens
            if choice.logprobs is not None:
                piece.logprobs = [_plain(entry) for entry in choice.logprobs[before or 0 :]]
            self._counts[number] = len(choice.token_ids)
            self._pieces.append(piece)

    def replayed(self, prompt: int, output: RequestOutput) -> None:
        """The output has what earlier entries say."""
        self.note(prompt, output)
        self._pieces.clear()

    def _scores(self, number: int, output: RequestOutput) -> list[TokenLogprobs] | None:
        """A prompt's log-probabilities, once, when they are complete."""
        scored = output.prompt_logprobs
        if scored is None or len(scored) < len(output.prompt_token_ids) or number in self._scored:
            return None
        self._scored.add(number)
        return [_plain(entry) for entry in scored if entry is not None]

    def comment(self) -> bytes:
        """The comment that ends a write."""
        if not self._pieces:
            return ENTRY + b"\n\n"
        entry = Entry(self._pieces, self.events, self._opening)
        self._pieces, self._opening = [], None
        return b"%b%b\n\n" % (ENTRY, _encode(entry))

    def end(self) -> bytes:
        """The comment that ends the stream."""
        return self.comment() + END + b"\n\n"


def lost(message: str) -> bytes:
    """The comment that ends a stream which another server can continue."""
    return b"%b%b\n\n" % (LOST, message.replace("\n", " ").encode())


def _plain(entry: Mapping[int, Logprob]) -> TokenLogprobs:
    values = entry.values()
    return TokenLogprobs([*entry], [each.logprob for each in values], [each.rank for each in values])


def earlier_updates(
    entries: Sequence[Entry], prompts: Sequence[Prepared], vocab_size: int
) -> dict[int, list[RequestUpdate]]:
    """What the entries say of each prompt that they mention: an update for each choice, whose index is its `request`.

    Raises:
        ApiError: another request's journal, or none.
    """
    found: dict[int, dict[int, RequestUpdate]] = {}
    for piece in (piece for entry in entries for piece in entry.pieces):
        prompt, index = divmod(piece.number, prompts[0].params.n)
        if not 0 <= prompt < len(prompts):
            raise invalid(f"the journal has a choice {piece.number}, which this request has not", JOURNAL)
        one = found.setdefault(prompt, {}).setdefault(index, RequestUpdate(index))
        one.tokens += piece.tokens
        one.cached_tokens = one.cached_tokens or piece.cached_tokens
        if piece.logprobs is not None:
            one.logprobs = (one.logprobs or []) + piece.logprobs
        one.prompt_logprobs = piece.prompt_logprobs or one.prompt_logprobs
        if piece.finish_reason is not None:
            one.finish_reason = piece.finish_reason
            one.stop_reason = piece.stop_reason if isinstance(piece.stop_reason, int) else None
    for prompt, updates in found.items():
        for update in updates.values():
            _check(update, prompts[prompt], vocab_size)
    return {prompt: [*updates.values()] for prompt, updates in found.items()}


def _check(update: RequestUpdate, prompt: Prepared, vocab_size: int) -> None:
    """Check what an engine relies on.

    Raises:
        ApiError: it cannot be so.
    """
    tokens, params, scores = update.tokens, prompt.params, update.prompt_logprobs
    rows = [*(update.logprobs or ()), *(scores or ())]
    is_whole = all(entry.ids and len(entry.ids) == len(entry.values) == len(entry.ranks) for entry in rows)
    runs = update.finish_reason is None and len(tokens) > 0
    if (
        not (len(tokens) <= prompt.max_tokens - runs and is_whole and update.finish_reason in _REASONS)
        or (tokens and not 0 <= min(tokens) <= max(tokens) < vocab_size)
        or len(update.logprobs or ()) != (len(tokens) if params.logprobs is not None else 0)
        or (scores is not None and (params.prompt_logprobs is None or len(scores) != len(prompt.token_ids) - 1))
    ):
        message = f"the journal's choice {update.request} is not one of this request; send the one that belongs to it"
        raise invalid(message, JOURNAL)


def other_kernels() -> ApiError:
    """409: the journal is of a server whose tokens would be others."""
    message = "this server computes in another way than the one that began this stream; begin anew"
    return ApiError(409, message, code="other_kernels")
