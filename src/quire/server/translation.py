"""Bodies of interfaces that are translated into chats: what Anthropic's and OpenAI's Responses have in common.

Such a body has fields of its own, which are read with their types, and all others, which go to the chat route as they
are. What the chat route checks is not checked here; its errors are given the names that the client used.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw

from quire.server.body import SMALL_BYTES, check_text, decode, has_more_strings, shorten
from quire.server.conversation import STRINGS_PER_OBJECT
from quire.server.errors import ApiError, invalid
from quire.server.limits import Limits
from quire.server.protocol import ChatCall, parse_chat
from quire.typed_json import BAD_JSON, mismatch

NOT_RETURNED = ("logprobs", "prompt_logprobs", "return_token_ids", "top_logprobs")
"""Fields of chats whose results these interfaces have no place for."""
HARMLESS = (b"null", b"false", b"0", b"[]", b"{}")
"""Values of fields that ask for nothing."""

B = TypeVar("B", bound=msgspec.Struct)


def read_typed(body: bytes, kind: type[B], limits: Limits, field: str) -> tuple[B, dict[str, Raw]]:
    """The fields of `kind`, and all others as JSON.

    Args:
        field: the one that has the conversation.

    Raises:
        ApiError: 400.
    """
    body = check_text(body)
    if has_more_strings(body, STRINGS_PER_OBJECT * (limits.messages + limits.content_parts)):
        raise invalid(f"{field} has more than {limits.content_parts} items or parts", field)
    try:
        given = msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(error, kind, body) from None
    except BAD_JSON:
        given = decode(body, kind)  # which says what is wrong
    fields = decode(body, dict[str, Raw])
    return given, {name: value for name, value in fields.items() if name not in kind.__struct_fields__}


def _wrong(error: msgspec.ValidationError, kind: type[msgspec.Struct], body: bytes) -> ApiError:
    try:  # the value is looked for where that costs little
        document = msgspec.json.decode(body) if len(body) <= SMALL_BYTES else UNSET
    except RecursionError:
        document = UNSET
    found = mismatch(error, kind, document)
    what, param = found.path or "the body", found.path.replace("[...]", "") or None
    if found.missing:
        return invalid(f"{what} is missing; it must be {found.allowed}", param, "missing_parameter")
    value = "" if found.value is UNSET else f"is {shorten(found.value)}; it "
    return invalid(f"{what} {value}must be {found.allowed}", param, "invalid_type")


def check_refused(others: Mapping[str, Raw], names: Iterable[str]) -> None:
    """Refuse fields that would change something, unless their values ask for nothing.

    Raises:
        ApiError: 400.
    """
    for name in names:
        if name in others and bytes(others[name]) not in HARMLESS:
            raise invalid(f"{name} is not supported here; leave it out", name, "unsupported_parameter")


def parse_translated(
    others: Mapping[str, Raw], chat: Mapping[str, Any], names: Mapping[str, str], limits: Limits
) -> ChatCall:
    """Parse a chat.

    Args:
        others: fields that are passed on as they are. chat: the translated ones, by their names in chats.
        names: of fields in chats, and what they are called in this interface; the first that fits is used.

    Raises:
        ApiError: 400.
    """
    check_refused(others, NOT_RETURNED)
    for name in chat:
        if name in others and name in names:
            raise invalid(f"{name} is no field of this route; use {names[name]}", name, "unsupported_parameter")
    try:
        call = parse_chat(msgspec.json.encode({**others, **chat}), limits)
    except ApiError as error:
        raise _renamed(error, names) from None
    call.hints = {variable: names.get(field, field) for variable, field in call.hints.items()}
    if call.params.n != 1:
        raise invalid(f"n is {call.params.n}; it must be 1, since a reply is one choice here", "n")
    return call


def message_names(places: Sequence[str]) -> dict[str, str]:
    """Names of the messages of a chat. `places`: where each comes from."""
    return {f"messages[{index}]": place for index, place in enumerate(places)}


def _renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """The error, about the field that the client sent."""
    param = error.param or ""
    for name, theirs in names.items():
        if _begins_with(param, name):
            error.param = theirs + param[len(name) :]
            if _begins_with(error.message, name):
                error.message = theirs + error.message[len(name) :]
            break
    return error


def _begins_with(text: str, name: str) -> bool:
    """Whether a text begins with this name, and not with a longer one. There may be thousands of names."""
    following = text[len(name) : len(name) + 1]
    return text.startswith(name) and not (following.isalnum() or following == "_")
