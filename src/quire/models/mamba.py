"""What families with Mamba 2 layers have in common: which layers these are, and the layout of their `in_proj`."""

from __future__ import annotations

import math
from collections.abc import Mapping

from quire.layers.mamba import MambaConfig
from quire.models.config import MAX_HEADS
from quire.models.fields import Fields

MAMBA, ATTENTION = "linear_attention", "full_attention"
OLDER = {"mamba": MAMBA, "attention": ATTENTION}
"""Names of kinds of layers in older checkpoints."""
MAX_TAPS = 16
Joined = tuple[str, tuple[tuple[str, int], ...]]


def read_kinds(fields: Fields, name: str, kinds: list[str], count: int, others: Mapping[str, str]) -> list[str]:
    """Of each layer: `MAMBA`, `ATTENTION`, or one of `others`; raises ModelConfigError.

    Args:
        name: of the field that says so. kinds: what it says.
        count: of layers. others: further kinds, by their names in the field.
    """
    known = {MAMBA: MAMBA, ATTENTION: ATTENTION, **OLDER, **others}
    if len(kinds) != count or not {*kinds} <= {*known}:
        raise fields.error(name, f"{count} of {', '.join(map(repr, sorted(known)))}")
    found = [known[kind] for kind in kinds]
    if ATTENTION not in found:
        raise fields.error(name, "such that at least one is attention")
    return found


def refuse_limits(fields: Fields) -> None:
    """Raises ModelConfigError where steps (dt) are to be clamped."""
    infinity = {"__float__": "Infinity"}  # as transformers writes it
    allowed = ([0.0, math.inf], [0, math.inf], [0.0, infinity], [0, infinity])
    fields.refuse("time_step_limit", allowed, "steps of state-space layers that are clamped")


def heads_of(fields: Fields, name: str, groups: str, default_groups: int) -> tuple[int, int]:
    """How many heads, and groups of them, there are; raises ModelConfigError."""
    heads = fields.integer(name, default=128, max=MAX_HEADS)
    count = fields.integer(groups, default=default_groups, max=MAX_HEADS)
    if heads % count:
        raise fields.error(name, f"a multiple of {groups} ({count})")
    return heads, count


def joined(mamba: MambaConfig | None) -> tuple[Joined, ...]:
    """For `Layout.joined`."""
    return () if mamba is None else (("mamba.in_proj", mamba.projections),)
