"""Request bodies: untrusted JSON.

An object is first split into its fields, which stay bytes; only known fields of a sensible size are decoded. So a body
with millions of empty objects costs a scan, but no memory.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType
from starlette.datastructures import Headers

from quire.server.errors import ApiError, invalid

JSON = "application/json"
MAX_FIELD_BYTES = 1 << 18
"""Default limit on the JSON of one field."""
SMALL_BYTES = 1 << 16
"""Objects up to this size are split without checking how much of them is known."""
MAX_EXACT = 2.0**53
"""Up to this size every integer is exact as a float."""
MAX_IGNORED = 32
MAX_IGNORED_LENGTH = 64

T = TypeVar("T")
_POSITION = re.compile(r"\(byte (\d+)\)")


def check_media_type(headers: Headers) -> None:
    """Refuse a body that is not declared as JSON, which a web page of another origin cannot send, or is compressed.

    Raises:
        ApiError: 415.
    """
    for coding in headers.getlist("content-encoding"):
        if coding.strip().lower() not in ("", "identity"):
            message = f"the body has the Content-Encoding {shorten(coding)}, which is not supported; send it as it is"
            refused = {"accept-encoding": "identity"}  # as RFC 9110, 15.5.16, wants it
            raise ApiError(415, message, code="unsupported_media_type", headers=refused)
    values = headers.getlist("content-type")
    if len(values) == 1 and values[0].partition(";")[0].strip().lower() == JSON:
        return
    found = (
        "it has none" if not values else f"it has {len(values)}" if len(values) > 1 else f"it has {shorten(values[0])}"
    )
    message = f"the request must have one header 'Content-Type: {JSON}'; {found}"
    raise ApiError(415, message, code="unsupported_media_type")


def check_text(body: bytes) -> bytes:
    """Refuse a body that is empty or not UTF-8: strings of unknown fields are not decoded later. Returns it without a
    byte order mark, which some clients on Windows write.

    Raises:
        ApiError: 400.
    """
    if not body:
        raise invalid("the body is empty; it must be a JSON object", code="invalid_json")
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not valid UTF-8, at byte {error.start}", code="invalid_json") from None
    return body.removeprefix(BOM_UTF8)


def decode(data: Any, kind: type[T] | Any = Any, *, where: str = "") -> Any:
    """JSON into plain values, or into `kind`.

    Args:
        where: the field that `data` is; empty for a whole body.

    Raises:
        ApiError: a 400 that says what is wrong with it.
    """
    what = where or "the body"
    param = where or None
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise invalid(f"{what} is nested too deeply", param, "invalid_json") from None
    except UnicodeDecodeError:
        raise invalid(f"{what} is not valid UTF-8", param, "invalid_json") from None
    except msgspec.ValidationError as error:
        if "out of range" in str(error):
            raise invalid(f"{what} has a number that is too large", param) from None
        raise invalid(f"{what} has the wrong type", param, "invalid_type") from None
    except msgspec.DecodeError as error:
        found = _POSITION.search(str(error))
        at = f", at byte {found[1]} of it" if found else ""
        message = (
            f"{what} is not valid JSON{at} (NaN, Infinity, unpaired surrogates and trailing commas are not allowed)"
        )
        raise invalid(message, param, "invalid_json") from None


def has_more_strings(data: bytes, most: int) -> bool:
    """Whether JSON certainly has more than `most` strings, names of fields included, without building them.

    Every string has at least one quote that no backslash precedes, and an ordinary one has two.
    """
    return data.count(b'"') - data.count(b'\\"') > 2 * most


class Shape:
    """The fields that a JSON object may have.

    Args:
        names: the fields. The first `num_required` are required in objects of a list.
        where: the object's name in errors; empty for a whole body.
    """

    def __init__(self, names: Sequence[str], where: str = "", num_required: int = 0) -> None:
        self.names = frozenset(names)
        self._where = where
        fields: list[Any] = [(f"f{i}", Raw) for i in range(num_required)]
        fields += [(f"f{i}", Raw | UnsetType, UNSET) for i in range(num_required, len(names))]
        self._known = msgspec.defstruct("Known", fields, rename={f"f{i}": name for i, name in enumerate(names)})
        self._list_of_known: Any = list[self._known]  # type: ignore[name-defined]
        self._needs = " and ".join(repr(name) for name in names[:num_required])
        self._attributes = [f"f{i}" for i in range(len(names))]

    def read(self, data: bytes | Raw) -> dict[str, Raw]:
        """The fields of one object. Of duplicate names the last one counts. Raises `ApiError`."""
        if memoryview(data).nbytes > SMALL_BYTES:
            self._check_unknown(data, [self._decode(data, self._known, "a JSON object")])
        fields: dict[str, Raw] = self._decode(data, dict[str, Raw], "a JSON object")
        return fields

    def read_list(self, data: Raw) -> list[dict[str, Raw]]:
        """The fields of every object of a list. Raises `ApiError`."""
        must = "a list of JSON objects" + (f", each with {self._needs}" if self._needs else "")
        if memoryview(data).nbytes > SMALL_BYTES:
            self._check_unknown(data, self._decode(data, self._list_of_known, must))
        objects: list[dict[str, Raw]] = self._decode(data, list[dict[str, Raw]], must)
        return objects

    def _decode(self, data: bytes | Raw, kind: Any, must: str) -> Any:
        try:
            return decode(data, kind, where=self._where)
        except ApiError as error:
            if error.code != "invalid_type":
                raise
        raise invalid(f"{self._where or 'the body'} must be {must}", self._where or None, "invalid_type")

    def _check_unknown(self, data: bytes | Raw, objects: list[Any]) -> None:
        """Splitting builds an entry for every field, known or not: the unknown ones must be few."""
        known = sum(
            memoryview(value).nbytes
            for item in objects
            for value in map(item.__getattribute__, self._attributes)
            if value is not UNSET
        )
        # What is left: names and punctuation of the known fields, and all of the unknown ones.
        if memoryview(data).nbytes - known > SMALL_BYTES + len(objects) * 256:
            what = self._where or "the body"
            raise invalid(f"{what} has more than {SMALL_BYTES} bytes of unknown fields", self._where or None)


class BodyFields:
    """The fields of a body, decoded on demand. null means not given.

    Args:
        raw: JSON by name. prefix: precedes names in errors, as in "stream_options.".
    """

    def __init__(self, raw: dict[str, Raw], prefix: str = "") -> None:
        self._raw = {name: value for name, value in raw.items() if bytes(memoryview(value)[:4]) != b"null"}
        self._prefix = prefix

    def raw(self, name: str) -> Raw | None:
        """A field's JSON, of any size; None if it was not given."""
        return self._raw.get(name)

    def has(self, name: str) -> bool:
        """Whether the field was given."""
        return name in self._raw

    def get(self, name: str, max_bytes: int = MAX_FIELD_BYTES) -> Any:
        """A field's value, of whatever type; None if it was not given. Raises `ApiError`."""
        raw = self._raw.get(name)
        if raw is None:
            return None
        size = memoryview(raw).nbytes
        if size > max_bytes:
            param = self._prefix + name
            raise invalid(f"{param} has {size} bytes of JSON; at most {max_bytes} are allowed", param)
        return decode(raw, where=self._prefix + name)

    def boolean(self, name: str, default: bool = False) -> bool:
        """A field that is true or false. Raises `ApiError`."""
        value = self.get(name)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        raise wrong_type(self._prefix + name, value, "true or false")

    def integer(self, name: str, low: int, high: int) -> int | None:
        """A field that is an integer within bounds. Raises `ApiError`."""
        value = self.get(name)
        if value is None:
            return None
        value = whole(value)
        allowed = f"an integer from {low} to {high}"
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(self._prefix + name, value, allowed)
        if not low <= value <= high:
            raise wrong_value(self._prefix + name, value, allowed)
        return value

    def text(self, name: str, max_length: int) -> str | None:
        """A field that is a string of bounded length. Raises `ApiError`."""
        value = self.get(name)
        if value is None:
            return None
        allowed = f"a string of at most {max_length} characters"
        if not isinstance(value, str):
            raise wrong_type(self._prefix + name, value, allowed)
        if len(value) > max_length:
            raise wrong_value(self._prefix + name, value, allowed)
        return value

    def unknown(self, names: Iterable[str], *, prefix: bool = True) -> list[str]:
        """Names of fields that are given and not among `names`."""
        return [(self._prefix if prefix else "") + name for name in self._raw if name not in names]

    def without_effect(self, harmless: Mapping[str, tuple[Any, ...]]) -> list[str]:
        """Names of given fields of a table like `fields.IGNORED`: those whose values would mean something elsewhere."""
        given = (name for name, values in harmless.items() if self.has(name) and self.get(name) not in values)
        return [self._prefix + name for name in given]


