"""Blocks of several KV groups between the pool and the tiers: a request begins where each has what it sees."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from quire.core.block_hash import part_name
from quire.core.invariants import check
from quire.core.prefix import Prefix
from quire.kv.tiers.tier import DISK, HOST
from tests.core.fake_runner import (
    STATE,
    FakeDisk,
    Windows,
    expected_output,
    make_request,
    make_scheduler,
    outputs,
    run_all,
)

HEAD = list(range(20, 61))
"""Ten blocks of 4 tokens, and one more."""

KINDS: list[Windows] = [(None, 9), (9,), (None, STATE), (None, 9, STATE)]


@dataclass
class Served:
    """A scheduler that serves one request after the other."""

    windows: Windows
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        defaults = {"num_blocks": 60, "num_slots": 40, "prefix_cache": "hash"}
        self.scheduler, self.runner = make_scheduler(windows=self.windows, **(defaults | self.options))
        self.kv, self.fetches, self.next = self.scheduler.kv, self.scheduler.kv.external, 0

    def serve(self, prompt: list[int], max_tokens: int = 2) -> int:
        """Rightly; how many of its tokens were cached."""
        self.next += 1
        self.scheduler.add(make_request(self.next, prompt, max_tokens))
        updates = run_all(self.scheduler, self.runner)
        assert outputs(updates)[self.next] == expected_output(prompt, max_tokens, self.windows)
        check(self.scheduler)
        return updates[-1].cached_tokens

    def emptied(self) -> None:
        """What is worth it is in the tier, and nothing in the pool."""
        self.kv.cache.clear()
        self.serve([1, 2, 3], 1)

    def head_used(self, times: int = 4) -> None:
        for last in range(times):
            self.serve([*HEAD[:40], 70 + last])

    def parts(self) -> dict[int, list[int]]:
        """By group, which blocks of the head the tier has."""
        request = make_request(0, HEAD)
        self.kv.match(request)
        return {
            number: [i for i, each in enumerate(request.hashes) if part_name(each, number) in self.fetches.tier]
            for number in range(len(self.windows))
        }


@pytest.mark.parametrize("windows", KINDS)
def test_a_head_that_was_evicted_is_loaded_with_all_that_the_next_token_sees_and_no_more(windows: Windows) -> None:
    served = Served(windows)
    served.head_used()
    served.emptied()
    expected = {None: list(range(10)), 9: [8, 9], STATE: [9]}
    assert served.parts() == {number: expected[window] for number, window in enumerate(windows)}
    assert served.serve([*HEAD[:40], 99]) == 40
    assert served.fetches.sources.num_moved(HOST, "loaded") == sum(len(expected[window]) for window in windows)


@pytest.mark.parametrize("windows", KINDS)
def test_what_one_group_lacks_is_computed_and_the_rest_stays(windows: Windows) -> None:
    served = Served(windows)
    served.head_used()
    served.emptied()
    for number, places in served.parts().items():
        if windows[number] is not None:
            request = make_request(0, HEAD)
            served.kv.match(request)
            served.fetches.tier.withdraw(served.fetches.tier.slot(part_name(request.hashes[places[-1]], number)))
    assert served.serve([*HEAD[:40], 99]) == 0
    assert served.fetches.sources.num_moved(HOST, "loaded") == 0


def test_a_bad_part_of_any_group_is_withdrawn_and_what_needs_it_is_computed() -> None:
    for number, cached in ((0, 0), (1, 0), (2, 0)):
        served = Served((None, 9, STATE))
        served.head_used()
        served.emptied()
        request = make_request(0, HEAD)
        served.kv.match(request)
        name = part_name(request.hashes[served.parts()[number][-1]], number)
        served.runner.flip(served.fetches.tier.slot(name))
        assert served.serve([*HEAD[:40], 99]) == cached
        assert served.fetches.sources.num_moved(HOST, "bad") == 1 and name not in served.fetches.tier


@pytest.mark.parametrize("windows", [kind for kind in KINDS if None in kind])
def test_who_gives_way_comes_back_from_the_tier(windows: Windows) -> None:
    blocks = [25 if window is None else 40 for window in windows]
    served = Served(windows, {"num_slots": 60, "num_blocks": blocks, "max_num_seqs": 4})
    prompts = {id: [id] * 12 for id in range(4)}
    for id, prompt in prompts.items():
        served.scheduler.add(make_request(id, prompt, 36))
    updates = run_all(served.scheduler, served.runner)
    assert outputs(updates) == {id: expected_output(prompt, 36, windows) for id, prompt in prompts.items()}
    assert served.scheduler.num_preemptions and served.fetches.sources.num_moved(HOST, "loaded")
    check(served.scheduler)


def test_of_a_window_what_the_next_turn_sees_is_saved_the_first_time_and_what_was_passed_is_not() -> None:
    served = Served((None, 9))
    served.serve(HEAD[:40])
    served.emptied()
    assert served.parts() == {0: list(range(10)), 1: [8, 9]}


@pytest.mark.parametrize("windows", KINDS)
def test_after_a_restart_the_disk_has_what_was_used_twice_of_every_group(windows: Windows) -> None:
    disk = FakeDisk()
    served = Served(windows, {"disk": disk})
    served.head_used()
    disk.take(served.scheduler)
    while disk.orders:
        disk.work(served.scheduler, served.runner)
    served.kv.reset()
    served.scheduler.add(make_request(101, [*HEAD[:40], 99], 2))
    assert served.scheduler.schedule(0.0) is None and served.scheduler.expects_others
    disk.take(served.scheduler)
    check(served.scheduler)
    disk.work(served.scheduler, served.runner)
    updates = run_all(served.scheduler, served.runner)
    assert outputs(updates)[101] == expected_output([*HEAD[:40], 99], 2, windows)
    assert {update.cached_tokens for update in updates} == {40}
    parts, sources = sum(map(len, served.parts().values())), served.fetches.sources
    assert sources.num_moved(DISK, "loaded") == sources.num_moved(HOST, "loaded") == parts


def test_beside_decodes_the_blocks_of_all_groups_are_loaded_few_at_a_time_and_then_the_request_begins() -> None:
    served = Served((None, 9, STATE))
    served.head_used()
    served.emptied()
    served.scheduler.add(make_request(100, [7, 7, 7], 30))
    served.scheduler.commit(plan := served.scheduler.schedule(0.0), served.runner.run(plan), 0.0)
    served.scheduler.add(make_request(101, [*HEAD[:40], 99], 2))
    loads, updates = [], []
    while not served.scheduler.idle:
        plan = served.scheduler.schedule(0.0)
        loads += [len(plan.loads)] if plan.loads else []
        updates += served.scheduler.commit(plan, served.runner.run(plan), 0.0)
        check(served.scheduler)
    assert loads[0] == 4 and sum(loads) == 13
    [update] = [each for each in updates if each.request == 101 and each.finish_reason]
    assert update.cached_tokens == 40 and [each.tokens for each in update.stats.fetches] == [40]
    assert outputs(updates)[101] == expected_output([*HEAD[:40], 99], 2, (None, 9, STATE))


def test_a_chain_reaches_as_far_as_every_group_has_what_it_sees() -> None:
    served = Served((None, 9))  # of 8 tokens before a block, in blocks of 4
    request = make_request(0, HEAD)
    served.kv.match(request)
    full, seen = ([part_name(each, number) for each in request.hashes] for number in (0, 1))
    chain = Prefix(served.kv.cache, request, 0, 10)
    for there, end in [
        ([], 0),
        (full, 0),
        ([*full, seen[9]], 0),
        ([*full, seen[9], seen[8]], 10),
        ([*full, seen[8], seen[7], seen[0]], 9),
        ([*full, seen[0]], 1),
        ([*full[:7], *seen], 7),
        ([*full[:3], *full[4:], *seen[2:]], 0),
    ]:
        assert chain.reach(set(there).__contains__) == end, there
    assert [(part.group, part.place) for part in chain.missing(3)] == [(0, 0), (0, 1), (0, 2), (1, 1), (1, 2)]
