"""Parses the `config.json` of a decoder of Llama's family.

Every field that changes the computation is either read here or refused by name. Fields are those of `transformers`;
both the older and the newer names of a field are read.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from quire.errors import ConfigError, ModelConfigError
from quire.layers.attention import QKNorm
from quire.layers.decoder import PRE_NORMS, LayerConfig, NormNames
from quire.layers.experts import ExpertsConfig
from quire.layers.recurrent import RecurrentConfig
from quire.layers.rotary import RopeConfig, RopeKind
from quire.models.fields import Fields
from quire.models.identify import quantizer
from quire.models.layer_groups import KVHeads, LayerGroup, layer_groups
from quire.models.layout import Layout
from quire.ops.elementwise import Activation
from quire.ops.experts import Routing

UNSUPPORTED = {
    "quantization_config": ((), "give the checkpoint that it was made from, and quantization int8 or int4"),
    "compression_config": ((), "quantized weights; use the checkpoint that it was made from"),
    "attn_logit_softcapping": ((), "soft-capped attention scores"),
    "final_logit_softcapping": ((), "soft-capped logits"),
    "logit_scale": ((1, 1.0), "scaled logits"),
    "logits_scaling": ((1, 1.0), "scaled logits"),
    "embedding_multiplier": ((1, 1.0), "scaled embeddings"),
    "residual_multiplier": ((1, 1.0), "scaled residuals"),
    "attention_multiplier": ((), "an attention scale of its own"),
    "attention_chunk_size": ((), "attention in chunks"),
    "clip_qkv": ((), "clipped queries, keys and values"),
    "no_rope_layers": ((), "layers without rotary embedding"),
    "is_encoder_decoder": ((False,), "an encoder"),
    "add_cross_attention": ((False,), "attention to an encoder"),
    "is_causal": ((True,), "tokens that see those that follow them"),
    "per_layer_config": ((), "layers of unlike sizes"),
}
"""Fields that change the computation, with the values that do not, and what the others mean."""

EXPERT_COUNTS = ("num_experts", "num_local_experts")
"""The two names of the number of experts; the first one that is present counts."""

PER_LAYER_TABLE = "model.embed_tokens_per_layer.weight"

MAX_LAYERS = 1024
MAX_HEADS = 1 << 16
MAX_EXPERTS = 1 << 12
MAX_CONTEXT = 1 << 30
DEFAULT_THETA, MAX_THETA = 10000.0, 1e12
MIN_EPS, MAX_EPS = 1e-15, 0.1
"""Bounds of `rms_norm_eps`, which is added to the mean of squares, about 1."""

ROPE_FIELDS: dict[RopeKind, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "attention_factor",
        "truncate",
    },
    "longrope": {
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "short_factor",
        "long_factor",
    },
    "proportional": {"factor"},
}
"""The kinds of rotary scaling that do not change cached keys, and the fields of each."""
ROPE_FIELDS_OF_ALL = {"type", "rope_type", "rope_theta", "partial_rotary_factor", "finetuned"}


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder of Llama's family.

    Attributes:
        layer: sizes and options of all layers, or of most; `dense_layers` have no experts.
        windows: per layer, the number of positions that a token sees, including itself; None for all.
        layers: the same for each layer; None if all are like `layer`.
        rope: rotary embedding of most layers.
        ropes: the same for each layer; None if all are like `rope`.
        max_position_embeddings: the longest context, in tokens, including rotary scaling.
        tie_word_embeddings: the output head is the embedding table.
        eos_token_ids: ids that end a text, without duplicates.
        dense_layers: layers with an MLP, in a model whose other layers have experts.
        num_mtp_layers: number of multi-token prediction layers in the checkpoint.
        mtp: whether the (single) multi-token prediction layer is part of the model.
        one_kv_group: its KV is in one group's blocks, whatever its layers see; for draft models.
        embedding_scale: embeddings are multiplied by this.
        embedding_scale_rounded: whether the scale is rounded to the computation's data type.
        norm_offset: added to norms' weights in fp32 (the sum has more digits than a narrower type), and the input is
            not rounded before it is multiplied. None: weights and rounding in the computation's data type.
        logits_divisor: logits are divided by this.
        logits_cap: soft cap of the logits (`final_logit_softcapping`); None if there is none.
        per_layer_vocab_size: rows of the table of per-layer inputs, if there is one.
        layout: the checkpoint's layout if it differs from the model's.
        passed_over: prefixes of further tensors that a checkpoint may have and that are not used.
    """

    layer: LayerConfig
    vocab_size: int
    windows: tuple[int | None, ...]
    rope: RopeConfig
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    dense_layers: frozenset[int] = frozenset()
    num_mtp_layers: int = 0
    mtp: bool = False
    one_kv_group: bool = False
    layers: tuple[LayerConfig, ...] | None = None
    ropes: tuple[RopeConfig, ...] | None = None
    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = False
    norm_offset: float | None = None
    logits_divisor: float = 1.0
    logits_cap: float | None = None
    per_layer_vocab_size: int = 0
    layout: Layout | None = None
    passed_over: tuple[str, ...] = ()

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def groups(self) -> tuple[LayerGroup, ...]:
        """Layers that keep the same positions in the same shape, or states; layers without KV are in no group."""
        windows = [None] * self.num_layers if self.one_kv_group else self.windows
        if self.layers is None:
            return layer_groups(windows)
        heads = [KVHeads(layer.num_kv_heads, layer.head_dim) for layer in self.layers]
        without = {i for i, layer in enumerate(self.layers) if layer.kv_source is not None or not layer.attends}
        return layer_groups(windows, heads, without, self.recurrent_layers)

    @property
    def recurrent(self) -> RecurrentConfig | None:
        """The recurrent part of some layers; None if there is none."""
        return next((layer.recurrent for layer in self.layers or () if layer.recurrent), None)

    @property
    def recurrent_layers(self) -> frozenset[int]:
        """Numbers of the recurrent layers."""
        return frozenset(index for index, layer in enumerate(self.layers or ()) if layer.recurrent)

    @property
    def per_layer_width(self) -> int:
        """Width of the table of per-layer inputs, for all layers; 0 if there is none."""
        return self.num_layers * self.layer.per_layer_input

    @property
    def routing(self) -> Routing | None:
        """How tokens' experts are chosen; None without experts."""
        return self.layer.experts.routing if self.layer.experts else None

    def layer_at(self, index: int) -> LayerConfig:
        """Sizes and options of one layer."""
        layer = self.layer if self.layers is None else self.layers[index]
        return replace(layer, experts=None) if index in self.dense_layers else layer

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor of a checkpoint, by name."""
        table = (self.vocab_size, self.layer.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
        for index in range(self.num_layers):
            for name, shape in self.layer_at(index).tensor_shapes().items():
                shapes[f"model.layers.{index}.{name}"] = shape
        shapes["model.norm.weight"] = (self.layer.hidden_size,)
        if self.per_layer_width:
            shapes[PER_LAYER_TABLE] = (self.per_layer_vocab_size, self.per_layer_width)
            shapes["model.per_layer_model_projection.weight"] = (self.per_layer_width, self.layer.hidden_size)
            shapes["model.per_layer_projection_norm.weight"] = (self.layer.per_layer_input,)
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = table
        return shapes | self._mtp_shapes() if self.mtp else shapes

    def mtp_prefix(self, index: int = 0) -> str:
        """Prefix of the tensors of a multi-token prediction layer."""
        return f"model.layers.{self.num_layers + index}."

    def skipped(self) -> tuple[str, ...]:
        """Prefixes of tensors that a checkpoint may have and the model does not use."""
        return (*(self.mtp_prefix(index) for index in range(self.num_mtp_layers)), *self.passed_over)

    def within(self, max_model_len: int | None) -> DecoderConfig:
        """The same for contexts of at most this many tokens (rotary factors may differ); None: any length."""
        if max_model_len is None:
            return self
        longest = min(max_model_len, self.max_position_embeddings)
        ropes = None if self.ropes is None else tuple(rope.within(longest) for rope in self.ropes)
        return replace(self, rope=self.rope.within(longest), ropes=ropes)

    def with_mtp(self) -> DecoderConfig:
        """The same with the multi-token prediction layer; raises ConfigError unless there is exactly one."""
        if self.num_mtp_layers != 1:
            raise ConfigError(
                "mtp=True, and speculation with method mtp, need a model with one layer that predicts one token more "
                f"(num_nextn_predict_layers is 1); this one has {self.num_mtp_layers}; choose another method"
            )
        return replace(self, mtp=True)

    def _mtp_shapes(self) -> dict[str, tuple[int, ...]]:
        hidden, prefix = self.layer.hidden_size, self.mtp_prefix()
        shapes: dict[str, tuple[int, ...]] = {
            f"{prefix}{name}.weight": (hidden,) for name in ("enorm", "hnorm", "shared_head.norm")
        }
        shapes[f"{prefix}eh_proj.weight"] = (hidden, 2 * hidden)
        return shapes | {prefix + name: shape for name, shape in self.layer.tensor_shapes().items()}


def read_decoder_config(
    fields: Fields,
    generation: Fields,
    *,
    windows: tuple[int | None, ...],
    default_head_dim: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: QKNorm | None = None,
    norms: NormNames = PRE_NORMS,
    activation: Activation | None = None,
    experts: ExpertsConfig | None = None,
    dense_layers: frozenset[int] = frozenset(),
    default_theta: float = DEFAULT_THETA,
    default_eps: float = 1e-6,
    default_tied: bool = False,
    rope: tuple[RopeConfig, int] | None = None,
    read: Collection[str] = (),
    may_see_ahead: bool = False,
) -> DecoderConfig:
    """Read the fields that all architectures of the family have in common; keywords give what is special.

    Args:
        fields: of config.json.
        generation: of generation_config.json.
        activation: of the MLP's gate; None: `hidden_act`, which must be "silu".
        default_head_dim: head_dim if the field is absent; None: hidden_size / num_attention_heads.
        experts: of layers not in `dense_layers`; None if no layer has experts.
        default_theta, default_eps, default_tied: rope_theta, rms_norm_eps and tie_word_embeddings if the field is
            absent.
        rope: the rotary embedding and context, if they are not read by `read_rope`.
        read: fields in `UNSUPPORTED` that this architecture supports, and has read.
        may_see_ahead: tokens may see those that follow them, as in models for embeddings (`is_causal` is false).

    Raises:
        ModelConfigError: a field is missing, has the wrong type, or has a value that is not supported.
    """
    sees_ahead = may_see_ahead and windows == (None,) * len(windows) and not fields.flag("is_causal", default=True)
    refuse_unsupported(fields, (*read, "is_causal") if sees_ahead else read)
    if experts is None:
        for name in EXPERT_COUNTS:
            fields.refuse(name, (0,), "experts in an architecture without them")
    if activation is None:
        fields.choice("hidden_act", {"silu"}, default="silu")
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads, head_dim = _read_heads(fields, hidden_size, default_head_dim)
    vocab_size = fields.integer("vocab_size")
    rotary, context = rope or read_rope(fields, head_dim, default_theta)
    eos = generation.token_ids("eos_token_id", vocab_size) + fields.token_ids("eos_token_id", vocab_size)
    return DecoderConfig(
        layer=LayerConfig(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rms_norm_eps=fields.number("rms_norm_eps", default=default_eps, above=MIN_EPS, max=MAX_EPS),
            qkv_bias=qkv_bias,
            output_bias=output_bias,
            mlp_bias=mlp_bias,
            qk_norm=qk_norm,
            norms=norms,
            activation=activation or "silu",
            causal=not sees_ahead,
            experts=experts,
        ),
        vocab_size=vocab_size,
        windows=windows,
        rope=rotary,
        max_position_embeddings=context,
        tie_word_embeddings=fields.flag("tie_word_embeddings", default=default_tied),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        dense_layers=dense_layers,
    )


def refuse_unsupported(fields: Fields, read: Collection[str] = ()) -> None:
    """Raise ModelConfigError if a field that is not in `read` has a value that is not supported."""
    for name, (neutral, why) in UNSUPPORTED.items():
        if name not in read:
            made = f"{quantizer(fields.section(name))}; " if name == "quantization_config" and name in fields else ""
            fields.refuse(name, neutral, made + why)


def _read_heads(fields: Fields, hidden_size: int, default_head_dim: int | None) -> tuple[int, int, int]:
    """Query heads, KV heads, and a head's width; see `read_decoder_config`."""
    num_heads = fields.integer("num_attention_heads", max=MAX_HEADS)
    num_kv_heads = fields.integer("num_key_value_heads", default=num_heads, max=MAX_HEADS)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if default_head_dim is None:
        if "head_dim" not in fields and hidden_size % num_heads:
            raise fields.error("num_attention_heads", f"a divisor of hidden_size ({hidden_size})")
        default_head_dim = hidden_size // num_heads
    head_dim = fields.integer("head_dim", default=default_head_dim, max=MAX_HEADS)
    if head_dim % 2:
        raise fields.error("head_dim", "even, since rotary embedding turns pairs")
    return num_heads, num_kv_heads, head_dim


