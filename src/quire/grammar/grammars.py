"""Compiled grammars, and matchers: what each request's next token may be.

A mask depends on the tokens so far and on nothing else.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.core.structured_outputs import ReasoningBudget, StructuredOutputsParams
from quire.errors import SamplingParamsError
from quire.grammar.reasoning import ReasoningCounter, Spelling
from quire.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:  # loaded when the first grammar is compiled
    import llguidance

MAX_GRAMMARS = 256
"""Compiled grammars that are kept."""

MAX_KEPT_BYTES = 8 << 20
"""Of text that they were compiled from, all together."""


class Matcher:
    """Follows one request's output.

    Args:
        compiled: at its beginning; None: any token may come.
        vocabulary: the model's.
        ends: tokens that end the request, and are no text: they may come where the reply may end, and nowhere else.
        reasoning: counts the tokens of its reasoning; None: it may be of any length.
        beside: where `append` has its work done; None: in the calling thread.
    """

    def __init__(
        self,
        compiled: llguidance.LLMatcher | None,
        vocabulary: Vocabulary,
        ends: Sequence[int],
        reasoning: ReasoningCounter | None = None,
        beside: Beside | None = None,
    ) -> None:
        self._compiled, self.vocabulary, self.ends, self._reasoning = compiled, vocabulary, ends, reasoning
        self._beside = beside
        self._next: tuple[_Masks, int] | None = None  # what may come next, made beside, and its row

    @property
    def vocab_size(self) -> int:
        """The model's."""
        return self.vocabulary.size

    @property
    def _matcher(self) -> llguidance.LLMatcher | None:
        """The library's, when no other thread is at work on it."""
        if self._next is not None:
            self._next[0].wait()
        return self._compiled

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        matcher = self._matcher
        if matcher is None:
            return None
        from quire.grammar.library import no_way_on, why_not

        return why_not(matcher.get_error()) if matcher.is_error() else no_way_on(matcher, self.vocabulary)

    def append(self, token: int) -> None:
        """This is the next token; one that ends the request is followed by none. (Many matchers': see `append`.)"""
        if token not in self.ends:
            self._take(token)

    def _take(self, token: int) -> bool:
        """Whether it may stand there."""
        matcher, reasoning = self._matcher, self._reasoning
        self._next = None
        forced = reasoning.forced() if reasoning is not None else []
        if matcher is not None:
            if forced and reasoning is not None and reasoning.dangling:
                matcher.rollback(reasoning.dangling)  # half a character, which the marker cuts
            if not matcher.try_consume_tokens([token]):
                matcher.consume_token(token)  # for its error
                return False
        if reasoning is not None:
            reasoning.append(token)
        return not forced or token == forced[0]

    def mask(self, ahead: Sequence[int] = ()) -> NDArray[np.int32]:
        """See `masks`."""
        words: NDArray[np.int32] = masks([self], [ahead])[0]
        return words

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is one way on."""
        if self._reasoning is not None and (forced := self._reasoning.forced()):
            return forced
        forced = self._matcher.compute_ff_tokens() if self._matcher is not None else []
        return list(itertools.takewhile(lambda token: token < self.vocab_size, forced))

    def after(self, ahead: Sequence[int]) -> tuple[Matcher, Sequence[int]]:
        """Itself and these drafts; or a copy that has taken them, where reasoning might have to end among them."""
        reasoning = self._reasoning
        if not ahead or reasoning is None or not reasoning.may_force(len(ahead)):
            return self, ahead
        compiled = self._matcher.deep_copy() if self._matcher is not None else None
        other = Matcher(compiled, self.vocabulary, self.ends, reasoning.copy())
        taken = next((i for i, token in enumerate(ahead) if token in self.ends or not other._take(token)), len(ahead))
        return (other, ()) if taken == len(ahead) else (self, ahead)

    @property
    def only(self) -> int | None:
        """The one token that may come, whatever the grammar says; None: it has a say."""
        forced = self._reasoning.forced() if self._reasoning is not None else []
        return forced[0] if forced else None

    def _fill(self, address: int, size: int, ahead: Sequence[int]) -> int | None:
        """Writes the library's mask there, or returns the word that all of the mask consists of."""
        if self._matcher is None:
            return -1
        taken = self._matcher.try_consume_tokens(list(ahead)) if ahead else 0
        if taken == len(ahead):
            self._matcher.unsafe_compute_mask_ptr(address, size)
        failed = self._matcher.is_error()  # the library then allows the end
        if taken:
            self._matcher.rollback(taken)
        return 0 if failed else -1 if taken < len(ahead) else None


