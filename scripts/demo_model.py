"""The demo model as it is trained: Qwen3 in plain PyTorch, its loss, and a slow generator to check it by."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from demo_data import END_OF_TEXT, TURN_END, TrainingError


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
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, tokens, -1))
        return mixed


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
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


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
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Qwen3(nn.Module):
    """The training-time model; parameter names, after `model.`, are Hugging Face's."""

    cos: Tensor  # [positions, head_dim / 2]
    sin: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        half = torch.arange(0, config.head_dim, 2).float() / config.head_dim
        angles = torch.outer(torch.arange(config.max_position_embeddings).float(), config.rope_theta**-half)
        self.register_buffer("cos", angles.cos(), persistent=False)
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


def parameter_count(model: nn.Module) -> int:
    """Trainable numbers in the model; the tied output matrix is the embedding and counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


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
