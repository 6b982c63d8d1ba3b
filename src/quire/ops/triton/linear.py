"""Matrix products: which one serves a weight, and how the weight comes to the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from quire.ops.linear import Product

Make = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""A product from a weight [out, in] that lies on the device, and its bias [out]."""


def pack(parts: Sequence[torch.Tensor], bias: torch.Tensor | None, device: torch.device, make: Make) -> Product:
    """See `Kernels.pack`; `make`: what multiplies.

    A lone part that lies on the device is not copied: a head may share the embedding's memory.

    Raises:
        ValueError: the parts have different inputs or data types.
    """
    first = parts[0]
    if {(part.dtype, part.shape[1]) for part in parts} != {(first.dtype, first.shape[1])}:
        raise ValueError(f"the parts of a weight differ: {[(part.dtype, list(part.shape)) for part in parts]}")
    if len(parts) == 1:
        weight = first.to(device).contiguous()
    else:  # each goes to its place at once, so that no second copy of the whole is made
        weight = torch.empty(sum(map(len, parts)), first.shape[1], dtype=first.dtype, device=device)
        for part, place in zip(parts, weight.split([len(part) for part in parts]), strict=True):
            place.copy_(part)
    return make(weight, None if bias is None else bias.to(device))
