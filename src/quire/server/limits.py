"""Limits on the size of one call, checked before any work is done for it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call. The model's context is checked later, when the prompt has been tokenized.

    Attributes:
        prompts: prompts of one call.
        choices: prompts times `n`.
        text: characters of all prompts or messages.
        token_ids: token ids of all prompts.
        messages: messages of one chat. content_parts: text parts of them all.
        logprob_entries: log-probabilities that one call may ask for: tokens (of prompts and choices, as far as they
            are known or bounded beforehand) times entries per token.
        prompt_logprob_entries: the same for prompts, times choices: a stream sends them in one piece.
        max_model_len: the context length, if it is known: no choice can be longer.
    """

    prompts: int = 256
    choices: int = 1024
    text: int = 8 << 20
    token_ids: int = 1 << 20
    messages: int = 4096
    content_parts: int = 16384
    logprob_entries: int = 2_000_000
    prompt_logprob_entries: int = 200_000
    max_model_len: int | None = None


REASONING_EFFORTS = "none", "minimal", "low", "medium", "high", "xhigh", "max"
MAX_TEMPLATE_KWARGS = 16
MAX_TEMPLATE_KWARGS_BYTES = 1 << 16
MAX_TEMPLATE_KWARGS_DEPTH = 8
MAX_LABEL_LENGTH = 1024
"""Characters of a label: `user`, `safety_identifier`, `prompt_cache_key`."""
MAX_MODEL_NAME_LENGTH = 512
MAX_NAME_LENGTH = 256
"""Characters of a message's `name`."""
MAX_REASONING_LENGTH = 1 << 20
MAX_ID_LIST_BYTES = 1 << 21
"""JSON of `allowed_token_ids`: enough for every id of a large vocabulary."""

BYTES_PER_TOKEN = 3
"""A token has about four bytes in English and three in Chinese, so dividing by three is an upper estimate for ordinary
text. Unusual text may have more tokens. This is only for the queue's bound; later the true number counts."""
TOKENS_PER_MESSAGE = 8
"""Approximate tokens that a chat template adds around a message."""
