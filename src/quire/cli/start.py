"""Starting a model from the command line: what was set, how far loading is, what was decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.cli.options import Given
from quire.cli.terminal import loading, note, print_table
from quire.config import EngineConfig

if TYPE_CHECKING:
    from quire.llm import LLM


def start(given: Given, quiet: bool) -> LLM:
    """The model, ready. Unless `quiet`, what the preset set, the memory plan and notes go to standard error.

    Raises:
        ConfigError, CheckpointError: and what derives from them, when it cannot start.
    """
    config = EngineConfig.from_options(given.engine, given.preset)  # before torch is imported: a mistake shows at once
    if given.preset and not quiet:
        settings = ", ".join(f"{name}={value}" for name, value in given.preset_options.items())
        note(f"preset {given.preset}: {settings or 'all of it is overridden'}")
    with loading(config.model) as on_load:
        if on_load:
            on_load("importing torch", 0.0)
        from quire.llm import LLM

        options = {name: value for name, value in given.engine.items() if name != "model"}
        llm = LLM(config.model, preset=given.preset, on_load=on_load, **options)
    if not quiet:
        for text in llm.notes:
            note(text)
        print_table(f"Memory plan of {config.model}", llm.memory_plan.table())
    return llm
