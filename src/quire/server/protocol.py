"""Parses request bodies into calls, and checks all that can be checked without the model.

Pure functions of bytes, safe to run in any thread. The size of every field is bounded before any work is done for it;
null means not given; fields of OpenAI and vLLM that Quire does not support are refused by name; unknown ones are listed
in `ignored`.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.core.sampling_params import MAX_INT32, MAX_LOGPROBS, SEED_BITS, SamplingParams
from quire.errors import SamplingParamsError
from quire.server import fields as tables
from quire.server.body import MAX_FIELD_BYTES, BodyFields, Shape, check_text, ignored_names, shorten, whole, wrong_type
from quire.server.conversation import Conversation, message_bytes, read_conversation
from quire.server.errors import ApiError, api_error, invalid
from quire.server.limits import (
    BYTES_PER_TOKEN,
    MAX_ID_LIST_BYTES,
    MAX_LABEL_LENGTH,
    MAX_MODEL_NAME_LENGTH,
    TOKENS_PER_MESSAGE,
    Limits,
)
from quire.server.prompts import Prompt, read_prompts, read_token_ids
from quire.server.response_format import MAX_FORMAT_BYTES, read_reply, read_structured_outputs
from quire.server.thinking import BUDGET
from quire.text.reply_grammar import ReplyRequest
from quire.text.tokenizer import RenderedChat

__all__ = [
    "ChatCall", "CompletionCall", "DetokenizeCall", "Limits", "TokenizeCall", "parse_chat",
    "parse_completion", "parse_detokenize", "parse_tokenize", "text_price",
]  # fmt: skip

DEFAULT_LIMITS = Limits()
DEFAULT_COMPLETION_TOKENS = 16
"""Default `max_tokens` of a completion, as OpenAI's."""
UNBOUNDED = -1
"""`max_tokens` up to the end of the context, as in llama.cpp."""

INTEGERS = [name for name, schema in tables.SAMPLING.items() if schema.get("type") == ["integer", "null"]]

_TOKEN_ID = re.compile(r"[0-9]{1,10}")


@dataclass(slots=True, kw_only=True)
class GenerationCall:
    """The common part of completions and chats.

    Attributes:
        model: the requested name; None if it was not given.
        params: sampling parameters. `seed` is always set. `prompt_logprobs` is what the engine must compute, for `echo`
            or for the field of that name.
        stream: respond with server-sent events.
        include_usage: end the stream with the usage.
        continuous_usage: every chunk has the usage so far.
        return_token_ids: the response has token ids.
        prompt_logprobs: what to return in the field of that name; None if it was not requested.
        user: the client's name for its user; a label for the log.
        ignored: names of fields that were accepted and have no effect, as they may stand in a header.
    """

    model: str | None
    params: SamplingParams
    user: str | None = field(default=None, compare=False)
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    ignored: tuple[str, ...] = ()

    def ignore(self, names: Iterable[str]) -> None:
        """More such fields."""
        self.ignored = ignored_names([*self.ignored, *names])


@dataclass(slots=True, kw_only=True)
class CompletionCall(GenerationCall):
    """POST /v1/completions.

    Attributes:
        prompts: texts or token ids, at least one.
        echo: the text begins with the prompt.
        add_special_tokens, parse_special: how to tokenize texts: see `Tokenizer.encode_batch`.
    """

    prompts: list[Prompt]
    echo: bool = False
    add_special_tokens: bool = True
    parse_special: bool = True

    @property
    def num_choices(self) -> int:
        """Choices of all prompts."""
        return len(self.prompts) * self.params.n

    def price(self) -> int:
        """Upper estimate of prompt tokens times choices, without tokenizing: see `text_price`."""
        return self.params.n * sum(map(prompt_price, self.prompts))


@dataclass(slots=True, kw_only=True)
class ChatCall(GenerationCall):
    """POST /v1/chat/completions.

    Attributes:
        messages: plain dicts with role and content; the content is a string or a list of text parts.
        add_generation_prompt, continue_final_message: how the prompt ends.
        chat_template_kwargs: variables of the template.
        hints: see `Conversation`.
        reply: tools, and the required form of the reply.
        loosened: what is not enforced of tools' schemas; known when the chat has been rendered.
    """

    messages: list[dict[str, Any]]
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict, compare=False)
    reply: ReplyRequest = field(default_factory=ReplyRequest)
    loosened: tuple[str, ...] = ()

    def constrain(self, chat: RenderedChat) -> None:
        """Set the grammar of the whole reply, which is known once the chat is rendered."""
        self.loosened = tuple(f"tool {name}: {why}" for name, why in chat.loosened.items())
        if BUDGET in self.hints and chat.reply.syntax.reasoning is None:  # there is nothing to limit
            self.ignore([self.hints[BUDGET]])
            self.params = msgspec.structs.replace(self.params, thinking_token_budget=None)
        if chat.structured != self.params.structured_outputs:
            self.params = msgspec.structs.replace(self.params, structured_outputs=chat.structured)

    @property
    def num_choices(self) -> int:
        """Choices of the one prompt."""
        return self.params.n

    def price(self) -> int:
        """Upper estimate of prompt tokens times choices, without rendering: see `text_price`."""
        return self.params.n * (_messages_price(self.messages) + _tools_price(self.reply))


