"""Quire, in its own environment. The checkpoint is a Hugging Face folder, quantized at load where that is asked for."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import quire
from benchmarks.peers.protocol import Options, Replies, Schemas, Watch, serve
from quire import LLM, SamplingParams, StructuredOutputsParams
from quire.bench.ceilings import work_of
from quire.bench.cells import greedy


class Quire:
    version = quire.__version__

    def __init__(self, options: Options) -> None:
        how: dict[str, Any] = {"quantization": options.weights} if options.weights in ("int8", "int4") else {}
        self.llm = LLM(options.checkpoint, prefix_cache="off", threads=options.threads, max_model_len=4096, **how)

    def run(self, prompts: list[list[int]], output: int, watch: Watch, schemas: Schemas = None) -> Replies | None:
        llm, outputs = self.llm, {}
        params = [_sampling(output, schema) for schema in schemas or [None] * len(prompts)]
        before = llm.stats.output_tokens
        watch.start()
        names = [llm.add_request(*pair) for pair in zip(prompts, params, strict=True)]
        while not llm.idle:
            outputs.update({changed.request_id: changed for changed in llm.step()})
            watch.step(len(outputs), llm.stats.output_tokens - before)
        if schemas is None:
            return None
        choices = [outputs[name].outputs[0] for name in names]
        return [choice.text if choice.finish_reason == "stop" else None for choice in choices]


def _sampling(output: int, schema: str | None) -> SamplingParams:
    if schema is None:
        return greedy(output)
    return SamplingParams(temperature=0, max_tokens=output, structured_outputs=StructuredOutputsParams(json=schema))


def about(engine: Quire) -> dict[str, Any]:
    """What the ceilings are computed from, and what the bits depend on."""
    model = engine.llm.model
    return {"work": asdict(work_of(engine.llm)), "kernels": model.kernels.describe(model.dtype)}


if __name__ == "__main__":
    serve(Quire, about)
