"""Starts a model from the command line, with a progress bar and a report of the memory plan."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Literal

from quire.cli.options import Given
from quire.config import EngineConfig

if TYPE_CHECKING:
    from quire.llm import LLM


Detail = Literal["nothing", "line", "all"]
"""How much to report: nothing, one line, or all."""


def add_detail_options(parser: argparse.ArgumentParser, quiet: str) -> None:
    """Add `--quiet` and `--verbose`.

    Args:
        quiet: help text of the first.
    """
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help=quiet)
    group.add_argument("-v", "--verbose", action="store_true", help="show the memory plan and all notes")


def detail(args: argparse.Namespace) -> Detail:
    """The detail that these options ask for."""
    return "nothing" if args.quiet else "all" if args.verbose else "line"


def start(given: Given, say: Detail = "all") -> LLM:
    """Load the model. The preset's options, the memory plan and notes go to standard error, on one line or in full.

    Raises:
        ConfigError, CheckpointError: it cannot start.
    """
    from quire.cli.terminal import loading, note, print_table  # rich: not for --help

    config = EngineConfig.from_options(given.engine, given.preset)  # before torch is imported, to report errors at once
    if given.preset and say == "all":
        settings = ", ".join(f"{name}={value}" for name, value in given.preset_options.items())
        note(f"preset {given.preset}: {settings or 'all of it is overridden'}")
    with loading(config.model) as on_load:
        if on_load:
            on_load("importing torch", 0.0)
        from quire.llm import LLM

        options = {name: value for name, value in given.engine.items() if name != "model"}
        llm = LLM(config.model, preset=given.preset, on_load=on_load, **options)
    if say == "line":
        note(_line(llm, config.model, given.preset))
    elif say == "all":
        for text in llm.notes:
            note(text)
        print_table(f"Memory plan of {config.model}", llm.memory_plan.table())
    return llm


def _line(llm: LLM, name: str, preset: str | None) -> str:
    """The memory plan on one line."""
    from quire.runner.memory_plan import format_size

    plan, notes = llm.memory_plan, len(llm.notes)
    parts = [
        f"{name}: {llm.model.precision}, weights {format_size(plan.weights)}",
        f"KV cache {format_size(plan.kv_bytes)}",
        f"context {llm.max_model_len:,} tokens",
        *([f"preset {preset}"] if preset else []),
        *([f"{notes} notes" if notes > 1 else "1 note"] if notes else []),
    ]
    return ", ".join(parts) + " (-v shows more)"
