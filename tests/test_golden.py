"""A refactoring changes no bit: tokens and log-probabilities of a model of each kind of layer, by their hashes.

Other tests compare ways to compute the same within one version; this one compares versions.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.ops.cpu import library
from tests import golden

SETS = [pytest.param(isa, marks=pytest.mark.slow if place else ()) for place, isa in enumerate(library.usable())]


@pytest.mark.parametrize("isa", SETS)
def test_no_bit_has_changed(isa: str, tmp_path: Path) -> None:
    models, hashes = golden.read()
    if isa not in hashes:
        pytest.skip(f"{isa} has no hashes yet: python -m tests.golden --write")
    found = golden.measure(isa, models, tmp_path)
    changed = [kind for kind in found if found[kind] != hashes[isa].get(kind)]
    assert not changed, "if they were meant to change: python -m tests.golden --write"
