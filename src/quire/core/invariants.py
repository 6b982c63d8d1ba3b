"""What must always hold, by name. `check` verifies what can be seen between two calls of the scheduler, and the option
`check_invariants` runs it after every step. Tests refer to these names.

Blocks
    one place       A block in a KV group's pool is free, or cached without a holder, or held: exactly one of these.
    counts          Its reference count is the number of its holders: tables of running requests, pending copies, and
                    handles of steps in flight and of readers outside the engine.
    free list       It is on the free list, once, exactly when it has no holder and is not cached.
    one release     Each holder releases it once.
    one writer      A block that may be written has one holder, and a full one never changes.
    tables          A request's tables, one per KV group, cover exactly the tokens that are computed, in flight and
                    scheduled; blocks that a sliding window has passed are replaced by the null block.

Prefix caches
    equal tokens    Requests share a block only if their scope and every token up to the block's end are equal.
    tree            A node's children differ, each is a whole block unless it is a leaf, and the path to it is its
                    prefix. It has at least one part or child. It has a part in each group that keeps all positions,
                    and whoever holds that part also holds its parent's.
    ends            A match ends where each group has all that the next token sees.
    lock first      A match is held before anything is allocated in the same step.
    clean blocks    Only blocks whose steps have committed, without error, are shared. A partly filled one is published
                    when its request has finished, and copied for use. The least recently used idle leaf is evicted
                    first.
    last token      If a whole prompt is cached, at least its last token is computed.

Host tier
    one slot        A slot is free, or filling, or keeps a block, or is in quarantine; a kept block is found by its hash
                    in one slot. A slot is filling exactly while a save or a read is in progress, and pinned once for
                    each reader.
    plan order      Saved and loaded blocks are not touched outside the steps, and are published when their step has
                    committed.
    checked bytes   A loaded block is used only if its bytes are those that were saved; otherwise it is computed.

Scheduler
    progress        While there is work, a request finishes, gets further than ever before, or fails, within a bounded
                    number of steps.
    fits alone      A request that could not run alone is refused when it is added.
    holders first   With equal priority, a request that holds blocks does not wait behind one that holds none.
    budgets         No step exceeds its limits of tokens and requests.
    resumption      A preempted request continues with the tokens that it would have had.
    no starvation   Every request is eventually served, in the order of (priority, turn, arrival).

Requests
    one end         Each accepted request ends once, with its tokens in order, none missing, none after the end; usage
                    counts the tokens delivered.
    abort           Whatever state a request is aborted in, its blocks are given back, and late results have no effect.
    slow readers    Buffers for a slow reader are bounded, and it slows down no one else.
    drained         When all requests have ended, no block, task, socket, shared memory or temporary file is left.

Numbers
    same bits       Tokens and log-probabilities do not depend on batch, arrival, chunks, caches, preemption, overlap
                    or speculation.
    sound numbers   A sampled id is in the vocabulary and allowed; if logits are not finite, only that request fails.
    verification    Drafts do not change the output (or, with `speculative_acceptance="rejection"`, its distribution).
"""

from __future__ import annotations

from collections import Counter

from quire.core.block_pool import NULL_BLOCK
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.lockstep import Lockstep
from quire.core.prefix_cache import KEY_BYTES
from quire.core.prefix_node import Node
from quire.core.request import Request, Status
from quire.core.scheduler import Scheduler


class InvariantError(AssertionError):
    """The bookkeeping is inconsistent: a bug in Quire."""


def check(scheduler: Scheduler | Lockstep) -> None:
    """Verify the bookkeeping of each replica's scheduler and pools against what it is derived from.

    Raises:
        InvariantError: with the rule and the values.
    """
    for kv in scheduler.kvs:
        for message in () if kv.external is None else kv.external.wrong():
            raise InvariantError(message)
    for each in scheduler.schedulers if isinstance(scheduler, Lockstep) else [scheduler]:
        _check_scheduler(each)


