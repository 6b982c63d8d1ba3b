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
from quire.text.reply_grammar import ReplyRequest
from quire.text.reply_parser import ReplyParser
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import RenderedChat, Tokenizer
from tests.server_fakes import AppThread, FakeEngineClient, FakeTokenizerPool, _empty_output, app_context, engine_info
from tests.test_reply_grammar import grammars_of


class ScriptedPool(FakeTokenizerPool):
    """A tokenizer and its template, in this process."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.reply_syntax = tokenizer.reply_syntax
        self._tokenizer = tokenizer

    async def render(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: dict[str, Any] | None = None,
        reply: ReplyRequest | None = None,
        max_tokens: int | None = None,
    ) -> RenderedChat:
        return self._tokenizer.apply_chat_template(
            list(messages),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=variables,
            reply=reply,
            max_tokens=max_tokens,
        )

    async def compile_grammar(self, wanted: StructuredOutputsParams) -> None:
        grammars_of(self._tokenizer).matcher(wanted, [0])


class ScriptedEngine(FakeEngineClient):
    """Writes `replies`, one a request, and keeps the `prompts`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(info=engine_info(vocab_size=tokenizer.vocab_size, max_model_len=1 << 20))
        self.replies: list[str] = []
        self.prompts: list[str] = []
        self._tokenizer = tokenizer

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
        found, output = self._tokenizer, _empty_output(name, prepared, 0)
        [choice] = output.outputs
        parser = ReplyParser(prepared.reply or ReplyForm(), found.special_texts)
        choice.events, detokenizer = parser.events, Detokenizer(found, prepared.params, parser)
        wanted = prepared.params.structured_outputs
        matcher = None if wanted is None else grammars_of(found).matcher(wanted, [0])
        for token in found._controls().encode(self.replies.pop(0)).ids:
            if matcher is not None:
                bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
                assert bits[token], f"masked: {found.decode([token], False)!r} after {choice.text!r}"
                matcher.append(token)
            output.begin_deltas()
            choice.token_ids.append(token)
            choice.text += detokenizer.push([token])
            yield output.hand_out()
        assert matcher is None or np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")[0], "it may not end"
        choice.text += detokenizer.finish()
        choice.finish_reason = "stop"
        yield output.hand_out()


@contextlib.contextmanager
def scripted_server(tokenizer: Tokenizer) -> Iterator[tuple[str, ScriptedEngine]]:
    """The app on a port of this process, and its engine."""
    engine = ScriptedEngine(tokenizer)
    context = app_context(engine, ScriptedPool(tokenizer))
    with AppThread(lambda: create_app(context)) as thread:
        yield thread.url, engine
