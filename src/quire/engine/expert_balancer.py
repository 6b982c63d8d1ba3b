"""Decides when experts move between ranks (EPLB), and puts moves into the plans of steps."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from quire.core.expert_balance import balance, imbalance
from quire.core.step import ExpertMove, StepPlan
from quire.layers.experts import first_slots
from quire.models.model import Model
from quire.runner.expert_mover import Prepared

logger = logging.getLogger(__name__)

WORTH = 0.95
"""A layer's experts are moved only if the imbalance shrinks at least to this share."""


AHEAD = 2
"""How many steps before a look stages exchange their experts' loads, so that the exchange has certainly ended by
then."""


@dataclass(slots=True)
class MoveStats:
    """Moves since the engine started.

    Attributes:
        expert_moves: layers whose experts were moved.
        experts_moved: experts that ranks had to read.
        expert_bytes_moved: their bytes.
        expert_move_seconds: time from the decision for the last move until it was in use.
        expert_read_seconds: time the slowest rank took to read its new experts in the last move.
        imbalance_before, imbalance_after: load of the busiest rank over the mean, before and after the last move.
    """

    expert_moves: int = 0
    experts_moved: int = 0
    expert_bytes_moved: int = 0
    expert_move_seconds: float = 0.0
    expert_read_seconds: float = 0.0
    imbalance_before: float = 0.0
    imbalance_after: float = 0.0


class ExpertBalancer:
    """Compares the experts' loads every `interval` steps, and moves experts, one layer at a time.

    Ranks read their new experts while steps go on; once all have read them, all use them from the same step on. In a
    pipeline the ranks of each stage share its experts, and stages exchange their loads shortly before a comparison.

    Args:
        model: the first rank's.
        prepared: each rank's last message; another thread writes it.
        interval: steps between comparisons; 0: experts are never moved.
    """

    def __init__(self, model: Model, prepared: Sequence[Prepared | None], interval: int) -> None:
        self._model, self._prepared, self._interval = model, prepared, interval
        self._ranks = model.ranks.size // model.stages
        self._experts = routing.num_experts if (routing := model.config.routing) else 1
        self._seen = self._loads()
        self._slots = dict.fromkeys(self._seen, first_slots(self._experts, model.expert_slots))  # by layer
        self._version = self._steps = 0
        self._next_number: int | None = None  # number of the next plan, unless steps are given up
        self._queue: list[tuple[int, list[int]]] = []  # layers to consider, with their loads
        self._move: ExpertMove | None = None
        self._began = 0.0  # when the current move was decided
        self._stats = MoveStats()

    def plan(self, plan: StepPlan, now: float) -> None:
        """Add moves to the plan of a step that is about to run."""
        gap, self._next_number = plan.number != self._next_number, plan.number + 1
        self._steps += 1
        if self._interval and not self._queue and self._move is None and self._steps % self._interval == 0:
            self._look()
        plan.expert_loads = self._interval > 0 and (self._steps + AHEAD) % self._interval == 0
        if self._move is None and self._queue:
            self._move = self._decided(*self._queue.pop(0))
            if self._move is not None:
                self._began, gap = now, True
        if self._move is not None:
            if gap:
                plan.expert_move = self._move  # again, if a step that brought it may have been lost
            self._carry_on(self._move, now)
        plan.expert_version = self._version

    def stats(self) -> dict[str, Any]:
        """Counters, and the imbalance of ranks with the current placement and recent loads."""
        lately = zip(self._loads().values(), self._seen.values(), self._slots.values(), strict=True)
        uneven = [imbalance((now - then).tolist(), slots, self._ranks) for now, then, slots in lately]
        return asdict(self._stats) | {"rank_imbalance": max(uneven, default=1.0)}

    def _loads(self) -> dict[int, torch.Tensor]:
        return {number: load.clone() for number, load in self._model.expert_loads.items()}

    def _look(self) -> None:
        loads = self._loads()
        self._queue = [(number, (load - self._seen[number]).tolist()) for number, load in loads.items()]
        self._seen = loads

    def _decided(self, layer: int, loads: Sequence[int]) -> ExpertMove | None:
        """The move of this layer's experts, if it is worth it."""
        before = self._slots[layer]
        after = balance(loads, len(before), self._ranks, before=before)
        ratios = imbalance(loads, before, self._ranks), imbalance(loads, after, self._ranks)
        if ratios[1] > WORTH * ratios[0]:
            return None
        self._stats.imbalance_before, self._stats.imbalance_after = ratios
        return ExpertMove(self._version + 1, layer, list(after))

    def _carry_on(self, move: ExpertMove, now: float) -> None:
        """Use the current move once all ranks are prepared."""
        said = [prepared for prepared in self._prepared if prepared is not None and prepared.version == move.version]
        error = next((prepared.error for prepared in said if prepared.error), "")
        if error:
            logger.error("experts stay where they are from now on, since a rank cannot read them: %s", error)
            self._move, self._queue, self._interval = None, [], 0
        elif len(said) == len(self._prepared):
            self._count(move, now - self._began, max(prepared.seconds for prepared in said))
            self._slots[move.layer] = tuple(move.slots)
            self._version, self._move = move.version, None

    def _count(self, move: ExpertMove, seconds: float, reading: float) -> None:
        before, stats, each = self._slots[move.layer], self._stats, len(move.slots) // self._ranks
        parts = [(Counter(s[r * each : (r + 1) * each]) for s in (move.slots, before)) for r in range(self._ranks)]
        read = sum(len(new.keys() - old.keys()) for new, old in parts)
        experts = len(self._slots) * self._experts
        stats.expert_moves += 1
        stats.experts_moved += read
        stats.expert_bytes_moved += read * (self._model.expert_parameters * self._model.dtype.itemsize // experts)
        stats.expert_move_seconds, stats.expert_read_seconds = seconds, reading
        logger.info(
            "experts of layer %d move: the busiest of %d ranks had %.2f times the mean to do, and has %.2f times "
            "(%d experts read in %.2f s, in use after %.2f s)",
            *(move.layer, self._ranks, stats.imbalance_before, stats.imbalance_after, read, reading, seconds),
        )
