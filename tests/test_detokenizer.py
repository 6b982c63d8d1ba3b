"""Text step by step: equal to the text at once, never half a character, cut at stop strings."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import SamplingParams
from quire.text.detokenizer import LONGEST_WINDOW, MAX_BYTE_RUN, MAX_WINDOW, Detokenizer, TextStream
from quire.text.tokenizer import Tokenizer
from tests.tokenizer_builders import CHATML_CONFIG, LLAMA_CONFIG, byte_level_json, metaspace_json

BYTE_LEVEL = Tokenizer(byte_level_json(), CHATML_CONFIG)
METASPACE = Tokenizer(metaspace_json(), LLAMA_CONFIG)
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, METASPACE], ids=["byte-level", "metaspace"])


def stream_all(tokenizer: Tokenizer, ids: list[int], skip: bool = True) -> list[str]:
    stream = TextStream(tokenizer, skip)
    return [*(stream.push(token) for token in ids), stream.settle()]


@BOTH
@settings(max_examples=150, deadline=None)
@given(parts=st.lists(st.sampled_from([*"ab  \n.é世🙂\u200d\ufffd", "hello ", "</s>", "<|im_end|>"]), max_size=60))
def test_deltas_add_up_to_the_text(tokenizer: Tokenizer, parts: list[str]) -> None:
    ids = tokenizer.encode("".join(parts))
    assert "".join(stream_all(tokenizer, ids)) == tokenizer.decode(ids)


@BOTH
@pytest.mark.parametrize("skip", [True, False])
def test_deltas_of_any_tokens_add_up_to_their_text(tokenizer: Tokenizer, skip: bool) -> None:
    """Random ids: bytes that are no character, special tokens, ids beyond the vocabulary."""
    draw = random.Random(1)
    for _ in range(300):
        few = [draw.randrange(tokenizer.vocab_size + 3) for _ in range(draw.choice([3, 10, 500]))]
        ids = [draw.choice(few) for _ in range(draw.randrange(120))]
        assert "".join(stream_all(tokenizer, ids, skip)) == tokenizer.decode(ids, skip)


@BOTH
def test_no_delta_holds_half_a_character(tokenizer: Tokenizer) -> None:
    for delta in stream_all(tokenizer, tokenizer.encode("a🙂世界é👨‍👩‍👧z")):
        assert "\ufffd" not in delta


def test_a_character_comes_with_its_last_byte() -> None:
    ids = BYTE_LEVEL.encode("🙂")
    assert len(ids) > 1
    assert stream_all(BYTE_LEVEL, ids) == [""] * (len(ids) - 1) + ["🙂", ""]


def test_bad_bytes_do_not_hold_the_text_back_for_long() -> None:
    bad = next(token for token in range(3, 300) if BYTE_LEVEL.decode([token]) == "\ufffd")
    stream = TextStream(BYTE_LEVEL)
    given_out = "".join(stream.push(bad) for _ in range(200))
    assert len(given_out) >= 199


def test_a_long_run_of_byte_tokens_comes_before_it_ends() -> None:
    text = "🙂" * 100
    ids = METASPACE.encode(text, add_special_tokens=False)
    deltas = stream_all(METASPACE, ids)
    assert "".join(deltas) == text
    assert any(deltas[: MAX_BYTE_RUN + 5])


@BOTH
def test_the_first_space_is_treated_as_in_the_whole_text_and_later_ones_are_kept(tokenizer: Tokenizer) -> None:
    text = " hello world " * 40
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert len(ids) > 2 * MAX_WINDOW
    assert "".join(stream_all(tokenizer, ids)) == tokenizer.decode(ids)


@BOTH
def test_the_window_stays_short(tokenizer: Tokenizer) -> None:
    draw = random.Random(2)
    stream = TextStream(tokenizer)
    for _ in range(3000):
        stream.push(draw.randrange(tokenizer.vocab_size))
        assert len(stream._window) <= MAX_WINDOW + MAX_BYTE_RUN + 4


def test_the_window_stays_short_even_where_the_text_of_its_end_tells_nothing() -> None:
    """CTC joins repeated tokens, so a window of one token's repeats has the same text at every length."""
    content = json.loads(byte_level_json()) | {
        "decoder": {"type": "CTC", "pad_token": "", "word_delimiter_token": "|", "cleanup": False}
    }
    tokenizer = Tokenizer(json.dumps(content))
    stream = TextStream(tokenizer)
    [a], [b] = tokenizer.encode("a"), tokenizer.encode("b")
    text = ""
    for token in [a] * 1000 + [b] * 1000:
        text += stream.push(token)
        assert len(stream._window) <= LONGEST_WINDOW
    assert text + stream.settle() == "ab"


# --- stop strings -----------------------------------------------------------------------------------------


def run(text: str, tokenizer: Tokenizer = BYTE_LEVEL, **fields: Any) -> tuple[str, Detokenizer, list[int]]:
    ids = tokenizer.encode(text, add_special_tokens=False)
    detokenizer = Detokenizer(tokenizer, SamplingParams(**fields))
    shown = "".join(detokenizer.push([token]) for token in ids)
    return shown + detokenizer.finish(), detokenizer, ids


