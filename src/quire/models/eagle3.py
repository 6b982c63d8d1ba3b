"""EAGLE-3 heads, as in the authors' `cnets.py` (https://arxiv.org/abs/2503.01840).

The inputs of a low, a middle and a high layer of the target are fused into one hidden state. One decoder layer, whose
attention reads the concatenation of the token's embedding and the hidden state, computes the next one. The head has its
own vocabulary, the target's most frequent tokens: `d2t` has the offset of each id, `t2d` the ids it contains.

Heads of the speculators library, as vLLM runs them, have their layer's fields in `transformer_layer_config`. What
enters the layer may be normalized before it becomes the residual (`norm_before_residual`), and so may what is fused
(`norm_before_fc`).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch

from quire.errors import ConfigError, TensorShapeError
from quire.layers.attention import Attention
from quire.layers.decoder import LayerConfig
from quire.layers.mlp import MLP
from quire.layers.weights import LayerWeights
from quire.models.checkpoint import Checkpoint
from quire.models.eagle import TABLE, Head, HeadConfig, read_layer
from quire.models.fields import Fields
from quire.models.model import Model
from quire.models.weights import Weights
from quire.ops import KVCache, RaggedBatch

MOVES, CHOSEN = "d2t", "t2d"
AUX_LAYERS_FIELD = "eagle_aux_hidden_state_layer_ids"
REFUSED = {
    "fc_norm": "a norm of each of the target's layers",
    "norm_output": "a norm of what the next draft continues",
}


@dataclass(frozen=True, slots=True)
class Eagle3Config(HeadConfig):
    """An EAGLE-3 head.

    Attributes:
        aux_layers: layers of the target whose inputs it reads.
        draft_vocab_size: number of tokens it can draft.
        norm_before_residual: the layer's residual is the normalized hidden state.
        norm_before_fc: the concatenated inputs of the target's layers are normalized before they are fused.
    """

    aux_layers: tuple[int, ...]
    draft_vocab_size: int
    norm_before_residual: bool
    norm_before_fc: bool


class Eagle3Layer:
    """The head's decoder layer.

    Args:
        config: sizes; the input of q, k and v has twice the hidden size.
        weights: gives the layer's parts by name.
        norm_before_residual: see `Eagle3Config`.
    """

    def __init__(self, config: LayerConfig, weights: LayerWeights, norm_before_residual: bool) -> None:
        eps, self._norm_before_residual = config.rms_norm_eps, norm_before_residual
        self.input_norm, self.hidden_norm = weights.norm("input_layernorm", eps), weights.norm("hidden_norm", eps)
        shape, bias = (config.num_heads, config.num_kv_heads, config.head_dim), config.qkv_bias
        self.attention = Attention(*shape, weights, 0, None, qkv_bias=bias, output_bias=config.output_bias)
        self.post_attention_norm = weights.norm("post_attention_layernorm", eps)
        self.mlp = MLP(weights, "mlp.", config.mlp_bias)

    def __call__(
        self,
        embedded: torch.Tensor,
        hidden: torch.Tensor,
        tables: tuple[torch.Tensor, torch.Tensor],
        kv: KVCache,
        batch: RaggedBatch,
    ) -> torch.Tensor:
        """All [tokens, hidden]; tables: cos and sin of the step's positions."""
        normalized = self.hidden_norm(hidden)
        x = self.attention(torch.cat([self.input_norm(embedded), normalized], dim=1), tables, kv, batch)
        # The sum may be written into the residual, and `hidden` belongs to the caller.
        residual = normalized if self._norm_before_residual else hidden.clone()
        x, residual = self.post_attention_norm.with_residual(x, residual)
        return self.mlp(x) + residual


