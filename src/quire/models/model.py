"""What the engine and the runner may ask of a model, whatever its architecture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from quire.errors import ConfigError
from quire.layers.embedding import Embedding
from quire.layers.experts import ExpertsLayer
from quire.models.config import DecoderConfig
from quire.models.weights import EXPERT, Weights
from quire.ops import KVCache, KVShape, RaggedBatch
from quire.ops.kv_cache import KVCacheDtype

NO_MTP = (
    "this model has no layer that predicts one token more, which mtp=True and speculation with method mtp need; "
    "choose another method"
)


class Taps:
    """What enters some layers in one step: the residual stream, as EAGLE-3 reads it.

    Args:
        layers: numbers of the layers, each below `Model.num_layers`.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self._taken: dict[int, torch.Tensor] = {}

    def take(self, layer: int, x: torch.Tensor | None, residual: torch.Tensor) -> None:
        """Told before each layer what it gets (see `DecoderLayer`), which the layer may overwrite: a copy is kept."""
        if layer in self.layers:
            self._taken[layer] = residual.clone() if x is None else x + residual

    def features(self) -> torch.Tensor:
        """Side by side in the order of `layers`: [tokens, len(layers) * hidden]."""
        return torch.cat([self._taken[layer] for layer in self.layers], dim=1)


class Model(ABC):
    """A loaded causal language model.

    Attributes:
        config: what config.json says.
        dtype: of activations and KV, and of weights that are not quantized.
        quantization: how the linear layers are quantized; None: they are not.
        kernels: the implementation that computes it.
        embedding: its table of tokens.
        vocab_size: ids run from 0 to vocab_size - 1.
        num_layers, num_kv_heads, head_dim: the shape of a token's KV.
        kv_sides: 2: keys and values are stored; 1: rows that are both, of latent attention.
        kv_saving: how many times more numbers the keys and values of all heads would have than what is stored of a
            token; None: they are what is stored.
        attention_width: numbers of a key and its value that each query head is multiplied with.
        max_position_embeddings: the longest context, in tokens.
        eos_token_ids: ids that end a text.
        windows: per layer, how many tokens back it sees, itself included; None where all.
        num_parameters: numbers in the checkpoint; a tied head is counted once.
        weight_bytes: what memory holds of them, and a step of many tokens reads. An embedding table is not among
            them: it stays a mapped file, of which a step reads a row a token. A tied one is there as the head.
        expert_parameters, expert_bytes: those of them in experts that tokens are sent to, of which a step reads what
            some token chose; 0 where there are none.
        active_parameters: numbers that one token is computed with, and the embedding table.
        expert_layers: the layers' experts, by number of the layer; none where there are none.
        notes: what a user should know at start-up.
    """

    embedding: Embedding
    notes: tuple[str, ...] = ()
    kv_sides = 2
    kv_saving: float | None = None

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = dtype = weights.dtype
        self.quantization = weights.quantization
        self.kernels = weights.kernels
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_kv_heads = config.layer.num_kv_heads
        self.head_dim = config.layer.head_dim
        self.attention_width = 2 * self.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.windows = config.windows
        sizes = {name: math.prod(shape) for name, shape in config.tensor_shapes().items()}
        self.num_parameters = sum(sizes.values())
        table = 0 if config.tie_word_embeddings else config.vocab_size * config.layer.hidden_size
        self.weight_bytes = (self.num_parameters - table) * dtype.itemsize
        self.expert_parameters = sum(size for name, size in sizes.items() if EXPERT.fullmatch(name))
        self.expert_bytes = self.expert_parameters * dtype.itemsize
        self.active_parameters = self.num_parameters
        if config.routing is not None:
            idle = config.routing.num_experts - config.routing.top_k
            self.active_parameters -= self.expert_parameters * idle // config.routing.num_experts
        self.expert_layers: dict[int, ExpertsLayer] = {}

    @property
    def expert_loads(self) -> dict[int, torch.Tensor]:
        """By number, of each layer with experts: [experts] int64, tokens that each has got."""
        return {index: layer.load for index, layer in self.expert_layers.items()}

    @property
    def precision(self) -> str:
        """How its numbers are held, in words: whatever changes them changes this."""
        name = str(self.dtype).removeprefix("torch.")
        return name if self.quantization is None else f"{name}, weights {self.quantization}"

    @property
    def retention(self) -> int | None:
        """How many of the last positions the KV cache must keep; None: all of them."""
        windows = [window for window in self.windows if window is not None]
        return max(windows) if len(windows) == len(self.windows) else None

    @staticmethod
    def with_mtp(config: DecoderConfig) -> DecoderConfig:
        """The configuration with the layer that predicts one token more; raises ConfigError where there is none."""
        raise ConfigError(NO_MTP)

    def new_cache(
        self,
        num_blocks: int,
        block_size: int,
        kv_cache_dtype: KVCacheDtype = "auto",
        behind: KVShape | None = None,
    ) -> KVCache:
        """Blocks for its KV, and for what another model keeps behind it; raises what `KVCache` does."""
        shape = (num_blocks, self.num_layers, self.num_kv_heads, self.head_dim, block_size)
        return KVCache(*shape, self.dtype, kv_cache_dtype, self.kernels.device, self.kv_sides, behind)

    def kv_shape(self, kv_cache_dtype: KVCacheDtype = "auto") -> KVShape:
        """What it keeps of each token."""
        shape = (self.num_layers, self.num_kv_heads, self.head_dim)
        return KVShape(*shape, self.dtype, kv_cache_dtype, self.kv_sides)

    @abstractmethod
    def forward(self, batch: RaggedBatch, kv: KVCache, taps: Taps | None = None) -> torch.Tensor:
        """Runs a step: stores its keys and values, returns the hidden states after the last norm.

        Shape: [tokens, hidden], in the model's data type.

        Args:
            taps: filled with what enters some of the layers; None: nobody wants it.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden] of `forward`. Returns [rows, vocabulary] fp32."""
