"""Dense layers after pooling: Sentence Transformers' `Dense` modules.

They are computed with numpy, since the process that makes embeddings may not have torch; one embedding at a time, and
with one order of summation, so that the bits do not depend on what else is embedded.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from quire.errors import CheckpointError, ModelConfigError
from quire.models.fields import Fields, has_file
from quire.models.safetensors_header import TensorEntry, read_header

Vector = npt.NDArray[np.float32]

CLASS = "torch.nn.modules."
ACTIVATIONS = {f"{CLASS}linear.Identity": False, f"{CLASS}activation.Tanh": True}
"""Whether an activation is a tanh, by its class."""
DEFAULT = f"{CLASS}activation.Tanh"
"""Sentence Transformers' default."""


@dataclass(frozen=True, slots=True)
class Dense:
    """One such layer.

    Attributes:
        weight: [outputs, inputs]. bias: [outputs]; None if there is none.
        tanh: whether its activation is a tanh; otherwise it has none.
    """

    weight: TensorEntry
    bias: TensorEntry | None
    tanh: bool

    @property
    def width(self) -> int:
        """Number of outputs."""
        return self.weight.shape[0]

    @classmethod
    def read(cls, folder: Path, inputs: int) -> Dense:
        """Read a module's folder.

        Args:
            inputs: width of the previous module's output.

        Raises:
            ModelConfigError: an option is not supported, or the weights have the wrong shape.
            CheckpointError: the weights cannot be read.
        """
        fields = Fields.read(folder / "config.json")
        for name in ("module_input_name", "module_output_name"):
            fields.refuse(name, ("sentence_embedding",), "a dense layer of anything but the pooled state")
        outputs, biased = fields.integer("out_features"), fields.flag("bias", default=True)
        if fields.integer("in_features") != inputs:
            raise fields.error("in_features", f"{inputs}, which is what the module before yields")
        tanh = ACTIVATIONS[fields.choice("activation_function", ACTIVATIONS, default=DEFAULT)]
        file = folder / "model.safetensors"
        if not has_file(file):
            raise ModelConfigError(f"{folder} has no model.safetensors; other files of weights are not read")
        found = read_header(file)
        shapes = {"linear.weight": (outputs, inputs)} | ({"linear.bias": (outputs,)} if biased else {})
        have = {name: entry.shape for name, entry in found.items()}
        if have != shapes:
            raise ModelConfigError(f"{file} holds {have}; a dense layer of its config.json has {shapes}")
        for entry in found.values():
            if entry.dtype not in STORED:
                raise ModelConfigError(f"{file}: {entry.name} has dtype {entry.dtype}; allowed: {', '.join(STORED)}")
        return cls(found["linear.weight"], found.get("linear.bias"), tanh)

    def __call__(self, x: Vector) -> Vector:
        """x: [inputs]. Returns [outputs]."""
        # Not a BLAS product, whose order of summation may depend on the number of threads.
        y: Vector = np.einsum("oi,i->o", _numbers(self.weight), x)
        if self.bias is not None:
            y = y + _numbers(self.bias)
        return np.tanh(y) if self.tanh else y


STORED = ("F32", "BF16", "F16")


def _numbers(entry: TensorEntry) -> npt.NDArray[np.float32]:
    """A tensor in fp32; a view of the mapped file if it is stored in fp32."""
    skip = entry.start % mmap.ALLOCATIONGRANULARITY
    try:
        with entry.file.open("rb") as stream:
            view = mmap.mmap(
                stream.fileno(), skip + entry.num_bytes, access=mmap.ACCESS_READ, offset=entry.start - skip
            )
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{entry.file} cannot be read: {error}") from error
    kind = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.dtype]
    stored = np.frombuffer(view, kind, offset=skip).reshape(entry.shape)
    if entry.dtype == "BF16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)
