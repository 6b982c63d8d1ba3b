"""Self-tuned speculation makes at least 0.95 of the better of plain and always as many drafts, on recorded drafts.

In every row of the table in benchmarks/README.md that has the demo model: what its drafters were accepted at each
position, and what steps took, were recorded; see `recorded_speculation`.
"""

from __future__ import annotations

import pytest

from tests.core.recorded_speculation import SPECS, Recorded, Tuned, fixed, table


@pytest.mark.scale
@pytest.mark.parametrize("drafter", SPECS)
def test_self_tuned_is_nearly_the_better_of_plain_and_always_in_each_row(drafter: str) -> None:
    for row, (plain, always, tuned) in table(drafter).items():
        assert tuned >= 0.95 * max(plain, always), row


@pytest.mark.scale
@pytest.mark.parametrize("together", [1, 8, 32])
def test_drafts_that_are_never_accepted_cost_little(together: int) -> None:
    machine = Recorded("demo-eagle")
    machine.use("greedy")
    machine.lines = ["0" * len(line) for line in machine.lines]
    tuned = Tuned("demo-eagle", machine).run(together, rounds=3)
    assert tuned >= 0.95 * fixed(machine, together, 0, rounds=3)


@pytest.mark.scale
@pytest.mark.parametrize("drafter", ["n-grams", "demo-eagle"])
def test_a_text_whose_drafts_change_in_the_middle_is_followed(drafter: str) -> None:
    machine = Recorded(drafter)
    machine.use("greedy")
    line, full = machine.lines[2], machine.lines[2][80]
    machine.lines = [full * 400 + "0" * 400, "0" * 400 + full * 400] * 4
    assert len(line) < len(machine.lines[0])
    tuned = Tuned(drafter, machine).run(1)
    plain, always = fixed(machine, 1, 0), fixed(machine, 1, 8 if drafter == "n-grams" else 4)
    assert tuned >= 0.95 * max(plain, always)
