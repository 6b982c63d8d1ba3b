"""What `quire serve` shows while it starts: the URL, a progress bar, a table of facts; or the same as JSON lines."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import msgspec

from quire import log
from quire.cli.terminal import console, loading, note, print_table
from quire.server.processes import is_loopback, url_of
from quire.version import __version__

if TYPE_CHECKING:
    from quire.ipc.wire import EngineInfo
    from quire.server.serve_options import ServeOptions
    from quire.server.supervisor import Screen

logger = logging.getLogger(__name__)

OPEN_TO_ALL = (
    "there is no --api-key, and other machines reach this port: anyone who does may use the server "
    "(by its address; by another name than this machine's with --allowed-host NAME)"
)


def make_screen(options: ServeOptions, listener: socket.socket, preset_options: Mapping[str, Any]) -> Screen:
    """The screen for the log's format; it also shows what a preset has set."""
    kind = JsonScreen if options.server.log_format == "json" else TextScreen
    return kind(options, listener, preset_options)


@contextmanager
def _unless_nobody_reads() -> Iterator[None]:
    """Keep serving when the terminal or the reader of standard error is gone, which would make rich raise."""
    with suppress(OSError, SystemExit):
        yield


class TextScreen:
    """For people, on standard error: a progress bar on a terminal, otherwise one line per phase."""

    def __init__(self, options: ServeOptions, listener: socket.socket, preset_options: Mapping[str, Any]) -> None:
        self._options, self._listener, self._preset_options = options, listener, preset_options
        self._bar = ExitStack()
        self._on_load: Callable[[str, float], None] | None = None
        self._phase: str | None = None

    @_unless_nobody_reads()
    def listening(self) -> None:
        """The port is open: say where, and that the model loads."""
        url = url_of(self._listener, self._options.server)
        note(f"listening on {url}, loading {self._options.engine.model} (Ctrl-C to stop)")
        if self._preset_options:
            note("the preset sets " + ", ".join(f"{name}={value}" for name, value in self._preset_options.items()))

    @_unless_nobody_reads()
    def loading(self, phase: str, percent: int) -> None:
        """Move the bar, or name a phase once."""
        if self._phase is None:
            self._on_load = self._bar.enter_context(loading(self._options.engine.model))
        if self._on_load:
            self._on_load(phase or "starting", percent / 100)
        elif phase and phase != self._phase:
            note(f"loading: {phase} ({percent} %)")
        self._phase = phase

    @_unless_nobody_reads()
    def ready(self, info: EngineInfo, seconds: float) -> None:
        """Requests are served: say by what, and with which options."""
        log.flush()
        for text in info.notes:
            note(text)
        rows = start_rows(self._options, self._listener, info, seconds)
        print_table(f"Quire {__version__} serves {self._options.model_names[0]}", rows)
        if is_open_to_all(self._options, self._listener):
            console(stderr=True).print(f"warning: {OPEN_TO_ALL}", style="bold yellow", soft_wrap=True)

    @_unless_nobody_reads()
    def close(self) -> None:
        """Take the bar away."""
        self._bar.close()


class JsonScreen:
    """For machines: one JSON object per event."""

    def __init__(self, options: ServeOptions, listener: socket.socket, preset_options: Mapping[str, Any]) -> None:
        self._options, self._listener, self._preset_options = options, listener, preset_options
        self._phase = ""

    def listening(self) -> None:
        """One event: the port is open."""
        url = url_of(self._listener, self._options.server)
        log.event(logger, "listening", f"listening on {url}", url=url, preset=dict(self._preset_options))
        if is_open_to_all(self._options, self._listener):
            log.event(logger, "open_to_all", OPEN_TO_ALL, level=logging.WARNING)

    def loading(self, phase: str, percent: int) -> None:
        """One event for each phase."""
        if phase and phase != self._phase:
            self._phase = phase
            log.event(logger, "loading", f"loading: {phase} ({percent} %)", phase=phase, percent=percent)

    def ready(self, info: EngineInfo, seconds: float) -> None:
        """One event: requests are served."""
        options, url = self._options, url_of(self._listener, self._options.server)
        log.event(
            logger,
            "started",
            f"serving {options.model_names[0]} on {url}",
            version=__version__,
            url=url,
            model_names=options.model_names,
            api_keys=len(options.server.api_key),
            seconds=seconds,
            engine=msgspec.to_builtins(info),
        )

    def close(self) -> None:
        """Nothing was opened."""


def is_open_to_all(options: ServeOptions, listener: socket.socket) -> bool:
    """Whether anyone who can reach the port can use the server."""
    return not options.server.api_key and not is_loopback(listener)


def start_rows(
    options: ServeOptions, listener: socket.socket, info: EngineInfo, seconds: float
) -> list[tuple[str, str]]:
    """The table of facts about a server that has started."""
    server = options.server
    return [
        ("model", options.engine.model),
        ("architecture", f"{info.architecture}, {_count(info.parameters)} parameters in {info.dtype}"),
        ("kernels", info.kernels),
        ("threads", str(info.threads)),
        *info.memory_plan,
        ("prefix cache", str(info.config.get("prefix_cache", options.engine.prefix_cache))),
        *(
            [("replicas", f"{replicas}; sizes are those of each, and the others load now")]
            if (replicas := options.engine.replicas) > 1
            else []
        ),
        ("HTTP processes", f"{server.api_workers}, each with {server.tokenizer_workers} for tokenization"),
        ("served as", ", ".join(options.model_names)),
        ("API keys", str(len(server.api_key)) if server.api_key else "none: requests need no key"),
        ("URL", url if (url := url_of(listener, server)).startswith("unix:") else f"{url}/v1"),
        ("ready after", f"{seconds:.1f} s"),
    ]


def _count(number: int) -> str:
    """A number of parameters with its unit, such as "4 million"."""
    for size, unit in ((10**9, "billion"), (10**6, "million")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"
