"""Compiles grammars, and makes the matchers that say which tokens may follow in each request.

A mask depends on nothing but the tokens so far.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from quire.core.structured_outputs import ReasoningBudget, StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.in_use import InUse
from quire.grammar.reasoning import ReasoningCounter, Spelling
from quire.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:  # loaded when the first grammar is compiled
    from quire.grammar.library import Compiled, Executor, Tokenizer

MAX_GRAMMARS = 256
"""Most compiled grammars that are kept."""

MAX_KEPT_BYTES = 256 << 20
"""Most bytes that they take in total, the text that they were compiled from included: one takes 0.4 MB, or 180."""


class Matcher:
    """Follows one request's output.

    Args:
        compiled: the library's matcher, in its initial state; None if any token is allowed.
        vocabulary: the model's.
        ends: tokens that end the request and have no text; they are allowed only where the reply may end.
        reasoning: counts the reasoning tokens; None if there is no limit.
        worker: the thread that does the work of `append`; None: the calling thread does.
    """

    def __init__(
        self,
        compiled: Compiled | None,
        vocabulary: Vocabulary,
        ends: Sequence[int],
        reasoning: ReasoningCounter | None = None,
        worker: MaskWorker | None = None,
    ) -> None:
        self._compiled, self.vocabulary, self.ends, self._reasoning = compiled, vocabulary, ends, reasoning
        self._worker = worker
        self._next: tuple[_Masks, int] | None = None  # the worker's masks for the next token, and this matcher's row

    @property
    def vocab_size(self) -> int:
        """The size of the model's vocabulary."""
        return self.vocabulary.size

    @property
    def _matcher(self) -> Compiled | None:
        """The library's matcher, once the worker has finished with it."""
        if self._next is not None:
            self._next[0].wait()
        return self._compiled

    @property
    def error(self) -> str | None:
        """Why no token can follow; None if one can."""
        matcher = self._matcher
        if matcher is None:
            return None
        from quire.grammar.library import no_way_on, why_not

        return why_not(matcher.get_error()) if matcher.is_error() else no_way_on(matcher, self.vocabulary)

    def append(self, token: int) -> None:
        """Add the next token; after one that ends the request there is none. For several matchers, see `append`."""
        if token not in self.ends:
            self._take(token)

    def _take(self, token: int) -> bool:
        """Add a token; returns whether it is allowed."""
        matcher, reasoning = self._matcher, self._reasoning
        self._next = None
        forced = reasoning.forced() if reasoning is not None else []
        if matcher is not None:
            if forced and reasoning is not None and reasoning.dangling:
                matcher.rollback(reasoning.dangling)  # a partial character, which the marker cuts off
            if not matcher.try_consume_tokens([token]):
                matcher.consume_token(token)  # for its error
                return False
        if reasoning is not None:
            reasoning.append(token)
        return not forced or token == forced[0]

    def mask(self, ahead: Sequence[int] = ()) -> NDArray[np.int32]:
        """The mask after the drafts `ahead`: a bit per token, lowest first."""
        words: NDArray[np.int32] = masks([self], [ahead])[0]
        return words

    def forced(self) -> list[int]:
        """The next tokens, as far as only one is allowed at a time."""
        if self._reasoning is not None and (forced := self._reasoning.forced()):
            return forced
        forced = self._matcher.compute_ff_tokens() if self._matcher is not None else []
        return list(itertools.takewhile(lambda token: token < self.vocab_size, forced))

    def after(self, ahead: Sequence[int]) -> tuple[Matcher, Sequence[int]]:
        """The matcher and drafts to compute a mask with: these; or, if reasoning may have to end within them, a copy
        that has taken the drafts, and none.
        """
        reasoning = self._reasoning
        if not ahead or reasoning is None or not reasoning.may_force(len(ahead)):
            return self, ahead
        compiled = self._matcher.deep_copy() if self._matcher is not None else None
        other = Matcher(compiled, self.vocabulary, self.ends, reasoning.copy())
        taken = next((i for i, token in enumerate(ahead) if token in self.ends or not other._take(token)), len(ahead))
        return (other, ()) if taken == len(ahead) else (self, ahead)

    @property
    def only(self) -> int | None:
        """The token that must follow to end reasoning, regardless of the grammar; None if there is none."""
        forced = self._reasoning.forced() if self._reasoning is not None else []
        return forced[0] if forced else None

    def _fill(self, address: int, size: int, ahead: Sequence[int]) -> int | None:
        """Write the library's mask to an address; or return the word with which the whole mask is to be filled."""
        if self._matcher is None:
            return -1
        taken = self._matcher.try_consume_tokens(list(ahead)) if ahead else 0
        if taken == len(ahead):
            self._matcher.unsafe_compute_mask_ptr(address, size)
        failed = self._matcher.is_error()  # then the library allows the end
        if taken:
            self._matcher.rollback(taken)
        return 0 if failed else -1 if taken < len(ahead) else None


