"""The invariants of requests and numbers, and resumption (`quire.core.invariants`), on random engines and requests;
`fuzz_engine.py` draws and compares."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fuzz_engine import NUMBERS, SWITCHES, Fuzz

QUICK, LONG = (2, 3, 4, 6, 9), range(300)
"""Seeds, of some 25 requests each. The quick ones meet all that may happen to a request, at the least cost."""


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzz]:
    fuzz = Fuzz(tmp_path_factory.mktemp("models"))
    yield fuzz
    fuzz.close()


def test_every_request_gets_what_it_gets_alone(fuzz: Fuzz) -> None:
    before = fuzz.seen.copy()
    for seed in QUICK:
        fuzz.check(seed)
    met(fuzz.seen - before, len(QUICK))


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_request_gets_what_it_gets_alone_for_long(fuzz: Fuzz) -> None:
    before = fuzz.seen.copy()
    for seed in LONG:
        fuzz.check(seed)
    met(fuzz.seen - before, len(LONG))
    assert fuzz.seen["loaded from host"] - before["loaded from host"] > 10, "hardly any block came from the host tier"


def met(seen: dict[str, int], seeds: int) -> None:
    """A run in which requests did not get in each other's way would show nothing."""
    assert seen["requests"] > 20 * seeds, seen
    for what in ("preempted", "awaiting", "aborted", "partial prefill"):
        assert seen[what] > seeds, (what, seen)
    for what in ("cached tokens", "drafted", "accepted"):
        assert seen[what] > 5 * seeds, (what, seen)


def test_a_seed_draws_the_same_again_and_covers_all_dimensions(fuzz: Fuzz) -> None:
    assert fuzz.draw(3) == fuzz.draw(3)
    cases = [fuzz.draw(seed) for seed in range(100)]
    for dimensions, drawn in ((NUMBERS, "numbers"), (SWITCHES, "switches")):
        for choices in dimensions.values():
            for options in choices:
                assert any(options.items() <= getattr(case, drawn).items() for case in cases), options
