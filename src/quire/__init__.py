"""Quire: LLM inference in which the same request gives the same tokens. docs/reading.md says where to begin reading.

What a user imports. All of it is loaded when it is first asked for: `LLM` and `AsyncLLM` bring torch, and every process
of a server and every command begins here.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.async_llm import AsyncLLM
    from quire.config import EngineConfig
    from quire.core.sampling_params import SamplingParams
    from quire.core.structured_outputs import StructuredOutputsParams
    from quire.engine.outputs import CompletionOutput, EmbeddingOutput, Logprob, RequestMetrics, RequestOutput
    from quire.errors import QuireError, RequestError
    from quire.llm import LLM
    from quire.version import __version__

if os.name != "posix":
    raise ImportError("Quire needs Linux; on Windows, install it in WSL 2")

_LAZY = {
    "LLM": "quire.llm",
    "AsyncLLM": "quire.async_llm",
    "RequestOutput": "quire.engine.outputs",
    "CompletionOutput": "quire.engine.outputs",
    "EmbeddingOutput": "quire.engine.outputs",
    "RequestMetrics": "quire.engine.outputs",
    "Logprob": "quire.engine.outputs",
    "EngineConfig": "quire.config",
    "SamplingParams": "quire.core.sampling_params",
    "StructuredOutputsParams": "quire.core.structured_outputs",
    "QuireError": "quire.errors",
    "RequestError": "quire.errors",
    "__version__": "quire.version",
}

__all__ = [
    "LLM",
    "AsyncLLM",
    "CompletionOutput",
    "EmbeddingOutput",
    "EngineConfig",
    "Logprob",
    "QuireError",
    "RequestError",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __dir__() -> list[str]:
    """What is meant to be used, what was not asked for yet, too."""
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
