"""Quire, in its own environment. The checkpoint is a Hugging Face folder, quantized at load where that is asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import quire
from benchmarks.peers.protocol import Options, Watch, serve
from quire import LLM
from quire.bench.ceilings import work_of
from quire.bench.cells import greedy


class Quire:
    version = quire.__version__

    def __init__(self, options: Options) -> None:
        how: dict[str, Any] = {} if options.weights == "bf16" else {"quantization": options.weights}
        self.llm = LLM(options.checkpoint, prefix_cache="off", threads=options.threads, max_model_len=4096, **how)

    def run(self, prompts: list[list[int]], output: int, watch: Watch) -> None:
        llm, params, started = self.llm, greedy(output), set()
        before = llm.stats.output_tokens
        watch.start()
        for prompt in prompts:
            llm.add_request(prompt, params)
        while not llm.idle:
            started.update(changed.request_id for changed in llm.step())
            watch.step(len(started), llm.stats.output_tokens - before)


def about(engine: Quire) -> dict[str, Any]:
    """What the ceilings are computed from, and what the bits depend on."""
    model = engine.llm.model
    return {"work": asdict(work_of(engine.llm)), "kernels": model.kernels.describe(model.dtype)}


if __name__ == "__main__":
    serve(Quire, about)
