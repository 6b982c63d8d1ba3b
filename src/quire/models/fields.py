"""Typed access to fields of JSON files; errors name the field, its value, and the allowed values."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from quire.errors import ModelConfigError, QuireError

MAX_JSON_BYTES = 16 << 20
MAX_SIZE = 1 << 24
"""Maximum of any count or width in a configuration: far above every model, and harmless for a machine's memory."""
MAX_NUMBER = 1e6
"""Maximum of factors and other real numbers without a maximum of their own."""


def has_file(file: Path, error: type[QuireError] = ModelConfigError) -> bool:
    """Whether an optional file exists.

    Raises `error` if something else has its name: treating a broken link as absent would silently change the
    checkpoint.
    """
    if os.path.isfile(file):  # unlike Path.is_file, not an error for a name that is too long
        return True
    if os.path.lexists(file):
        raise error(f"{file} is there, but it is a broken link or no regular file; repair or remove it")
    return False


class Fields:
    """The fields of one JSON object. A field that is null counts as absent, as Hugging Face writes them, except for
    `filled`.

    Args:
        values: the object.
        source: its name in error messages, such as "/models/x/config.json".
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self._given = values
        self._values = {name: value for name, value in values.items() if value is not None}
        self.source = source

    @classmethod
    def read(cls, file: Path, max_bytes: int = MAX_JSON_BYTES) -> Fields:
        """The fields of a JSON file; empty if it is absent.

        Raises:
            ModelConfigError: the file cannot be read, or is not a JSON object.
        """
        if not has_file(file):
            return cls({}, str(file))
        try:
            size = file.stat().st_size
            if size > max_bytes:
                raise ModelConfigError(f"{file} has {size} bytes; at most {max_bytes} are read")
            values = json.loads(file.read_text("utf-8"))
        except OSError as error:
            raise ModelConfigError(f"{file} cannot be read: {error}") from error
        except (ValueError, RecursionError) as error:
            raise ModelConfigError(f"{file} is not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ModelConfigError(f"{file} holds a JSON {type(values).__name__}, not an object")
        return cls(values, str(file))

    def __contains__(self, name: str) -> bool:
        return name in self._values

    def names(self) -> set[str]:
        """Names of the fields that are present and not null."""
        return set(self._values)

    def given(self) -> dict[str, Any]:
        """All of them, unchecked, also those that are null."""
        return dict(self._given)

    def picked(self, names: Iterable[str]) -> dict[str, Any]:
        """Those of some fields that are present, unchecked."""
        return {name: self._values[name] for name in names if name in self._values}

    def without(self, *names: str) -> Fields:
        """The fields without some."""
        return Fields({name: value for name, value in self._given.items() if name not in names}, self.source)

    def updated(self, values: Mapping[str, Any]) -> Fields:
        """The fields with these values added, or in place of their own."""
        return Fields({**self._given, **values}, self.source)

    def with_defaults(self, values: Mapping[str, Any]) -> Fields:
        """The fields with these values for those that are absent."""
        return Fields({**self._given, **values, **self._values}, self.source)

    def filled(self, values: Mapping[str, Any]) -> Fields:
        """The fields with these values for those that are left out; one that is null stays so."""
        return Fields({**values, **self._given}, self.source)

    def error(self, name: str, allowed: str) -> ModelConfigError:
        """An error for a field, with its value and the allowed values."""
        found = repr(self._values[name])[:200] if name in self._values else "nothing"
        return ModelConfigError(f"{self.source}: field {name!r} must be {allowed}, found {found}")

    def integer(self, name: str, *, default: int | None = None, min: int = 1, max: int = MAX_SIZE) -> int:
        """An integer from `min` to `max`; required without a default."""
        value = self._values.get(name, default)
        if type(value) is not int or not min <= value <= max:
            raise self.error(name, f"a whole number from {min} to {max}")
        return value

    def number(self, name: str, *, default: float | None = None, above: float = 0.0, max: float = MAX_NUMBER) -> float:
        """A number greater than `above` and at most `max`; required without a default."""
        value = self._values.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not above < value <= max:
            raise self.error(name, f"a finite number greater than {above:g} and at most {max:g}")
        return float(value)

    def optional_number(self, name: str, *, zero: bool = False) -> float | None:
        """A number greater than 0 and at most `MAX_NUMBER`, or None if absent (or 0, with `zero`)."""
        if zero and name in self and self._values[name] == 0 and not isinstance(self._values[name], bool):
            return None
        return self.number(name) if name in self else None

    def flag(self, name: str, *, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name, default)
        if type(value) is not bool:
            raise self.error(name, "true or false")
        return value

    def choice(self, name: str, allowed: Collection[str], *, default: str | None = None) -> str:
        """One of the allowed strings; required without a default."""
        value = self._values.get(name, default)
        if not isinstance(value, str) or value not in allowed:
            raise self.error(name, " or ".join(repr(item) for item in sorted(allowed)))
        return value

    def text(self, name: str) -> str:
        """A required string."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self.error(name, "a string")
        return value

    def strings(self, name: str) -> list[str] | None:
        """A list of strings, or None if absent."""
        value = self._values.get(name)
        if value is not None and not (isinstance(value, list) and all(isinstance(item, str) for item in value)):
            raise self.error(name, "a list of strings")
        return value

    def numbers(self, name: str) -> tuple[float, ...]:
        """A required list of numbers greater than 0 and at most `MAX_NUMBER`."""
        value = self._values.get(name)
        fine = isinstance(value, list) and all(
            isinstance(item, int | float) and not isinstance(item, bool) and 0 < item <= MAX_NUMBER for item in value
        )
        if not isinstance(value, list) or not fine:
            raise self.error(name, f"a list of numbers, each greater than 0 and at most {MAX_NUMBER:g}")
        return tuple(float(item) for item in value)

    def integers(self, name: str, *, below: int) -> list[int]:
        """A list of integers from 0 to below - 1; empty if absent."""
        value = self._values.get(name, [])
        if not isinstance(value, list) or not all(type(item) is int and 0 <= item < below for item in value):
            raise self.error(name, f"a list of whole numbers, each from 0 to {below - 1}")
        return value

    def token_ids(self, name: str, vocab_size: int) -> list[int]:
        """A token id or a list of them; empty if absent."""
        value = self._values.get(name, [])
        ids = value if isinstance(value, list) else [value]
        if not all(type(item) is int and 0 <= item < vocab_size for item in ids):
            raise self.error(name, f"a token id or a list of them, each from 0 to {vocab_size - 1}")
        return ids

    def mapping(self, name: str) -> dict[str, str]:
        """A non-empty object of strings."""
        value = self._values.get(name)
        if not isinstance(value, dict) or not value or not all(isinstance(item, str) for item in value.values()):
            raise self.error(name, "an object of strings")
        return value

    def section(self, name: str) -> Fields:
        """The fields of a nested object; empty if absent."""
        value = self._values.get(name, {})
        if not isinstance(value, dict):
            raise self.error(name, "an object")
        return Fields(value, f"{self.source}, {name}")

    def refuse(self, name: str, neutral: Collection[object], why: str) -> None:
        """Raise unless the field is absent or has one of the `neutral` values."""
        if name in self and not any(
            self._values[name] == value and type(self._values[name]) is type(value) for value in neutral
        ):
            raise ModelConfigError(
                f"{self.source}: field {name!r} is {repr(self._values[name])[:200]}, which Quire does not "
                f"support: {why}"
            )