class Eagle3(Head):
    """One decoder layer that continues fused hidden states of three layers of the target, with its own vocabulary.

    Args:
        config: of the head.
        weights: of its checkpoint.
        target: its embedding is shared, unless the head has its own.
        ids: [draft vocabulary] int64, the target's id of each of its tokens; None if the vocabularies are equal.
    """

    def __init__(self, config: Eagle3Config, weights: Weights, target: Model, ids: torch.Tensor | None) -> None:
        super().__init__(config, weights, target)
        self.aux_layers = config.aux_layers
        self.ids = None if ids is None else ids.to(weights.kernels.device)
        self.head = weights.linear("lm_head")
        eps = config.layer.rms_norm_eps
        self.input_norm = weights.norm("input_norm", eps) if config.norm_before_fc else None
        self.fc = weights.linear("fc", bias="fc.bias" in config.shapes)
        self.layer = Eagle3Layer(config.layer, weights.under("layers.0."), config.norm_before_residual)
        self.norm = weights.norm("norm", eps)

    @staticmethod
    def read_config(fields: Fields, names: Collection[str], target_layers: int) -> Eagle3Config:
        """Read config.json, and optional parts from the names of the tensors.

        Raises ModelConfigError, and ConfigError if the target lacks layers that the head reads.
        """
        nested = fields.section("transformer_layer_config")
        fields = fields.with_defaults(nested.picked(nested.names()))
        for name, why in REFUSED.items():
            fields.refuse(name, (False,), why)
        layer, rope, vocab_size = read_layer(fields, names)
        aux_layers = read_aux_layers(fields, target_layers)
        hidden = layer.hidden_size
        width = fields.integer("target_hidden_size", default=hidden)
        draft_vocab_size = fields.integer("draft_vocab_size", default=vocab_size, max=vocab_size)
        shapes = {
            "fc.weight": (hidden, len(aux_layers) * width),
            "norm.weight": (hidden,),
            "lm_head.weight": (draft_vocab_size, hidden),
        }
        before_residual = fields.flag("norm_before_residual", default=False)
        before_fc = fields.flag("norm_before_fc", default=False)
        if before_fc:
            shapes["input_norm.weight"] = (len(aux_layers) * width,)
        if "fc.bias" in names:
            shapes["fc.bias"] = (hidden,)
        if TABLE in names:
            shapes[TABLE] = (vocab_size, hidden)
        shapes |= {f"layers.0.{name}": shape for name, shape in _layer_shapes(layer).items()}
        own = aux_layers, draft_vocab_size, before_residual, before_fc
        return Eagle3Config(layer, rope, vocab_size, width, shapes, *own)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """features: [tokens, layers * the target's hidden size] of `AuxHiddenStates`. Returns [tokens, hidden]."""
        return self.fc(features if self.input_norm is None else self.input_norm(features))

    def forward(self, hidden: torch.Tensor, batch: RaggedBatch, kv: KVCache) -> torch.Tensor:
        """One step.

        Args:
            hidden: [tokens, hidden], the fused features of these positions, or this method's result for the position
                before.
            batch: its `token_ids` are those of the position after each.
            kv: a cache of one layer.

        Returns [tokens, hidden], a prediction of the features of the position after each.
        """
        tables = self.rotary.tables(batch.positions)
        return self.layer(self.embedding(batch.token_ids), hidden, tables, kv, batch)

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """out: [rows, hidden] of `forward`. Returns [rows, the target's vocabulary] fp32, of two positions after each.

        -inf for tokens that the head cannot draft.
        """
        scores = self.head(self.norm(out), torch.float32)
        if self.ids is None:
            return scores
        wide = scores.new_full((len(scores), self.config.vocab_size), float("-inf"))
        return wide.index_copy_(1, self.ids, scores)


def read_aux_layers(fields: Fields, num_layers: int) -> tuple[int, ...]:
    """The layers that a head reads: those in config.json, else EAGLE-3's default for this number of layers.

    Raises:
        ModelConfigError: the field is not a list of the target's layers.
        ConfigError: the field is absent, and the target has too few layers for a low, a middle and a high one.
    """
    for section in (fields, fields.section("eagle_config")):
        if AUX_LAYERS_FIELD in section:
            return tuple(section.integers(AUX_LAYERS_FIELD, below=num_layers))
    low, middle, high = 2, num_layers // 2, num_layers - 3
    if not low < middle < high:
        raise ConfigError(
            f"an EAGLE-3 head reads layers 2, n/2 and n - 3 of its target, which has only {num_layers} layers, and 7 "
            f"are needed; for a head that reads others, list them in its config.json as {AUX_LAYERS_FIELD!r}"
        )
    return low, middle, high


def read_ids(checkpoint: Checkpoint, config: Eagle3Config) -> torch.Tensor | None:
    """The target's id of each draft token, [draft vocabulary] int64; None if they are equal.

    Raises TensorShapeError: the two tables are missing or inconsistent.
    """
    if MOVES not in checkpoint.entries and config.draft_vocab_size == config.vocab_size:
        return None
    where = f"{checkpoint.folder}: {MOVES!r}"
    if MOVES not in checkpoint.entries or checkpoint.entries[MOVES].shape != (config.draft_vocab_size,):
        found = list(checkpoint.entries[MOVES].shape) if MOVES in checkpoint.entries else "nothing"
        raise TensorShapeError(f"{where} must have the shape [{config.draft_vocab_size}], found {found}")
    moves = checkpoint.tensor(MOVES, {"I64": torch.int64, "I32": torch.int32}).long()
    ids = torch.arange(config.draft_vocab_size) + moves
    different = len(set(ids.tolist()))
    if ids.min() < 0 or ids.max() >= config.vocab_size or different != len(ids):
        raise TensorShapeError(
            f"{where} must move each of {config.draft_vocab_size} ids to another one of {config.vocab_size}; found "
            f"ids from {int(ids.min())} to {int(ids.max())}, {different} of them different"
        )
    if CHOSEN in checkpoint.entries:
        chosen = checkpoint.tensor(CHOSEN, {"BOOL": torch.bool})
        if chosen.shape != (config.vocab_size,) or not torch.equal(chosen.nonzero()[:, 0], ids.sort().values):
            raise TensorShapeError(f"{where} and {CHOSEN!r} do not name the same tokens; download the head again")
    return ids


def _layer_shapes(layer: LayerConfig) -> dict[str, tuple[int, ...]]:
    """The layer's tensors by name, with their shapes."""
    shapes = layer.tensor_shapes()
    for name in ("q_proj", "k_proj", "v_proj"):
        rows, columns = shapes[f"self_attn.{name}.weight"]
        shapes[f"self_attn.{name}.weight"] = (rows, 2 * columns)
    return shapes | {"hidden_norm.weight": (layer.hidden_size,)}
