"""The kernels behind the layers, each offered once, by what it computes.

These are the plain-torch reference: the oracle of the faster ones' tests, and what runs where there is none.
"""

from quire.ops.attention import paged_attention, store_kv
from quire.ops.elementwise import rms_norm, rotate, silu_mul
from quire.ops.kv_cache import BLOCK_SIZES, KVCache
from quire.ops.linear import PackedWeight
from quire.ops.ragged import RaggedBatch

__all__ = [
    "BLOCK_SIZES",
    "KVCache",
    "PackedWeight",
    "RaggedBatch",
    "paged_attention",
    "rms_norm",
    "rotate",
    "silu_mul",
    "store_kv",
]
