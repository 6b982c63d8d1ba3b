"""Train Quire's embedded `demo` model from scratch on the Python standard library's own source text.

The result is an ordinary Hugging Face folder: a Qwen3-architecture model of about four million
parameters, its byte-level BPE tokenizer, a chat template and a model card. Everything comes from the
interpreter that runs this script; nothing is downloaded.

    python scripts/train_demo.py --minutes 45                # train, export, write the card
    python scripts/train_demo.py --sample "def read(self"    # complete a prompt with the exported model

The learning rate follows the elapsed share of `--minutes`, so a run ends well on any machine; `--steps`
fixes the number of steps instead, which makes two runs on one machine the same. On a machine that does
other work too, set OMP_WAIT_POLICY=passive: threads that spin while they wait slow each other tenfold.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import os
import shutil
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

END_OF_TEXT, TURN_START, TURN_END = SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# How Qwen splits text before BPE, case-sensitive contractions left out: code has none.
SPLIT_PATTERN = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

SAMPLE_PROMPTS = (
    "import os\nimport sys\n\n\ndef main(",
    "class Stack:\n    \"\"\"A last-in, first-out container.\"\"\"\n\n    def __init__(self",
    "    def read(self, size=-1):\n        \"\"\"Read at most size bytes",
    "for i in range(",
)
CHAT_PROMPT = "Write a function `is_empty`. Return True if the queue is empty."

DEFAULT_OUTPUT = Path(__file__).resolve().parents[1] / "src" / "quire" / "assets" / "demo"


class TrainingError(Exception):
    """A condition the user can mend: no sources, an unusable folder, a bad option."""


# ----------------------------------------------------------------------------------------------- model


@dataclass(frozen=True)
class ModelConfig:
    """The shape of the model, under the names that a Hugging Face `config.json` uses."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 2048
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6


class Attention(nn.Module):
    """Causal grouped-query attention with RMSNorm on each query and key head (Qwen3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # x: [batch, tokens, hidden]
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        q = rotate(self.q_norm(q.float()), cos, sin).to(v.dtype)
        k = rotate(self.k_norm(k.float()), cos, sin).to(v.dtype)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, heads, tokens, head_dim]
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in Hugging Face's convention: first half against second half of `head_dim`."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class MLP(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Qwen3(nn.Module):
    """The training-time model; parameter names, after `model.`, are Hugging Face's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)  # [positions, head_dim / 2]
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal weights; each layer starts as the identity, which lets Muon use a high rate."""
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=0.02 if "embed" in name else parameter.shape[1] ** -0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [batch, tokens, vocab] for token ids [batch, tokens]."""
        x = self.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x, cos, sin)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def token_losses(model: nn.Module, windows: Tensor) -> Tensor:
    """Nats of each predicted token, [batch, tokens - 1], in bf16 arithmetic with a float32 softmax."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(windows[:, :-1])
    targets = windows[:, 1:]
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)


LossFunction = Callable[[nn.Module, Tensor], Tensor]  # `token_losses`, compiled or not


# ------------------------------------------------------------------------------------------------ data


@dataclass
class Corpus:
    """Source texts: what to train on, and what was held out (library files only)."""

    library: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    held_out_names: list[str] = field(default_factory=list)


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def source_files(root: Path) -> Iterator[Path]:
    """The library's own Python files in a stable order.

    Left out: installed packages, build records with this machine's paths in them, and character tables
    (`encodings/cp1252.py` and its kin are thousands of lines of numbers).
    """
    skipped = {"site-packages", "dist-packages", "__pycache__", "encodings", "cjkencodings"}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if skipped.isdisjoint(parts) and not parts[0].startswith(("config-", "_sysconfigdata")):
            yield path


def read_corpus(root: Path, seed: int, held_out_share: float) -> Corpus:
    """Read every usable file under `root`; a seeded draw of the library's files is held out.

    Raises TrainingError if the interpreter comes without sources (a zip or .pyc-only install).
    """
    corpus, draw = Corpus(), np.random.default_rng(seed)
    for path in source_files(root):
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue  # the test packages hold files that are broken on purpose
        name = path.relative_to(root)
        if {"test", "tests", "idle_test"} & set(name.parts):
            if len(text) < 400_000:  # longer ones are data tables
                corpus.tests.append(text)
        elif draw.random() < held_out_share and len(text) > 500:
            corpus.held_out.append(text)
            corpus.held_out_names.append(str(name))
        elif text.strip():
            corpus.library.append(text)
    if sum(map(len, corpus.library)) < 1_000_000 or not corpus.held_out:
        raise TrainingError(f"{root} holds too little Python source to train on: "
                            "use an interpreter that was installed with its library's .py files")
    return corpus


def documented_functions(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, first line of the docstring, dedented source) of each short documented function."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return
    lines = text.splitlines(keepends=True)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and (docstring := ast.get_docstring(node)):
            source = textwrap.dedent("".join(lines[node.lineno - 1 : node.end_lineno])).rstrip()
            if len(source) < 1500:
                yield node.name, docstring.strip().split("\n")[0], source


def chat_turn(role: str, content: str) -> str:
    """One message as the chat template writes it."""
    return f"{TURN_START}{role}\n{content}{TURN_END}\n"


def chat_texts(texts: list[str], seed: int) -> list[str]:
    """Synthetic conversations: a request made from a docstring, answered with the function's source."""
    rng, turns = np.random.default_rng([seed, 1]), []
    for text in texts:
        for name, summary, source in documented_functions(text):
            request = (
                f"Write a function `{name}`. {summary}",
                f"Write a function `{name}`.",
                f"Write a Python function: {summary}",
                summary,
            )[rng.choice(4, p=(0.5, 0.2, 0.2, 0.1))]
            turns.append(chat_turn("user", request) + chat_turn("assistant", f"```python\n{source}\n```"))
    order, conversations, start = rng.permutation(len(turns)), [], 0
    while start < len(turns):
        count = int(rng.choice(3, p=(0.6, 0.25, 0.15))) + 1
        conversations.append("".join(turns[i] for i in order[start : start + count]))
        start += count
    return conversations


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer with the special tokens as its first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One stream of token ids, every text followed by the end-of-text token."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    stream = np.full(1, end, np.uint16)
    encoded = (tokenizer.encode_batch_fast(texts[i : i + 64]) for i in range(0, len(texts), 64))
    pieces = [np.array([*item.ids, end], np.uint16) for batch in encoded for item in batch]
    return np.concatenate([stream, *pieces])


