"""Records an engine's last steps and requests, for the live view.

Recording costs little: a few numbers for each of the first spans of a step, and never the tokens. Documents are JSON,
made on request; times are seconds on this machine's monotonic clock.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quire.core.block_pool import NULL_BLOCK
from quire.core.kv_group import KVGroup
from quire.core.kv_manager import KVManager
from quire.core.lockstep import Lockstep
from quire.core.prefix_cache import KEY_BYTES
from quire.core.prefix_node import Node
from quire.core.request import Request, RequestUpdate, Status
from quire.core.scheduler import Scheduler
from quire.core.step import Span, SpanResult, StepPlan, StepResult
from quire.log import prompt_origins
from quire.speculative_config import SpeculativeConfig

if TYPE_CHECKING:
    from quire.engine.engine import Engine

KEPT_STEPS = 256
KEPT_FINISHED = 64
MAX_SPANS = 64
MAX_REQUESTS = 256
MAX_CELLS = 8192
MAX_TREE_NODES = 400
MAX_VISITED = 20_000
FREE, IDLE = 1, 2
LETTERS = np.frombuffer(b"-fc123456789", dtype=np.uint8)
LOOK_INTERVAL = 0.4
"""How long a picture of the pool and the tree is reused, in seconds: making one takes a few milliseconds between two
steps."""


@dataclass(slots=True)
class Record:
    """One choice of a request, for the live view.

    Attributes:
        name: the id that the client sees. number: its number in `ipc/wire.py`.
        match_seconds: duration of the `schedule` call that admitted it, in which its prompt was matched.
        computed: position after the last computed token, without rejected drafts.
        chunks: the last chunks of its prompt: (begin, seconds of the step, tokens).
    """

    name: str
    number: int
    choice: int
    tokenize_seconds: float
    detokenize_seconds: float | None = None
    match_seconds: float | None = None
    computed: int = 0
    chunks: deque[tuple[float, float, int]] = field(default_factory=lambda: deque(maxlen=MAX_SPANS))


@dataclass(slots=True)
class _Step:
    """A step that ran.

    Attributes:
        tokens: computed tokens, including drafts.
        drafted, accepted: verified drafts, and those accepted.
        spans: the first `MAX_SPANS`: the record, first position, tokens computed, tokens sampled, and drafts.
    """

    number: int
    begin: float
    seconds: float
    schedule_seconds: float
    tokens: int
    drafted: int
    accepted: int
    spans: list[tuple[Record, int, int, int, int]]


class Recorder:
    """Records requests and steps, and makes documents from them."""

    def __init__(self) -> None:
        self.records: dict[int, Record] = {}  # by the engine's number, open requests
        self.reasons = {"finished": 0, "aborted": 0, "failed": 0}
        self._steps: deque[_Step] = deque(maxlen=KEPT_STEPS)
        self._planned: deque[tuple[float, float]] = deque()
        self._finished: deque[tuple[Record, dict[str, Any]]] = deque(maxlen=KEPT_FINISHED)
        self._begin = time.monotonic()
        self._looked: tuple[float, dict[str, Any]] = (-1e9, {})

    # -- recording -----------------------------------------------------------------------------------------

    def planned(self, plan: StepPlan, begin: float, seconds: float) -> None:
        """A step is about to run; scheduling it began at `begin` and took `seconds`."""
        self._planned.append((begin, seconds))
        for info in plan.started:
            record = self.records[info.request]
            record.match_seconds = seconds if record.match_seconds is None else record.match_seconds

    def committed(self, plan: StepPlan, result: StepResult, prompts: dict[int, Request]) -> None:
        """Record a step; `prompts` are the open requests by the engine's number, including those that it ended."""
        begin, seconds = self._planned.popleft()
        spans: list[tuple[Record, int, int, int, int]] = []
        tokens = drafted = accepted = 0
        for span, outcome in zip(plan.spans, result.spans, strict=True):
            computed, sampled = num_computed(span, outcome), len(outcome.tokens)
            tokens += computed
            if outcome.num_drafted:
                drafted, accepted = drafted + outcome.num_drafted, accepted + sampled - 1
            record = self.records.get(span.request)
            if record is None:
                continue  # it ended while the step ran
            start = min(span.start, record.computed) if span.start_follows else span.start
            record.computed = start + len(span.tokens) - span.num_sampled + sampled
            if len(spans) < MAX_SPANS:
                spans.append((record, start, computed, sampled, outcome.num_drafted))
            if start < prompts[span.request].num_prompt:
                record.chunks.append((begin + seconds, result.seconds, computed))
        self._steps.append(_Step(plan.number, begin, result.seconds, seconds, tokens, drafted, accepted, spans))

    def given_up(self) -> None:
        """The steps in flight will not commit."""
        self._planned.clear()

    def ended(self, request: Request, update: RequestUpdate) -> None:
        """Record the end of a request."""
        record = self.records.pop(request.id)
        reason = update.finish_reason or ""
        self.reasons[{"abort": "aborted", "error": "failed"}.get(reason, "finished")] += 1
        self._finished.append((record, _told(record, request, reason)))

    def told(self, number: int, detokenize_seconds: float) -> None:
        """Record the detokenization time of a request, which its HTTP process reports at its end."""
        for record, document in reversed(self._finished):
            if record.number == number:
                record.detokenize_seconds = document["detokenize_seconds"] = detokenize_seconds
                return

    # -- documents -------------------------------------------------------------------------------------------

    def stats(self, engine: Engine) -> dict[str, Any]:
        """The engine's counters, the use of the pool, the balance of experts and ranks, and the depth of drafts."""
        kvs = engine.scheduler.kvs
        groups = [group for kv in kvs for group in kv.groups]
        return (
            asdict(engine.stats)
            | self.reasons
            | {
                "pid": os.getpid(),
                "free_blocks": sum(group.pool.num_free for group in groups),
                "cached_blocks": sum(len(group.cached) for group in groups),
                "held_blocks": sum(kv.num_usable - kv.num_available for kv in kvs),
                "kv_use": max(kv.use for kv in kvs),
            }
            | _expert_load(engine.model.expert_loads)
            | engine.rank_stats()
            | _draft_depth(engine.config.speculation)
        )

    def document(self, engine: Engine, what: str, since: int = 0) -> bytes:
        """One of the documents "live", "requests", "steps" and "stats"."""
        now = time.monotonic()
        if what == "stats":
            tokens = {str(layer): load.tolist() for layer, load in engine.model.expert_loads.items()}
            return msgspec.json.encode(self.stats(engine) | ({"expert_tokens": tokens} if tokens else {}))
        if what == "requests":
            return msgspec.json.encode({"now": now, "requests": self._requests(engine.scheduler, now)})
        if what == "steps":
            return msgspec.json.encode({"now": now, "steps": list(self._step_documents(since))})
        return msgspec.json.encode(
            {
                "now": now,
                "uptime": now - self._begin,
                "max_num_seqs": engine.config.max_num_seqs,
                "max_num_batched_tokens": engine.config.max_num_batched_tokens,
                "stats": self.stats(engine),
                "requests": self._requests(engine.scheduler, now),
                "steps": list(self._step_documents(since)),
                "finished": [document for _, document in self._finished],
            }
            | self._pool_and_tree(engine.scheduler.kvs, now)
        )

    def life(self, engine: Engine, name: str) -> list[dict[str, Any]]:
        """How the time of each choice of a response was spent; empty if it is not remembered."""
        open_requests = engine.scheduler.requests
        now = [(record, open_requests[number]) for number, record in self.records.items() if record.name == name]
        return [document for record, document in self._finished if record.name == name] + [
            _told(record, request, "") for record, request in now
        ]

    def _requests(self, scheduler: Scheduler | Lockstep, now: float) -> list[dict[str, Any]]:
        """Running requests, then waiting ones, each in the order of the queue."""
        shown = scheduler.running[:MAX_REQUESTS]
        waiting = (request for request in scheduler.requests.values() if request.status is not Status.RUNNING)
        return [self._request(request, now) for request in (*shown, *islice(waiting, MAX_REQUESTS - len(shown)))]

    def _request(self, request: Request, now: float) -> dict[str, Any]:
        record = self.records[request.id]
        return {
            "id": record.name,
            "choice": record.choice,
            "status": request.status.value,
            "prompt": request.num_prompt,
            "cached": request.num_cached,
            "computed": request.num_computed,
            "output": len(request.tokens) - request.num_prompt,
            "max_tokens": request.max_tokens,
            "blocks": sum(len(table) - table.count(NULL_BLOCK) for table in request.tables),
            "age": now - request.stats.arrived,
            "priority": request.order[0],
            "preemptions": request.stats.preemptions,
            "drafted": request.stats.drafted,
            "accepted": request.stats.accepted,
            **_fetched(request),
        }

    def _step_documents(self, since: int) -> Iterator[dict[str, Any]]:
        for step in self._steps:
            if step.number >= since:
                yield {
                    "number": step.number,
                    "begin": step.begin,
                    "seconds": step.seconds,
                    "schedule_seconds": step.schedule_seconds,
                    "tokens": step.tokens,
                    "drafted": step.drafted,
                    "accepted": step.accepted,
                    "spans": [(record.name, record.choice, *rest) for record, *rest in step.spans],
                }

    def _pool_and_tree(self, kvs: Sequence[KVManager], now: float) -> dict[str, Any]:
        made, document = self._looked
        if now - made > LOOK_INTERVAL:
            document = {"kv": _pool(kvs), "tree": _tree(kvs)}
            self._looked = (now, document)
        return document


