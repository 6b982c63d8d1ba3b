"""How the memory is divided, and what is refused."""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo, Span, StepPlan
from quire.errors import ConfigError, MemoryPlanError, PoolTooSmallError
from quire.layers import latent
from quire.models.layer_groups import layer_groups
from quire.models.model import Model
from quire.models.registry import load_model
from quire.ops import Kernels, KVShape, choose_kernels, kv_cache, memory, sparse
from quire.ops.cpu import sparse as sparse_in_cpp
from quire.ops.memory import give_back
from quire.runner import kv_pools, memory_plan, start
from quire.runner.kv_pools import Pools, retentions
from quire.runner.memory_plan import activation_bytes, format_size, free_memory, plan_memory
from quire.runner.model_runner import ModelRunner
from quire.runner.proposer import Speculation
from quire.speculate.ngram import NgramProposer
from tests.oracle import SIZES, save_checkpoint

GIB = 2**30
TOKEN_BYTES = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"] * 16 * 2  # bf16, head_dim 16


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    return load_model(save_checkpoint(tmp_path_factory.mktemp("m"), "qwen3", dtype=torch.bfloat16))


@pytest.fixture(scope="module")
def windowed(tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp("w")
    return load_model(save_checkpoint(folder, "mistral", sliding_window=32, max_position_embeddings=4096))


def plan(model: Model, free: int = GIB, **options):
    return plan_memory(EngineConfig(model="m", **options), model, free)


def test_kv_bytes_a_token_follow_from_the_models_shape(model):
    assert plan(model).kv_bytes_per_token == TOKEN_BYTES


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantized_cache_takes_a_byte_a_number_and_four_a_scale(model, kv_cache_dtype):
    heads = 2 * SIZES["num_hidden_layers"] * SIZES["num_key_value_heads"]
    made = plan(model, kv_cache_dtype=kv_cache_dtype, kv_cache_memory="1MiB")
    assert made.kv_bytes_per_token == heads * (16 + 4)
    assert made.num_blocks == 2**20 // (16 * made.kv_bytes_per_token)


def test_the_pool_holds_as_many_full_length_requests_as_may_run_if_memory_allows(model):
    made = plan(model, max_num_seqs=4)
    assert made.kv_tokens == 4 * 512 and made.max_model_len == 512 and not made.notes


def test_a_tight_memory_shortens_the_context_and_says_so(model):
    activations = plan(model, max_num_batched_tokens=128).activations
    made = plan(model, free=activations + 2 * 21 * 16 * TOKEN_BYTES, max_num_batched_tokens=128)
    assert made.max_model_len == made.kv_tokens == 20 * 16
    assert "max_model_len is 320, not the model's 512" in made.notes[0]


def test_num_kv_blocks_and_kv_cache_memory_override_the_plan(model):
    assert plan(model, num_kv_blocks=40).num_blocks == 41
    assert plan(model, kv_cache_memory="1MiB").num_blocks == 2**20 // (16 * TOKEN_BYTES)


def test_engines_that_are_still_to_come_find_room_for_their_weights_and_as_much_kv(model, monkeypatch):
    free = 3 * 2**30
    monkeypatch.setattr(start, "free_memory", lambda: free)
    config = EngineConfig(model="demo", host_kv_memory="64MiB")
    alone, first = start.free_for_each(config, model, 1), start.free_for_each(config, model, 1, neighbours=2)
    assert alone == free - 64 * 2**20
    assert 3 * (first + 64 * 2**20) + 2 * model.weight_bytes == pytest.approx(free, abs=3)
    assert 2 * start.free_for_each(config, model, 2, neighbours=2) == pytest.approx(
        first - 2 * model.weight_bytes / 3, abs=4
    )


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_values_that_work(model):
    with pytest.raises(PoolTooSmallError, match="set max_model_len to at most 160") as caught:
        plan(model, max_model_len=200, num_kv_blocks=10)
    needed = str(caught.value).rsplit("at least ", 1)[1].replace(" ", "")
    assert plan(model, max_model_len=200, kv_cache_memory=needed).max_model_len == 200


def test_more_than_is_free_is_refused_with_a_value_that_works(model):
    with pytest.raises(MemoryPlanError, match=r"num_kv_blocks to at most (\d+)") as caught:
        plan(model, kv_cache_memory="2GiB")
    blocks = int(str(caught.value).split("num_kv_blocks to at most ")[1].split(")")[0])
    assert plan(model, num_kv_blocks=blocks).num_blocks == blocks + 1


def test_memory_for_not_even_one_request_is_refused(model):
    with pytest.raises(MemoryPlanError, match="not one request fits"):
        plan(model, kv_cache_memory="1KB")


def test_a_context_beyond_the_models_own_is_refused(model):
    with pytest.raises(ConfigError, match="512 positions the model was made for"):
        plan(model, max_model_len=513)


def test_a_sliding_window_needs_no_room_for_the_whole_context(windowed):
    assert plan(windowed, num_kv_blocks=20, max_num_batched_tokens=128).max_model_len == 4096
    assert plan(windowed, num_kv_blocks=10, max_num_batched_tokens=128).max_model_len == 160


# -- windows in some layers ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Model:
    """Of four layers, three see a window of 32."""
    options = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 1, "num_hidden_layers": 4}
    folder = tmp_path_factory.mktemp("x")
    return load_model(save_checkpoint(folder, "qwen2", dtype=torch.bfloat16, max_position_embeddings=4096, **options))


