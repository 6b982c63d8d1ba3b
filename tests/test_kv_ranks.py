"""Tiers beside several ranks: each copies its share of a block, and a slot does not show how many there are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.step import Move
from quire.engine.engine import Engine
from quire.kv.host import HEAD, HostTier, Slots
from quire.kv.layout import WHOLE, KVLayout, Layers, RecurrentLayout, Share, Split
from quire.kv.tiers import holders, sources
from quire.kv.tiers.cost import Costs
from quire.kv.transport.shared import SharedMemoryLink
from quire.layers.delta_net import DeltaNetConfig
from quire.layers.kimi_delta import KimiDeltaConfig
from quire.layers.mamba import MambaConfig
from quire.layers.short_conv import ShortConvConfig
from quire.models.model import layers_of
from quire.ops import KVShape
from quire.ops.recurrent import RecurrentCache
from quire.ops.states import StateCache
from quire.parallel.group import OneRank
from quire.parallel.group import share as own_part
from tests.http_tools import wait_until
from tests.oracle import save_checkpoint
from tests.test_kv_host import Outcome, emptied, hosted, is_mapped, params, prompts, run
from tests.test_kv_pool import FaultyStore, Pool, PoolNode, store
from tests.test_kv_prefill import Prefill, alone, decoder, failing, peer, prompt

__all__ = ["store"]  # a fixture

# -- layout --------------------------------------------------------------------------------------------------------

SHAPE = KVShape(layers=5, kv_heads=4, head_dim=8, dtype=torch.bfloat16)
DRAFTS = KVShape(layers=1, kv_heads=2, head_dim=8, dtype=torch.bfloat16)
LAYOUTS = {
    "plain": KVLayout(16, SHAPE),
    "with drafts": KVLayout(16, SHAPE, DRAFTS),
    "int8": KVLayout(16, KVShape(5, 4, 8, torch.bfloat16, "int8"), DRAFTS),
    "latent": KVLayout(16, KVShape(5, 1, 24, torch.bfloat16, sides=1)),
    "padded": KVLayout(16, KVShape(5, 1, 9, torch.bfloat16, "fp8", sides=1), DRAFTS),
}
SPLITS = [Split(1, 1), Split(1, 2), Split(1, 4), Split(2, 1), Split(3, 2), Split(5, 4)]


@pytest.fixture(autouse=True)
def moves_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine was at the last ones: so it does not decide what is tested."""
    for rule in ("prefers_load", "worth_saving"):
        monkeypatch.setattr(Costs, rule, lambda *_: True)


def cases() -> Iterator[Any]:
    for name, layout in LAYOUTS.items():
        for split in SPLITS:
            if layout.has(split):
                yield pytest.param(layout, split, id=f"{name}, {split.stages} x {split.parts}")


def shares(layout: KVLayout, split: Split, alike: int = 1) -> list[Share]:
    """Of all ranks, of which so many have the same."""
    count = split.stages * split.parts
    return [Share(layout, split, number, first == 0) for number in range(count) for first in range(alike)]


def pool_of(share: Share, blocks: torch.Tensor) -> torch.Tensor:
    """What a rank has in its pool of whole blocks [count, block_bytes], as `KVCache` lays it out."""
    if share.split == WHOLE:
        return blocks.clone()
    layout = share.layout
    planes = layout.pieces(blocks, share.split)[share.number][0].reshape(len(blocks), -1)
    padding = -planes.shape[1] % (layout.block_size * 4)
    return torch.cat(
        [planes, planes.new_zeros(len(blocks), padding), blocks[:, layout.block_bytes - layout.draft_bytes :]], 1
    )


def some_blocks(layout: KVLayout, count: int = 3) -> torch.Tensor:
    blocks = torch.randint(0, 256, (count, layout.block_bytes), dtype=torch.uint8)
    planes = layout.shape.layers * layout.shape.kv_heads * layout.head_bytes
    blocks[:, planes : layout.block_bytes - layout.draft_bytes] = 0  # padding
    return blocks


def tiers(split_shares: list[Share]) -> list[HostTier]:
    """One memory, of which each rank has its share."""
    block_bytes = split_shares[0].layout.block_bytes
    first = HostTier([Slots(4, block_bytes, split_shares[0])], bytes(32))
    return [first, *(HostTier([Slots(4, block_bytes, share)], bytes(32), fd=first.fd) for share in split_shares[1:])]