def num_computed(span: Span, outcome: SpanResult) -> int:
    """Tokens of a span that were computed, without places for drafts that were not proposed."""
    return len(span.tokens) - max(0, span.num_sampled - 1 - outcome.num_drafted)


def _draft_depth(config: SpeculativeConfig | None) -> dict[str, Any]:
    """The maximum number of drafts that one verification may accept; empty without speculation."""
    if config is None:
        return {}
    most = config.num_speculative_tokens
    return {"draft_depth": min(most, config.tree_depth) if config.tree_width > 1 else most}


def _expert_load(loads: Mapping[int, Tensor]) -> dict[str, Any]:
    """The largest load of an expert over the mean, for all layers and for each with experts; empty before any token."""
    layers = {str(layer): load.tolist() for layer, load in loads.items()}
    if not layers or not all(map(any, layers.values())):
        return {}
    return {
        "expert_load_balance": _balance([tokens for layer in layers.values() for tokens in layer]),
        "expert_load_balance_by_layer": {layer: _balance(load) for layer, load in layers.items()},
    }


def _balance(tokens: Sequence[int]) -> float:
    return max(tokens) * len(tokens) / sum(tokens)


def _told(record: Record, request: Request, reason: str) -> dict[str, Any]:
    """How a request's time was spent."""
    stats = request.stats
    end = stats.finished if stats.finished is not None else stats.arrived
    return {
        "id": record.name,
        "choice": record.choice,
        "reason": reason,
        "prompt": request.num_prompt,
        "cached": request.num_cached,
        "output": len(request.tokens) - request.num_prompt,
        "arrived": stats.arrived,
        "tokenize_seconds": record.tokenize_seconds,
        "queue_seconds": (stats.admitted if stats.admitted is not None else end) - stats.arrived,
        "match_seconds": record.match_seconds,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "detokenize_seconds": None,
        "ttft_seconds": None if stats.first_token is None else stats.first_token - stats.arrived,
        "total_seconds": end - stats.arrived,
        "preemptions": stats.preemptions,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        **_fetched(request),
        "chunks": list(record.chunks),
    }


