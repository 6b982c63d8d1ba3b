"""Weights in Quire's schemes, for tests of products."""

from __future__ import annotations

import torch

from quire.ops import CodedWeight
from quire.ops.quantize_groups import quantize_groups, scheme_of


def coded(weight: torch.Tensor, how: str) -> CodedWeight:
    """A weight [out, in] in "int8", "int6" or "int4"; 16 divides its inputs."""
    return quantize_groups(weight, scheme_of(how, weight.shape[1]))