@dataclass(slots=True, kw_only=True)
class TokenizeCall:
    """POST /tokenize: a text or a chat. Exactly one of `prompt` and `messages` is set."""

    model: str | None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    parse_special: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    reply: ReplyRequest = field(default_factory=ReplyRequest)
    return_token_strs: bool = False
    ignored: tuple[str, ...] = ()

    def ignore(self, names: Iterable[str]) -> None:
        """More fields that have no effect."""
        self.ignored = ignored_names([*self.ignored, *names])

    def price(self) -> int:
        """Tokens, estimated as for the other calls."""
        if self.prompt is not None:
            return prompt_price(self.prompt)
        return _messages_price(self.messages or []) + _tools_price(self.reply)


@dataclass(slots=True, kw_only=True)
class DetokenizeCall:
    """POST /detokenize: token ids."""

    model: str | None
    tokens: list[int]
    ignored: tuple[str, ...] = ()

    def price(self) -> int:
        """Tokens."""
        return len(self.tokens)


def text_price(num_bytes: int) -> int:
    """Upper estimate of the tokens of ordinary text with this many bytes in UTF-8 (see `BYTES_PER_TOKEN`)."""
    return num_bytes // BYTES_PER_TOKEN + 1


def prompt_price(prompt: Prompt) -> int:
    return text_price(len(prompt.encode())) if isinstance(prompt, str) else len(prompt)


def _messages_price(messages: Sequence[Mapping[str, Any]]) -> int:
    return text_price(message_bytes(messages)) + TOKENS_PER_MESSAGE * (len(messages) + 1)


def _tools_price(reply: ReplyRequest) -> int:
    return text_price(len(msgspec.json.encode(reply.tools)) if reply.tools else 0)


# -- parsing -------------------------------------------------------------------------------------------------


def shape_of(known: Mapping[str, Any], unsupported: Mapping[str, Any]) -> Shape:
    return Shape([*dict.fromkeys([*known, *unsupported, "best_of"])])


_COMPLETION = shape_of(tables.COMPLETION, tables.COMPLETION_UNSUPPORTED)
_CHAT = shape_of(tables.CHAT, tables.CHAT_UNSUPPORTED)
_TOKENIZE = shape_of(tables.TOKENIZE, tables.TOKENIZE_UNSUPPORTED)
_DETOKENIZE = shape_of(tables.DETOKENIZE, {})
_STREAM_OPTIONS = Shape([*tables.STREAM_OPTIONS], "stream_options")


def parse_completion(body: bytes, limits: Limits = DEFAULT_LIMITS) -> CompletionCall:
    """The call in a body of POST /v1/completions.

    Raises:
        ApiError: a 400 that names the field, the value found, and what is allowed.
    """
    given = read_fields(_COMPLETION, body)
    check_unsupported(given, tables.COMPLETION_UNSUPPORTED)
    echo, logprobs = given.boolean("echo"), given.integer("logprobs", 0, MAX_LOGPROBS)
    params, shown = _params(given, logprobs, echo=echo, max_tokens=DEFAULT_COMPLETION_TOKENS)
    prompts = read_prompts(given.raw("prompt"), limits)
    common, ignored = _common(given)
    call = CompletionCall(
        **common,
        params=params,
        prompt_logprobs=shown,
        prompts=prompts,
        echo=echo,
        add_special_tokens=given.boolean("add_special_tokens", default=True),
        parse_special=given.boolean("parse_special", default=True),
        ignored=ignored_names([*given.unknown(_COMPLETION.names), *ignored]),
    )
    if call.num_choices > limits.choices:
        message = f"{len(prompts)} prompts with n={params.n} make {call.num_choices} choices; at most "
        raise invalid(f"{message}{limits.choices} are allowed in one request", "n")
    _check_logprobs(call, limits)
    return call