@dataclass(frozen=True)
class Sampler:
    """Draws training windows; a step's batch depends on the seed and the step alone, so runs can resume."""

    streams: tuple[np.ndarray, ...]  # token ids, one array a source
    weights: tuple[float, ...]  # each source's share of the rows
    seed: int
    tokens: int  # in a batch
    window: int
    long_window: int  # every fourth batch: teaches the positions beyond `window`

    def batch(self, step: int) -> Tensor:
        """Token ids [rows, window + 1]."""
        rng = np.random.default_rng([self.seed, 2, step])
        window = self.long_window if step % 4 == 3 else self.window
        rows = []
        for source in rng.choice(len(self.streams), self.tokens // window, p=self.weights):
            start = rng.integers(len(self.streams[source]) - window)
            rows.append(self.streams[source][start : start + window + 1])
        return torch.from_numpy(np.stack(rows).astype(np.int64))


# -------------------------------------------------------------------------------------------- training


@dataclass
class Progression:
    """Where a run stands: saved in checkpoints, told in the model card."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    resumed: int = 0  # how often the run was taken up from a checkpoint
    curve: list[tuple[float, int, float, float]] = field(default_factory=list)  # minutes, tokens, two losses

    @property
    def speed(self) -> float:
        """Training tokens per second, evaluation included."""
        return self.tokens / max(self.seconds, 1e-9)


@torch.no_grad()
def held_out_losses(
    losses: LossFunction, model: nn.Module, stream: np.ndarray, window: int, most_tokens: int = 1 << 62
) -> Tensor:
    """Nats of the held-out tokens, [windows, window], each predicted once from within its own window."""
    count = min((len(stream) - 1) // window, max(1, most_tokens // window))
    rows = max(1, 4096 // window)
    found = []
    for first in range(0, count, rows):
        starts = [min(first + row, count - 1) * window for row in range(rows)]  # one shape: compiled once
        windows = np.stack([stream[start : start + window + 1] for start in starts]).astype(np.int64)
        found.append(losses(model, torch.from_numpy(windows)))
    return torch.cat(found)[:count]


def make_optimizers(model: nn.Module, rate: float, muon_rate: float) -> list[torch.optim.Optimizer]:
    """Muon (Jordan et al., 2024) for the matrices inside the layers, AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    embeddings = [p for n, p in model.named_parameters() if "embed" in n]
    norms = [p for p in model.parameters() if p.ndim == 1]
    adamw_groups = [{"params": embeddings, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizers = [
        torch.optim.Muon(matrices, lr=muon_rate, momentum=0.95, weight_decay=0.05),
        torch.optim.AdamW(adamw_groups, lr=rate, betas=(0.9, 0.95), fused=True),
    ]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


def set_rate(optimizers: list[torch.optim.Optimizer], step: int, share: float) -> None:
    """Linear warm-up over 50 steps, then a cosine over the run's elapsed `share` down to nothing."""
    scale = min(1.0, (step + 1) / 50) * 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * scale


def training_step(
    losses: LossFunction, model: nn.Module, optimizers: list[torch.optim.Optimizer], batch: Tensor
) -> float:
    """One update; returns the batch's mean loss in nats a token."""
    loss = losses(model, batch).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


@dataclass
class Run:
    """One training run: everything that a step, an evaluation or an export needs."""

    options: argparse.Namespace
    config: ModelConfig
    model: Qwen3
    losses: LossFunction
    optimizers: list[torch.optim.Optimizer]
    tokenizer: Tokenizer
    sampler: Sampler
    held_out: np.ndarray
    corpus: Corpus
    progression: Progression
    console: Console

    @property
    def share(self) -> float:
        """How much of the budget is spent, 0 to 1: of the steps if they were given, else of the minutes."""
        if self.options.steps:
            return self.progression.step / self.options.steps
        return self.progression.seconds / (60 * self.options.minutes)

    def evaluate(self, training_loss: float) -> float:
        """Note a point of the curve; the held-out loss is estimated on at most 32,768 tokens."""
        state = self.progression
        window = self.options.window
        loss = held_out_losses(self.losses, self.model, self.held_out, window, 32768).mean().item()
        state.curve.append((state.seconds / 60, state.tokens, training_loss, loss))
        self.console.print(
            f"{state.seconds / 60:6.1f} min  step {state.step:5d}  {state.tokens / 1e6:6.2f} M tokens  "
            f"loss {training_loss:.3f}  held-out {loss:.3f}  {state.speed:,.0f} tokens/s",
            soft_wrap=True,
        )
        return loss


def prepare(options: argparse.Namespace, console: Console) -> Run:
    """Read the sources, train the tokenizer, build the model, and take up a checkpoint where one is given."""
    torch.manual_seed(options.seed)
    corpus = read_corpus(standard_library(), options.seed, options.held_out)
    tokenizer = train_tokenizer(corpus.library + corpus.tests[::4], ModelConfig.vocab_size)
    chats = chat_texts(corpus.library, options.seed)
    streams = tuple(encode(tokenizer, texts) for texts in (corpus.library, corpus.tests, chats))
    sampler = Sampler(streams, (0.65, 0.23, 0.12), options.seed, options.batch_tokens, options.window,
                      options.long_window)
    config = ModelConfig()
    model = Qwen3(config)
    losses = torch.compile(token_losses, dynamic=False) if options.compile else token_losses
    run = Run(options, config, model, losses, make_optimizers(model, options.rate, options.muon_rate),
              tokenizer, sampler, encode(tokenizer, corpus.held_out), corpus, Progression(), console)
    console.print(f"library {len(streams[0]):,} tokens, tests {len(streams[1]):,}, chat {len(streams[2]):,}, "
                  f"held out {len(run.held_out):,}; {parameter_count(model):,} parameters", soft_wrap=True)
    if options.checkpoint and options.checkpoint.exists():
        load_checkpoint(run, options.checkpoint)
        console.print(f"resumed from {options.checkpoint} at step {run.progression.step}")
    return run


def train(run: Run) -> None:
    """Train until the budget is spent, with evaluations, snapshots and checkpoints on the way."""
    options, state = run.options, run.progression
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    average, held_out, last = math.nan, math.nan, time.monotonic()
    next_evaluation, next_export = state.seconds + 60, state.seconds + 60 * min(4, options.export_minutes)
    with Progress(*columns, console=run.console) as progress:
        task = progress.add_task("training", total=1.0)
        while run.share < 1:
            set_rate(run.optimizers, state.step, run.share)
            batch = run.sampler.batch(state.step)
            loss = training_step(run.losses, run.model, run.optimizers, batch)
            average = loss if math.isnan(average) else 0.98 * average + 0.02 * loss
            state.step += 1
            state.tokens += batch.shape[0] * (batch.shape[1] - 1)
            now = time.monotonic()
            state.seconds, last = state.seconds + now - last, now
            if state.seconds >= next_evaluation:
                held_out, next_evaluation = run.evaluate(average), state.seconds + 120
            if state.seconds >= next_export:
                export(run)
                save_checkpoint(run)
                next_export = state.seconds + 60 * options.export_minutes
            progress.update(task, completed=run.share, description=(
                f"loss {average:.3f}  held-out {held_out:.3f}  {state.speed:,.0f} tokens/s"))
    run.evaluate(average)


def save_checkpoint(run: Run) -> None:
    """Keep weights, optimizer states and progress, so that the same command resumes the run."""
    if not run.options.checkpoint:
        return
    state = {"model": run.model.state_dict(), "optimizers": [o.state_dict() for o in run.optimizers],
             "progression": asdict(run.progression), "seed": run.options.seed}
    partial = run.options.checkpoint.with_suffix(".partial")
    torch.save(state, partial)
    os.replace(partial, run.options.checkpoint)


def load_checkpoint(run: Run, path: Path) -> None:
    """Take up a run where `save_checkpoint` left it. Raises TrainingError if the seed differs."""
    state = torch.load(path, weights_only=True)
    if state["seed"] != run.options.seed:
        raise TrainingError(f"{path} was trained with --seed {state['seed']}, not {run.options.seed}")
    run.model.load_state_dict(state["model"])
    for optimizer, saved in zip(run.optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    run.progression = Progression(**state["progression"])
    run.progression.resumed += 1


# ---------------------------------------------------------------------------------------------- export


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers in the model; the tied output matrix is the embedding and counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def replace_file(path: Path, content: str) -> None:
    """Write a file in one move, so that a reader never sees half of it."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(content, encoding="utf-8")
    os.replace(partial, path)


def hugging_face_config(config: ModelConfig, end: int) -> dict[str, object]:
    """`config.json` for `Qwen3ForCausalLM`."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **asdict(config),
        "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
        "tie_word_embeddings": True, "use_sliding_window": False, "sliding_window": None,
        "max_window_layers": config.num_hidden_layers, "rope_scaling": None, "initializer_range": 0.02,
        "use_cache": True, "bos_token_id": end, "eos_token_id": end, "torch_dtype": "bfloat16",
    }


def tokenizer_config(config: ModelConfig, tokenizer: Tokenizer) -> dict[str, object]:
    """`tokenizer_config.json`, with the ChatML template."""
    added = {str(tokenizer.token_to_id(token)): {
        "content": token, "lstrip": False, "normalized": False, "rstrip": False, "single_word": False,
        "special": True} for token in SPECIAL_TOKENS}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config.max_position_embeddings,
        "added_tokens_decoder": added, "additional_special_tokens": [TURN_START, TURN_END],
        "bos_token": None, "eos_token": TURN_END, "pad_token": END_OF_TEXT, "unk_token": None,
        "add_bos_token": False, "clean_up_tokenization_spaces": False, "chat_template": CHAT_TEMPLATE,
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
    weights = {f"model.{name}": tensor.detach().to(torch.bfloat16).contiguous()
               for name, tensor in run.model.state_dict().items()}
    partial = output / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes it private
    os.replace(partial, output / "model.safetensors")
    end, turn_end = tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)
    generation = {"do_sample": True, "temperature": 0.7, "top_p": 0.95, "top_k": 50, "bos_token_id": end,
                  "eos_token_id": [turn_end, end], "pad_token_id": end}
    for name, content in (
        ("config.json", hugging_face_config(run.config, end)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config(run.config, tokenizer)),
    ):
        replace_file(output / name, json.dumps(content, indent=2) + "\n")
    replace_file(output / "tokenizer.json", tokenizer.to_str())
    replace_file(output / "LICENSE.PSF", license_text())


# ------------------------------------------------------------------------------------ samples and card


@torch.inference_mode()
def generate(
    model: Qwen3, tokenizer: Tokenizer, prompt: str, tokens: int = 80, temperature: float = 0.0, seed: int = 0
) -> str:
    """The model's continuation of `prompt`: greedy at temperature 0, else drawn from the 50 likeliest.

    It recomputes everything for each token: a check of the weights, not an engine.
    """
    generator = torch.Generator().manual_seed(seed)
    ids = tokenizer.encode(prompt).ids
    first = len(ids)
    stops = {tokenizer.token_to_id(END_OF_TEXT), tokenizer.token_to_id(TURN_END)}
    while len(ids) < first + tokens:
        logits = model(torch.tensor([ids[-model.cos.shape[0] :]]))[0, -1]
        if temperature == 0:
            token = int(logits.argmax())
        else:
            values, candidates = logits.topk(50)
            chances = F.softmax(values / temperature, dim=-1)
            token = int(candidates[torch.multinomial(chances, 1, generator=generator)])
        if token in stops:
            break
        ids.append(token)
    return tokenizer.decode(ids[first:])


def load_model(folder: Path) -> tuple[Qwen3, Tokenizer]:
    """An exported model, in float32. Raises TrainingError if the folder holds none."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        model = Qwen3(ModelConfig(**{name: config[name] for name in asdict(ModelConfig())}))
        weights = load_file(folder / "model.safetensors")
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except FileNotFoundError as error:
        raise TrainingError(f"no model in {folder} ({error}): train one first") from error
    model.load_state_dict({name.removeprefix("model."): weight.float() for name, weight in weights.items()})
    return model, tokenizer


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
    return (f"python scripts/train_demo.py --seed {options.seed} {budget} "
            f"--threads {options.threads}{compiled}")


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
repeat passages of the library word for word.
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
        **asdict(run.config), parameters=parameter_count(run.model), python=sys.version.split()[0],
        library=library, tests=tests, chat=chat, copyright=sys.copyright.splitlines()[0].rstrip("."),
        files=len(run.corpus.held_out), names=", ".join(f"`{name}`" for name in run.corpus.held_out_names),
        held_out=len(run.held_out),
        file_bytes=sum(len(text.encode()) for text in run.corpus.held_out),
        nats_per_token=result.nats_per_token, nats_per_byte=result.nats_per_byte,
        by_position=", ".join(f"{span}: {loss:.3f}" for span, loss in result.by_position.items()),
        seed=options.seed, tokens=state.tokens, steps=state.step, minutes=state.seconds / 60,
        threads=options.threads, speed=state.speed, resumed=state.resumed, batch_tokens=options.batch_tokens,
        window=options.window, long_window=options.long_window, torch=torch.__version__,
        curve=curve_table(state.curve), command=command_line(options), samples=samples,
    )


def print_summary(run: Run, result: Result) -> None:
    """The closing table: losses, sizes, samples."""
    table = Table(title="demo", show_lines=True, show_header=False)
    by_position = ", ".join(f"{span}: {loss:.3f}" for span, loss in result.by_position.items())
    losses = f"{result.nats_per_token:.3f} nats a token, {result.nats_per_byte:.3f} nats a byte"
    table.add_row("held-out loss", losses)
    table.add_row("by position", by_position)
    table.add_row("trained", f"{run.progression.tokens:,} tokens, {run.progression.speed:,.0f} tokens/s, "
                             f"{run.progression.seconds / 60:.1f} min")
    table.add_row("size", f"{(run.options.output / 'model.safetensors').stat().st_size / 1e6:.1f} MB, "
                          f"{parameter_count(run.model):,} parameters")
    for kind, prompt, completion in result.samples:
        table.add_row(kind, Text.assemble((prompt, "dim"), completion))
    run.console.print(table)


# ---------------------------------------------------------------------------------------- command line


def parse_arguments() -> argparse.Namespace:
    """The options, checked. Exits with a message, as argparse does, if they make no sense together."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--output", type=Path, default=DEFAULT_OUTPUT, help="model folder to write (default: the package's)")
    add("--minutes", type=float, default=55.0, help="training time (default: %(default)s)")
    add("--steps", type=int, help="number of steps, instead of --minutes")
    add("--seed", type=int, default=0, help="of weights, split and data order (default: %(default)s)")
    add("--threads", type=int, default=os.cpu_count() or 1, help="CPU threads (default: all)")
    add("--compile", action="store_true", help="use torch.compile: a third faster, needs a C++ compiler")
    add("--checkpoint", type=Path, help="file that keeps the run's state; resumes from it if it exists")
    add("--export-minutes", type=float, default=8.0, help="time between snapshots (default: %(default)s)")
    add("--held-out", type=float, default=0.04, help="share of library files held out (default: %(default)s)")
    add("--batch-tokens", type=int, default=4096, help="tokens in a step (default: %(default)s)")
    add("--window", type=int, default=512, help="tokens in a training window (default: %(default)s)")
    add("--long-window", type=int, default=2048, help="the same, every fourth step (default: %(default)s)")
    add("--rate", type=float, default=3e-3, help="AdamW's peak learning rate (default: %(default)s)")
    add("--muon-rate", type=float, default=0.02, help="Muon's peak learning rate (default: %(default)s)")
    add("--sample", metavar="PROMPT", help="complete a prompt with the model in --output, and train nothing")
    options = parser.parse_args()
    for name in ("minutes", "steps", "threads", "export_minutes", "window", "rate", "muon_rate"):
        if (value := getattr(options, name)) is not None and value <= 0:
            parser.error(f"--{name.replace('_', '-')} must be above 0, not {value}")
    if options.seed < 0:
        parser.error(f"--seed must be 0 or more, not {options.seed}")
    if not 0 < options.held_out < 0.5:
        parser.error(f"--held-out must be between 0 and 0.5, not {options.held_out}")
    if not options.window <= options.long_window <= ModelConfig.max_position_embeddings:
        parser.error(f"--long-window must be from --window to {ModelConfig.max_position_embeddings}")
    if options.batch_tokens < options.long_window:
        parser.error("--batch-tokens must hold at least one --long-window")
    return options


def check_environment(options: argparse.Namespace) -> None:
    """Raise TrainingError now for what would otherwise fail minutes into the run."""
    if not hasattr(torch.optim, "Muon"):
        raise TrainingError(f"torch.optim.Muon needs torch 2.9 or later, and this is {torch.__version__}")
    if options.compile and not any(shutil.which(name) for name in ("c++", "g++", "clang++", "cl")):
        raise TrainingError("--compile needs a C++ compiler, and there is none on the path")
    try:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "config.json.partial").touch()
    except OSError as error:
        raise TrainingError(f"cannot write to {options.output}: {error.strerror}") from error