LAYER_BYTES = 2 * SIZES["num_key_value_heads"] * 16 * 2


def test_each_group_has_a_pool_and_what_both_take_is_what_was_given(mixed):
    made = plan(mixed, kv_cache_memory="1MiB", max_num_batched_tokens=128, max_num_seqs=8, max_model_len=512)
    full, windowed = made.groups
    assert (full.window, full.num_layers, full.bytes_per_token) == (None, 1, LAYER_BYTES)
    assert (windowed.window, windowed.num_layers, windowed.bytes_per_token) == (32, 3, 3 * LAYER_BYTES)
    assert made.kv_bytes_per_token == 4 * LAYER_BYTES and made.num_blocks == full.num_blocks
    assert (full.peak_blocks, windowed.peak_blocks) == (32, 11), "a window and a chunk, anyhow they lie in blocks"
    assert 2**20 - 4 * 16 * LAYER_BYTES < made.kv_bytes <= 2**20
    assert made.full_length_requests == full.num_usable / 32 < (windowed.num_usable - 7) / 4
    assert windowed.num_usable == 2 * 8 * 4 + 7, "twice what eight requests use, and a step"


def test_short_and_long_requests_lose_the_same_share_to_the_division(mixed, monkeypatch):
    """Of what pools would hold that were made for them alone, where so many may run that they could use all."""
    config = EngineConfig(model="m", max_num_batched_tokens=128, max_num_seqs=8)
    monkeypatch.setattr(kv_pools, "CACHED", 10**6)
    pools = Pools(config, mixed, None)
    for tokens in (512, 1024, 4096):
        size = 2**26
        full, windowed = pools.within(size, tokens)
        kept = pools.kept(tokens)
        short = min(full, windowed) / (size / (16 * 4 * LAYER_BYTES))
        alone = size / (16 * LAYER_BYTES * (kept[0] + 3 * kept[1]))
        longest = min(full / kept[0], windowed / kept[1]) / alone
        assert short == pytest.approx(longest, rel=0.01)
        assert pools.shares(tokens)[1] == (1 + Fraction(kept[1], kept[0]) * 3) / 4
    assert pools.shares(48) == [1, 1], "a request that no window passes needs as much of each"


