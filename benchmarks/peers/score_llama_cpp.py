"""What llama.cpp makes of given tokens, in full precision: for `same_function`, in llama.cpp's environment.

Standard input has one line of JSON, `[[token, ...], ...]`; standard output gets one, as `scores` returns them.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.run_llama_cpp import LlamaCpp, decode


def scores(checkpoint: str, sequences: list[list[int]]) -> list[list[tuple[int, float]]]:
    """For each sequence and each of its tokens but the last: the likeliest next one, and the actual one's logarithm."""
    model = LlamaCpp(checkpoint, threads=1)
    return [_scores(model, tokens) for tokens in sequences]


def _scores(model: LlamaCpp, tokens: list[int]) -> list[tuple[int, float]]:
    context, batch = model.context(1, len(tokens), full_precision=True), llama_cpp.llama_batch_init(len(tokens), 0, 1)
    decode(context, batch, [(token, position, 0, True) for position, token in enumerate(tokens)])
    logits = np.array([_logits(model, context, row) for row in range(len(tokens) - 1)], np.float64)
    llama_cpp.llama_batch_free(batch)
    llama_cpp.llama_free(context)
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    actual = logprobs[np.arange(len(tokens) - 1), tokens[1:]]
    return list(zip(logits.argmax(axis=1).tolist(), actual.tolist(), strict=True))


def _logits(model: LlamaCpp, context: Any, row: int) -> Any:
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(context, row), (model.vocab_size,)).copy()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what llama.cpp prints is no answer
    print(json.dumps(scores(sys.argv[1], json.loads(sys.stdin.readline()))), file=answers)
