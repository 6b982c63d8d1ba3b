"""Write the demo model's folder, measure the weights in it, and tell both in a model card and a summary."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text
from safetensors.torch import save_file
from tokenizers import Tokenizer

from demo_data import CHAT_TEMPLATE, END_OF_TEXT, SPECIAL_TOKENS, TURN_END, TURN_START, chat_turn, standard_library
from demo_model import ModelConfig, generate, parameter_count
from demo_run import Run, held_out_losses

SAMPLE_PROMPTS = (
    "import os\nimport sys\n\n\ndef main(",
    'class Stack:\n    """A last-in, first-out container."""\n\n    def __init__(self',
    '    def read(self, size=-1):\n        """Read at most size bytes',
    "for i in range(",
)
CHAT_PROMPT = "Write a function `is_empty`. Return True if the queue is empty."


def replace_file(path: Path, content: str) -> None:
    """Write a file in one move, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)


def hugging_face_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """`config.json` for `Qwen3ForCausalLM`."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(config),
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": config.num_hidden_layers,
        "rope_scaling": None,
        "initializer_range": 0.02,
        "use_cache": True,
        "bos_token_id": end,
        "eos_token_id": end,
        "torch_dtype": "bfloat16",
    }


def tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """`tokenizer_config.json`, with the ChatML template."""
    added = {
        str(tokenizer.token_to_id(token)): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for token in SPECIAL_TOKENS
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_position_embeddings,
        "added_tokens_decoder": added,
        "additional_special_tokens": [TURN_START, TURN_END],
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def license_text() -> str:
    """The licence of the running interpreter's library, or where to find it if none is installed."""
    for folder in (standard_library(), Path(sys.base_prefix)):
        if (folder / "LICENSE.txt").is_file():
            return (folder / "LICENSE.txt").read_text(encoding="utf-8")
    return f"{sys.copyright}\n\nPSF License Version 2: https://docs.python.org/3/license.html\n"


def export(run: Run) -> None:
    """Write the model folder as it stands: weights in bf16, configuration, tokenizer."""
    output, tokenizer = run.options.output, run.tokenizer
    weights = {
        f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in run.model.state_dict().items()
    }
    partial = output / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes it private
    os.replace(partial, output / "model.safetensors")
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    generation = {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 50,
        "bos_token_id": end,
        "eos_token_id": [turn_end, end],
        "pad_token_id": end,
    }
    for name, content in (
        ("config.json", hugging_face_config(run.config, tokenizer)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(run.config, tokenizer)),
    ):
        replace_file(output / name, json.dumps(content, indent=2) + "\n")
    replace_file(output / "tokenizer.json", tokenizer.to_str())
    replace_file(output / "LICENSE.PSF", license_text())


@dataclass(frozen=True)
class Result:
    """What the model card and the closing table say about the exported weights."""

    nats_per_token: float
    nats_per_byte: float
    by_position: dict[str, float]  # nats a token at early and late positions of long windows
    samples: list[tuple[str, str, str]]  # kind, prompt, completion


def assess(run: Run) -> Result:
    """Measure the held-out files with the weights as exported, and complete a few prompts."""
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    losses = held_out_losses(run.losses, run.model, run.held_out, run.options.window)
    long = held_out_losses(run.losses, run.model, run.held_out, run.options.long_window)
    edges = [0, *(edge for edge in (128, 512, 1024, 2048) if edge <= long.shape[1])]
    by_position = {f"{low}-{high - 1}": long[:, low:high].mean().item() for low, high in pairwise(edges)}
    text_bytes = sum(len(text.encode()) for text in run.corpus.held_out)
    nats_per_token = losses.mean().item()
    chat = chat_turn("user", CHAT_PROMPT) + f"{TURN_START}assistant\n"
    samples = []
    for prompt in (*SAMPLE_PROMPTS, chat):
        for kind, temperature in (("greedy", 0.0), ("temperature 0.7", 0.7)):
            completion = generate(run.model, run.tokenizer, prompt, 96, temperature, run.options.seed)
            samples.append((kind, prompt, completion))
    return Result(nats_per_token, nats_per_token * (len(run.held_out) - 1) / text_bytes, by_position, samples)


def curve_table(curve: list[tuple[float, int, float, float]]) -> str:
    """About a dozen points of the training curve as Markdown rows."""
    stride = max(1, len(curve) // 12)
    points = [*curve[:-1:stride], curve[-1]]
    return "\n".join(
        f"| {minutes:.0f} | {tokens / 1e6:.2f} | {training:.3f} | {held_out:.3f} |"
        for minutes, tokens, training, held_out in points
    )


def command_line(options: argparse.Namespace) -> str:
    """The command that repeats the run."""
    budget = f"--steps {options.steps}" if options.steps else f"--minutes {options.minutes:g}"
    compiled = " --compile" if options.compile else ""
    return f"python scripts/train_demo.py --seed {options.seed} {budget} --threads {options.threads}{compiled}"


CARD = """\
---
license: other
license_name: psf-2.0
license_link: LICENSE.PSF
language: [en]
tags: [code, python, qwen3]
---

# demo

A Qwen3-architecture language model of {parameters:,} parameters, small enough to ship inside Quire: it
exercises the engine on real text, offline, and completes Python recognisably. It is a demonstration, not an
assistant.

## Data and licence

Trained from scratch by `scripts/train_demo.py` on the source text of the standard library of CPython
{python}: {library:,} tokens of the library, {tests:,} of its `test` packages (at a lower weight), and
{chat:,} of synthetic conversations made from the library's own functions and docstrings. Nothing else.
Python's sources are licensed under the Python Software Foundation License Version 2; the notice is kept in
`LICENSE.PSF`. {copyright}.

## Architecture

| layers | hidden | query heads | KV heads | head dim | MLP | vocabulary | positions |
|--:|--:|--:|--:|--:|--:|--:|--:|
| {num_hidden_layers} | {hidden_size} | {num_attention_heads} | {num_key_value_heads} | {head_dim} \
| {intermediate_size} | {vocab_size} | {max_position_embeddings} |

Tied embeddings, RoPE theta {rope_theta:g}, bf16 weights. Byte-level BPE trained on the same text; ChatML.

## Held-out loss

{files} library files ({held_out:,} tokens, {file_bytes:,} bytes) were drawn by the seed and never trained on,
nor did the tokenizer see them:

- **{nats_per_token:.3f} nats a token** in windows of {window} tokens
- **{nats_per_byte:.3f} nats a byte**
- by position in windows of {long_window}: {by_position}

The files: {names}.

## Training

Seed {seed}; {tokens:,} tokens in {steps:,} steps and {minutes:.0f} minutes on {threads} CPU threads:
{speed:,.0f} tokens a second, evaluations included. Times resumed from a checkpoint: {resumed}. Muon for the
layers' matrices, AdamW for embeddings and norms, cosine decay; {batch_tokens} tokens a step in windows of
{window}, every fourth step in windows of {long_window}. PyTorch {torch}. The losses in the table are
estimates: a running mean over training batches, and the first 32,768 held-out tokens.

| minutes | million tokens | training loss | held-out loss |
|--:|--:|--:|--:|
{curve}

To run it again:

    {command}

Seed and `--steps` fix weights, split and data order; under `--minutes` the number of steps follows the
machine's speed, so the weights differ from run to run.

## Samples

{samples}

## Limits

It knows only the standard library's style, invents names, loses the thread after a few lines and has no
knowledge of English beyond docstrings. A chat request gets Python-shaped text, rarely a right answer. It may
repeat passages of the library word for word. Greedy decoding soon loops, and a prompt that ends in spaces is
cut into tokens it has hardly seen: end prompts at a word, a bracket or a line's end. The standard library
resembles itself (`distutils/msvc9compiler.py` has a close relative in the training text), so the held-out
loss flatters the model for other people's code.
"""


def model_card(run: Run, result: Result) -> str:
    """The card's text."""
    options, state, sampler = run.options, run.progression, run.sampler
    samples = "\n\n".join(
        f"Prompt, {kind}:\n\n````text\n{prompt}\n````\n\nCompletion:\n\n````text\n{completion}\n````"
        for kind, prompt, completion in result.samples
    )
    library, tests, chat = (len(stream) for stream in sampler.streams)
    return CARD.format(
        **asdict(run.config),
        parameters=parameter_count(run.model),
        python=sys.version.split()[0],
        library=library,
        tests=tests,
        chat=chat,
        copyright=sys.copyright.splitlines()[0].rstrip("."),
        files=len(run.corpus.held_out),
        names=", ".join(f"`{name}`" for name in run.corpus.held_out_names),
        held_out=len(run.held_out),
        file_bytes=sum(len(text.encode()) for text in run.corpus.held_out),
        nats_per_token=result.nats_per_token,
        nats_per_byte=result.nats_per_byte,
        by_position=", ".join(f"{span}: {loss:.3f}" for span, loss in result.by_position.items()),
        seed=options.seed,
        tokens=state.tokens,
        steps=state.step,
        minutes=state.seconds / 60,
        threads=options.threads,
        speed=state.speed,
        resumed=state.resumed,
        batch_tokens=options.batch_tokens,
        window=options.window,
        long_window=options.long_window,
        torch=torch.__version__,
        curve=curve_table(state.curve),
        command=command_line(options),
        samples=samples,
    )


def print_summary(run: Run, result: Result) -> None:
    """The closing table: losses, sizes, samples."""
    table = Table(title="demo", show_lines=True, show_header=False)
    by_position = ", ".join(f"{span}: {loss:.3f}" for span, loss in result.by_position.items())
    losses = f"{result.nats_per_token:.3f} nats a token, {result.nats_per_byte:.3f} nats a byte"
    table.add_row("held-out loss", losses)
    table.add_row("by position", by_position)
    table.add_row(
        "trained",
        f"{run.progression.tokens:,} tokens, {run.progression.speed:,.0f} tokens/s, "
        f"{run.progression.seconds / 60:.1f} min",
    )
    table.add_row(
        "size",
        f"{(run.options.output / 'model.safetensors').stat().st_size / 1e6:.1f} MB, "
        f"{parameter_count(run.model):,} parameters",
    )
    for kind, prompt, completion in result.samples:
        table.add_row(kind, Text.assemble((prompt, "dim"), completion))
    run.console.print(table)
