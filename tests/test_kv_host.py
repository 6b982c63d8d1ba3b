"""The host tier on real models: blocks that were given up come back, checked, and no token shows it."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import Move
from quire.engine.engine import Engine
from quire.errors import ConfigError, MemoryPlanError
from quire.kv.host import CHECK_BYTES, HostTier, Slots
from quire.kv.prefault import Prefaulter
from quire.ops import memory as ops_memory
from quire.ops.kv_cache import zeros
from quire.runner.start import _slot_counts
from tests.devices import DelayedDevice, SpanKernels, on_device
from tests.oracle import save_checkpoint

MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "int8 cache": {"kv_cache_dtype": "int8"},
    "fp8 cache": {"kv_cache_dtype": "fp8"},
    "torch kernels": {"cpu_kernels": "torch", "model": "qwen3"},
    "latent attention": {"model": "deepseek_v3"},
    "n-grams": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
    "a drafting head": {"speculative_config": {"method": "eagle", "model": "demo-eagle", "num_speculative_tokens": 3}},
}
OUTPUT = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Folders of models that are made for these tests."""
    return {name: str(save_checkpoint(tmp_path_factory.mktemp(name), name)) for name in ("deepseek_v3", "qwen3")}


@pytest.fixture(scope="module")
def latent(tiny: dict[str, str]) -> Path:
    return Path(tiny["deepseek_v3"])


def chosen(model: str, tiny: dict[str, str]) -> dict[str, Any]:
    """Options of one of `MODELS`."""
    return {name: tiny.get(value, value) if name == "model" else value for name, value in MODELS[model].items()}


def prompts(count: int = 6) -> list[list[int]]:
    """About 100 tokens each, of which 70 are a head that all but the first share."""
    rnd = random.Random(7)
    head = [rnd.randrange(3, 60) for _ in range(70)]
    return [[rnd.randrange(3, 60) for _ in range(99)]] + [
        [*head, *(rnd.randrange(3, 60) for _ in range(20 + 3 * index))] for index in range(count - 1)
    ]


def params(index: int) -> SamplingParams:
    temperature = 0.0 if index % 2 else 0.8
    return SamplingParams(temperature=temperature, seed=index, logprobs=1, ignore_eos=True).resolved()


Outcome = list[tuple[int, tuple[float, ...]]]


def run(engine: Engine, texts: list[list[int]], first_id: int = 0, most: int = OUTPUT) -> list[Outcome]:
    """Tokens and log-probabilities of prompts that are served at once."""
    for index, text in enumerate(texts):
        engine.add(Request(first_id + index, text, params(index), max_tokens=most))
    outcomes: list[Outcome] = [[] for _ in texts]
    while not engine.idle:
        for update in engine.step():
            assert update.error is None
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                outcomes[update.request - first_id].append((token, tuple(entry.values)))
    return outcomes


def make(options: dict[str, Any], **more: Any) -> Engine:
    config = EngineConfig(**{"max_model_len": 192, "max_num_seqs": 8, "check_invariants": True, **options, **more})
    return Engine(config, hash_key=bytes(32))


def hosted(engine: Engine) -> dict[str, int]:
    """What the host tier has stored, loaded, and found bad."""
    return engine.stats.kv_tiers["host"]


def emptied(engine: Engine) -> None:
    """Nothing is left in the pool that might be found there."""
    engine.scheduler.kv.cache.clear()


def pairs() -> Iterator[Any]:
    """A model, and whether steps overlap: of one model both, of the others in turns; all that are left out are slow."""
    for number, model in enumerate(MODELS):
        for overlap in (False, True):
            quick = model == "plain" or overlap == bool(number % 2)
            yield pytest.param(model, overlap, marks=[] if quick else [pytest.mark.slow])


