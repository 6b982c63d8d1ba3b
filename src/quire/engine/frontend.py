"""The client's side of the engine: from prompts to requests, and from updates to text.

`LLM`, `AsyncLLM` and the server use it: it validates and tokenizes prompts, splits a prompt into its `n` choices, turns
tokens back into text step by step, finds stop strings, and keeps the outputs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import logging
import secrets
import string
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from msgspec.structs import replace

from quire.core.pooling import MAX_LABELS, PoolingParams
from quire.core.request import Request, RequestStats, RequestUpdate
from quire.core.sampling_params import SEED_BITS, SamplingParams
from quire.core.step import TokenLogprobs
from quire.core.structured_outputs import ReasoningBudget, StructuredOutputsParams
from quire.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from quire.engine.prompts import LiteralText, Plain, Prompt, checked_token_ids, plain_prompt
from quire.errors import (
    EmbeddingModelError,
    EmptyPromptError,
    PromptTooLongError,
    RequestError,
    SamplingParamsError,
    TokenizerFailedError,
    TokenOutOfRangeError,
)
from quire.text.detokenizer import Detokenizer
from quire.text.reply_parser import ID_LENGTH, ReplyParser
from quire.text.reply_syntax import ReplyForm
from quire.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")
EMBEDS_ALONE = (
    "this model embeds texts and predicts no tokens, since its tokens see those that follow them: use LLM.embed or "
    "/v1/embeddings"
)
MAX_REQUEST_ID_LENGTH = 256
ID_LETTERS = string.ascii_letters + string.digits


@dataclass(slots=True)
class _Choice:
    """One choice in flight: its request number in the core, and its detokenizer."""

    request: int
    output: CompletionOutput
    detokenizer: Detokenizer | None
    parser: ReplyParser | None = None
    stopped_by: str | None = None  # the stop string found
    aborted: bool = False
    detokenize_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Prepared:
    """A prompt that has been validated and tokenized, but does not run yet.

    Attributes:
        max_tokens: most tokens to generate.
        clamped_from: the requested `max_tokens`, if the context has no room for it.
        pooling: how the prompt is pooled; then no tokens are generated.
        reply: for a chat, the form of the reply.
    """

    text: str | None
    token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    bad_words: list[list[int]]
    clamped_from: int | None = None
    pooling: PoolingParams | None = None
    reply: ReplyForm | None = None

    @property
    def reasoning(self) -> ReasoningBudget | None:
        """The limit on the reply's reasoning, if any."""
        tokens = self.params.thinking_token_budget
        return None if tokens is None or self.reply is None else self.reply.budget(tokens)


@dataclass(slots=True)
class _Live:
    """A user's request, from its submission until its last output was returned; its id is in use for that time."""

    output: RequestOutput
    prepared: Prepared
    scope: str
    owner: str = ""
    choices: list[_Choice] = field(default_factory=list)
    stats: dict[int, RequestStats] = field(default_factory=dict)  # by choice
    dropped: bool = False  # nobody reads it


