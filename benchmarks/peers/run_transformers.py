"""Hugging Face transformers with a static batch. The checkpoint is a Hugging Face folder."""

from __future__ import annotations

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from benchmarks.peers.protocol import Options, Schemas, Watch, serve


class Counter(BaseStreamer):
    """Told of every step: first of the prompts, then of a token for each request."""

    def __init__(self, batch: int, watch: Watch) -> None:
        self._batch, self._watch, self._made = batch, watch, -batch

    def put(self, value: torch.Tensor) -> None:
        self._made += self._batch
        if self._made:
            self._watch.step(self._batch, self._made)

    def end(self) -> None:
        """Nothing is left to tell."""


class Transformers:
    version = transformers.__version__

    def __init__(self, options: Options) -> None:
        torch.set_num_threads(options.threads)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.checkpoint, dtype=torch.bfloat16)
        self._model = model.eval()

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output: int, watch: Watch, schemas: Schemas = None) -> None:
        if schemas is not None:
            raise RuntimeError("transformers has no structured output")
        ids = torch.tensor(prompts)
        watch.start()
        self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            streamer=Counter(len(prompts), watch),
        )


if __name__ == "__main__":
    serve(Transformers)