@pytest.mark.quick("plain-True", "latent attention-False", "a drafting head-False")
@pytest.mark.parametrize(("model", "overlap"), list(pairs()))
def test_who_gives_way_comes_back_with_the_tokens_and_log_probabilities_of_a_roomy_pool(
    model: str, overlap: bool, tiny: dict[str, str]
) -> None:
    options = {"model": "demo", "threads": 1, **chosen(model, tiny)}
    roomy = make(options, num_kv_blocks=200)
    expected = run(roomy, prompts())
    roomy.close()
    engine = make(options, num_kv_blocks=24, host_kv_memory="64MiB", async_scheduling=overlap)
    assert run(engine, prompts()) == expected
    counts = hosted(engine)
    assert engine.stats.preemptions and counts["stored"] and counts["loaded"] and not counts["bad"]
    assert run(engine, prompts(), first_id=100) == expected
    engine.close()


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_device_that_computes_by_itself_moves_blocks_in_the_order_of_its_steps(tmp_path: Path, overlap: bool) -> None:
    model = {"model": str(save_checkpoint(tmp_path, "qwen3")), "threads": 1, "async_scheduling": overlap}
    with on_device(DelayedDevice(), SpanKernels()):
        roomy = make(model, num_kv_blocks=200, max_num_batched_tokens=64)
        expected = run(roomy, prompts())
        engine = make(model, num_kv_blocks=24, host_kv_memory="16MiB", max_num_batched_tokens=64)
        assert run(engine, prompts()) == expected
    assert engine.stats.preemptions and hosted(engine)["loaded"] and not hosted(engine)["bad"]
    roomy.close()
    engine.close()


@pytest.fixture
def filled() -> Iterator[Engine]:
    """An engine whose host tier has the head of some prompts, and whose pool has nothing."""
    engine = make({"model": "demo", "threads": 1}, num_kv_blocks=60, host_kv_memory="64MiB")
    for first in (0, 10, 20):
        run(engine, prompts(4)[1:], first_id=first, most=2)
    emptied(engine)
    run(engine, [[5] * 5], first_id=50, most=2)
    assert hosted(engine)["stored"] >= 4 and not hosted(engine)["loaded"]
    yield engine
    engine.close()


def test_a_head_that_was_evicted_is_loaded_and_counted_as_cached(filled: Engine) -> None:
    cached = filled.stats.cached_tokens
    assert run(filled, prompts(2)[1:], first_id=100, most=8) == _cold(prompts(2)[1:], most=8)
    assert hosted(filled)["loaded"] >= 4 and filled.stats.cached_tokens - cached >= 64


def test_what_would_take_longer_to_load_is_computed_and_loaded_again_once_it_does_not(filled: Engine) -> None:
    costs, texts = filled.scheduler.kv.external.sources.costs, prompts(2)[1:]
    costs.moved("host", 1, 1e6)
    assert run(filled, texts, first_id=100, most=8) == _cold(texts, most=8) and not hosted(filled)["loaded"]
    emptied(filled)
    costs.moved("host", 10**12, 0.0)
    assert run(filled, texts, first_id=200, most=8) == _cold(texts, most=8) and hosted(filled)["loaded"] >= 4


def _cold(texts: list[list[int]], most: int) -> list[Outcome]:
    engine = make({"model": "demo", "threads": 1}, num_kv_blocks=60, prefix_cache="off")
    outcomes = run(engine, texts, most=most)
    engine.close()
    return outcomes


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("bit", [1, 128])
def test_one_flipped_bit_in_a_slot_is_one_bad_load_and_no_other_token(filled: Engine, place: int, bit: int) -> None:
    host, tier = filled.executor._runner.host, filled.scheduler.kv.external.tier
    request = Request(99, prompts(2)[1], params(0), max_tokens=1)
    filled.scheduler.kv.match(request)
    slot = tier.kept[request.hashes[2]]
    host.block(slot)[place] ^= bit
    assert run(filled, prompts(2)[1:], first_id=100, most=8) == _cold(prompts(2)[1:], most=8)
    assert (hosted(filled)["bad"], hosted(filled)["loaded"]) == (1, 2)
    assert [each in tier for each in request.hashes[:3]] == [True, True, False]


def test_a_step_that_fails_while_blocks_are_loaded_is_given_up_with_them(filled: Engine) -> None:
    host = filled.executor._runner.host
    load, calls = host.load, []

    def fails_once(pools: list[torch.Tensor], moves: list[Move]) -> list[int]:
        calls.append(len(moves))
        if moves and sum(count > 0 for count in calls) == 1:
            raise RuntimeError("no memory, say")
        return load(pools, moves)

    host.load = fails_once
    assert run(filled, prompts(2)[1:], first_id=100, most=8) == _cold(prompts(2)[1:], most=8)
    assert sum(count > 0 for count in calls) == 2 and hosted(filled)["loaded"] >= 4


