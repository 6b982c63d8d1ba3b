"""Which published format a checkpoint's weights are in, by its configuration; the others are refused by name.

`quantization_config` is in config.json, or in its `text_config`; older files of some programs have it beside it.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from quire.errors import ModelConfigError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields, has_file
from quire.models.formats import quire
from quire.models.formats.stored import StoredCheckpoint
from quire.models.identify import made_from, quantizer

SECTIONS = ("quantization_config", "compression_config")
"""Names of what says how weights are stored; the second one is older."""
NESTED = ("text_config",)
FILES = {"hf_quant_config.json": "modelopt", "quantize_config.json": "gptq", "quant_config.json": "awq"}
"""Files of older checkpoints that say it, by their name, and the `quant_method` that they imply."""
OLDER = {"quant_algo": "modelopt", "load_in_4bit": "bitsandbytes", "load_in_8bit": "bitsandbytes"}
"""Fields of sections without a `quant_method`, and the one that they imply."""

READERS = {
    "auto-round": "quire.models.formats.auto_round",
    "awq": "quire.models.formats.awq",
    "bitsandbytes": "quire.models.formats.bitsandbytes",
    "compressed-tensors": "quire.models.formats.compressed_tensors",
    "fbgemm_fp8": "quire.models.formats.fp8",
    "fp8": "quire.models.formats.fp8",
    "gptq": "quire.models.formats.gptq",
    "modelopt": "quire.models.formats.modelopt",
    "mxfp4": "quire.models.formats.mxfp4",
}
"""By `quant_method`, the module whose `read` finds the weights, imported when needed."""


def of_numbers(checkpoint: Checkpoint) -> Checkpoint:
    """Present a checkpoint with weights in one of the formats as one with plain weights.

    Raises:
        ModelConfigError: the format is not known, or is not that of the weights.
        CheckpointError: one of its kinds, for weights whose tensors do not fit.
    """
    plain, section = _section_of(checkpoint.config)
    if (record := quire.read_record(checkpoint.folder)) is not None:  # perhaps made from one in another format
        return StoredCheckpoint(checkpoint, plain, quire.read(checkpoint), record.quantization)
    section = section or _section_beside(checkpoint)
    if section is None:
        return checkpoint
    name = READERS.get(_method(section))
    if name is None:
        raise ModelConfigError(refusal(section, checkpoint.folder))
    module: Any = importlib.import_module(name)
    contents = module.read(checkpoint, section)
    if not contents.weights and not contents.unused:
        raise ModelConfigError(
            f"{section.source} says that the weights are quantized ({quantizer(section)}), but no tensor of "
            f"{checkpoint.folder} is such a one; if they are not, remove it from config.json"
        )
    return StoredCheckpoint(checkpoint, plain, contents)


def without_read_formats(fields: Fields) -> Fields:
    """The configuration without what says how weights are stored, if that is a format with a reader."""
    plain, section = _section_of(fields)
    return fields if section is None or _method(section) not in READERS else plain


def refusal(section: Fields, folder: Path) -> str:
    """Why a format is refused, and what to do."""
    return (
        f"{section.source}: {quantizer(section)}, which Quire does not read; give the checkpoint that it was made "
        f"from{made_from(folder)}, and --quantization int4 or int8 for small weights"
    )


def _method(section: Fields) -> str:
    method = section.picked(["quant_method"]).get("quant_method")
    if method is None:
        return next((implied for name, implied in OLDER.items() if name in section), "")
    return method if isinstance(method, str) else ""


def _section_beside(checkpoint: Checkpoint) -> Fields | None:
    """What a file beside config.json says of how weights are stored, if there is one, and such weights are there."""
    packed = any(name.endswith((".qweight", ".weight_scale")) for name in checkpoint.entries)
    for name, method in FILES.items() if packed else ():
        if has_file(checkpoint.folder / name):
            fields = Fields.read(checkpoint.folder / name)
            section = fields.section("quantization") if method == "modelopt" else fields
            return section.updated({"quant_method": method})
    return None


def _section_of(config: Fields) -> tuple[Fields, Fields | None]:
    """The configuration without what says how weights are stored, and that; None if there is none."""
    for name in SECTIONS:
        if name in config:
            return config.without(*SECTIONS), config.section(name)
    for outer in NESTED:
        plain, section = _section_of(config.section(outer)) if outer in config else (config, None)
        if section is not None:
            return config.updated({outer: plain.given()}), section
    return config, None
