"""Drafts by n-grams, against a search through the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.runner.draft_context import DraftContext
from quire.runner.drafts import Computed, Wanted
from quire.speculate import ngram
from quire.speculate.ngram import NgramProposer

NO_CONTEXT = cast(DraftContext, None)


def searched(tokens: Sequence[int], shortest: int, longest: int, count: int) -> list[int]:
    """The definition: the longest suffix, its last occurrence before, and what follows, on and on."""
    tokens = list(tokens)
    for length in range(longest, shortest - 1, -1):
        for end in range(len(tokens) - 1, length - 1, -1):
            if length < len(tokens) and tokens[end - length : end] == tokens[-length:]:
                text = list(tokens)
                for i in range(count):
                    text.append(text[end + i])
                return text[len(tokens) :]
    return []


def started(tokens: Sequence[int], shortest: int = 1, longest: int = 4, output: Sequence[int] = ()) -> NgramProposer:
    proposer = NgramProposer(shortest, longest)
    proposer.start(RequestInfo(7, SamplingParams(), 0, list(tokens), list(output)))
    return proposer


def drafts(proposer: NgramProposer, tokens: Sequence[int], count: int = 5) -> list[int]:
    """What is proposed behind these tokens, all of which are known."""
    (found,) = proposer.propose([Wanted(7, len(tokens), tokens[-1], count)], NO_CONTEXT)
    assert found.parents is None and found.distributions is None
    return found.tokens


def step(start: int, tokens: Sequence[int], next_token: int | None) -> Computed:
    return Computed(7, start, list(tokens), next_token, range(len(tokens)))


# --- what is proposed -------------------------------------------------------------------------------------


def test_what_followed_the_longest_suffix_is_proposed() -> None:
    text = [1, 2, 3, 50, 9, 3, 60, 1, 2, 3]
    assert drafts(started(text), text, 2) == [50, 9]


def test_of_equally_long_occurrences_the_last_counts() -> None:
    text = [1, 2, 30, 1, 2, 40, 1, 2, 50, 1, 2]
    assert drafts(started(text), text, 1) == [50]


def test_a_repetition_goes_on_repeating() -> None:
    assert drafts(started([5, 8, 9, 8, 9]), [5, 8, 9, 8, 9], 5) == [8, 9, 8, 9, 8]
    assert drafts(started([4, 4]), [4, 4], 3) == [4, 4, 4]


def test_suffixes_shorter_than_the_least_are_not_looked_for() -> None:
    text = [1, 2, 3, 9, 2, 3]
    assert drafts(started(text, shortest=2), text, 1) == [9]
    assert drafts(started(text, shortest=3), text, 1) == []


def test_new_tokens_propose_nothing() -> None:
    assert drafts(started([1, 2, 3]), [1, 2, 3]) == []
    assert drafts(started([1]), [1]) == []


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 4), st.integers(0, 4), st.integers(1, 9))
def test_proposals_are_those_of_a_search(tokens: list[int], shortest: int, more: int, count: int) -> None:
    proposer = started(tokens, shortest, shortest + more)
    assert drafts(proposer, tokens, count) == searched(tokens, shortest, shortest + more, count)


@pytest.mark.parametrize("alphabet", [2, 5, 40, 3000])
def test_long_texts_as_well(alphabet: int) -> None:
    draw = random.Random(alphabet)
    text = [draw.randrange(alphabet) for _ in range(4000)]
    for size in (700, 2500, 4000):
        assert drafts(started(text[:size]), text[:size], 8) == searched(text[:size], 1, 4, 8)


def test_equal_hashes_propose_nothing_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """All n-grams with one hash: what is found is compared with the tokens."""
    monkeypatch.setattr(ngram, "_FACTOR", 0)
    draw = random.Random(1)
    text = [draw.randrange(3) for _ in range(80)]
    proposer = started(text[:20], 2, 3)
    proposed = 0
    for size in range(20, 80):
        found = drafts(proposer, text[:size], 1)
        ends = [e for e in range(2, size) if text[e - 2 : e] == text[size - 2 : size]]
        assert not found or found[0] in [text[e] for e in ends]
        proposed += len(found)
        proposer.follow([step(size - 1, text[size - 1 : size], text[size])], None, NO_CONTEXT)
    assert proposed > 0


# --- as tokens come ---------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_an_index_that_grew_proposes_what_a_new_one_does(data: st.DataObject) -> None:
    alphabet = data.draw(st.sampled_from([2, 3, 20]))
    ids = st.integers(0, alphabet)
    tokens = data.draw(st.lists(ids, min_size=1, max_size=200))
    proposer = started(tokens)
    for _ in range(data.draw(st.integers(1, 12))):
        new = data.draw(st.lists(ids, min_size=1, max_size=9))
        proposer.follow([step(len(tokens) - 1, [tokens[-1], *new[:-1]], new[-1])], None, NO_CONTEXT)
        tokens = tokens + new
        if data.draw(st.booleans()):  # not each step drafts
            assert drafts(proposer, tokens) == drafts(started(tokens), tokens) == searched(tokens, 1, 4, 5)


def test_tables_grow_with_the_text() -> None:
    draw = random.Random(2)
    tokens = [draw.randrange(50) for _ in range(30)]
    proposer = started(tokens)
    for i in range(1500):
        new = draw.randrange(50)
        proposer.follow([step(len(tokens) - 1, tokens[-1:], new)], None, NO_CONTEXT)
        tokens.append(new)
        found = drafts(proposer, tokens)
        if i % 50 == 0:
            assert found == searched(tokens, 1, 4, 5)


def test_a_request_that_begins_again_repeats_what_is_known() -> None:
    prompt = [1, 2, 3, 4, 1, 2]
    proposer = started(prompt)
    proposer.follow([step(0, prompt, 3), step(6, [3], 9)], None, NO_CONTEXT)
    tokens = [*prompt, 3, 9]
    assert drafts(proposer, tokens) == searched(tokens, 1, 4, 5)
    proposer.follow([step(0, tokens[:4], None), step(4, tokens[4:], 1)], None, NO_CONTEXT)  # preempted, from the start
    tokens.append(1)
    assert drafts(proposer, tokens) == searched(tokens, 1, 4, 5)


def test_a_request_that_is_resumed_brings_its_output() -> None:
    proposer = started([1, 2, 3], output=[8, 1, 2])
    assert drafts(proposer, [1, 2, 3, 8, 1, 2], 3) == [3, 8, 1]
    proposer.follow([step(4, [1, 2], 3)], None, NO_CONTEXT)  # what is before position 4 lay in the cache
    assert drafts(proposer, [1, 2, 3, 8, 1, 2, 3], 1) == [8]


def test_nothing_is_proposed_where_tokens_are_missing() -> None:
    proposer = started([1, 1, 1])
    assert proposer.propose([Wanted(7, 9, 1, 4), Wanted(8, 3, 1, 4)], NO_CONTEXT)[0].tokens == []
    proposer.follow([step(5, [1], 1)], None, NO_CONTEXT)  # positions 3 and 4 were never told
    assert drafts(proposer, [1, 1, 1], 2) == [1, 1]
    proposer.end(7)
    assert drafts(proposer, [1, 1, 1]) == []
    proposer.follow([step(3, [1], 1)], None, NO_CONTEXT)
    proposer.end(7)


# --- time, room and settings ------------------------------------------------------------------------------


class Counted:
    """A table that counts how often it is looked at."""

    def __init__(self, table: Any) -> None:
        self.table, self.reads = table, 0

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, slot: int) -> int:
        self.reads += 1
        return int(self.table[slot])

    def __setitem__(self, slot: int, end: int) -> None:
        self.table[slot] = end


def reads_per_token(size: int) -> float:
    draw = random.Random(size)
    tokens = [draw.randrange(1000) for _ in range(size)]
    proposer = started(tokens)
    drafts(proposer, tokens)
    text = proposer._texts[7]
    counted = [Counted(table) for table in text._tables]
    text._tables = cast(Any, counted)
    for _ in range(100):
        new = draw.randrange(1000)
        proposer.follow([step(len(tokens) - 1, tokens[-1:], new)], None, NO_CONTEXT)
        tokens.append(new)
        drafts(proposer, tokens)
    assert text._tables is cast(Any, counted)
    return sum(table.reads for table in counted) / 100


def test_a_proposal_costs_the_same_in_a_long_text() -> None:
    short, long = reads_per_token(1000), reads_per_token(64_000)
    assert short < 20 and long < 20  # eight at least: four n-grams are entered, and four looked up


@pytest.mark.parametrize(("shortest", "longest", "message"), [(0, 3, "min_length is 0"), (4, 3, "max_length is 3")])
def test_lengths_that_make_no_sense_are_refused(shortest: int, longest: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramProposer(shortest, longest)
