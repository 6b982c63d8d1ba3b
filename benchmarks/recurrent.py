"""What a gated delta net or Mamba 2 takes, beside what reading its states would: `python -m benchmarks.recurrent`.

Random numbers in the shape of a published model, one thread; the least processor time of many calls, so that a busy
machine plays a small part. Layers take turns, so that their states come from memory as they do in a model.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from quire.ops import RaggedBatch, choose_kernels
from quire.ops.mamba import MambaWeights
from quire.ops.states import DeltaNetWeights, StateCache, StateShape

SHAPES = {
    "qwen3.5-0.8b": StateShape(18, 16, 16, 128, 128, 4, torch.bfloat16, 16),
    "qwen3.5-9b": StateShape(24, 16, 32, 128, 128, 4, torch.bfloat16, 16),
}
MAMBA = {
    "granite-4.0-h-tiny": StateShape(36, 1, 48, 128, 64, 4, torch.bfloat16, 16),
    "nemotron-3-nano": StateShape(23, 8, 64, 128, 64, 4, torch.bfloat16, 16),
}
"""Shapes of Mamba 2."""
PROMPT = 256


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
    ab, heads = drawn(PROMPT, 2 * shape.heads), shape.heads
    weights = DeltaNetWeights(
        drawn(shape.taps, shape.channels), -drawn(heads).exp(), drawn(heads), drawn(shape.value_dim), 1e-6
    )
    of_mamba = MambaWeights(weights.conv, drawn(shape.channels), weights.decay, drawn(heads), drawn(heads))
    cache = StateCache(2 + PROMPT // shape.block_size, shape)
    table = torch.arange(1, cache.num_blocks).view(1, -1)

    def layers(start: int, end: int) -> None:
        count, none = end - start, torch.zeros(end - start, dtype=torch.int64)
        batch = RaggedBatch(none, torch.arange(start, end), none, [0, count], [end], table, shape.block_size)
        for layer in range(shape.layers):
            if name in MAMBA:
                kernels.mamba(x[:count], ab[:count, :heads], of_mamba, cache, batch, layer)
            else:
                kernels.delta_net(x[:count], ab[:count], weights, cache, batch, layer)

    with kernels.threads(1), torch.inference_mode():
        layers(0, PROMPT)
        states = shape.layers * heads * shape.key_dim * shape.value_dim * 4
        numbers = drawn(4 * states // 4)
        read = numbers.nbytes / least(lambda: numbers.sum(), 30)
        decode, fold = least(lambda: layers(PROMPT - 8, PROMPT - 7), 60), least(lambda: layers(PROMPT - 1, PROMPT), 60)
        prefill = least(lambda: layers(0, PROMPT), 3) / PROMPT
    each = 1e6 / shape.layers
    mean = (15 * decode + fold) / 16
    print(
        f"{shape.layers} layers of {states / shape.layers / 2**20:.1f} MiB of state; a sum reads {read / 1e9:.1f} GB/s"
    )
    print(f"a decoded token: {decode * each:.0f} us a layer, {fold * each:.0f} in the step that ends a tile")
    print(f"of the speed at which states could be read: {states / read / mean:.0%}")
    print(f"a token of a prompt: {prefill * each:.1f} us a layer")


if __name__ == "__main__":
    main()
