"""Check that the files made for llama.cpp hold the same function as the checkpoints that Quire reads.

usage: python -m benchmarks.peers.same_function [--work DIR] [--only qwen3-tiny,...]

Tiny models, whose weights are spread wider than usual so that attention, routing and positions matter, continue random
prompts greedily in Quire; llama.cpp then says for each of these tokens what it would have chosen and how likely the
token was. All in fp32, so that both round alike almost everywhere.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.peers.recipes import DEFAULT_WORK, RECIPES, ROOT, PeerError, environment, last_line, log_file, run
from quire import LLM, SamplingParams
from quire.bench.cells import random_prompts
from quire.models.random_checkpoint import SHAPES, random_checkpoint

TINY = [shape for shape in SHAPES if shape.endswith("-tiny")]
WIDER, NORMS = 8.0, 0.5
"""How many times as wide weights are spread as in an untrained model, and how far norms lie around 1."""
PROMPTS, LENGTH, OUTPUT = 4, 300, 48
TOLERANCE = 1e-4
"""Most that the logarithm of a token's probability may differ, in fp32."""
TOLERANCES = {"gemma3-tiny": 2e-2, "qwen3.5-tiny": 5e-4}
"""The same where llama.cpp rounds otherwise: its GELU is a table of fp16, and it takes a prompt's states in chunks."""

Score = tuple[int, float]
"""The likeliest next token, and the logarithm of the actual one's probability."""


def main() -> int:
    """Exit code 1 where a model differs."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers.same_function", description=__doc__)
    parser.add_argument("--work", type=Path, default=DEFAULT_WORK)
    parser.add_argument("--only", help=f"some of {','.join(TINY)}")
    args = parser.parse_args()
    shapes, failed = args.only.split(",") if args.only else TINY, False
    if unknown := [shape for shape in shapes if shape not in TINY]:
        parser.error(f"{unknown[0]!r} is not known; known: {', '.join(TINY)}")
    for shape in shapes:
        try:
            same, worst = compare(shape, args.work.expanduser().resolve())
        except PeerError as error:
            print(f"{shape}: {error}")
            failed = True
            continue
        allowed = TOLERANCES.get(shape, TOLERANCE)
        good = same == PROMPTS * OUTPUT and worst <= allowed
        failed |= not good
        print(
            f"{shape}: {'the same' if good else 'DIFFERENT'}: {same} of {PROMPTS * OUTPUT} greedy tokens, "
            f"log-probabilities differ by at most {worst:.1e} (allowed: {allowed:.0e})"
        )
    return int(failed)


def compare(shape: str, work: Path) -> tuple[int, float]:
    """How many greedy tokens are the same, and the largest difference of their log-probabilities.

    Raises:
        PeerError: llama.cpp could not be installed, or refuses the file.
    """
    recipe = next(recipe for recipe in RECIPES if recipe.name == "llama.cpp")
    python = environment(recipe, work)
    folder = work / "checkpoints" / f"{shape}-wide"
    write_wide(shape, folder)
    sequences, ours = greedy(folder)
    files = [folder / f"{form}.gguf" for form in ("bf16", "f32")]
    make = [str(python), "-m", "benchmarks.peers.make_gguf"]
    log = log_file(work, f"same-function-{shape}")
    run([*make, str(folder), str(files[0])], log)
    run([*make, str(files[0]), str(files[1]), "--to", "f32"], log)
    theirs = [scores[-OUTPUT:] for scores in _ask(python, files[1], sequences, log)]
    pairs = [pair for both in zip(ours, theirs, strict=True) for pair in zip(*both, strict=True)]
    same = sum(mine[0] == other[0] for mine, other in pairs)
    return same, max(abs(mine[1] - other[1]) for mine, other in pairs)


def write_wide(shape: str, folder: Path) -> None:
    """The random checkpoint of a shape with other norms than ones, and other weights WIDER spread."""
    shutil.rmtree(folder, ignore_errors=True)
    with random_checkpoint(shape, None) as source:
        shutil.copytree(source, folder)
    generator = torch.Generator().manual_seed(1)
    weights = {
        name: tensor + NORMS * (torch.rand(tensor.shape, generator=generator) - 0.5).to(tensor.dtype)
        if tensor.ndim == 1
        else tensor * WIDER
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def greedy(folder: Path) -> tuple[list[list[int]], list[list[Score]]]:
    """Random prompts with the tokens that Quire makes of them in fp32, and these tokens' scores."""
    llm = LLM(str(folder), dtype="float32", max_model_len=LENGTH + OUTPUT, prefix_cache="off")
    prompts = random_prompts(PROMPTS, LENGTH, llm.model.vocab_size, seed=0)
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=0)
    sequences, scores = [], []
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        [choice] = output.outputs
        sequences.append([*prompt, *choice.token_ids])
        assert choice.logprobs is not None
        logprobs = [entry[token].logprob for token, entry in zip(choice.token_ids, choice.logprobs, strict=True)]
        scores.append(list(zip(choice.token_ids, logprobs, strict=True)))
    return sequences, scores


def _ask(python: Path, file: Path, sequences: Sequence[Sequence[int]], log: Path) -> list[list[Score]]:
    command = [str(python), "-m", "benchmarks.peers.score_llama_cpp", str(file)]
    with log.open("a", encoding="utf-8") as errors:
        done = subprocess.run(
            command,
            cwd=ROOT,
            input=json.dumps(sequences),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            check=False,
        )
    if done.returncode:
        raise PeerError(f"llama.cpp did not score {file.name}: {last_line(log)}", log)
    return [[(best, score) for best, score in scores] for scores in json.loads(done.stdout)]


if __name__ == "__main__":
    sys.exit(main())
