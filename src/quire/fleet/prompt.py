"""What a router reads of a request's body: as little as it needs to choose, and nothing that it judges.

Bodies are passed on as they came; whether they are valid is the servers' business. Prompts are compared by their JSON:
what begins with the same bytes begins with the same tokens, whatever the template and the tokenizer make of it. So the
router needs neither, and works in front of any server. A Quire server reads the same names from the same body, and so
can tell a router in its own words what is cached (`cached_prompts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from blake3 import blake3
from msgspec import UNSET, Raw, UnsetType

from quire.typed_json import BAD_JSON

CHUNK_BYTES = 128
"""Of a prompt's JSON: what is cached is known in such steps, some two blocks of 16 tokens."""

MAX_CHUNKS = 8192
"""Prompts are compared up to here, a megabyte."""

NAME_BYTES = 8
"""Of a name, the hash of a prompt's beginning. They are hints: so many bytes are enough."""


class _Body(msgspec.Struct):
    """The fields of a body that matter here."""

    model: str | UnsetType | None = UNSET
    stream: bool | UnsetType | None = UNSET
    seed: Raw | UnsetType = UNSET
    prompt: Raw | UnsetType = UNSET
    system: Raw | UnsetType = UNSET
    instructions: Raw | UnsetType = UNSET
    messages: Raw | UnsetType = UNSET
    input: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    cache_salt: Raw | UnsetType = UNSET
    kv_transfer_params: Raw | UnsetType = UNSET
    prompt_logprobs: Raw | UnsetType = UNSET
    previous_response_id: Raw | UnsetType = UNSET


_decoder = msgspec.json.Decoder(_Body)
_NULL = b"null"


@dataclass(slots=True)
class Prompt:
    """A request's body, and what was read of it.

    Attributes:
        model: None: none was named.
        hashes: chained hashes of the prompt's JSON, one a `CHUNK_BYTES`; of a prompt that is shorter than one, the
            hash of all of it, so there is always one.
        size: bytes of the prompt's JSON.
        seeded: the client gave a seed. moved: it says itself where its prompt is computed.
        follows: it goes on from a response that one of the servers has stored.
    """

    body: bytes
    model: str | None
    streams: bool
    seeded: bool
    moved: bool
    hashes: list[bytes]
    size: int
    follows: bool = False

    def with_fields(self, fields: dict[str, object]) -> bytes:
        """The body, with these fields after its own: of a name that stands twice, the last one counts."""
        if not fields:
            return self.body
        own = self.body.rstrip()[:-1].rstrip()
        comma = b"" if own.endswith(b"{") else b","
        return b"%b%b%b" % (own, comma, msgspec.json.encode(fields)[1:])


def read_prompt(body: bytes, scope: bytes = b"") -> Prompt:
    """What a body says. One that is not valid has an empty prompt, and is passed on all the same.

    Args:
        scope: whose cache it is: prompts of two API keys share nothing.
    """
    try:
        found = _decoder.decode(body)
    except BAD_JSON:
        return Prompt(body, None, False, True, True, _hashes(b"", scope), 0)
    model = found.model if isinstance(found.model, str) else None
    parts = [bytes(part) for part in _prompts_of(found) if isinstance(part, Raw)]
    text = b"".join(parts)
    head = scope + b"\0" + (model or "").encode() + b"\0" + (_bytes(found.cache_salt))
    return Prompt(
        body=body,
        model=model,
        streams=found.stream is True,
        seeded=_given(found.seed),
        moved=_given(found.kv_transfer_params) or _given(found.prompt_logprobs),
        hashes=_hashes(text, head),
        size=len(text),
        follows=_given(found.previous_response_id),
    )


def _prompts_of(body: _Body) -> tuple[Raw | UnsetType, ...]:
    """What stands in prompts, in its order there."""
    return (body.tools, body.system, body.instructions, body.messages, body.prompt, body.input)


def _given(field: Raw | UnsetType) -> bool:
    return isinstance(field, Raw) and bytes(field) != _NULL


def _bytes(field: Raw | UnsetType) -> bytes:
    return bytes(field) if isinstance(field, Raw) else b""


def _hashes(text: bytes, head: bytes) -> list[bytes]:
    """One running hash, looked at after each chunk."""
    chain = blake3(len(head).to_bytes(4, "little") + head)
    view = memoryview(text)
    hashes = []
    for start in range(0, min(len(text), MAX_CHUNKS * CHUNK_BYTES) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chain.update(view[start : start + CHUNK_BYTES])
        hashes.append(chain.digest(NAME_BYTES))
    return hashes or [blake3(head + text).digest(NAME_BYTES)]