@pytest.mark.quick(every=3)
@pytest.mark.parametrize(("layout", "split"), [*cases()])
@pytest.mark.parametrize("alike", [1, 2])
def test_a_slot_has_the_same_bytes_and_every_rank_finds_its_own_whoever_saved_it(
    layout: KVLayout, split: Split, alike: int
) -> None:
    blocks, moves = some_blocks(layout), [Move(2, 1, b"a"), Move(0, 3, b"b")]
    ranks = shares(layout, split, alike)
    saving = tiers(ranks)
    for share, tier in zip(ranks, saving, strict=True):
        tier.save([pool_of(share, blocks)], moves)
    assert torch.equal(saving[0].memory[0][[1, 3]], blocks[[2, 0]])
    for other in SPLITS:
        if not layout.has(other):
            continue
        loading = shares(layout, other, alike)
        for share in loading:
            tier = HostTier([Slots(4, layout.block_bytes, share)], bytes(32), fd=saving[0].fd)
            empty = torch.zeros_like(pool_of(share, blocks))
            assert tier.load([empty], moves) == []
            assert torch.equal(empty[[2, 0]], pool_of(share, blocks)[[2, 0]])


@pytest.mark.parametrize(("layout", "split"), [*cases()])
def test_one_flipped_bit_is_bad_for_those_who_have_it_and_for_all_who_share_otherwise(
    layout: KVLayout, split: Split
) -> None:
    blocks, move = some_blocks(layout), Move(0, 0, b"a")
    ranks = shares(layout, split)
    saving = tiers(ranks)
    for share, tier in zip(ranks, saving, strict=True):
        tier.save([pool_of(share, blocks)], [move])
    for place in torch.randint(0, layout.block_bytes, (6,)).tolist():
        if split != WHOLE and _is_padding(layout, place):
            continue
        saving[0].block(0)[place] ^= 16
        found = [tier.load([pool_of(share, blocks)], [move]) for share, tier in zip(ranks, saving, strict=True)]
        drafts = place >= layout.block_bytes - layout.draft_bytes
        assert found.count([0]) == (len(ranks) if drafts else 1), place
        other = Share(layout, Split(1, 2) if split == WHOLE and layout.has(Split(1, 2)) else WHOLE)
        if other.split != split:
            tier = HostTier([Slots(4, layout.block_bytes, other)], bytes(32), fd=saving[0].fd)
            assert tier.load([pool_of(other, blocks)], [move]) == [0]
        saving[0].block(0)[place] ^= 16


def _is_padding(layout: KVLayout, place: int) -> bool:
    planes = layout.shape.layers * layout.shape.kv_heads * layout.head_bytes
    return planes <= place < layout.block_bytes - layout.draft_bytes


@pytest.mark.parametrize("head", [(0, 1, 1), (1, 0, 1), (9, 1, 9), (1, 3, 3), (255, 255, 255), (1, 1, 63), (1, 2, 1)])
def test_a_check_that_makes_no_sense_is_bad(head: tuple[int, int, int]) -> None:
    layout = LAYOUTS["plain"]
    blocks, share = some_blocks(layout), Share(layout)
    tier = HostTier([Slots(4, layout.block_bytes, share)], bytes(32))
    tier.save([blocks], [Move(0, 0, b"a")])
    tier.checks[0] = HEAD.pack(*head) + tier.checks[0][HEAD.size :]
    good = head == (1, 1, 63)  # more hashes than are asked for
    assert tier.load([blocks], [Move(0, 0, b"a")]) == ([] if good else [0])


RECURRENT: dict[str, Any] = {
    "delta net": DeltaNetConfig(key_heads=4, heads=8, key_dim=3, value_dim=5, taps=4),
    "Kimi delta": KimiDeltaConfig(heads=4, head_dim=6, taps=4),
    "Mamba, groups shared": MambaConfig(groups=2, heads=8, head_dim=3, state_dim=5, taps=4, eps=1e-5),
    "short convolutions": ShortConvConfig(channels=96, taps=3, bias=False),
}
OWN_LAYERS = Layers((0, 2, 3, 6), 8)
"""Recurrent ones among others; of three stages, the first has two of them, and the others one each."""


