"""Says what a path is if it is not a checkpoint that Quire can run, and what to do about it."""

from __future__ import annotations

import os
import re
from pathlib import Path

from quire.models.fields import Fields

LFS_HEAD = b"version https://git-lfs"
GGUF_HEAD = b"GGUF"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
HUB_URL = re.compile(r"https?://(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)(?:/.*)?")
CONVERT = "convert it with transformers (AutoModelForCausalLM.from_pretrained(...).save_pretrained(FOLDER))"

QUANTIZERS = {
    "aqlm": "AQLM",
    "auto-round": "AutoRound",
    "awq": "AWQ",
    "bitnet": "BitNet",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "exl2": "EXL2",
    "exl3": "EXL3",
    "fbgemm_fp8": "fp8",
    "fp8": "fp8",
    "gptq": "GPTQ",
    "higgs": "HIGGS",
    "hqq": "HQQ",
    "modelopt": "Model Optimizer's",
    "mxfp4": "MXFP4",
    "quanto": "Quanto",
    "quark": "Quark",
    "torchao": "torchao",
    "vptq": "VPTQ",
}
"""Names of quantizers, by `quantization_config.quant_method`."""
README_BYTES = 64 << 10
BASE_MODEL = re.compile(r"^base_model:[ \t]*(?:\n[ \t]*-[ \t]*)?[\"']?([\w.-]+/[\w.-]+)", re.MULTILINE)
"""A field of the metadata at the beginning of a model's README.md."""


def identify(path: Path) -> str | None:
    """What a file or folder is, why Quire cannot run it as it is, and what to do; None if no obstacle was found.

    It looks at names, the first bytes of files, and small JSON files, but reads no weights.
    """
    if os.path.isfile(path):
        return _identify_file(path)
    if not os.path.isdir(path):
        return None
    names = sorted(os.listdir(path))
    return _not_a_checkpoint(path, names) or _unread_weights(path, names)


def hub_name_of(text: str) -> str | None:
    """`org/name`, given the URL of a model on the Hub."""
    match = HUB_URL.fullmatch(text)
    return match[1] if match else None


def tokenizer_of(folder: Path) -> str:
    """A description of the tokenizer in a folder."""
    if os.path.isfile(folder / "tokenizer.json"):
        return "tokenizer.json"
    old = next((name for name in ("tokenizer.model", "spiece.model", "vocab.json") if (folder / name).is_file()), None)
    if old is None:
        return "none: prompts are token ids"
    return f"{old} alone, which is not read; transformers' AutoTokenizer saves a tokenizer.json (save_pretrained)"


def quantizer(section: Fields) -> str:
    """A description of how weights were quantized, given a checkpoint's `quantization_config`."""
    method = section.picked(["quant_method"]).get("quant_method")
    bits = section.picked(["bits"]).get("bits")
    name = QUANTIZERS.get(method, repr(method)[:40]) if isinstance(method, str) else "quantized"
    return f"{name} weights" + (f" of {bits} bits" if isinstance(bits, int) else "")


def made_from(folder: Path) -> str:
    """ ", org/name" of the model that a checkpoint was made from, by its README.md or config.json; "" if unknown."""
    try:
        with (folder / "README.md").open(encoding="utf-8", errors="replace") as file:
            head = file.read(README_BYTES)
    except OSError:
        head = ""
    _, _, metadata = head.partition("---")
    found = BASE_MODEL.search(metadata.partition("\n---")[0])
    named = Fields.read(folder / "config.json").picked(["_name_or_path"]).get("_name_or_path")
    if found is None and isinstance(named, str) and re.fullmatch(r"[\w.-]+/[\w.-]+", named):
        return f", {named}"[:120]
    return f", {found[1]}"[:120] if found else ""


def _identify_file(path: Path) -> str:
    head = _head(path)
    if head.startswith(GGUF_HEAD) or path.suffix == ".gguf":
        return f"{path} is a GGUF file; give it a name that ends with .gguf, and no revision"
    if path.suffix == ".safetensors":
        return f"{path} is one file of weights; give the folder that it lies in, which has config.json, too"
    if path.suffix in PICKLES:
        return f"{path} is a pickle of PyTorch's, which can run code when it is read, so Quire never does; {CONVERT}"
    return f"{path} is a file; give the folder of a checkpoint"


def _not_a_checkpoint(folder: Path, names: list[str]) -> str | None:
    """Describes folders that are something other than a checkpoint."""
    if "adapter_config.json" in names and "config.json" not in names:
        base = Fields.read(folder / "adapter_config.json").picked(["base_model_name_or_path"])
        of = f" of {base['base_model_name_or_path']}"[:120] if base else ""
        return (
            f"{folder} is a LoRA adapter{of}, which Quire does not apply; merge it (peft's merge_and_unload), save the "
            "merged model, and give its folder"
        )
    if "model_index.json" in names:
        return f"{folder} is a pipeline of diffusers, which makes images; Quire runs language models"
    if "config.json" in names:
        return None
    if "snapshots" in names:
        org, _, name = folder.name.removeprefix("models--").partition("--")
        given = f"{org}/{name}" if name else "the name on the hub"
        return f"{folder} is a model's place in the hub's cache; give {given}, or one of the folders in its snapshots"
    cached = [name for name in names if name.startswith("models--")]
    if cached or "hub" in names:
        models = ", ".join(name.removeprefix("models--").replace("--", "/") for name in cached[:3])
        return f"{folder} is the hub's cache; give the name of a model" + (f", such as {models}" if models else "")
    gguf = [name for name in names if name.endswith(".gguf")]
    if gguf:
        return f"{folder} has GGUF files alone; give the path of one, such as {folder / gguf[0]}"
    if "params.json" in names:
        return f"{folder} is in its publisher's own format (params.json); give the one for transformers (config.json)"
    inside = [name for name in names if os.path.isfile(folder / name / "config.json")]
    if inside:
        return f"{folder} has no config.json, but its subfolder {inside[0]} has one; give {folder / inside[0]}"
    return None


def _unread_weights(folder: Path, names: list[str]) -> str | None:
    """Describes checkpoints without weights in a format that Quire reads."""
    weights = [name for name in names if name.endswith(".safetensors")]
    for name in weights:
        if _head(folder / name).startswith(LFS_HEAD):
            return f"{folder / name} is a pointer of Git LFS, not the weights; run 'git lfs pull' in that folder"
    if weights:
        return None
    if any(name.endswith(PICKLES) for name in names):
        return (
            f"{folder} has its weights as pickles of PyTorch's alone, which can run code when they are read, so Quire "
            f"never does; {CONVERT}, or choose a revision that has *.safetensors"
        )
    if any(name.endswith((".onnx", ".h5", ".msgpack")) for name in names):
        return f"{folder} has weights for another framework alone (ONNX, TensorFlow or Flax); {CONVERT}"
    return None


def _head(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(64)
    except OSError:
        return b""
