"""Checkpoints of NVIDIA's Model Optimizer (https://github.com/NVIDIA/Model-Optimizer): fp8, NVFP4, MXFP8, MXFP4, int8.

`quant_algo` says which one; in a checkpoint of several, each weight's tensors do. They are those of `fp8`,
`fp4` and compressed-tensors. What changes a product's activations is refused by name, as with AWQ.
"""

from __future__ import annotations

from quire.errors import UnexpectedTensorError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats.compressed_tensors import find_integers
from quire.models.formats.fp4 import find_fp4
from quire.models.formats.fp8 import USUAL_BLOCK, find_fp8
from quire.models.formats.stored import Contents, unused_scales

ALGORITHMS = {
    *("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8", "W8A16", "W8A8_SQ_PER_CHANNEL"),
    *("NVFP4", "NVFP4_AWQ", "NVFP4_SVD", "W4A16_NVFP4", "W4A8_NVFP4_FP8", "MXFP4", "W4A8_MXFP4_FP8"),
    "MIXED_PRECISION",
}
OTHERS = (".pre_quant_scale", ".svdquant_lora_a", ".svdquant_lora_b")
"""Of AWQ, SmoothQuant and SVDQuant, unless they are folded into other weights."""


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights in these formats.

    Raises:
        ModelConfigError: the algorithm is another one.
        UnexpectedTensorError: activations have to be changed.
        MissingTensorError, TensorShapeError: a weight's scales are missing, or have the wrong shape.
    """
    unused, notes = unused_scales(base)
    if "quant_algo" not in section:  # only the KV cache's scales
        return Contents([], unused, notes)
    section.choice("quant_algo", ALGORITHMS | {name.lower() for name in ALGORITHMS})
    if others := [name for name in base.entries if name.endswith(OTHERS)]:
        raise UnexpectedTensorError(
            f"{base.entries[others[0]].file}: {others[0]!r}, one of {len(others)} such tensors, changes the "
            "activations of a product, which is not supported; choose a checkpoint of the same model without them"
        )
    by_row = section.picked(["quant_algo"])["quant_algo"].upper() == "W8A8_SQ_PER_CHANNEL"
    blocks = [(USUAL_BLOCK, USUAL_BLOCK)]
    return Contents([*find_integers(base, by_row), *find_fp4(base), *find_fp8(base, blocks)], unused, notes)
