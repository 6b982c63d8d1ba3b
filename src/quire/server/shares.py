"""A limit that several owners share, so that none of them can shut the others out."""

from __future__ import annotations


class Shares:
    """A limit on what may be held at once, first come, first served, of which each owner has a guaranteed share.

    With k owners that hold something, each has a share of `limit / k`. An owner may always take up to its share, and
    beyond it whatever room the whole limit has. So a single owner may take everything, and a newcomer still gets its
    share: what is held may exceed the limit, up to `limit * (1 + 1/2 + ... + 1/k)`. An owner that holds nothing may
    always take something; otherwise something larger than a share could never be admitted.

    Attributes:
        limit: how much may be held, in any unit.
        total: how much is held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[str, int] = {}

    def held_by(self, owner: str) -> int:
        """How much this owner holds."""
        return self._held.get(owner, 0)

    def num_owners(self, owner: str) -> int:
        """Owners that hold something, including this one in any case."""
        return len(self._held) + (owner not in self._held)

    def share_of(self, owner: str) -> int:
        """How much this owner may hold whatever others do."""
        return self.limit // self.num_owners(owner)

    def fits(self, owner: str, amount: int) -> bool:
        """Whether this owner may take this much more."""
        held = self.held_by(owner)
        return not held or self.total + amount <= self.limit or held + amount <= self.share_of(owner)

    def change(self, owner: str, amount: int) -> None:
        """Change what this owner holds; negative to give back."""
        self.total += amount
        held = self._held.pop(owner, 0) + amount
        if held:
            self._held[owner] = held
