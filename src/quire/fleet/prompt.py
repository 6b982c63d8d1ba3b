"""Reads from a request's body what a router needs to choose a server; it validates nothing.

Bodies are forwarded unchanged, and the servers validate them. Prompts are compared by their JSON: if it begins with the
same bytes, the prompts begin with the same tokens, whatever the chat template and the tokenizer. So the router needs
neither, and works with any server. A Quire server computes the same names from the same body, and can so report to a
router which prefixes it has cached (`cached_prompts.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from blake3 import blake3
from msgspec import UNSET, Raw, UnsetType

from quire.typed_json import BAD_JSON

CHUNK_BYTES = 128
"""Bytes of a prompt's JSON per name, about two blocks of 16 tokens."""

MAX_CHUNKS = 8192
"""Most names per prompt: prompts are compared up to one megabyte."""

NAME_BYTES = 8
"""Length of a name, the hash of a prompt's prefix. Names are only hints, so this is enough."""


class _Body(msgspec.Struct):
    """The fields of a body that are read here."""

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
    """A request's body, and what was read from it.

    Attributes:
        model: None if it names none.
        hashes: chained hashes of the prompt's JSON, one per `CHUNK_BYTES`; for a shorter prompt, one hash of all of it.
        size: bytes of the prompt's JSON.
        seeded: the client gave a seed. moved: it must be computed where it is sent, without a prefill server.
        follows: it continues a response that one of the servers has stored.
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
        """The body with these fields appended: of fields with the same name, the last one counts."""
        if not fields:
            return self.body
        own = self.body.rstrip()[:-1].rstrip()
        comma = b"" if own.endswith(b"{") else b","
        return b"%b%b%b" % (own, comma, msgspec.json.encode(fields)[1:])


def read_prompt(body: bytes, scope: bytes = b"") -> Prompt:
    """Read a body. An invalid one counts as an empty prompt, and is forwarded like the others.

    Args:
        scope: distinguishes API keys, whose prompts share nothing.
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
    """The fields that become part of a prompt, in the order in which they do."""
    return (body.tools, body.system, body.instructions, body.messages, body.prompt, body.input)


def _given(field: Raw | UnsetType) -> bool:
    return isinstance(field, Raw) and bytes(field) != _NULL


def _bytes(field: Raw | UnsetType) -> bytes:
    return bytes(field) if isinstance(field, Raw) else b""


def _hashes(text: bytes, head: bytes) -> list[bytes]:
    """The values of a running hash after each chunk."""
    chain = blake3(len(head).to_bytes(4, "little") + head)
    view = memoryview(text)
    hashes = []
    for start in range(0, min(len(text), MAX_CHUNKS * CHUNK_BYTES) - CHUNK_BYTES + 1, CHUNK_BYTES):
        chain.update(view[start : start + CHUNK_BYTES])
        hashes.append(chain.digest(NAME_BYTES))
    return hashes or [blake3(head + text).digest(NAME_BYTES)]
