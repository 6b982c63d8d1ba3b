"""Writes the reference of all options, made from the fields that they are: `options_reference.py OUT.md`."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.cli.options import _attribute_docs
from quire.config import PRESETS, EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.router.config import RouterConfig
from quire.server.config import ServerConfig

HEAD = """# Options

Generated from the code (`scripts/options_reference.py`). Each is a flag (`--max-num-seqs`), a key of a YAML
file (`--config`), and, if it is one of the engine's, a keyword argument of `LLM`.
"""


def reference() -> str:
    """The page."""
    parts = [HEAD]
    for title, config, text in (
        ("Engine", EngineConfig, "Of `quire serve`, `generate`, `chat`, `batch`, and `LLM`."),
        ("Server", ServerConfig, "Of `quire serve`, beside the engine's."),
        ("Router", RouterConfig, "Of `quire route`."),
    ):
        hints = get_type_hints(config)
        rows = [
            (field.name, hints[field.name], _default(field), field.metadata.get("help", ""))
            for field in dataclasses.fields(config)
        ]
        parts += [f"## {title}\n\n{text}\n", _table(rows)]
    presets = [
        f"- `{name}`: " + ", ".join(f"`{key}={value}`" for key, value in options.items())
        for name, options in PRESETS.items()
    ]
    parts += [
        "## Presets\n\n`--preset` sets a few of the engine's options; those given by hand win.\n",
        "\n".join(presets) + "\n",
    ]
    docs, hints = _attribute_docs(SamplingParams), get_type_hints(SamplingParams)
    defaults = zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
    rows = [(name, hints[name], default, docs.get(name, "")) for name, default in defaults]
    parts += [
        "## Sampling\n\n`SamplingParams`, the fields of a request, and flags of `quire generate` and `chat`.\n",
        _table(rows),
    ]
    return "\n".join(parts)


def _default(field: dataclasses.Field[Any]) -> Any:
    return "" if field.default is dataclasses.MISSING else field.default


def _table(rows: list[tuple[str, Any, Any, str]]) -> str:
    lines = ["| option | values | default | what |", "|---|---|---|---|"]
    for name, hint, default, text in rows:
        shown = "" if default in (None, "", ()) else f"`{default}`"
        lines.append(f"| `{name}` | {_kind(hint)} | {shown} | {_cell(text)} |")
    return "\n".join(lines) + "\n"


def _kind(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_kind(one) for one in get_args(hint) if one is not type(None))
    if get_origin(hint) is Literal:
        return ", ".join(f"`{value}`" for value in get_args(hint))
    names = {"str": "text", "int": "number", "float": "number", "bool": "on or off"}
    return names.get(
        getattr(hint, "__name__", ""),
        f"`{hint}`".replace("typing.", "").replace("collections.abc.", "").replace("|", "or"),
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(reference(), encoding="utf-8")
