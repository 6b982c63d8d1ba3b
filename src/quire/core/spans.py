"""Makes the span that computes a request's next tokens."""

from __future__ import annotations

from quire.core.kv_manager import KVManager
from quire.core.request import Request
from quire.core.step import DRAFT, FROM_PREVIOUS, Span


def next_span(request: Request, count: int, number: int, kv: KVManager) -> Span:
    """Make the span of a request's next `count` tokens, in step `number`; they count as computed from here on."""
    start = request.num_computed
    end = start + count
    tokens = request.tokens[start:end]
    num_known = len(request.tokens) + request.num_pending
    if start < num_known <= end and request.num_pending:
        tokens.append(FROM_PREVIOUS)
    if len(tokens) < count:
        tokens += [DRAFT] * (count - len(tokens))
    num_sampled = max(0, min(end + 1, request.num_prompt + request.max_tokens) - num_known)
    span = Span(request.id, start, tokens, num_sampled, start_follows=request.num_unverified_tokens > 0)
    if request.params.prompt_logprobs is not None:
        span.targets = request.tokens[start + 1 : min(end + 1, request.num_prompt)]
    if request.pooling is not None:
        span.num_pooled = request.pooling.pooled_rows(start, end, request.num_prompt)
    if len(request.tables[0]) > request.num_sent:
        span.table_start = request.num_sent
        span.blocks = [table[request.num_sent :] for table in request.tables]
        request.num_sent = len(request.tables[0])
    if request.copies:
        span.copies = request.copies
        kv.copied(request, number)
    request.num_computed = end
    request.num_pending += num_sampled
    request.num_unverified_tokens += unverified(span)
    request.num_in_flight += 1
    request.last_step = number
    return span


def unverified(span: Span) -> int:
    """Rows that may yield no token: drafts, and the first row, too, which fails if a draft's logits are not finite."""
    return span.num_sampled if span.num_sampled > 1 else 0