@pytest.mark.parametrize("batched", [512, 2048])
def test_at_32k_five_windowed_layers_to_one_leave_room_for_three_times_the_tokens(batched, tmp_path):
    """Of one group that keeps everything, in the same memory; layers as Gemma 3's, a window of 1,024."""
    options = {"num_hidden_layers": 12, "sliding_window": 1024, "max_position_embeddings": 32768}
    folder = save_checkpoint(tmp_path, "gemma3_text", dtype=torch.bfloat16, **options)
    config = EngineConfig(model="m", kv_cache_memory="256MiB", max_num_batched_tokens=batched)
    made, one = (plan_memory(config, load_model(folder, one_kv_group=one), GIB) for one in (False, True))
    assert [group.num_layers for group in made.groups] == [2, 10] and made.max_model_len == one.max_model_len == 32768
    assert made.kv_bytes <= 2**28 and made.kv_bytes_per_token == one.kv_bytes_per_token
    assert made.kv_tokens >= 3 * one.kv_tokens
    assert made.full_length_requests >= 3 * one.full_length_requests


def test_gpt_oss_has_room_for_nearly_twice_the_tokens_of_one_group(tmp_path):
    """Half its layers see 128 positions: what few requests cannot use of their pool is the others'."""
    options = {"num_hidden_layers": 2, "sliding_window": 128, "max_position_embeddings": 131072}
    rope = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    folder = save_checkpoint(tmp_path, "gpt_oss", dtype=torch.bfloat16, rope_parameters=rope, **options)
    config = EngineConfig(model="m", kv_cache_memory="64MiB", max_num_batched_tokens=512, max_num_seqs=16)
    made, one = (plan_memory(config, load_model(folder, one_kv_group=one), GIB) for one in (False, True))
    assert [group.window for group in made.groups] == [None, 128] and made.max_model_len == 131072
    assert made.kv_tokens >= 1.9 * one.kv_tokens and made.kv_bytes <= 2**26
    windowed = made.groups[1]
    assert windowed.num_usable >= 2 * 16 * (windowed.peak_blocks - windowed.step_blocks) + windowed.step_blocks


def test_beside_what_requests_keep_there_is_room_for_one_step(mixed):
    """Requests of the longest context, and a step of prompt tokens that the windows have not passed yet."""
    config = EngineConfig(model="m", max_num_batched_tokens=128, max_num_seqs=8)
    pools = Pools(config, mixed, None)
    for tokens in (64, 512, 4096):
        kept, peaks = pools.kept(tokens), pools.peaks(tokens)
        for count in (1, 2, 7):
            full, windowed = pools.plans(pools.of_first(count * kept[0] + 1, tokens), tokens)
            assert windowed.num_usable >= min(count * kept[1] + peaks[1] - kept[1], full.num_usable)
            assert min(full.longest_requests, windowed.longest_requests) >= count


@pytest.mark.parametrize("windows", [(None, 64, 16), (64, 16), (2000, None, 2000, 8)])
@pytest.mark.parametrize("size", [2**18, 2**20, 2**24])
def test_pools_of_any_groups_take_no_more_than_they_may_and_hold_the_longest_context(windows, size, model, monkeypatch):
    monkeypatch.setattr(model, "groups", layer_groups(windows))
    monkeypatch.setattr(model, "max_position_embeddings", 4096)
    made = plan(model, kv_cache_memory=str(size), max_num_batched_tokens=128, max_num_seqs=8)
    assert made.kv_bytes <= size
    assert all(group.num_usable >= group.peak_blocks for group in made.groups)
    assert [group.window for group in made.groups] == [group.window for group in model.groups]
    assert all(one.num_blocks >= other.num_blocks for one, other in itertools.pairwise(made.groups))
    assert made.full_length_requests >= 1


def test_the_longest_context_is_that_of_which_all_pools_hold_one(mixed):
    made = plan(mixed, num_kv_blocks=40, max_num_batched_tokens=128, max_num_seqs=8)
    assert made.max_model_len == 640 and made.groups[0].num_usable == 40 and "max_model_len is 640" in made.notes[0]
    assert made.groups[1].num_usable >= made.groups[1].peak_blocks
    size = "200KiB"
    made = plan(mixed, kv_cache_memory=size, max_num_batched_tokens=128, max_num_seqs=8)
    assert all(group.num_usable >= group.peak_blocks for group in made.groups)
    with pytest.raises(PoolTooSmallError, match=rf"at most {made.max_model_len}, or") as caught:
        plan(mixed, kv_cache_memory=size, max_num_batched_tokens=128, max_num_seqs=8, max_model_len=4000)
    needed = str(caught.value).rsplit("at least ", 1)[1].replace(" ", "")
    plan(mixed, kv_cache_memory=needed, max_num_batched_tokens=128, max_num_seqs=8, max_model_len=4000)


