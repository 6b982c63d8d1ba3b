"""Paged KV: slots that are allocated and not used, against reserving the longest context for every request.

The scheduler and its block tables run as they do in an engine; no model does, since which blocks are held does
not depend on what is computed. After every step the slots held by all running requests are compared with the
positions that they have computed.
"""

from __future__ import annotations

import random

from benchmarks.common import Options, Result, main, tell, tokens
from benchmarks.scheduler import answer, make_request
from quire.config import EngineConfig
from quire.core.block_hash import BlockHasher
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.scheduler import Scheduler

REQUESTS, LONGEST = 400, 4096


def run(options: Options) -> Result:
    result = Result(("KV", "slots held, mean", "of them used", "wasted"))
    for block_size in (16, 32, 64):
        tell(f"KV waste: blocks of {block_size}")
        held, used, reserved, steps = _measure(block_size, 20 if options.quick else REQUESTS)
        _row(result, f"paged, blocks of {block_size}", held, used, steps)
    _row(result, f"reserved, {LONGEST:,} a request", reserved, used, steps)
    return result


def _row(result: Result, name: str, held: int, used: int, steps: int) -> None:
    result.add(
        (name, f"{held / steps:,.0f}", f"{used / steps:,.0f}", f"{1 - used / held:.1%}"),
        kv=name,
        mean_held=held / steps,
        mean_used=used / steps,
    )


def _measure(block_size: int, count: int) -> tuple[int, int, int, int]:
    """Sums over all steps: slots held, positions computed, slots if each request had reserved; and the steps."""
    config = EngineConfig(model="none", block_size=block_size, prefix_cache="off")
    kv = KVManager([KVGroup(1 << 16)], block_size, "off", BlockHasher(bytes(32), "benchmark"))
    scheduler = Scheduler(config, kv, LONGEST)
    generator = random.Random(0)
    for number in range(count):
        prompt = min(LONGEST // 2, 8 + int(generator.lognormvariate(5.5, 1.0)))
        output = min(LONGEST // 2, 8 + int(generator.lognormvariate(5.0, 1.0)))
        scheduler.add(make_request(number, tokens(generator, prompt), output))
    held = used = reserved = steps = 0
    while not scheduler.idle:
        plan = scheduler.schedule(0.0)
        scheduler.commit(plan, answer(plan), 0.0)
        held += block_size * sum(len(request.tables[0]) for request in scheduler.running)
        used += sum(request.num_computed for request in scheduler.running)
        reserved += LONGEST * len(scheduler.running)
        steps += 1
    return held, used, reserved, steps


if __name__ == "__main__":
    main(run)
