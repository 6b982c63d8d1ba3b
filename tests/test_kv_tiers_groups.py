"""Tiers of models with several KV groups: windows and recurrent states come back, and no token shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.block_hash import part_name
from quire.core.request import Request
from quire.engine.engine import Engine
from quire.kv.tiers import holders, sources
from quire.kv.tiers.cost import Costs
from tests.http_tools import wait_until
from tests.oracle import save_checkpoint
from tests.test_kv_groups import windows
from tests.test_kv_host import Outcome, emptied, hosted, make, params, prompts, run
from tests.test_kv_pool import FaultyStore, Pool, store
from tests.test_kv_prefill import Prefill, decoder, peer
from tests.test_kv_store import Shared, shared
from tests.test_models_eagle import eagle_tensors, write

__all__ = ["shared", "store"]  # fixtures

KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "some windows": ("qwen2", {"num_hidden_layers": 3, **windows()}, {}),
    "windows alone": ("mistral", {"num_hidden_layers": 2, "sliding_window": 40}, {}),
    "windows, int8": ("qwen2", {"num_hidden_layers": 3, **windows()}, {"kv_cache_dtype": "int8"}),
    "windows and drafts": ("qwen2", {"num_hidden_layers": 3, "dtype": torch.float32, **windows(window=24)}, {}),
    "states": ("qwen3_next", {}, {}),
    "short convolutions": ("lfm2", {}, {}),
    "Mamba": ("nemotron_h", {"dtype": torch.bfloat16, "moe_latent_size": 32, "mamba_head_dim": 16}, {}),
}
QUICK = ("some windows", "states")
LENGTHS = (15, 33, 64, 65, 130, 150)


@pytest.fixture(autouse=True)
def moves_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine was at the last ones: so it does not decide what is tested."""
    for rule in ("prefers_load", "worth_saving"):
        monkeypatch.setattr(Costs, rule, lambda *_: True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    made = {}
    for name, (architecture, config, options) in KINDS.items():
        folder = save_checkpoint(tmp_path_factory.mktemp(name.replace(" ", "-")), architecture, **config)
        made[name] = {"model": str(folder), "threads": 1, **options}
    draft = tmp_path_factory.mktemp("draft")
    write(draft, eagle_tensors())
    made["windows and drafts"]["speculative_config"] = {
        "method": "eagle",
        "model": str(draft),
        "num_speculative_tokens": 3,
    }
    return made


@pytest.fixture(params=[pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in KINDS])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def options(kind: str, folders: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return folders[kind]


def again(options: dict[str, Any]) -> int:
    """Tokens of a cached prefix that are computed again."""
    return int("speculative_config" in options)


def cold(options: dict[str, Any], texts: list[list[int]], most: int) -> list[Outcome]:
    """What an engine without caches says, served at once."""
    engine = make(options, num_kv_blocks=200, prefix_cache="off")
    outcomes = run(engine, texts, most=most)
    engine.close()
    return outcomes


def cold_each(options: dict[str, Any], texts: list[list[int]], most: int) -> list[Outcome]:
    """And one after the other."""
    engine = make(options, num_kv_blocks=200, prefix_cache="off")
    outcomes = [run(engine, [text], 10 * index, most)[0] for index, text in enumerate(texts)]
    engine.close()
    return outcomes


@pytest.mark.quick("some windows-True", "states-False")
@pytest.mark.parametrize("overlap", [False, True])
def test_who_gives_way_comes_back_with_the_tokens_and_log_probabilities_of_a_roomy_pool(
    options: dict[str, Any], overlap: bool
) -> None:
    expected = cold(options, prompts(), 40)
    blocks = 14 if "windows-alone" in options["model"] else 24  # most of a window's come back by themselves
    engine = make(options, num_kv_blocks=blocks, host_kv_memory="64MiB", async_scheduling=overlap)
    assert run(engine, prompts()) == expected
    counts = hosted(engine)
    assert engine.stats.preemptions and counts["stored"] and counts["loaded"] and not counts["bad"]
    assert run(engine, prompts(), first_id=100) == expected
    engine.close()


@pytest.mark.parametrize("group", [0, -1])
def test_heads_are_loaded_and_a_flipped_bit_in_a_part_of_any_group_costs_no_token(
    options: dict[str, Any], group: int
) -> None:
    texts = prompts(6)[1:]
    expected, last = cold(options, texts, 8), texts.pop(0)
    engine = make(options, num_kv_blocks=100, host_kv_memory="64MiB")
    for index, text in enumerate(texts):
        run(engine, [text], first_id=10 * index, most=2)
    emptied(engine)
    run(engine, [[5] * 5], first_id=90, most=2)
    kv, host, before = engine.scheduler.kv, engine.executor._runner.host, engine.stats.cached_tokens
    assert run(engine, [last], first_id=100, most=8) == expected[:1]
    loaded = hosted(engine)["loaded"]
    assert loaded and engine.stats.cached_tokens - before == 64 - again(options)
    emptied(engine)
    texts = [last, *texts]
    request = Request(99, last, params(0), max_tokens=1)
    kv.match(request)
    group %= len(kv.groups)
    slots = [kv.external.tier.slot(part_name(each, group)) for each in request.hashes]
    host.block([slot for slot in slots if slot is not None][-1])[7] ^= 4
    assert run(engine, texts, first_id=200, most=8) == expected
    assert hosted(engine)["bad"] == 1
    sizes, moved = [each.block_bytes for each in host.groups], engine.stats.kv_tier_bytes["host"]
    assert min(sizes) * hosted(engine)["loaded"] <= moved["loaded"] <= max(sizes) * hosted(engine)["loaded"]
    engine.close()


def test_a_restart_finds_on_the_disk_what_was_used(options: dict[str, Any], tmp_path: Path) -> None:
    texts = prompts(5)[1:]
    expected = cold_each(options, texts, 8)
    tiers = {"num_kv_blocks": 100, "host_kv_memory": "64MiB", "disk_kv_path": str(tmp_path / "kv")}
    for turn in range(2):
        config = EngineConfig(**{"max_model_len": 192, "max_num_seqs": 8, "check_invariants": True, **options, **tiers})
        engine = Engine(config)
        cached = engine.stats.cached_tokens
        for index, text in enumerate(texts):
            assert run(engine, [text], first_id=10 * index, most=8) == [expected[index]]
            if index == 0:
                assert engine.stats.cached_tokens - cached == (64 - again(options)) * turn
        disk = engine.stats.kv_tiers["disk"]
        assert disk["loaded"] if turn else disk["stored"] >= 3
        engine.close()


def test_another_engine_computes_prompts_of_every_length(options: dict[str, Any], cluster_key: str) -> None:
    texts = [
        [3 + (5 * length + 7 * i * i + i // 3) % 60 for i in range(length)] for length in (15, 33, 64, 65, 130, 150)
    ]
    expected = cold_each(options, texts, 8)
    sizes = {"num_kv_blocks": 120, "max_model_len": 192, "check_invariants": True, "host_kv_memory": "64MiB"}
    options = {**options, **sizes, "cluster_key_file": cluster_key}
    prefill = Prefill(**options, max_num_batched_tokens=48)
    engine = decoder(options, prefill)
    try:
        for index, text in enumerate(texts):
            assert run(engine, [text], first_id=index, most=8) == [expected[index]]
        assert peer(engine) == prefill.exported > 5 and not hosted(engine)["bad"]
        whole = [(length - 1) // 16 * 16 for length in LENGTHS if length > 16]
        assert engine.stats.cached_tokens == sum(whole) - again(options) * len(whole)
    finally:
        engine.close()
        prefill.close()


TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2, "async_scheduling": False}
RANKS = [
    pytest.param("states", TP, id="states, TP 2"),
    *(
        pytest.param(kind, ranks, id=f"{kind}, {what}", marks=pytest.mark.slow)
        for kind, what, ranks in (
            ("some windows", "TP 2", TP),
            ("some windows", "PP 2", PP),
            ("windows, int8", "TP 2 x PP 2", TP | PP),
            ("states", "PP 2", PP),
            ("states", "TP 2 x PP 2", TP | PP),
            ("short convolutions", "TP 2", TP),
            ("short convolutions", "PP 2", PP),
            ("Mamba", "TP 2", TP),
            ("windows and drafts", "TP 2", TP),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "ranks"), RANKS)
def test_ranks_save_and_load_their_parts_of_every_groups_blocks_and_one_rank_finds_them_on_the_disk(
    folders: dict[str, dict[str, Any]], kind: str, ranks: dict[str, Any], tmp_path: Path
) -> None:
    options, texts = folders[kind], prompts()
    tiers = {"host_kv_memory": "64MiB", "disk_kv_path": str(tmp_path / "kv")}
    expected = cold(options, texts, 40)
    engine = make({**options, **ranks}, num_kv_blocks=24, **tiers)
    for first in (0, 100):
        assert run(engine, texts, first) == expected
    counts = hosted(engine)
    assert engine.stats.preemptions and counts["loaded"] and not counts["bad"]
    engine.close()
    engine = make(options, num_kv_blocks=100, **tiers)
    assert run(engine, texts) == expected
    assert engine.stats.kv_tiers["disk"]["loaded"] and hosted(engine)["loaded"] and not hosted(engine)["bad"]
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(("there", "here"), [(TP, {}), ({}, TP), (PP, TP)])
@pytest.mark.parametrize("kind", ["some windows", "states"])
def test_either_side_has_ranks_as_it_likes(
    folders: dict[str, dict[str, Any]], kind: str, there: dict[str, Any], here: dict[str, Any], cluster_key: str
) -> None:
    texts = [[3 + (5 * length + 7 * i * i + i // 3) % 60 for i in range(length)] for length in LENGTHS]
    expected = cold_each(folders[kind], texts, 8)
    options = {**folders[kind], "num_kv_blocks": 120, "max_model_len": 192, "check_invariants": True}
    options |= {"host_kv_memory": "64MiB", "cluster_key_file": cluster_key}
    prefill = Prefill(**options, **there)
    engine = decoder(options, prefill, **here)
    for index, text in enumerate(texts):
        assert run(engine, [text], index, 8) == [expected[index]]
    assert peer(engine) == prefill.exported > 5 and not hosted(engine)["bad"]
    engine.close()
    prefill.close()


# -- one pool of KV ----------------------------------------------------------------------------------------------------


@pytest.fixture
def pool(options: dict[str, Any], cluster_key: str, store: FaultyStore) -> Iterator[Pool]:
    """Nodes with such a model, and a directory within this process."""
    sizes = {"num_kv_blocks": 120, "max_model_len": 192, "check_invariants": True, "host_kv_memory": "64MiB"}
    made = Pool({**options, **sizes, "cluster_key_file": cluster_key, "kv_directory": "redis://nowhere"})
    yield made
    for node in made.nodes:
        node.close()


PARTS = {
    "some windows": 5 + 3,
    "windows alone": 3,
    "windows, int8": 5 + 3,
    "windows and drafts": 5 + 2,
    "states": 5 + 1,
    "short convolutions": 5 + 1,
    "Mamba": 5 + 1,
}
"""What the token after five blocks sees of each kind."""


def test_what_another_node_has_of_every_group_is_read_and_no_more_of_it_than_is_seen(
    pool: Pool, options: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 30.0)
    head = prompts(2)[1]  # of 90 tokens
    texts = [head, [*head, 5, 6, 7]]
    expected = cold_each(options, texts, 8)
    first, second = pool.node(), pool.node()
    assert first.ask(texts[0]) == expected[0]
    published = first.engine.tiers.published
    assert published is not None
    wait_until(lambda: first.agent._held >= published.blocks and not first.agent._changed)
    assert second.ask(texts[1]) == expected[1]
    assert second.engine.stats.cached_tokens == 80 - again(options)
    assert second.loaded == PARTS[kind] and not second.counts["bad"] and not second.counts["stale"]


def test_where_a_node_lacks_a_part_that_it_published_the_request_begins_where_it_can(
    pool: Pool, options: dict[str, Any], kind: str, store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 30.0)
    head = prompts(2)[1]
    [expected] = cold_each(options, [head], 8)
    first, second = pool.node(), pool.node()
    first.ask(head)
    published, kv = first.engine.tiers.published, first.engine.scheduler.kv
    assert published is not None
    wait_until(lambda: first.agent._held >= published.blocks and not first.agent._changed)
    held = {name: dict(epochs) for name, epochs in store.blocks.items()}
    first.do(lambda: kv.cache.evict(len(kv.groups) - 1, len(kv.groups[-1].idle)))
    wait_until(lambda: not first.agent._changed and first.agent._held == published.blocks)
    with store.lock:
        store.blocks = held  # as if it had not been told
    assert second.ask(head) == expected
    assert second.counts["stale"] and not second.counts["bad"]


def test_a_store_has_the_blocks_of_every_group(
    pool: Pool, options: dict[str, Any], kind: str, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 30.0)
    head = prompts(2)[1]
    texts = [head, [*head, 5, 6, 7]]
    expected = cold_each(options, texts, 8)
    pool.options["kv_directory"] = "mooncake://127.0.0.1:1"
    first = pool.node()
    assert first.ask(texts[0]) == expected[0]
    published = first.engine.tiers.published
    assert published is not None
    wait_until(lambda: shared.values.keys() >= published.blocks)
    pool.close(first)
    second = pool.node()
    assert second.ask(texts[1]) == expected[1]
    assert second.engine.stats.cached_tokens == 80 - again(options)
    assert second.loaded == PARTS[kind] and not second.counts["bad"]
