"""What must always hold, by name; `check` looks at what can be seen between two calls of the scheduler, and
`check_invariants` has it run after every step. Tests say by these names what they are about.

Blocks
    one place       A block is free, or cached without a holder, or held; never two of these, never none.
    counts          Its count is the number of its holders: tables of running requests, copies to come, handles
                    of steps in flight and of whoever reads it from outside.
    free list       It is on the free list, once, exactly when it has no holder and is not cached.
    one release     Whoever holds it lets go of it once.
    one writer      A block that may be written has one holder, and a full one never changes.
    tables          A request's table covers exactly the tokens that are computed, in flight and scheduled; what a
                    sliding window has passed is the null block.

Prefix caches
    equal tokens    Requests share a block only if their scope and every token up to the block's end are equal.
    tree            A node's children differ, each is a whole block unless it is a leaf, the path to it is its prefix,
                    and whoever holds it holds its parent.
    lock first      What was matched is held before anything is allocated in the same step.
    clean blocks    Only blocks whose steps have committed, and without error, are shared. A partly filled one is
                    published when its request has finished, and copied to be used. The oldest idle leaf goes first.
    last token      A prompt that is cached as a whole computes at least its last token.

Scheduler
    progress        While there is work, a request finishes, gets further than ever, or fails, within a bounded number
                    of steps.
    fits alone      A request that could not run alone is refused when it comes.
    holders first   Among equals in priority, who holds blocks does not wait behind who holds none.
    budgets         No step has more tokens or requests than it may.
    resumption      A request that was preempted goes on with the tokens that it would have had.
    no starvation   Every request is served in the end, in the order of (priority, turn, arrival).

Requests
    one end         Each that was accepted ends once, with its tokens in order, none missing, none after the end;
                    usage counts what was handed out.
    abort           Wherever a request stands when it is aborted, its blocks come back, and what comes late changes
                    nothing.
    slow readers    What waits for a slow reader is bounded, and slows that reader alone.
    drained         When all have ended, no block, task, socket, shared memory or temporary file is left.

Numbers
    same bits       Tokens and log-probabilities do not depend on batch, arrival, chunks, caches, preemption, overlap
                    or speculation.
    sound numbers   A sampled id is in the vocabulary and allowed; where logits are not finite that request alone
                    fails.
    verification    Drafts leave the output as it is (or, with `speculative_acceptance="rejection"`, its
                    distribution).
"""

from __future__ import annotations

from collections import Counter

from quire.core.block_pool import NULL_BLOCK
from quire.core.kv_manager import KVManager
from quire.core.prefix_cache import KEY_BYTES, Node
from quire.core.request import Request, Status
from quire.core.scheduler import Scheduler


class InvariantError(AssertionError):
    """The book-keeping contradicts itself: a bug in Quire."""


def check(scheduler: Scheduler) -> None:
    """Compare the scheduler's and the pool's books with what they are derived from.

    Raises:
        InvariantError: naming the rule and the values.
    """
    kv = scheduler.kv
    _check_blocks(kv, scheduler.running)
    _check_tree(kv)
    _check_tables(kv, scheduler.running)
    orders = [request.order for request in scheduler.running]
    _must(orders == sorted(orders), f"running requests are out of order: {orders}")
    _must(len(orders) <= scheduler.config.max_num_seqs, f"{len(orders)} requests run")
    for request in scheduler.requests.values():
        if request.status is not Status.RUNNING:
            _must(not request.table, f"request {request.id} is {request.status.value} and holds {request.table}")


def _must(holds: bool, message: str) -> None:
    if not holds:
        raise InvariantError(message)


def _check_blocks(kv: KVManager, running: list[Request]) -> None:
    """One place, counts, free list, one release."""
    pool, cache = kv.pool, kv.cache
    holders: Counter[int] = Counter()
    for request in running:
        holders.update(block for block in request.table if block != NULL_BLOCK)
        holders.update(source for source, _, _ in request.copies)
    holders.update(kv.held)
    for block in range(1, pool.num_blocks):
        count = pool.ref_counts[block]
        _must(count == holders[block], f"block {block} counts {count} holders and has {holders[block]}")
    free = pool.free_blocks
    free_set = set(free)
    _must(len(free_set) == len(free) and NULL_BLOCK not in free_set, f"a block is free twice, or null is: {free}")
    for block in range(1, pool.num_blocks):
        idle = pool.ref_counts[block] == 0 and block not in cache.nodes
        _must(idle == (block in free_set), f"block {block}: idle and uncached is {idle}, free is {not idle}")
    num_idle = sum(pool.ref_counts[block] == 0 for block in cache.nodes)
    _must(cache.num_idle == num_idle, f"the cache counts {cache.num_idle} idle blocks and has {num_idle}")
    _must(pool.double_releases == 0, f"{pool.double_releases} blocks were released twice")
    _must(pool.stale_handles == 0, f"{pool.stale_handles} handles were of blocks that had been handed out again")
    counted, held = kv.num_held.total(), sum(1 for _ in kv.held)
    _must(counted == held, f"{counted} blocks are counted as held beside the requests, and {held} are")


def _check_tree(kv: KVManager) -> None:
    """Tree: children differ, keys are whole blocks (or leaves), parents are held at least as often."""
    pool, cache = kv.pool, kv.cache
    seen: set[int] = set()
    stack: list[Node] = list(cache.roots.values())
    while stack:
        node = stack.pop()
        _must(node.parent is not None or bool(node.children), f"the root of scope {node.scope!r} has no children")
        _must(node.attached, f"block {node.block} is in the tree and detached")
        _must(node.order == sorted(node.children), f"children of block {node.block} are not sorted")
        for key, child in node.children.items():
            _must(child.parent is node and child.key == key, f"block {child.block} has the wrong parent or key")
            _must(child.block not in seen and cache.nodes.get(child.block) is child, f"block {child.block} twice")
            _must(
                len(key) == cache.block_bytes or not child.children, f"partly filled block {child.block} has children"
            )
            _must(0 < len(key) <= cache.block_bytes and len(key) % KEY_BYTES == 0, f"block {child.block}: bad key")
            if node.parent is not None and kv.window is None:
                held, above = pool.ref_counts[child.block], pool.ref_counts[node.block]
                _must(above >= held, f"block {child.block} is held {held} times, its parent {above} times")
            seen.add(child.block)
            stack.append(child)
    _must(seen == set(cache.nodes), "the tree and the index hold different blocks")


def _check_tables(kv: KVManager, running: list[Request]) -> None:
    """Tables, one writer."""
    for request in running:
        blocks = kv.blocks_for(request.num_computed)
        _must(len(request.table) == blocks, f"request {request.id}: {len(request.table)} blocks, {blocks} needed")
        _must(
            request.num_committed <= request.num_computed - request.num_unverified_tokens,
            f"request {request.id}: {request.num_committed} positions have committed, {request.num_computed} are "
            f"computed at most, and {request.num_unverified_tokens} of them may not be",
        )
        _must(
            all(0 <= b < kv.pool.num_blocks for b in request.table), f"request {request.id}: a block is not in the pool"
        )
        certain = request.num_computed - request.num_unverified_tokens
        for block in request.table[certain // kv.block_size :]:
            count = kv.pool.ref_counts[block]
            _must(count == 1, f"request {request.id} may write block {block}, which has {count} holders")
