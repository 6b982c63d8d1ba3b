"""A scripted model behind the whole app: it writes given replies, each token of which the request's mask must let come.

The template renders the requests, the tokenizer cuts the replies, the parser reads them, and the routes answer: all but
the numbers is as in a server with a model of that family.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

import numpy as np

from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.frontend import Prepared
from quire.engine.outputs import RequestOutput
from quire.server.app import create_app
from quire.text.detokenizer import Detokenizer
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import RenderedChat, Tokenizer
from tests.server_fakes import AppThread, FakeEngineClient, FakeTokenizerPool, _empty_output, app_context, engine_info
from tests.test_reply_grammar import grammars_of


class ScriptedPool(FakeTokenizerPool):
    """A tokenizer and its template, in this process.

    Attributes:
        tokenizer: what it has; see `use`.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.use(tokenizer)

    def use(self, tokenizer: Tokenizer) -> None:
        """From now on the model is another one."""
        self.tokenizer, self.reply_syntax = tokenizer, tokenizer.reply_syntax
        self.grammars = grammars_of(tokenizer)

    async def render(self, messages: Sequence[dict[str, Any]], **options: Any) -> RenderedChat:
        return self.tokenizer.apply_chat_template(list(messages), **options)

    async def compile_grammar(self, wanted: StructuredOutputsParams) -> None:
        self.grammars.matcher(wanted, [0])


class ScriptedEngine(FakeEngineClient):
    """Writes `replies`, one a request, and keeps the `prompts`.

    Attributes:
        pool: has the model.
        corrected: what the mask did not let the model write; None: that is an error.
    """

    def __init__(self, pool: ScriptedPool) -> None:
        super().__init__(info=engine_info(vocab_size=1 << 20, max_model_len=1 << 20))
        self.pool = pool
        self.replies: list[str] = []
        self.prompts: list[str] = []
        self.corrected: list[str] | None = None

    def prepare(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        bad_words: Sequence[list[int]] = (),
        reply: object = None,
    ) -> Prepared:
        prepared = super().prepare(text, token_ids, params, bad_words)
        assert isinstance(reply, ReplyForm)
        return dataclasses.replace(prepared, reply=reply)

    async def generate(self, prepared: Prepared, *, name: str, **_: Any) -> AsyncGenerator[RequestOutput, None]:
        self.prompts.append(prepared.text or "")
        model, output = self.pool.tokenizer, _empty_output(name, prepared, 0)
        [choice] = output.outputs
        parser = ReplyParser(prepared.reply or ReplyForm(), model.special_texts)
        choice.events, detokenizer = parser.events, Detokenizer(model, prepared.params, parser)
        wanted = prepared.params.structured_outputs
        matcher = None if wanted is None else self.pool.grammars.matcher(wanted, [0])
        for token in model.encode(self.replies.pop(0), add_special_tokens=False, parse_special=True):
            if matcher is not None:
                allowed = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                if not allowed[token]:
                    assert self.corrected is not None, f"masked: {model.decode([token], False)!r} after {choice.text!r}"
                    self.corrected.append(model.token_text(token))
                    token = int(np.flatnonzero(allowed)[0])
                matcher.append(token)
            output.begin_deltas()
            choice.token_ids.append(token)
            choice.delta += detokenizer.push([token])
            choice.text += choice.delta
            yield output.hand_out()
        ends = matcher is None or np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[0]
        assert ends or self.corrected, "it may not end"
        output.begin_deltas()
        choice.delta += detokenizer.finish()
        choice.finish_reason = "stop"
        yield output.hand_out()


@contextlib.contextmanager
def scripted_server(tokenizer: Tokenizer) -> Iterator[tuple[str, ScriptedEngine]]:
    """The app on a port of this process, and its engine."""
    pool = ScriptedPool(tokenizer)
    engine = ScriptedEngine(pool)
    context = app_context(engine, pool)
    with AppThread(lambda: create_app(context)) as thread:
        yield thread.url, engine
