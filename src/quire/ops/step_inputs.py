"""From what the host sends of a step to what its kernels read, in plain torch: see `Kernels.place`."""

from __future__ import annotations

import torch

from quire.ops.ragged import DeviceSpans


def place(
    tokens: torch.Tensor,
    span_of_row: torch.Tensor,
    recent: torch.Tensor,
    spans: DeviceSpans,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `Kernels.place`."""
    row_starts, span = spans.row_starts, span_of_row.long()
    torch.add(spans.starts, row_starts.diff(), out=spans.context_lens)
    rows = torch.arange(len(tokens), device=tokens.device)
    real = rows < row_starts[-1]
    table_rows = spans.table_rows[span].long()
    places = torch.where(real, spans.starts[span] + rows - row_starts[span], 0)
    known = recent[table_rows, (places - 1 - tokens) % recent.shape[1]]
    ids = torch.where(tokens < 0, known.clamp(min=0), tokens)
    blocks = spans.block_tables[table_rows, places // block_size].long()
    slots = blocks * block_size + places % block_size
    positions = places
    if spans.trees is not None:
        depths = spans.trees.depths
        positions = torch.where(depths < 0, places, spans.trees.bases[span] + depths)
    return torch.where(real, ids, 0), positions, torch.where(real, slots, 0)
