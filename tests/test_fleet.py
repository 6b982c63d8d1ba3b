"""Where requests go: costs, policies, what is known of caches and of loads."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from dataclasses import replace
from hashlib import blake2b

import pytest
from benchmarks import fleet_simulated as simulated
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.fleet.cache_events import KEPT_EVENTS, CacheEvent, CacheEvents
from quire.fleet.cached_prompts import CachedPrompts, read_told
from quire.fleet.choice import NEAR, POLICIES, RUNNING_TOKENS, Candidate, Chooser, cost_of
from quire.fleet.knowledge import Knowledge
from quire.fleet.load import FIRST_RATE, Load, common_rate

candidates = st.lists(
    st.builds(
        Candidate,
        name=st.uuids().map(str),
        is_up=st.booleans(),
        rate=st.floats(1.0, 1e6),
        held=st.integers(0, 10_000),
        queued=st.integers(0, 100_000),
        running=st.integers(0, 500),
        recent=st.floats(0, 100),
        fetchable=st.integers(0, 10_000),
        fetch_seconds=st.floats(0, 10),
    ),
    min_size=1,
    max_size=8,
)


def chain(*words: object) -> list[bytes]:
    return [f"{words[: index + 1]}".encode() for index in range(len(words))]


# -- choosing --------------------------------------------------------------------------------------------------


@given(candidates, st.integers(1, 10_000), st.binary(max_size=64), st.sampled_from(POLICIES))
def test_a_server_that_is_down_is_never_chosen_while_another_is_up(servers, tokens, prefix, policy):
    decision = Chooser(policy).choose(tokens, prefix, servers)
    chosen = next(one for one in servers if one.name == decision.server)
    assert chosen.is_up or not any(one.is_up for one in servers)


@given(candidates, st.integers(1, 10_000))
def test_the_choice_costs_nearly_the_least_and_every_cost_is_told(servers, tokens):
    decision = Chooser().choose(tokens, b"", servers)
    able = [one for one in servers if one.is_up] or servers
    assert [cost.server for cost in decision.costs] == [one.name for one in able]
    least = min(cost.total for cost in decision.costs)
    assert decision.chosen.total <= NEAR * least
    assert all(cost_of(tokens, one).total > 0 for one in servers)


def shares(count: int, use: float, seed: int, routers: int, rate: float) -> list[int]:
    """How many of 200 requests a server each one gets. Requests are as much work each, come at random times, and go to
    a random one of the routers, to servers that have little to do, or too much. A router knows what it has sent itself,
    and what servers told it a second ago of all that they have."""
    chance, now, told_at = random.Random(seed), 0.0, 0.0
    names = [f"s{index}" for index in range(count)]
    loads = [{name: Load() for name in names} for _ in range(routers)]
    others = [dict.fromkeys(names, 0) for _ in range(routers)]
    free_at = dict.fromkeys(names, 0.0)  # when a server has computed what it was given
    events: list[tuple[float, int, str, float, int, bool]] = []
    choosers, given_to = [Chooser() for _ in range(routers)], dict.fromkeys(names, 0)
    for _ in range(200 * count):
        now += chance.expovariate(use * count * rate / 200)
        for at, router, name, sent, tokens, is_end in sorted(event for event in events if event[0] <= now):
            load = loads[router][name]
            load.ended(tokens, has_begun=True) if is_end else load.begun(sent, at, tokens)
        events = [event for event in events if event[0] > now]
        if now - told_at >= 1.0:
            told_at, have = now, [{name: load.waiting + load.running for name, load in own.items()} for own in loads]
            others = [{name: sum(one[name] for one in have) - own[name] for name in names} for own in have]
        router = chance.randrange(routers) if routers > 1 else 0
        common = common_rate(loads[router].values())
        servers = [
            Candidate(
                name=name,
                rate=load.rate(common),
                queued=load.queued,
                running=load.waiting + load.running + others[router][name],
                recent=load.recent(now),
            )
            for name, load in loads[router].items()
        ]
        tokens = 200
        name = choosers[router].choose(tokens, b"", servers).server
        given_to[name] += 1
        loads[router][name].sent(now, tokens)
        free_at[name] = max(now, free_at[name]) + tokens / rate
        events += [
            (free_at[name], router, name, now, tokens, False),
            (free_at[name] + chance.random(), router, name, now, tokens, True),
        ]
    return list(given_to.values())


rates = st.sampled_from([100.0, 1000.0, 50_000.0])
"""Of servers: far from what is believed of one that has computed nothing yet, or not."""

FEW = 30
"""Examples, each of up to 1,600 requests."""


@settings(max_examples=FEW)
@given(st.integers(2, 8), st.floats(0.1, 1.2), st.integers(0, 2**32), rates)
def test_equal_servers_share_evenly(count, use, seed, rate):
    given = shares(count, use, seed, 1, rate)
    assert min(given) >= 0.9 * 200 and max(given) <= 1.1 * 200


@settings(max_examples=FEW)
@given(st.integers(2, 8), st.floats(0.1, 1.2), st.integers(0, 2**32), rates)
def test_routers_that_do_not_talk_share_servers_nearly_as_evenly(count, use, seed, rate):
    given = shares(count, use, seed, 2, rate)
    assert min(given) >= 0.8 * 200 and max(given) <= 1.2 * 200


@given(
    tokens=st.integers(64, 8192),
    share=st.floats(0.1, 1.0),
    rate=st.floats(10, 1e5),
    queued=st.integers(0, 10_000),
    running=st.integers(0, 64),
)
def test_a_conversation_stays_where_its_cache_is_unless_that_costs_more_than_it_saves(
    tokens, share, rate, queued, running
):
    held = int(tokens * share)
    home = Candidate(name="home", rate=rate, held=held, queued=queued, running=running, recent=50)
    away = Candidate(name="away", rate=rate)
    saved = (min(held, tokens - 1)) / rate
    waits = (queued + RUNNING_TOKENS * running) / rate
    decision = Chooser().choose(tokens, b"", [home, away])
    if saved > waits:
        assert decision.server == "home"
    elif waits > saved * NEAR + (NEAR - 1) * tokens / rate:
        assert decision.server == "away"


def test_blocks_are_fetched_where_that_is_cheaper_than_computing_them():
    server = Candidate(name="d", rate=1000.0, held=100, fetchable=1000, fetch_seconds=0.1)
    cost = cost_of(1010, server)
    assert (cost.compute, cost.fetch) == (pytest.approx(0.01), 0.1)
    slow = cost_of(1010, replace(server, fetch_seconds=0.8))
    assert (slow.compute, slow.fetch) == (pytest.approx(0.91), 0.0)
    pressed = cost_of(1010, server, waiting=4)
    assert (pressed.seconds, pressed.others) == (pytest.approx(0.11), pytest.approx(0.04))
    assert cost_of(1010, replace(server, fetch_seconds=3.0), waiting=4).fetch == 3.0  # all others wait less for it
    assert str(cost) == "d 110.0 ms (compute 10.0 ms + fetch 100.0 ms + queue 0.0 ms, 100 held)"


def test_the_policies_to_compare_with_do_what_they_are_called():
    servers = [Candidate(name=f"s{index}", rate=1.0, running=3 - index) for index in range(4)]
    robin = Chooser("round-robin")
    assert len({robin.choose(9, b"", servers).server for _ in servers}) == 4
    assert Chooser("least-loaded").choose(9, b"", servers).server == "s3"
    hashed = {
        bytes([prompt]): Chooser("prefix-hash").choose(9, bytes([prompt]), servers).server for prompt in range(99)
    }
    assert set(hashed.values()) == {"s0", "s1", "s2", "s3"}
    for prompt, before in hashed.items():  # when a server goes, only its prompts move
        after = Chooser("prefix-hash").choose(9, prompt, servers[1:]).server
        assert after == before or before == "s0"


def test_without_servers_there_is_no_choice():
    assert Chooser().choose(1, b"", []) is None


def conversations(seed: int, seconds_between: float, count: int = 1500) -> list[simulated.Request]:
    """Sixty at a time, whose prompts are all that was said so far."""
    rnd, requests = random.Random(seed), []
    talks = [[] for _ in range(60)]
    for number in range(count):
        talk = rnd.choice(talks)
        talk += [rnd.randbytes(8) for _ in range(rnd.randrange(4, 24))]
        if len(talk) > 120:
            del talk[:]
            talk.append(rnd.randbytes(8))
        names = [blake2b(b"".join(talk[: end + 1])).digest() for end in range(len(talk))]
        requests.append(simulated.Request(number * seconds_between, simulated.BLOCK * len(talk), 200, names))
    return requests


@pytest.mark.quick("4")
@pytest.mark.parametrize("cores", [simulated.SERVERS, simulated.SERVERS / 2])
def test_in_simulated_time_the_cost_beats_the_other_choices_and_a_pool_beats_none(cores: float) -> None:
    requests = conversations(3, 1.6 / cores)
    within = {policy: simulated.simulate(requests, policy, False, cores)["within_goal"] for policy in POLICIES}
    assert within["cost"] == max(within.values())
    assert within["cost"] > within["round-robin"] + 0.05
    pooled = simulated.simulate(requests, "round-robin", True, cores)
    assert pooled["within_goal"] > within["round-robin"] and pooled["fetched"] > 0.1


@pytest.mark.quick("0.15")
@pytest.mark.parametrize("seconds_between", [0.15, 0.12, 0.08])
def test_conversations_keep_their_caches_however_much_comes(seconds_between: float) -> None:
    """With the caches the first load can just be borne, and the others cannot: without, all of them are far too much.
    The hash of the prefix keeps caches whatever waits where, so it is what to compare with; the cost also keeps queues
    even.
    """
    requests = conversations(int(100 * seconds_between), seconds_between)
    cost, hashed = (simulated.simulate(requests, policy, False) for policy in ("cost", "prefix-hash"))
    assert cost["cached"] > hashed["cached"] - 0.02
    assert cost["p99_s"] < hashed["p99_s"]


@given(st.data(), st.integers(1, 10_000), st.integers(0, 50), st.integers(1, 200))
def test_the_more_requests_wait_everywhere_the_more_a_cache_counts(data, tokens, before, more):
    draw = st.builds(
        Candidate,
        name=st.uuids().map(str),
        rate=st.just(1000.0),
        held=st.integers(0, 10_000),
        queued=st.integers(0, 9999),
    )
    servers = data.draw(st.lists(draw, min_size=1, max_size=6))
    held = [
        Chooser().choose(tokens, b"", [replace(one, waiting=waiting) for one in servers]).chosen.held
        for waiting in (before, before + more)
    ]
    assert held[0] <= held[1]


# -- knowledge -------------------------------------------------------------------------------------------------


def test_what_was_sent_is_held_up_to_where_prompts_part():
    known = Knowledge()
    known.sent("a", chain(1, 2, 3, 4))
    assert known.held("a", chain(1, 2, 3, 4)) == 4
    assert known.held("a", chain(1, 2, 9, 4)) == 2
    assert known.held("a", chain(9, 2)) == known.held("b", chain(1)) == 0
    known.forget("a")
    assert known.held("a", chain(1, 2)) == 0


def test_what_is_known_of_all_servers_is_bounded_and_those_with_most_give_up_what_was_used_long_ago():
    known = Knowledge(max_blocks_of_all=6400)
    few = chain(*range(50))
    known.sent("few", few)
    for server in range(20):
        for prompt in range(40):  # in all 20 * 1,600 blocks
            known.sent(
                f"many-{server}", chain(*range(10_000 * server + 100 * prompt, 10_000 * server + 100 * prompt + 40))
            )
            assert known.total <= 6400 + 6400 // 64 + 40
    names = [[f"e{server}-{index}".encode() for index in range(1000)] for server in range(2)]
    known.snapshot("told", "boot", 0, names[0])
    assert not known.hear("heard", "boot", []) or known.total <= 6540
    known.hear("heard", "boot", [CacheEvent(number, True, name) for number, name in enumerate(names[1])])
    assert known.total <= 6400 + 6400 // 64 + 40
    assert known.expects("heard") == 1000, "its events go on"
    assert known.held("few", few) == 50 and 0 < known.count("told") < 1000
    last = chain(*range(193_900, 193_940))
    assert known.held("many-19", last) == 40 > known.held("many-19", chain(*range(190_000, 190_040)))


def test_what_is_known_of_a_server_is_bounded_and_tails_go_first():
    known = Knowledge(max_blocks=6)
    known.sent("a", chain("x", 1, 2, 3))
    known.sent("a", chain("y", 1, 2, 3))
    assert known.count("a") == 6
    assert known.held("a", chain("y", 1, 2, 3)) == 4
    assert known.held("a", chain("x", 1, 2, 3)) == 2
    known.resize("a", 3)
    assert (known.held("a", chain("y", 1, 2, 3)), known.held("a", chain("x"))) == (3, 0)


def test_events_say_what_is_stored_and_removed_and_a_gap_asks_for_a_snapshot():
    known, [one, two, three] = Knowledge(), chain(1, 2, 3)
    assert known.hear("a", "boot", [CacheEvent(0, True, one), CacheEvent(1, True, two)])
    assert known.held("a", [one, two, three]) == 2
    assert known.hear("a", "boot", [CacheEvent(2, False, two)])
    assert known.held("a", [one, two, three]) == 1
    assert not known.hear("a", "boot", [CacheEvent(4, True, three)])
    assert known.count("a") == 0
    assert not known.hear("a", "boot", [CacheEvent(5, True, three)])
    known.snapshot("a", "boot", 5, [one, two, three])
    assert known.hear("a", "boot", [CacheEvent(4, False, one), CacheEvent(5, False, three)])
    assert known.held("a", [one, two, three]) == 2


def test_a_new_boot_holds_nothing_of_the_last_one():
    known = Knowledge()
    assert known.hear("a", "1", [CacheEvent(0, True, b"x")])
    assert known.hear("a", "2", [])
    assert known.count("a") == 0
    assert not known.hear("a", "3", [CacheEvent(7, True, b"x")])


@given(st.data())
def test_knowledge_is_that_of_a_cache_whose_every_event_was_heard_or_missed(data):
    """A cache of chains, with events of which some are lost: what is known is what it holds, once a snapshot came."""
    cache: OrderedDict[bytes, None] = OrderedDict()
    known = Knowledge()
    for number in range(data.draw(st.integers(1, 30))):
        kind = data.draw(st.sampled_from(["stored", "removed", "lost"]))
        hash = bytes([data.draw(st.integers(0, 20))])
        if kind == "removed":
            cache.pop(hash, None)
        else:
            cache[hash] = None
        if kind != "lost" and not known.hear("a", "boot", [CacheEvent(number, kind == "stored", hash)]):
            known.snapshot("a", "boot", number + 1, list(cache))
        if kind != "lost":
            assert known.count("a") == len(cache)
            assert all(known.held("a", [hash]) for hash in cache)


# -- what an engine tells ---------------------------------------------------------------------------------------


def test_events_that_nobody_reads_are_bounded_and_leave_a_gap():
    events = CacheEvents()
    for number in range(KEPT_EVENTS + 3):
        events.add(True, number.to_bytes(8, "little"))
    assert (len(events.kept), events.next, events.since(2)) == (KEPT_EVENTS, KEPT_EVENTS + 3, None)
    assert [(event.number, event.name[0]) for event in events.since(KEPT_EVENTS + 2)] == [(KEPT_EVENTS + 2, 2)]
    assert events.since(KEPT_EVENTS + 3) == [] and events.since(KEPT_EVENTS + 4) is None


@given(st.data())
def test_a_router_that_hears_an_engine_knows_what_is_cached_there(data):
    """A cache of blocks, of which any go at any time; a router that looks now and then, and misses events."""
    there: set[bytes] = set()
    cached, known = CachedPrompts("boot", max_names=40), Knowledge()
    names_of: dict[bytes, bytes] = {}
    for _ in range(data.draw(st.integers(1, 30))):
        stem = data.draw(st.integers(0, 3))
        sent, blocks = names(stem, *range(5)), chain("b", stem, 1, 2)[1:]
        match data.draw(st.sampled_from(["computed", "gone", "looked", "missed"])):
            case "computed":
                there |= set(blocks)
                cached.computed(b"".join(sent), blocks, there.__contains__)
                names_of |= {name: blocks[max(1, (i + 1) * 3 // 6) - 1] for i, name in enumerate(sent)}
                known.sent("a", sent)
            case "gone":
                there -= (gone := set(blocks[data.draw(st.integers(0, 2)) :]))
                cached.gone(gone)
            case "missed":
                cached._events.kept.clear()  # a ring that has come round
            case _:
                _hear(known, cached)
    if _hear(known, cached) == -1:
        _hear(known, cached)
    held = {name for name in names_of if known.held("a", [name])}
    assert held == {name for name, block in names_of.items() if block in there} == set(cached._block_of)


def names(*words: object) -> list[bytes]:
    return [blake2b(each, digest_size=8).digest() for each in chain(*words)]


def _hear(known, cached):
    since = known.expects("a")
    news = read_told(json.loads(json.dumps(cached.told(since))), since)
    if news.names is not None:
        known.snapshot("a", news.boot, news.next, news.names)
    else:
        known.hear("a", news.boot, news.events)
    return known.expects("a")


def test_what_was_sent_and_never_computed_is_taken_back():
    cached, known = CachedPrompts("boot"), Knowledge()
    _hear(known, cached)
    sent = names(*range(8))
    known.sent("a", sent)
    cached.computed(b"".join(sent), [b"1", b"2", b"3", b"4"], {b"1", b"2"}.__contains__)
    _hear(known, cached)
    assert known.held("a", sent) == 5  # the sixth ends in the third block
    cached.computed(b"".join(names("short")), [], {}.__contains__)
    assert len(cached) == 5


def test_an_engine_knows_so_many_names_and_says_which_ones_it_has_forgotten():
    cached, known = CachedPrompts("boot", max_names=4), Knowledge()
    for stem in "xyz":
        cached.computed(b"".join(names(stem, 1, 2)), [stem.encode()], lambda block: True)
        _hear(known, cached)
    assert len(cached) == 4
    assert (known.count("a"), known.held("a", names("z", 1, 2)), known.held("a", names("x"))) == (4, 3, 0)
    _hear(known, CachedPrompts("another boot"))
    assert known.count("a") == 0


@pytest.mark.parametrize("told", [None, [], {"boot": 1}, {"boot": "", "next": 1, "events": [""]}, {"next": "x"}])
def test_what_is_no_such_document_is_an_error(told):
    with pytest.raises(ValueError, match=r".+"):
        read_told(told, 0)


# -- loads -----------------------------------------------------------------------------------------------------


def test_a_load_knows_what_waits_what_runs_and_how_fast_it_goes():
    load = Load()
    load.sent(0.0, 500)
    load.sent(0.0, 500)
    assert (load.queued, load.waiting, load.running, load.recent(0.0)) == (1000, 2, 0, 2.0)
    for index in range(60):
        load.begun(index * 1.0, index + 1.0, 500)
        load.ended(0, has_begun=True)
        load.sent(index + 1.0, 500)
    assert load.shown == pytest.approx(500, rel=0.05)
    load.ended(500, has_begun=False)
    load.ended(500, has_begun=False)
    assert (load.queued, load.waiting, load.running) == (0, 0, 0)
    assert load.recent(1e9) == pytest.approx(0, abs=1e-6)
    load.tell(9.0)
    assert load.shown == load.rate(1000.0) == 9.0


def test_who_has_computed_little_is_taken_to_be_as_fast_as_the_others():
    new, slow, fast = Load(), Load(), Load()
    assert common_rate([new, slow]) == FIRST_RATE == new.rate(common_rate([new]))
    fast.tell(50_000.0)
    assert new.rate(common_rate([new, fast])) == pytest.approx(50_000.0)
    slow.sent(0.0, 200)
    slow.begun(0.0, 0.1, 200)  # a first prompt, by a server that was not warm
    assert slow.shown == 2000.0 and slow.rate(50_000.0) == pytest.approx(10_000, rel=0.05)
    for _ in range(50):
        slow.sent(0.0, 200)
    for index in range(50):
        slow.begun(0.0, 0.2 + index / 10, 200)
    assert slow.rate(50_000.0) == pytest.approx(2000.0, rel=0.6), "it is believed after a while"


def test_what_waited_behind_others_is_not_slow():
    load = Load()
    for _ in range(40):
        load.sent(0.0, 100)
    for index in range(40):
        load.begun(0.0, index + 1.0, 100)
    assert load.shown == pytest.approx(100, rel=0.01)
