"""Engines of models with recurrent layers: what is run, and what must be the same, whatever the layers are."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.errors import ConfigError
from tests import test_determinism as product
from tests.oracle import random_prompt

ORDER = list(range(len(product.prompts())))
Outcomes = dict[int, Any]


def each_alone(setting: dict[str, Any], indices: list[int]) -> Outcomes:
    """What each request gets where there is no other one, and no cache."""
    engine = Engine(EngineConfig(**setting, prefix_cache="off"))
    outcomes: Outcomes = {}
    for index in indices:
        outcomes |= product.run(engine, [index])
    return outcomes


def check_runs(engine: Engine, alone: Outcomes, order: list[int] = ORDER) -> None:
    """Each request gets the same, all together and then, with warm caches, one after the other, in the other order."""
    assert product.run(engine, order) == alone
    assert product.run(engine, order[::-1], first_id=100, stagger=2) == alone


def check_switches(folder: str, alone: Outcomes) -> None:
    """Requests differ, and none of the switches changes one."""
    assert len({tuple(token for token, _, _ in outcome) for outcome in alone.values()}) == len(alone)
    product.assert_switches_change_nothing({"model": folder, "threads": 1}, alone, product.PART)


def check_drafts(folder: str, alone: Outcomes) -> None:
    """Drafts are made, and change nothing."""
    spec = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1, "num_speculative_tokens": 7}
    for switches in product.PART[:2]:
        engine = product.engine_of({"model": folder, "threads": 1}, switches, speculative_config=spec)
        check_runs(engine, alone)
        assert engine.stats.drafted > 0


def check_ranks(folder: str, alone: Outcomes, ranks: dict[str, Any]) -> None:
    """Several ranks change nothing."""
    with contextlib.closing(product.engine_of({"model": folder, "threads": 1}, product.PART[0], **ranks)) as engine:
        check_runs(engine, alone)


def check_other_kernels(folder: str, name: str, order: list[int]) -> None:
    """With these kernels, too, nothing around a request changes it."""
    setting = {"model": folder, "threads": 1, "cpu_kernels": name}
    engine = product.engine_of(setting, product.Switches(16, "radix", 40, True, overlap=True))
    check_runs(engine, each_alone(setting, order), order)


def check_refusals(folder: str) -> None:
    """What is not there yet for recurrent layers is refused by name."""
    with pytest.raises(ConfigError, match="it has recurrent layers"):
        Engine(EngineConfig(model=folder, threads=1, speculative_config={"method": "draft_model", "model": folder}))


def check_resumption(folder: str) -> None:
    """A new engine that is given the beginning of a reply goes on with it, in mid-tile or not: as after a kill."""
    prompt, whole = random_prompt(21), []
    for cut in (0, 1, 6, 11, 12):
        engine = Engine(EngineConfig(model=folder, threads=1))
        params = product.params(5)
        engine.add(Request(cut, prompt, params, max_tokens=20, output_token_ids=whole[:cut]))
        tokens = whole[:cut]
        while not engine.idle:
            tokens = tokens + [token for update in engine.step() for token in update.tokens]
        whole = whole or tokens
        assert tokens == whole and len(whole) == 20


def greedy_in(engine: Engine, number: int, prompt: list[int]) -> tuple[list[int], int]:
    """Some tokens after a prompt, and how many of the prompt's were cached."""
    engine.add(Request(number, prompt, product.params(0), max_tokens=5))
    tokens, cached = [], 0
    while not engine.idle:
        for update in engine.step():
            tokens += update.tokens
            cached = update.cached_tokens
    return tokens, cached