def test_a_copy_is_good_only_under_its_name_its_key_and_with_all_its_bytes() -> None:
    pool = torch.randint(0, 256, (4, 96), dtype=torch.uint8)
    host = HostTier([Slots(2, 96)], bytes(32))
    saved, move = pool[1].clone(), Move(1, 0, b"name")
    host.save([pool], [move])
    assert host.load([pool], [Move(3, 0, b"name")]) == [] and torch.equal(pool[3], saved)
    assert host.load([pool], [Move(3, 0, b"other")]) == [0]
    assert host.load([pool], [Move(3, 1, b"name")]) == [1]
    other = HostTier([Slots(2, 96)], bytes(31) + b"1")
    other.save([pool], [move])
    assert other.checks[0] != host.checks[0]


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({"host_kv_memory": "1KiB"}, ConfigError, "less than one block"),
        ({"host_kv_memory": "900TiB"}, MemoryPlanError, "more than the"),
        ({"host_kv_memory": "1MiB", "prefix_cache": "off"}, ConfigError, "prefix_cache=off"),
        (
            {"host_kv_memory": "1MiB", "tensor_parallel_size": 2, "nnodes": 2, "token_file": "x"},
            ConfigError,
            "nnodes=2 is not supported yet",
        ),
        ({"host_kv_memory": "much"}, ConfigError, "not a size"),
    ],
)
def test_what_cannot_be_is_refused_by_name(more: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make({"model": "demo", "threads": 1, "num_kv_blocks": 60}, **more)


def test_a_note_says_how_much_the_tier_holds_and_when_it_pays(filled: Engine) -> None:
    [note] = [note for note in filled.notes if "host tier" in note]
    assert "64 MiB" in note and "on a CPU this is the same memory" in note


def test_other_processes_see_the_slots_and_the_memory_is_given_back() -> None:
    host = HostTier([Slots(4096, 4096)], bytes(32))
    assert os.fstat(host.fd).st_blocks == 0  # nothing is taken before it is used
    region = host.region
    host.save([torch.full((1, 4096), 7, dtype=torch.uint8)], [Move(0, 5, b"name")])
    assert os.fstat(host.fd).st_blocks * 512 < 4 * 2**20
    child = "import mmap, sys; m = mmap.mmap(int(sys.argv[1]), 6 * 4096); print(m[5 * 4096]); m[5 * 4096] = 8"
    output = subprocess.run([sys.executable, "-c", child, str(host.fd)], pass_fds=[host.fd], capture_output=True)
    assert output.stdout == b"7\n"
    assert host.load([torch.empty(1, 4096, dtype=torch.uint8)], [Move(0, 5, b"name")]) == [5]
    fd, inode = host.fd, os.fstat(host.fd).st_ino
    del host
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)
    assert region.memory[5 * 4096] == 8 and is_mapped(inode)
    del region
    assert not is_mapped(inode)


def is_mapped(inode: int) -> bool:
    return any(line.split()[4] == str(inode) for line in Path("/proc/self/maps").read_text().splitlines())


def test_a_closed_engine_gives_the_tier_s_memory_back() -> None:
    engine = make({"model": "demo", "threads": 1}, num_kv_blocks=60, host_kv_memory="64MiB")
    inode = os.fstat(engine.executor._runner.host.fd).st_ino
    assert is_mapped(inode)
    engine.close()
    assert not is_mapped(inode)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_taken_before_blocks_are_loaded_there_and_what_stands_there_stays() -> None:
    memory = zeros(256 * 2**20, "cpu").view(256, 2**20)
    memory[3] = 7
    gc.collect()  # what earlier tests have left is not given back meanwhile
    before = resident()
    prefaulter = Prefaulter(memory, 10)
    prefaulter.drain()
    taken = resident() - before
    assert 35 * 2**20 < taken < 60 * 2**20 and memory[3].min() == 7 and not memory[4].any()
    prefaulter.used(10)  # enough is left
    prefaulter.drain()
    assert resident() - before < taken + 4 * 2**20
    prefaulter.used(100)
    prefaulter.drain()
    assert 135 * 2**20 < resident() - before < 160 * 2**20
    prefaulter.used(255)
    prefaulter.drain()
    assert resident() - before > 250 * 2**20


