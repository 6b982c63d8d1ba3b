"""Sampling in C++: see sampling.cpp; what it computes is defined in `quire.ops.sampling` and `logit_edits`."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from quire.ops.cpu.library import DTYPES, I32, I64, POINTER, Library, Prototype
from quire.ops.logit_edits import BitMasks, Edits, Lists
from quire.ops.sampling import Filters, TokenScores

PROTOTYPES: dict[str, Prototype] = {
    "sample": (None, (POINTER, I64, I64, *[POINTER] * 6)),
    "token_logprobs": (None, (POINTER, I64, POINTER, POINTER, I64, I64, *[POINTER] * 3)),
    "edit_logits": (None, (POINTER, I64, POINTER, I64, *[POINTER] * 5)),
    "mask_by_bits": (None, (POINTER, I64, POINTER, I64, POINTER, I64)),
    "finite_rows": (None, (I32, POINTER, I64, I64, POINTER)),
}

MAX_VOCAB = (1 << 31) - 512
"""Ids, and places in the last group of 256, are 32-bit numbers there."""


def sample(lib: Library, logits: Tensor, filters: Filters) -> Tensor:
    """See `Kernels.sample`."""
    rows, vocab = _checked(logits)
    tokens = torch.empty(rows, dtype=torch.int64)
    arrays = (
        _array(filters.temperature, torch.float32, rows),
        _array(filters.log_min_p, torch.float32, rows),
        _array(filters.top_k, torch.int64, rows),
        _array(filters.top_p, torch.float64, rows),
        _array(filters.keys, torch.int64, rows),
    )
    lib.sample(logits.data_ptr(), rows, vocab, *(array.data_ptr() for array in arrays), tokens.data_ptr())
    return tokens


def token_scores(lib: Library, logits: Tensor, rows: Tensor, ids: Tensor, count: int) -> TokenScores:
    """See `Kernels.token_scores`."""
    num_rows, vocab = _checked(logits)
    n, count = len(rows), max(0, min(count, vocab))
    rows, ids = _indices(rows, n, num_rows, "row"), _indices(ids, n, vocab, "token id")
    values = torch.empty(n, 1 + count, dtype=torch.float64)
    best, ranks = torch.empty(n, 1 + count, dtype=torch.int64), torch.empty(n, dtype=torch.int64)
    lib.token_logprobs(
        *(logits.data_ptr(), vocab, rows.data_ptr(), ids.data_ptr(), n, count),
        *(values.data_ptr(), best.data_ptr(), ranks.data_ptr()),
    )
    return TokenScores(values, best, ranks)


def edit_logits(lib: Library, logits: Tensor, edits: Edits) -> Tensor:
    """See `Kernels.edit_logits`."""
    num_rows, vocab = _checked(logits)
    n = len(edits.rows)
    rows = _indices(edits.rows, n, num_rows, "row")
    numbers = [_array(x, torch.float32, n) for x in (edits.repetition, edits.frequency, edits.presence)]
    penalties = _Penalties(*(x.data_ptr() for x in numbers))
    if not isinstance(edits.seen, Lists):
        raise TypeError("penalties on the CPU are computed from lists of the tokens seen, not from a History")
    seen, bias = _lists(edits.seen, n, vocab, True), _lists(edits.bias, n, vocab, True)
    banned = _lists(edits.banned, n, vocab, False)
    masks, masked = edits.masks.masks, edits.masks.requests
    if masks.dtype != torch.float32 or masks.shape[1] != vocab:
        raise ValueError(f"masks are {masks.dtype} of {masks.shape[1]} columns; they must be float32 of {vocab}")
    masked = _indices(masked, n, len(masks), "mask")
    finite = torch.empty(n, dtype=torch.bool)
    lib.edit_logits(
        *(logits.data_ptr(), vocab, rows.data_ptr(), n, ctypes.byref(penalties)),
        *(ctypes.byref(lists) for lists in (seen, bias, banned)),
        finite.data_ptr(),
    )
    for i in masked.nonzero().flatten().tolist():
        row = logits[rows[i]]
        torch.minimum(row, masks[masked[i]], out=row)
    mask_by_bits(lib, logits, edits.bits)
    return finite


def mask_by_bits(lib: Library, logits: Tensor, bits: BitMasks) -> None:
    """See `logit_edits.mask_by_bits`."""
    m, (num_rows, vocab) = len(bits.rows), logits.shape
    if not m:
        return
    rows, words = _indices(bits.rows, m, num_rows, "row"), bits.words.contiguous()
    if words.dtype != torch.int32 or len(words) != m or words.shape[1] * 32 < vocab:
        raise ValueError(
            f"masks are {words.dtype} of {list(words.shape)}; they must be int32 of {m} rows of {vocab} bits"
        )
    lib.mask_by_bits(logits.data_ptr(), vocab, rows.data_ptr(), m, words.data_ptr(), words.shape[1])


def finite_rows(lib: Library, x: Tensor) -> Tensor:
    """See `Kernels.finite_rows`."""
    rows, size = x.shape
    x = x.contiguous()
    finite = torch.empty(rows, dtype=torch.bool)
    lib.finite_rows(DTYPES[x.dtype], x.data_ptr(), rows, size, finite.data_ptr())
    return finite


class _Penalties(ctypes.Structure):
    _fields_ = (("repetition", POINTER), ("frequency", POINTER), ("presence", POINTER))


class _Lists(ctypes.Structure):
    _fields_ = (("starts", POINTER), ("ids", POINTER), ("values", POINTER))


def _lists(lists: Lists, n: int, vocab: int, with_values: bool) -> _Lists:
    """For C++, which reads the memory of `lists`: they must live on."""
    starts, ids = lists.starts, _indices(lists.ids, len(lists.ids), vocab, "token id")
    _array(lists.values, torch.float32, len(ids) if with_values else 0)
    if not (_array(starts, torch.int64, n + 1)[0] == 0 and starts[-1] == len(ids) and bool((starts.diff() >= 0).all())):
        raise ValueError(f"the lists' starts must rise from 0 to the number of entries, {len(ids)}; they are {starts}")
    return _Lists(starts.data_ptr(), ids.data_ptr(), lists.values.data_ptr())


def _checked(logits: Tensor) -> tuple[int, int]:
    """Rows and vocabulary. Raises `ValueError`: C++ would read what is not there."""
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.is_contiguous() or logits.is_cuda:
        raise ValueError(
            f"logits are {logits.dtype} {list(logits.shape)} on {logits.device} with strides {logits.stride()}; "
            "they must be [rows, vocab] of contiguous float32 on the CPU"
        )
    if not 1 <= logits.shape[1] <= MAX_VOCAB:
        raise ValueError(f"the vocabulary has {logits.shape[1]} tokens; it must have 1 to {MAX_VOCAB}")
    return logits.shape[0], logits.shape[1]


def _array(x: Tensor, dtype: torch.dtype, length: int) -> Tensor:
    if x.dtype != dtype or x.shape != (length,) or not x.is_contiguous():
        raise ValueError(f"an array is {x.dtype} {list(x.shape)}; it must be contiguous {dtype} of {length} entries")
    return x


def _indices(x: Tensor, length: int, limit: int, what: str) -> Tensor:
    """`length` numbers from 0 to `limit` - 1."""
    if len(_array(x, torch.int64, length)):
        low, high = (int(end) for end in torch.aminmax(x))
        if low < 0 or high >= limit:
            raise ValueError(f"a {what} is {low if low < 0 else high}; it must be from 0 to {limit - 1}")
    return x
