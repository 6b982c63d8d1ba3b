"""llama.cpp through its C API, with many sequences in one batch. The checkpoint is a GGUF file (see `make_gguf`).

No token is chosen from the logits: those that are fed back are the prompt's again, since only their number matters.
That leaves out a little work which the other engines do.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import llama_cpp

from benchmarks.peers.protocol import Watch, serve

BATCH, MICRO_BATCH = 2048, 512
"""Most tokens of a call, and of one pass through the layers: the library's defaults."""

Item = tuple[int, int, int, bool]
"""Token, position, sequence, and whether its logits are wanted."""


class LlamaCpp:
    version = version("llama-cpp-python")

    def __init__(self, checkpoint: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        self._model = llama_cpp.llama_model_load_from_file(checkpoint.encode(), params)
        if not self._model:
            raise RuntimeError(f"{checkpoint} could not be loaded")
        self._threads = threads
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def run(self, prompts: list[list[int]], output: int, watch: Watch) -> None:
        batch, length = len(prompts), len(prompts[0])
        context = self.context(batch, batch * (length + output) + 64)
        tokens = llama_cpp.llama_batch_init(BATCH, 0, 1)
        decode(context, tokens, [(5, 0, 0, True)])  # what happens once
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        watch.start()
        whole = [(prompt[p], p, s, p == length - 1) for s, prompt in enumerate(prompts) for p in range(length)]
        decode(context, tokens, whole)
        watch.step(batch, batch)
        for k in range(1, output):
            decode(context, tokens, [(prompt[k % length], length + k - 1, s, True) for s, prompt in enumerate(prompts)])
            watch.step(batch, batch * (k + 1))
        llama_cpp.llama_batch_free(tokens)
        llama_cpp.llama_free(context)

    def context(self, sequences: int, size: int, full_precision: bool = False) -> Any:
        """Room for so many sequences, which together have `size` tokens.

        Attention is as llama.cpp likes it best, or in fp32 throughout: flash attention rounds, whatever it is given.
        """
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = size, BATCH, MICRO_BATCH
        params.n_seq_max, params.kv_unified = sequences, True
        if full_precision:
            params.type_k = params.type_v = llama_cpp.GGML_TYPE_F32
            params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        params.n_threads = params.n_threads_batch = self._threads
        return llama_cpp.llama_init_from_model(self._model, params)


def decode(context: Any, tokens: Any, items: list[Item]) -> None:
    """Compute these tokens, `BATCH` at a time."""
    for start in range(0, len(items), BATCH):
        chunk = items[start : start + BATCH]
        tokens.n_tokens = len(chunk)
        for i, (token, position, sequence, wanted) in enumerate(chunk):
            tokens.token[i], tokens.pos[i] = token, position
            tokens.n_seq_id[i], tokens.seq_id[i][0], tokens.logits[i] = 1, sequence, wanted
        if llama_cpp.llama_decode(context, tokens):
            raise RuntimeError("llama_decode failed")
    llama_cpp.llama_synchronize(context)


if __name__ == "__main__":
    serve(lambda options: LlamaCpp(options.checkpoint, options.threads))