@BOTH
@settings(max_examples=150, deadline=None)
@given(
    text=st.text(st.sampled_from("abc 世🙂"), max_size=30),
    stops=st.lists(st.text(st.sampled_from("abc 世🙂"), min_size=1, max_size=4), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_text_is_cut_at_the_stop_string_that_is_completed_first(
    tokenizer: Tokenizer, text: str, stops: list[str], include: bool
) -> None:
    shown, detokenizer, ids = run(text, tokenizer, stop=stops, include_stop_str_in_output=include)
    whole = tokenizer.decode(ids)
    ends = [(whole.find(stop) + len(stop), whole.find(stop), stop) for stop in stops if stop in whole]
    if not ends:
        assert (shown, detokenizer.stopped, detokenizer.num_tokens) == (whole, None, len(ids))
        return
    end, start, stop = min(ends)
    assert (shown, detokenizer.stopped) == (whole[: end if include else start], stop)
    kept = tokenizer.decode(ids[: detokenizer.num_tokens])
    assert stop in kept


@BOTH
def test_chunks_of_any_size_give_the_same_text_and_stop(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("The quick brown fox stops here, and does not stop there", add_special_tokens=False)
    results = set()
    for size in (1, 2, 5, 100):
        detokenizer = Detokenizer(tokenizer, SamplingParams(stop=["here, and", "there"]))
        shown = "".join(detokenizer.push(ids[i : i + size]) for i in range(0, len(ids), size))
        results.add((shown + detokenizer.finish(), detokenizer.stopped, detokenizer.num_tokens))
    assert len(results) == 1
    text, stopped, count = results.pop()
    assert (text, stopped) == ("The quick brown fox stops ", "here, and")
    assert tokenizer.decode(ids[:count]).endswith("and")
    assert not tokenizer.decode(ids[: count - 1]).endswith("and")


def test_what_could_begin_a_stop_string_is_held_back_and_released() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop="xyz!"))
    shown = [detokenizer.push(BYTE_LEVEL.encode(part)) for part in ("ab", "x", "y", "q", "xy")]
    assert shown == ["ab", "", "", "xyq", ""]
    assert detokenizer.finish() == "xy"


def test_tokens_behind_a_stop_string_are_ignored() -> None:
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop="b"))
    assert detokenizer.push(BYTE_LEVEL.encode("abzzz")) == "a"
    assert detokenizer.push(BYTE_LEVEL.encode("more")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.stopped == "b"


@pytest.mark.parametrize(
    ("min_tokens", "shown", "count"), [(0, "a", 2), (2, "a", 2), (3, "abzza", 6), (7, "abzzabz", 7)]
)
def test_a_stop_string_counts_from_min_tokens_on(min_tokens: int, shown: str, count: int) -> None:
    ids = [token for letter in "abzzabz" for token in BYTE_LEVEL.encode(letter)]
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop="b", min_tokens=min_tokens))
    assert detokenizer.push(ids) + detokenizer.finish() == shown
    assert detokenizer.num_tokens == count


def test_a_stop_string_that_min_tokens_let_pass_does_not_count_later() -> None:
    ids = [token for letter in "abq" for token in BYTE_LEVEL.encode(letter)]
    detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(stop=["ab", "abc"], min_tokens=3))
    assert detokenizer.push(ids) + detokenizer.finish() == "abq"
    assert detokenizer.stopped is None


def test_a_stop_string_in_the_held_back_end_is_found() -> None:
    shown, detokenizer, _ = run("a🙂", METASPACE, stop="🙂")
    assert (shown, detokenizer.stopped) == ("a", "🙂")


def test_special_tokens_are_shown_when_asked() -> None:
    ids = [*BYTE_LEVEL.encode("hi"), 2]
    for skip, expected in ((True, "hi"), (False, "hi<|im_end|>")):
        detokenizer = Detokenizer(BYTE_LEVEL, SamplingParams(skip_special_tokens=skip))
        assert detokenizer.push(ids) + detokenizer.finish() == expected


# -- behind a prompt -----------------------------------------------------------------------------------------


@BOTH
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_a_continuation_is_what_the_whole_text_has_behind_its_prompt(tokenizer: Tokenizer, data: Any) -> None:
    part = st.lists(st.sampled_from([*"ab  \n.é世", "hello ", "    return"]), min_size=1, max_size=12)
    prompt = tokenizer.encode("".join(data.draw(part)))
    output = tokenizer.encode("".join(data.draw(part)), add_special_tokens=False)
    stream = TextStream(tokenizer, prompt=prompt)
    text = "".join(map(stream.push, output)) + stream.settle()
    assert text == tokenizer.decode(prompt + output)[len(tokenizer.decode(prompt)) :]


def test_the_space_of_the_first_token_is_kept_behind_a_prompt_and_a_cut_character_completed() -> None:
    hello, world = (METASPACE.encode(text, add_special_tokens=False) for text in ("hello", "world"))
    stream = TextStream(METASPACE, prompt=hello)
    assert "".join(map(stream.push, world)) + stream.settle() == " world"
    face = METASPACE.encode("a🙂", add_special_tokens=False)
    stream = TextStream(METASPACE, prompt=face[:-2])
    assert "".join(map(stream.push, face[-2:])) + stream.settle() == "🙂"