class Frontend:
    """Requests in, outputs out, for one engine.

    Args:
        tokenizer: None for a checkpoint without one: then prompts are token ids and outputs have no text.
        defaults: the checkpoint's sampling defaults.
        add: queues a request in the engine.
        abort: ends a request there, given its number and a reason; returns its last update if the engine is in this
            process, and nothing if it comes later.
        first_number: the first request's number.
        compile: checks required forms of outputs, see `Grammars.compile`; None: that is done elsewhere.
        causal: see `ModelSizes`; if false, prompts can only be embedded.
    """

    def __init__(
        self,
        *,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        defaults: Mapping[str, Any],
        add: Callable[[Request], None],
        abort: Callable[[int, str], list[RequestUpdate]],
        first_number: int = 0,
        compile: Callable[[StructuredOutputsParams], None] | None = None,
        causal: bool = True,
    ) -> None:
        self.tokenizer, self._causal = tokenizer, causal
        self._compile = compile
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.default_params = SamplingParams().resolved(defaults)
        self._eos = frozenset(eos_token_ids)
        self._add = add
        self._abort = abort
        self._live: dict[str, _Live] = {}
        self._by_request: dict[int, tuple[_Live, _Choice]] = {}
        self._numbers = itertools.count(first_number)

    # -- in ------------------------------------------------------------------------------------------------

    def prepare(self, prompt: Prompt, params: SamplingParams | None) -> Prepared:
        """Check and tokenize a prompt; nothing runs.

        Raises:
            RequestError: one of its kinds, for whatever is wrong with the prompt or its parameters.
        """
        prompt = plain_prompt(prompt)
        [token_ids] = self._encode([prompt])
        return self._check(prompt, token_ids, params)

    def check(
        self,
        text: str | None,
        token_ids: list[int],
        params: SamplingParams,
        bad_words: list[list[int]],
        reply: ReplyForm | None = None,
    ) -> Prepared:
        """Check a tokenized prompt. `max_tokens` is clamped to the rest of the context. A prompt that is truncated has
        no text.

        Args:
            reply: for a chat, the form of the reply.

        Raises:
            RequestError: one of its kinds, for whatever is wrong with the prompt or its parameters.
        """
        self._check_supported(params, reply)
        params = self._with_defaults(params)
        if not self._causal and (params.max_tokens != 0 or params.prompt_logprobs is not None):
            raise EmbeddingModelError(EMBEDS_ALONE)
        params.check_against(self.vocab_size)
        self._check_ids(token_ids)
        text, token_ids = self._truncated(text, token_ids, params)
        room = self.max_model_len - len(token_ids)
        asked = params.max_tokens
        least = max(params.min_tokens, 0 if asked == 0 else 1)
        if least > room:
            size, completion = len(token_ids), least if asked is None else asked
            raise PromptTooLongError(  # the first sentence is OpenAI's, which clients look for
                f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
                f"{size + completion} tokens ({size} in the prompt, {completion} in the completion); "
                f"shorten the prompt, {'lower min_tokens, ' if params.min_tokens > 1 else ''}or raise max_model_len",
                param="prompt",
            )
        max_tokens = room if asked is None else min(asked, room)
        clamped_from = asked if asked is not None and asked > room else None
        return Prepared(text, token_ids, params, max_tokens, bad_words, clamped_from, reply=reply)

    def _truncated(
        self, text: str | None, token_ids: list[int], params: SamplingParams
    ) -> tuple[str | None, list[int]]:
        most = params.truncate_prompt_tokens
        if most == -1:
            most = max(
                1, self.max_model_len - max(1 if params.max_tokens is None else params.max_tokens, params.min_tokens)
            )
        return (text, token_ids) if most is None or len(token_ids) <= most else (None, token_ids[-most:])

    def _check_supported(self, params: SamplingParams, reply: ReplyForm | None) -> None:
        """Check that the checkpoint, and the chat template, have what parameters need."""
        named = [name for name in ("bad_words", "stop", "structured_outputs") if getattr(params, name)]
        if self.tokenizer is None and named:
            raise SamplingParamsError(
                f"{named[0]} needs a tokenizer, but this checkpoint has none; leave it out", param=named[0]
            )
        if params.structured_outputs and not (self._eos or params.stop_token_ids):
            raise SamplingParamsError(
                "structured_outputs needs a token that ends the output, but this checkpoint has no end-of-sequence "
                "token; set stop_token_ids",
                param="structured_outputs",
            )
        if params.thinking_token_budget is not None and (reply is None or reply.syntax.reasoning is None):
            raise SamplingParamsError(
                "thinking_token_budget limits the reasoning of a chat reply, but "
                f"{'this is not a chat' if reply is None else 'the chat template shows no reasoning'}; leave it out",
                param="thinking_token_budget",
            )

    def _check_ids(self, token_ids: Sequence[int]) -> None:
        """Check that a prompt is not empty, and that its tokens are in the vocabulary."""
        if not token_ids:
            raise EmptyPromptError("the prompt is empty; give at least one token", param="prompt")
        worst = max(token_ids) if min(token_ids) >= 0 else min(token_ids)
        if not 0 <= worst < self.vocab_size:
            shown = worst if abs(worst) < 2**63 else "a huge number"
            text = f"the prompt has the token id {shown}; allowed are 0 to {self.vocab_size - 1}"
            raise TokenOutOfRangeError(text, param="prompt")

    def pooled(self, prompt: Prepared, pooling: PoolingParams) -> Prepared:
        """Check a prompt to be pooled.

        Raises:
            RequestError: it also asks for tokens, or labels are not in the vocabulary.
        """
        if prompt.max_tokens or prompt.params.n != 1:
            raise SamplingParamsError("a pooled prompt generates no tokens; set max_tokens=0 and n=1")
        if pooling.method == "labels" and not self._causal:
            raise EmbeddingModelError(EMBEDS_ALONE)
        labels = pooling.label_token_ids
        if bool(labels) != (pooling.method == "labels") or len(labels) > MAX_LABELS:
            raise RequestError(f"scoring has {len(labels)} labels; give 1 to {MAX_LABELS} token ids")
        if labels and not 0 <= min(labels) <= max(labels) < self.vocab_size:
            raise TokenOutOfRangeError(
                f"a label is not a token id of the model; allowed are 0 to {self.vocab_size - 1}"
            )
        return dataclasses.replace(prompt, pooling=pooling)

    def prepare_all(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams | None],
        replies: Sequence[ReplyForm | None] | None = None,
    ) -> list[Prepared]:
        """Check and tokenize prompts, all of them before any may run; an error's `index` is the prompt's.

        Args:
            replies: for chats, the forms of the replies.
        """
        plain = [_at(index, functools.partial(plain_prompt, prompt)) for index, prompt in enumerate(prompts)]
        try:
            encoded = self._encode(plain)
        except RequestError:
            for index, prompt in enumerate(plain):  # the batch's error does not say which one it was
                _at(index, functools.partial(self._encode, [prompt]))
            raise
        replies = replies or [None] * len(prompts)
        checks = enumerate(zip(plain, encoded, params, replies, strict=True))
        return [_at(index, functools.partial(self._check, *check)) for index, check in checks]

    def _encode(self, prompts: Sequence[Plain]) -> list[list[int]]:
        """The prompts' token ids. Texts are encoded in one batch, which releases the GIL."""
        encoded: dict[bool, Iterator[list[int]]] = {}
        for literal in (False, True):
            texts = [text for text in prompts if isinstance(text, str) and isinstance(text, LiteralText) == literal]
            if texts and self.tokenizer is None:
                raise RequestError("this checkpoint has no tokenizer.json; give prompts as lists of token ids")
            if texts and self.tokenizer is not None:
                encoded[literal] = iter(self.tokenizer.encode_batch(texts, parse_special=not literal))
        return [
            next(encoded[isinstance(prompt, LiteralText)]) if isinstance(prompt, str) else checked_token_ids(prompt)
            for prompt in prompts
        ]

    def _check(
        self, prompt: Plain, token_ids: list[int], params: SamplingParams | None, reply: ReplyForm | None = None
    ) -> Prepared:
        if params is not None and not isinstance(params, SamplingParams):
            raise SamplingParamsError(
                f"sampling_params is a {type(params).__name__}; it must be SamplingParams or None"
            )
        params = params or SamplingParams()
        text = str(prompt) if isinstance(prompt, str) else None
        if params.structured_outputs is not None and self._compile is not None:
            self._compile(params.structured_outputs)
        return self.check(text, token_ids, params, self._bad_words(params), reply)

    def _with_defaults(self, params: SamplingParams) -> SamplingParams:
        """Fill in unset fields from the checkpoint, and a seed if there is none."""
        base = self.default_params
        params = params.resolved({name: getattr(base, name) for name in SamplingParams.__struct_fields__})
        return params if params.seed is not None else replace(params, seed=secrets.randbits(SEED_BITS))

    def _bad_words(self, params: SamplingParams) -> list[list[int]]:
        return self.tokenizer.bad_word_ids(params.bad_words or ()) if self.tokenizer else []

    def submit(
        self,
        prepared: Prepared,
        request_id: str | None = None,
        tenant: str = "",
        queue: str = "",
        earlier: Sequence[RequestUpdate] = (),
    ) -> RequestOutput:
        """Queue a prepared prompt's choices; the output grows from now on.

        Requests of different tenants never share cached prefixes.

        Args:
            queue: who takes turns with others, the `owner` in the engine; by default the tenant.
            earlier: what another server has generated of choices, by index; they go on from there.

        Raises:
            RequestError: the id is in use or no short string, or the request could never fit.
        """
        numbers = [next(self._numbers) for _ in range(prepared.params.n)]
        request_id = self._request_id(request_id)
        output = RequestOutput(
            request_id,
            prepared.text,
            prepared.token_ids,
            [],
            seed=prepared.params.seed or 0,
            clamped_from=prepared.clamped_from,
        )
        if prepared.params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]  # nothing predicts the first token
        live = _Live(
            output, prepared, f"{tenant}/{prepared.params.cache_salt or ''}" if tenant else "", queue or tenant
        )
        now, before = time.monotonic(), {update.request: update for update in earlier}
        for index, number in enumerate(numbers):
            completion = CompletionOutput(index)
            if prepared.params.logprobs is not None:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
            choice = self._choice(number, completion, prepared)
            live.choices.append(choice)
            if index in before:
                self._replay(live, choice, before[index])
            if not completion.finished:
                self._add(self._request(live, choice, now))  # if all are refused, the first one is
                self._by_request[number] = (live, choice)
            output.outputs.append(choice.output)
        self._live[request_id] = live
        return output

    def _replay(self, live: _Live, choice: _Choice, update: RequestUpdate) -> None:
        """Apply what another server has generated of a choice that is not in the engine yet."""
        self._apply(live, choice, update)
        if choice.stopped_by is not None and not choice.output.finished:
            self._finish(live, choice, RequestUpdate(choice.request, finish_reason="stop"))

    def _request(self, live: _Live, choice: _Choice, now: float) -> Request:
        """The engine's request, with what the choice has so far."""
        prepared, output = live.prepared, choice.output
        params, index, scored = prepared.params, output.index, live.output.prompt_logprobs
        if index and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # the choices share them, so one computes them
        return Request(
            choice.request,
            prepared.token_ids,
            params,
            max_tokens=prepared.max_tokens,
            choice=index,
            output_token_ids=output.token_ids,
            num_scored=len(scored) - 1 if scored and not index else 0,
            stop_token_ids=frozenset(params.stop_token_ids or ()) | (frozenset() if params.ignore_eos else self._eos),
            bad_words=prepared.bad_words,
            scope=live.scope or params.cache_salt or "",
            owner=live.owner,
            arrived=now,
            pooling=prepared.pooling,
            reasoning=prepared.reasoning,
        )

    def _request_id(self, request_id: str | None) -> str:
        if request_id is None:
            return secrets.token_hex(8)
        if not isinstance(request_id, str) or not 0 < len(request_id) <= MAX_REQUEST_ID_LENGTH:
            raise RequestError(
                f"request_id={request_id!r} is invalid; it must be a string of 1 to {MAX_REQUEST_ID_LENGTH} characters"
            )
        if request_id in self._live:
            raise RequestError(f"request_id={request_id!r} is in use; choose another, or leave it out")
        return request_id

    def _choice(self, number: int, completion: CompletionOutput, prepared: Prepared) -> _Choice:
        if self.tokenizer is None:
            return _Choice(number, completion, None)
        parser = None
        if prepared.reply is not None:
            ids = functools.partial(_call_id, prepared, completion.index)
            parser = ReplyParser(prepared.reply, self.tokenizer.special_texts, ids)
            completion.events = parser.events
        # A new message is a text of its own; anything else continues the prompt's.
        continued = prepared.token_ids if prepared.reply is None or prepared.reply.continues else ()
        detokenizer = Detokenizer(self.tokenizer, prepared.params, parser, continued)
        return _Choice(number, completion, detokenizer, parser)

    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request; an unknown one is ignored. Returns its output, if that ended it."""
        live = self._live.get(request_id)
        updates: list[RequestUpdate] = []
        for choice in live.choices if live else ():
            if not choice.output.finished:
                choice.aborted = True
                updates += self._abort(choice.request, "abort")
        return self.absorb(updates)

    def drop(self, output: RequestOutput) -> None:
        """Nobody reads this output any more: what still runs of it is ended, and its id is free after that."""
        live = self._live.get(output.request_id)
        if live is None or live.output is not output:
            return  # its last output was returned
        live.dropped = True
        if output.finished:
            del self._live[output.request_id]
        else:
            self.abort(output.request_id)

    def resume(self, numbers: Container[int] | None = None) -> tuple[list[Request], list[RequestOutput]]:
        """After the engine's death: the requests for a new one, and outputs that ended now, since they were being ended
        (after a stop string or an abort) and lack nothing.

        Args:
            numbers: the requests of that engine; None: all.
        """
        requests, ended = [], []
        for number, (live, choice) in self._by_request.items():
            if numbers is not None and number not in numbers:
                continue
            if choice.stopped_by is not None:
                ended.append(RequestUpdate(choice.request, finish_reason="stop"))
            elif choice.aborted:
                ended.append(RequestUpdate(choice.request, finish_reason="abort"))
            else:
                requests.append(self._request(live, choice, time.monotonic()))
        return requests, self.absorb(ended)

    def end_all(self, finish_reason: str, error: str | None = None) -> list[RequestOutput]:
        """End every open request with what it has, whatever the engine does."""
        updates = [RequestUpdate(number, finish_reason=finish_reason, error=error) for number in self._by_request]
        return self.absorb(updates)

    def abandon(self) -> None:
        """End all open requests, here and in the engine, whose updates for them may have been lost."""
        for number in self._by_request:
            self._abort(number, "abort")
        self.end_all("abort")

    # -- out -----------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request is in flight."""
        return not self._by_request

    def hand_out(self, output: RequestOutput) -> RequestOutput:
        """Mark an output as returned to its reader: later text starts new deltas. After the last, its id is free."""
        live = self._live.get(output.request_id)
        if output.finished and live is not None and live.output is output:
            del self._live[output.request_id]
        return output.hand_out()

    def absorb(self, updates: list[RequestUpdate]) -> list[RequestOutput]:
        """Apply updates to the outputs; returns those that changed and have a reader, each once.

        A choice that a stop string ended is finished when the engine has ended it, too, so that there is one end, with
        its metrics. Deltas grow until the output is returned.
        """
        changed: dict[str, _Live] = {}
        queue = list(updates)
        for update in queue:
            if update.request not in self._by_request:
                continue
            live, choice = self._by_request[update.request]
            changed[live.output.request_id] = live
            live.output.begin_deltas()
            try:
                queue += self._apply(live, choice, update)
            except Exception as error:
                logger.exception("the output of request %s cannot be made", live.output.request_id)
                queue += self._fail(choice, error)
        for request_id, live in changed.items():
            if live.output.finished:
                live.output.metrics = RequestMetrics.of(live.stats)
                live.output.metrics.detokenize_seconds = sum(choice.detokenize_seconds for choice in live.choices)
                if live.dropped:
                    del self._live[request_id]
        return [live.output for live in changed.values() if not live.dropped]

    def _fail(self, choice: _Choice, error: Exception) -> list[RequestUpdate]:
        """End one choice whose output cannot be made; the others continue."""
        why = f": {error}" if isinstance(error, TokenizerFailedError) else ""
        choice.output.finish_reason, choice.output.error = "error", f"the output of this request could not be made{why}"
        self._by_request.pop(choice.request, None)
        return self._abort(choice.request, "abort")

    def _apply(self, live: _Live, choice: _Choice, update: RequestUpdate) -> list[RequestUpdate]:
        """Apply one update; returns the updates from ending the choice."""
        output = choice.output
        if update.prompt_logprobs and live.output.prompt_logprobs is not None:
            live.output.prompt_logprobs += [self._logprobs(entry) for entry in update.prompt_logprobs]
        live.output.pooled = update.pooled
        if output.index == 0 and not output.token_ids:  # later, on a new engine, its own tokens might be cached, too
            live.output.cached_tokens = update.cached_tokens
        stopped_before = choice.stopped_by is not None
        if not stopped_before:
            self._append(choice, update)
        if update.finish_reason is not None:
            self._finish(live, choice, update)
        elif choice.stopped_by is not None and not stopped_before:
            return self._abort(choice.request, "stop")
        return []

    def _append(self, choice: _Choice, update: RequestUpdate) -> None:
        """Append tokens, their text and log-probabilities, up to the end of a stop string."""
        output, kept = choice.output, len(update.tokens)
        if choice.detokenizer is not None:
            begin = time.perf_counter()
            new = choice.detokenizer.push(update.tokens)
            if update.finish_reason is not None:
                new += choice.detokenizer.finish()
            choice.detokenize_seconds += time.perf_counter() - begin
            output.delta += new
            output.text += new
            if choice.parser is not None:
                output.reasoning_tokens = choice.parser.reasoning_tokens
            if choice.detokenizer.stopped is not None:
                choice.stopped_by = choice.detokenizer.stopped
                kept = choice.detokenizer.num_tokens - len(output.token_ids)
        output.token_ids += update.tokens[:kept]
        if update.logprobs is not None and output.logprobs is not None:
            entries = update.logprobs[:kept]
            output.logprobs += [self._logprobs(entry) for entry in entries]
            for entry in entries:  # one by one, since the sum must not depend on how many came at once
                output.cumulative_logprob = (output.cumulative_logprob or 0.0) + entry.values[0]

    def _finish(self, live: _Live, choice: _Choice, update: RequestUpdate) -> None:
        output = choice.output
        if choice.stopped_by is not None:
            output.finish_reason, output.stop_reason = "stop", choice.stopped_by
        else:
            output.finish_reason, output.stop_reason, output.error = (
                update.finish_reason,
                update.stop_reason,
                update.error,
            )
        self._by_request.pop(choice.request, None)
        if update.stats is not None:
            live.stats[output.index] = update.stats

    def _logprobs(self, entry: TokenLogprobs) -> dict[int, Logprob]:
        """The token at that position, then the best ones, by id."""
        text = self.tokenizer.token_text if self.tokenizer else (lambda token: None)
        result: dict[int, Logprob] = {}
        for token, value, rank in zip(entry.ids, entry.values, entry.ranks, strict=True):
            result.setdefault(token, Logprob(value, rank, text(token)))
        return result


def _at(index: int, check: Callable[[], T]) -> T:
    """The result of a check of one prompt in a list; its error has the prompt's index."""
    try:
        return check()
    except RequestError as error:
        raise error.at(index) from error


def _call_id(prepared: Prepared, choice: int, number: int) -> str:
    """The id of a tool call: it does not depend on where the request runs, and differs between turns of a chat."""
    told = repr((prepared.token_ids, prepared.params.seed, choice, number)).encode()
    value = int.from_bytes(hashlib.blake2b(told, digest_size=16).digest())
    return "".join(ID_LETTERS[value // len(ID_LETTERS) ** place % len(ID_LETTERS)] for place in range(ID_LENGTH))