def parse_chat(body: bytes, limits: Limits = DEFAULT_LIMITS) -> ChatCall:
    """The call in a body of POST /v1/chat/completions.

    Raises:
        ApiError: a 400 that names the field, the value found, and what is allowed.
    """
    given = read_fields(_CHAT, body)
    check_unsupported(given, tables.CHAT_UNSUPPORTED)
    conversation = read_conversation(given, limits)
    params, shown = _params(given, _chat_logprobs(given))
    if conversation.thinking_token_budget is not None:
        params = msgspec.structs.replace(params, thinking_token_budget=conversation.thinking_token_budget)
    common, ignored = _common(given)
    call = ChatCall(
        **common,
        **_spread(conversation),
        params=params,
        prompt_logprobs=shown,
        reply=read_reply(given, params.structured_outputs),
        ignored=ignored_names([*given.unknown(_CHAT.names), *ignored, *conversation.ignored]),
    )
    _check_logprobs(call, limits)
    return call


def parse_tokenize(body: bytes, limits: Limits = DEFAULT_LIMITS) -> TokenizeCall:
    """The call in a body of POST /tokenize. Raises `ApiError`."""
    given = read_fields(_TOKENIZE, body)
    check_unsupported(given, tables.TOKENIZE_UNSUPPORTED)
    if given.has("prompt") == given.has("messages"):
        raise invalid("give either 'prompt' or 'messages', one of the two", "prompt")
    call = TokenizeCall(model=read_model(given), return_token_strs=given.boolean("return_token_strs"))
    ignored: Sequence[str] = ()
    if given.has("prompt"):
        [prompt] = read_prompts(given.raw("prompt"), limits, text_only=True)
        call.prompt = str(prompt)
        call.add_special_tokens = given.boolean("add_special_tokens", default=True)
        call.parse_special = given.boolean("parse_special", default=True)
        if given.get("tools", MAX_FORMAT_BYTES):
            raise invalid("tools belong to a chat; give messages instead of prompt, or leave tools out", "tools")
    else:
        conversation = read_conversation(given, limits)
        for name, value in _spread(conversation).items():
            setattr(call, name, value)
        if given.boolean("add_special_tokens"):
            raise _unsupported("add_special_tokens", True, (False,))
        call.reply = read_reply(given, None)
        ignored = conversation.ignored
    call.ignored = ignored_names([*given.unknown(_TOKENIZE.names), *ignored])
    return call


def parse_detokenize(body: bytes, limits: Limits = DEFAULT_LIMITS) -> DetokenizeCall:
    """The call in a body of POST /detokenize. Raises `ApiError`."""
    given = read_fields(_DETOKENIZE, body)
    tokens = read_token_ids(given.raw("tokens"), "tokens", limits)
    return DetokenizeCall(
        model=read_model(given), tokens=tokens, ignored=ignored_names(given.unknown(_DETOKENIZE.names))
    )


def read_fields(shape: Shape, body: bytes) -> BodyFields:
    """A body's fields. Raises `ApiError`."""
    body = check_text(body)
    return BodyFields(shape.read(body))


def _spread(conversation: Conversation) -> dict[str, Any]:
    return {
        "messages": conversation.messages,
        "add_generation_prompt": conversation.add_generation_prompt,
        "continue_final_message": conversation.continue_final_message,
        "chat_template_kwargs": conversation.chat_template_kwargs,
        "hints": conversation.hints,
    }


def read_model(given: BodyFields) -> str | None:
    return given.text("model", MAX_MODEL_NAME_LENGTH)


def _common(given: BodyFields) -> tuple[dict[str, Any], list[str]]:
    """Fields that both routes have, and unknown names within them."""
    labels = {name: given.text(name, MAX_LABEL_LENGTH) for name in tables.LABELS}
    metadata = given.get("metadata")
    if metadata is not None and not isinstance(metadata, dict):
        raise wrong_type("metadata", metadata, "an object")
    stream = given.boolean("stream")
    options = given.raw("stream_options")
    if options is not None and not stream:
        raise invalid("stream_options is allowed with stream=true only", "stream_options")
    streaming = BodyFields({} if options is None else _STREAM_OPTIONS.read(options), "stream_options.")
    if streaming.boolean("include_obfuscation"):
        raise _unsupported("stream_options.include_obfuscation", True, (False,))
    common = {
        "model": read_model(given),
        "user": labels["user"] or labels["safety_identifier"],
        "stream": stream,
        "include_usage": streaming.boolean("include_usage"),
        "continuous_usage": streaming.boolean("continuous_usage_stats"),
        "return_token_ids": given.boolean("return_token_ids"),
    }
    return common, [*given.without_effect(tables.IGNORED), *streaming.unknown(_STREAM_OPTIONS.names)]


