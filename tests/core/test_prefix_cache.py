"""What the prefix caches find, keep and give up."""

from __future__ import annotations

import random
from array import array

import pytest

from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import Handle, KVManager
from quire.core.prefix_cache import Match, common_tokens
from tests.core.fake_runner import expected_output, make_request, make_scheduler, matched, outputs, run_all, run_prompts


def key(tokens):
    return array("q", tokens).tobytes()


def cached(kind="radix", block_size=1, num_blocks=64, prompts=()):
    return run_prompts(prompts, num_blocks=num_blocks, block_size=block_size, prefix_cache=kind)


def test_a_tree_of_four_prompts_matches_four_tokens():
    scheduler, _ = cached(prompts=([1, 2, 3, 4, 5], [1, 2, 6, 7, 8], [1, 2, 3, 9, 10], [1, 11, 12]))
    assert matched(scheduler, [1, 2, 3, 4, 6]) == 4
    assert matched(scheduler, [1, 2, 3, 9, 10, 11]) == 5
    assert matched(scheduler, [2, 1]) == 0


@pytest.mark.scale
@pytest.mark.parametrize("length", range(1, 34))
@pytest.mark.parametrize("kind", ["radix", "hash"])
def test_a_full_hit_leaves_at_least_the_last_token_to_compute(kind, length):
    prompt = list(range(length))
    scheduler, runner = cached(kind, block_size=8, prompts=[prompt])
    scheduler.add(make_request(1, prompt, max_tokens=3))
    updates = run_all(scheduler, runner)
    assert outputs(updates)[1] == expected_output(prompt, 3)
    whole_blocks = (length - 1) // 8 * 8
    assert updates[-1].cached_tokens == (length - 1 if kind == "radix" else whole_blocks)


def test_radix_matches_to_the_token_where_hash_matches_whole_blocks():
    first, second = [*range(20), 77, 78], [*range(20), 88, 89]
    for kind, expected in (("radix", 20), ("hash", 16), ("off", 0)):
        scheduler, _ = cached(kind, block_size=8, prompts=[first])
        assert matched(scheduler, second) == expected, kind


def test_the_last_partly_filled_block_is_reused_by_copying_only():
    scheduler, runner = cached(block_size=8, prompts=[[1, 2, 3, 4, 5]])
    scheduler.add(make_request(1, [1, 2, 3, 9, 9, 9], max_tokens=1))
    plan = scheduler.schedule(0.0)
    [(_, source, target, tokens)] = plan.spans[0].copies
    assert tokens == 3 and source != target and plan.spans[0].start == 3
    assert scheduler.kv.groups[0].pool.ref_counts[source] == 1, "the source is locked until the copy has run"
    scheduler.commit(plan, runner.run(plan), 0.0)
    assert scheduler.kv.groups[0].pool.ref_counts[source] == 0


def test_a_full_block_replaces_the_partly_filled_leaf_it_extends():
    scheduler, _ = cached(block_size=4, prompts=[[1, 2], [1, 2, 3, 4, 5]])
    [root] = scheduler.kv.cache.roots.values()
    assert [len(child) for child in root.order] == [4 * 8]


def test_among_leaves_the_least_recently_used_goes_first():
    prompts = [[1, 1, 1, 1], [2, 2, 2, 2], [3, 3, 3, 3]]
    scheduler, runner = cached(block_size=2, prompts=prompts)
    scheduler.add(make_request(9, [1, 1, 1, 1, 1], max_tokens=1))
    run_all(scheduler, runner)
    scheduler.kv.cache.evict(0, 2)
    assert [matched(scheduler, [*prompt, 0]) for prompt in prompts] == [4, 0, 4]
    scheduler.kv.cache.evict(0, 1)
    assert [matched(scheduler, [*prompt, 0]) for prompt in prompts] == [4, 0, 2], "the tail goes before the head"


def test_what_a_request_holds_is_never_evicted():
    scheduler, runner = make_scheduler(block_size=2)
    scheduler.add(make_request(0, [1, 2, 3, 4, 5], max_tokens=5))
    plan = scheduler.schedule(0.0)
    scheduler.commit(plan, runner.run(plan), 0.0)
    assert scheduler.kv.cache.clear() == 0
    assert matched(scheduler, [1, 2, 3, 4, 9]) == 4


