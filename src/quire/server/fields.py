"""The fields of requests: names, types and ranges, and which of OpenAI's and vLLM's fields are not supported.

Names and ranges are OpenAI's (from the types of its Python package 3.52), or vLLM's if only vLLM has the field.
"""

from __future__ import annotations

from typing import Any

from quire.core import sampling_params as limit
from quire.core.structured_outputs import MAX_CHOICES
from quire.server.dialects import OTHER_DIALECTS
from quire.server.limits import REASONING_EFFORTS
from quire.text.reply_grammar import MAX_TOOLS, TOOL_NAME

Schema = dict[str, Any]


def _schema(kind: str, help: str, **more: Any) -> Schema:
    return {"type": [kind, "null"], "description": help, **more}


def _integer(low: int, high: int, help: str, **more: Any) -> Schema:
    return _schema("integer", help, minimum=low, maximum=high, **more)


def _number(low: float, high: float, help: str, **more: Any) -> Schema:
    return _schema("number", help, minimum=low, maximum=high, **more)


def _flag(default: bool, help: str) -> Schema:
    return _schema("boolean", help, default=default)


def _list(items: Schema, most: int, help: str, **more: Any) -> Schema:
    return _schema("array", help, items=items, maxItems=most, **more)


TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": limit.MAX_INT32}
_STOP: Schema = {"type": "string", "minLength": 1, "maxLength": limit.MAX_STOP_LENGTH}
_UNSET = "Default: the checkpoint's, or else {}."
_PENALTY = limit.MAX_ADDITIVE_PENALTY

SAMPLING: dict[str, Schema] = {
    "n": _integer(1, limit.MAX_N, "Number of choices to generate for each prompt.", default=1),
    "temperature": _number(0, limit.MAX_TEMPERATURE, "0 is greedy decoding. " + _UNSET.format(1)),
    "top_p": _schema(
        "number",
        "Sample from the smallest set of most likely tokens whose probabilities add up to this. " + _UNSET.format(1),
        exclusiveMinimum=0,
        maximum=1,
    ),
    "top_k": _integer(-1, limit.MAX_INT32, "Sample from this many of the most likely tokens; 0 and -1 turn it off."),
    "min_p": _number(
        0, 1, "Sample from tokens with at least this fraction of the top token's probability. " + _UNSET.format(0)
    ),
    "presence_penalty": _number(-_PENALTY, _PENALTY, "Penalty for tokens that occur in the output.", default=0),
    "frequency_penalty": _number(-_PENALTY, _PENALTY, "Penalty per occurrence in the output.", default=0),
    "repetition_penalty": _number(
        limit.MIN_REPETITION_PENALTY,
        limit.MAX_REPETITION_PENALTY,
        "Penalty for tokens of prompt and output; 1 turns it off.",
    ),
    "seed": _integer(
        -limit.MAX_INT64 - 1,
        limit.MAX_INT64,
        "The same seed gives the same tokens. Default: a random one, which is returned.",
    ),
    "stop": {
        "description": f"Up to {limit.MAX_STOP_STRINGS} strings at which the text ends.",
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": limit.MAX_STOP_STRINGS}, {"type": "null"}],
    },
    "stop_token_ids": _list(TOKEN_ID, limit.MAX_STOP_TOKEN_IDS, "Additional tokens that end the text."),
    "include_stop_str_in_output": _flag(False, "Keep the stop string in the text."),
    "min_tokens": _integer(0, limit.MAX_INT32, "The text does not end before this many tokens.", default=0),
    "ignore_eos": _flag(False, "Do not stop at the model's end-of-sequence tokens."),
    "logit_bias": _schema(
        "object",
        "Added to the logits, by token id.",
        additionalProperties={"type": "number", "minimum": -limit.MAX_LOGIT_BIAS, "maximum": limit.MAX_LOGIT_BIAS},
        maxProperties=limit.MAX_LOGIT_BIAS_ENTRIES,
    ),
    "allowed_token_ids": _list(TOKEN_ID, limit.MAX_ALLOWED_TOKEN_IDS, "Only these tokens are sampled.", minItems=1),
    "bad_words": _list(
        {"type": "string", "minLength": 1, "maxLength": limit.MAX_BAD_WORD_LENGTH},
        limit.MAX_BAD_WORDS,
        "Strings that are never generated.",
    ),
    "prompt_logprobs": _integer(
        0, limit.MAX_LOGPROBS, "Also return log-probabilities of the prompt's tokens, and of this many top tokens."
    ),
    "skip_special_tokens": _flag(True, "Omit special tokens from the text."),
    "priority": _integer(
        -limit.MAX_INT32 - 1, limit.MAX_INT32, "Lower values run first, if the server uses priorities."
    ),
    "cache_salt": _schema(
        "string",
        "Cached prefixes are shared only between requests with the same salt.",
        minLength=1,
        maxLength=limit.MAX_CACHE_SALT_LENGTH,
    ),
    "speculate": _flag(True, "Use speculative decoding, if the server does. It changes speed, never tokens."),
    "kv_transfer_params": _schema(
        "object",
        "For disaggregated prefill, in vLLM's format: do_remote_decode, or the field of the response to that.",
    ),
    "thinking_token_budget": _integer(
        -1, limit.MAX_INT32, "For chats: most reasoning tokens of the reply; -1 means no limit."
    ),
    "truncate_prompt_tokens": _integer(
        -1, limit.MAX_INT32, "Keep so many of the prompt's last tokens; -1: as many as there is room for."
    ),
}
"""Fields of completions and chats that are passed to `SamplingParams` under their own names."""

