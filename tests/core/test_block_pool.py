"""A pool by itself: who holds a block, in which order blocks are handed out, and what a mistake costs."""

from __future__ import annotations

from quire.core.block_pool import NULL_BLOCK, BlockPool


def test_a_new_pool_hands_out_each_block_but_the_null_block_once_in_order():
    pool = BlockPool(5)
    assert pool.num_free == 4
    assert [pool.allocate() for _ in range(4)] == [1, 2, 3, 4]
    assert pool.num_free == 0 and pool.ref_counts == [0, 1, 1, 1, 1]
    assert NULL_BLOCK not in pool.free_blocks


def test_only_blocks_that_had_no_holder_are_named_when_they_get_one_and_when_they_lose_the_last():
    pool = BlockPool(6)
    held, other, cached = (pool.allocate() for _ in range(3))
    assert pool.release(cached) == [cached], "it is not free: a cache may keep it"
    assert pool.num_free == 2
    assert pool.retain(held, cached, other) == [cached]
    assert [pool.ref_counts[block] for block in (held, other, cached)] == [2, 2, 1]
    assert pool.release(other, held) == []
    assert pool.release(other, cached, held) == [other, cached, held], "in the order in which they were let go"
    assert pool.ref_counts == [0] * 6 and not pool.double_releases


def test_a_block_that_is_released_once_too_often_is_counted_and_those_after_it_are_released():
    pool = BlockPool(6)
    blocks = [pool.allocate() for _ in range(3)]
    pool.release(blocks[0])
    assert pool.release(*blocks) == blocks[1:]
    assert pool.release(*blocks[:2]) == []
    assert pool.double_releases == 3 and pool.ref_counts == [0] * 6


def test_after_a_reset_all_blocks_are_free_and_their_old_handles_are_known_to_be_stale():
    pool = BlockPool(4)
    block = pool.allocate()
    generation = pool.generations[block]
    pool.check(block, generation)
    assert pool.stale_handles == 0
    pool.reset()
    assert pool.num_free == 3 and pool.ref_counts == [0] * 4
    assert pool.allocate() == block
    pool.check(block, generation)
    pool.check(block, generation)
    assert pool.stale_handles == 2
