"""Growing outputs, and the coroutines that wait for them to grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from quire.engine.frontend import Frontend
from quire.engine.outputs import RequestOutput


class Streams:
    """One event a followed output, set when there is something to hand out. Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed: dict[int, asyncio.Event] = {}  # by the output's identity: ids are used again

    async def follow(
        self, output: RequestOutput, frontend: Frontend, check: Callable[[], None]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output, whenever it has grown, until it has finished. What comes between two reads is added up.

        Args:
            frontend: where it grows; told when its reader leaves.
            check: raises if no more will come of an unfinished output.
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
        """These have grown."""
        for output in outputs:
            if changed := self._changed.get(id(output)):
                changed.set()

    def wake_all(self) -> None:
        """Something is wrong: everybody should look."""
        for changed in self._changed.values():
            changed.set()
