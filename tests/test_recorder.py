"""What the live view's memory of an engine costs."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import DRAFT, Span, SpanResult, StepPlan, StepResult
from quire.engine.recorder import MAX_SPANS, Record, Recorder


class Tokens(list[int]):
    """A list that can be watched."""


def test_no_tokens_are_kept_of_a_step() -> None:
    recorder = Recorder()
    tokens = Tokens([5] * 8)
    gone = weakref.ref(tokens)
    plan = StepPlan(0, [Span(1, 0, tokens, 1)], num_tokens=8)
    take_in(recorder, plan, {1: request(1, num_prompt=8)}, [SpanResult([7])])
    del tokens, plan
    gc.collect()
    assert gone() is None
    [step] = steps(recorder)
    assert (step["tokens"], step["spans"]) == (8, [["cmpl-1", 0, 0, 8, 1, 0]])


def test_only_the_last_chunks_of_a_long_prompt_and_the_first_spans_of_a_wide_step_are_kept() -> None:
    recorder = Recorder()
    requests = {number: request(number, num_prompt=1000) for number in range(MAX_SPANS + 5)}
    for step in range(MAX_SPANS + 9):
        spans = [Span(number, step, [7]) for number in requests]
        take_in(recorder, StepPlan(step, spans, num_tokens=len(spans)), requests, [SpanResult([]) for _ in spans])
    assert len(recorder.records[0].chunks) == MAX_SPANS
    assert {len(step["spans"]) for step in steps(recorder)} == {MAX_SPANS}


def test_a_step_tells_of_the_drafts_that_it_verified_and_where_spans_behind_them_began() -> None:
    recorder = Recorder()
    requests = {1: request(1, num_prompt=8), 2: request(2, num_prompt=8)}
    drafts = [DRAFT] * 4
    for number, (spans, results) in enumerate(
        [
            # Prompts; one request's drafts, of which two are right; both behind that, the first with but one draft.
            ([Span(1, 0, [5] * 8, 1), Span(2, 0, [5] * 8, 1)], [SpanResult([7]), SpanResult([7])]),
            (
                [Span(1, 8, [7, *drafts], 5), Span(2, 8, [7], 1)],
                [SpanResult([7, 7, 7], num_drafted=4), SpanResult([7])],
            ),
            (
                [Span(1, 13, [7, *drafts], 5, start_follows=True), Span(2, 9, [7, *drafts], 5)],
                [SpanResult([7, 7], num_drafted=1), SpanResult([7])],
            ),
            ([Span(1, 18, [7], 1, start_follows=True)], [SpanResult([7])]),
        ]
    ):
        plan = StepPlan(number, spans, num_tokens=sum(len(span.tokens) for span in spans))
        take_in(recorder, plan, requests, results)
    told = [[step[name] for name in ("tokens", "drafted", "accepted", "spans")] for step in steps(recorder)]
    assert told == [
        [16, 0, 0, [["cmpl-1", 0, 0, 8, 1, 0], ["cmpl-2", 0, 0, 8, 1, 0]]],
        [6, 4, 2, [["cmpl-1", 0, 8, 5, 3, 4], ["cmpl-2", 0, 8, 1, 1, 0]]],
        [3, 1, 1, [["cmpl-1", 0, 11, 2, 2, 1], ["cmpl-2", 0, 9, 1, 1, 0]]],
        [1, 0, 0, [["cmpl-1", 0, 13, 1, 1, 0]]],
    ]


def request(number: int, num_prompt: int) -> Request:
    return Request(number, [5] * num_prompt, SamplingParams(), max_tokens=4)


def take_in(recorder: Recorder, plan: StepPlan, requests: dict[int, Request], results: list[SpanResult]) -> None:
    for number in requests:
        recorder.records.setdefault(number, Record(f"cmpl-{number}", number, 0, 0.0))
    recorder.planned(plan, 0.0, 0.0)
    recorder.committed(plan, StepResult(plan.number, results, 0.0), requests)


def steps(recorder: Recorder) -> list[dict[str, object]]:
    document: dict[str, list[dict[str, object]]] = json.loads(recorder.document(SimpleNamespace(), "steps"))
    return document["steps"]