def check_unsupported(given: BodyFields, unsupported: Mapping[str, tuple[Any, ...]]) -> None:
    """Refuse unsupported fields, unless their value has no effect."""
    for name, harmless in unsupported.items():
        raw = given.raw(name)
        if raw is not None:
            if memoryview(raw).nbytes > MAX_FIELD_BYTES:  # no value without effect is that long
                raise invalid(f"{name} is not supported here; leave it out", name, "unsupported_parameter")
            value = given.get(name)
            if not any(type(value) is type(one) and value == one for one in harmless):
                raise _unsupported(name, value, harmless)


def _unsupported(name: str, value: object, harmless: Sequence[Any]) -> ApiError:
    different = [one for index, one in enumerate(harmless) if one not in harmless[:index]]  # 1.0 is 1
    instead = " or ".join(["leave it out", *(f"set it to {shorten(one)}" for one in different)])
    message = f"{name} is {shorten(value)}, which is not supported here; {instead}"
    return invalid(message, name, "unsupported_parameter")


# -- sampling ------------------------------------------------------------------------------------------------


def _params(
    given: BodyFields, logprobs: int | None, *, echo: bool = False, max_tokens: int | None = None
) -> tuple[SamplingParams, int | None]:
    """The sampling parameters, with a seed; and `prompt_logprobs` as it was requested.

    Args:
        echo: `logprobs` apply to the prompt, too.
        max_tokens: the default.
    """
    options = {name: given.get(name) for name in tables.SAMPLING if name not in ("allowed_token_ids", "logit_bias")}
    options["allowed_token_ids"] = given.get("allowed_token_ids", MAX_ID_LIST_BYTES)
    for name in INTEGERS:
        options[name] = whole(options[name])
    options["logit_bias"] = _logit_bias(given.get("logit_bias"))
    options["max_tokens"] = _max_tokens(given, max_tokens)
    options["structured_outputs"] = read_structured_outputs(given)
    options["logprobs"] = logprobs
    shown = given.integer("prompt_logprobs", 0, MAX_LOGPROBS)
    if echo and logprobs is not None:
        options["prompt_logprobs"] = max(logprobs, shown or 0)
    if options["seed"] is None:
        options["seed"] = secrets.randbits(SEED_BITS)
    try:
        params = SamplingParams(**{name: value for name, value in options.items() if value is not None})
    except SamplingParamsError as error:
        raise api_error(error) from None
    best_of = whole(given.get("best_of"))
    if best_of is not None and (type(best_of) is not int or best_of != params.n):
        raise _unsupported("best_of", best_of, (params.n,))
    return params, shown


def _max_tokens(given: BodyFields, default: int | None) -> int | None:
    names = ("max_tokens", "max_completion_tokens", "n_predict")
    asked = {name: value for name in names if (value := given.integer(name, UNBOUNDED, MAX_INT32)) is not None}
    if len(set(asked.values())) > 1:
        told = " and ".join(f"{name} is {value}" for name, value in asked.items())
        raise invalid(f"{told}; they mean the same, so give one of them", [*asked][-1])
    most = next(iter(asked.values()), default)
    return None if most == UNBOUNDED else most


def _chat_logprobs(given: BodyFields) -> int | None:
    """`logprobs` and `top_logprobs` of the chat route as one number."""
    wanted, top = given.boolean("logprobs"), given.integer("top_logprobs", 0, MAX_LOGPROBS)
    if top and not wanted:
        raise invalid(f"top_logprobs is {top}, which needs logprobs=true", "top_logprobs")
    return (top or 0) if wanted else None


def _logit_bias(value: Any) -> dict[int, Any] | None:
    """JSON's keys are strings; the rest is checked with the other parameters."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise wrong_type("logit_bias", value, "an object from token id to a number")
    for key in value:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid(f'logit_bias has the key {shorten(key)}; keys are token ids, like "1234"', "logit_bias")
    return {int(key): bias for key, bias in value.items()}


def _check_logprobs(call: CompletionCall | ChatCall, limits: Limits) -> None:
    """Limit the log-probabilities of a call, as far as their number is known beforehand."""
    params = call.params
    if params.prompt_logprobs is not None:
        advice = "shorten the prompt, or ask for less or a smaller n"  # each choice repeats them
        _check_entries("prompt_logprobs", call.price(), params.prompt_logprobs, limits.prompt_logprob_entries, advice)
    lengths = [length for length in (params.max_tokens, limits.max_model_len) if length is not None]
    if params.logprobs is not None and lengths:
        tokens = min(lengths) * call.num_choices
        _check_entries(
            "logprobs", tokens, params.logprobs, limits.logprob_entries, "lower max_tokens or n, or ask for less"
        )


def _check_entries(param: str, tokens: int, each: int, most: int, advice: str) -> None:
    if tokens * (each + 1) > most:
        message = f"{param} {each} of about {tokens} tokens are more than the {most} allowed; {advice}"
        raise invalid(message, param)
