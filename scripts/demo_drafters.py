"""What drafts for the demo model: a smaller model and an EAGLE head, as they are trained, measured and exported."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_export import hugging_face_config, replace_file
from demo_model import MLP, ModelConfig, Qwen3, rotate

DRAFT_CONFIG = ModelConfig(
    hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
)
FEATURE_WEIGHT = 1.0
"""Of the smooth L1 distance between the head's output and the demo model's hidden state."""


EMBEDDING_GAIN = 10.0


class Teacher(NamedTuple):
    """What the demo model makes of windows [batch, tokens]: its last hidden states, normalized, and its logits."""

    hidden: Tensor  # [batch, tokens, hidden]
    logits: Tensor  # [batch, tokens, vocabulary] fp32


@torch.no_grad()
def teach(model: Qwen3, windows: Tensor) -> Teacher:
    """Runs the demo model, in bf16 arithmetic."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = hidden_states(model, windows)
        logits = F.linear(hidden, model.embed_tokens.weight)
    return Teacher(hidden.float(), logits.float())


def hidden_states(model: Qwen3, ids: Tensor) -> Tensor:
    """Of ids [batch, tokens], after the last norm: [batch, tokens, hidden]."""
    x = model.embed_tokens(ids)
    for layer in model.layers:
        x = layer(x, model.cos[: ids.shape[1]], model.sin[: ids.shape[1]])
    out: Tensor = model.norm(x)
    return out


def distance(logits: Tensor, taught: Tensor) -> Tensor:
    """Cross entropy to the distribution of the taught logits, in nats a token: both [..., vocabulary]."""
    logits, taught = logits.float().flatten(0, -2), taught.flatten(0, -2)
    return F.cross_entropy(logits, taught.softmax(-1))


def acceptance(logits: Tensor, taught: Tensor) -> tuple[float, float]:
    """How often a draft is right: greedily, and at temperature 1 with the classic rule (the shared probability)."""
    same = (logits.argmax(-1) == taught.argmax(-1)).float().mean()
    shared = torch.minimum(logits.float().softmax(-1), taught.softmax(-1)).sum(-1).mean()
    return same.item(), shared.item()


class Drafter(Protocol):
    """One of the two: how it learns, what it is worth, what its folder holds."""

    def loss(self, windows: Tensor, taught: Teacher) -> Tensor: ...
    def drafts(self, windows: Tensor, taught: Teacher) -> list[tuple[Tensor, Tensor]]: ...
    def config(self, tokenizer: Tokenizer) -> dict[str, object]: ...
    def weights(self) -> dict[str, Tensor]: ...


# ---------------------------------------------------------------------------------------- a smaller model


class DraftModel(Qwen3):
    """A small Qwen3 that predicts what the demo model predicts.

    Its embedding begins as the demo model's, projected to where that has most of its variance.
    """

    def __init__(self, demo: Qwen3) -> None:
        super().__init__(DRAFT_CONFIG)
        table = demo.embed_tokens.weight.detach()
        directions = torch.linalg.svd(table, full_matrices=False).Vh[: DRAFT_CONFIG.hidden_size]
        self.embed_tokens.weight.data.copy_(table @ directions.T)

    def loss(self, windows: Tensor, taught: Teacher) -> Tensor:
        """Nats a token of windows [batch, tokens]."""
        with torch.autocast("cpu", torch.bfloat16):
            logits: Tensor = self(windows)
        return distance(logits, taught.logits)

    def drafts(self, windows: Tensor, taught: Teacher) -> list[tuple[Tensor, Tensor]]:
        """Its logits and the demo model's for the same tokens; one entry: it does not see who wrote them."""
        with torch.autocast("cpu", torch.bfloat16):
            return [(self(windows), taught.logits)]

    def config(self, tokenizer: Tokenizer) -> dict[str, object]:
        """`config.json`."""
        return hugging_face_config(DRAFT_CONFIG, tokenizer)

    def weights(self) -> dict[str, Tensor]:
        """Under Hugging Face's names."""
        return {f"model.{name}": tensor for name, tensor in self.state_dict().items()}


# ---------------------------------------------------------------------------------------- an EAGLE head

KeysValues = tuple[Tensor, Tensor]


class EagleAttention(nn.Module):
    """Causal attention of Llama's kind, which can go on from its own guesses."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, before: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:  # x: [batch, tokens, hidden]
        """`before`: keys and values that a row sees of the rows before it; None: this call's own."""
        batch, tokens, _ = x.shape
        q = self.q_proj(x).view(batch, tokens, self.heads, self.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, tokens, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q.float(), cos, sin).to(v.dtype), rotate(k.float(), cos, sin).to(v.dtype)
        repeats = self.heads // self.kv_heads
        k, v = k.repeat_interleave(repeats, dim=1), v.repeat_interleave(repeats, dim=1)
        if before is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = guessed_attention(q, (k, v), before)
        return self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1)), (k, v)


