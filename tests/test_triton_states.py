"""The gated delta rule in Triton: equal to the reference, and bit-equal however a sequence is cut and batched."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError
from quire.ops import Kernels
from quire.ops.ragged import RaggedBatch
from quire.ops.states import DeltaNetWeights, StateCache, StateShape
from quire.ops.triton.kernels import TritonKernels
from quire.runner import device_forward
from tests.oracle import save_checkpoint
from tests.test_models_recurrent import Sequences
from tests.test_triton_attention import on_device
from tests.test_triton_engine import run, start
from tests.test_triton_rows import as_on_a_gpu
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

__all__ = ["as_on_a_gpu"]

SHAPE = StateShape(2, 1, 2, 16, 24, 4, torch.float32, 16)
ONE, EACH = "one decay a head", "a decay for each number"
SHAPES = {ONE: SHAPE, EACH: replace(SHAPE, key_heads=2, decay_dim=16)}

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # rows that are not there


class OnDevice(TritonKernels):
    """Takes a batch of the host's as a GPU has it, with padding."""

    def __init__(self, padding: tuple[int, int] = (0, 0)) -> None:
        super().__init__("cpu", deterministic=True)
        self.padding = padding

    def delta_net(
        self,
        x: torch.Tensor,
        ab: torch.Tensor,
        weights: DeltaNetWeights,
        cache: StateCache,
        batch: RaggedBatch,
        layer: int,
    ) -> torch.Tensor:
        counts = zip(batch.row_starts, batch.row_starts[1:], batch.context_lens, strict=False)
        spans = [(end - (last - first), last - first) for first, last, end in counts]
        there = on_device(spans, list(batch.block_tables), cache.block_size, self.padding)
        x, ab = (torch.cat([part, part.new_full((self.padding[0], part.shape[1]), float("nan"))]) for part in (x, ab))
        out = super().delta_net(x, ab, weights, cache, there, layer)
        assert (out[len(x) - self.padding[0] :] == 0).all()
        return out[: len(x) - self.padding[0]]


@pytest.mark.parametrize("case", SHAPES)
def test_it_is_the_reference(case: str) -> None:
    ours, theirs = (Sequences(kernels, SHAPES[case], 40) for kernels in (OnDevice((3, 1)), Kernels()))
    torch.testing.assert_close(ours.whole(), theirs.whole(), rtol=1e-5, atol=1e-5)
    for mine, reference in zip(ours.cache.views[1:], theirs.cache.views[1:], strict=True):
        own = ours.tables[0, :2]  # whole blocks; what lies behind the last row is not a number
        torch.testing.assert_close(mine[own, 1], reference[own, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [ONE, pytest.param(EACH, marks=pytest.mark.slow)])
def test_no_cut_no_neighbour_and_no_rejected_row_changes_a_bit(case: str) -> None:
    rnd, length, kernels = random.Random(3), 37, OnDevice((2, 1))
    shape = replace(SHAPES[case], block_size=16 if SHAPES[case].decay_dim == 1 else 32, dtype=torch.bfloat16)
    alone = Sequences(kernels, shape, length, requests=2)
    expected = [alone.whole(request) for request in range(2)]
    sequences = Sequences(kernels, shape, length, requests=2)
    places, found = [0, 0], [[], []]
    while min(places) < length:
        spans, inputs, kept = [], [], []
        for request in rnd.sample(range(2), 2):
            start_, end = places[request], min(length, places[request] + rnd.choice([1, 2, 5, 16, 17]))
            if start_ == length:
                continue
            last = min(length, end + rnd.choice([0, 3]))
            spans.append((request, start_, last))
            poison = torch.full_like(sequences.x[request, end:last], float("nan"))
            inputs.append(torch.cat([sequences.x[request, start_:end], poison]))
            kept.append(end - start_)
            places[request] = end
        for (request, _, _), count, out in zip(spans, kept, sequences.step(spans, torch.cat(inputs)), strict=True):
            found[request].append(out[:count])
    for request in range(2):
        assert torch.equal(torch.cat(found[request]), expected[request])


def test_blocks_that_are_not_there_are_neither_read_nor_written() -> None:
    sequences = Sequences(OnDevice(), SHAPE, 40)
    expected = sequences.whole()
    sequences.cache.memory.fill_(255)
    sequences.tables[0, :1] = 0
    found = sequences.step([(0, 0, 35)]) + sequences.step([(0, 35, 40)])
    assert torch.equal(torch.cat(found), expected)
    assert (sequences.cache.memory[0] == 255).all()


@pytest.mark.parametrize(
    "architecture",
    ["qwen3_5_text", *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3_next", "kimi_linear"))],
)
def test_the_engine_gives_the_tokens_of_the_plain_kernels_whatever_is_around_a_request(
    architecture: str, tmp_path
) -> None:
    """With the prefix cache, which copies the head of a block."""
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    if architecture == "kimi_linear":
        sizes["mlp_layer_types"] = ["dense", "sparse"]
    folder = str(save_checkpoint(tmp_path, architecture, dtype=torch.float32, **sizes))
    config: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 20, "max_model_len": 32}
    plain = Engine(EngineConfig(model=folder, threads=1, device="cpu", cpu_kernels="torch", **config))
    theirs = run(plain, [1, 2])
    with mock.patch.object(device_forward, "CHUNK", 4):  # the interpreter is slow: steps are padded to few rows
        engine = start(folder, {}, num_kv_blocks=None, kv_cache_memory="4MiB", max_num_seqs=2)
        together = run(engine, [1, 2])
        assert run(engine, [2]) == {2: together[2]}
    assert engine.stats.cached_tokens > 0
    for index, ours in together.items():
        assert [token for token, _ in ours] == [token for token, _ in theirs[index]]


def test_recurrent_layers_of_other_kinds_are_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="short convolutions or Mamba layers run on a CPU alone"):
        start(str(save_checkpoint(tmp_path, "lfm2")), {})


# -- for GPUs that are not there -----------------------------------------------------------------------------------

KINDS = [
    StateShape(2, 16, 32, 128, 128, 4, torch.bfloat16, 16),
    StateShape(2, 32, 32, 128, 128, 4, torch.float16, 16, decay_dim=128),
]


def launch_all() -> None:
    """Of each kind, steps of several sizes."""
    for shape in KINDS:
        cache, decays = StateCache(3, shape), torch.ones(shape.heads * shape.decay_dim)
        conv, norm = torch.ones(shape.taps, shape.channels), torch.ones(shape.value_dim)
        for tokens in (2, 4):
            batch = on_device([(0, 1)] * tokens, [torch.zeros(8, dtype=torch.int64)] * tokens, 16)
            x = torch.ones(tokens, cache.widths[0], dtype=shape.dtype)
            weights = DeltaNetWeights(conv, decays, decays, norm, 1e-6)
            TritonKernels("cpu").delta_net(x, torch.ones(tokens, shape.rates), weights, cache, batch, 1)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus(arch: int) -> None:
    found = compile_all("tests.test_triton_states", arch)
    count = Counter(use["kernel"] for use in found)
    assert count["_rule"] == len(KINDS) == count["_finish"] and count["_mix"] <= 2 * len(KINDS)
    assert max(use["shared"] for use in found) <= 99 * 1024, found
