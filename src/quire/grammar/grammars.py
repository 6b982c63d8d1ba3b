"""Compiled grammars, and matchers: what each request's next token may be.

A mask depends on the tokens so far and on nothing else.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import SamplingParamsError
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
        compiled: at its beginning.
        vocab_size: the model's.
        ends: tokens that end the request, and are no text: they may come where the reply may end, and nowhere else.
    """

    def __init__(self, compiled: llguidance.LLMatcher, vocab_size: int, ends: Sequence[int]) -> None:
        self._matcher, self.vocab_size, self.ends = compiled, vocab_size, ends

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        return " ".join(self._matcher.get_error().split()) if self._matcher.is_error() else None

    def append(self, token: int) -> None:
        """This is the next token; one that ends the request is followed by none."""
        if token not in self.ends:
            self._matcher.consume_token(token)

    def mask(self, ahead: Sequence[int] = ()) -> NDArray[np.int32]:
        """See `masks`."""
        words: NDArray[np.int32] = masks([self], [ahead])[0]
        return words

    def forced(self) -> list[int]:
        """The tokens that must come next, as far as there is one way on."""
        return self._matcher.compute_ff_tokens()

    def _fill(self, address: int, size: int, ahead: Sequence[int]) -> int | None:
        """Writes the library's mask there, or returns the word that all of the mask consists of."""
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
    vocab_size = matchers[0].vocab_size if matchers else 0
    words = np.zeros((len(matchers), -(-(vocab_size + 1) // 32)), np.int32)
    address, size = words.ctypes.data, words.itemsize * words.shape[1]
    for row, (matcher, drafts) in enumerate(zip(matchers, ahead, strict=True)):
        all_words = matcher._fill(address + row * size, size, drafts)
        if all_words is not None:
            words[row] = all_words
    ends = [len(matcher.ends) for matcher in matchers]
    rows = np.repeat(np.arange(len(matchers)), ends)
    tokens = np.fromiter((token for matcher in matchers for token in matcher.ends), np.int64, len(rows))
    may_end = (words[:, vocab_size >> 5] >> (vocab_size & 31) & 1).astype(np.int32)
    places, bits = (rows, tokens >> 5), np.left_shift(1, tokens & 31).astype(np.int32)
    np.bitwise_and.at(words, places, ~bits)
    np.bitwise_or.at(words, places, bits * may_end[rows])
    return words


class Grammars:
    """Compiles grammars for one model, and keeps them. Safe to use from several threads.

    Args:
        vocabulary: makes the tokenizer's vocabulary, when it is first needed; None: there is no tokenizer.
    """

    def __init__(self, vocabulary: Callable[[], Vocabulary | None]) -> None:
        self._make_vocabulary = vocabulary
        self._tokenizer: llguidance.LLTokenizer | None = None
        self._vocab_size = 0
        self._texts: Container[int] = ()
        self._specials: Mapping[str, int] = {}
        self._loading = threading.Lock()
        self._lock = threading.Lock()
        self._kept: OrderedDict[StructuredOutputsParams, llguidance.LLMatcher] = OrderedDict()
        self._kept_bytes = 0
        self._thread: ThreadPoolExecutor | None = None
        self._begun: dict[StructuredOutputsParams, Future[None]] = {}

    def __contains__(self, wanted: StructuredOutputsParams) -> bool:
        """Whether it is compiled."""
        with self._lock:
            return wanted in self._kept

    def compile(self, wanted: StructuredOutputsParams) -> None:
        """Have it compiled, so that a matcher costs little.

        Raises:
            SamplingParamsError: it is not valid, or too large.
        """
        self._compiled(wanted)

    # -- beside whoever asks ---------------------------------------------------------------------------------

    def begin(self, wanted: StructuredOutputsParams) -> None:
        """Have it compiled in another thread; `ended` tells when that is over."""
        if wanted not in self._begun:
            self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
            self._begun[wanted] = self._thread.submit(self.compile, wanted)

    @property
    def compiling(self) -> bool:
        """Whether `ended` has more to tell."""
        return bool(self._begun)

    def ended(self, seconds: float = 0.0) -> list[tuple[StructuredOutputsParams, BaseException | None]]:
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

    # -- for the sampler -------------------------------------------------------------------------------------

    def matcher(self, wanted: StructuredOutputsParams, stop_ids: Iterable[int], output: Sequence[int] = ()) -> Matcher:
        """A request's own, after the `output` that it has already.

        Args:
            stop_ids: tokens that end it. Those that are text (where there are others) may come where the grammar has
                them, and cut the reply, as a stop string does.

        Raises:
            SamplingParamsError: see `compile`.
        """
        if begun := self._begun.get(wanted):
            wait([begun])
        compiled, known = self._compiled(wanted), [token for token in stop_ids if 0 <= token < self._vocab_size]
        ends = [token for token in known if token not in self._texts] or known
        matcher = Matcher(compiled.deep_copy(), self._vocab_size, ends)
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
        made = compiled(wanted, tokenizer, self._specials)
        with self._lock:
            if wanted not in self._kept:
                self._kept[wanted] = made
                self._kept_bytes += wanted.size
            while len(self._kept) > MAX_GRAMMARS or (self._kept_bytes > MAX_KEPT_BYTES and len(self._kept) > 1):
                oldest, _ = self._kept.popitem(last=False)
                self._kept_bytes -= oldest.size
        return made

    def _library_tokenizer(self) -> llguidance.LLTokenizer:
        with self._loading:
            if self._tokenizer is None:
                vocabulary = self._make_vocabulary()
                if vocabulary is None:
                    raise SamplingParamsError("structured_outputs needs a tokenizer, and this checkpoint has none")
                self._vocab_size, self._texts = vocabulary.eos_token_id, vocabulary.texts
                self._specials = vocabulary.specials
                from quire.grammar.library import library_tokenizer

                self._tokenizer = library_tokenizer(vocabulary)
            return self._tokenizer
