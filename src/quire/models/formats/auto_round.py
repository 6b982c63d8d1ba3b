"""Checkpoints of AutoRound (https://github.com/intel/auto-round): `packing_format` names another format's layout."""

from __future__ import annotations

from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.formats import awq, gptq
from quire.models.formats.fp4 import find_fp4
from quire.models.formats.fp8 import find_fp8
from quire.models.formats.stored import Contents, unused_scales

GPTQ, GPTQ_V2 = "auto_round:auto_gptq", ("auto_round", "auto_round:gptqmodel")
AWQ = "auto_round:auto_awq"
FLOATS = ("auto_round:llm_compressor", "auto_round:fp8_static", "auto_round:fp8")


def read(base: Checkpoint, section: Fields) -> Contents:
    """Find the weights in these layouts.

    Raises:
        ModelConfigError: the layout is another one.
        MissingTensorError, TensorShapeError, TensorDtypeError: a weight's tensors are missing, or do not fit.
    """
    packing = section.choice("packing_format", {GPTQ, *GPTQ_V2, AWQ, *FLOATS}, default=GPTQ)
    if packing == AWQ:
        return awq.find(base)
    if packing in FLOATS:
        unused, notes = unused_scales(base)
        return Contents([*find_fp4(base), *find_fp8(base)], unused, notes)
    return gptq.contents_of(base, section, packing == GPTQ)