def _check_scheduler(scheduler: Scheduler) -> None:
    """One replica."""
    kv = scheduler.kv
    _check_blocks(kv, scheduler.running)
    _check_tree(kv)
    _check_tables(kv, scheduler.running)
    orders = [request.order for request in scheduler.running]
    _must(orders == sorted(orders), f"running requests are out of order: {orders}")
    _must(len(orders) <= scheduler.config.max_num_seqs, f"{len(orders)} requests run")
    for request in scheduler.requests.values():
        if request.status is not Status.RUNNING:
            _must(not request.tables, f"request {request.id} is {request.status.value} and holds {request.tables}")


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _check_blocks(kv: KVManager, running: list[Request]) -> None:
    """One place, counts, free list, one release."""
    holders: Counter[tuple[int, int]] = Counter()
    for request in running:
        _must(len(request.tables) == len(kv.groups), f"request {request.id} has {len(request.tables)} tables")
        for number, table in enumerate(request.tables):
            holders.update((number, block) for block in table if block != NULL_BLOCK)
        holders.update((number, source) for number, source, _, _ in request.copies)
    holders.update(kv.held)
    for number, group in enumerate(kv.groups):
        pool, free, where = group.pool, set(group.pool.free_blocks), f"of group {number}"
        _must(len(free) == len(pool.free_blocks) and NULL_BLOCK not in free, f"a block {where} is free twice, or null")
        for block in range(1, pool.num_blocks):
            count, known = pool.ref_counts[block], holders[number, block]
            _must(count == known, f"block {block} {where} counts {count} holders and has {known}")
            unused = count == 0 and block not in group.cached
            _must(unused == (block in free), f"block {block} {where}: unused is {unused}, free is {not unused}")
        idle = {block for block in group.cached if pool.ref_counts[block] == 0}
        _must(idle == set(group.idle), f"the cache counts {len(group.idle)} idle blocks {where} and has {len(idle)}")
        _must(pool.double_releases == 0, f"{pool.double_releases} blocks {where} were released twice")
        _must(pool.stale_handles == 0, f"{pool.stale_handles} handles were of blocks that had been handed out again")
    counted, held = kv.num_held.total(), sum(1 for _ in kv.held)
    _must(counted == held, f"{counted} blocks are counted as held beside the requests, and {held} are")


def _check_tree(kv: KVManager) -> None:
    """Tree: children differ, keys are whole blocks (or leaves), parts are where they can be used."""
    cache, seen = kv.cache, 0
    stack: list[Node] = list(cache.roots.values())
    while stack:
        node = stack.pop()
        _must(node.parent is not None or bool(node.children), f"the root of scope {node.scope!r} has no children")
        _must(node.attached, f"blocks {node.blocks} are in the tree and detached")
        _must(node.order == sorted(node.children), f"children of blocks {node.blocks} are not sorted")
        for key, child in node.children.items():
            name, full = f"the node of blocks {child.blocks}", len(key) == cache.block_bytes
            _must(child.parent is node and child.key == key, f"{name} has the wrong parent or key")
            _must(any(child.blocks) or bool(child.children), f"{name} stands for nothing")
            _must(full or not (child.children or NULL_BLOCK in child.blocks), f"{name} is no leaf with all its parts")
            _must(0 < len(key) <= cache.block_bytes and len(key) % KEY_BYTES == 0, f"{name} has a bad key")
            for number, group in enumerate(kv.groups):
                _check_part(group, child.blocks[number], node.blocks[number] if node.parent else None, child)
            seen += sum(block != NULL_BLOCK for block in child.blocks)
            stack.append(child)
    cached = sum(len(group.cached) for group in kv.groups)
    _must(seen == cached, f"the tree has {seen} blocks and the groups know of {cached}")


def _check_part(group: KVGroup, block: int, above: int | None, node: Node) -> None:
    """One group's part of a node; `above` is its parent's, None if that is the root."""
    _must(
        block == NULL_BLOCK or group.cached.get(block) is node, f"the group does not know that block {block} is cached"
    )
    if group.keeps_all:
        _must(block != NULL_BLOCK and above != NULL_BLOCK, f"block {block} is cached, and {above} before it is not")
        if above is not None:
            held, held_above = group.pool.ref_counts[block], group.pool.ref_counts[above]
            _must(held_above >= held, f"block {block} is held {held} times, its parent {held_above} times")


def _check_tables(kv: KVManager, running: list[Request]) -> None:
    """Tables, one writer."""
    for request in running:
        blocks, lengths = kv.blocks_for(request.num_computed), [len(table) for table in request.tables]
        _must(set(lengths) == {blocks}, f"request {request.id}: {lengths} blocks, {blocks} needed")
        _must(
            request.num_committed <= request.num_computed - request.num_unverified_tokens,
            f"request {request.id}: {request.num_committed} positions have committed, {request.num_computed} are "
            f"computed at most, and {request.num_unverified_tokens} of them may not be",
        )
        certain = request.num_computed - request.num_unverified_tokens
        for group, table in zip(kv.groups, request.tables, strict=True):
            _must(all(0 <= b < group.pool.num_blocks for b in table), f"request {request.id}: {table} leaves the pool")
            seen = table[group.retention.first_seen(certain) // kv.block_size :]
            _must(NULL_BLOCK not in seen, f"request {request.id}: its window lost what it sees: {table}")
            for block in table[certain // kv.block_size :]:
                count = group.pool.ref_counts[block]
                _must(count == 1, f"request {request.id} may write block {block}, which has {count} holders")