_ANY_SCHEMA: Schema = {
    "description": "A JSON Schema, as an object or text.",
    "type": ["object", "string", "boolean", "null"],
}
_TEXT: Schema = {"type": ["string", "null"], "minLength": 1}
_CHOICES: Schema = _list({"type": "string", "minLength": 1}, MAX_CHOICES, "The reply is one of these.", minItems=1)

FORMATS: dict[str, Schema] = {
    "response_format": _schema(
        "object",
        "Required form of the reply: text, any JSON object, JSON that conforms to a schema, or a structural tag. It is "
        "always enforced; what cannot be enforced is refused.",
        properties={
            "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
            "format": {"type": "object", "description": "For a structural tag, as in vLLM and XGrammar."},
            "structures": {"type": "array", "description": "For a structural tag in the older format."},
            "schema": {"type": ["object", "null"], "description": "For json_object: its schema, as in llama.cpp."},
            "triggers": {"type": "array", "items": {"type": "string"}, "description": "The same."},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": "string"},
                    "schema": {"type": "object"},
                    "strict": {
                        "type": ["boolean", "null"],
                        "description": "Has no effect; schemas are always enforced.",
                    },
                },
            },
        },
        required=["type"],
    ),
    "structured_outputs": _schema(
        "object",
        "The same in vLLM's format: exactly one of json, regex, choice, grammar, json_object and structural_tag.",
        properties={
            "json": _ANY_SCHEMA,
            "regex": {**_TEXT, "description": "The whole reply matches it (Rust's syntax, without look-around)."},
            "choice": _CHOICES,
            "grammar": {**_TEXT, "description": "Lark, or llama.cpp's GBNF."},
            "json_object": {"type": ["boolean", "null"], "description": "Any JSON object."},
            "structural_tag": {
                "type": ["object", "string", "null"],
                "description": "Text with tags whose content has a required form.",
            },
            "whitespace_pattern": {**_TEXT, "description": "Regular expression of white space in JSON."},
            "disable_any_whitespace": {"type": "boolean", "description": "JSON without white space."},
        },
    ),
    "guided_json": _ANY_SCHEMA,
    "guided_regex": {**_TEXT, "description": "Former vLLM name of structured_outputs.regex."},
    "guided_choice": _CHOICES,
    "guided_grammar": {**_TEXT, "description": "Former vLLM name of structured_outputs.grammar."},
    "guided_whitespace_pattern": {**_TEXT, "description": "Former vLLM name of structured_outputs.whitespace_pattern."},
    "ebnf": {**_TEXT, "description": "SGLang's name of structured_outputs.grammar."},
    "grammar": {**_TEXT, "description": "llama.cpp's name of structured_outputs.grammar."},
    "regex": {**_TEXT, "description": "SGLang's name of structured_outputs.regex."},
    "json_schema": {**_ANY_SCHEMA, "description": "llama.cpp's and SGLang's name of structured_outputs.json."},
    "structural_tag": {
        "type": ["object", "string", "null"],
        "description": "SGLang's name of structured_outputs.structural_tag.",
    },
}
"""Fields of completions and chats that set the required form of the reply."""