def test_scopes_share_nothing():
    scheduler, runner = make_scheduler(block_size=2)
    scheduler.add(make_request(0, [1, 2, 3, 4, 5], scope="a"))
    run_all(scheduler, runner)
    assert matched(scheduler, [1, 2, 3, 4, 5], scope="b") == 0
    assert matched(scheduler, [1, 2, 3, 4, 5], scope="a") == 4


def test_a_request_for_prompt_logprobs_reads_nothing():
    scheduler, _ = cached(block_size=2, prompts=[[1, 2, 3, 4, 5]])
    assert matched(scheduler, [1, 2, 3, 4, 5], prompt_logprobs=0) == 0


def test_equal_blocks_computed_twice_are_kept_once():
    scheduler, runner = make_scheduler(block_size=2, num_blocks=200)
    for id in range(6):  # equal outputs from equal prompts, decoded side by side
        scheduler.add(make_request(id, [1, 2, 3, 4, 5], max_tokens=20))
    updates = run_all(scheduler, runner)
    assert all(tokens == expected_output([1, 2, 3, 4, 5], 20) for tokens in outputs(updates).values())
    assert len(scheduler.kv.groups[0].cached) == 12


def test_hashes_depend_on_key_scope_fingerprint_and_every_token_before():
    def chain(key=bytes(32), fingerprint="f", scope="", tokens=(1, 2, 3, 4)):
        hasher = BlockHasher(key, fingerprint)
        data = array("q", tokens)
        return hasher.chain(hasher.root(scope), [data[:2].tobytes(), data[2:].tobytes()])

    base = chain()
    assert base == chain()
    others = [chain(key=b"k" * 32), chain(fingerprint="g"), chain(scope="s"), chain(tokens=(9, 2, 3, 4))]
    assert all(other[1] != base[1] for other in others)
    assert chain(fingerprint="ab", scope="c") != chain(fingerprint="a", scope="bc")


@pytest.mark.parametrize("size", [1, 4])
def test_a_prompt_has_its_own_hashes_whatever_was_hashed_before_it_and_a_common_beginning_is_hashed_once(size):
    def manager():
        return KVManager([KVGroup(2)], size, "radix", BlockHasher(bytes(32), "f"))

    rnd, kv, before = random.Random(size), manager(), make_request(0, [9])
    for id in range(1, 80):
        scope, prompt = rnd.choice("aaab"), [*before.tokens[: rnd.randrange(50)], *rnd.choices(range(3), k=5)]
        request, alone = (make_request(id, list(prompt), scope=scope) for _ in range(2))
        kv.match(request)
        manager().match(alone)
        assert request.hashes == alone.hashes and len(request.hashes) == len(prompt) // size
        pairs = list(zip(request.hashes, before.hashes, strict=False))
        assert [new is old for new, old in pairs] == [new == old for new, old in pairs]
        before = request


def test_what_a_match_held_gives_way_tail_first_once_it_is_let_go():
    scheduler, _ = cached(block_size=2, prompts=[range(9)])
    kv, prompt = scheduler.kv, [*range(9), 50]
    match = kv.match(make_request(1, prompt))
    kv.lock(match)
    assert match.partial is not None and not kv.groups[0].idle
    kv.unlock(match)
    for left in (8, 6, 4, 2, 0):
        assert kv.cache.evict(0, 1) == 1
        assert matched(scheduler, prompt) == left


