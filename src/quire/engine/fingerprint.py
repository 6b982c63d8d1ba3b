"""Identifies what tokens depend on: the checkpoint's contents, and how and with which kernels it is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import blake3

from quire.models.checkpoint import content_hash
from quire.models.model import Model


def parts(folder: Path, model: Model, kv_cache_dtype: str) -> dict[str, str]:
    """These, by name."""
    return {
        "checkpoint": content_hash(folder),
        "precision": model.precision,
        "kv_cache_dtype": kv_cache_dtype,
        "kernels": f"{model.kernels.describe(model.dtype)}, deterministic={model.kernels.deterministic}",
    }


def system(parts: Mapping[str, str]) -> str:
    """A short hash of them, as in responses."""
    text = "|".join(f"{name}={value}" for name, value in parts.items())
    return "qr-" + blake3.blake3(text.encode()).hexdigest(length=8)
