"""The queue bound: what is let in, what is refused, and that nothing is ever given back twice or kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.admission import MAX_RETRY_SECONDS, Admission, QueueFullError


def test_a_call_beyond_the_bound_on_requests_is_refused_with_429_and_retry_after():
    admission = Admission(3, 1000)
    admission.enter(2, 10)
    with pytest.raises(QueueFullError) as refused:
        admission.enter(2, 10)
    error = refused.value
    assert error.status == 429
    assert error.reason == "queue_requests"
    assert error.code == "rate_limit_exceeded"
    assert 1 <= int(error.headers["retry-after"]) <= MAX_RETRY_SECONDS
    assert "2 requests" in error.message and "limit is 3" in error.message
    admission.enter(1, 10)


def test_a_call_beyond_the_bound_on_tokens_is_refused_and_changes_nothing():
    admission = Admission(100, 1000)
    admission.enter(1, 900)
    with pytest.raises(QueueFullError) as refused:
        admission.enter(1, 101)
    assert refused.value.reason == "queue_tokens"
    assert (admission.requests, admission.tokens) == (1, 900)
    admission.enter(1, 100)


def test_a_call_larger_than_the_bounds_is_let_in_when_nothing_waits():
    admission = Admission(4, 100)
    ticket = admission.enter(50, 5000)
    with pytest.raises(QueueFullError):
        admission.enter(1, 1)
    ticket.leave()
    admission.enter(1, 1)
    with pytest.raises(QueueFullError):
        admission.enter(50, 5000)


def test_processes_share_the_bound_and_no_share_is_zero():
    assert (Admission(10, 100, 4).max_requests, Admission(10, 100, 4).max_tokens) == (3, 25)
    assert Admission(1, 1, 64).max_requests == 1


def test_the_price_becomes_the_true_number_of_tokens():
    admission = Admission(100, 1000)
    ticket = admission.enter(4, 900)
    ticket.correct([10, 20], 2)
    assert (admission.requests, admission.tokens) == (4, 60)
    ticket.begun(1)
    assert (admission.requests, admission.tokens) == (2, 20)
    ticket.begun(1)
    assert (admission.requests, admission.tokens) == (2, 20)
    ticket.leave()
    ticket.leave()
    assert (admission.requests, admission.tokens) == (0, 0)
    ticket.correct([5], 1)
    ticket.begun(0)
    assert (admission.requests, admission.tokens) == (0, 0)


def test_retry_after_is_what_the_last_call_waited(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr("quire.server.admission.time.monotonic", lambda: clock[0])
    admission = Admission(2, 1000)
    first, _second = admission.enter(1, 1), admission.enter(1, 1)
    clock[0] += 12.3
    first.correct([1], 1)
    first.begun(0)
    admission.enter(1, 1)
    with pytest.raises(QueueFullError) as refused:
        admission.enter(1, 1)
    assert refused.value.headers["retry-after"] == "13"


_ticket_steps = st.one_of(
    st.tuples(st.just("enter"), st.integers(1, 5), st.integers(0, 50)),
    st.tuples(st.just("correct"), st.integers(0, 9), st.lists(st.integers(0, 40), min_size=1, max_size=4)),
    st.tuples(st.just("begun"), st.integers(0, 9), st.integers(0, 4)),
    st.tuples(st.just("leave"), st.integers(0, 9), st.none()),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(_ticket_steps, max_size=40))
def test_whatever_happens_nothing_is_negative_and_all_comes_back(steps):
    told: list[tuple[int, int]] = []
    admission = Admission(8, 100, tell=lambda requests, tokens: told.append((requests, tokens)))
    tickets = []
    for kind, first, second in steps:
        if kind == "enter":
            try:
                tickets.append(admission.enter(first, second))
            except QueueFullError:
                assert admission.requests
        elif tickets:
            ticket = tickets[first % len(tickets)]
            getattr(ticket, kind)(*{"correct": (second, 2), "begun": (second,), "leave": ()}[kind])
        assert admission.requests >= 0 and admission.tokens >= 0
    for ticket in tickets:
        ticket.leave()
    assert (admission.requests, admission.tokens) == (0, 0)
    assert not told or told[-1] == (0, 0)
