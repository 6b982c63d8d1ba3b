"""Writes weights in compressed-tensors' pack-quantized (W4A16 and W8A16), a format of vLLM and SGLang.

Linear layers get 4 bits in groups of 32 inputs, with zero points; where 4 bits cost most, which are queries, keys and
values, and the down projections of some layers, 8 bits. What shares a product in other engines has the same bits: they
refuse to join others. The head, routers and embeddings stay as they are.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F

from quire.errors import ConfigError
from quire.models.checkpoint import SINGLE_FILE, Checkpoint
from quire.models.formats.choose import SECTIONS, of_numbers
from quire.models.formats.integers import WORD
from quire.models.formats.quantizing import is_plain, layers_with_more
from quire.models.met import Calibration, Met, fitted
from quire.models.registry import read_config
from quire.models.safetensors_file import FLOAT_DTYPES, Writer, header_room
from quire.models.weights import EMBEDDING, HEAD
from quire.ops import CodedWeight, Kernels
from quire.ops.coded import Scheme

GROUP = 32
"""Inputs that share a scale."""
SCHEMES = {4: Scheme("int4", 4, GROUP), 8: Scheme("int8", 8, GROUP)}
"""By bits."""
OF_ATTENTION = r".*\.self_attn\.[qkv]_proj"
OF_LAYER = r".*\.layers\.{}\.mlp\.down_proj"


@dataclass(frozen=True)
class Recipe:
    """Which modules have 8 bits, as regular expressions of their names; all others have 4."""

    eight: tuple[str, ...]

    @classmethod
    def of(cls, layers: int) -> Recipe:
        """Of a model with so many layers."""
        more = layers_with_more(layers)
        of_layers = (OF_LAYER.format(f"({'|'.join(map(str, more))})"),) if more else ()
        return cls((OF_ATTENTION, *of_layers))

    def bits(self, module: str) -> Literal[4, 8]:
        return 8 if any(re.fullmatch(pattern, module) for pattern in self.eight) else 4

    def config(self, ignored: list[str]) -> dict[str, Any]:
        """`quantization_config`. Where two targets fit a module, readers take the one of its name."""
        groups = {"group_0": _group(8, [f"re:{each}$" for each in self.eight]), "group_1": _group(4, ["Linear"])}
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ignored,
        }


def _group(bits: int, targets: list[str]) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": bits == 8, "strategy": "group", "group_size": GROUP}
    return {"targets": targets, "weights": {**weights, "dynamic": False}, "format": "pack-quantized"}


def write(
    checkpoint: Checkpoint,
    folder: Path,
    kernels: Kernels,
    progress: Callable[[int, int], None],
    calibration: Calibration,
) -> dict[str, Any]:
    """Write the weights of a checkpoint into a folder, tensor by tensor; returns its config.json.

    Args:
        progress: called with (tensors done, all tensors).
        calibration: which activations its weights meet, as far as that is known.

    Raises:
        ConfigError: its family joins weights in ways that this format does not know.
        CheckpointError: a weight has numbers that are not finite.
        OSError: the folder cannot be written.
    """
    numbers = of_numbers(checkpoint)
    config = read_config(numbers.config, numbers.generation)
    shapes = config.tensor_shapes()
    wanted = {name for name, shape in shapes.items() if not is_plain(name, shape) and name not in (HEAD, EMBEDDING)}
    if missing := sorted(wanted - numbers.entries.keys()):
        raise ConfigError(
            f"{checkpoint.folder} lays weights out in its own way (there is no {missing[0]!r}), which "
            "compressed-tensors does not know; --to int4 and --to int8 take it"
        )
    chosen = {name for name in wanted if shapes[name][1] % GROUP == 0}
    recipe = Recipe.of(config.num_layers)
    parts = ("_packed", "_scale", "_shape", "_zero_point")
    entries = {name: entry for name, entry in numbers.entries.items() if entry.dtype in FLOAT_DTYPES}
    names = [*entries, *(name + part for name in chosen for part in parts)]
    with Writer(folder / SINGLE_FILE, header_room(names)) as writer:
        for done, name in enumerate(entries, start=1):
            tensor = numbers.tensor(name)
            if name in chosen:
                scheme = SCHEMES[recipe.bits(name.removesuffix(".weight"))]
                for part, packed in _packed(_coded(tensor, scheme, kernels, calibration.get(name))).items():
                    writer.add(name + part, packed)
            else:
                writer.add(name, tensor.contiguous())
            progress(done, len(entries))
    plain = [name for name, entry in entries.items() if len(entry.shape) == 2 and name not in chosen | {EMBEDDING}]
    ignored = sorted({*(name.removesuffix(".weight") for name in plain), "lm_head"})
    fields = numbers.config.without(*SECTIONS)
    return {**fields.picked(fields.names()), SECTIONS[0]: recipe.config(ignored)}


def _coded(weight: torch.Tensor, scheme: Scheme, kernels: Kernels, met: Met | None) -> CodedWeight:
    """A weight in a scheme, with scales of its own type, or of fp16 for one in fp32."""
    scales = torch.float16 if weight.dtype == torch.float32 else weight.dtype
    return fitted(weight, scheme, met, lambda x, importance: kernels.quantize_groups(x, scheme, scales, importance))


def _packed(weight: CodedWeight) -> dict[str, torch.Tensor]:
    """The tensors of a weight, by what follows its name."""
    codes = weight.codes if weight.scheme.bits == 4 else weight.codes.view(torch.uint8) + 128
    zeros = None if weight.offsets is None else _along_outputs(weight.offsets)
    found = {
        "_packed": codes.contiguous().view(torch.int32),
        "_scale": weight.scales,
        "_shape": torch.tensor([weight.out_features, weight.in_features]),
        "_zero_point": zeros,
    }
    return {part: tensor for part, tensor in found.items() if tensor is not None}


def _along_outputs(zeros: torch.Tensor) -> torch.Tensor:
    """Zero points uint8 [out, groups], from 0 to 15, as int32 [out / 8, groups]; the first output's in the low bits."""
    columns = F.pad(zeros.T, (0, -len(zeros) % (WORD // 4)))  # [groups, outputs]
    return (columns[:, 0::2] | columns[:, 1::2] << 4).contiguous().view(torch.int32).T.contiguous()
