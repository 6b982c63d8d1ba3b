"""The status board: a small file that an engine writes as it goes, mapped into memory by whoever wants to look.

It answers two questions that the engine itself cannot when it matters. Does it make progress? The pulse grows with
every message, every idle second and every layer of a step, so a pulse that stands still means a wedged engine,
however long its steps are; where it may stand still for long, as while loading, or in a layer of a large step, the
patience says so before. And what was it doing when it died? The numbers of the requests in the step at hand are
there until the step has ended.

An HTTP process has one too, for its pulse.

Fields are 64-bit integers, each written whole, so a reader needs no lock.
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
"""The first patience: for a sign of life of a process that starts and loads, maybe from a slow disk."""


class Board:
    """One process's board. Made by the supervisor, written by the process, read by all.

    Attributes:
        fields: the header's integers, by the names above. `fields[PULSE] += 1` is a sign of life; `fields[PATIENCE]`
            are the seconds that may pass before the next one, beside those that every process is given.
            `fields[NUM_OPEN]` are the requests that an engine has.
    """

    def __init__(self, path: Path) -> None:
        """Map the board at `path`; it must have been made."""
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), SIZE)
        view = memoryview(self._map)
        self.fields = view[:FIELD_BYTES].cast("q")
        self._phase = view[FIELD_BYTES:HEADER_BYTES]
        self._requests = view[HEADER_BYTES:].cast("q")

    @classmethod
    def create(cls, path: Path) -> Board:
        """Make an empty board, readable by this user alone. Raises OSError where there is no room for it."""
        path.touch(mode=0o600)
        path.write_bytes(bytes(SIZE))  # on a full disk this fails; a hole would kill whoever writes there first
        return cls(path)._begun()

    @classmethod
    def take_over(cls, spent: Path, path: Path) -> Board:
        """The board of a process that is dead, for the next one: it takes no room on a disk that may be full by now.

        It is found under its old name, too, by those who have not heard of the death yet.
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
        """What loading is at, and how far (0 to 1)."""
        text = phase.encode()[:PHASE_BYTES]
        self._phase[: len(text)] = text
        self.fields[PHASE_LENGTH] = len(text)
        self.fields[PERCENT] = int(100 * share)
        self.fields[PULSE] += 1

    def begin(self, numbers: Sequence[int], on_probation: int = -1) -> None:
        """What is done next is done for these requests; one of them may be on probation."""
        count = min(len(numbers), MAX_IN_STEP)
        for index in range(count):
            self._requests[index] = numbers[index]
        self.fields[ON_PROBATION] = on_probation
        self.fields[NUM_IN_STEP] = count

    def end(self) -> None:
        """It is done."""
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
        """What loading is at, and its percentage."""
        text = bytes(self._phase[: self.fields[PHASE_LENGTH]])
        return text.decode(errors="replace"), self.fields[PERCENT]

    def suspects(self) -> tuple[list[int], int | None]:
        """The requests of the step at hand, and the one of them that is on probation, if any."""
        numbers = list(self._requests[: self.fields[NUM_IN_STEP]])
        culprit = self.fields[ON_PROBATION]
        return numbers, culprit if culprit >= 0 else None