def whole(value: Any) -> Any:
    """A value that should be an integer: 5.0 is 5, as in JSON Schema. Anything else as it is."""
    exact = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT
    return int(value) if exact else value


def wrong_type(param: str, value: object, allowed: str) -> ApiError:
    """400: a value of the wrong type."""
    return invalid(f"{param} is {shorten(value)}; it must be {allowed}", param, "invalid_type")


def wrong_value(param: str, value: object, allowed: str) -> ApiError:
    """400: a value that is not allowed."""
    return invalid(f"{param} is {shorten(value)}; it must be {allowed}", param)


def shorten(value: object) -> str:
    """A value as the client wrote it, shortened for messages."""
    if isinstance(value, int) and not isinstance(value, bool) and value.bit_length() > 128:
        return "a huge number"
    shown = msgspec.json.encode(value).decode() if not isinstance(value, list | dict) or len(value) < 16 else None
    if shown is None:
        return "a long list" if isinstance(value, list) else "a large object"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def ignored_names(names: Iterable[str]) -> tuple[str, ...]:
    """Names of fields as they may stand in a header: few, short, visible ASCII, without commas."""
    shown: dict[str, None] = {}
    for name in names:
        cut = name[:MAX_IGNORED_LENGTH]
        shown["".join(c if "!" <= c <= "~" and c != "," else "?" for c in cut) or "?"] = None
        if len(shown) == MAX_IGNORED:
            break
    return tuple(shown)