def of_rank(config: Any, whole: RecurrentCache, stage: range, rank: int, ranks: int) -> RecurrentCache:
    """What a rank has of the blocks of a model on one rank, head by head."""
    group: Any = SimpleNamespace(rank=rank, size=ranks)
    places = [OWN_LAYERS.numbers.index(layer) for layer in stage if layer in OWN_LAYERS.numbers]
    own = config.state_shape(max(3, len(places)), 16, torch.bfloat16, group).cache(whole.num_blocks)  # as of all stages

    def heads(view: torch.Tensor, dim: int, count: int, width: int = 1) -> torch.Tensor:
        mine = own_part(count, group, count)
        return view[:, places].narrow(dim, mine.start * width, len(mine) * width)

    at = slice(len(places))
    if not isinstance(whole, StateCache):
        mine = own_part(config.channels, group)
        own.inputs[:, at] = whole.inputs[:, places][..., mine.start : mine.stop]
        return own
    shape = whole.states_shape
    for name, count in (
        ("states", shape.heads),
        ("keys", shape.key_heads),
        ("updates", shape.heads),
        ("decays", shape.heads),
    ):
        getattr(own, name)[:, at] = heads(getattr(whole, name), 2, count)
    keys, values = shape.key_heads * shape.key_dim, shape.heads * shape.value_dim
    q, k, v = whole.inputs.split([keys, keys, values], -1)
    parts = [heads(each, 3, shape.key_heads, shape.key_dim) for each in (q, k)]
    own.inputs[:, at] = torch.cat([*parts, heads(v, 3, shape.heads, shape.value_dim)], -1)
    return own


def sharing(config: Any, whole: RecurrentCache, split: Split) -> list[tuple[Share, RecurrentCache]]:
    layout, ranks = RecurrentLayout(whole.holds, OWN_LAYERS), []
    for stage in range(split.stages):
        layers = layers_of(stage, split.stages, OWN_LAYERS.total)
        for rank in range(split.parts):
            cache = of_rank(config, whole, layers, rank, split.parts) if split != WHOLE else whole
            ranks.append((Share(layout, split, stage * split.parts + rank, holds=cache.holds), cache))
    return ranks


