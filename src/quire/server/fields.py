"""The fields of requests: which there are, what they may be, and which of OpenAI's and vLLM's are not supported.

Names and ranges are OpenAI's (types of its Python package 3.52) and vLLM's, where vLLM has the same thing.
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
_UNSET = "The checkpoint's default if not given, else {}."
_PENALTY = limit.MAX_ADDITIVE_PENALTY

SAMPLING: dict[str, Schema] = {
    "n": _integer(1, limit.MAX_N, "How many choices to make of each prompt.", default=1),
    "temperature": _number(0, limit.MAX_TEMPERATURE, "0 takes the most likely token. " + _UNSET.format(1)),
    "top_p": _schema(
        "number",
        "Sample from the fewest most likely tokens that add up to this. " + _UNSET.format(1),
        exclusiveMinimum=0,
        maximum=1,
    ),
    "top_k": _integer(-1, limit.MAX_INT32, "Sample from this many most likely tokens; 0 and -1 are off."),
    "min_p": _number(0, 1, "Sample from tokens at least this times as likely as the likeliest. " + _UNSET.format(0)),
    "presence_penalty": _number(-_PENALTY, _PENALTY, "Against tokens that are in the output.", default=0),
    "frequency_penalty": _number(-_PENALTY, _PENALTY, "The same, once for every time they are in it.", default=0),
    "repetition_penalty": _number(
        limit.MIN_REPETITION_PENALTY, limit.MAX_REPETITION_PENALTY, "Against tokens of prompt and output; 1 is off."
    ),
    "seed": _integer(-limit.MAX_INT64 - 1, limit.MAX_INT64, "Same seed, same tokens. Drawn and told if not given."),
    "stop": {
        "description": f"One or up to {limit.MAX_STOP_STRINGS} strings that end the text.",
        "anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": limit.MAX_STOP_STRINGS}, {"type": "null"}],
    },
    "stop_token_ids": _list(TOKEN_ID, limit.MAX_STOP_TOKEN_IDS, "Further tokens that end the text."),
    "include_stop_str_in_output": _flag(False, "Leave the stop string in the text."),
    "min_tokens": _integer(0, limit.MAX_INT32, "Nothing ends the text before so many tokens.", default=0),
    "ignore_eos": _flag(False, "The model's own end does not end the text."),
    "logit_bias": _schema(
        "object",
        "Added to the logits, by token id.",
        additionalProperties={"type": "number", "minimum": -limit.MAX_LOGIT_BIAS, "maximum": limit.MAX_LOGIT_BIAS},
        maxProperties=limit.MAX_LOGIT_BIAS_ENTRIES,
    ),
    "allowed_token_ids": _list(TOKEN_ID, limit.MAX_ALLOWED_TOKEN_IDS, "Only these are sampled.", minItems=1),
    "bad_words": _list(
        {"type": "string", "minLength": 1, "maxLength": limit.MAX_BAD_WORD_LENGTH},
        limit.MAX_BAD_WORDS,
        "Strings that are never generated.",
    ),
    "prompt_logprobs": _integer(
        0, limit.MAX_LOGPROBS, "Also return the log-probabilities of the prompt's tokens, and of so many best ones."
    ),
    "skip_special_tokens": _flag(True, "Leave special tokens out of the text."),
    "priority": _integer(-limit.MAX_INT32 - 1, limit.MAX_INT32, "Lower runs first, where the server orders so."),
    "cache_salt": _schema(
        "string",
        "Cached prompts are shared only between requests of the same salt.",
        minLength=1,
        maxLength=limit.MAX_CACHE_SALT_LENGTH,
    ),
    "speculate": _flag(True, "Draft tokens for it, where the server does so. It changes speed, never tokens."),
    "kv_transfer_params": _schema(
        "object",
        "Where servers compute prompts for others, as vLLM spells it: do_remote_decode, or what an answer to that has.",
    ),
    "thinking_token_budget": _integer(
        -1, limit.MAX_INT32, "Of chats: the answer reasons for so many tokens at most; -1 is no bound."
    ),
}
"""Fields of both routes that go into `SamplingParams` under their own names."""

_ANY_SCHEMA: Schema = {"description": "A JSON Schema, or its text.", "type": ["object", "string", "boolean", "null"]}
_TEXT: Schema = {"type": ["string", "null"], "minLength": 1}
_CHOICES: Schema = _list({"type": "string", "minLength": 1}, MAX_CHOICES, "The answer is one of these.", minItems=1)

FORMATS: dict[str, Schema] = {
    "response_format": _schema(
        "object",
        "What the answer must look like: text, any JSON object, JSON that meets a schema, or a structural tag. All of "
        "it is enforced, or it is refused.",
        properties={
            "type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]},
            "format": {"type": "object", "description": "Of a structural tag, as vLLM and XGrammar spell it."},
            "structures": {"type": "array", "description": "Of a structural tag in its older spelling."},
            "triggers": {"type": "array", "items": {"type": "string"}, "description": "The same."},
            "json_schema": {
                "type": "object",
                "required": ["schema"],
                "properties": {
                    "name": {"type": "string"},
                    "description": {"type": "string"},
                    "schema": {"type": "object"},
                    "strict": {"type": ["boolean", "null"], "description": "It is enforced anyway."},
                },
            },
        },
        required=["type"],
    ),
    "structured_outputs": _schema(
        "object",
        "The same as vLLM spells it: exactly one of json, regex, choice, grammar, json_object and structural_tag.",
        properties={
            "json": _ANY_SCHEMA,
            "regex": {**_TEXT, "description": "The whole answer matches it (Rust's syntax, without look-around)."},
            "choice": _CHOICES,
            "grammar": {**_TEXT, "description": "Lark, or llama.cpp's GBNF."},
            "json_object": {"type": ["boolean", "null"], "description": "Any JSON object."},
            "structural_tag": {
                "type": ["object", "string", "null"],
                "description": "Text with tags whose content has a form of its own.",
            },
            "whitespace_pattern": {**_TEXT, "description": "White space of JSON."},
            "disable_any_whitespace": {"type": "boolean", "description": "JSON without white space."},
        },
    ),
    "guided_json": _ANY_SCHEMA,
    "guided_regex": {**_TEXT, "description": "structured_outputs.regex, as vLLM spelled it before."},
    "guided_choice": _CHOICES,
    "guided_grammar": {**_TEXT, "description": "structured_outputs.grammar, as vLLM spelled it before."},
    "guided_whitespace_pattern": {**_TEXT, "description": "structured_outputs.whitespace_pattern, the same."},
    "ebnf": {**_TEXT, "description": "structured_outputs.grammar, as SGLang spells it."},
    "grammar": {**_TEXT, "description": "structured_outputs.grammar, as llama.cpp spells it."},
    "regex": {**_TEXT, "description": "structured_outputs.regex, as SGLang spells it."},
    "json_schema": {**_ANY_SCHEMA, "description": "structured_outputs.json, as llama.cpp and SGLang spell it."},
    "structural_tag": {
        "type": ["object", "string", "null"],
        "description": "structured_outputs.structural_tag, as SGLang spells it.",
    },
}
"""Fields of both routes that say what the answer must look like."""

STREAM_OPTIONS: dict[str, Schema] = {
    "include_usage": _flag(False, "End the stream with a chunk of no choices that holds the usage."),
    "continuous_usage_stats": _flag(False, "Every chunk holds the usage so far."),
    "include_obfuscation": _flag(False, "Not supported."),
}

_COMMON: dict[str, Schema] = {
    "model": _schema("string", "One of the names in /v1/models; the first if not given."),
    "stream": _flag(False, "Answer with server-sent events."),
    "stream_options": _schema("object", "With `stream` only.", properties=STREAM_OPTIONS),
    "return_token_ids": _flag(False, "Also return token ids of prompts and choices."),
    "max_completion_tokens": _integer(0, limit.MAX_INT32, "The same as `max_tokens`."),
    "n_predict": _integer(0, limit.MAX_INT32, "The same, as llama.cpp spells it."),
}

LABELS = ("user", "safety_identifier", "prompt_cache_key")
"""Strings that are accepted and change nothing; the first two stand in the log."""

_LABELS: dict[str, Schema] = {name: _schema("string", "A label; it changes nothing.") for name in LABELS} | {
    "metadata": _schema("object", "Labels; they change nothing."),
}

HINTS: dict[str, tuple[Any, ...]] = {"service_tier": ("auto", "default"), "store": (False,), "verbosity": ("medium",)}
"""OpenAI's fields that are accepted, change nothing, and are listed as ignored unless they have one of these values."""