def test_both_caches_find_what_a_plain_search_finds():
    rnd = random.Random(0)
    for kind in ("radix", "hash"):
        scheduler, runner = make_scheduler(num_blocks=4000, block_size=4, prefix_cache=kind)
        history: list[list[int]] = []
        for id in range(150):
            base = rnd.choice(history) if history and rnd.random() < 0.7 else []
            prompt = base[: rnd.randrange(len(base) + 1)] + [rnd.randrange(3) for _ in range(rnd.randrange(1, 12))]
            longest = max((common(prompt[:-1], other) for other in history), default=0)
            assert matched(scheduler, prompt) == (longest if kind == "radix" else longest // 4 * 4)
            scheduler.add(make_request(id, prompt, max_tokens=1))
            run_all(scheduler, runner)
            history.append(prompt)


def common(a, b):
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_common_tokens_counts_whole_key_ids():
    assert common_tokens(key([1, 2, 3]), key([1, 2, 4])) == 2
    assert common_tokens(key([1, 2]), key([1, 2, 4])) == 2
    assert common_tokens(key([256]), key([0])) == 0


def test_a_second_free_is_counted_and_ignored():
    kv = KVManager([KVGroup(8)], 4, "radix", BlockHasher(bytes(32), "f"))
    block = kv.groups[0].pool.allocate()
    kv.groups[0].release(block)
    kv.groups[0].release(block)
    assert kv.groups[0].pool.double_releases == 1 and kv.num_available == 7


def test_a_block_handed_out_again_has_a_new_generation():
    kv = KVManager([KVGroup(2)], 4, "off", BlockHasher(bytes(32), "f"))
    block = kv.groups[0].pool.allocate()
    before = kv.groups[0].pool.generations[block]
    kv.groups[0].release(block)
    assert kv.groups[0].pool.allocate() == block and kv.groups[0].pool.generations[block] == before + 1


def test_what_a_handle_holds_is_neither_evicted_nor_freed_until_it_is_released_in_any_order():
    scheduler, _ = cached(block_size=2, prompts=[[1, 2, 3, 4]], num_blocks=9)
    kv = scheduler.kv
    blocks = sorted(kv.groups[0].cached)
    first, second = Handle("transfer", 1), Handle("transfer", 2)
    kv.hold(first, [(0, block) for block in blocks])
    kv.hold(second, [(0, blocks[0])])
    kv.cache.clear()
    assert sorted(kv.groups[0].cached) == blocks and kv.num_held == {"transfer": 3} and not kv.num_deferred
    kv.release(first)
    assert not kv.groups[0].pool.ref_counts[blocks[1]] and kv.groups[0].pool.ref_counts[blocks[0]] == 1
    kv.release(second)
    kv.release(second)  # late, and ignored
    assert kv.cache.clear() == len(blocks) and kv.num_available == kv.num_usable
    assert not kv.groups[0].pool.stale_handles and not kv.groups[0].pool.double_releases


def test_a_handle_of_a_block_that_was_handed_out_again_is_seen():
    kv = KVManager([KVGroup(2)], 4, "off", BlockHasher(bytes(32), "f"))
    handle, block = Handle("transfer", 1), kv.groups[0].pool.allocate()
    kv.hold(handle, [(0, block)])
    kv.groups[0].release(block)
    kv.groups[0].release(block)  # somebody's mistake
    kv.groups[0].pool.allocate()
    kv.release(handle)
    assert kv.groups[0].pool.stale_handles == 1


def test_partly_filled_leaves_that_say_nothing_new_are_dropped():
    scheduler, _ = cached(block_size=16, prompts=[list(range(length)) for length in range(1, 16)])
    assert len(scheduler.kv.groups[0].cached) == 1


@pytest.mark.parametrize("kind", ["radix", "hash", "off"])
def test_scopes_that_keep_nothing_leave_nothing(kind):
    scheduler, runner = make_scheduler(block_size=8, prefix_cache=kind)
    for id in range(50):
        scheduler.add(make_request(id, [1, 2, 3], max_tokens=1, scope=str(id)))
        run_all(scheduler, runner)
    scheduler.kv.cache.clear()
    assert not scheduler.kv.cache.roots


def test_a_block_that_was_to_be_copied_is_let_go_with_its_request():
    scheduler, _ = cached(block_size=4, prompts=[[1, 2, 3, 4, 5, 6]])
    kv, request = scheduler.kv, make_request(1, [1, 2, 3, 4, 5, 9])
    match = kv.match(request)
    kv.lock(match)
    kv.admit(request, match)
    assert request.copies and kv.num_available < kv.num_usable
    kv.free(request)
    assert kv.num_available == kv.num_usable


def test_a_table_grows_by_all_the_blocks_it_needs_or_by_none():
    kv, request = KVManager([KVGroup(4)], 4, "off", BlockHasher(bytes(32), "f")), make_request(0, [1] * 13)
    kv.admit(request, Match())
    assert not kv.reserve(request, 13)
    assert request.tables == [[]] and kv.num_available == 3
    assert kv.reserve(request, 12) and request.tables == [[1, 2, 3]]
    assert kv.reserve(request, 12) and not kv.reserve(request, 13)
    assert request.tables == [[1, 2, 3]] and not kv.num_available