def print_samples(options: argparse.Namespace, console: Console) -> None:
    """`--sample`: one greedy and three drawn completions of the given prompt."""
    model, tokenizer = load_model(options.output)
    prompt = options.sample.encode().decode("unicode_escape") if "\\" in options.sample else options.sample
    for temperature, seed in ((0.0, 0), *((0.7, options.seed + draw) for draw in range(3))):
        completion = generate(model, tokenizer, prompt, 128, temperature, seed)
        console.rule("greedy" if temperature == 0 else f"temperature {temperature}, seed {seed}")
        console.print(Text.assemble((prompt, "dim"), completion), soft_wrap=True)


def main() -> int:
    """Run the command line; 0 on success, 2 for a condition the user can mend, 130 when interrupted."""
    options, console = parse_arguments(), Console()
    torch.set_num_threads(options.threads)
    try:
        if options.sample is not None:
            print_samples(options, console)
            return 0
        check_environment(options)
        run = prepare(options, console)
        try:
            train(run)
        finally:
            save_checkpoint(run)
        result = assess(run)
        export(run)
        replace_file(options.output / "README.md", model_card(run, result))
        print_summary(run, result)
    except TrainingError as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print("interrupted" + (f"; the same command resumes from {options.checkpoint}"
                                       if options.checkpoint else ""))
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
