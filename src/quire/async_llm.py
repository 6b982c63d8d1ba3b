"""`AsyncLLM`: an engine in a thread of its own, for many concurrent callers on an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from typing import Any, Self, TypeAlias

from quire.config import with_options, with_options_text
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.engine.outputs import RequestOutput
from quire.engine.prompts import Prompt
from quire.engine.streams import Streams
from quire.engine.thread_guard import unless_forked
from quire.errors import ConcurrentUseError, EngineClosedError, RequestError
from quire.local_engine import LocalEngine
from quire.runner.start import OnLoad

logger = logging.getLogger(__name__)

Commands: TypeAlias = "queue.SimpleQueue[Callable[[], None] | None]"
"""What the engine's thread is to do; None: end."""


class AsyncLLM(LocalEngine):
    """An engine for many concurrent callers on an event loop; its steps run in a separate thread.

    Create it anywhere; use it from one event loop at a time (a second one, in another thread, is refused with
    ConcurrentUseError while requests of the first one run). Close it with `close()` or an `async with` block.
    Arguments and errors are those of `LLM`.

    Example:
        >>> async def main():
        ...     async with AsyncLLM("demo") as llm:
        ...         async for output in llm.generate("def fib(n):", SamplingParams(max_tokens=64)):
        ...             print(output.outputs[0].delta, end="")
    """

    __doc__ = with_options_text(__doc__)
    __signature__ = with_options("preset", "on_load")

    def __init__(self, model: str, *, preset: str | None = None, on_load: OnLoad | None = None, **options: Any) -> None:
        super().__init__(model, preset, on_load, options)
        self._commands: Commands = queue.SimpleQueue()
        self._streams = Streams()
        self._failure: BaseException | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._entering = threading.Lock()
        # The thread holds no reference to this object, so that it is closed and freed with its last one.
        self._thread = threading.Thread(
            target=_drive, args=(self._engine, self._commands, weakref.ref(self)), name="quire-engine", daemon=True
        )
        self._thread.start()
        # Before the program's end, too: a thread that is broken off inside a kernel aborts the process. The second of
        # these runs first then; the other is for a thread that had the last reference itself: nobody waited for it.
        weakref.finalize(self._thread, _wait_for, weakref.ref(self._thread))
        self._stop = weakref.finalize(self, unless_forked(_stop), self._commands, self._thread)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await asyncio.to_thread(self.close)

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        timeout: float | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, yielding its output whenever it has grown.

        It is the same object each time; `outputs[i].delta` is the new text since the last one. Cancelling the task, or
        leaving the loop early, aborts the request.

        Args:
            prompt: a string, a list of token ids, or a dictionary with `prompt` or `prompt_token_ids`.
            sampling_params: None: the checkpoint's defaults.
            request_id: a name for `abort`, in use until the last output; None: a new one.
            timeout: seconds, including tokenization, after which the request is aborted; None: no limit.

        Raises:
            RequestError: the prompt or its parameters are invalid, or the id is in use.
            TimeoutError: the request did not finish in time and was aborted.
            ConcurrentUseError: requests of another event loop run.
            EngineClosedError: the engine was closed, or failed, before the request finished.
        """
        self._check_running()
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        async with asyncio.timeout_at(deadline):
            prepared = await asyncio.to_thread(self._frontend.prepare, prompt, sampling_params)  # this may take long
        with self._entering:
            self._check_running()  # it may have been closed meanwhile
            self._use(asyncio.get_running_loop())
            output = self._frontend.submit(prepared, request_id)
        async with contextlib.aclosing(self._streams.follow(output, self._frontend, self._check_running)) as stream:
            while True:
                async with asyncio.timeout_at(deadline):
                    grown = await anext(stream, None)
                if grown is None:
                    return
                yield grown

    async def abort(self, request_id: str) -> None:
        """End a request; its iterator yields a last output. An unknown id is ignored."""
        self._frontend.abort(request_id)

    def close(self) -> None:
        """Stop the engine and free the model. Running requests raise EngineClosedError. In a fork of the engine's
        process this does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._stop()
        if not self._is_fork:
            self._tell_loop(self._streams.wake_all)

    def _check_running(self) -> None:
        self._check_open()
        if self._failure is not None:
            raise EngineClosedError(f"the engine failed ({self._failure!r}); create a new one") from self._failure

    def _use(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have outputs grow on this loop from now on.

        Raises:
            ConcurrentUseError: those of another one still do, and its readers would not be woken from here.
        """
        before, self._loop = self._loop, loop
        if before is loop or before is None or self._frontend.idle:
            return
        if not before.is_closed():
            self._loop = before
            raise ConcurrentUseError(
                "AsyncLLM.generate was called on a second event loop while requests of another one run; call it on one "
                "loop (asyncio.run_coroutine_threadsafe does so from other threads), or create an AsyncLLM for each"
            )
        self._frontend.abandon()  # the closed loop had their readers, and would have received their ends

    def _tell_loop(self, call: Callable[..., None], *args: Any) -> None:
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: there is no one to tell
                self._loop.call_soon_threadsafe(call, *args)

    def _absorb(self, updates: list[RequestUpdate]) -> None:
        self._streams.wake(self._frontend.absorb(updates))

    def _add(self, request: Request) -> None:
        engine, owner = self._engine, weakref.ref(self)

        def add() -> None:
            try:
                engine.add(request)
            except RequestError as error:
                if (llm := owner()) is not None:
                    refused = RequestUpdate(request.id, finish_reason="error", error=str(error))
                    llm._tell_loop(llm._absorb, [refused])

        self._commands.put(add)

    def _abort(self, request: int, reason: str) -> list[RequestUpdate]:
        engine = self._engine
        self._commands.put(lambda: engine.abort(request, reason))
        return []


def _drive(engine: Engine, commands: Commands, owner: weakref.ref[AsyncLLM]) -> None:
    """The engine's thread, until it is closed. What stops it otherwise is told to everybody who waits."""
    try:
        while _take_commands(engine, commands):
            updates = engine.step()
            if updates and (llm := owner()) is not None:
                llm._tell_loop(llm._absorb, updates)
            llm = None
    except BaseException as error:
        logger.exception("the engine's thread failed")
        if (llm := owner()) is not None:
            llm._failure = error
            llm._tell_loop(llm._streams.wake_all)
        llm = None
    finally:
        engine.close()  # here, since a profile must end in the thread that began it


def _take_commands(engine: Engine, commands: Commands) -> bool:
    """Run what was asked for, waiting for something to do while idle; False once the engine is closed."""
    while True:
        try:
            command = commands.get(block=engine.idle)
        except queue.Empty:
            return True
        if command is None:
            return False
        command()


def _wait_for(thread: weakref.ref[threading.Thread]) -> None:
    """Wait for a thread that has been told to end."""
    if (running := thread()) is not None:
        running.join()


def _stop(commands: Commands, thread: threading.Thread) -> None:
    """End the engine's thread."""
    commands.put(None)
    if thread is not threading.current_thread():  # it may have had the last reference
        thread.join()
