"""OpenVINO GenAI's continuous batching pipeline. The checkpoint is a folder that `optimum-cli` exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino
import openvino_genai

from benchmarks.peers.protocol import Options, Replies, Schemas, Watch, serve

CACHE_GB = 4


class OpenVino:
    version = openvino_genai.__version__

    def __init__(self, options: Options) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_batched_tokens, scheduler.max_num_seqs = CACHE_GB, 2048, 64
        scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, True
        # Its cache cannot be in bf16 where the processor does not multiply that.
        precision = "bf16" if {"avx512_bf16", "amx_bf16"} & set(Path("/proc/cpuinfo").read_text().split()) else "f32"
        properties = {
            "INFERENCE_PRECISION_HINT": precision,
            "KV_CACHE_PRECISION": precision,
            "INFERENCE_NUM_THREADS": options.threads,
        }
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(options.checkpoint, scheduler, "CPU", properties)
        self._next_id = 0

    def run(self, prompts: list[list[int]], output: int, watch: Watch, schemas: Schemas = None) -> Replies | None:
        configs = [_config(output, schema) for schema in schemas or [None] * len(prompts)]
        tensors = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        watch.start()
        handles = []  # one that is dropped cancels its request
        for tensor, config in zip(tensors, configs, strict=True):
            handles.append(self._pipeline.add_request(self._next_id, tensor, config))
            self._next_id += 1
        made: list[list[int]] = [[] for _ in handles]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            for i, handle in enumerate(handles):
                while handle.can_read():
                    for part in handle.read().values():
                        made[i] += part.generated_ids
            watch.step(sum(map(bool, made)), sum(map(len, made)))
        if schemas is None:
            return None
        decode = self._pipeline.get_tokenizer().decode
        return [str(decode(ids)) if len(ids) < output else None for ids in made]


def _config(output: int, schema: str | None) -> Any:
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample = output, schema is None, False
    if schema is not None:
        config.structured_output_config = openvino_genai.StructuredOutputConfig(json_schema=schema)
    return config


if __name__ == "__main__":
    serve(OpenVino)
