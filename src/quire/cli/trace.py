"""Show, step by step, what the scheduler does with some prompts: spans, blocks, the prefix tree.

The model runs first, to get the tokens. Then the scheduler plans the same requests again, with blocks, a pool and a
token budget small enough to follow, which do not change the tokens. Without prompts, three with a common prefix are
used."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from quire.config import EngineConfig
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError

if TYPE_CHECKING:
    from quire.cli.trace_replay import Traced

PROMPTS = (
    "def read_lines(path):\n    with open(",
    "def read_lines(path):\n    return [",
    "def read_numbers(path):\n    return [",
)
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire trace`."""
    parser.usage = "quire trace [PROMPT ...] [options]"
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="at most 26 prompts; default: three built-in ones")
    parser.add_argument(
        "--model", default="demo", metavar="MODEL", help="folder, GGUF file, or org/name on the Hub (default: demo)"
    )
    numbers = (
        ("--block-size", 4, "tokens per block, any number"),
        ("--num-kv-blocks", 32, "blocks in the pool; with few, requests are preempted"),
        ("--max-num-batched-tokens", 16, "most tokens per step; with few, prompts are cut into chunks"),
        ("--max-num-seqs", 8, "most requests running at once"),
        ("--max-tokens", 8, "most output tokens"),
        ("--apart", 0, "steps between the arrivals of prompts"),
        ("--seed", 0, "sampling seed"),
    )
    for flag, default, text in numbers:
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{text} (default: {default})")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="sampling temperature (default: 0)")
    parser.add_argument("--prefix-cache", choices=("radix", "hash", "off"), default="radix", help="default: radix")


def run(args: argparse.Namespace) -> int:
    """Trace the prompts; returns 0."""
    prompts = args.prompts or list(PROMPTS)
    _check(args, prompts)
    _note_models(prompts, args.model)
    config = EngineConfig.from_options(
        {
            "model": args.model,
            "num_kv_blocks": args.num_kv_blocks,
            "max_num_batched_tokens": args.max_num_batched_tokens,
            "max_num_seqs": args.max_num_seqs,
            "min_chunk": max(1, min(16, args.max_num_batched_tokens - args.max_num_seqs)),
            "prefix_cache": args.prefix_cache,
        }
    )
    params = SamplingParams(max_tokens=args.max_tokens, temperature=args.temperature, seed=args.seed)
    traced = _tokens(args.model, prompts, params)

    from quire.cli.terminal import console
    from quire.cli.trace_replay import Replay
    from quire.cli.trace_view import TraceView

    replay = Replay(config, args.block_size, traced)
    TraceView(replay, console()).show(args.apart)
    return 0


def _check(args: argparse.Namespace, prompts: Sequence[str]) -> None:
    """Check what `EngineConfig` does not.

    Raises:
        ConfigError: a number is too small or too large, or there are too many prompts.
    """
    if len(prompts) > len(LETTERS):
        raise ConfigError(f"{len(prompts)} prompts are too many; give at most {len(LETTERS)}")
    for name, low, high in (
        ("block_size", 1, 4096),
        ("max_tokens", 1, 4096),
        ("apart", 0, 1000),
        ("num_kv_blocks", 2, 65536),
    ):
        value = getattr(args, name)
        if not low <= value <= high:
            raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be from {low} to {high}")


def _note_models(prompts: Sequence[str], model: str) -> None:
    """Say what the prompts are if one of them looks like a model, which comes first in most commands."""
    from quire.cli.terminal import note
    from quire.models.hub import EMBEDDED_MODELS, HUB_NAME

    for prompt in prompts:
        if prompt in EMBEDDED_MODELS or HUB_NAME.fullmatch(prompt) or os.path.isdir(prompt):
            note(f"{prompt!r} is taken as a prompt, and {model} as the model; to trace that model: --model {prompt}")


def _tokens(model: str, prompts: Sequence[str], params: SamplingParams) -> list[Traced]:
    """Run the model; returns each request's tokens and their texts."""
    from quire.cli.terminal import loading
    from quire.cli.trace_replay import Traced

    with loading(model) as on_load:
        from quire.llm import LLM

        llm = LLM(model, on_load=on_load)
    with llm:
        outputs = llm.generate(list(prompts), params)
        tokenizer = llm.tokenizer
        text = tokenizer.token_text if tokenizer else str
        return [
            Traced(
                letter,
                prompt := output.prompt_token_ids,
                list(output.outputs[0].token_ids),
                {token: text(token) for token in (*prompt, *output.outputs[0].token_ids)},
                output.outputs[0].finish_reason or "",
            )
            for letter, output in zip(LETTERS, outputs, strict=False)
        ]
