"""The runner's ragged batch against one made token by token, for requests that come, grow, end and come back."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.core.sampling_params import SamplingParams
from quire.core.step import FROM_PREVIOUS, RequestInfo, Span, StepPlan
from quire.ops import Kernels
from quire.runner.host_forward import HostForward
from quire.runner.model_runner import ModelRunner

SIZE = 16


def runner() -> Any:
    model: Any = SimpleNamespace(vocab_size=100, kernels=Kernels(), expert_slots=0)
    kv: Any = [SimpleNamespace(block_size=SIZE)]
    return ModelRunner(model, kv, 1, 1, forward=HostForward(model, kv))


def info(request: int) -> RequestInfo:
    return RequestInfo(request, SamplingParams(seed=1), 0, [1])


def check(made: Any, spans: list[Span], tables: dict[int, list[int]]) -> None:
    rows = np.array([made._requests[span.request].row for span in spans])
    [batch] = made._forward.batches(spans, rows, np.cumsum([0, *(len(span.tokens) for span in spans)]))
    ends = [span.start + len(span.tokens) for span in spans]
    positions = [at for span, end in zip(spans, ends, strict=True) for at in range(span.start, end)]
    owners = [span.request for span in spans for _ in span.tokens]
    tokens = [token for span in spans for token in span.tokens]
    last = [int(made._forward.last_tokens[made._requests[owner].row]) for owner in owners]
    assert batch.token_ids.tolist() == [
        before if token == FROM_PREVIOUS else token for token, before in zip(tokens, last, strict=True)
    ]
    assert batch.positions.tolist() == positions
    assert batch.slots.tolist() == [
        tables[owner][at // SIZE] * SIZE + at % SIZE for owner, at in zip(owners, positions, strict=True)
    ]
    assert batch.context_lens == ends
    assert batch.row_starts == [0, *(owners.index(s.request) + len(s.tokens) for s in spans)]
    width = max(-(-end // SIZE) for end in ends)
    needed = [tables[span.request][: -(-end // SIZE)] for span, end in zip(spans, ends, strict=True)]
    assert batch.block_tables.tolist() == [blocks + [0] * (width - len(blocks)) for blocks in needed]
    assert batch.block_tables.is_contiguous()


@pytest.mark.quick("2", "3")
@pytest.mark.parametrize("seed", range(4))
def test_a_batch_is_what_its_spans_say(seed: int) -> None:
    draw, made = random.Random(seed), runner()
    tables: dict[int, list[int]] = {}
    lengths: dict[int, int] = {}
    for number in range(40):
        ended = [request for request in tables if draw.random() < 0.15]
        for request in ended:
            del tables[request], lengths[request]
        fresh = [100 * number + i for i in range(draw.randrange(4))] or [100 * number]
        tables.update({request: [] for request in fresh})
        spans = []
        for request in draw.sample(list(tables), len(tables)):
            start = lengths.get(request, 0)
            count = draw.choice([1, 1, 3, 40, 2000]) if start < 4000 else 1
            lengths[request] = start + count
            tokens = [FROM_PREVIOUS] if count == 1 and start else [draw.randrange(100) for _ in range(count)]
            have, more = len(tables[request]), draw.randrange(2)  # blocks may be there before they are needed
            new = [draw.randrange(1, 999) for _ in range(have, -(-lengths[request] // SIZE) + more)]
            tables[request] += new
            spans.append(Span(request, start, tokens, table_start=have, blocks=[new] if new else []))
        made._take_in(StepPlan(number, spans, [info(request) for request in fresh], ended))
        last_tokens = made._forward.last_tokens
        last_tokens.copy_(torch.tensor([draw.randrange(100) for _ in last_tokens]))
        check(made, spans, tables)


def test_a_table_that_is_replaced_from_some_block_on_is_read_so() -> None:
    made, tables = runner(), {0: [5, 6, 7], 1: [9]}
    made._take_in(
        StepPlan(0, [Span(0, 0, [1] * 48, blocks=[[5, 6, 7]]), Span(1, 0, [1], blocks=[[9]])], [info(0), info(1)])
    )
    spans = [Span(0, 40, [1, 2], table_start=1, blocks=[[0, 8]]), Span(1, 1, [1])]
    made._take_in(StepPlan(1, spans))
    tables[0][1:] = [0, 8]
    check(made, spans, tables)


def test_rows_ahead_are_the_batches_of_one_row_that_follow() -> None:
    made, tables = runner(), {0: list(range(100, 164)), 1: [7, 8, 9]}  # the first fills a line of the tables
    end = 64 * SIZE
    known = [Span(0, 0, [1] * end, blocks=[tables[0]]), Span(1, 0, [1] * 30, blocks=[tables[1]])]
    made._take_in(StepPlan(0, known, [info(0), info(1)]))
    ahead = made._forward.rows_ahead(np.array([1, 0]), np.arange(4)[:, None] + [30, end - 1])
    for i, count in enumerate([2, 1, 1, 1]):  # the second one goes no further: it has no more blocks
        spans = [Span(1, 30 + i, [5]), Span(0, end - 1 + i, [6])][:count]
        batch = ahead(i, torch.tensor([5, 6][:count]))
        rows = np.array([1, 0][:count])
        [expected] = made._forward.batches(spans, rows, np.arange(count + 1))
        for name in ("token_ids", "positions", "slots"):
            assert getattr(batch, name).tolist() == getattr(expected, name).tolist()
        assert (batch.row_starts, batch.context_lens) == (expected.row_starts, expected.context_lens)
        for request, context, blocks in zip((1, 0), batch.context_lens, batch.block_tables.tolist(), strict=False):
            needed = -(-context // SIZE)
            assert blocks[:needed] == tables[request][:needed]
