"""`quire bench serve`: what its workloads hold, and when open loops send them."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.bench.serve.config import LoadConfig
from quire.bench.serve.driver import Transcript, arrivals
from quire.bench.serve.openai_client import EventStream
from quire.bench.serve.plot import cdf, ticks
from quire.bench.serve.workloads import (
    FIRST_ID,
    Job,
    Piece,
    TraceLine,
    make_jobs,
    make_warmup,
    read_trace,
    token_ids,
    trace_jobs,
    words,
)
from quire.errors import ConfigError


def config(**options: Any) -> LoadConfig:
    return LoadConfig(url="http://127.0.0.1:1", **options)


def prompts(settings: LoadConfig) -> list[Any]:
    """Each job's first prompt."""
    return [Transcript(settings).ask(job.turns[0])["prompt"] for job in make_jobs(settings)]


def shared(first: list[int], second: list[int]) -> int:
    """How many leading tokens are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(first), len(second)))


@pytest.mark.parametrize("workload", ["random", "shared-prefix", "multi-turn"])
def test_the_same_seed_makes_the_same_jobs_and_another_one_others(workload: str) -> None:
    limit = {"conversations": 6} if workload == "multi-turn" else {"num_requests": 6}
    options: dict[str, Any] = {
        "workload": workload,
        "input_len": "5-50",
        "output_len": "1-9",
        "prompt_type": "ids",
    } | limit
    first, again, other = (config(seed=seed, **options) for seed in (3, 3, 4))
    assert list(make_jobs(first)) == list(make_jobs(again))
    assert prompts(first) == prompts(again)
    assert prompts(first) != prompts(other)
    assert list(make_jobs(first)) != list(make_jobs(other))


def test_a_prompt_never_changes_from_version_to_version() -> None:
    """SHAKE-128 of "0:own-0" as 32-bit numbers, little end first, modulo what there is to choose from."""
    assert token_ids(0, Piece("own-0", 4), 1000) == [376, 493, 952, 389]
    assert words(0, Piece("own-0", 3)) == "put tree back"


def test_lengths_fill_the_range_that_was_asked_for() -> None:
    jobs = list(make_jobs(config(input_len="3-6", output_len="2-4", num_requests=200)))
    assert {job.turns[0].length for job in jobs} == {3, 4, 5, 6}
    assert {job.turns[0].output for job in jobs} == {2, 3, 4}
    assert {len(prompt) for prompt in prompts(config(input_len="3-6", num_requests=200))} == {3, 4, 5, 6}


def test_random_prompts_share_no_prefix() -> None:
    found = prompts(config(input_len="20", num_requests=30))
    assert max(shared(a, b) for a, b in itertools.combinations(found, 2)) <= 3
    assert all(FIRST_ID <= token < 1000 for prompt in found for token in prompt)


def test_prompts_of_a_group_share_its_prefix_and_no_more() -> None:
    settings = config(workload="shared-prefix", groups=3, prefix_len="16-32", input_len="8", num_requests=60)
    jobs = list(make_jobs(settings))
    names = {job.turns[0].pieces[0] for job in jobs}
    assert len(names) == 3
    for (a, first), (b, second) in itertools.combinations(zip(jobs, prompts(settings), strict=True), 2):
        prefix = a.turns[0].pieces[0]
        same_group = prefix == b.turns[0].pieces[0]
        least, most = (prefix.length, prefix.length + 3) if same_group else (0, 3)
        assert least <= shared(first, second) <= most


def test_conversations_have_turns_and_think_times_of_the_ranges() -> None:
    settings = config(workload="multi-turn", turns="2-4", think_time="0.5-2", conversations=60)
    jobs = list(make_jobs(settings))
    assert {len(job.turns) for job in jobs} == {2, 3, 4}
    assert all(job.turns[0].think == 0 for job in jobs)
    later = [turn.think for job in jobs for turn in job.turns[1:]]
    assert all(0.5 <= think <= 2 for think in later)
    assert max(later) - min(later) > 1


def test_jobs_are_made_as_they_are_needed() -> None:
    endless = make_jobs(config(duration=1.0))
    assert len(list(itertools.islice(endless, 1000))) == 1000


@settings(deadline=None)
@given(st.integers(0, 50), st.integers(0, 50), st.text(max_size=5))
def test_a_longer_piece_begins_with_the_shorter_one_of_its_name(a: int, b: int, name: str) -> None:
    short, long = sorted((a, b))
    assert token_ids(1, Piece(name, long), 500)[:short] == token_ids(1, Piece(name, short), 500)


def test_warm_up_requests_have_the_workloads_lengths_but_contents_of_their_own() -> None:
    settings = config(input_len="7", output_len="100", num_requests=2, warmup=3)
    warm = list(make_warmup(settings))
    assert [(job.turns[0].length, job.turns[0].output) for job in warm] == [(7, 16)] * 3
    names = {piece.name for jobs in (warm, make_jobs(settings)) for job in jobs for piece in job.turns[0].pieces}
    assert len(names) == 5


# Traces.


def line(**changes: Any) -> dict[str, Any]:
    return {"timestamp": 27, "input_length": 1100, "output_length": 52, "hash_ids": [0, 1, 9]} | changes


def trace(folder: Path, *lines: Any) -> str:
    path = folder / "trace.jsonl"
    path.write_text("\n".join(text if isinstance(text, str) else json.dumps(text) for text in lines) + "\n")
    return str(path)


def test_equal_leading_hash_ids_are_an_equal_prefix(tmp_path: Path) -> None:
    path = trace(tmp_path, line(), line(hash_ids=[0, 1, 4]), line(hash_ids=[0, 7, 9]), line(hash_ids=[3, 1, 9]))
    first, *others = prompts(config(trace=path))
    assert len(first) == 1100
    assert [shared(first, other) // 512 for other in others] == [2, 1, 0]


def test_scaling_divides_lengths_and_blocks_and_keeps_what_is_shared(tmp_path: Path) -> None:
    path = trace(tmp_path, line(), line(hash_ids=[0, 1, 4]), line(hash_ids=[0, 7, 9]))
    settings = config(trace=path, scale=10.0)
    jobs = list(make_jobs(settings))
    assert [(job.turns[0].length, job.turns[0].output) for job in jobs] == [(110, 5)] * 3
    first, second, third = prompts(settings)
    assert 102 <= shared(first, second) <= 104
    assert 51 <= shared(first, third) <= 53


def test_lengths_stay_at_least_one(tmp_path: Path) -> None:
    path = trace(tmp_path, line(input_length=3, output_length=0, hash_ids=[5]))
    [job] = make_jobs(config(trace=path, scale=512.0))
    assert (job.turns[0].length, job.turns[0].output) == (1, 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.floats(1, 512))
def test_a_scaled_prompt_has_its_length(lengths: list[int], scale: float) -> None:
    lines = [TraceLine(0.0, length, 1, tuple(range(-(-length // 512)))) for length in lengths]
    found = [job.turns[0].length for job in trace_jobs(lines, scale, 1.0)]
    assert found == [max(1, round(length / scale)) for length in lengths]


def test_requests_of_a_trace_come_in_order_of_time_divided_by_the_speedup(tmp_path: Path) -> None:
    path = trace(tmp_path, line(timestamp=3000), "", line(timestamp=1000), line(timestamp=1500.5))
    jobs: list[Job] = list(make_jobs(config(trace=path, speedup=2.0)))
    assert [job.at for job in jobs] == [0.5, 0.75025, 1.5]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("{", "line 2: "),
        ("[1]", "line 2: it is not a JSON object"),
        ({"timestamp": 1}, "line 2: it has no 'hash_ids'"),
        (line(timestamp=-1), "line 2: timestamp is -1"),
        (line(timestamp="now"), "line 2: timestamp is 'now'"),
        (line(input_length=0), "line 2: input_length is 0"),
        (line(input_length=1.5), "line 2: input_length is 1.5"),
        (line(output_length=True), "line 2: output_length is True"),
        (line(hash_ids=[0, 1]), "line 2: 2 hash_ids for 1100 tokens; there must be 3"),
        (line(hash_ids=["a", 1, 2]), "line 2: hash_ids must be"),
        (line(hash_ids=None), "line 2: hash_ids must be"),
    ],
)
def test_a_bad_line_of_a_trace_is_named_by_its_number(tmp_path: Path, bad: Any, message: str) -> None:
    with pytest.raises(ConfigError) as found:
        read_trace(trace(tmp_path, line(), bad, line()))
    assert message in str(found.value)


def test_a_trace_that_cannot_be_read_or_is_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_trace(str(tmp_path / "none"))
    with pytest.raises(ConfigError, match="has no requests"):
        read_trace(trace(tmp_path, ""))


# Arrivals.


def gaps(count: int, **options: Any) -> list[float]:
    times = [0.0, *itertools.islice(arrivals(config(**options)), count)]
    return [after - before for before, after in itertools.pairwise(times)]


@pytest.mark.parametrize(("burstiness", "variation"), [(None, 1.0), (4.0, 0.5), (0.25, 2.0)])
def test_gaps_between_arrivals_have_the_mean_and_spread_of_a_gamma_distribution(
    burstiness: float | None, variation: float
) -> None:
    """Mean 1 / rate; standard deviation over mean is 1 / sqrt(burstiness), 1 for a Poisson process."""
    found = gaps(40_000, rate="8", burstiness=burstiness)
    mean = sum(found) / len(found)
    deviation = math.sqrt(sum((gap - mean) ** 2 for gap in found) / len(found))
    assert mean == pytest.approx(1 / 8, rel=0.05)
    assert deviation / mean == pytest.approx(variation, rel=0.05)


def test_poisson_arrivals_fall_into_a_second_as_a_poisson_distribution_says() -> None:
    times = itertools.takewhile(lambda at: at < 10_000, arrivals(config(rate="2")))
    seconds = [0] * 10_000
    for at in times:
        seconds[int(at)] += 1
    for count in range(6):
        expected = math.exp(-2) * 2**count / math.factorial(count)
        assert seconds.count(count) / 10_000 == pytest.approx(expected, abs=0.02)


def test_an_infinite_rate_sends_everything_at_once() -> None:
    assert gaps(5, rate="inf") == [0.0] * 5


def test_arrivals_are_the_same_for_the_same_seed() -> None:
    assert gaps(9, rate="3", seed=1) == gaps(9, rate="3", seed=1) != gaps(9, rate="3", seed=2)


# Streams and pictures.


@settings(deadline=None)
@given(
    st.lists(st.text(alphabet=st.characters(blacklist_characters="\n\r", blacklist_categories=["Cs"]), max_size=20)),
    st.lists(st.integers(0, 400)),
    st.sampled_from(["\n", "\r\n"]),
)
def test_events_are_the_same_wherever_the_bytes_are_split(texts: list[str], cuts: list[int], end: str) -> None:
    wire = "".join(f": hello{end}data: {text}{end}{end}" for text in texts).encode()
    places = sorted({0, len(wire), *(cut for cut in cuts if cut < len(wire))})
    stream = EventStream()
    found = [event for a, b in itertools.pairwise(places) for event in stream.feed(wire[a:b])]
    assert found == [text.encode() for text in texts]


def test_an_event_of_several_data_lines_is_joined() -> None:
    assert list(EventStream().feed(b"data: a\ndata:b\nid: 7\n\ndata: c\n\n")) == [b"a\nb", b"c"]


def test_a_cumulative_curve_reaches_each_value_at_its_share() -> None:
    assert cdf([0.003, 0.001, 0.002, 0.004]) == [(1.0, 0.25), (2.0, 0.5), (3.0, 0.75), (4.0, 1.0)]
    many = cdf(value / 1000 for value in range(1, 10_001))
    assert len(many) <= 400
    assert (many[0], many[-1]) == ((1.0, 0.0001), (10_000.0, 1.0))


@settings(deadline=None)
@given(st.floats(1e-6, 1e12))
def test_axes_end_at_a_round_number_that_holds_the_highest_value(high: float) -> None:
    found = ticks(high)
    assert found[0] == 0
    assert high <= found[-1] * (1 + 1e-6) <= high * 2.6
    assert 3 <= len(found) <= 7
