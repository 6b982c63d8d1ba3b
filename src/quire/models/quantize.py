"""Quantizes a checkpoint into a new folder, which is loaded by mapping it into memory: see `formats.quire`."""

from __future__ import annotations

import json
import math
import shutil
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from quire.errors import ConfigError
from quire.models.calibration import calibrate
from quire.models.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint, choose_dtype, content_hash
from quire.models.formats import write_compressed_tensors
from quire.models.formats.quantizing import Quantization, QuantizingCheckpoint, Recipe
from quire.models.formats.quire import RECORD_FILE, Record, kind_of, parts_of, read_record
from quire.models.met import Calibration
from quire.models.registry import in_layout
from quire.models.safetensors_file import Writer, header_room
from quire.models.weights import check_tensors
from quire.ops import choose_kernels
from quire.ops.threads import usable_threads

COPIED = ("*.json", "*.jinja", "*.txt", "*.model", "LICENSE*", "NOTICE*", "README*")
"""Files that are copied besides the weights: configuration, tokenizer, chat template, licence."""
MODULES = ("[0-9]*_*/*.json", "[0-9]*_*/*.safetensors")
"""Further modules of an embedding model, in folders as Sentence Transformers names them."""

OnProgress = Callable[[str, float], None]
"""Called with (phase, progress from 0 to 1)."""


COMPRESSED: Final = "compressed-tensors"
GGUF: Final = "gguf-q4_k"


def quantize_folder(
    base: Path,
    output: Path,
    how: Quantization | Literal["compressed-tensors"],
    on_progress: OnProgress | None = None,
    texts: Sequence[Sequence[int]] = (),
    *,
    gptq: bool = False,
) -> None:
    """Write a quantized copy of a checkpoint.

    The folder gets its name only when it is complete; if this fails or is interrupted, nothing is left.

    Args:
        base: folder of the checkpoint.
        output: a folder that does not exist yet, or is empty.
        how: to what, in Quire's own format; or the format of others, see `write_compressed_tensors`.
        texts: token ids, over which it is measured where errors cost most; none: they are taken to cost the same.
        gptq: codes are rounded as GPTQ does, see `models.gptq`; needs texts.

    Raises:
        ConfigError: `output` is not empty or cannot be written, or `base` is quantized already.
        CheckpointError: the checkpoint is damaged or not supported, or cannot be quantized in this way.
    """
    report = on_progress or (lambda phase, share: None)
    check_output(output)
    _check_not_quantized(base)
    checkpoint = Checkpoint(base)
    partial = output.with_name(f"{output.name}.{uuid.uuid4().hex}.partial")
    try:
        partial.mkdir(parents=True)
        _copy_small_files(base, partial)
        calibration = _calibration(checkpoint, texts, gptq, report)
        if how == COMPRESSED:
            _write_compressed(checkpoint, partial, report, calibration)
        else:
            write_quantized(checkpoint, partial, how, str(base.resolve()), report, calibration)
        partial.rename(output)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}; choose another output") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def quantize_to_gguf(
    base: Path,
    output: Path,
    templates: Mapping[str, str],
    on_progress: OnProgress | None = None,
    texts: Sequence[Sequence[int]] = (),
    *,
    gptq: bool = False,
) -> None:
    """Write a checkpoint as one GGUF file, which gets its name only when it is complete.

    Args:
        output: a file that does not exist yet, with the suffix .gguf.
        templates: the checkpoint's chat templates by name.
        texts, gptq: see `quantize_folder`.

    Raises:
        ConfigError: `output` exists or cannot be written, `base` is quantized already, or cannot be written as GGUF.
        CheckpointError: the checkpoint is damaged or not supported.
    """
    from quire.models.gguf.export import export  # with numpy, which other formats do not need

    report = on_progress or (lambda phase, share: None)
    check_output_file(output)
    _check_not_quantized(base)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        checkpoint = Checkpoint(base)
        calibration = _calibration(checkpoint, texts, gptq, report)
        export(checkpoint, output, templates, lambda a, b: report(f"quantizing to {GGUF}", a / b), calibration)
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error.strerror or error}; choose another output") from error


def _calibration(checkpoint: Checkpoint, texts: Sequence[Sequence[int]], gptq: bool, report: OnProgress) -> Calibration:
    """What weights meet over texts, if there are any."""
    if not texts and not gptq:
        return {}
    return calibrate(checkpoint, texts, gptq, lambda done, total: report("calibrating", done / total))


