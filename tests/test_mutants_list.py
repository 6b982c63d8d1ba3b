"""The list of `make mutants` fits the code: a mutant that no longer applies would test nothing."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
CORE = TESTS.parent / "src" / "quire" / "core"
LIST: dict[str, list[dict[str, Any]]] = tomllib.loads((TESTS / "core" / "mutants.toml").read_text())
BY_HAND = LIST["by_hand"]


@pytest.mark.parametrize("mutant", BY_HAND, ids=lambda mutant: mutant["what"].replace(" ", "-"))
def test_a_mutant_written_by_hand_changes_one_place_of_its_module_to_other_python(mutant: dict[str, Any]) -> None:
    source = (CORE / f"{mutant['module']}.py").read_text()
    assert source.count(mutant["old"]) == 1
    assert mutant["old"] != mutant["new"]
    compile(source.replace(mutant["old"], mutant["new"]), mutant["module"], "exec")


def test_what_is_explained_of_a_mutant_is_about_code_that_there_is() -> None:
    by_hand = {f"{mutant['module']}: {mutant['what']}" for mutant in BY_HAND}
    for mutant in LIST["explained"]:
        if mutant["function"] not in by_hand:
            source = (CORE / f"{mutant['function'].partition('.')[0]}.py").read_text()
            assert " ".join(mutant["old"].split()) in " ".join(source.split()), mutant
