"""What other nodes hold: who is asked for a block, what is believed for how long, and a pool where anything happens."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.block_hash import part_name
from quire.core.invariants import check
from quire.core.kv_group import KVGroup
from quire.core.prefix import Prefix
from quire.core.prefix_cache import PrefixCache
from quire.core.step import Span, StepPlan, StepResult
from quire.kv.tiers.fetch import PATIENCE, SlotFetch
from quire.kv.tiers.holders import (
    FRESH_SECONDS,
    KEPT_SECONDS,
    LOOKUP_SECONDS,
    MOST_KNOWN,
    REPLICAS,
    Holders,
    Lookup,
)
from quire.kv.tiers.orders import Ban, Gone, Have, Lacks, Locate, Pull
from quire.kv.tiers.sources import Sources
from quire.kv.tiers.tier import REMOTE, Tier
from tests.core.fake_runner import (
    ALL,
    STATE,
    Windows,
    expected_output,
    make_request,
    make_scheduler,
    outputs,
    published_of,
)

CHAIN = [bytes([number]) * 4 for number in range(6)]


def chain_of(hashes: list[bytes]) -> Prefix:
    """Of which nothing is in the pool."""
    request = make_request(0, [1])
    request.hashes = hashes
    return Prefix(PrefixCache([KVGroup(2)], 16), request, 0, len(hashes))


def ask(holders: Holders, hashes: list[bytes], now: float) -> Lookup | None:
    return holders.ask(hashes, [True] * len(hashes), now)


def best(
    holders: Holders, hashes: list[bytes], tier: Tier, cost: Callable[[str], float | None], now: float
) -> tuple[str, int]:
    chain = chain_of(hashes)
    wanted = [part for part in chain.parts(0) if part.name not in tier]
    return holders.best(chain, wanted, tier, cost, now)


def told(rows: list[list[str]], now: float = 0.0) -> Holders:
    made = Holders()
    made.ready = True
    lookup = ask(made, CHAIN, now)
    assert lookup is not None
    made.answered(lookup.number, rows, now)
    return made


def test_of_those_that_hold_the_next_block_the_one_with_most_of_the_chain_is_asked():
    known = told([["a", "b"], ["a", "b"], ["a", "b"], ["b"]])
    assert best(known, CHAIN, Tier(), lambda node: None, 0.0) == ("b", 4)
    assert best(known, CHAIN[:3], Tier(), {"a": 1.0, "b": 2.0}.get, 0.0) == ("a", 3), "and of equals the fastest"
    assert best(known, CHAIN[4:], Tier(), lambda node: None, 0.0) == ("", 0)


def test_what_the_tier_has_already_does_not_end_a_run():
    tier = Tier(2)
    slot = tier.take(CHAIN[1])
    assert slot is not None
    tier.filled(slot)
    known = Holders()
    known.ready = True
    lookup = ask(known, [each for each in CHAIN if each not in tier], 0.0)
    assert lookup is not None
    known.answered(lookup.number, [["a"], ["a"]], 0.0)
    assert best(known, CHAIN, tier, lambda node: None, 0.0) == ("a", 3)


def test_nothing_is_asked_again_that_was_said_just_now_and_nothing_old_is_believed():
    known = told([["a"], ["a"]])
    assert known.missed == 4 and ask(known, CHAIN[1:], FRESH_SECONDS - 0.1) is None
    assert ask(known, CHAIN[2:], FRESH_SECONDS - 0.1) is None, "nobody had it"
    assert ask(known, CHAIN[3:], 0.0) is not None, "nothing was said of it"
    assert ask(known, CHAIN, FRESH_SECONDS + 0.1) is not None
    assert known.of(CHAIN[0], KEPT_SECONDS - 0.1) == ("a",) and known.of(CHAIN[0], KEPT_SECONDS) == ()


def test_a_directory_that_is_late_is_asked_for_nothing_before_it_has_answered():
    known = Holders()
    assert ask(known, CHAIN, 0.0) is None, "it is not ready"
    known.ready = True
    lookup = ask(known, CHAIN, 0.0)
    assert lookup is not None and not known.expired(LOOKUP_SECONDS)
    assert known.expired(LOOKUP_SECONDS + 0.01) == [lookup] and not known.expired(1.0)
    assert ask(known, CHAIN[1:], 1.0) is None
    assert known.answered(lookup.number, [["a"]], 1.0) is lookup and known.of(CHAIN[0], 1.0) == ("a",)
    assert known.answered(lookup.number, [["b"]], 1.0) is None, "it came twice"
    assert ask(known, CHAIN[2:], 1.0) is not None


def test_where_nothing_is_answered_what_was_said_before_counts():
    known = told([["a"]])
    lookup = ask(known, CHAIN, FRESH_SECONDS + 1)
    assert lookup is not None
    known.answered(lookup.number, None, FRESH_SECONDS + 1)
    assert known.of(CHAIN[0], FRESH_SECONDS + 1) == ("a",) and known.missed == 5
    assert ask(known, CHAIN, FRESH_SECONDS + 1.1) is None


def test_who_lacks_a_block_or_is_banned_is_not_asked():
    known = told([["a", "b"], ["a", "b"]])
    known.lacks("a", [CHAIN[1], b"unknown"])
    assert known.of(CHAIN[1], 0.0) == ("b",) and known.count(CHAIN[1]) == 1
    assert known.ban("b") and not known.ban("b")
    assert known.of(CHAIN[0], 0.0) == ("a",) and known.of(CHAIN[1], 0.0) == ()


def test_of_nodes_that_have_left_nothing_is_kept():
    scheduler, _ = make_scheduler(num_slots=4)
    fetches = scheduler.kv.external
    known = fetches.sources.holders = told([["a", "b"]])
    for source in ("host", "a", "b"):
        fetches.sources.costs.moved(source, 1, 1.0)
    known.ban("a")
    fetches.sources.keep_nodes(frozenset(["b"]))
    rates = [fetches.sources.costs.load_seconds(source, 1) for source in ("host", "a", "b")]
    assert rates == [pytest.approx(1.0), None, pytest.approx(1.0)]
    assert known.ban("a"), "its name is not kept, either"


def test_nodes_that_have_left_hold_nothing():
    known = told([["a", "b"], ["a"]])
    known.keep(frozenset(["b", "c"]))
    assert known.of(CHAIN[0], 0.0) == ("b",) and known.count(CHAIN[0]) == 1, "so it is saved here, too"
    assert best(known, CHAIN, Tier(), lambda node: None, 0.0) == ("b", 1)


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("quire.kv.tiers.holders.MOST_KNOWN", 3)
    known = told([["a"]] * 6)
    assert [bool(known.of(each, 0.0)) for each in CHAIN] == [False] * 3 + [True] * 3 and MOST_KNOWN > 1000


def test_what_two_others_hold_is_not_saved_in_one_more_tier():
    for others in range(REPLICAS + 1):
        scheduler, _ = make_scheduler(num_slots=4)
        fetches = scheduler.kv.external
        fetches.sources.holders = told([["a", "b"][:others]])
        for _ in range(5):
            fetches.used(CHAIN[0], 0, 1)
        fetches.evicted(CHAIN[0], 0, 1)
        assert fetches.has_moves == (others < REPLICAS)


def a_pull(sources: Sources, now: float) -> Lookup | SlotFetch | None:
    """What a chain that is not here is brought by."""
    return sources.begin_pull(chain_of(CHAIN), now)


def costing(compute: float, **load: float) -> Sources:
    """Nodes that were read from, each in so many seconds a block, at an engine that computes one in as many."""
    sources = Sources(Tier(40))
    sources.holders = Holders()
    sources.holders.ready = True
    sources.keep_nodes(frozenset(load))
    plan = StepPlan(0, [Span(0, 0, [1] * 160)], num_tokens=160)
    sources.costs.observe(plan, StepResult(0, [], 10 * compute))
    for node, seconds in load.items():
        sources.costs.moved(node, 10, 10 * seconds)
    return sources


def test_where_nobody_would_be_faster_than_computing_nobody_is_asked_who_has_it():
    assert isinstance(a_pull(costing(1.0, a=2.0, b=0.5), 0.0), Lookup)
    slow = costing(1.0, a=2.0, b=0.9)
    assert a_pull(slow, 0.0) is None and not slow.orders
    assert a_pull(costing(1.0), 0.0) is None, "nobody is there"
    for _ in range(100):  # a bad moment is forgotten
        a_pull(slow, 0.0)
    assert slow.orders


def test_a_node_that_is_slower_than_it_was_is_waited_for_twice_as_long_as_computing_takes_and_that_is_remembered():
    sources = costing(1.0, a=0.1)
    lookup = a_pull(sources, 0.0)
    assert isinstance(lookup, Lookup)
    sources.located(lookup.number, [["a"]] * len(CHAIN), 0.0)
    fetch = a_pull(sources, 1.0)
    assert isinstance(fetch, SlotFetch) and fetch.deadline == pytest.approx(1.0 + PATIENCE[REMOTE])
    quick = costing(0.1, a=0.01)
    assert quick.holders is not None
    lookup = a_pull(quick, 0.0)
    assert isinstance(lookup, Lookup)
    quick.located(lookup.number, [["a"]] * len(CHAIN), 0.0)
    fetch = a_pull(quick, 1.0)
    assert isinstance(fetch, SlotFetch) and fetch.deadline == pytest.approx(1.0 + 2 * 0.1 * len(CHAIN))
    quick.expire(fetch.deadline - 0.1)
    assert not fetch.late
    quick.expire(fetch.deadline + 0.1)
    assert fetch.late
    assert a_pull(quick, 3.0) is None and not quick.costs.prefers_load("a", len(CHAIN), len(CHAIN) * 16, 0)


class PoolNode:
    """A scheduler of a pool."""

    def __init__(self, name: str, rnd: random.Random, windows: Windows) -> None:
        self.name = name
        self.scheduler, self.runner = make_scheduler(
            windows=windows,
            num_blocks=rnd.choice([14, 30]),
            num_slots=rnd.choice([4, 12, 40]),
            prefix_cache=rnd.choice(["radix", "hash"]),
            max_num_seqs=rnd.choice([2, 6]),
        )
        fetches = self.scheduler.kv.external
        self.holders = fetches.sources.holders = Holders()
        self.published = published_of([self.scheduler.kv])
        self.holders.ready = True
        self.lookups: deque[Locate] = deque()
        self.pulls: dict[int, Pull] = {}
        self.read: dict[int, int] = {}
        self.prompts: dict[int, list[int]] = {}
        self.updates: list[Any] = []


class PoolRun:
    """One seeded schedule of a pool: three nodes, a directory that may be wrong, late or lost."""

    def __init__(self, seed: int) -> None:
        self.rnd = rnd = random.Random(seed)
        self.windows: Windows = rnd.choice([ALL, ALL, (None, 9), (9,), (None, STATE), (None, 9, STATE)])
        self.nodes = {name: PoolNode(name, rnd, self.windows) for name in "abc"}
        self.directory: dict[bytes, set[str]] = {}
        self.heads = [[rnd.randrange(5) for _ in range(rnd.randrange(12, 30))] for _ in range(2)]
        self.exports: dict[int, tuple[PoolNode, int]] = {}  # by the holder's number: who asked, and its number
        self.news: deque[tuple[PoolNode, Have | Gone]] = deque()
        self.next, self.now = 0, 0.0
        self.counts: Counter[str] = Counter()

    def add(self, node: PoolNode) -> None:
        rnd, id = self.rnd, len(node.prompts)
        node.prompts[id] = prompt = rnd.choice(self.heads) + [rnd.randrange(5) for _ in range(rnd.randrange(4))]
        node.scheduler.add(make_request(id, prompt, rnd.randrange(1, 6), scope=rnd.choice(["", "", "", "tenant"])))

    def step(self, node: PoolNode) -> bool:
        self.now += 0.01
        plan = node.scheduler.schedule(self.now)
        if plan:
            node.updates += node.scheduler.commit(plan, node.runner.run(plan), self.now)
        kv = node.scheduler.kv
        assert kv.external.sources.exports is not None
        self.news += [(node, each) for each in kv.external.sources.exports.advance([kv.external])]
        self.tell(node)
        check(node.scheduler)
        return plan is not None

    def tell(self, node: PoolNode) -> None:
        """What has changed goes to the directory, mostly; and what is wanted is noted."""
        came, went = node.published.changes([node.scheduler.kv.cache])
        for name in came:
            self.directory.setdefault(name, set()).add(node.name)
        for name in went if self.rnd.random() < 0.9 else ():
            self.directory.get(name, set()).discard(node.name)
        tier, cache = node.scheduler.kv.external.tier, node.scheduler.kv.cache
        cached = {part_name(n.hash, i) for n in cache._by_hash.values() for i, block in enumerate(n.blocks) if block}
        assert node.published.blocks == {*tier.kept, *cached}, "all that it has, and nothing else"
        orders = node.scheduler.kv.external.sources.orders
        for order in orders:
            if isinstance(order, Locate):
                node.lookups.append(order)
            elif isinstance(order, Pull):
                node.pulls[order.number], node.read[order.number] = order, 0
                self.ask(node, order)
            elif isinstance(order, Lacks):
                for name in order.hashes:
                    self.directory.get(name, set()).discard(order.node)
            else:
                assert isinstance(order, Ban)
                self.counts["banned"] += 1
        orders.clear()

    def ask(self, node: PoolNode, order: Pull) -> None:
        holder = self.nodes[order.node].scheduler.kv.external.sources.exports
        assert holder is not None and order.node != node.name
        self.next += 1
        self.exports[self.next] = node, order.number
        holder.begin(self.next, [name for _, name in order.blocks], False)

    def locate(self, node: PoolNode) -> bool:
        if not node.lookups:
            return False
        order = node.lookups.popleft()
        rows: list[set[str]] | None = []
        for name, needed in zip(order.names, order.needed, strict=True):
            holders = self.directory.get(name, set()) - {node.name}
            if self.rnd.random() < 0.02:
                holders = {each for each in "abc" if each != node.name}  # it is wrong
            if not holders and needed:
                break
            rows.append(holders)
        if self.rnd.random() < 0.05:
            rows = None
        node.scheduler.kv.external.sources.located(order.number, rows, self.now)
        return True

    def carry(self) -> bool:
        """The oldest news reach who asked."""
        if not self.news:
            return False
        holder, news = self.news.popleft()
        node, number = self.exports[news.number]
        order = node.pulls.get(number)
        if order is None:
            return True
        assert holder.scheduler.kv.external.sources.exports is not None
        if isinstance(news, Have):
            for slot, (target, name) in zip(news.slots, order.blocks[news.first :], strict=False):
                assert holder.runner.slots[slot][0] == name, "a slot that is told of stays as it is"
                node.runner.slots[target] = holder.runner.slots[slot]
            node.read[number] = news.first + len(news.slots)
            holder.scheduler.kv.external.sources.exports.release(news.number, node.read[number])
        if isinstance(news, Gone) or node.read[number] == len(order.blocks):
            self.end_pull(node, number, isinstance(news, Gone))
        return True

    def end_pull(self, node: PoolNode, number: int, gone: bool) -> None:
        order = node.pulls.pop(number)
        [export] = [each for each, asked in self.exports.items() if asked == (node, number)]
        exports = self.nodes[order.node].scheduler.kv.external.sources.exports
        assert exports is not None
        exports.end(export)
        node.scheduler.kv.external.sources.read_ended(number, node.read[number], 0.001, gone)

    def event(self) -> None:
        rnd = self.rnd
        node = self.nodes[rnd.choice("abc")]
        fetches = node.scheduler.kv.external
        whats = ["add", "step", "locate", "carry", "abort", "clear", "flip", "lost", "late", "restart", "forget"]
        [what] = rnd.choices(whats, [15, 60, 20, 20, 3, 3, 3, 1, 0.5, 1, 1])
        if what == "add" and len(node.prompts) < 15:
            self.add(node)
        elif what == "step":
            self.step(node)
        elif what == "locate":
            self.locate(node)
        elif what == "carry":
            self.carry()
        elif what == "abort" and node.prompts:
            node.scheduler.abort(rnd.randrange(len(node.prompts)))
        elif what == "clear":
            node.scheduler.kv.cache.clear()
        elif what == "flip" and fetches.tier.kept:
            node.runner.flip(rnd.choice(sorted(fetches.tier.kept.values())))
        elif what == "lost" and node.pulls:
            self.end_pull(node, rnd.choice(sorted(node.pulls)), False)
        elif what == "late":
            self.now += rnd.choice([LOOKUP_SECONDS, PATIENCE[REMOTE], KEPT_SECONDS]) + 0.01
        elif what == "restart":
            node.scheduler.restart()
        elif what == "forget":
            self.directory.clear()  # it was emptied, and nobody has noticed yet
        check(node.scheduler)

    def end(self) -> None:
        for _ in range(5000):
            stepped = [self.step(node) for node in self.nodes.values()]
            located = [self.locate(node) for node in self.nodes.values()]
            asked = [bool(node.pulls) for node in self.nodes.values()]
            if not any([*stepped, *located, self.carry(), *asked]):
                break
        for node in self.nodes.values():
            node.updates += node.scheduler.take_updates()
            fetches = node.scheduler.kv.external
            assert node.scheduler.idle and not node.holders.lookups and not fetches.sources.reads
            assert not fetches.tier.pins and not fetches.tier.counts["quarantined"]
            for id, tokens in outputs(node.updates).items():
                assert tokens == expected_output(node.prompts[id], len(tokens), self.windows)
            ended = [update.request for update in node.updates if update.finish_reason]
            assert sorted(ended) == sorted(node.prompts)
            self.counts.update(read=fetches.sources.num_moved(REMOTE, "loaded"), stale=node.holders.stale)
            self.counts.update(bad=node.holders.bad, missed=node.holders.missed)


def run_schedules(seeds: range) -> Counter[str]:
    total: Counter[str] = Counter()
    for seed in seeds:
        try:
            run = PoolRun(seed)
            for _ in range(200):
                run.event()
            run.end()
        except BaseException as error:
            raise AssertionError(f"schedule {seed}: {error}") from error
        total += run.counts
    return total


@pytest.mark.scale
def test_whatever_happens_in_a_pool_no_token_changes_and_no_request_hangs():
    total = run_schedules(range(20))
    assert total["read"] > 50 and total["stale"] > 5 and total["bad"] and total["banned"] and total["missed"], total


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_three_thousand_schedules_of_a_pool():
    run_schedules(range(3000))
