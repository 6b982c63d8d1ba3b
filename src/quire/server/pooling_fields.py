"""The fields of /v1/embeddings, /v1/score and /v1/rerank, as those of other routes are in `fields.py`.

Names are OpenAI's for embeddings, vLLM's for scores, Jina's and vLLM's for ranks.
"""

from __future__ import annotations

from typing import Any

from quire.server.fields import TOKEN_ID, Schema

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
LABELS = ("yes", "no")
"""The default instruction for judging documents: Qwen3-Reranker's."""


def _text(help: str, **more: Any) -> Schema:
    return {"type": ["string", "null"], "description": help, **more}


_TEXTS: Schema = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}
_COMMON: dict[str, Schema] = {
    "model": _text("One of the names in /v1/models. Default: the first."),
    "user": _text("A label; it has no effect."),
    "priority": {"type": ["integer", "null"], "description": "Lower values run first, if the server uses priorities."},
    "cache_salt": _text("Cached prefixes are shared only between requests with the same salt.", minLength=1),
    "truncate_prompt_tokens": {
        "type": ["integer", "null"],
        "minimum": -1,
        "description": "Embed at most this many tokens of each text; -1: as many as the context has. Default: a text "
        "that is too long is refused.",
    },
    "truncation_side": _text("The side on which tokens are left out.", enum=["left", "right", None], default="right"),
}
_PAIRED: dict[str, Schema] = {
    "instruction": _text("The instruction by which a chat model judges.", default=INSTRUCTION),
    "labels": {
        "type": ["array", "null"],
        "items": {"type": "string", "minLength": 1},
        "minItems": 2,
        "maxItems": 2,
        "default": LABELS,
        "description": "A chat model's words for relevant and irrelevant, one token each.",
    },
}
EMBEDDING: dict[str, Schema] = {
    "input": {
        "description": "One or more prompts, as text or token ids.",
        "anyOf": [
            *_TEXTS["anyOf"],
            {"type": "array", "items": TOKEN_ID, "minItems": 1},
            {"type": "array", "items": {"type": "array", "items": TOKEN_ID, "minItems": 1}, "minItems": 1},
        ],
    },
    "encoding_format": _text("base64: 32-bit little-endian numbers.", enum=["float", "base64", None], default="float"),
    "dimensions": {
        "type": ["integer", "null"],
        "minimum": 1,
        "description": "Truncate embeddings to this many dimensions.",
    },
    "add_special_tokens": {
        "type": ["boolean", "null"],
        "default": True,
        "description": "Add the special tokens that the model expects around a text.",
    },
    "prompt_name": _text("Which of the checkpoint's prompts to put before each text. Default: its default one."),
    **_COMMON,
}
SCORE: dict[str, Schema] = {
    "text_1": {**_TEXTS, "description": "One text, which is compared with each of text_2, or as many as those."},
    "text_2": {**_TEXTS, "description": "The texts to compare with."},
    "queries": {**_TEXTS, "description": "Same as text_1."},
    "documents": {**_TEXTS, "description": "Same as text_2."},
    **_PAIRED,
    **_COMMON,
}
_DOCUMENT: Schema = {"type": "object", "required": ["text"], "properties": {"text": {"type": "string"}}}
RERANK: dict[str, Schema] = {
    "query": {"type": "string"},
    "documents": {"type": "array", "minItems": 1, "items": {"anyOf": [{"type": "string"}, _DOCUMENT]}},
    "top_n": {"type": ["integer", "null"], "minimum": 0, "description": "Return this many of the best; 0 means all."},
    "return_documents": {"type": ["boolean", "null"], "default": True},
    **_PAIRED,
    **_COMMON,
}

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "activation": (True,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "embed_dtype": ("float32",),
    "endianness": ("native", "little"),
    "max_tokens_per_doc": (0,),
    "messages": ([],),
    "mm_processor_kwargs": ({},),
    "normalize": (True,),
    "prompt": (),
    "softmax": (True,),
    "task": (),
    "use_activation": (True,),
}
