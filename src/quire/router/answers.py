"""What servers answer to a router's checks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from quire.fleet.cached_prompts import News, read_told
from quire.typed_json import BAD_JSON


def read_prompts(body: bytes, since: Sequence[int]) -> list[News | None]:
    """What each engine reports about its cache; None for one that does not answer.

    Raises:
        ValueError: this is not such a document.
    """
    try:
        documents = msgspec.json.decode(body)["engines"]
        return [each and read_told(each, number) for each, number in zip(documents, since, strict=True)]
    except (TypeError, KeyError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def identity(card: dict[str, Any]) -> str:
    """What distinguishes a model from others of its name: a Quire server's checkpoint, or another server's `root`."""
    if card.get("checkpoint"):
        return f"checkpoint {str(card['checkpoint'])[:12]}"
    root = card.get("root")
    named = isinstance(root, str) and card.get("owned_by") != "quire"
    return f"from {str(root).rstrip('/').rpartition('/')[2][:80]}" if named else ""


def wrong_key(status: int, has_key: bool) -> str:
    mine = "the router's key" if has_key else "requests without a key"
    return (
        f"it refuses {mine} ({status}): give the router and its servers the same --api-key, or name the servers' with "
        "--server-key"
    )


def read_models(body: bytes) -> dict[str, dict[str, Any]] | None:
    """The models in a response of `/v1/models`; None if it is not a list of models."""
    try:
        listed = msgspec.json.decode(body)
        cards: Iterable[Any] = listed["data"]
        return {str(card["id"]): card for card in cards} or None
    except (*BAD_JSON, TypeError, KeyError, AttributeError):
        return None