def _write_compressed(checkpoint: Checkpoint, folder: Path, report: OnProgress, calibration: Calibration) -> None:
    """Write a checkpoint's weights in compressed-tensors, and the configuration that says so."""

    def progress(done: int, total: int) -> None:
        report(f"quantizing to {COMPRESSED}", done / total)

    kernels = choose_kernels()
    with kernels.threads(usable_threads()):
        fields = write_compressed_tensors.write(checkpoint, folder, kernels, progress, calibration)
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def write_quantized(
    checkpoint: Checkpoint,
    folder: Path,
    how: Quantization,
    base: str,
    report: OnProgress,
    calibration: Calibration | None = None,
) -> None:
    """Write a checkpoint's quantized weights, and the record, into a folder that has its config.json already.

    A weight is written and its memory freed as soon as it is quantized, so a model may be larger than memory.

    Args:
        base: the checkpoint's name in the record.
        calibration: which activations its weights meet, if that is known.

    Raises:
        OSError: the folder cannot be written.
        CheckpointError: see `quantize_folder`.
    """
    base_hash = content_hash(checkpoint.folder)
    dtype = choose_dtype(checkpoint, "auto", on_cpu=False)[0]
    laid_out, config, _ = in_layout(checkpoint)
    shapes = config.tensor_shapes()
    check_tensors(laid_out, shapes, config.tie_word_embeddings, config.skipped())
    kernels = choose_kernels()
    quantizing = QuantizingCheckpoint(laid_out, Recipe(how, config.num_layers), kernels, calibration)
    # Tensors whose size is not a multiple of 32 numbers, and so perhaps not of `ALIGNMENT`, come last.
    names = sorted(shapes, key=lambda name: (quantizing.scheme(name) is None, math.prod(shapes[name]) % 32 > 0))
    done, total = 0, sum(map(math.prod, shapes.values()))
    phase = f"quantizing to {how}"
    report(phase, 0.0)
    room = header_room(name + part for name in names for part in kind_of(quantizing.scheme(name)))
    with kernels.threads(usable_threads()), Writer(folder / SINGLE_FILE, room) as writer:
        for name in names:
            coded = quantizing.coded(name)
            parts = {"": laid_out.tensor(name)} if coded is None else parts_of(coded)
            for part, tensor in parts.items():
                writer.add(name + part, tensor.contiguous())
            done += math.prod(shapes[name])
            report(phase, done / total)
    file = folder / "config.json"
    fields = json.loads(file.read_text(encoding="utf-8"))
    if not {"dtype", "torch_dtype"} & fields.keys():  # which the tensors say no more
        fields["dtype"] = str(dtype).removeprefix("torch.")
        file.write_text(json.dumps(fields, indent=2), encoding="utf-8")
    Record(how, base, base_hash, content_hash(folder)).write(folder)


def check_output(output: Path) -> None:
    """Check that the folder does not exist or is empty, since nothing is ever overwritten.

    Raises:
        ConfigError: it is not.
    """
    try:
        taken = (output.exists() or output.is_symlink()) and not (output.is_dir() and not any(output.iterdir()))
    except OSError as error:
        raise ConfigError(f"{output} cannot be read: {error.strerror or error}; choose another output") from error
    if taken:
        raise ConfigError(f"{output} exists and is not an empty folder; nothing is overwritten, choose another output")


def check_output_file(output: Path) -> None:
    """Check that a GGUF file does not exist, and is named as one. Raises ConfigError."""
    if output.suffix != ".gguf":
        raise ConfigError(f"--output {output}: {GGUF} is one file; give a name that ends in .gguf")
    if output.exists() or output.is_symlink():
        raise ConfigError(f"{output} exists; nothing is overwritten, choose another output")


def _check_not_quantized(base: Path) -> None:
    record = read_record(base)
    if record is not None:
        raise ConfigError(
            f"{base} is quantized already, to {record.quantization}; give the model that it was made from, "
            f"{record.base}"
        )


def _copy_small_files(base: Path, folder: Path) -> None:
    """Copy regular files, or links to them, except the index, which is about other weight files."""
    for path in sorted({path for pattern in (*COPIED, *MODULES) for path in base.glob(pattern)}):
        if path.is_file() and path.name not in (INDEX_FILE, RECORD_FILE):
            target = folder / path.relative_to(base)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
