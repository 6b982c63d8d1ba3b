"""Shows an answer while it streams: reasoning folded into one line, text as it is, tool calls as cards."""

from __future__ import annotations

import re
import sys
import time

from quire.cli.terminal import visible
from quire.text.reply import ContentText, ReasoningText, ReplyEvent, ToolCallArguments, ToolCallBegin

DIM, CYAN, PLAIN, ERASE_LINE = "\x1b[2m", "\x1b[36m", "\x1b[0m", "\r\x1b[K"
FRAME_SECONDS = 0.1

_STEERING = re.compile("[\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")
"""Characters that are invisible or reorder others. They are replaced in what a user must approve."""


def exact(text: str) -> str:
    """The text as shown for approval: without control characters, invisible ones, or ones that reorder others."""
    return _STEERING.sub("\N{REPLACEMENT CHARACTER}", visible(text))


class AnswerView:
    """Shows one answer. Its text goes to standard output, everything else to standard error.

    Args:
        unfold: show reasoning in full, as it comes.
    """

    def __init__(self, unfold: bool = False) -> None:
        self._unfold = unfold
        self._live = sys.stderr.isatty()
        self._part: type[ReplyEvent] | None = None
        self._words, self._in_word, self._drawn = 0, False, 0.0

    def show(self, event: ReplyEvent) -> None:
        """Show a part of the answer."""
        part = ToolCallArguments if isinstance(event, ToolCallBegin | ToolCallArguments) else type(event)
        if part is not self._part or isinstance(event, ToolCallBegin):
            self._end_part()
            self._part = part
        match event:
            case ReasoningText(text):
                self._reason(text)
            case ContentText(text):
                sys.stdout.write(visible(text))
                sys.stdout.flush()
            case ToolCallBegin(_, _, name):
                self._say(f"{self._styled(f'╭ {exact(name)}', CYAN)}\n{self._styled('│', CYAN)} ")
            case ToolCallArguments(_, text):
                self._say(exact(text).replace("\n", f"\n{self._styled('│', CYAN)} "))

    def close(self) -> None:
        """End the answer, so that what follows begins on a new line."""
        self._end_part()
        self._part = None

    def _end_part(self) -> None:
        if self._part is ReasoningText:
            if self._unfold:
                self._say("\n")
            else:
                line = f"(thought for {self._words:,} words; /reasoning shows them)\n"
                self._say((ERASE_LINE if self._live else "") + self._styled(line, DIM))
        elif self._part is ContentText:
            sys.stdout.write("\n")
            sys.stdout.flush()
        elif self._part is ToolCallArguments:
            self._say(f"\n{self._styled('╰', CYAN)}\n")

    def _reason(self, text: str) -> None:
        for character in text:
            self._words += not self._in_word and not character.isspace()
            self._in_word = not character.isspace()
        if self._unfold:
            self._say(self._styled(visible(text), DIM))
        elif self._live and time.monotonic() - self._drawn >= FRAME_SECONDS:
            self._drawn = time.monotonic()
            self._say(ERASE_LINE + self._styled(f"thinking: {self._words:,} words", DIM))

    def _styled(self, text: str, style: str) -> str:
        return f"{style}{text}{PLAIN}" if self._live else text

    @staticmethod
    def _say(text: str) -> None:
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.stderr.flush()