_HINTS: dict[str, Schema] = {
    "service_tier": _schema("string", "Accepted; there is one."),
    "store": _schema("boolean", "Accepted; nothing is stored."),
    "verbosity": _schema("string", "Accepted; no model here reads it."),
}

_MAX_TOKENS = "At most so many tokens; 0 only scores the prompt. Cut to what is left of the context. "

COMPLETION: dict[str, Schema] = {
    "prompt": {
        "description": "One or more prompts, as text or as token ids.",
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1},
            {"type": "array", "items": TOKEN_ID, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": TOKEN_ID, "minItems": 1}, "minItems": 1},
        ],
    },
    "max_tokens": _integer(0, limit.MAX_INT32, _MAX_TOKENS, default=16),
    "logprobs": _integer(0, limit.MAX_LOGPROBS, "Return log-probabilities, also of so many best tokens."),
    "echo": _flag(False, "The text begins with the prompt; with `logprobs`, so do the log-probabilities."),
    "add_special_tokens": _flag(True, "Tokenize with the tokens that the model wants around a text."),
    **_COMMON,
    **SAMPLING,
    **FORMATS,
    **_LABELS,
    **_HINTS,
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
_TOOLS: dict[str, Schema] = {
    "tools": {
        "type": ["array", "null"],
        "maxItems": MAX_TOOLS,
        "description": "Functions that the model may call. What it calls is one of them, with arguments that meet its "
        "schema. Where not all of a schema can be enforced, a strict tool is refused; of others, arguments are any "
        "JSON object, and the header x-quire-loosened says so.",
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
        "description": "none: no calls; auto: as the model likes; required: at least one; or a certain function.",
        "anyOf": [
            {"enum": ["none", "auto", "required", None]},
            {
                "type": "object",
                "required": ["type", "function"],
                "properties": {
                    "type": {"const": "function"},
                    "function": {
                        "type": "object",
                        "required": ["name"],
                        "properties": {"name": {"type": "string"}},
                    },
                },
            },
        ],
    },
    "parallel_tool_calls": _flag(True, "Several calls may come in one reply."),
}

