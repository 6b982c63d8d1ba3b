"""llama.cpp's own converter of checkpoints to GGUF, and the vocabularies that it is tested with, as the source of
`llama-cpp-python` on PyPI carries them.

They are fetched once; tests that need them are skipped where they cannot be.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

from tests.published import CACHE, download

VERSION = "0.3.36"
PARTS = ("conversion/", "gguf-py/gguf/", "models/ggml-vocab-")
DRIVER = """
import json, sys, traceback
from pathlib import Path
import gguf, torch
from conversion import ModelBase, ModelType, get_model_architecture, get_model_class

def without(self):
    pass

def convert(folder, out, options):
    hparams = ModelBase.load_hparams(folder, False)
    kind = get_model_class(get_model_architecture(hparams, ModelType.TEXT))
    kind.no_mtp = True
    fused = "fused" in options
    model = kind(folder, gguf.LlamaFileType.ALL_F32, out, fuse_qkv=fused, fuse_gate_up_exps=fused)
    for each in (model, getattr(model, "impl", model)):
        type(each).set_vocab = without
    model.write()

with torch.inference_mode():
    for folder, out, options in json.load(sys.stdin):
        try:
            convert(Path(folder), Path(out), options)
        except Exception:
            Path(out).with_suffix(".error").write_text(traceback.format_exc())
"""


@functools.cache
def converter() -> Path:
    """The folder with the converter's packages, and `models/` with the vocabularies."""
    folder = CACHE / f"llama-cpp-python-{VERSION}"
    if not folder.exists():
        archive = download(f"llama-cpp-python=={VERSION}", "--no-binary", ":all:")
        partial = folder.with_suffix(".part")
        with tarfile.open(archive) as packed:
            for member in packed:
                inner = member.name.partition("/vendor/llama.cpp/")[2]
                if inner.startswith(PARTS) and member.isfile():
                    member.name = inner
                    packed.extract(member, partial, filter="data")
        partial.rename(folder)
    return folder


def convert(jobs: Sequence[tuple[Path, Path, Sequence[str]]]) -> None:
    """Convert checkpoints to GGUF in fp32, without their tokenizers.

    Args:
        jobs: a checkpoint's folder, the file to write, and options: "fused" joins tensors of queries, keys and values,
            and of experts' gates and inputs. A job that fails leaves a file with the suffix ".error".
    """
    root = converter()
    paths = os.pathsep.join([str(root), str(root / "gguf-py")])
    told = json.dumps([(str(folder), str(out), [*options]) for folder, out, options in jobs])
    environment = {**os.environ, "PYTHONPATH": paths}
    subprocess.run([sys.executable, "-c", DRIVER], env=environment, input=told, text=True, timeout=600, check=True)
