"""LFM2 with experts, as in transformers' `modeling_lfm2_moe.py`: see `models/lfm2.py`."""

from __future__ import annotations

from quire.models.lfm2 import read_moe_config as read_config

__all__ = ["read_config"]