def test_memory_for_not_even_one_block_a_group_is_refused(mixed):
    with pytest.raises(MemoryPlanError, match=r"gives \d KV blocks .* not one request fits"):
        plan(mixed, kv_cache_memory="12KiB", max_num_batched_tokens=128, max_num_seqs=8)
    with pytest.raises(MemoryPlanError, match=r"num_kv_blocks to at most (\d+)") as caught:
        plan(mixed, kv_cache_memory="2GiB")
    blocks = int(str(caught.value).split("num_kv_blocks to at most ")[1].split(")")[0])
    assert plan(mixed, num_kv_blocks=blocks).num_blocks == blocks + 1


def test_the_table_says_what_each_group_has_only_where_there_are_several(mixed, model):
    rows = dict(plan(mixed, num_kv_blocks=300, max_num_batched_tokens=128, max_num_seqs=8).table())
    full, windowed = rows["KV blocks, all positions"], rows["KV blocks, window of 32"]
    assert full == "300 of 16 tokens: 4,800 tokens; 1 of 4 layers, 128 B a token, at most 256 blocks a request"
    assert windowed.endswith("; 3 of 4 layers, 384 B a token, at most 11 blocks a request")
    assert "KV blocks" not in rows and "KV blocks" in dict(plan(model).table())


def test_what_drafts_lies_with_the_layers_that_keep_all_or_makes_the_first_group_keep_all(mixed, windowed):
    shape = KVShape(1, 1, 16, torch.bfloat16)
    drafting = Speculation(NgramProposer(2, 5), kv_shape=shape)
    config = EngineConfig(model="m", num_kv_blocks=300, max_num_batched_tokens=128, max_num_seqs=8)
    for model, speculation, windows in (
        (mixed, drafting, [None, 32]),
        (mixed, None, [None, 32]),
        (windowed, drafting, [None]),
        (windowed, None, [32]),
    ):
        assert [kept.window for kept in retentions(config, model, speculation)] == windows
    full, other = plan_memory(config, mixed, GIB, speculation=drafting).groups
    assert full.bytes_per_token == LAYER_BYTES + shape.bytes_per_token and other.bytes_per_token == 3 * LAYER_BYTES


def test_without_chunks_a_step_must_hold_the_longest_prompt(model):
    with pytest.raises(ConfigError, match="raise it to 576"):
        plan(model, enable_chunked_prefill=False, max_num_batched_tokens=500)
    plan(model, enable_chunked_prefill=False, max_num_batched_tokens=576)


def test_the_table_names_every_share(model):
    rows = dict(plan(model).table())
    assert {"weights", "KV cache", "KV blocks", "longest context", "full-length requests"} <= set(rows)


@pytest.mark.parametrize("measured", [None, 10 * 2**20])
def test_logits_of_drafts_have_room_whether_the_largest_step_was_measured_or_counted(model, measured, monkeypatch):
    monkeypatch.setattr(memory_plan, "LOGIT_SLICE_BYTES", 0)  # which have room anyway

    def activations(seqs: int, **options) -> int:
        config = EngineConfig(model="m", max_num_seqs=seqs, max_num_batched_tokens=4096, **options)
        speculation = Speculation(NgramProposer(2, 5)) if options else None
        return plan_memory(config, model, GIB, measured, speculation=speculation).activations

    spec = {"method": "ngram", "num_speculative_tokens": 3}
    row = model.vocab_size * (2 + 12)  # the model's type, and three times fp32
    for seqs, rows in ((1000, 4000), (2000, 4096)):
        assert activations(seqs, speculative_config=spec) - activations(seqs) == (rows - seqs) * row


def test_sizes_are_written_for_people():
    assert [format_size(n) for n in (5, 1536, 2**20, 114688, 5 * GIB)] == [
        "5 B",
        "1.5 KiB",
        "1 MiB",
        "112 KiB",
        "5 GiB",
    ]


