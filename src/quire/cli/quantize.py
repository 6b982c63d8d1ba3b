"""Save a model with quantized weights in a new folder.

Use the folder like any checkpoint, e.g. 'quire generate DIR'. Weights become int8 or int4 (where 4 bits cost most, 6 or
8) in Quire's own format; or 4 bits, and 8 where 4 cost most, in compressed-tensors, a format of vLLM and SGLang, which
leaves the head and the embedding table as they are. Norms and biases do not change. gguf-q4_k writes one file for
llama.cpp (its Q4_K_M), with the tokenizer and the chat template.
The folder or file appears only when it is complete."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from quire.errors import ConfigError

FORMATS = ("int8", "int4", "compressed-tensors", "gguf-q4_k")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire quantize`."""
    parser.usage = "quire quantize MODEL --to {int8,int4,compressed-tensors,gguf-q4_k} --output DIR [options]"
    parser.add_argument("model", metavar="MODEL", help="folder, GGUF file, org/name on the Hub, or 'demo'")
    parser.add_argument("--to", required=True, choices=FORMATS, help="data type or format of the weights")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new or empty folder; gguf-q4_k: a new file")
    parser.add_argument(
        "--calibrate",
        metavar="FILE",
        help='a text, or JSONL with a "text" a line, over which it is measured where errors cost most',
    )
    parser.add_argument(
        "--rounding",
        choices=("nearest", "gptq"),
        default="nearest",
        help="gptq: errors of codes are made up for by other codes; needs --calibrate (default: nearest)",
    )
    parser.add_argument("--revision", metavar="TEXT", help="branch, tag or commit of a downloaded model")
    parser.add_argument("--threads", type=int, metavar="N", help="default: one per core")
    parser.add_argument("--quiet", action="store_true", help="no progress and no closing table")


def run(args: argparse.Namespace) -> int:
    """Quantize it."""
    output = _output(args.output)
    if args.threads is not None and not 1 <= args.threads <= 1024:
        raise ConfigError(f"--threads {args.threads} is out of range; allowed: from 1 to 1024")

    from quire.cli.terminal import loading, print_table

    with loading(args.model) as on_load:
        report = (on_load if not args.quiet else None) or (lambda phase, share: None)
        report("importing torch", 0.0)
        import torch

        from quire.models.hub import resolve
        from quire.models.quantize import GGUF, check_output, check_output_file, quantize_folder, quantize_to_gguf

        _check(args)
        if args.threads:
            torch.set_num_threads(args.threads)
        (check_output_file if args.to == GGUF else check_output)(output)  # before a download
        base = resolve(args.model, args.revision)
        texts, gptq = _texts(args.calibrate, base) if args.calibrate else (), args.rounding == "gptq"
        if args.to == GGUF:
            quantize_to_gguf(base, output, _templates(base), report, texts, gptq=gptq)
        else:
            quantize_folder(base, output, args.to, report, texts, gptq=gptq)
    if not args.quiet:
        sizes = [(str(folder), f"{_weight_bytes(folder) / 2**20:,.1f} MiB") for folder in (base, output)]
        print_table(f"Weights, quantized to {args.to}", sizes)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check what goes together. Raises ConfigError."""
    gptq = args.rounding == "gptq"
    if gptq and not args.calibrate:
        raise ConfigError(f"--rounding {args.rounding} needs --calibrate FILE, a text of what the model is used for")
    if args.to == "int8" and args.calibrate and not gptq:
        raise ConfigError(
            "--calibrate alone changes nothing of int8, whose scales are those of the largest numbers; "
            "add --rounding gptq, or leave it out"
        )


def _templates(folder: Path) -> dict[str, str]:
    """A checkpoint's chat templates."""
    from quire.models.fields import Fields
    from quire.text.chat_template import load_templates

    return load_templates(folder, Fields.read(folder / "tokenizer_config.json").given())[0]


def _texts(file: str, folder: Path) -> list[list[int]]:
    """The token ids of a file's texts; raises ConfigError."""
    from quire.text.tokenizer import Tokenizer

    try:
        whole = Path(file).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError, RuntimeError) as error:
        raise ConfigError(f"--calibrate {file} cannot be read as text: {error}") from error
    texts = [whole]
    if Path(file).suffix == ".jsonl":
        try:
            texts = [json.loads(line)["text"] for line in whole.splitlines() if line.strip()]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f'--calibrate {file}: each line must be {{"text": "..."}}: {error!r}') from error
    if not all(isinstance(text, str) for text in texts):
        raise ConfigError(f'--calibrate {file}: each line must be {{"text": "..."}}, with a text')
    tokenizer = Tokenizer.load(folder)
    return [tokenizer.encode(text) for text in texts]


def _output(text: str) -> Path:
    if not text:
        raise ConfigError("--output is empty; give a new folder")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"--output {text!r} names an unknown user's home folder; give another folder") from error


def _weight_bytes(folder: Path) -> int:
    if folder.is_file():
        return folder.stat().st_size
    return sum(file.stat().st_size for kind in ("*.safetensors", "*.gguf") for file in folder.glob(kind))
