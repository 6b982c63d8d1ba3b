"""Growing outputs, and the coroutines that wait for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from quire.engine.frontend import Frontend
from quire.engine.outputs import RequestOutput


class Streams:
    """One event per followed output, set when there is something to return. Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed: dict[int, asyncio.Event] = {}  # by the output's identity, since ids are reused

    async def follow(
        self, output: RequestOutput, frontend: Frontend, check: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield the output whenever it has grown, until it has finished. Growth between two reads is joined.

        Args:
            frontend: where it grows; told when its reader stops.
            check: raises if an unfinished output will not grow any more.
        """
        changed = self._changed[id(output)] = asyncio.Event()
        try:
            finished = False
            while not finished:
                await changed.wait()
                changed.clear()
                finished = output.finished
                if not finished:
                    check()
                yield frontend.hand_out(output)
        finally:
            del self._changed[id(output)]
            frontend.drop(output)

    def wake(self, outputs: Iterable[RequestOutput]) -> None:
        """Wake the readers of outputs that have grown."""
        for output in outputs:
            if changed := self._changed.get(id(output)):
                changed.set()

    def wake_all(self) -> None:
        """Wake all readers, since something is wrong."""
        for changed in self._changed.values():
            changed.set()