def read_head_dim(fields: Fields, default: int | None = None) -> int:
    """Width of a head, if it is needed before `read_decoder_config`; raises ModelConfigError."""
    heads = fields.integer("num_attention_heads", max=MAX_HEADS)
    if default is None:
        default = fields.integer("hidden_size") // heads
    return fields.integer("head_dim", default=default, max=MAX_HEADS)


def rope_section(fields: Fields) -> Fields:
    """The parameters of rotary scaling: `rope_scaling`, or in newer checkpoints `rope_parameters`. As in transformers,
    the former is used if both are present."""
    older = fields.section("rope_scaling")
    return older if older.names() else fields.section("rope_parameters")


def with_older_scaling(section: Fields, fields: Fields) -> Fields:
    """The section for layers without windows, in a family that has one for each kind of layer. If there is
    `rope_scaling` besides, it is for these layers, and takes precedence field by field, as in transformers."""
    older = fields.section("rope_scaling")
    return section.updated(older.picked(older.names()))


def read_rope(
    fields: Fields,
    head_dim: int,
    default_theta: float = DEFAULT_THETA,
    *,
    partial: float | None = None,
    read: Collection[str] = (),
    scaling: Fields | None = None,
) -> tuple[RopeConfig, int]:
    """The rotary embedding, and the longest context with it.

    Older checkpoints have `rope_theta` and, for scaling, the section `rope_scaling` (whose kind is `type` or
    `rope_type`); newer ones have all of it in `rope_parameters`.

    By Hugging Face's convention, `max_position_embeddings` is the length *before* linear and yarn scaling, so these
    lengthen the context; for llama3 and longrope it is the length after scaling.

    Args:
        partial: default of `partial_rotary_factor`, in an architecture that rotates a part of each head; None if it
            rotates all of it.
        read: further fields of the section, which the architecture reads itself.
        scaling: the section; None for that of `rope_section`.
    """
    scaling = rope_section(fields) if scaling is None else scaling
    kind = _rope_kind(scaling, read)
    turning = _rotated_dims(fields, scaling, head_dim, partial)
    outer = fields.number("rope_theta", default=default_theta, above=1.0, max=MAX_THETA)
    theta = scaling.number("rope_theta", default=outer, above=1.0, max=MAX_THETA)
    context = fields.integer("max_position_embeddings", max=MAX_CONTEXT)
    # The field outside of the section takes precedence, as in transformers.
    original = fields.integer(
        "original_max_position_embeddings",
        default=scaling.integer("original_max_position_embeddings", default=context, max=MAX_CONTEXT),
        max=MAX_CONTEXT,
    )
    factor, context = _scaled(scaling, kind, context, original)
    low, high = _frequency_factors(scaling) if kind == "llama3" else (1.0, 4.0)
    rope = RopeConfig(
        head_dim=turning,
        still=head_dim - turning,
        theta=theta,
        kind=kind,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position_embeddings=original,
        beta_fast=scaling.number("beta_fast", default=32.0),
        beta_slow=scaling.number("beta_slow", default=1.0),
        mscale=scaling.optional_number("mscale", zero=True),
        mscale_all_dim=scaling.optional_number("mscale_all_dim", zero=True),
        attention_factor=scaling.optional_number("attention_factor"),
        truncate=scaling.flag("truncate", default=True),
        max_position=context,
        short_factors=_factors(scaling, "short_factor", turning // 2) if kind == "longrope" else (),
        long_factors=_factors(scaling, "long_factor", turning // 2) if kind == "longrope" else (),
    )
    return rope, context


def _rotated_dims(fields: Fields, scaling: Fields, head_dim: int, partial: float | None) -> int:
    """How many dimensions of each head are rotated; see `read_rope`."""
    if partial is None:
        for section in (fields, scaling):
            section.refuse("partial_rotary_factor", (1, 1.0), "rotary embedding of a part of each head")
        return head_dim
    partial = fields.number("partial_rotary_factor", default=partial, max=1.0)
    dims = int(head_dim * scaling.number("partial_rotary_factor", default=partial, max=1.0))
    if dims % 2 or dims < 2:
        raise fields.error("partial_rotary_factor", f"such that an even part of head_dim ({head_dim}) turns")
    return dims


def _scaled(scaling: Fields, kind: RopeKind, context: int, original: int) -> tuple[float, int]:
    """The scaling factor, and the longest context with it."""
    factor, lengthened = 1.0, float(context)
    if kind == "yarn":
        factor = scaling.number("factor", default=max(1.0, context / original))
        lengthened = max(context, original * factor)
    elif kind == "longrope":
        factor = scaling.number("factor", default=max(1.0, context / original))
    elif kind == "proportional":
        factor = scaling.number("factor", default=1.0)
    elif kind != "default":
        factor = scaling.number("factor")
        lengthened = context * factor if kind == "linear" else context
    if factor < 1.0:
        raise scaling.error("factor", "a number of at least 1")
    if lengthened > MAX_CONTEXT:
        raise scaling.error("factor", f"small enough for a context of at most {MAX_CONTEXT} tokens")
    return factor, int(lengthened)


def _factors(scaling: Fields, name: str, count: int) -> tuple[float, ...]:
    found = scaling.numbers(name)
    if len(found) != count:
        raise scaling.error(name, f"{count} numbers greater than 0, one for each pair of dimensions that turns")
    return found


def _frequency_factors(scaling: Fields) -> tuple[float, float]:
    """`low_freq_factor` and `high_freq_factor`, of llama3."""
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if high <= low:
        raise scaling.error("high_freq_factor", f"greater than low_freq_factor ({low:g})")
    return low, high


def _rope_kind(scaling: Fields, read: Collection[str]) -> RopeKind:
    """The kind of rotary scaling; its section must have no fields but those of the kind and those in `read`."""
    name = "rope_type" if "rope_type" in scaling else "type"
    try:
        found = scaling.choice(name, [*ROPE_FIELDS, "su"], default="default")
        found = "longrope" if found == "su" else found  # the older name
        kind = next(kind for kind in ROPE_FIELDS if kind == found)
    except ModelConfigError as error:
        raise ModelConfigError(
            f"{error}. Kinds such as 'dynamic' change their frequencies with the length of the text, so keys already "
            "in the cache would no longer fit; remove the scaling, or use yarn."
        ) from error
    if unknown := scaling.names() - ROPE_FIELDS[kind] - ROPE_FIELDS_OF_ALL - {*read}:
        reads = ", ".join(sorted(ROPE_FIELDS[kind])) or "nothing"
        raise scaling.error(min(unknown), f"absent: rope type {kind!r} reads {reads}")
    return kind


def read_num_layers(fields: Fields) -> int:
    """The number of layers; it is checked before anything is made for each of them. Raises ModelConfigError."""
    return fields.integer("num_hidden_layers", max=MAX_LAYERS)


def read_dense_layers(fields: Fields, num_layers: int, default_first: int) -> frozenset[int]:
    """Layers with an MLP, if others have experts: those that are "dense" in `mlp_layer_types`, or else the first
    `first_k_dense_replace` (default: `default_first`). Raises ModelConfigError.
    """
    types = fields.strings("mlp_layer_types")
    if types is None:
        first = fields.integer("first_k_dense_replace", default=default_first, min=0, max=MAX_LAYERS)
        return frozenset(range(min(first, num_layers)))
    if len(types) != num_layers or not set(types) <= {"dense", "sparse"}:
        raise fields.error("mlp_layer_types", f"{num_layers} of 'dense' or 'sparse'")
    return frozenset(index for index, kind in enumerate(types) if kind == "dense")


def read_same_window(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Windows if all layers have the same one, `sliding_window`. Raises ModelConfigError."""
    window = fields.integer("sliding_window", max=MAX_CONTEXT) if "sliding_window" in fields else None
    kind = "full_attention" if window is None else "sliding_attention"
    fields.refuse("layer_types", ([kind] * num_layers,), "all layers see the same window")
    return (window,) * num_layers


def read_layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    """The field `layer_types`, which says which layers have a window; None if it is absent. Raises ModelConfigError."""
    types = fields.strings("layer_types")
    if types is not None and (len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"}):
        raise fields.error("layer_types", f"{num_layers} of 'full_attention' or 'sliding_attention'")
    return types


def read_windows(fields: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Qwen's sliding windows: of layers from `max_window_layers` on, or as in `layer_types`.

    Raises:
        ModelConfigError: an unknown layer type, or a sliding layer without a window.
    """
    window = None
    if fields.flag("use_sliding_window", default=False) and "sliding_window" in fields:
        window = fields.integer("sliding_window", max=MAX_CONTEXT)
    types = read_layer_types(fields, num_layers)
    if types is None:
        first = fields.integer("max_window_layers", default=28, min=0)
        return tuple(window if index >= first else None for index in range(num_layers))
    if "sliding_attention" in types and window is None:
        raise fields.error(
            "sliding_window", "a number, with use_sliding_window true, since layer_types has such layers"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_routing(
    fields: Fields,
    count_field: str,
    *,
    scoring: Literal["softmax", "sigmoid"] = "softmax",
    group_score: Literal["max", "top2"] | None = None,
    normalize: bool = True,
    scale: float = 1.0,
) -> Routing:
    """How a router chooses experts.

    Args:
        count_field: name of the field with the number of experts.
        group_score: how groups (`n_group`, `topk_group`) are scored; None if experts are not grouped.
        scoring, normalize, scale: see `Routing`.

    Raises:
        ModelConfigError: a count is missing, groups do not divide the experts, or `num_experts_per_tok` exceeds the
            number of experts to choose from.
    """
    experts = fields.integer(count_field, max=MAX_EXPERTS)
    groups = top_groups = 1
    if group_score is not None:
        groups = fields.integer("n_group", default=1, max=experts)
        top_groups = fields.integer("topk_group", default=1, max=groups)
        if experts % groups:
            raise fields.error("n_group", f"a divisor of {count_field} ({experts})")
        if group_score == "top2" and experts < 2 * groups:
            raise fields.error("n_group", f"at most {experts // 2}, since a group is scored by its two best experts")
    remaining = top_groups * (experts // groups)
    top_k = fields.integer("num_experts_per_tok")
    if top_k > remaining:
        within = f"{count_field} ({experts})" if groups == 1 else f"the {remaining} experts of {top_groups} groups"
        raise fields.error("num_experts_per_tok", f"at most {within}")
    return Routing(experts, top_k, scoring, groups, top_groups, group_score or "max", normalize, scale)
