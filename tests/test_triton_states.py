"""Recurrent layers in Triton: equal to the references, and bit-equal however a sequence is cut and batched."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.ops import Kernels, choose_kernels
from quire.ops.ragged import RaggedBatch
from quire.ops.short_conv import ConvShape
from quire.ops.states import StateShape
from quire.ops.triton import short_conv
from quire.ops.triton.kernels import TritonKernels
from quire.runner import device_forward
from tests.oracle import save_checkpoint
from tests.recurrent_layers import Kind, Sequences, by_the_recurrence, conv_kind, delta_kind, mamba_kind
from tests.test_triton_attention import on_device
from tests.test_triton_engine import run, start
from tests.test_triton_rows import as_on_a_gpu
from tests.triton_compile import EACH_ARCHITECTURE, compile_all
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

__all__ = ["as_on_a_gpu"]

KINDS: dict[str, Callable[[int, torch.dtype], Kind]] = {
    "gated delta net": lambda size, dtype: delta_kind(StateShape(2, 1, 2, 16, 24, 4, dtype, size)),
    "Kimi delta attention": lambda size, dtype: delta_kind(StateShape(2, 2, 2, 16, 24, 4, dtype, size, decay_dim=16)),
    "Mamba": lambda size, dtype: mamba_kind(StateShape(2, 1, 2, 20, 24, 4, dtype, size)),
    "short convolution": lambda size, dtype: conv_kind(ConvShape(2, 40, dtype, size)),
}
EACH_KIND = pytest.mark.parametrize("kind", KINDS)

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # rows that are not there


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_conv, "PART", 16)


class OnDevice(TritonKernels):
    """Takes a batch of the host's as a GPU has it, with padding (rows, spans)."""

    def __init__(self, padding: tuple[int, int] = (0, 0)) -> None:
        super().__init__("cpu", deterministic=True)
        self.padding = padding

    def of(self, kind: Kind) -> Kind:
        """The same layer, whose step gets its batch so."""

        def step(kernels: Kernels, x: torch.Tensor, cache: Any, batch: RaggedBatch) -> torch.Tensor:
            counts = zip(batch.row_starts, batch.row_starts[1:], batch.context_lens, strict=False)
            spans = [(end - (last - first), last - first) for first, last, end in counts]
            there = on_device(spans, list(batch.block_tables), cache.block_size, self.padding)
            padded = torch.cat([x, x.new_full((self.padding[0], x.shape[1]), float("nan"))])
            out = kind.step(kernels, padded, cache, there)
            assert (out[len(x) :] == 0).all()
            return out[: len(x)]

        return kind._replace(step=step)


def sequences_of(kind: str, length: int, dtype: torch.dtype, padding: tuple[int, int], requests: int = 1) -> Sequences:
    kernels = OnDevice(padding)
    return Sequences(kernels, kernels.of(KINDS[kind](16, dtype)), length, requests)