_MESSAGE: Schema = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART, "minItems": 1}]},
        "name": {"type": "string"},
        "reasoning": {"type": "string"},
        "reasoning_content": {"type": "string"},
        "tool_call_id": {"type": "string", "description": "Of a tool's message: the call that it answers."},
        "tool_calls": {"type": "array", "items": _TOOL_CALL, "description": "Of an assistant's message."},
    },
}

CONVERSATION: dict[str, Schema] = {
    "messages": {"type": "array", "items": _MESSAGE, "minItems": 1, "description": "The chat so far."},
    "add_generation_prompt": _flag(True, "End the prompt with the opening of the assistant's answer."),
    "continue_final_message": _flag(False, "Go on with the last message in place of opening a new one."),
    "chat_template_kwargs": _schema("object", "Variables of the chat template, like enable_thinking."),
    "enable_thinking": _schema("boolean", "chat_template_kwargs.enable_thinking, as others spell it."),
    "reasoning_effort": _schema(
        "string",
        "The template's variable of this name; where it has none, 'none' turns enable_thinking off.",
        enum=[*REASONING_EFFORTS, None],
    ),
}

CHAT: dict[str, Schema] = {
    **CONVERSATION,
    **_TOOLS,
    "max_tokens": _integer(0, limit.MAX_INT32, _MAX_TOKENS + "All of it if not given."),
    "logprobs": _flag(False, "Return log-probabilities."),
    "top_logprobs": _integer(0, limit.MAX_LOGPROBS, "Also those of so many best tokens; needs `logprobs`."),
    **_COMMON,
    **SAMPLING,
    **FORMATS,
    **_LABELS,
    **_HINTS,
}
"""The fields of POST /v1/chat/completions."""

TOKENIZE: dict[str, Schema] = {
    "model": _COMMON["model"],
    "prompt": _schema("string", "Text; or give `messages`."),
    "add_special_tokens": _flag(True, "Add the tokens that the model wants around a text."),
    "return_token_strs": _flag(False, "Also return the text of each token."),
    **CONVERSATION,
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
    "prediction": (),
    "prompt_cache_options": ({}, {"mode": "implicit"}),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "suffix": ("",),
    "web_search_options": (),
    # vLLM's
    **limit.UNSUPPORTED,
    "chat_template": (),
    "documents": ([],),
    "guided_decoding_backend": ("auto", "guidance"),
    "include_reasoning": (True,),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "return_tokens_as_token_ids": (False,),
    "vllm_xargs": ({},),
    **OTHER_DIALECTS,
}
"""Fields that others know and Quire does not support, with the values that ask for nothing."""

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
    "prompt": (),
}
TOKENIZE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    name: _UNSUPPORTED[name] for name in ("chat_template", "mm_processor_kwargs")
} | {"tools": ([],)}
MESSAGE_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}
"""The same for one message of a chat."""
