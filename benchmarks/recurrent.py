"""What the delta rule or Mamba 2 takes, beside what its bytes and products would: `python -m benchmarks.recurrent`.

A decoded token reads a state, the rows of its tile (half of them on average) and the convolution's weights; every
sixteenth writes a state. A token of a prompt is multiplied with a state twice (in Mamba 2 once), and added to one; in
its tile it meets half of the others. These products are compared with the rate of torch's in fp32.

Random numbers in the shape of a published model, one thread; processor time, the least of a few calls, so that a busy
machine plays a small part. Layers take turns, so that their states come from memory as they do in a model. Sums,
products and layers take turns, too, as the rate of memory may change within minutes: a share is the median of turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from quire.bench.ceilings import of_state
from quire.ops import RaggedBatch, choose_kernels
from quire.ops.mamba import MambaWeights
from quire.ops.states import DeltaNetWeights, StateCache, StateShape

SHAPES = {
    "qwen3.5-0.8b": StateShape(18, 16, 16, 128, 128, 4, torch.bfloat16, 16),
    "qwen3.5-9b": StateShape(24, 16, 32, 128, 128, 4, torch.bfloat16, 16),
    "kimi-linear": StateShape(20, 32, 32, 128, 128, 4, torch.bfloat16, 16, decay_dim=128),
}
MAMBA = {
    "granite-4.0-h-tiny": StateShape(36, 1, 48, 128, 64, 4, torch.bfloat16, 16),
    "nemotron-3-nano": StateShape(23, 8, 64, 128, 64, 4, torch.bfloat16, 16),
}
"""Shapes of Mamba 2."""
PROMPT = 256
SQUARE, READ = 1024, 2**28
TURNS = 30


def least(call: Callable[[], object], times: int) -> float:
    """Seconds of processor time of the fastest call."""
    best = float("inf")
    for _ in range(times):
        begin = time.process_time()
        call()
        best = min(best, time.process_time() - begin)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES | MAMBA, default="qwen3.5-0.8b")
    name = parser.parse_args().shape
    shape = (SHAPES | MAMBA)[name]
    kernels, generator = choose_kernels(), torch.Generator().manual_seed(0)

    def drawn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    x = drawn(PROMPT, shape.channels + shape.heads * shape.value_dim).to(shape.dtype)
    ab, decays = drawn(PROMPT, shape.rates), shape.heads * shape.decay_dim
    weights = DeltaNetWeights(
        drawn(shape.taps, shape.channels), -drawn(decays).exp(), drawn(decays), drawn(shape.value_dim), 1e-6
    )
    of_mamba = MambaWeights(weights.conv, drawn(shape.channels), weights.decay, drawn(decays), drawn(decays))
    cache = StateCache(2 + PROMPT // shape.block_size, shape)
    table = torch.arange(1, cache.num_blocks).view(1, -1)

    def layers(start: int, end: int) -> None:
        count, none = end - start, torch.zeros(end - start, dtype=torch.int64)
        batch = RaggedBatch(none, torch.arange(start, end), none, [0, count], [end], table, shape.block_size)
        inputs, rates = x[:count], ab[:count, : decays if name in MAMBA else shape.rates].contiguous()
        for layer in range(shape.layers):
            if name in MAMBA:
                kernels.mamba(inputs, rates, of_mamba, cache, batch, layer)
            else:
                kernels.delta_net(inputs, rates, weights, cache, batch, layer)

    with kernels.threads(1), torch.inference_mode():
        layers(0, PROMPT)
        numbers, square = drawn(READ // 4), drawn(SQUARE, SQUARE)
        turns = []
        for _ in range(TURNS):
            read, matrix = least(lambda: numbers.sum(), 2), least(lambda: square @ square, 2)
            decode, fold = (
                least(lambda: layers(PROMPT - 8, PROMPT - 7), 3),
                least(lambda: layers(PROMPT - 1, PROMPT), 2),
            )
            turns.append((read, matrix, decode, fold, least(lambda: layers(0, PROMPT), 1) / PROMPT))
    num_bytes, operations = of_state(shape, 1 if name in MAMBA else 2)
    state = 4 * shape.heads * shape.key_dim * shape.value_dim
    reading = statistics.median(
        num_bytes * shape.layers / READ * read / ((15 * decode + fold) / 16) for read, _, decode, fold, _ in turns
    )
    computing = statistics.median(
        operations * shape.layers / (2 * SQUARE**3) * matrix / prefill for _, matrix, _, _, prefill in turns
    )
    read, matrix, decode, fold, prefill = map(statistics.median, zip(*turns, strict=True))
    each = 1e6 / shape.layers
    print(f"{shape.layers} layers of {state / 2**20:.1f} MiB of state; medians of {TURNS} turns")
    print(f"a sum reads {READ / read / 1e9:.1f} GB/s, a product of fp32 has {2e-9 * SQUARE**3 / matrix:.0f} GFLOP/s")
    print(f"a decoded token: {decode * each:.0f} us a layer, {fold * each:.0f} in the step that ends a tile")
    print(f"of the speed at which memory is read: {reading:.0%} (states alone: {reading * state / num_bytes:.0%})")
    print(f"a token of a prompt: {prefill * each:.1f} us a layer, {computing:.0%} of fp32")


if __name__ == "__main__":
    main()