@pytest.mark.parametrize("name", RECURRENT)
def test_states_have_a_slot_of_the_same_bytes_and_every_rank_finds_its_own_whoever_saved_it(name: str) -> None:
    config = RECURRENT[name]
    whole = config.state_shape(4, 16, torch.bfloat16, OneRank()).cache(3)
    for view in whole.views:
        view.copy_(torch.rand(view.shape))
    moves = [Move(2, 1, b"a"), Move(0, 3, b"b")]
    splits = [Split(1, 1), Split(1, 2), Split(1, 4), Split(2, 1), Split(3, 2)]
    for split in splits:
        ranks = sharing(config, whole, split)
        saving = HostTier([Slots(4, whole.holds.block_bytes, ranks[0][0])], bytes(32))
        for share_, cache in ranks:
            tier = HostTier([Slots(4, whole.holds.block_bytes, share_)], bytes(32), fd=saving.fd)
            tier.save([cache.memory], moves)
        for mine, theirs in zip(
            whole.holds.bytes_of_parts(saving.memory[0]), whole.holds.bytes_of_parts(whole.memory), strict=True
        ):
            assert torch.equal(mine[[1, 3]], theirs[[2, 0]])
        for other in splits:
            for share_, cache in sharing(config, whole, other):
                tier = HostTier([Slots(4, whole.holds.block_bytes, share_)], bytes(32), fd=saving.fd)
                empty = cache.holds.cache(3)
                assert tier.load([empty.memory], moves) == []
                for mine, theirs in zip(empty.views, cache.views, strict=True):
                    assert torch.equal(mine[[2, 0]], theirs[[2, 0]])
        saving.block(1)[len(saving.block(1)) // 2] ^= 1
        found = []
        for share_, cache in ranks:
            tier = HostTier([Slots(4, whole.holds.block_bytes, share_)], bytes(32), fd=saving.fd)
            found.append(tier.load([cache.holds.cache(3).memory], moves))
        assert found.count([1]) >= 1, "whoever has the byte finds it out"


def test_stages_have_what_is_theirs_of_a_groups_layers_or_nothing() -> None:
    layers = Layers((1, 4, 7), 8)
    assert [layers.at(stage, 4) for stage in range(4)] == [slice(0, 1), slice(1, 1), slice(1, 2), slice(2, 3)]
    layout = KVLayout(16, KVShape(layers=3, kv_heads=4, head_dim=8, dtype=torch.bfloat16), layers=layers)
    blocks, moves = some_blocks(layout), [Move(2, 1, b"a"), Move(0, 3, b"b")]
    ranks = shares(layout, Split(4, 2))
    saving = tiers(ranks)
    for share_, tier in zip(ranks, saving, strict=True):
        tier.save([pool_of(share_, blocks)], moves)
    assert torch.equal(saving[0].memory[0][[1, 3]], blocks[[2, 0]])
    assert [piece[0].shape[1] for piece in layout.pieces(blocks, Split(4, 1))] == [1, 0, 1, 1]
    alone = HostTier([Slots(4, layout.block_bytes, Share(layout))], bytes(32), fd=saving[0].fd)
    assert alone.load([empty := torch.zeros_like(blocks)], moves) == [] and torch.equal(empty[[2, 0]], blocks[[2, 0]])


# -- engines -------------------------------------------------------------------------------------------------------

EAGLE = {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3}
UNEVEN = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}  # as many small models have
FEW: dict[str, dict[str, Any]] = {
    "TP 2, 9 heads of 3": {"tensor_parallel_size": 2, "model": ("llama", UNEVEN)},
    "TP 2, int8 cache": {"tensor_parallel_size": 2, "kv_cache_dtype": "int8"},
    "PP 2": {"pipeline_parallel_size": 2},
}
MORE: dict[str, dict[str, Any]] = {
    "TP 2": {"tensor_parallel_size": 2},
    "TP 2, overlap": {"tensor_parallel_size": 2, "async_scheduling": True},
    "TP 4, heads replicated": {"tensor_parallel_size": 4},
    "TP 4, 7 heads to each of 2": {
        "tensor_parallel_size": 4,
        "model": ("qwen2", {"num_attention_heads": 14, "num_key_value_heads": 2, "hidden_size": 112}),
    },
    "TP 2, 9 heads of 3, a norm of all": {"tensor_parallel_size": 2, "model": ("olmo2", UNEVEN)},
    "TP 3, 4 heads of keys, sinks": {
        "tensor_parallel_size": 3,
        "model": ("gpt_oss", {"num_attention_heads": 8, "num_key_value_heads": 4}),
    },
    "TP 2 x PP 2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2},
    "TP 2, fp8 cache": {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8"},
    "TP 3, latent attention of 4 heads": {"tensor_parallel_size": 3, "model": ("deepseek_v3", {})},
    "PP 2, latent attention": {"pipeline_parallel_size": 2, "model": ("deepseek_v3", {})},
    "TP 2, experts": {"tensor_parallel_size": 2, "model": ("qwen3_moe", {}), "enable_expert_parallel": True},
    "DP 2": {"data_parallel_size": 2, "model": ("qwen3_moe", {}), "enable_expert_parallel": True},
    "DP 2 x TP 2": {
        "data_parallel_size": 2,
        "tensor_parallel_size": 2,
        "model": ("qwen3_moe", {}),
        "enable_expert_parallel": True,
    },
    "TP 2, a drafting head": {"tensor_parallel_size": 2, "speculative_config": EAGLE},
}
BESIDE_RANKS = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "data_parallel_size",
    "enable_expert_parallel",
    "async_scheduling",
)


def make(options: dict[str, Any], **more: Any) -> Engine:
    sizes = {"model": "demo", "threads": 1, "max_model_len": 192, "max_num_seqs": 8, "check_invariants": True}
    options = {**sizes, "async_scheduling": False, **options, **more}
    return Engine(EngineConfig(**options), hash_key=None if "disk_kv_path" in options else bytes(32))


def one_rank(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in BESIDE_RANKS}


def cases_of_engines() -> Iterator[Any]:
    for name, options in {**FEW, **MORE}.items():
        yield pytest.param(options, id=name, marks=[pytest.mark.slow] if name in MORE else [])


@pytest.mark.quick("TP 2, 9 heads of 3")
@pytest.mark.parametrize("options", [*cases_of_engines()])
def test_ranks_with_tiers_say_what_one_rank_says_without(options: dict[str, Any], tmp_path: Path) -> None:
    if "model" in options:
        architecture, sizes = options["model"]
        options = {**options, "model": str(save_checkpoint(tmp_path, architecture, **sizes))}
    roomy = make(one_rank(options), num_kv_blocks=200)
    expected = run(roomy, prompts())
    roomy.close()
    few = 24 // options.get("data_parallel_size", 1)  # of each replica
    engine = make(options, num_kv_blocks=few, host_kv_memory="64MiB")
    try:
        assert run(engine, prompts()) == expected
        counts = hosted(engine)
        assert engine.stats.preemptions and counts["stored"] and counts["loaded"] and not counts["bad"]
        memory = os.fstat(host_of(engine).fd).st_ino
        assert is_mapped(memory)
    finally:
        engine.close()
    assert not is_mapped(memory)