STREAM_OPTIONS: dict[str, Schema] = {
    "include_usage": _flag(False, "End the stream with a chunk that has no choices, but the usage."),
    "continuous_usage_stats": _flag(False, "Every chunk has the usage so far."),
    "include_obfuscation": _flag(False, "Not supported."),
}

_COMMON: dict[str, Schema] = {
    "model": _schema("string", "One of the names in /v1/models. Default: the first."),
    "stream": _flag(False, "Answer with server-sent events."),
    "stream_options": _schema("object", "Only with `stream`.", properties=STREAM_OPTIONS),
    "return_token_ids": _flag(False, "Also return token ids of prompts and choices."),
    "max_completion_tokens": _integer(-1, limit.MAX_INT32, "Same as `max_tokens`."),
    "n_predict": _integer(-1, limit.MAX_INT32, "llama.cpp's name of `max_tokens`."),
}

LABELS = ("user", "safety_identifier", "prompt_cache_key")
"""Strings that are accepted and have no effect; the first two appear in the log."""

_LABELS: dict[str, Schema] = {name: _schema("string", "A label; it has no effect.") for name in LABELS} | {
    "metadata": _schema("object", "Labels; they have no effect."),
}

IGNORED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "verbosity": ("medium",),
    # vLLM's
    "guided_decoding_backend": ("auto", "guidance"),
}
"""Fields that are accepted, since they change no token, and named in `x-quire-ignored` unless they have one of these
values. A line here is all that another one needs.
"""

_IGNORED: dict[str, Schema] = {name: {"description": "Accepted; it has no effect."} for name in IGNORED}

_MAX_TOKENS = "Most tokens to generate; 0 only scores the prompt. Limited to the rest of the context, which is -1. "

_TEXT_TO_TOKENS: dict[str, Schema] = {
    "add_special_tokens": _flag(True, "Add the special tokens that the model expects around a text."),
    "parse_special": _flag(
        True, "The text of a special token, such as <|im_end|>, is that token; if false, it is text."
    ),
}

COMPLETION: dict[str, Schema] = {
    "prompt": {
        "description": "One or more prompts, as text or token ids.",
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            {"type": "array", "items": TOKEN_ID, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": TOKEN_ID, "minItems": 1}, "minItems": 1},
        ],
    },
    "max_tokens": _integer(-1, limit.MAX_INT32, _MAX_TOKENS, default=16),
    "logprobs": _integer(0, limit.MAX_LOGPROBS, "Return log-probabilities, including those of this many top tokens."),
    "echo": _flag(False, "The text begins with the prompt; with `logprobs`, so do the log-probabilities."),
    **_TEXT_TO_TOKENS,
    **_COMMON,
    **SAMPLING,
    **FORMATS,
    **_LABELS,
    **_IGNORED,
}
"""The fields of POST /v1/completions."""

_PART: Schema = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_TOOL_CALL: Schema = {
    "type": "object",
    "required": ["function"],
    "properties": {
        "id": {"type": "string"},
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": {"type": "string"}, "arguments": {"type": "string", "description": "JSON."}},
        },
    },
}
_NAMED_TOOL: Schema = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "required": ["name"], "properties": {"name": {"type": "string"}}},
    },
}

_TOOLS: dict[str, Schema] = {
    "tools": {
        "type": ["array", "null"],
        "maxItems": MAX_TOOLS,
        "description": "Functions that the model may call. Every call is to one of them, with arguments that conform "
        "to its schema. What cannot be enforced of a schema is left out, and the header x-quire-loosened says so; a "
        "strict tool is refused.",
        "items": {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"},
                        "description": {"type": ["string", "null"]},
                        "parameters": {"type": ["object", "null"], "description": "A JSON Schema."},
                        "strict": {"type": ["boolean", "null"]},
                    },
                },
            },
        },
    },
    "tool_choice": {
        "description": "none: no calls; auto: the model decides; required: at least one; a particular function; or "
        "auto or required among some of the tools.",
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            _NAMED_TOOL,
            {
                "type": "object",
                "required": ["type", "allowed_tools"],
                "properties": {
                    "type": {"const": "allowed_tools"},
                    "allowed_tools": {
                        "type": "object",
                        "required": ["mode", "tools"],
                        "properties": {
                            "mode": {"enum": ["auto", "required"]},
                            "tools": {"type": "array", "minItems": 1, "items": _NAMED_TOOL},
                        },
                    },
                },
            },
        ],
    },
    "parallel_tool_calls": _flag(True, "Allow several calls in one reply."),
}

