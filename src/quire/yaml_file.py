"""Reads YAML files that people write: bounded, without code, and without a name that stands twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from quire.errors import ConfigError

MAX_BYTES = 1 << 20
"""A file larger than this is surely none that a person wrote."""


class _OnceLoader(yaml.SafeLoader):
    """YAML's safe loader, which also refuses duplicate keys: one of them would be lost silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if (key.tag, key.value) in seen:
                raise yaml.MarkedYAMLError(problem=f"it has {key.value} twice", problem_mark=key.start_mark)
            seen.add((key.tag, key.value))
        return super().construct_mapping(node, deep)


def read_yaml(path: Path, where: str, what: str) -> Any:
    """The contents of a YAML file.

    Args:
        where: how messages call the file. what: what it should be, as in "a configuration file".

    Raises:
        ConfigError: the file cannot be read, is too large, is not YAML, or has a name twice.
    """
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(MAX_BYTES + 1)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or "it is not a text file (UTF-8)"
        raise ConfigError(f"{where} cannot be read: {reason}") from error
    if len(text) > MAX_BYTES:
        raise ConfigError(f"{where} is larger than {MAX_BYTES} bytes; is it {what}?")
    try:
        return yaml.load(text, Loader=_OnceLoader)
    except RecursionError as error:
        raise ConfigError(f"{where} is not YAML that can be read: it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:  # such as a date that does not exist
        raise ConfigError(f"{where} is not YAML: {' '.join(str(error).split())}") from error
