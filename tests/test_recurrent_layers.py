"""Recurrent layers of every kind: transformers' recurrences, and that no cut, neighbour or rejected row changes a bit.

On a CPU, with every instruction set that the machine has; `test_triton_states.py` has the same in Triton.
"""

from __future__ import annotations

import random

import pytest
import torch

from quire.ops import RaggedBatch, choose_kernels, self_test
from quire.ops.cpu import library
from quire.ops.short_conv import ConvShape
from tests.recurrent_layers import KINDS, LAYER, Sequences, by_the_recurrence

EACH_IMPLEMENTATION = pytest.mark.parametrize("name", [*library.usable(), "torch"])
EACH_KIND = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.quick(every=5)
@EACH_IMPLEMENTATION
@EACH_KIND
def test_a_layer_is_the_recurrence(kind: str, name: str) -> None:
    sequences = Sequences(choose_kernels(name), KINDS[kind](16, torch.float32), 150)
    expected = by_the_recurrence(sequences)
    tolerance = 1e-5 if kind != "Mamba" else 1e-6 * float(expected.abs().max())
    torch.testing.assert_close(sequences.whole().double(), expected, rtol=1e-5, atol=tolerance)


@pytest.mark.quick(every=5)
@EACH_IMPLEMENTATION
@EACH_KIND
@pytest.mark.parametrize("block_size", [16, 64])
def test_no_cut_no_neighbour_and_no_rejected_row_changes_a_bit(block_size: int, kind: str, name: str) -> None:
    """At hundreds of random places; rejected rows, and what lies in blocks that nobody has written, are not numbers."""
    kernels, rnd = choose_kernels(name), random.Random(block_size)
    length, times = (37 if kind == "Kimi delta attention" else 70, 1) if name == "torch" else (200, 5)
    made = KINDS[kind](block_size, torch.bfloat16)
    alone = Sequences(kernels, made, length, requests=3)
    expected = [alone.whole(request) for request in range(3)]
    for _ in range(times):
        found = Sequences(kernels, made, length, requests=3).random_steps(rnd)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.quick(every=5)
@EACH_IMPLEMENTATION
@EACH_KIND
def test_blocks_that_are_not_there_are_neither_read_nor_written(kind: str, name: str) -> None:
    sequences = Sequences(choose_kernels(name), KINDS[kind](16, torch.float32), 100)
    expected = sequences.whole()
    sequences.cache.memory.fill_(255)
    sequences.tables[0, :4] = 0  # the blocks at the end are there, those before them are not
    found = sequences.step([(0, 0, 83)]) + sequences.step([(0, 83, 100)])
    assert torch.equal(torch.cat(found), expected)
    assert (sequences.cache.memory[0] == 255).all()


@EACH_IMPLEMENTATION
@EACH_KIND
def test_rows_of_a_block_can_be_copied(kind: str, name: str) -> None:
    """A prompt that leaves another one in mid-block goes on from its rows."""
    sequences = Sequences(choose_kernels(name), KINDS[kind](16, torch.float32), 64)
    expected, before = sequences.whole(), int(sequences.tables[0, 2])
    spare = sequences.kind.shape.cache(sequences.cache.num_blocks + 1)
    spare.memory.fill_(255)
    spare.memory[:-1] = sequences.cache.memory
    spare.copy([(before, spare.num_blocks - 1, 9)])
    sequences.cache, sequences.tables[0, 2] = spare, spare.num_blocks - 1
    assert torch.equal(sequences.step([(0, 41, 64)])[0], expected[41:])


@EACH_KIND
def test_trees_and_inputs_of_other_widths_are_refused(kind: str) -> None:
    sequences = Sequences(choose_kernels("torch"), KINDS[kind](16, torch.float32), 16)
    batch = RaggedBatch(*[torch.zeros(1, dtype=torch.int64)] * 3, [0, 1], [1], torch.ones(1, 1, dtype=torch.int64), 16)
    with pytest.raises(ValueError, match=f"for layer {LAYER} do not fit"):
        sequences.kind.step(sequences.kernels, sequences.x[0, :1, :100], sequences.cache, batch)
    batch.trees = object()  # type: ignore[assignment]
    with pytest.raises(ValueError, match="draft without trees"):
        sequences.kind.step(sequences.kernels, sequences.x[0, :1], sequences.cache, batch)


def test_a_convolution_that_sees_more_than_a_block_and_a_token_is_refused() -> None:
    kind = KINDS["short convolution"](16, torch.float32)
    assert isinstance(kind.shape, ConvShape)
    conv = torch.ones(18, kind.shape.channels)
    cache = kind.shape.cache(2)
    batch = RaggedBatch(*[torch.zeros(1, dtype=torch.int64)] * 3, [0, 1], [1], torch.ones(1, 1, dtype=torch.int64), 16)
    with pytest.raises(ValueError, match="18 taps does not fit blocks of 16 tokens"):
        choose_kernels("auto").short_conv(torch.ones(1, kind.width), kind.weights._replace(conv=conv), cache, batch, 0)


@pytest.mark.parametrize("kernel", self_test.RECURRENT)
def test_quire_doctor_tries_the_layers(kernel: str) -> None:
    found = self_test.check_recurrent(choose_kernels("auto"), kernel)
    assert found.passed and found.cases > 1
