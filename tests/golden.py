"""Golden bits: hashes of the tokens and log-probabilities of tiny models, by kernels and type; see `test_golden.py`.

    python -m tests.golden --write    # those of the kernels that were built and that this machine can run

A refactoring changes none of them; a change of a kernel's numbers may, and then writes them anew, and says so. The
weights are integers times powers of two, drawn by numpy, and torch's kernels are left out: their sums are torch's, and
differ from machine to machine.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.models.fields import Fields
from quire.models.random_checkpoint import tensor_shapes
from quire.models.safetensors_file import write_file
from quire.ops.cpu import library

FILE = Path(__file__).with_suffix(".json")
DTYPES = "bfloat16", "float32"
LENGTHS = 3, 37, 90
"""Of the prompts: less than a block and than a window, and more than any."""
MAX_TOKENS = 6

Hashes = dict[str, dict[str, dict[str, str]]]
"""By kernels, model and type."""


def read() -> tuple[dict[str, dict[str, Any]], Hashes]:
    """The models' configurations by the kind of their layers, and the hashes."""
    found = json.loads(FILE.read_text(encoding="utf-8"))
    return found["models"], found["hashes"]


def write(models: dict[str, dict[str, Any]], hashes: Hashes) -> None:
    """Write both: a model and a model's hashes are a line each."""
    lines = [f"{json.dumps(kind)}: {json.dumps(config, sort_keys=True)}" for kind, config in models.items()]
    sets = []
    for isa, of_models in sorted(hashes.items()):
        own = [f"{json.dumps(kind)}: {json.dumps(found)}" for kind, found in of_models.items()]
        sets.append(f"{json.dumps(isa)}: {{\n" + ",\n".join(own) + "}")
    text = '{"models": {\n' + ",\n".join(lines) + '},\n"hashes": {\n' + ",\n".join(sets) + "}}\n"
    FILE.write_text(text, encoding="utf-8")


def make(folder: Path, config: dict[str, Any]) -> str:
    """A folder with a model of this configuration, whose weights are the same on every machine."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = tensor_shapes(Fields(config, "golden"), as_published=False)

    def draw(name: str) -> torch.Tensor:
        """Some 0.15 wide around 0, and of norms and biases around 1."""
        rnd = np.random.Generator(np.random.PCG64(list(name.encode())))
        drawn = torch.from_numpy(rnd.integers(-64, 65, math.prod(shapes[name])).reshape(shapes[name]))
        return (drawn / 256.0 + (1.0 if len(shapes[name]) == 1 else 0.0)).to(torch.float32)

    described = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    write_file(folder / "model.safetensors", described, lambda done, total: None, draw)
    return str(folder)


def measured(model: str, dtype: str, isa: str) -> str:
    """The hash of what an engine makes of the prompts, greedily and by chance."""
    engine = Engine(EngineConfig(model=model, dtype=dtype, cpu_kernels=isa, threads=1, max_model_len=128))
    rnd = np.random.Generator(np.random.PCG64(1))
    for number, length in enumerate(LENGTHS):
        params = SamplingParams(temperature=float(number % 2), seed=number, ignore_eos=True, logprobs=3)
        engine.add(Request(number, rnd.integers(3, 160, length).tolist(), params.resolved(), max_tokens=MAX_TOKENS))
    found: dict[int, list[Any]] = {number: [] for number in range(len(LENGTHS))}
    while not engine.idle:
        for update in engine.step():
            assert update.error is None, update.error
            logprobs = [(entry.ids, [each.hex() for each in entry.values]) for entry in update.logprobs or []]
            found[update.request] += [update.tokens, logprobs] if update.tokens else []
    return hashlib.sha256(json.dumps(found).encode()).hexdigest()[:16]


def measure(isa: str, models: dict[str, dict[str, Any]], temporary: Path) -> dict[str, dict[str, str]]:
    """The hashes of these kernels, by model and type."""
    folders = {kind: make(temporary / kind.replace(" ", "-"), config) for kind, config in models.items()}
    return {
        kind: {dtype: measured(folder, dtype, isa) for dtype in DTYPES}
        for kind, folder in {"demo": "demo", **folders}.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write what these kernels give now")
    models, hashes = read()
    wanted, changed = parser.parse_args().write, False
    for isa in library.usable():
        with tempfile.TemporaryDirectory() as temporary:
            found = measure(isa, models, Path(temporary))
        before, hashes[isa] = hashes.get(isa, {}), found
        kinds = [kind for kind in found if found[kind] != before.get(kind)]
        changed |= bool(kinds)
        print(f"{isa}: {', '.join(kinds) or 'nothing'} changed")
    if wanted:
        write(models, hashes)
    raise SystemExit(changed and not wanted)


if __name__ == "__main__":
    main()
