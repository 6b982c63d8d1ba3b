"""Incremental detokenization: whole characters only, and stop strings that may span tokens.

The text of a token depends on its neighbours: a character may be spread over several tokens, and some
decoders strip the space of the first one. So a window of the last tokens is decoded together, and the new
text that can no longer change is emitted. The whole text equals `Tokenizer.decode` of all tokens; behind a prompt that
it continues, `decode` of prompt and output without that of the prompt.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.core.sampling_params import SamplingParams
from quire.errors import TokenizerFailedError
from quire.text.reply_parser import ReplyParser
from quire.text.tokenizer import Tokenizer

UNFINISHED = "\ufffd"
"""A decoder's output for invalid bytes, and so for a character whose last bytes are still missing."""

MAX_WINDOW = 32
"""The usual limit of tokens decoded together; beyond it, half of them are kept as context."""

LONGEST_WINDOW = 128
"""The hard limit of tokens decoded together."""

TAIL = 4
"""Visible tokens of a prompt that are decoded before its continuation, and those of a run of bytes at its end."""

MAX_TEXT = 16 << 20
"""Maximum characters of a choice: 64 per token for a context of 262,144."""

MAX_BYTE_RUN = 64
"""Maximum tokens held back of a run of byte tokens, since one bad byte at its end invalidates the run."""


