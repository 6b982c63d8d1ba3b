"""The list of `make mutants` fits the code: a mutant that no longer applies would test nothing."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
CORE = TESTS.parent / "src" / "quire" / "core"
BY_HAND: list[dict[str, Any]] = tomllib.loads((TESTS / "core" / "mutants.toml").read_text())["by_hand"]


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda mutant: mutant["what"].replace(" ", "-"))
def test_a_mutant_written_by_hand_changes_one_place_of_its_module_to_other_python(mutant: dict[str, Any]) -> None:
    source = (CORE / f"{mutant['module']}.py").read_text()
    assert source.count(mutant["old"]) == 1
    assert mutant["old"] != mutant["new"]
    compile(source.replace(mutant["old"], mutant["new"]), mutant["module"], "exec")
