"""OpenAPI schemas of the bodies that are parsed and written without FastAPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.server import fields as tables
from quire.server import messages_protocol
from quire.server import openai_responses_protocol as responses_protocol
from quire.server import pooling_fields as pooling
from quire.server.body import JSON

Schema = dict[str, Any]


def openapi_bodies() -> dict[str, Any]:
    """`schemas`: components by name; `paths`: what to add to the POST operation of each path."""
    requests = {
        "CompletionRequest": _object(tables.COMPLETION, ["prompt"]),
        "ChatCompletionRequest": _object(tables.CHAT, ["messages"]),
        "TokenizeRequest": _object(tables.TOKENIZE, []),
        "DetokenizeRequest": _object(tables.DETOKENIZE, ["tokens"]),
        "EmbeddingRequest": _object(pooling.EMBEDDING, ["input"]),
        "ScoreRequest": _object(pooling.SCORE, []),
        "RerankRequest": _object(pooling.RERANK, ["query", "documents"]),
    }
    paths = {
        "/v1/completions": _operation("CompletionRequest", "Completion", streams="Completion"),
        "/v1/chat/completions": _operation("ChatCompletionRequest", "ChatCompletion", streams="ChatCompletionChunk"),
        "/tokenize": _operation("TokenizeRequest", "Tokens"),
        "/detokenize": _operation("DetokenizeRequest", "Text"),
        "/v1/responses": _operation("ResponsesResponsesBody", "ResponsesAnswer", streams="ResponsesEvent"),
        "/v1/messages": _operation("MessagesMessagesBody", "MessagesAnswer", streams="MessagesEvent"),
        "/v1/messages/count_tokens": _operation("MessagesMessagesBody", "MessagesCount"),
        "/v1/embeddings": _operation("EmbeddingRequest", "Embeddings"),
        "/v1/score": _operation("ScoreRequest", "Scores"),
        "/v1/rerank": _operation("RerankRequest", "Ranks"),
    }
    return {
        "schemas": {
            **requests,
            **messages_protocol.openapi_schemas(),
            **responses_protocol.openapi_schemas(),
            **_RESPONSES,
        },
        "paths": paths,
    }


def _object(properties: Mapping[str, Schema], required: list[str], **more: Any) -> Schema:
    return {"type": "object", "properties": dict(properties), "required": required, **more}


def _operation(request: str, response: str, streams: str | None = None) -> Schema:
    content: Schema = {"application/json": {"schema": _ref(response)}}
    about = "The answer."
    if streams is not None:
        last = "" if streams.endswith("Event") else ", then `[DONE]`"
        about = f"The answer; with `stream`, events whose data are `{streams}` objects{last}."
        # Before OpenAPI 3.2 such a schema describes each event, whose data is a text with this content, or `[DONE]`.
        data = {"type": "string", "contentMediaType": JSON, "contentSchema": _ref(streams)}
        content["text/event-stream"] = {"schema": _object({"event": {"type": "string"}, "data": data}, ["data"])}
    return {
        "requestBody": {"required": True, "content": {"application/json": {"schema": _ref(request)}}},
        "responses": {"200": {"description": about, "content": content}},
    }


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_INTEGER: Schema = {"type": "integer"}
_STRING: Schema = {"type": "string"}
_NUMBER: Schema = {"type": "number"}
_IDS = _list(_INTEGER)
_REASON: Schema = {
    "enum": ["stop", "length", "abort", None],
    "description": "stop: end or stop string; length: `max_tokens` or context; abort: POST /abort. null: running.",
}
_STOP_REASON: Schema = {"type": ["string", "integer", "null"], "description": "The stop string or token, if any."}
_PROMPT_LOGPROBS = _or_null(_list({"type": ["object", "null"]})) | {
    "description": "One object per prompt token, by token id: logprob, rank, decoded_token. null for the first token."
}
_HEAD: dict[str, Schema] = {
    "id": _STRING,
    "created": {"type": "integer", "description": "Unix time."},
    "model": _STRING,
    "system_fingerprint": {
        "type": "string",
        "description": "Identifies everything that tokens depend on besides the request.",
    },
    "seed": {"type": "integer", "description": "The seed of sampling: the request's, or a random one."},
    "usage": _or_null(_ref("Usage")),
}
_CHAT_CHOICE: dict[str, Schema] = {
    "index": _INTEGER,
    "logprobs": _or_null(_object({"content": _list(_ref("TokenLogprob"))}, ["content"])),
    "finish_reason": _REASON,
    "stop_reason": _STOP_REASON,
    "token_ids": _IDS,
}
_CHAT_HEAD = {**_HEAD, "prompt_token_ids": _IDS, "prompt_logprobs": _PROMPT_LOGPROBS}
_MESSAGE = _object(
    {"role": {"const": "assistant"}, "content": _STRING, "refusal": {"type": "null"}}, ["role", "content"]
)
_LOGPROB: dict[str, Schema] = {
    "token": _STRING,
    "logprob": {"type": "number", "description": "Natural logarithm; -9999 stands for (almost) impossible."},
    "bytes": _IDS,
}

_POOLED_HEAD: dict[str, Schema] = {
    "id": _STRING,
    "created": {"type": "integer", "description": "Unix time."},
    "model": _STRING,
    "usage": _object({"prompt_tokens": _INTEGER, "total_tokens": _INTEGER}, ["prompt_tokens", "total_tokens"]),
}

_RESPONSES: dict[str, Schema] = {
    "Usage": _object(
        {
            "prompt_tokens": _INTEGER,
            "completion_tokens": _INTEGER,
            "total_tokens": _INTEGER,
            "prompt_tokens_details": _object({"cached_tokens": _INTEGER}, ["cached_tokens"]),
        },
        ["prompt_tokens", "completion_tokens", "total_tokens"],
    ),
    "TokenLogprob": _object({**_LOGPROB, "top_logprobs": _list(_object(_LOGPROB, [*_LOGPROB]))}, [*_LOGPROB]),
    "CompletionLogprobs": _object(
        {
            "tokens": _list(_STRING),
            "token_logprobs": _list({"type": ["number", "null"]}),
            "top_logprobs": _list({"type": ["object", "null"], "additionalProperties": _NUMBER}),
            "text_offset": _IDS,
        },
        ["tokens", "token_logprobs", "top_logprobs", "text_offset"],
    ),
    "Completion": _object(
        {
            **_HEAD,
            "object": {"const": "text_completion"},
            "choices": _list(
                _object(
                    {
                        "index": _INTEGER,
                        "text": _STRING,
                        "logprobs": _or_null(_ref("CompletionLogprobs")),
                        "finish_reason": _REASON,
                        "stop_reason": _STOP_REASON,
                        "token_ids": _IDS,
                        "prompt_token_ids": _IDS,
                        "prompt_logprobs": _PROMPT_LOGPROBS,
                    },
                    ["index", "text", "finish_reason"],
                )
            ),
        },
        ["id", "object", "created", "model", "choices"],
    ),
    "ChatCompletion": _object(
        {
            **_CHAT_HEAD,
            "object": {"const": "chat.completion"},
            "choices": _list(_object({**_CHAT_CHOICE, "message": _MESSAGE}, ["index", "message", "finish_reason"])),
        },
        ["id", "object", "created", "model", "choices"],
    ),
    "ChatCompletionChunk": _object(
        {
            **_CHAT_HEAD,
            "object": {"const": "chat.completion.chunk"},
            "choices": _list(
                _object(
                    {**_CHAT_CHOICE, "delta": _object({"role": {"const": "assistant"}, "content": _STRING}, [])},
                    ["index", "delta"],
                )
            ),
        },
        ["id", "object", "created", "model", "choices"],
    ),
    "Tokens": _object(
        {"count": _INTEGER, "max_model_len": _INTEGER, "tokens": _IDS, "token_strs": _or_null(_list(_STRING))},
        ["count", "max_model_len", "tokens"],
    ),
    "Text": _object({"prompt": _STRING}, ["prompt"]),
    "ResponsesAnswer": _object(
        {
            "id": _STRING,
            "object": {"const": "response"},
            "created_at": _INTEGER,
            "model": _STRING,
            "status": {"enum": ["queued", "in_progress", "completed", "incomplete", "cancelled", "failed"]},
            "output": _list({"type": "object", "description": "Items: message, reasoning, function_call."}),
            "error": {"type": ["object", "null"]},
            "incomplete_details": {"type": ["object", "null"]},
            "usage": {"type": ["object", "null"]},
        },
        ["id", "object", "created_at", "model", "status", "output"],
    ),
    "ResponsesEvent": _object({"type": _STRING, "sequence_number": _INTEGER}, ["type", "sequence_number"]),
    "MessagesAnswer": _object(
        {
            "id": _STRING,
            "type": {"const": "message"},
            "role": {"const": "assistant"},
            "model": _STRING,
            "content": _list({"type": "object", "description": "Blocks: text, thinking, tool_use."}),
            "stop_reason": {"type": ["string", "null"]},
            "stop_sequence": {"type": ["string", "null"]},
            "usage": {"type": "object"},
        },
        ["id", "type", "role", "model", "content", "stop_reason", "usage"],
    ),
    "MessagesEvent": _object(
        {"type": {"type": "string", "description": "The type of an event in Anthropic's stream."}}, ["type"]
    ),
    "MessagesCount": _object({"input_tokens": _INTEGER}, ["input_tokens"]),
    "Embeddings": _object(
        {
            **_POOLED_HEAD,
            "object": {"const": "list"},
            "data": _list(
                _object(
                    {"object": {"const": "embedding"}, "index": _INTEGER, "embedding": {"type": ["array", "string"]}},
                    ["object", "index", "embedding"],
                )
            ),
        },
        ["object", "data", "model", "usage"],
    ),
    "Scores": _object(
        {
            **_POOLED_HEAD,
            "object": {"const": "list"},
            "data": _list(
                _object(
                    {"object": {"const": "score"}, "index": _INTEGER, "score": _NUMBER}, ["object", "index", "score"]
                )
            ),
        },
        ["object", "data", "model", "usage"],
    ),
    "Ranks": _object(
        {
            **_POOLED_HEAD,
            "results": _list(
                _object(
                    {"index": _INTEGER, "relevance_score": _NUMBER, "document": _object({"text": _STRING}, ["text"])},
                    ["index", "relevance_score"],
                )
            ),
        },
        ["results", "model", "usage"],
    ),
}
