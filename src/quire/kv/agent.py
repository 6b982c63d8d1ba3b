"""A thread that communicates with an external service, such as a directory, so that no step waits for it.

The engine queues messages for the thread, and the thread posts answers to the engine's mailbox. While the service does
not answer, lookups return nothing immediately, and the thread retries with exponential backoff.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from quire.errors import ConfigError, QuireError
from quire.kv.directory.base import DirectoryError, Node
from quire.kv.mailbox import Located, Mailbox
from quire.kv.tiers.orders import Lacks, Locate

logger = logging.getLogger(__name__)

RETRY_SECONDS, MOST_RETRY_SECONDS = 0.2, 2.0
"""Seconds between attempts to reach the service: at first, and at most."""


class Changed(NamedTuple):
    """The engine has gained and lost these blocks."""

    came: list[bytes]
    went: list[bytes]


class Agent(ABC):
    """What agents have in common: the thread, how it handles failures, and how it ends.

    Args:
        close: closes the connection to the service.
        what: what the service is, for messages. meanwhile: what happens while it does not answer.
        mailbox: the engine's.

    Attributes:
        ready: the service answers. problem: why it does not; "" if it does.
        nodes: the nodes that have blocks for this engine, by name.
    """

    def __init__(self, close: Callable[[], None], what: str, meanwhile: str, mailbox: Mailbox) -> None:
        self._close, self._what, self._meanwhile, self._mailbox = close, what, meanwhile, mailbox
        self.ready, self.problem = False, ""
        self.nodes: dict[str, Node] = {}
        self._lookups: list[Locate] = []
        self._outbox = Mailbox()
        self._stopping = False

    def _start(self) -> None:
        """Connect, and start the thread; to be called at the end of `__init__`.

        Raises:
            ConfigError: the service can never be used as it is configured.
        """
        try:
            self._connect()
        except DirectoryError as error:
            self._lost(error)
        self._thread = threading.Thread(target=self._run, name=f"quire {self._what}", daemon=True)
        self._thread.start()

    # -- called by the engine -----------------------------------------------------------------------------------

    def order(self, order: Locate | Lacks) -> None:
        """Carry out one of the scheduler's orders; a `Locate` is answered by a `Located`."""
        self._outbox.post(order)

    def close(self) -> None:
        """End the thread. May be called twice, since an agent can fill two roles in an engine."""
        if not self._stopping:
            self._stopping = True
            self._outbox.post(None)
            self._thread.join()
            self._outbox.close()
            self._close()

    # -- implemented by each agent -----------------------------------------------------------------------------

    @abstractmethod
    def _connect(self) -> None:
        """Connect and call `_found`; called first, and again after an error."""

    @abstractmethod
    def _advance(self) -> None:
        """Take in the engine's messages, answer lookups, and publish some of the changes."""

    @abstractmethod
    def _take_in(self, wait_seconds: float) -> None:
        """Take in the engine's messages; waits at most this many seconds for the first one."""

    def _give_up(self) -> None:  # noqa: B027  # not every agent overrides it
        """The service no longer answers."""

    def _leave(self) -> None:  # noqa: B027
        """The thread is about to end."""

    # -- in the thread ----------------------------------------------------------------------------------------

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
                logger.exception("an error in the thread for the %s; it continues", self._what)
                self._lost(DirectoryError("an error here"))
                self._rest(pause)
        self._leave()

    def _found(self) -> None:
        """It answers."""
        if self.problem:
            logger.info("the %s answers again", self._what)
        self.ready, self.problem = True, ""

    def _lost(self, error: QuireError) -> None:
        """The service does not answer: whoever waits for it must not wait any longer."""
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
        """Answer open lookups with nothing."""
        for each in self._lookups:
            self._mailbox.post(Located(each.number, None))
        self._lookups.clear()