def masks(matchers: Sequence[Matcher], ahead: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    """A bit for each token, the lowest first: whether it may come next in each matcher, after the drafts `ahead`.

    [matchers, words] of 32. After drafts that may not stand there all may come, since nothing will. Where the matcher
    has failed, none may.
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
    words = np.ascontiguousarray(words[:, : -(-(vocab_size + 1) // 32)])  # without those that the model does not have
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
    """What the library fills in: a bit for each token that it knows."""
    return np.zeros((rows, -(-len(vocabulary.tokens) // 32)), np.int32)


def append(tokens: Sequence[tuple[Matcher, int]]) -> None:
    """These are the next tokens of different matchers: `Matcher.append`, for all of them in one call.

    What may come after them is found in another thread, while the caller goes on with the rest of its step and the
    next one. Whoever needs it before waits.
    """
    together: list[tuple[Matcher, int]] = []
    for matcher, token in tokens:
        if matcher._beside is None or matcher._reasoning is not None or token in matcher.ends:
            matcher.append(token)
        elif matcher._matcher is not None:
            together.append((matcher, token))
    if together and (beside := together[0][0]._beside) is not None:
        beside.begin(together)


class Beside:
    """Takes tokens in and makes masks in a thread of its own, which has the library's threads at hand."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._library: llguidance.LLExecutor | None = None

    def begin(self, tokens: Sequence[tuple[Matcher, int]]) -> None:
        """These are the next tokens, of matchers that have a grammar."""
        if self._thread is None or self._library is None:
            from quire.grammar.library import executor

            self._thread, self._library = ThreadPoolExecutor(1, "masks"), executor()
        taken = [(matcher._compiled, token) for matcher, token in tokens if matcher._compiled is not None]
        masks = _Masks(self._library, taken, tokens[0][0].vocabulary, self._thread)
        for place, (matcher, _) in enumerate(tokens):
            matcher._next = (masks, place)

    def close(self) -> None:
        """Nothing more comes."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)


class _Masks:
    """What may come after tokens that matchers take in; none of these may be touched before `wait`."""

    def __init__(
        self,
        library: llguidance.LLExecutor,
        taken: list[tuple[llguidance.LLMatcher, int]],
        vocabulary: Vocabulary,
        thread: ThreadPoolExecutor,
    ) -> None:
        self._library, self._taken = library, taken
        self._words = _no_words(len(taken), vocabulary)
        self._work: Future[None] | None = thread.submit(self._make)

    def wait(self) -> NDArray[np.int32]:
        """[matchers, words] as the library makes them; no token may come where a matcher has failed."""
        work, self._work = self._work, None
        if work is not None and work.cancel():  # it has not begun: other threads may keep a busy machine for long
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
    """Compiles grammars for one model, and keeps them. Safe to use from several threads.

    Args:
        vocabulary: makes the tokenizer's vocabulary, when it is first needed; None: there is no tokenizer.
        most_seconds: of a processor, that compiling one may take; what takes longer is refused. None: no bound.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary | None], most_seconds: float | None = None) -> None:
        self._make_vocabulary = vocabulary
        self._most_seconds = most_seconds
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._vocabulary: Vocabulary | None = None
        self._spelling: Spelling | None = None
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, llguidance.LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[StructuredOutputsParams | None, Future[None]] = {}
        self._beside = Beside()

    def __contains__(self, wanted: StructuredOutputsParams | None) -> bool:
        """Whether it is compiled; None: whether the vocabulary is there, all that a free reply needs."""
        with self._lock:
            return wanted in self._kept if wanted is not None else self._vocabulary is not None

    def compile(self, wanted: StructuredOutputsParams | None) -> None:
        """Have it compiled, so that a matcher costs little.

        Raises:
            SamplingParamsError: it is not valid, or too large.
        """
        if wanted is None:
            self._loaded()
        else:
            self._compiled(wanted)

    # -- beside whoever asks ---------------------------------------------------------------------------------

    def begin(self, wanted: StructuredOutputsParams | None) -> None:
        """Have it compiled in another thread; `ended` tells when that is over."""
        if wanted not in self._begun:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._begun[wanted] = self._thread.submit(self.compile, wanted)

    @property
    def compiling(self) -> bool:
        """Whether `ended` has more to tell."""
        return bool(self._begun)

    def ended(self, seconds: float = 0.0) -> list[tuple[StructuredOutputsParams | None, BaseException | None]]:
        """What has ended of what was begun, and why it failed; where nothing has, it is waited for so long."""
        if seconds:
            wait(self._begun.values(), seconds, "FIRST_COMPLETED")
        done = [(wanted, future) for wanted, future in self._begun.items() if future.done()]
        for wanted, _ in done:
            del self._begun[wanted]
        return [(wanted, future.exception()) for wanted, future in done]

    def close(self) -> None:
        """Compile no more; what is being compiled is left to its thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
        self._beside.close()

    # -- for the sampler -------------------------------------------------------------------------------------

    def matcher(
        self,
        wanted: StructuredOutputsParams | None,
        stop_ids: Iterable[int],
        output: Sequence[int] = (),
        budget: ReasoningBudget | None = None,
    ) -> Matcher:
        """A request's own, after the `output` that it has already.

        Args:
            wanted: None: all may come.
            stop_ids: tokens that end it. Those that are text (where there are others) may come where the grammar has
                them, and cut the reply, as a stop string does.
            budget: of its reasoning.

        Raises:
            SamplingParamsError: see `compile` and `ReasoningCounter`.
        """
        if begun := self._begun.get(wanted):
            wait([begun])
        compiled = None if wanted is None else self._compiled(wanted).deep_copy()
        vocabulary = self._loaded()
        known = [token for token in stop_ids if 0 <= token < vocabulary.size]
        ends = [token for token in known if token not in vocabulary.texts] or known
        counter = None if budget is None else self._counter(budget)
        matcher = Matcher(compiled, vocabulary, ends, counter, self._beside)
        for token in output:
            matcher.append(token)
        return matcher

    def _compiled(self, wanted: StructuredOutputsParams) -> llguidance.LLMatcher:
        with self._lock:
            if wanted in self._kept:
                self._kept.move_to_end(wanted)
                return self._kept[wanted]
        from quire.grammar.library import compiled

        tokenizer = self._library_tokenizer()
        begin = time.thread_time()
        made = compiled(wanted, tokenizer, self._loaded())
        seconds = time.thread_time() - begin
        if self._most_seconds is not None and seconds > self._most_seconds:
            raise SamplingParamsError(
                f"structured_outputs.{wanted.kind} takes {seconds:.1f} s to compile; at most {self._most_seconds:g} s "
                "are allowed: make it smaller"
            )
        with self._lock:
            if wanted not in self._kept:
                self._kept[wanted] = made
                self._kept_bytes += wanted.size
            while len(self._kept) > MAX_GRAMMARS or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.size
        return made

    def _library_tokenizer(self) -> llguidance.LLTokenizer:
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
