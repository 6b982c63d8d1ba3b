"""The grammars of requests: compiled in the background before a request is admitted, so that no step waits for one."""

from __future__ import annotations

import logging
import time

from quire.core.lockstep import Lockstep
from quire.core.request import Event, Request
from quire.core.scheduler import Scheduler
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import RequestError
from quire.grammar.grammars import Grammars

logger = logging.getLogger(__name__)

GRAMMAR = "grammar"
"""Kind of the event that a request's grammar has been compiled."""

ANY_GRAMMAR = Event("any grammar", None)
"""The event that a compilation has ended, for requests whose own could not be begun yet."""

ROOM = Event("room for a grammar", None)
"""The event that the grammars in use take less, for requests whose own takes too much beside them."""

MOST_AHEAD = 16
"""Most grammars that are being compiled. More would evict each other before their requests are admitted."""


class Compiling:
    """Compiles requests' grammars in the background.

    Args:
        grammars: has those that are compiled. Few are kept, so one may have to be compiled again for a request that has
            waited for long.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._begun: list[StructuredOutputsParams | None] = []  # not told to the other ranks yet
        self._alone = False  # nothing runs, so the next request may have any grammar
        self._full: int | None = None  # what the grammars in use took when a request was kept waiting; None: none is

    def lacking(self, request: Request) -> Event | None:
        """See `Scheduler.lacking`: begins to compile the request's grammar if it is not there."""
        wanted = request.params.structured_outputs
        if wanted is None and request.reasoning is None:
            return None
        state = self._grammars.take(wanted, self._alone)
        if state == "ready":
            self._alone = False
            return None
        if state == "full":
            self._full = self._grammars.used_bytes
            return ROOM
        if self._grammars.num_compiling >= MOST_AHEAD:
            return ANY_GRAMMAR
        self._grammars.begin(wanted)
        self._begun.append(wanted)
        return Event(GRAMMAR, wanted)

    def take_begun(self) -> list[StructuredOutputsParams | None]:
        """The grammars begun for the step that has been planned, for `StepPlan.compiles`."""
        begun, self._begun = self._begun, []
        self._grammars.begin_step()
        return begun

    def take_ended(self, scheduler: Scheduler | Lockstep, seconds: float = 0.0) -> None:
        """Tell the scheduler which have been compiled, or cannot be; waits up to this many seconds for one."""
        self._make_room(scheduler)
        ended = self._grammars.ended(seconds) if self._grammars.compiling else ()
        for wanted, error in ended:
            if error is None:
                scheduler.arrived(Event(GRAMMAR, wanted))
                continue
            if not isinstance(error, RequestError):
                logger.error("a grammar cannot be compiled", exc_info=error)
            text = str(error) if isinstance(error, RequestError) else "structured_outputs could not be compiled"
            scheduler.failed(Event(GRAMMAR, wanted), time.monotonic(), text)
        if ended:
            scheduler.arrived(ANY_GRAMMAR)

    def rested(self, scheduler: Scheduler | Lockstep) -> bool:
        """Nothing can run, and no step is in flight: whether requests that waited for room may be tried again."""
        self._grammars.settle()
        if self._full is not None and not scheduler.running:  # only with the next step do runners forget what has ended
            self._alone, self._full = True, None
            scheduler.arrived(ROOM)
            return True
        return self._make_room(scheduler)

    def _make_room(self, scheduler: Scheduler | Lockstep) -> bool:
        if self._full is None or self._grammars.used_bytes >= self._full:
            return False
        self._full = None
        scheduler.arrived(ROOM)
        return True