@pytest.mark.quick("Mamba", "short convolution")
@EACH_KIND
def test_it_is_the_recurrence_and_leaves_what_the_cpus_kernels_leave(kind: str) -> None:
    ours, theirs = (
        sequences_of(kind, 33, torch.float32, (3, 1)),
        Sequences(choose_kernels("auto"), KINDS[kind](16, torch.float32), 33),
    )
    found, expected = ours.whole(), by_the_recurrence(ours)
    tolerance = 1e-5 if kind != "Mamba" else 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=tolerance)
    torch.testing.assert_close(found, theirs.whole(), rtol=1e-5, atol=tolerance)
    own = ours.tables[0, :2]  # whole blocks; what lies behind the last row is not a number
    for mine, reference in zip(ours.cache.views, theirs.cache.views, strict=True):
        torch.testing.assert_close(mine[own, 1], reference[own, 1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "kind", [name if name == "gated delta net" else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_no_cut_no_neighbour_and_no_rejected_row_changes_a_bit(kind: str) -> None:
    alone = sequences_of(kind, 21, torch.bfloat16, (2, 1), requests=2)
    expected = [alone.whole(request) for request in range(2)]
    found = sequences_of(kind, 21, torch.bfloat16, (2, 1), requests=2).random_steps(random.Random(3))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.quick("short convolution")
@pytest.mark.parametrize(
    "kind", [pytest.param(name, marks=pytest.mark.slow if name[0] == "K" else ()) for name in KINDS]
)
def test_blocks_that_are_not_there_are_neither_read_nor_written(kind: str) -> None:
    sequences = sequences_of(kind, 34, torch.float32, (0, 0))
    expected = sequences.whole()
    sequences.cache.memory.fill_(255)
    sequences.tables[0, :1] = 0
    found = sequences.step([(0, 0, 33)]) + sequences.step([(0, 33, 34)])
    assert torch.equal(torch.cat(found), expected)
    assert (sequences.cache.memory[0] == 255).all()


ENGINES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_next": {"layer_types": ["linear_attention", "full_attention"]},
    "kimi_linear": {
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
    },
    "nemotron_h": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "moe_latent_size": 32},
}
QUICK = ("granitemoehybrid",)


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in ENGINES]
)
def test_the_engine_gives_the_tokens_of_the_plain_kernels_whatever_is_around_a_request(
    architecture: str, tmp_path
) -> None:
    """With the prefix cache, which copies the head of a block."""
    sizes = {"num_hidden_layers": 2, **ENGINES[architecture]}
    if architecture == "nemotron_h":
        del sizes["num_hidden_layers"]
    folder = str(save_checkpoint(tmp_path, architecture, dtype=torch.float32, **sizes))
    config: dict[str, Any] = {"max_num_seqs": 2, "max_num_batched_tokens": 20, "max_model_len": 32}
    plain = Engine(EngineConfig(model=folder, threads=1, device="cpu", cpu_kernels="torch", **config))
    theirs = run(plain, [1, 2], max_tokens=2)
    with mock.patch.object(device_forward, "CHUNK", 4):  # the interpreter is slow: steps are padded to few rows
        engine = start(folder, {}, num_kv_blocks=None, kv_cache_memory="4MiB", max_num_seqs=2)
        together = run(engine, [1, 2], max_tokens=2)
        assert run(engine, [2], max_tokens=2) == {2: together[2]}
    assert engine.stats.cached_tokens > 0
    for index, ours in together.items():
        assert [token for token, _ in ours] == [token for token, _ in theirs[index]]


# -- for GPUs that are not there -----------------------------------------------------------------------------------

PUBLISHED = {
    "Qwen3.5 9B": delta_kind(StateShape(2, 16, 32, 128, 128, 4, torch.bfloat16, 16)),
    "Kimi Linear": delta_kind(StateShape(2, 32, 32, 128, 128, 4, torch.float16, 16, decay_dim=128)),
    "Granite 4.0 H Tiny": mamba_kind(StateShape(2, 1, 48, 128, 64, 4, torch.bfloat16, 16)),
    "LFM2 1.2B": conv_kind(ConvShape(2, 2048, torch.bfloat16, 16)),
}


def launch_all() -> None:
    """Of each published shape, steps of several sizes."""
    for kind in PUBLISHED.values():
        for tokens in (2, 4):
            batch = on_device([(0, 1)] * tokens, [torch.zeros(8, dtype=torch.int64)] * tokens, 16)
            x = torch.ones(tokens, kind.width, dtype=kind.shape.dtype)
            kind.step(TritonKernels("cpu"), x, kind.shape.cache(3), batch)


@EACH_ARCHITECTURE
def test_kernels_compile_for_gpus(arch: int) -> None:
    found = compile_all("tests.test_triton_states", arch)
    count = Counter(use["kernel"] for use in found)
    with_states = len(PUBLISHED) - 1
    assert count["_scan"] == with_states == count["_finish"], "whatever the step"
    assert count["_mix"] <= 2 * with_states and count["_short_conv"] <= 2, "two counts of spans"
    assert max(use["shared"] for use in found) <= 99 * 1024, found
