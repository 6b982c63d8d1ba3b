"""An engine in a process of its own, and what is asked of it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from pathlib import Path
from typing import IO, Any, cast

from benchmarks.peers.protocol import Schemas
from benchmarks.peers.recipes import ROOT, PeerError, Recipe, last_line, log_file
from quire.bench.cells import Cell

LOAD_SECONDS, CELL_SECONDS = 600.0, 300.0
"""After these an engine is given up."""


class Worker:
    """A running engine with its model loaded.

    Attributes:
        about: what the engine said of itself: `version`, `load_s`, and perhaps more.

    Raises:
        PeerError: it could not be started, or did not load the model.
    """

    def __init__(
        self, recipe: Recipe, weights: str, python: Path, checkpoint: Path, threads: int, vocab_size: int, work: Path
    ) -> None:
        self._log = log_file(work, f"{recipe.script}-{weights}")
        options = {"checkpoint": checkpoint, "weights": weights, "threads": threads, "vocab-size": vocab_size}
        command = [str(python), "-m", f"benchmarks.peers.{recipe.script}"]
        for name, value in options.items():
            command += [f"--{name}", str(value)]
        with self._log.open("ab") as log:
            try:
                self._process = subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env=os.environ | {"OMP_NUM_THREADS": str(threads)},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                    start_new_session=True,  # so that it can be ended with all its children
                )
            except OSError as error:
                raise PeerError(f"{python} could not be started: {error.strerror or error}") from error
        self._questions, self._answers = cast(IO[str], self._process.stdin), cast(IO[str], self._process.stdout)
        try:
            self.about = self._answer(LOAD_SECONDS)
        except BaseException:
            self.close()
            raise

    def measure(self, cell: Cell, schemas: Schemas = None, ends: bool = False) -> dict[str, Any]:
        """Run a cell once; see `protocol.Watch.times`.

        Args:
            schemas: see `protocol.Engine.run`.
            ends: outputs may end before they have all tokens: the answer has their texts, and no times.

        Raises:
            PeerError: the engine failed, or took too long. It is of no use any more.
        """
        question: dict[str, Any] = {"batch": cell.batch, "prompt": cell.prompt, "output": cell.output}
        if schemas is not None:
            question |= {"schemas": [*schemas], "ends": ends}
        try:
            print(json.dumps(question), file=self._questions, flush=True)
        except OSError as error:
            raise PeerError(f"it ended: {last_line(self._log)}", self._log) from error
        return self._answer(CELL_SECONDS)

    def _answer(self, seconds: float) -> dict[str, Any]:
        """The next line of its output."""
        expired = threading.Event()

        def give_up() -> None:
            expired.set()
            self._kill()

        timer = threading.Timer(seconds, give_up)
        timer.start()
        try:
            line = self._answers.readline()
        finally:
            timer.cancel()
        if not line:
            why = f"no answer within {seconds:.0f} s" if expired.is_set() else f"it ended: {last_line(self._log)}"
            raise PeerError(why, self._log)
        answer: dict[str, Any] = json.loads(line)
        return answer

    def peak_bytes(self) -> int:
        """The most memory that was resident, mapped files included: what Linux says of the process."""
        status = Path(f"/proc/{self._process.pid}/status").read_text("utf-8")
        [line] = [line for line in status.splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024

    def close(self) -> None:
        """End the engine and its children."""
        with contextlib.suppress(OSError):
            self._questions.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._kill()
        self._process.wait()

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
