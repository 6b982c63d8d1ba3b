"""A bound that several owners share, so that none of them can keep the others out."""

from __future__ import annotations


class Shares:
    """So much may be held at once, by whoever asks first; but no one's share of it can be taken by others.

    With k owners that hold something, the share of each is `limit / k`. What keeps an owner within its share is always
    let in, beyond that only what the whole bound has room for. So one who is alone may take everything, and who comes
    then finds a place all the same: what is held can exceed the bound, up to `limit * (1 + 1/2 + ... + 1/k)`. An owner
    that holds nothing may always take something, or what is larger than a share would never be let in.

    Attributes:
        limit: what may be held, in any unit.
        total: what is held.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.total = 0
        self._held: dict[str, int] = {}

    def held_by(self, owner: str) -> int:
        """What this owner holds."""
        return self._held.get(owner, 0)

    def num_owners(self, owner: str) -> int:
        """Who holds something, this owner counted in any case."""
        return len(self._held) + (owner not in self._held)

    def share_of(self, owner: str) -> int:
        """What this owner may hold whatever others do."""
        return self.limit // self.num_owners(owner)

    def fits(self, owner: str, amount: int) -> bool:
        """Whether this owner may take so much more."""
        held = self.held_by(owner)
        return not held or self.total + amount <= self.limit or held + amount <= self.share_of(owner)

    def change(self, owner: str, amount: int) -> None:
        """This owner takes so much, or gives it back where it is negative."""
        self.total += amount
        held = self._held.pop(owner, 0) + amount
        if held:
            self._held[owner] = held
