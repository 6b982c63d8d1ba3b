"""From a reply's tokens to events: see `reply.py`. However the reply is cut into pieces, the events add up to the same.

The parser goes by the same `ReplySyntax` from which the grammar of a reply is made (`reply_grammar.py`), so under a
grammar it only ever meets what it knows. Without one, whatever does not look like reasoning is content.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

from quire.text.reply import ContentText, ReasoningText, ReplyEvent
from quire.text.reply_syntax import ReplyForm, ReplySyntax

SPECIAL = "\ud800"
"""Stands before a special token's text, so that nothing which a model spells can be taken for one: half of a surrogate
pair is in no text."""


@functools.lru_cache(maxsize=16)
def special_markers(syntax: ReplySyntax, special_texts: tuple[str, ...]) -> tuple[str, ...]:
    """Special tokens that markers hold, the longest first."""
    markers = "\0".join(syntax.texts())
    return tuple(sorted((text for text in special_texts if text and text in markers), key=len, reverse=True))


class ReplyParser:
    """Reads one reply.

    Attributes:
        events: what it was made of so far.
        reasoning_tokens: tokens of the reasoning, its end marker included.

    Args:
        specials: texts of the tokenizer's special tokens.
    """

    def __init__(self, form: ReplyForm, specials: Iterable[str] = ()) -> None:
        self.events: list[ReplyEvent] = []
        self.reasoning_tokens = 0
        self.markers = frozenset(special_markers(form.syntax, tuple(specials)))
        self._form = form
        self._buffer = ""
        self._held_white = ""
        self._fresh = True  # nothing of this part was given out
        self._step: Callable[[bool], bool] = self._begin
        if form.in_reasoning and form.syntax.reasoning is not None:
            self._step = self._reasoning

    @property
    def in_reasoning(self) -> bool:
        return self._step == self._reasoning

    def text(self, text: str) -> None:
        """More text of the reply."""
        if text:
            self._buffer += text
            self._run(final=False)

    def special(self, text: str) -> None:
        """A special token that is one of `markers`."""
        self.text(SPECIAL + text)

    def finish(self) -> None:
        """Nothing more will come."""
        self._run(final=True)

    def _run(self, final: bool) -> None:
        while self._step(final):
            pass

    # -- the parts of a reply; each takes what it can from the buffer, and says whether that led to another part -----

    def _begin(self, final: bool) -> bool:
        reasoning = self._form.syntax.reasoning
        if reasoning is not None:
            start, text = self._marker(reasoning.start), self._buffer.lstrip()
            if text.startswith(start):
                self._buffer = text[len(start) :]
                self._step = self._reasoning
                return True
            if start.startswith(text) and not final:
                return False
        self._step = self._content
        return True

    def _reasoning(self, final: bool) -> bool:
        reasoning = self._form.syntax.reasoning
        if reasoning is None:
            raise RuntimeError("reasoning without a syntax for it")
        text, found = self._take_until(self._marker(reasoning.end), final)
        if self._fresh:
            text = text.lstrip()
        text = self._held_white + text
        kept = text.rstrip()
        self._held_white = "" if found or final else text[len(kept) :]
        if kept:
            self._fresh = False
            self.events.append(ReasoningText(kept))
        if found:
            self._step, self._fresh = self._after_reasoning, True
        return found

    def _after_reasoning(self, final: bool) -> bool:
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        self._step = self._content
        return True

    def _content(self, final: bool) -> bool:
        text, self._buffer = self._buffer.replace(SPECIAL, ""), ""
        if text:
            self.events.append(ContentText(text))
        return False

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _marker(self, text: str) -> str:
        """As it stands in the buffer."""
        return _marked(text, self.markers)

    def _take_until(self, marker: str, final: bool) -> tuple[str, bool]:
        """Text up to a marker, which is taken too; or as much as cannot be its beginning."""
        before, found, after = self._buffer.partition(marker)
        if found:
            self._buffer = after
            return before, True
        keep = 0 if final else possible_start(before, marker)
        self._buffer = before[len(before) - keep :]
        return before[: len(before) - keep], False


def possible_start(text: str, marker: str) -> int:
    """Length of the longest end of a text that begins the marker."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0


@functools.lru_cache(maxsize=1024)
def _marked(text: str, markers: frozenset[str]) -> str:
    if not markers:
        return text
    either = "|".join(re.escape(marker) for marker in sorted(markers, key=len, reverse=True))
    return re.sub(either, lambda found: SPECIAL + found[0], text)
