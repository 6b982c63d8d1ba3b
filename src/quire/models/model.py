"""What the engine and the runner may ask of a model, whatever its architecture."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch

from quire.models.config import DecoderConfig
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch


class Model(ABC):
    """A loaded causal language model.

    Attributes:
        config: what config.json says.
        dtype: of activations and KV, and of weights that are not quantized.
        quantization: how the linear layers are quantized; None: they are not.
        kernels: the implementation that computes it.
        vocab_size: ids run from 0 to vocab_size - 1.
        num_layers, num_kv_heads, head_dim: the shape of a token's KV.
        max_position_embeddings: the longest context, in tokens.
        eos_token_ids: ids that end a text.
        windows: per layer, how many tokens back it sees, itself included; None where all.
        num_parameters: numbers in the checkpoint; a tied head is counted once.
        weight_bytes: what a step reads and memory holds of them. An embedding table is not among them: it
            stays a mapped file, of which a step reads a row a token. A tied one is there as the head.
        notes: what a user should know at start-up.
    """

    notes: tuple[str, ...] = ()

    def __init__(self, config: DecoderConfig, weights: Weights) -> None:
        self.config = config
        self.dtype = dtype = weights.dtype
        self.quantization = weights.quantization
        self.kernels = weights.kernels
        self.vocab_size = config.vocab_size
        self.num_layers = config.num_layers
        self.num_kv_heads = config.layer.num_kv_heads
        self.head_dim = config.layer.head_dim
        self.max_position_embeddings = config.max_position_embeddings
        self.eos_token_ids = config.eos_token_ids
        self.windows = config.windows
        self.num_parameters = sum(math.prod(shape) for shape in config.tensor_shapes().values())
        table = 0 if config.tie_word_embeddings else config.vocab_size * config.layer.hidden_size
        self.weight_bytes = (self.num_parameters - table) * dtype.itemsize

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

    @abstractmethod
    def forward(self, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """Runs a step: stores its keys and values, returns the hidden states after the last norm.

        Shape: [tokens, hidden], in the model's data type.
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden: [rows, hidden] of `forward`. Returns [rows, vocabulary] fp32."""
