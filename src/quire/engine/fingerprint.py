"""A name for what tokens depend on: the checkpoint's content, and how and by what kernels it is computed."""

from __future__ import annotations

from pathlib import Path

import blake3

from quire.models.checkpoint import content_hash
from quire.models.model import Model


def system(folder: Path, model: Model, kv_cache_dtype: str = "auto") -> str:
    """One short name for all of it, as responses carry it."""
    kernels = f"{model.kernels.describe(model.dtype)}|deterministic={model.kernels.deterministic}"
    text = f"{content_hash(folder)}|{model.precision}|kv={kv_cache_dtype}|{kernels}"
    return "qr-" + blake3.blake3(text.encode()).hexdigest(length=8)
