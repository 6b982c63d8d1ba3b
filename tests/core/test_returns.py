"""How likely blocks are to come back that leave the pool."""

from __future__ import annotations

import random

import pytest

from quire.kv.tiers.returns import REMEMBERED, Returns


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 1.0])
def test_the_odds_are_the_share_of_blocks_that_come_back(share: float) -> None:
    rnd, returns, names = random.Random(3), Returns(pool=200, reach=1000), list[bytes]()
    for number in range(4000):
        names.append(number.to_bytes(4, "little"))
        assert not returns.left(names[-1])
        if len(names) > 300 and rnd.random() < share:
            returns.came(names[-300])
    assert returns.odds == pytest.approx(share, abs=0.1)


def test_a_block_counts_once_and_only_if_a_tier_would_still_have_it() -> None:
    returns = Returns(pool=2, reach=3)
    for name in (b"a", b"b", b"c", b"d"):
        returns.left(name)
    odds = returns.odds
    returns.came(b"a")
    returns.came(b"never here")
    assert returns.odds == odds, "three have left since"
    returns.came(b"b")
    assert returns.odds == odds + 1 / 2
    assert returns.left(b"b") and returns.left(b"a")
    returns.came(b"b")
    assert returns.odds == odds + 1 / 2


def test_the_oldest_are_forgotten() -> None:
    returns = Returns(pool=2, reach=3)
    for number in range(REMEMBERED + 1):
        returns.left(number.to_bytes(4, "little"))
    assert returns.left(bytes([1, 0, 0, 0])) and not returns.left(bytes(4))
