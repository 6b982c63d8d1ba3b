"""llama.cpp through its C API, with many sequences in one batch. The checkpoint is a GGUF file (see `make_gguf`).

No token is chosen from the logits: those that are fed back are the prompt's again, since only their number matters.
That leaves out a little work which the other engines do. Beside requests with schemas the best
token is chosen, as its server does: a grammar is asked about that one first, and about all only where it says no.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp.llama_grammar import json_schema_to_gbnf

from benchmarks.peers.protocol import Replies, Schemas, Watch, serve

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

    def run(self, prompts: list[list[int]], output: int, watch: Watch, schemas: Schemas = None) -> Replies | None:
        if schemas is not None:
            return self._run_choosing(prompts, output, watch, schemas)
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
        return None

    def _run_choosing(
        self, prompts: list[list[int]], output: int, watch: Watch, schemas: Sequence[str | None]
    ) -> Replies:
        batch, length = len(prompts), len(prompts[0])
        context = self.context(batch, batch * (length + output) + 64)
        tokens = llama_cpp.llama_batch_init(BATCH, 0, 1)
        decode(context, tokens, [(5, 0, 0, True)])  # what happens once
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
        vocab, made = llama_cpp.llama_model_get_vocab(self._model), [[0] * 0 for _ in prompts]
        end = llama_cpp.llama_vocab_eos(vocab)
        watch.start()
        grammars = [schema and _grammar(vocab, schema) for schema in schemas]
        items = [(prompt[p], p, s, p == length - 1) for s, prompt in enumerate(prompts) for p in range(length)]
        size = min(BATCH, len(items))
        # Prompts go by calls of `BATCH` tokens; logits are read after each, since the next call drops them.
        for start in range(0, len(items), size):
            decode(context, tokens, items[start : start + size])
            for row, (_, _, s, wanted) in enumerate(items[start : start + size]):
                if wanted:
                    made[s].append(self._choose(context, row, grammars[s]))
        watch.step(batch, batch)
        for k in range(1, output):
            open_ones = [s for s in range(batch) if not grammars[s] or made[s][-1] != end]
            if not open_ones:
                break
            decode(context, tokens, [(made[s][-1], length + k - 1, s, True) for s in open_ones])
            for row, s in enumerate(open_ones):
                made[s].append(self._choose(context, row, grammars[s]))
            watch.step(batch, sum(map(len, made)))
        for grammar in filter(None, grammars):
            llama_cpp.llama_sampler_free(grammar)
        llama_cpp.llama_batch_free(tokens)
        llama_cpp.llama_free(context)
        return [self._text(vocab, ids[:-1]) if ids[-1] == end else None for ids in made]

    def _choose(self, context: Any, row: int, grammar: Any) -> int:
        """The likeliest token of those that the grammar, if there is one, allows; it takes it in."""
        logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (self.vocab_size,))
        token = int(logits.argmax())
        if not grammar:
            return token
        if _masked(grammar, np.array([token], np.int32), logits[token : token + 1])[0] == -np.inf:
            token = int(_masked(grammar, np.arange(self.vocab_size, dtype=np.int32), logits).argmax())
        llama_cpp.llama_sampler_accept(grammar, token)
        return token

    def _text(self, vocab: Any, ids: Sequence[int]) -> str:
        buffer, text = ctypes.create_string_buffer(256), b""
        for token in ids:
            size = llama_cpp.llama_token_to_piece(vocab, token, buffer, len(buffer), 0, False)
            text += buffer.raw[:size]
        return text.decode(errors="replace")

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


def _grammar(vocab: Any, schema: str) -> Any:
    grammar = llama_cpp.llama_sampler_init_grammar(vocab, json_schema_to_gbnf(schema).encode(), b"root")
    if not grammar:
        raise RuntimeError("llama.cpp cannot use the schema's grammar")
    return grammar


def _masked(grammar: Any, ids: Any, logits: Any) -> Any:
    """The logits of some tokens, minus infinity where the grammar does not allow them."""
    data = np.empty(len(ids), [("id", np.int32), ("logit", np.float32), ("p", np.float32)])
    data["id"], data["logit"], data["p"] = ids, logits, 0
    pointer = data.ctypes.data_as(ctypes.POINTER(llama_cpp.llama_token_data))
    array = llama_cpp.llama_token_data_array(data=pointer, size=len(ids), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(grammar, ctypes.byref(array))
    return data["logit"]


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