_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {
            "anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}, {"type": "null"}],
            "description": "null is for the assistant's messages alone.",
        },
        "name": {"type": "string"},
        "reasoning": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_call_id": {"type": "string", "description": "For a tool message: the call that it answers."},
        "tool_calls": {"type": "array", "items": _TOOL_CALL, "description": "For an assistant message."},
    },
}

CONVERSATION: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "description": "The chat so far."},
    "add_generation_prompt": _flag(True, "End the prompt with the beginning of an assistant message."),
    "continue_final_message": _flag(False, "Continue the last message instead of beginning a new one."),
    "chat_template_kwargs": _schema("object", "Variables of the chat template, such as enable_thinking."),
    "enable_thinking": _schema("boolean", "Same as chat_template_kwargs.enable_thinking."),
    "reasoning_effort": _schema(
        "string",
        "The template's variable of this name; if it has none, 'none' turns enable_thinking off.",
        enum=[*REASONING_EFFORTS, None],
    ),
    "reasoning": _schema(
        "object",
        "The same in other words: effort is reasoning_effort, enabled is enable_thinking, max_tokens is "
        "thinking_token_budget.",
        properties={
            "effort": {"enum": [*REASONING_EFFORTS, None]},
            "enabled": {"type": ["boolean", "null"]},
            "max_tokens": {"type": ["integer", "null"]},
        },
    ),
    "thinking": _schema(
        "object",
        "The same in Anthropic's words: type is enable_thinking, budget_tokens is thinking_token_budget.",
        properties={
            "type": {"enum": ["enabled", "disabled", "adaptive", None]},
            "budget_tokens": {"type": ["integer", "null"]},
        },
    ),
}

CHAT: dict[str, Schema] = {
    **CONVERSATION,
    **_TOOLS,
    "max_tokens": _integer(-1, limit.MAX_INT32, _MAX_TOKENS + "Default: all of it."),
    "logprobs": _flag(False, "Return log-probabilities."),
    "top_logprobs": _integer(0, limit.MAX_LOGPROBS, "Also those of this many top tokens; needs `logprobs`."),
    **_COMMON,
    **SAMPLING,
    **FORMATS,
    **_LABELS,
    **_IGNORED,
}
"""The fields of POST /v1/chat/completions."""

TOKENIZE: dict[str, Schema] = {
    "model": _COMMON["model"],
    "prompt": _schema("string", "The text; or give `messages`."),
    **_TEXT_TO_TOKENS,
    "return_token_strs": _flag(False, "Also return the text of each token."),
    **CONVERSATION,
    "tools": _TOOLS["tools"],
    "tool_choice": _TOOLS["tool_choice"],
}
"""The fields of POST /tokenize."""

DETOKENIZE: dict[str, Schema] = {
    "model": _COMMON["model"],
    "tokens": {"type": "array", "items": TOKEN_ID, "description": "Token ids."},
}
"""The fields of POST /detokenize."""

_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM's
    **limit.UNSUPPORTED,
    "chat_template": (),
    "documents": ([],),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
    **OTHER_DIALECTS,
}
"""Fields of others that Quire does not support, with the values that have no effect."""

COMPLETION_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_generation_prompt": (True,),
    "chat_template_kwargs": ({},),
    "enable_thinking": (),
    "parallel_tool_calls": (True, False),
    "reasoning_effort": (),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "continue_final_message": (False,),
    "messages": ([],),
    "top_logprobs": (0,),
}
CHAT_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    **_UNSUPPORTED,
    "add_special_tokens": (False,),
    "echo": (False,),
    "parse_special": (False,),
    "prompt": (),
}
TOKENIZE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    name: _UNSUPPORTED[name] for name in ("chat_template", "mm_processor_kwargs")
}
MESSAGE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}
"""The same for one message of a chat."""