def masks(matchers: Sequence[Matcher], ahead: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """The masks of matchers after the drafts `ahead`: a bit per token, lowest first, set if the token is allowed.

    Returns [matchers, words] int32. After drafts that are not allowed, all tokens are, since none will be sampled. If a
    matcher has failed, none is.
    """
    if not matchers:
        return np.zeros((0, 1), np.int32)
    vocabulary = matchers[0].vocabulary
    vocab_size = vocabulary.size
    pairs = [matcher.after(drafts) for matcher, drafts in zip(matchers, ahead, strict=True)]
    matchers = [matcher for matcher, _ in pairs]
    words = _no_words(len(matchers), vocabulary)
    address, size = words.ctypes.data, words.itemsize * words.shape[1]
    found: dict[_Masks, list[tuple[int, int]]] = {}
    for row, (matcher, drafts) in enumerate(pairs):
        if matcher._next is not None and not drafts:
            made, place = matcher._next
            found.setdefault(made, []).append((row, place))
        elif (all_words := matcher._fill(address + row * size, size, drafts)) is not None:
            words[row] = all_words
    for made, those in found.items():
        words[[row for row, _ in those]] = made.wait()[[place for _, place in those]]
    words = np.ascontiguousarray(words[:, : -(-(vocab_size + 1) // 32)])  # without tokens that the model does not have
    ends = [len(matcher.ends) for matcher in matchers]
    rows = np.repeat(np.arange(len(matchers)), ends)
    tokens = np.fromiter((token for matcher in matchers for token in matcher.ends), np.int64, len(rows))
    may_end = (words[:, vocab_size >> 5] >> (vocab_size & 31) & 1).astype(np.int32)
    places, bits = (rows, tokens >> 5), np.left_shift(1, tokens & 31).astype(np.int32)
    np.bitwise_and.at(words, places, ~bits)
    np.bitwise_or.at(words, places, bits * may_end[rows])
    for row, (matcher, drafts) in enumerate(pairs):
        if not drafts and (only := matcher.only) is not None:
            words[row] = 0
            words[row].view(np.uint32)[only >> 5] = 1 << (only & 31)
    return words


def _no_words(rows: int, vocabulary: Vocabulary) -> NDArray[np.int32]:
    """Masks for the library to fill in, with a bit for each token that it knows."""
    return np.zeros((rows, -(-len(vocabulary.tokens) // 32)), np.int32)


def append(tokens: Sequence[tuple[Matcher, int]]) -> None:
    """Add the next tokens of different matchers: `Matcher.append` for all of them in one call.

    The masks after them are computed in another thread, during the rest of the step and the next one. Using a matcher
    earlier waits for that.
    """
    together: list[tuple[Matcher, int]] = []
    for matcher, token in tokens:
        if matcher._worker is None or matcher._reasoning is not None or token in matcher.ends:
            matcher.append(token)
        elif matcher._matcher is not None:
            together.append((matcher, token))
    if together and (worker := together[0][0]._worker) is not None:
        worker.begin(together)


class MaskWorker:
    """Adds tokens to matchers and computes masks in a background thread, which uses the library's thread pool."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._library: Executor | None = None

    def begin(self, tokens: Sequence[tuple[Matcher, int]]) -> None:
        """Add the next tokens of matchers that have a grammar."""
        if self._thread is None or self._library is None:
            from quire.grammar.library import executor

            self._thread, self._library = ThreadPoolExecutor(1, "masks"), executor()
        taken = [(matcher._compiled, token) for matcher, token in tokens if matcher._compiled is not None]
        masks = _Masks(self._library, taken, tokens[0][0].vocabulary, self._thread)
        for place, (matcher, _) in enumerate(tokens):
            matcher._next = (masks, place)

    def close(self) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


class _Masks:
    """Masks that are being computed, for the tokens after given ones. Their matchers must not be used before `wait`."""

    def __init__(
        self,
        library: Executor,
        taken: list[tuple[Compiled, int]],
        vocabulary: Vocabulary,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._library, self._taken = library, taken
        self._words = _no_words(len(taken), vocabulary)
        self._work: Future[None] | None = thread.submit(self._make)

    def wait(self) -> NDArray[np.int32]:
        """[matchers, words] int32, as made by the library; all zeros for a matcher that has failed."""
        work, self._work = self._work, None
        if work is not None and work.cancel():  # it has not begun, and may not soon on a busy machine
            self._make()
        elif work is not None:
            work.result()
        return self._words

    def _make(self) -> None:
        words, matchers = self._words, [matcher for matcher, _ in self._taken]
        self._library.consume_token_par(self._taken)
        places = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._library.unsafe_compute_mask_ptr(places, words.ctypes.data, words.itemsize * words.shape[1], len(words))
        words[[row for row, matcher in enumerate(matchers) if matcher.is_error()]] = 0  # the library allows the end


class Grammars:
    """Compiles and caches grammars for one model. Thread-safe.

    Args:
        vocabulary: makes the tokenizer's vocabulary when it is first needed; returns None if there is no tokenizer.
        most_seconds, most_bytes: most processor time that compiling a grammar may take, and memory that it may keep,
            beyond which it is refused; None: no limit.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary | None],
        most_seconds: float | None = None,
        most_bytes: int | None = None,
    ) -> None:
        self._make_vocabulary = vocabulary
        self._most_seconds, self._most_bytes = most_seconds, most_bytes
        self._tokenizer: Tokenizer | None = None
        self._vocabulary: Vocabulary | None = None
        self._spelling: Spelling | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, tuple[Compiled, int]] = OrderedDict()
        self._kept_bytes = 0
        self._in_use = InUse()
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[StructuredOutputsParams | None, Future[None]] = {}
        self._worker = MaskWorker()

    def __contains__(self, wanted: StructuredOutputsParams | None) -> bool:
        """Whether a grammar is compiled; see `take`."""
        return self.take(wanted) != "missing"

    def take(self, wanted: StructuredOutputsParams | None, alone: bool = False) -> Literal["ready", "missing", "full"]:
        """Whether a request may use a grammar: it is compiled, and kept for some steps; or it is not compiled; or those
        in use take too much beside it, unless it is `alone`. None needs nothing but the vocabulary."""
        with self._lock:
            if wanted is None:
                return "missing" if self._vocabulary is None else "ready"
            if wanted not in self._kept:
                return "missing"
            self._kept.move_to_end(wanted)
            size = self._kept[wanted][1]
            if not (alone or self._in_use.has_room(wanted, size)):
                return "full"
            self._in_use.found(wanted, size)
            return "ready"

    @property
    def used_bytes(self) -> int:
        """Bytes of the grammars that requests use."""
        with self._lock:
            return self._in_use.total

    def begin_step(self) -> None:
        """Another step is planned: see `STEPS_KEPT`."""
        with self._lock:
            self._in_use.begin_step()

    def settle(self) -> None:
        """No step is in flight: every request that runs has its matcher."""
        with self._lock:
            self._in_use.settle()

    def compile(self, wanted: StructuredOutputsParams | None) -> None:
        """Compile a grammar, so that matchers are cheap to make.

        Raises:
            SamplingParamsError: it is not valid, or too large.
        """
        if wanted is None:
            self._loaded()
        else:
            self._compiled(wanted)

    # -- in the background -----------------------------------------------------------------------------------

    def begin(self, wanted: StructuredOutputsParams | None) -> None:
        """Compile a grammar in the background; `ended` reports the end."""
        if wanted not in self._begun:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._begun[wanted] = self._thread.submit(self.compile, wanted)

    @property
    def compiling(self) -> bool:
        """Whether grammars are being compiled, or ends have not been reported yet."""
        return bool(self._begun)

    @property
    def num_compiling(self) -> int:
        """Number of these grammars."""
        return len(self._begun)

    def ended(self, seconds: float = 0.0) -> list[tuple[StructuredOutputsParams | None, BaseException | None]]:
        """The grammars whose compilation has ended, with errors; waits up to this many seconds for the first one."""
        if seconds:
            wait(self._begun.values(), seconds, "FIRST_COMPLETED")
        done = [(wanted, future) for wanted, future in self._begun.items() if future.done()]
        for wanted, _ in done:
            del self._begun[wanted]
        return [(wanted, future.exception()) for wanted, future in done]

    def close(self) -> None:
        """Compile no more; a compilation in progress is not interrupted."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._worker.close()

    # -- for the sampler -------------------------------------------------------------------------------------

    def matcher(
        self,
        wanted: StructuredOutputsParams | None,
        stop_ids: Iterable[int],
        output: Sequence[int] = (),
        budget: ReasoningBudget | None = None,
    ) -> Matcher:
        """Make a request's matcher, after the `output` that it has already.

        Args:
            wanted: its grammar; None if any token is allowed.
            stop_ids: tokens that end the request. If some have no text, those with text are allowed where the grammar
                allows them, and cut the reply off like a stop string.
            budget: the limit on its reasoning.

        Raises:
            SamplingParamsError: see `compile` and `ReasoningCounter`.
        """
        if begun := self._begun.get(wanted):
            wait([begun])
        compiled, size = (None, 0) if wanted is None else self._compiled(wanted)
        vocabulary = self._loaded()
        known = [token for token in stop_ids if 0 <= token < vocabulary.size]
        ends = [token for token in known if token not in vocabulary.texts] or known
        counter = None if budget is None else self._counter(budget)
        matcher = Matcher(compiled and compiled.deep_copy(), vocabulary, ends, counter, self._worker)
        if wanted is not None:
            with self._lock:
                self._in_use.made(matcher, wanted, size)
        for token in output:
            matcher.append(token)
        return matcher

    def _compiled(self, wanted: StructuredOutputsParams) -> tuple[Compiled, int]:
        """The matcher in its initial state, and the bytes that it takes."""
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
        from quire.grammar.library import MOST_BYTES, allocated, compiled

        tokenizer = self._library_tokenizer()
        begin, before = time.thread_time(), allocated()
        made = compiled(wanted, tokenizer, self._loaded())
        seconds, after = time.thread_time() - begin, allocated()
        if self._most_seconds is not None and seconds > self._most_seconds:
            raise SamplingParamsError(
                f"structured_outputs.{wanted.kind} takes {seconds:.1f} s to compile; at most {self._most_seconds:g} s "
                "are allowed: make it smaller"
            )
        taken = MOST_BYTES if before is None or after is None else min(max(0, after - before), MOST_BYTES)
        if self._most_bytes is not None and after is not None and taken > self._most_bytes:
            raise SamplingParamsError(
                f"structured_outputs.{wanted.kind} takes {taken >> 20} MiB when it is compiled; at most "
                f"{self._most_bytes >> 20} MiB are allowed: make it smaller"
            )
        with self._lock:
            if wanted not in self._kept:
                self._kept[wanted] = made, wanted.size + taken
                self._kept_bytes += wanted.size + taken
            self._evict()
        return made, wanted.size + taken

    def _evict(self) -> None:
        """As many as are too many, those first that were used least recently. The caller has the lock."""
        for oldest in list(self._kept)[:-1]:
            if len(self._kept) <= MAX_GRAMMARS and self._kept_bytes <= MAX_KEPT_BYTES:
                break
            if oldest not in self._in_use:
                self._kept_bytes -= self._kept.pop(oldest)[1]

    def _library_tokenizer(self) -> Tokenizer:
        vocabulary = self._loaded()
        with self._loading:
            if self._tokenizer is None:
                from quire.grammar.library import library_tokenizer

                self._tokenizer = library_tokenizer(vocabulary)
            return self._tokenizer

    def _loaded(self) -> Vocabulary:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            if self._vocabulary is None:
                raise SamplingParamsError("structured_outputs needs a tokenizer, and this checkpoint has none")
            return self._vocabulary

    def _counter(self, budget: ReasoningBudget) -> ReasoningCounter:
        vocabulary = self._loaded()
        self._spelling = self._spelling or Spelling(
            vocabulary.tokens[: vocabulary.size], vocabulary.specials, vocabulary
        )
        return ReasoningCounter(budget, self._spelling)
