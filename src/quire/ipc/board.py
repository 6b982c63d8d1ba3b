"""The status board: a small file that an engine keeps up to date, and that other processes map into memory.

It answers two questions that a hanging or dead engine cannot. Does it make progress? The pulse is incremented with
every message, every idle second and every layer of a step; if it does not change, the engine hangs, however long its
steps are. Before anything that takes long, such as loading or a layer of a large step, the engine sets the patience.
And what was it doing when it died? The numbers of the requests in the current step are there until it has ended.

An HTTP process has a board, too, for its pulse.

Fields are 64-bit integers, each written atomically, so readers need no lock.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from pathlib import Path

PULSE, NUM_IN_STEP, ON_PROBATION, PERCENT, PHASE_LENGTH, PATIENCE, NUM_OPEN = range(7)
FIELD_BYTES = 8 * 7
PHASE_BYTES = 120
HEADER_BYTES = FIELD_BYTES + PHASE_BYTES
MAX_IN_STEP = 65536
SIZE = HEADER_BYTES + 8 * MAX_IN_STEP

START_SECONDS = 600
"""The initial patience, for a process that starts and loads, maybe from a slow disk."""


class Board:
    """One process's board. Created by the supervisor, written by the process, read by all.

    Attributes:
        fields: the header's integers, by the names above. `fields[PULSE] += 1` is a sign of life; `fields[PATIENCE]` is
            the number of seconds that may pass until the next one, in addition to what every process is allowed;
            `fields[NUM_OPEN]` is the number of requests that an engine has.
    """

    def __init__(self, path: Path) -> None:
        """Map the board at `path`, which must exist."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        view = memoryview(self._map)
        self.fields = view[:FIELD_BYTES].cast("q")
        self._phase = view[FIELD_BYTES:HEADER_BYTES]
        self._requests = view[HEADER_BYTES:].cast("q")

    @classmethod
    def create(cls, path: Path) -> Board:
        """Create an empty board that only this user can read. Raises OSError if there is no space for it."""
        path.touch(mode=0o600)
        path.write_bytes(bytes(SIZE))  # fails on a full disk, where writing to a sparse file would kill the process
        return cls(path)._begun()

    @classmethod
    def take_over(cls, spent: Path, path: Path) -> Board:
        """Reuse a dead process's board for the next one, since the disk may be full by now.

        It keeps its old name as well, for processes that do not know of the death yet.
        """
        path.hardlink_to(spent)
        return cls(path)._begun()

    def _begun(self) -> Board:
        for field in range(len(self.fields)):
            self.fields[field] = 0
        self.fields[ON_PROBATION], self.fields[PATIENCE] = -1, START_SECONDS
        return self

    # -- the engine's side ---------------------------------------------------------------------------------

    def set_phase(self, phase: str, share: float) -> None:
        """Set the current phase of loading, and its progress (0 to 1)."""
        text = phase.encode()[:PHASE_BYTES]
        self._phase[: len(text)] = text
        self.fields[PHASE_LENGTH] = len(text)
        self.fields[PERCENT] = int(100 * share)
        self.fields[PULSE] += 1

    def begin(self, numbers: Sequence[int], on_probation: int = -1) -> None:
        """Set the requests that are worked on from now on; one of them may be on probation."""
        count = min(len(numbers), MAX_IN_STEP)
        for index in range(count):
            self._requests[index] = numbers[index]
        self.fields[ON_PROBATION] = on_probation
        self.fields[NUM_IN_STEP] = count

    def end(self) -> None:
        """No request is worked on any more."""
        self.fields[NUM_IN_STEP] = 0
        self.fields[ON_PROBATION] = -1

    # -- the others' side ----------------------------------------------------------------------------------

    @property
    def pulse(self) -> int:
        return self.fields[PULSE]

    @property
    def patience(self) -> int:
        return self.fields[PATIENCE]

    @property
    def phase(self) -> tuple[str, int]:
        """The phase of loading, and its progress in percent."""
        text = bytes(self._phase[: self.fields[PHASE_LENGTH]])
        return text.decode(errors="replace"), self.fields[PERCENT]

    def suspects(self) -> tuple[list[int], int | None]:
        """The requests of the current step, and the one of them that is on probation, if any."""
        numbers = list(self._requests[: self.fields[NUM_IN_STEP]])
        culprit = self.fields[ON_PROBATION]
        return numbers, culprit if culprit >= 0 else None
