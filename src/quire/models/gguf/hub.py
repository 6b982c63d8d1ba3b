"""Which GGUF file of a repository on the hub a name with a type means: `org/name:Q4_K_M`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import PurePosixPath

from quire.errors import CheckpointNotFoundError
from quire.models.gguf.parts import BESIDE, PART, SUFFIX

KIND = re.compile(r"(?i)(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|BF16|F16|F32|MXFP4\w*|NVFP4\w*))(?=[-./]|$)")
"""A type in a file's name, as publishers have it."""


def choose(files: Sequence[str], kind: str, name: str) -> list[str]:
    """The paths of the file of this type, or of its parts.

    If several files have it in their names, such as Q4_K_M and UD-Q4_K_M, the one with the shortest path is meant.

    Args:
        files: the paths in the repository. name: the repository's.

    Raises:
        CheckpointNotFoundError: there is none; the message says which types there are.
    """
    wanted = re.compile(rf"(?i)(?:^|[-._/]){re.escape(kind)}(?:[-./]|$)")
    models = [file for file in _models(files) if wanted.search(_stem(file))]
    if not models:
        raise CheckpointNotFoundError(
            f"no checkpoint '{name}:{kind}': {name} has no GGUF file of this type. {types(files, name)}"
        )
    first = min(models, key=lambda file: (len(_stem(file)), file))
    return sorted(file for file in models if _stem(file) == _stem(first))


def types(files: Sequence[str], name: str) -> str:
    """A sentence on the types that a repository has; empty if it has no GGUF files."""
    found = {match[1] for file in _models(files) if (match := KIND.search(_stem(file)))}
    return f"Give one of {', '.join(f'{name}:{kind}' for kind in sorted(found))}." if found else ""


def _models(files: Sequence[str]) -> list[str]:
    return [file for file in files if file.endswith(SUFFIX) and not BESIDE.fullmatch(PurePosixPath(file).name)]


def _stem(file: str) -> str:
    """The path without the number of a part."""
    path = PurePosixPath(file)
    part = PART.fullmatch(path.name)
    return str(path.with_name(part["stem"] if part else path.name.removesuffix(SUFFIX)))