def test_free_memory_is_read_from_the_system_and_guessed_where_that_does_not_tell(tmp_path):
    assert 2**20 < free_memory() < 2**50
    (tmp_path / "meminfo").write_text("MemTotal: 8 kB\nMemAvailable: 4 kB\n")
    assert free_memory(tmp_path / "meminfo") <= 4096
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert free_memory(tmp_path / "none") == total // 2


class Largest:
    """A model and the largest steps of an engine, whose memory is measured. Steps lie on the blocks of one request."""

    tokens, requests, context, rows = 1024, 16, 4096, 8

    def __init__(self, folder: Path, kernels: Kernels) -> None:
        self.model = load_model(folder, kernels=kernels)
        self.config = EngineConfig(
            model="m", max_num_batched_tokens=self.tokens, max_num_seqs=self.requests, max_model_len=self.context
        )
        caches = self.model.new_caches([self.context // 16 + 1], 16)
        caches[0].data.zero_()
        self.runner = ModelRunner(self.model, caches, self.rows, threads=1)
        self.steps = self.held = 0

    def planned(self) -> int:
        return activation_bytes(self.config, self.model, self.rows)

    def peak(self, lengths: list[int], start: int = 0) -> int:
        """Most bytes held at once in a step of spans of these lengths, each from `start` on and sampled."""
        params = SamplingParams(temperature=1.0, top_p=0.9, top_k=50, repetition_penalty=1.1, seed=0, logprobs=0)
        plan = StepPlan(self.steps, [])
        for number, length in enumerate(lengths, start=100 * self.steps):
            blocks = list(range(1, (start + length) // 16 + 2))[: self.context // 16]
            plan.spans.append(Span(number, start, [0] * length, num_sampled=1, blocks=[blocks]))
            plan.started.append(RequestInfo(number, params, 0, [0] * (start + length)))
        self.steps += 1
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            self.runner.run(plan)
        events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
        changes = [event.nbytes() for event in sorted(events, key=lambda event: event.start_ns())]
        held = list(itertools.accumulate(changes, initial=self.held))
        self.held = held[-1]  # buffers that stay
        return max(held)


@pytest.mark.quick("qwen3-True", "qwen3_moe-False", "deepseek_v3-False", "deepseek_v32-True")
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_moe", "deepseek_v3", "deepseek_v32"])
def test_the_largest_steps_take_no_more_than_is_planned_for_activations(
    architecture: str, deterministic: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (kv_cache, memory):
        monkeypatch.setattr(module, "huge", lambda size: torch.empty(size, dtype=torch.uint8))  # seen by the profiler
    monkeypatch.setattr(latent, "RESTORED_BYTES", 2**20)
    monkeypatch.setattr(memory_plan, "RESTORED_BYTES", 2**20)
    for module in (sparse, sparse_in_cpp):
        monkeypatch.setattr(module, "SCORE_BYTES", 2**20)
    monkeypatch.setattr(sparse, "GATHERED_BYTES", 2**20)
    wide: dict[str, Any] = {} if architecture == "qwen3" else {"moe_intermediate_size": 256}
    if architecture == "deepseek_v32":
        wide["index_topk"] = 512
    folder = save_checkpoint(tmp_path, architecture, max_position_embeddings=4096, intermediate_size=512, **wide)
    largest = Largest(folder, choose_kernels(deterministic=deterministic))
    many = largest.peak([largest.tokens // largest.requests] * largest.requests)
    late = largest.peak([largest.tokens], start=largest.context - largest.tokens)
    assert 0.5 * largest.planned() < max(many, late) < largest.planned()


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="the C library keeps what was freed")
def test_what_was_freed_goes_back_to_the_system() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()

    parts = [torch.ones(25_000) for _ in range(800)]  # 76 MiB, each too small for a mapping of its own
    del parts[:-1]  # the last one keeps the heap from ending before it
    before = resident()
    give_back()
    assert before - resident() > 40 * 2**20 and bool((parts[0] == 1).all())