@pytest.fixture(scope="module")
def expected() -> list[Outcome]:
    engine = make({}, prefix_cache="off")
    outcomes = run(engine, prompts(4)[1:], most=8)
    engine.close()
    return outcomes


TP, PP = {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}
SOON = {"num_kv_blocks": 60, "host_kv_memory": "16MiB"}


def fill(engine: Engine) -> None:
    """The host tier has the head of some prompts, and the pool has nothing."""
    for first in (0, 10, 20):
        run(engine, prompts(4)[1:], first_id=first, most=2)
    emptied(engine)
    run(engine, [[5] * 5], first_id=50, most=2)
    assert hosted(engine)["stored"] >= 4 and not hosted(engine)["loaded"]


def slot_of(engine: Engine, index: int) -> int:
    """Where a block of the prompts' head lies."""
    request = Request(99, prompts(2)[1], params(0), max_tokens=1)
    engine.scheduler.kv.match(request)
    return engine.scheduler.kv.external.tier.kept[request.hashes[index]]


def host_of(engine: Engine) -> HostTier:
    executor = engine.executor
    host: HostTier = getattr(executor, "_own", executor)._runner.host
    return host


@pytest.mark.parametrize("ranks", [pytest.param(TP, id="TP 2"), pytest.param(PP, id="PP 2", marks=pytest.mark.slow)])
@pytest.mark.parametrize("number", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_one_flipped_bit_in_one_rank_s_share_is_one_bad_load_and_no_other_token(
    ranks: dict[str, int], number: int, expected: list[Outcome]
) -> None:
    engine = make(ranks, **SOON)
    try:
        fill(engine)
        layout = KVLayout.of(engine.kv_cache[0], engine.model)
        split = Split(ranks.get("pipeline_parallel_size", 1), ranks.get("tensor_parallel_size", 1))
        piece = layout.pieces(host_of(engine).memory[0], split)[number][0][slot_of(engine, 2)]
        piece[0, 0, 5] ^= 1
        assert run(engine, prompts(4)[1:], first_id=100, most=8) == expected
        assert (hosted(engine)["bad"], hosted(engine)["loaded"]) == (1, 2)
    finally:
        engine.close()


def test_a_step_that_fails_while_blocks_are_loaded_is_given_up_by_all_ranks(expected: list[Outcome]) -> None:
    engine = make(TP, **SOON)
    try:
        fill(engine)
        host, calls = host_of(engine), []
        load = host.load

        def fails_once(pool: torch.Tensor, moves: list[Move]) -> list[int]:
            if moves:
                calls.append(len(moves))
            if moves and len(calls) == 1:
                raise RuntimeError("no memory, say")
            return load(pool, moves)

        host.load = fails_once  # type: ignore[method-assign, assignment]
        assert run(engine, prompts(4)[1:], first_id=100, most=8) == expected
        assert len(calls) > 1 and hosted(engine)["loaded"] >= 4 and not hosted(engine)["bad"]
    finally:
        engine.close()


CHILD = """
import json, sys
from tests.test_kv_ranks import make, prompts, run
engine = make(json.loads(sys.argv[1]))
for first in range(0, 1000, 10):
    run(engine, prompts(4)[1:], first_id=first, most=2)
    print("served", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(TP, {}, id="TP 2, then one rank"),
        pytest.param({}, TP, id="one rank, then TP 2", marks=pytest.mark.slow),
        pytest.param(PP, TP, id="PP 2, then TP 2", marks=pytest.mark.slow),
        pytest.param(TP, {**TP, **PP}, id="TP 2, then TP 2 x PP 2", marks=pytest.mark.slow),
    ],
)
def test_what_ranks_have_stored_before_kill_9_other_ranks_find(
    before: dict[str, Any], after: dict[str, Any], tmp_path: Path, expected: list[Outcome]
) -> None:
    disk = {**SOON, "disk_kv_path": str(tmp_path / "kv"), "disk_kv_memory": "64MiB"}
    command = [sys.executable, "-c", CHILD, json.dumps({**before, **disk})]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(4):
            assert child.stdout.readline() == b"served\n"
        child.kill()
    engine = make(after, **disk)
    try:
        assert run(engine, prompts(4)[1:], most=8) == expected
        assert engine.stats.kv_tiers["disk"]["loaded"] >= 4
        assert hosted(engine)["loaded"] >= 4 and not hosted(engine)["bad"]
    finally:
        engine.close()


# -- replicas of attention -----------------------------------------------------------------------------------------

DP = {"data_parallel_size": 2, "enable_expert_parallel": True}


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3_moe", num_hidden_layers=2))


@pytest.fixture
def sharing_engines(experts: str, cluster_key: str) -> dict[str, Any]:
    """Options of engines that share KV."""
    sizes = {"num_kv_blocks": 60, "max_model_len": 192, "check_invariants": True, "async_scheduling": False}
    return {"model": experts, "threads": 1, "host_kv_memory": "16MiB", "cluster_key_file": cluster_key, **sizes}


def test_replicas_have_prompts_computed_elsewhere_once_and_keep_them_on_one_disk(
    sharing_engines: dict[str, Any], tmp_path: Path
) -> None:
    options, disk = sharing_engines, {"disk_kv_path": str(tmp_path / "kv")}
    texts = [prompt(100, first) for first in (0, 0, 1, 1, 2)]
    expected = alone(options, texts)
    prefill = Prefill(**options)
    engine = decoder(options, prefill, **DP, **disk)
    try:
        assert run(engine, texts, most=8) == expected
        assert prefill.computed == 3 and peer(engine) == 18, "though two replicas want the same"
        assert hosted(engine)["loaded"] > 18 and not hosted(engine)["bad"], "into both pools"
        for first in (10, 20, 30):
            assert run(engine, texts, first_id=first, most=8) == expected
        stored = engine.stats.kv_tiers["disk"]["stored"]
        assert stored >= 18
    finally:
        engine.close()
        prefill.close()
    again = Engine(EngineConfig(**{**options, **disk}))  # one rank finds what two replicas have stored
    assert run(again, texts, most=8) == expected
    assert again.stats.kv_tiers["disk"]["loaded"] >= 18 and not hosted(again)["bad"]
    again.close()


@pytest.mark.slow
@pytest.mark.parametrize("here", [{}, TP, DP])
def test_replicas_compute_prompts_for_others(sharing_engines: dict[str, Any], here: dict[str, Any]) -> None:
    texts = [prompt(length, first) for first, length in enumerate((33, 100, 160, 100, 90))]
    expected = alone(sharing_engines, texts)
    prefill = Prefill(**sharing_engines, **DP)
    engine = decoder(sharing_engines, prefill, **here)
    assert run(engine, texts, most=8) == expected
    assert peer(engine) == sum((len(text) - 1) // 16 for text in texts) and not hosted(engine)["bad"]
    assert all(each.num_cached_tokens == 0 for each in prefill.engine.scheduler.schedulers)
    engine.close()
    prefill.close()


@pytest.mark.slow
def test_a_read_that_fails_for_two_replicas_is_computed_by_both(
    sharing_engines: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [prompt(100, 0), prompt(100, 0)]
    expected = alone(sharing_engines, texts)
    prefill = Prefill(**sharing_engines)
    engine = decoder(sharing_engines, prefill, **DP)
    with monkeypatch.context() as patch:
        patch.setattr(SharedMemoryLink, "read", failing)
        assert run(engine, texts, most=8) == expected and not peer(engine)
    engine.close()
    prefill.close()


@pytest.mark.slow
def test_nodes_of_a_pool_may_be_replicas(
    sharing_engines: dict[str, Any], store: FaultyStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holders, "LOOKUP_SECONDS", 30.0)
    monkeypatch.setattr(sources, "LEAST_PATIENCE", 30.0)
    texts = [prompt(100, first) for first in range(3)]
    expected = alone(sharing_engines, texts)
    pool = Pool({**sharing_engines, "kv_directory": "redis://nowhere"})
    first, second = pool.node(**DP), pool.node(**DP)

    def told(node: PoolNode) -> bool:
        published = node.engine.tiers.published
        return node.agent._held == published.blocks and not node.agent._changed

    for node in (first, second):
        for number in [node.begin(text, seed=seed) for seed, text in enumerate(texts)]:
            assert node.rest(number) == expected[number]
        wait_until(lambda: told(first))
    assert all(kv.cache._by_hash for kv in first.engine.scheduler.kvs), "each replica has computed some"
    assert second.loaded == 18 and not second.counts["bad"] and not first.loaded
    for node in pool.nodes:
        node.close()
