"""What the live view's memory of an engine costs."""

from __future__ import annotations

import gc
import json
import weakref
from types import SimpleNamespace

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import Span, StepPlan, StepResult
from quire.engine.recorder import MAX_SPANS, Record, Recorder


class Tokens(list[int]):
    """A list that can be watched."""


def test_no_tokens_are_kept_of_a_step() -> None:
    recorder = Recorder()
    tokens = Tokens([5] * 8)
    gone = weakref.ref(tokens)
    take_in(recorder, StepPlan(0, [Span(1, 0, tokens, 1)], num_tokens=8), {1: request(1, num_prompt=8)})
    del tokens
    gc.collect()
    assert gone() is None
    [step] = steps(recorder)
    assert (step["tokens"], step["spans"]) == (8, [["cmpl-1", 0, 0, 8, 1]])


def test_only_the_last_chunks_of_a_long_prompt_and_the_first_spans_of_a_wide_step_are_kept() -> None:
    recorder = Recorder()
    requests = {number: request(number, num_prompt=1000) for number in range(MAX_SPANS + 5)}
    for step in range(MAX_SPANS + 9):
        spans = [Span(number, step, [7]) for number in requests]
        take_in(recorder, StepPlan(step, spans, num_tokens=len(spans)), requests)
    assert len(recorder.records[0].chunks) == MAX_SPANS
    assert {len(step["spans"]) for step in steps(recorder)} == {MAX_SPANS}


def request(number: int, num_prompt: int) -> Request:
    return Request(number, [5] * num_prompt, SamplingParams(), max_tokens=4)


def take_in(recorder: Recorder, plan: StepPlan, requests: dict[int, Request]) -> None:
    for number in requests:
        recorder.records.setdefault(number, Record(f"cmpl-{number}", number, 0, 0.0))
    recorder.planned(plan, 0.0, 0.0)
    recorder.committed(plan, StepResult(plan.number, [], 0.0), requests)


def steps(recorder: Recorder) -> list[dict[str, object]]:
    document: dict[str, list[dict[str, object]]] = json.loads(recorder.document(SimpleNamespace(), "steps"))
    return document["steps"]
