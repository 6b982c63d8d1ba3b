"""The least time of a step: what it must read and compute, over what the device was measured to do.

    least seconds = max(bytes / copy bandwidth, operations / matmul rate)

**Bytes** of a step, each counted once however often a kernel reads it:
- the weights of all layers and the last norm; the head's only where a token is sampled. Of an embedding table only a
  row a token is read, which is not counted (a tied table is read as the head);
- the keys and values of each span's context, all layers: positions 0 to start + rows, or as far back as a window sees;
- the keys and values that the step stores.

Activations are not counted: kernels that were fused without end would keep them on the chip.

**Operations**: a multiplication and its addition are two.
- 2 for each number of the layers' weights and each row;
- 2 for each number of the head and each sampled row;
- attention: 4 * heads * head_dim for each pair of a row and a position that it sees, in each layer (2 for the score, 2
  for the weighted sum; the softmax itself is not counted).

A workload's bound is the sum over the steps that ran, so it holds for the schedule that there was. A better schedule
(fewer steps, so fewer times the weights) would have a lower one: shares are of what the steps could have taken.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from quire.bench.ceilings import Cost, Work
from quire.core.step import Span


class Rates(NamedTuple):
    """What the device does at best, as measured: bytes (read + written) and operations a second."""

    copy: float
    matmul: float


def step_cost(work: Work, spans: Iterable[Span]) -> Cost:
    """What a step with these spans cannot do without."""
    num_bytes, products, attention, sampled, tokens = 0, 0, 0, 0, 0
    for span in spans:
        rows = len(span.tokens)
        for window in work.windows:
            num_bytes += work.kv_bytes * (_reach(span.start, rows, window) + rows)
            attention += work.attention_ops * _pairs(span.start, rows, window)
        products += 2 * rows * work.body_parameters
        sampled += span.num_sampled
        tokens += rows
    products += 2 * sampled * work.head_parameters
    head_share = work.head_parameters / (work.head_parameters + work.body_parameters)
    weights = work.weights_read(tokens) * (1.0 if sampled else 1.0 - head_share)
    return Cost(round(weights) + num_bytes, products, attention)


def seconds(cost: Cost, rates: Rates) -> float:
    """The least time that the device needs for it."""
    return max(cost.num_bytes / rates.copy, (cost.products + cost.attention) / rates.matmul)


def limit(cost: Cost, rates: Rates) -> str:
    """Which of the two it is: "memory" or "compute"."""
    return "memory" if cost.num_bytes / rates.copy >= (cost.products + cost.attention) / rates.matmul else "compute"


def _reach(start: int, rows: int, window: int | None) -> int:
    """Positions that at least one of the rows sees."""
    end = start + rows
    return end if window is None else min(end, window + rows - 1)


def _pairs(start: int, rows: int, window: int | None) -> int:
    """Pairs of a row and a position that it sees, itself included."""
    first, last = start + 1, start + rows  # what the first and the last row see without a window
    if window is None or last <= window:
        return (first + last) * rows // 2
    below = max(0, window - first)  # rows that see less than the window
    return (2 * first + below - 1) * below // 2 + (rows - below) * window
