"""Growing outputs, and the coroutines that wait for them to grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable

from quire.engine.outputs import RequestOutput


class Streams:
    """One event a followed output, set when there is something to hand out. Belongs to one event loop."""

    def __init__(self) -> None:
        self._changed: dict[str, asyncio.Event] = {}

    async def follow(
        self, output: RequestOutput, check: Callable[[], None], abort: Callable[[str], object]
    ) -> AsyncGenerator[RequestOutput, None]:
        """The output, whenever it has grown, until it has finished. What comes while nobody asks is added up.

        Args:
            check: raises if no more will come of an unfinished output.
            abort: ends the request, when its reader leaves early.
        """
        changed = self._changed[output.request_id] = asyncio.Event()
        try:
            while changed.is_set() or not output.finished:
                await changed.wait()
                changed.clear()
                if not output.finished:
                    check()
                yield output.hand_out()
        finally:
            del self._changed[output.request_id]
            if not output.finished:
                abort(output.request_id)

    def wake(self, outputs: Iterable[RequestOutput]) -> None:
        """These have grown."""
        for output in outputs:
            if changed := self._changed.get(output.request_id):
                changed.set()

    def wake_all(self) -> None:
        """Something is wrong: everybody should look."""
        for changed in self._changed.values():
            changed.set()
