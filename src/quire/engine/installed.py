"""What other packages install for Quire, by entry points."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from quire.errors import ConfigError


def names(group: str) -> set[str]:
    """The names of a group's entry points."""
    return {each.name for each in entry_points(group=group)}


def find(option: str, name: str, group: str) -> Callable[..., Any]:
    """What makes something: a group's entry point of that name, or MODULE:NAME of what can be imported.

    Args:
        option: where the name was given, for messages.

    Raises:
        ConfigError: there is none.
    """
    installed = {each.name: each for each in entry_points(group=group)}
    module, _, attribute = name.partition(":")
    try:
        if name in installed:
            made: Callable[..., Any] = installed[name].load()
            return made
        if attribute:
            made = getattr(importlib.import_module(module), attribute)
            return made
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{option}={name} cannot be imported: {error}") from error
    there = ", ".join(sorted(installed)) or "none is"
    raise ConfigError(
        f"{option}={name} is not installed ({there}, as entry points of {group}); give the name of one, or MODULE:NAME"
    )