def test_blocks_of_each_group_have_a_slot_and_all_fit() -> None:
    rng = random.Random(0)
    for _ in range(300):
        groups = rng.randint(1, 4)
        sizes, blocks = ([rng.randint(1, most) for _ in range(groups)] for most in (5000, 10**6))
        memory = rng.randint(1, 10**7)
        counts = _slot_counts(memory, sizes, blocks)
        used = sum(size * count for size, count in zip(sizes, counts, strict=True))
        assert all(counts) if memory >= sum(sizes) else not any(counts)
        assert used <= memory
        if groups == 1:
            assert counts == [memory // sizes[0]]


class Runtime:
    """Stands for CUDA's: what is pinned, by address, and whether it can be."""

    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}
        self.refuses = False

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.refuses:
            return 2
        self.pinned[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        assert any(first <= address < last for first, last in _mapped()), "it must be mapped until then"
        del self.pinned[address]
        return 0


def _mapped() -> list[tuple[int, int]]:
    """Addresses that this process has mapped."""
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return [(int(first, 16), int(last, 16)) for first, last in ranges]


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    def check(status: int) -> None:
        if status:
            raise RuntimeError("out of memory (2)")

    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "check_error", check)
    return made


def test_memory_for_a_gpu_is_pinned_as_large_as_it_is_while_it_is_used(runtime: Runtime) -> None:
    """torch's own would be rounded up to a power of two."""
    tier = HostTier([Slots(5, 4096)], bytes(32), pinned=True)
    [memory] = tier.memory
    assert runtime.pinned == {memory.data_ptr(): 5 * (4096 + CHECK_BYTES)} and tier.fd == -1
    saved = tier.save([torch.full((2, 4096), 7, dtype=torch.uint8)], [Move(1, 3, b"block")])
    assert not tier.checks[3], "a GPU may not have copied it yet"
    saved()
    assert tier.checks[3]
    assert memory[3].tolist() == [7] * 4096 and not memory[:3].any()
    del tier, saved
    assert runtime.pinned
    del memory
    assert not runtime.pinned
    runtime.refuses = True
    with pytest.raises(MemoryError, match="25,600 bytes cannot be pinned for a GPU: out of memory"):
        HostTier([Slots(5, 4096)], bytes(32), pinned=True)


def test_ranks_with_gpus_pin_the_same_memory(runtime: Runtime) -> None:
    """Each has a part of every block there, and what goes to disk or to other engines is whole blocks."""
    _, fd = ops_memory.shared(5 * (4096 + CHECK_BYTES))
    tiers = [HostTier([Slots(5, 4096)], bytes(32), pinned=True, fd=fd) for _ in range(2)]
    os.close(fd)
    assert len(runtime.pinned) == 2 and all(tier.fd >= 0 for tier in tiers)
    tiers[0].save([torch.full((2, 4096), 7, dtype=torch.uint8)], [Move(1, 3, b"block")])()
    pool = torch.zeros(2, 4096, dtype=torch.uint8)
    assert tiers[1].load([pool], [Move(1, 3, b"block")]) == [] and pool[1].tolist() == [7] * 4096
    tiers.clear()
    assert not runtime.pinned


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_blocks_that_a_gpu_saves_are_checked_when_their_step_has_run(
    tmp_path: Path, overlap: bool, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = DelayedDevice()

    def pinned(slots: Sequence[Slots], key: bytes, on_gpu: bool, *more: Any) -> HostTier:
        return HostTier(slots, key, True, *more)

    def checked(self: HostTier, *given: Any) -> None:
        assert not device.is_active, "while a step is launched, nothing waits for what it saves"
        add_check(self, *given)

    add_check = HostTier._add_check
    monkeypatch.setattr(HostTier, "_add_check", checked)
    monkeypatch.setattr("quire.kv.host.HostTier", pinned)
    model = {"model": str(save_checkpoint(tmp_path, "qwen3")), "threads": 1, "async_scheduling": overlap}
    with on_device(device, SpanKernels()):
        expected = run(make(model, num_kv_blocks=200, max_num_batched_tokens=64), prompts())
        engine = make(model, num_kv_blocks=24, host_kv_memory="16MiB", max_num_batched_tokens=64)
        assert run(engine, prompts()) == expected
    assert engine.stats.preemptions and hosted(engine)["loaded"] and not hosted(engine)["bad"]
    engine.close()


def test_an_engine_is_closed_when_the_gpu_has_done_what_it_was_told(tmp_path: Path) -> None:
    """Its memory is not unpinned before."""
    device, model = DelayedDevice(), {"model": str(save_checkpoint(tmp_path, "qwen3")), "threads": 1}
    with on_device(device, SpanKernels()):
        engine = make(model | {"async_scheduling": True}, num_kv_blocks=24)
        engine.add(Request(1, [5] * 5, params(0), max_tokens=9))
        engine.step()
        assert engine._in_flight and device._hidden
        engine.close()
    assert not device._hidden