def _fetched(request: Request) -> dict[str, Any]:
    """Where the prompt's tokens came from, as data and as text."""
    fetches = [asdict(fetch) for fetch in request.stats.fetches]
    return {"fetches": fetches, "origins": prompt_origins(request.num_prompt, request.num_cached, fetches)}


def _pool(kvs: Sequence[KVManager]) -> dict[str, Any]:
    """All pools as one grid of cells: f is free, c cached and unused, a digit the number of holders (9: 9 or more)."""
    groups = [group for kv in kvs for group in kv.groups]
    states = np.concatenate([_states(group) for group in groups])
    per_cell = -(-len(states) // MAX_CELLS)
    padded = np.pad(states, (0, -len(states) % per_cell), constant_values=FREE)
    busiest = padded.reshape(-1, per_cell).max(axis=1)
    return {
        "num_blocks": sum(kv.num_usable for kv in kvs),
        "block_size": kvs[0].block_size,
        "free": sum(group.pool.num_free for group in groups),
        "cached": sum(len(group.idle) for group in groups),
        "held": sum(kv.num_usable - kv.num_available for kv in kvs),
        "blocks_per_cell": per_cell,
        "cells": LETTERS[busiest].tobytes().decode(),
    }


def _states(group: KVGroup) -> NDArray[np.int64]:
    """The state of each usable block of a group."""
    counts = np.asarray(group.pool.ref_counts, dtype=np.int64)
    states = np.where(counts > 0, np.minimum(counts, 9) + 2, FREE)
    states[np.fromiter(group.idle, dtype=np.int64, count=len(group.idle))] = IDLE
    return states[1:]  # block 0 is null


def _tree(kvs: Sequence[KVManager]) -> list[dict[str, Any]]:
    """The prefix trees, with each chain merged into one node, the largest nodes first, parents before children.

    Ids are valid only within this document. `references`: of the group with the most.
    """
    nodes: list[dict[str, Any]] = []
    todo: deque[tuple[Node, int | None, KVManager]] = deque(
        (child, None, kv) for kv in kvs for root in kv.cache.roots.values() for child in root.children.values()
    )
    visited = 0
    while todo and visited < MAX_VISITED and len(nodes) < 4 * MAX_TREE_NODES:
        (node, parent, kv), number = todo.popleft(), len(nodes)
        first, last, blocks, tokens = node, node, 0, 0
        while True:
            blocks += 1
            tokens += len(last.key) // KEY_BYTES
            visited += 1
            if len(last.children) != 1 or visited >= MAX_VISITED:
                break
            [last] = last.children.values()
        nodes.append(
            {
                "id": number,
                "parent": parent,
                "tokens": tokens,
                "blocks": blocks,
                "references": max(
                    group.pool.ref_counts[block] for group, block in zip(kv.groups, first.blocks, strict=True)
                ),
            }
        )
        todo.extend((child, number, kv) for child in last.children.values())
    return _largest(nodes)


def _largest(nodes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The largest nodes, at most `MAX_TREE_NODES`, each with its parent."""
    if len(nodes) <= MAX_TREE_NODES:
        return nodes
    kept: set[int | None] = {None}
    for node in sorted(nodes, key=lambda node: -int(node["blocks"])):
        if len(kept) > MAX_TREE_NODES:
            break
        if node["parent"] in kept:
            kept.add(node["id"])
    return [node for node in nodes if node["id"] in kept]
