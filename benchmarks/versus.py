"""This checkout against another commit or folder, in turns, as a guard while code moves: scheduling, a step of the demo
model, and cells of a random model.

    python -m benchmarks.versus origin/main
    python -m benchmarks.versus HEAD~3 --rounds 5 --shape qwen3-0.6b

Each turn is a process of its own. A figure is the best of its side's rounds, since what else runs on a machine only
slows down, and a ratio above 1 means that this checkout is better. The scheduler is driven by each side's own
`benchmarks/scheduler.py`, which knows how it is built. The other side's kernels are this one's where their sources are
the same, and are compiled otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KERNELS = "src/quire/ops/cpu"
CELLS = "1x128+32,8x128+32,32x128+32"
RUNNING, STEPS = 256, 300
"""Requests that the scheduler plans for, and steps that it is timed for."""
WARM, TIMED = 20, 200
"""Steps of the demo model."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("other", help="a commit, or a folder with another checkout and its compiled kernels")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--shape", default="qwen3-tiny", help="of the cells' model (default: qwen3-tiny)")
    parser.add_argument("--cells", default=CELLS, help=f"default: {CELLS}")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--turn", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(measured(args.other, args.cells, args.threads)))
        return
    with random_model(args.shape) as model, other_checkout(args.other) as other:
        sides = {"other": other, "this": ROOT}
        figures: dict[str, dict[str, list[float]]] = {side: {} for side in sides}
        for number in range(args.rounds):
            for side, root in sides.items():
                print(f"round {number + 1}: {side}", file=sys.stderr, flush=True)
                for what, value in turn(root, model, args.cells, args.threads).items():
                    figures[side].setdefault(what, []).append(value)
    print("| what | other | this | ratio |\n| --- | --: | --: | --: |")
    for what, values in figures["this"].items():
        best = min if what.endswith(" s") else max
        old, new = best(figures["other"][what]), best(values)
        print(f"| {what} | {old:.4g} | {new:.4g} | {old / new if best is min else new / old:.3f} |")


def turn(root: Path, model: str, cells: str, threads: int) -> dict[str, float]:
    """What one side measures in a process of its own."""
    command = [sys.executable, str(Path(__file__)), model, "--cells", cells, "--threads", str(threads), "--turn"]
    paths = os.environ | {"PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=paths)
    if done.returncode:
        raise RuntimeError(f"{root} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def measured(model: str, cells: str, threads: int) -> dict[str, float]:
    """Seconds, whose names end with " s", and rates."""
    from benchmarks.common import Result
    from benchmarks.scheduler import _steps

    result = Result(())
    _steps(result, RUNNING, STEPS)
    found = {f"schedule + commit, {RUNNING} running, s": float(result.raw[0]["median_s"])}
    found["a step of the demo model, 1 request, s"] = demo_step(threads)
    command = [sys.executable, "-m", "quire.cli.main", "bench", "offline", model, "--json=-", "--cells", cells]
    done = subprocess.run([*command, "--threads", str(threads)], capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        cell = json.loads(line) if line.startswith("{") else {}
        for kind in ("decode", "prefill"):
            if f"{kind}_tok_s" in cell:
                found[f"{cell['cell']}, {kind} tokens a second"] = float(cell[f"{kind}_tok_s"])
    return found


def demo_step(threads: int) -> float:
    """A decoding step: of ten, nine take longer, as what else runs makes many of them slow."""
    from quire import LLM, SamplingParams

    with LLM("demo", threads=threads, max_model_len=512) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=WARM + TIMED, ignore_eos=True)
        llm.add_request(random.Random(1).choices(range(500), k=16), params, "one")
        times: list[float] = []
        while not llm.idle:
            begin = time.perf_counter()
            llm.step()
            times.append(time.perf_counter() - begin)
    return statistics.quantiles(times[WARM:], n=10)[0]


@contextmanager
def random_model(shape: str) -> Iterator[str]:
    """A folder with random weights."""
    from quire.models.random_checkpoint import random_checkpoint

    with (
        tempfile.TemporaryDirectory(prefix="quire-versus-") as temporary,
        random_checkpoint(shape, temporary) as folder,
    ):
        yield str(folder)


@contextmanager
def other_checkout(other: str) -> Iterator[Path]:
    """A folder as it is, or a commit in a folder of its own with kernels."""
    if Path(other).is_dir():
        yield Path(other).resolve()
        return
    with tempfile.TemporaryDirectory(prefix="quire-versus-") as temporary:
        folder = Path(temporary) / "quire"
        git("worktree", "add", "--quiet", "--detach", str(folder), other)
        try:
            if git("diff", "--name-only", other, "--", f"{KERNELS}/src", "scripts/compile_kernels.py"):
                compile = [sys.executable, "scripts/compile_kernels.py", KERNELS, "--isa", "native"]
                subprocess.run(compile, cwd=folder, check=True, stdout=sys.stderr)
            else:
                for library in (ROOT / KERNELS).glob("lib_*.so"):
                    shutil.copy(library, folder / KERNELS)
            yield folder
        finally:
            git("worktree", "remove", "--force", str(folder))


def git(*words: str) -> str:
    """What git says in this checkout."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
