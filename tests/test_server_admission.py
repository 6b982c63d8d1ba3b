"""The queue bound: what is let in, what is refused, and that nothing is ever given back twice or kept."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.server.admission import MAX_RETRY_SECONDS, Admission, QueueFullError, Ticket


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
    part = Admission(10, 100, 4)
    part.enter(1, 24)
    with pytest.raises(QueueFullError, match="the limit is 3"):
        part.enter(3, 1)
    with pytest.raises(QueueFullError, match="the limit is 25"):
        part.enter(1, 2)
    with pytest.raises(QueueFullError, match="the limit is 1;"):
        smallest = Admission(1, 1, 64)
        smallest.enter(1, 1)
        smallest.enter(1, 1)


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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the queue takes for the time."""
    now = [100.0]
    monkeypatch.setattr("quire.server.admission.time.monotonic", lambda: now[0])
    return now


def refusal(admission: Admission, requests: int, tokens: int = 1, owner: str = "") -> QueueFullError:
    with pytest.raises(QueueFullError) as refused:
        admission.enter(requests, tokens, owner)
    return refused.value


def retry_after(*of: object) -> int:
    return int(refusal(*of).headers["retry-after"])  # type: ignore[arg-type]


def filled(admission: Admission, size: int) -> list[Ticket]:
    return [admission.enter(1, 1) for _ in range(size)]


def drain(admission: Admission, clock: list[float], every: float, tickets: list[Ticket], count: int) -> None:
    """One request leaves the queue at a time, and another one comes for it."""
    for _ in range(count):
        clock[0] += every
        tickets.pop(0).leave()
        tickets.append(admission.enter(1, 1))


@pytest.mark.parametrize("every", [0.2, 2.0, 5.0, 40.0])
def test_retry_after_is_how_long_the_room_takes_at_the_rate_at_which_the_queue_empties(clock, every):
    admission = Admission(40, 1000)
    drain(admission, clock, every, filled(admission, 40), 100)
    for asked in (1, 5, 10):
        expected = min(60, max(1, asked * every))
        assert retry_after(admission, asked) == pytest.approx(expected, rel=0.1, abs=1)


def test_retry_after_follows_a_queue_that_becomes_slower(clock):
    admission = Admission(10, 1000)
    tickets = filled(admission, 10)
    drain(admission, clock, 0.1, tickets, 200)
    assert retry_after(admission, 1) == 1
    clock[0] += 30  # nothing leaves any more
    assert retry_after(admission, 1) == pytest.approx(30, abs=1)
    drain(admission, clock, 10.0, tickets, 20)
    assert retry_after(admission, 1) == pytest.approx(10, abs=3)


def test_time_in_which_nothing_waited_says_nothing_of_the_speed(clock):
    admission = Admission(2, 1000)
    tickets = filled(admission, 2)
    drain(admission, clock, 2.0, tickets, 50)
    before = retry_after(admission, 1)
    for ticket in tickets:
        ticket.leave()
    clock[0] += 10_000
    admission.enter(1, 1)
    admission.enter(1, 1)
    assert retry_after(admission, 1) <= before == 2


def test_a_queue_from_which_nothing_has_left_yet_is_expected_to_last_as_long_again(clock):
    admission = Admission(2, 1000)
    admission.enter(2, 2)
    assert retry_after(admission, 1) == 1
    clock[0] += 12.0
    assert retry_after(admission, 1) == 12


def test_what_leaves_at_once_is_no_faster_than_the_time_between(clock):
    """The requests of one step get their first tokens together."""
    admission = Admission(64, 1000)
    tickets = [admission.enter(1, 1) for _ in range(64)]
    for _ in range(30):
        clock[0] += 4.0
        for _ in range(32):
            tickets.pop(0).leave()
        tickets += [admission.enter(1, 1) for _ in range(32)]
    assert retry_after(admission, 32) == pytest.approx(4, abs=1)
    assert retry_after(admission, 64) == pytest.approx(8, abs=1)


def test_retry_after_is_bounded_and_the_message_tells_what_is_expected(clock):
    admission = Admission(4, 1000)
    drain(admission, clock, 100.0, filled(admission, 4), 5)
    error = refusal(admission, 4)
    assert int(error.headers["retry-after"]) == MAX_RETRY_SECONDS
    assert "in about 400 s" in error.message


# -- owners --------------------------------------------------------------------------------------------------


def test_who_fills_the_queue_alone_may_have_all_of_it_and_keeps_nobody_out():
    admission = Admission(1024, 1_000_000)
    for _ in range(8):
        admission.enter(128, 128, "flood")
    refusal(admission, 128, 128, "flood")
    admission.enter(1, 5, "other")
    assert admission.requests == 1025


def test_beyond_the_bound_each_owner_has_its_share_and_no_more():
    admission = Admission(12, 1000)
    admission.enter(12, 1, "a")
    for owner, share in (("b", 6), ("c", 4), ("d", 3)):
        for _ in range(share):
            admission.enter(1, 1, owner)
        error = refusal(admission, 1, 1, owner)
        assert f"its share is {share}" in error.message and "this key's" in error.message
    assert admission.requests == 12 + 6 + 4 + 3


def test_tokens_are_shared_as_requests_are():
    admission = Admission(100, 1000)
    admission.enter(1, 1000, "a")
    admission.enter(1, 400, "b")
    admission.enter(1, 100, "b")
    assert refusal(admission, 1, 1, "b").reason == "queue_tokens"


def test_an_owner_beyond_its_share_still_gets_what_the_whole_queue_has_room_for():
    admission = Admission(10, 1000)
    admission.enter(1, 1, "b")
    for _ in range(9):
        admission.enter(1, 1, "a")
    refusal(admission, 1, 1, "a")


def test_who_has_left_counts_no_more():
    admission = Admission(10, 1000)
    ticket = admission.enter(10, 10, "a")
    other = admission.enter(5, 5, "b")
    refusal(admission, 1, 1, "b")
    ticket.leave()
    admission.enter(1, 1, "b")
    other.leave()
    admission.enter(9, 9, "b")
    assert admission.requests == 10


def test_a_call_larger_than_a_share_is_let_in_where_its_owner_waits_for_nothing_else():
    admission = Admission(10, 100)
    admission.enter(10, 100, "a")
    ticket = admission.enter(128, 5000, "b")
    refusal(admission, 1, 1, "b")
    ticket.leave()
    admission.enter(128, 5000, "b")


def test_an_owners_retry_after_counts_its_turns(clock):
    """Of a queue that empties by one request a second, two owners get one every two seconds each."""
    admission = Admission(20, 1000)
    drain(admission, clock, 1.0, filled(admission, 20), 100)
    for _ in range(10):
        admission.enter(1, 1, "b")
    assert retry_after(admission, 3, 1, "b") == pytest.approx(6, abs=1)


_ticket_steps = st.one_of(
    st.tuples(st.just("enter"), st.integers(1, 5), st.tuples(st.integers(0, 50), st.sampled_from(["", "a", "b"]))),
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
                tickets.append(admission.enter(first, *second))
            except QueueFullError as error:
                assert admission.requests
                assert 1 <= int(error.headers["retry-after"]) <= MAX_RETRY_SECONDS
        elif tickets:
            ticket = tickets[first % len(tickets)]
            getattr(ticket, kind)(*{"correct": (second, 2), "begun": (second,), "leave": ()}[kind])
        assert admission.requests >= 0 and admission.tokens >= 0
    for ticket in tickets:
        ticket.leave()
    assert (admission.requests, admission.tokens) == (0, 0)
    assert not admission._requests._held and not admission._tokens._held
    assert not told or told[-1] == (0, 0)