class TextStream:
    """Turns tokens into text deltas. The concatenated deltas are the text of all tokens.

    There are two exceptions. Where a decoder joins runs of byte tokens (Llama 2), a bad byte invalidates its whole run;
    of a run longer than `MAX_BYTE_RUN`, the valid part so far is emitted anyway. And if the text of the last tokens
    never is a suffix of the text of all (no known decoder does this), the text continues from the last ones after
    `LONGEST_WINDOW` tokens.

    A call decodes at most `LONGEST_WINDOW` tokens of `MAX_TOKEN_TEXT` characters each.

    Args:
        prompt: tokens that the text continues, of which only the last ones matter.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []
        self._text = ""  # of the window
        self._given = 0  # characters of it already emitted
        self._run = 0  # byte tokens at the window's end
        self._run_is_bad = False  # a long run of byte tokens holds an invalid byte
        self._continue(prompt)

    def _continue(self, prompt: Sequence[int]) -> None:
        """Begin behind the end of a prompt, as far as it is visible within its last `LONGEST_WINDOW` tokens: decoders
        strip a space from the first token of a text alone."""
        byte_ids = self._tokenizer.byte_ids
        for token in reversed(prompt[-LONGEST_WINDOW:]):
            if self._run == len(self._window) < MAX_BYTE_RUN and token in byte_ids:
                self._run += 1
            elif len(self._window) >= self._run + TAIL:
                break
            if self._is_visible(token):
                self._window.append(token)
        self._window.reverse()
        self._text = self._decode(self._window)
        self._given = len(self._text)
        last = [self._tokenizer.token_bytes(token) for token in self._window[len(self._window) - self._run :]]
        if self._run and b"".join(last).decode(errors="replace").endswith(UNFINISHED):
            # The output may complete this character, and then the text of the run is another one.
            self._given = len(self._decode(self._window[: -self._run]))

    def _is_visible(self, token_id: int) -> bool:
        hidden = self._skip_special_tokens and token_id in self._tokenizer.special_ids
        return not hidden and self._tokenizer.knows(token_id)

    def push(self, token_id: int) -> str:
        """The text that is final with this token."""
        if not self._is_visible(token_id):
            return ""
        is_byte = token_id in self._tokenizer.byte_ids
        self._run_is_bad &= is_byte
        if self._run_is_bad:
            return UNFINISHED
        self._window.append(token_id)
        self._run = self._run + 1 if is_byte else 0
        if 0 < self._run < MAX_BYTE_RUN:
            return ""
        self._text = self._decode(self._window)
        if self._run:
            return self._cut_run()
        # Of invalid bytes only the last mark can still change: it may stand for an unfinished character.
        settled = len(self._text) - self._text.endswith(UNFINISHED)
        delta = self._text[self._given : settled]
        self._given = max(self._given, settled)
        if len(self._window) > MAX_WINDOW:
            delta += self._shorten()
        return delta

    def settle(self) -> str:
        """The text held back, at the end or before a boundary. A character that is cut there is lost."""
        self._text = self._decode(self._window)
        delta = self._text[self._given :]
        self._given = len(self._text)
        return delta

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, self._skip_special_tokens)

    def _cut_run(self) -> str:
        """Ends a long run of byte tokens between two characters, or anywhere if it has bad bytes."""
        is_open = self._text.endswith(UNFINISHED)
        if is_open and self._run < MAX_BYTE_RUN + 4:
            return ""
        self._run_is_bad = is_open  # a good run would have ended a character within four bytes
        delta = self._text[self._given :]
        # Plain text in place of the run: the next byte begins a run of its own, and no space is stripped.
        self._window = self._tokenizer.anchor
        self._text = self._decode(self._window)
        self._given, self._run = len(self._text), 0
        return delta

    def _shorten(self) -> str:
        """Drop the older half of the window if the text ends with that of the rest; the text that is then final."""
        rest = self._window[-(MAX_WINDOW // 2) :]
        text = self._decode(rest)
        delta = ""
        # Up to three characters at the cut may differ: a stripped space, or bytes whose first one was cut off.
        if len(text) > 3 and self._text.endswith(text[3:]):
            self._given = len(text) - (len(self._text) - self._given)
        elif len(self._window) >= LONGEST_WINDOW:
            delta, self._given = self._text[self._given :], len(text)
        else:
            return ""
        self._window, self._text = rest, text
        return delta


class Detokenizer:
    """The text of one choice of a request, cut at its stop strings.

    Attributes:
        stopped: the stop string that ended the text; None while none did.
        num_tokens: tokens pushed so far; once stopped, those up to the one that completed the stop string.

    Args:
        parser: receives the visible text, and the special tokens that delimit the reply's parts.
        prompt: what the text continues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        params: SamplingParams,
        parser: ReplyParser | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self.stopped: str | None = None
        self.num_tokens = 0
        self._stream = TextStream(tokenizer, params.skip_special_tokens, prompt)
        self._parser = parser
        self._markers = tokenizer.special_tokens_named(parser.markers) if parser is not None else {}
        self._stops = params.stop_strings
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._held = ""  # text that could begin a stop string
        self._room = MAX_TEXT

    def push(self, token_ids: Sequence[int]) -> str:
        """The new visible text. Tokens after a stop string are ignored.

        A possible prefix of a stop string is held back. The first stop string completed wins; of two completed by
        the same character, the longer one. Stop strings apply from the `min_tokens`-th token on.

        Raises:
            TokenizerFailedError: the decoder failed, or the text is longer than `MAX_TEXT`.
        """
        shown = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens += 1
            if token_id in self._markers:
                shown.append(self._marker(token_id))
            else:
                shown.append(self._read(self._release(self._stream.push(token_id))))
        return "".join(shown)

    def _read(self, shown: str) -> str:
        """Pass visible text to the parser."""
        parser = self._parser
        if parser is not None:
            before = parser.in_reasoning
            parser.text(shown)
            parser.reasoning_tokens += before or parser.in_reasoning
            if self.stopped is not None:
                parser.finish()
        return shown

    def _marker(self, token_id: int) -> str:
        """A special token that the parser handles: a boundary in the text that stop strings do not cross."""
        shown = self._release(self._stream.settle())
        if self.stopped is None:
            shown, self._held = shown + self._held, ""
        self._read(shown)
        if self._parser is not None and self.stopped is None:
            before = self._parser.in_reasoning
            self._parser.special(self._markers[token_id])
            self._parser.reasoning_tokens += not before and self._parser.in_reasoning
        return shown + (self._stream.push(token_id) if self.stopped is None else "")

    def finish(self) -> str:
        """The rest of the text, after the last token. It may complete a stop string, too."""
        if self.stopped is not None:
            return ""
        shown = self._release(self._stream.settle())
        rest, self._held = self._held, ""
        if self._parser is not None:
            self._parser.text(shown + rest)
            self._parser.finish()
        return shown + rest

    def _release(self, delta: str) -> str:
        self._room -= len(delta)
        if self._room < 0:
            raise TokenizerFailedError(f"the text is longer than {MAX_TEXT} characters; ask for fewer tokens")
        if not self._stops or not delta:
            return delta
        text = self._held + delta
        # Only matches that end within the delta count: earlier ones may have been skipped by min_tokens.
        before, self._held = len(self._held), ""
        if self.num_tokens >= self._min_tokens:
            found = [(text.find(stop, max(0, before - len(stop) + 1)), stop) for stop in self._stops]
            ends = [(at + len(stop), at, stop) for at, stop in found if at >= 0]
            if ends:
                end, start, self.stopped = min(ends)
                return text[: end if self._include_stop else start]
        keep = self._possible_start(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def _possible_start(self, text: str) -> int:
        """Length of the text's longest suffix that is a prefix of a stop string."""
        longest = min(len(text), max(map(len, self._stops)) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
