"""A thread that speaks for an engine with something elsewhere, such as a directory, which may not answer for a while.

What the engine says is taken in, step for step; what the thread finds is posted to the engine's mailbox. So no step
waits. While there is no answer, lookups find nothing at once, and it is tried again ever more seldom.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from typing import NamedTuple, Protocol

from quire.errors import ConfigError, QuireError
from quire.kv.directory.base import DirectoryError, Node
from quire.kv.mailbox import Located, Mailbox

logger = logging.getLogger(__name__)

RETRY_SECONDS, MOST_RETRY_SECONDS = 0.2, 2.0
"""Between attempts to reach it: at first, and after many that failed."""


class Changed(NamedTuple):
    """Blocks that the engine has from now on, and those that it has not any more."""

    came: list[bytes]
    went: list[bytes]


class Locate(NamedTuple):
    """Who has blocks of a chain? See `core.orders.Locate`."""

    number: int
    names: list[bytes]
    needed: list[bool]


class Closed(Protocol):
    """What can be closed."""

    def close(self) -> None:
        """Ask no more."""


class Agent(ABC):
    """What agents have in common: the thread, what it does when there is no answer, and how it ends.

    Args:
        elsewhere: the agent's own from now on.
        what: this is, for people. meanwhile: what happens as long as it does not answer.
        mailbox: the engine's.

    Attributes:
        ready: it answers. problem: why it does not; "": it does.
        nodes: those that have blocks for this engine, by name.
    """

    def __init__(self, elsewhere: Closed, what: str, meanwhile: str, mailbox: Mailbox) -> None:
        self._elsewhere, self._what, self._meanwhile, self._mailbox = elsewhere, what, meanwhile, mailbox
        self.ready, self.problem = False, ""
        self.nodes: dict[str, Node] = {}
        self._lookups: list[Locate] = []
        self._outbox = Mailbox()
        self._stopping = False

    def _start(self) -> None:
        """To be called when all else is there.

        Raises:
            ConfigError: what is elsewhere can never be used as it was configured.
        """
        try:
            self._connect()
        except DirectoryError as error:
            self._lost(error)
        self._thread = threading.Thread(target=self._run, name=f"quire {self._what}", daemon=True)
        self._thread.start()

    # -- the engine's side -----------------------------------------------------------------------------------

    def locate(self, number: int, names: list[bytes], needed: list[bool]) -> None:
        """Ask who has blocks of a chain; `Located` tells, soon or late."""
        self._outbox.post(Locate(number, names, needed))

    def close(self) -> None:
        """Say no more. May be called twice: an agent can have two of an engine's places."""
        if not self._stopping:
            self._stopping = True
            self._outbox.post(None)
            self._thread.join()
            self._outbox.close()
            self._elsewhere.close()

    # -- what an agent is --------------------------------------------------------------------------------------

    @abstractmethod
    def _connect(self) -> None:
        """Find it, and say `_found`; before all else, and again after an error."""

    @abstractmethod
    def _advance(self) -> None:
        """Take in what the engine says, answer it, and tell some of what has changed."""

    @abstractmethod
    def _take_in(self, wait_seconds: float) -> None:
        """Take in what the engine says; waits so long where it says nothing."""

    def _give_up(self) -> None:  # noqa: B027  # not every agent has something to give up
        """It does not answer any more."""

    def _leave(self) -> None:  # noqa: B027
        """The thread ends."""

    # -- the thread's ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_SECONDS
        while not self._stopping:
            try:
                if not self.ready:
                    self._connect()
                self._advance()
                pause = RETRY_SECONDS
            except (DirectoryError, ConfigError) as error:
                self._lost(error)
                self._rest(pause)
                pause = min(2 * pause, MOST_RETRY_SECONDS)
            except Exception:
                logger.exception("what speaks with the %s has met an error, and goes on", self._what)
                self._lost(DirectoryError("an error here"))
                self._rest(pause)
        self._leave()

    def _found(self) -> None:
        """It answers."""
        if self.problem:
            logger.info("the %s answers again", self._what)
        self.ready, self.problem = True, ""

    def _lost(self, error: QuireError) -> None:
        """It does not answer: nobody waits for it."""
        if not self.problem:
            logger.warning("%s; %s", error, self._meanwhile)
        self.ready, self.problem = False, str(error)
        self._give_up()
        self._answer_nothing()

    def _rest(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while not self._stopping and (left := end - time.monotonic()) > 0:
            self._take_in(left)
            self._answer_nothing()

    def _answer_nothing(self) -> None:
        """What was asked finds nothing."""
        for each in self._lookups:
            self._mailbox.post(Located(each.number, None))
        self._lookups.clear()
