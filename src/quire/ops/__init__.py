"""The kernels behind the layers, each offered once, by what it computes: see `kernels`."""

from quire.ops.attention import paged_attention, store_kv
from quire.ops.blocks import BlockForm, BlockWeight
from quire.ops.choose import choice_note, choose_kernels, lost_kernels
from quire.ops.coded import CodedWeight
from quire.ops.elementwise import activate, rms_norm, rotate
from quire.ops.fp8 import Fp8Weight
from quire.ops.kernels import (
    AttentionParts,
    ExpertsParts,
    HeadNorm,
    Kernels,
    LatentParts,
    LayerParts,
    MLPParts,
    StoredWeight,
)
from quire.ops.kv_cache import BLOCK_SIZES, KVCache, KVShape
from quire.ops.linear import PackedWeight, Product
from quire.ops.mxfp4 import Mxfp4Weight
from quire.ops.ragged import RaggedBatch

__all__ = [
    "BLOCK_SIZES",
    "AttentionParts",
    "BlockForm",
    "BlockWeight",
    "CodedWeight",
    "ExpertsParts",
    "Fp8Weight",
    "HeadNorm",
    "KVCache",
    "KVShape",
    "Kernels",
    "LatentParts",
    "LayerParts",
    "MLPParts",
    "Mxfp4Weight",
    "PackedWeight",
    "Product",
    "RaggedBatch",
    "StoredWeight",
    "activate",
    "choice_note",
    "choose_kernels",
    "lost_kernels",
    "paged_attention",
    "rms_norm",
    "rotate",
    "store_kv",
]