def guessed_attention(q: Tensor, own: KeysValues, before: KeysValues) -> Tensor:
    """Each row sees itself as it is here, and the rows before it as they were `before`: [batch, heads, tokens, dim]."""
    scale, future = q.shape[-1] ** -0.5, torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(0)
    scores = (q @ before[0].transpose(2, 3)).float().masked_fill(future, float("-inf"))
    itself = (q * own[0]).sum(-1, keepdim=True).float()
    shares = (torch.cat([scores, itself], dim=-1) * scale).softmax(-1).to(q.dtype)
    out: Tensor = shares[..., :-1] @ before[1] + shares[..., -1:] * own[1]
    return out


class EagleLayer(nn.Module):
    """The head's one layer. As in the published heads, no norm stands before its attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = EagleAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, before: KeysValues | None) -> tuple[Tensor, KeysValues]:
        mixed, own = self.self_attn(x, cos, sin, before)
        x = x + mixed
        return x + self.mlp(self.post_attention_layernorm(x)), own


class EagleHead(nn.Module):
    """EAGLE (https://arxiv.org/abs/2401.15077): the demo model's next hidden state, from its last and the next token.

    Embedding and output head are the demo model's own and stay as they are.
    """

    def __init__(self, demo: Qwen3) -> None:
        super().__init__()
        self.shape = config = ModelConfig(num_hidden_layers=1)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([EagleLayer(config)])
        self.table = demo.embed_tokens.weight.detach()  # [vocabulary, hidden]; no parameter of the head
        self.cos, self.sin = demo.cos, demo.sin
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(parameter)
            elif parameter.ndim == 2:
                nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
        # The embedding's numbers are that much smaller than the hidden states'; it shall count as much from the start.
        self.fc.weight.data[:, : config.hidden_size] *= EMBEDDING_GAIN

    def step(self, hidden: Tensor, after: Tensor, before: KeysValues | None) -> tuple[Tensor, KeysValues]:
        """Hidden states [batch, tokens, hidden] and the tokens after theirs: the next ones, keys and values."""
        x = self.fc(torch.cat([F.embedding(after, self.table), hidden], dim=-1))
        tokens = after.shape[1]
        out: tuple[Tensor, KeysValues] = self.layers[0](x, self.cos[:tokens], self.sin[:tokens], before)
        return out

    def predictions(self, windows: Tensor, taught: Teacher) -> list[tuple[Tensor, Teacher]]:
        """First and second draft of windows [batch, tokens]: predicted hidden states, and what they should be.

        The second is made as a drafting head makes it: its own row is fed the first draft's output, while the rows
        before it are those of the demo model.
        """
        after = windows[:, 1:]
        with torch.autocast("cpu", torch.bfloat16):
            first, known = self.step(taught.hidden[:, :-1], after, None)
            guessed = torch.cat([taught.hidden[:, :1], first[:, :-1]], dim=1)
            second, _ = self.step(guessed, after, known)
        return [
            (first, Teacher(taught.hidden[:, 1:], taught.logits[:, 1:])),
            (second[:, 1:], Teacher(taught.hidden[:, 2:], taught.logits[:, 2:])),
        ]

    def logits(self, hidden: Tensor) -> Tensor:
        """The demo model's output head."""
        with torch.autocast("cpu", torch.bfloat16):
            out: Tensor = F.linear(hidden, self.table)
        return out

    def loss(self, windows: Tensor, taught: Teacher) -> Tensor:
        """Cross entropy to the demo model's distribution, and the distance from its hidden states, of both drafts."""
        losses = [
            distance(self.logits(hidden), target.logits)
            + FEATURE_WEIGHT * F.smooth_l1_loss(hidden.float(), target.hidden)
            for hidden, target in self.predictions(windows, taught)
        ]
        return torch.stack(losses).mean()

    def drafts(self, windows: Tensor, taught: Teacher) -> list[tuple[Tensor, Tensor]]:
        """Logits of the first and the second draft, and the demo model's for the same tokens."""
        predictions = self.predictions(windows, taught)
        return [(self.logits(hidden), target.logits) for hidden, target in predictions]

    def config(self, tokenizer: Tokenizer) -> dict[str, object]:
        """`config.json`, in the form of the published heads: that of a Llama of one layer."""
        config = hugging_face_config(self.shape, tokenizer)
        for name in ("use_sliding_window", "sliding_window", "max_window_layers"):
            del config[name]
        return config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "bias": False}

    def weights(self) -> dict[str, Tensor]:
        """Under the names of the published heads."""
        return dict(self.state_dict())


def export(drafter: Drafter, folder: Path, demo: Path) -> None:
    """Write a drafter's folder as it stands, weights in bf16; a model gets the demo model's tokenizer."""
    tokenizer = Tokenizer.from_file(str(demo / "tokenizer.json"))
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in drafter.weights().items()}
    partial = folder / "model.safetensors.partial"
    save_file(weights, partial, metadata={"format": "pt"})
    partial.chmod(0o644)  # safetensors makes it private
    os.replace(partial, folder / "model.safetensors")
    replace_file(folder / "config.json", json.dumps(drafter.config(tokenizer), indent=2) + "\n")
    if isinstance(drafter, DraftModel):
        for name in ("generation_config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(demo / name, folder / name)
