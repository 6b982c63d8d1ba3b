"""Rotary position embedding, and its scaling for longer contexts.

The frequencies follow transformers' `modeling_rope_utils.py`. They are fixed when the model is loaded: scaling that
depends on the length of the context ("dynamic") would change keys that are cached already. Dimensions that are not
rotated have frequency 0: their cosine is 1 and their sine 0, so rotation does not change them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch

from quire.errors import ModelConfigError

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The parameters of a rotary embedding.

    Attributes:
        head_dim: number of rotated dimensions of a head; even. 0 if none are, so that the layer has no positions.
        still: number of dimensions after them that are not rotated; even.
        theta: base of the wavelengths.
        kind: how frequencies are scaled. "proportional": they are the fastest ones of a head whose dimensions are all
            rotated.
        factor: the scaling factor, for all kinds but "default".
        low_freq_factor, high_freq_factor: llama3: wavelengths above original / low are scaled, those below
            original / high are not.
        original_max_position_embeddings: llama3, yarn, longrope: context length before scaling.
        beta_fast, beta_slow: yarn: rotations over the original context that bound the ramp.
        mscale, mscale_all_dim: yarn: determine the attention factor if it is not set.
        attention_factor: yarn, longrope: multiplies cos and sin; None: it is inferred.
        truncate: yarn: round the ramp's bounds to whole dimensions.
        max_position: longest context; longrope: if it exceeds the original one, `long_factors` are used.
        short_factors, long_factors: longrope: scaling factor of each pair's wavelength.
    """

    head_dim: int
    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    attention_factor: float | None = None
    truncate: bool = True
    max_position: int | None = None
    still: int = 0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()

    @property
    def is_long(self) -> bool:
        """Whether the factors are those of contexts longer than the original one."""
        return self.kind == "longrope" and (self.max_position or 0) > _original_length(self)

    def within(self, longest: int) -> RopeConfig:
        """The same for contexts of at most this many tokens."""
        return replace(self, max_position=longest) if self.kind == "longrope" else self


class RotaryEmbedding:
    """Rotates queries and keys by their positions (https://arxiv.org/abs/2104.09864)."""

    def __init__(self, config: RopeConfig, device: torch.device | str = "cpu") -> None:
        """Raises ModelConfigError if the kind is unknown, or parameters that it needs are missing."""
        self.config = config
        still = torch.zeros(config.still // 2)
        turning = inverse_frequencies(config) if config.head_dim else still[:0]
        self.inverse_frequencies = torch.cat([turning, still]).to(device)
        self.attention_factor: float | torch.Tensor = _attention_factor(config)
        if config.still and self.attention_factor != 1.0:
            factors = torch.cat([torch.full_like(turning, self.attention_factor), torch.ones_like(still)])
            self.attention_factor = factors.to(device)

    def tables(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(cos, sin), each [tokens, (head_dim + still) / 2] fp32, for positions [tokens]. Called once per step."""
        angles = positions.float().unsqueeze(1) * self.inverse_frequencies
        cos, sin = angles.cos(), angles.sin_()
        if isinstance(self.attention_factor, torch.Tensor) or self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def inverse_frequencies(config: RopeConfig) -> torch.Tensor:
    """Radians per position of each rotated pair of dimensions: [head_dim / 2] fp32."""
    if config.head_dim <= 0 or config.head_dim % 2:
        raise ModelConfigError(f"rotary embedding: head_dim is {config.head_dim}; need an even positive number")
    if not (math.isfinite(config.theta) and config.theta > 1):
        raise ModelConfigError(f"rotary embedding: rope_theta is {config.theta}; need a number over 1")
    if not (math.isfinite(config.factor) and config.factor > 0):
        raise ModelConfigError(f"rotary embedding: factor is {config.factor}; it must be a positive number")
    width = config.head_dim + config.still if config.kind == "proportional" else config.head_dim
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float) / width
    wavelengths = config.theta**exponents
    if config.kind == "default":
        return 1.0 / wavelengths
    if config.kind in ("linear", "proportional"):
        return 1.0 / wavelengths / config.factor
    if config.kind == "llama3":
        return _llama3(config, 1.0 / wavelengths)
    if config.kind == "yarn":
        return _yarn(config, wavelengths)
    if config.kind == "longrope":
        return _longrope(config, wavelengths)
    raise ModelConfigError(
        f"rotary embedding: rope_type is {config.kind!r}; known are default, linear, llama3, yarn, longrope and "
        "proportional"
    )


def _original_length(config: RopeConfig) -> int:
    length = config.original_max_position_embeddings
    if length is None or length <= 0:
        raise ModelConfigError(
            f"rotary embedding: original_max_position_embeddings is {length}; "
            f"rope_type {config.kind!r} needs a positive number"
        )
    return length


def _llama3(config: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are scaled, short ones kept, those between interpolated."""
    low, high = config.low_freq_factor, config.high_freq_factor
    if not high > low > 0:
        raise ModelConfigError(
            f"rotary embedding: low_freq_factor is {low} and high_freq_factor {high}; need 0 < low < high"
        )
    length = _original_length(config)
    wavelengths = 2 * math.pi / frequencies
    stretched = torch.where(wavelengths > length / low, frequencies / config.factor, frequencies)
    smooth = (length / wavelengths - low) / (high - low)
    blended = (1 - smooth) * stretched / config.factor + smooth * stretched
    between = (wavelengths >= length / high) & (wavelengths <= length / low)
    return torch.where(between, blended, stretched)


def _yarn(config: RopeConfig, wavelengths: torch.Tensor) -> torch.Tensor:
    """High frequencies are kept, low ones scaled, with a ramp between (https://arxiv.org/abs/2309.00071)."""
    dim, length = config.head_dim, _original_length(config)

    def dimension(rotations: float) -> float:
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(config.theta))

    low, high = dimension(config.beta_fast), dimension(config.beta_slow)
    if config.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001  # the ramp would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return 1.0 / (config.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept


def _longrope(config: RopeConfig, wavelengths: torch.Tensor) -> torch.Tensor:
    """Each pair of dimensions has its own scaling factor (https://arxiv.org/abs/2402.13753).

    Originally a text's length selects one of two lists of factors. Here the configured longest context does, for all
    texts, since otherwise all keys of a text would change when it exceeds the original length.
    """
    factors = config.long_factors if config.is_long else config.short_factors
    if len(factors) != len(wavelengths):
        raise ModelConfigError(f"rotary embedding: {len(factors)} factors for {len(wavelengths)} pairs of dimensions")
    return 1.0 / (torch.tensor(factors, dtype=torch.float) * wavelengths)


def _attention_factor(config: RopeConfig) -> float:
    if config.kind not in ("yarn", "longrope"):
        return 1.0
    if config.attention_factor is not None:
        return config.attention_factor
    if config.kind == "longrope":
        stretched = math.log(config.factor) / math.log(_original_length(config))
        return math.sqrt(1 + stretched) if config.factor > 1 else 1.0
    if config.mscale and config.mscale_all_dim:
        return yarn_mscale(config.factor, config.mscale) / yarn_mscale(config.factor, config.mscale_all_dim)
    return yarn_mscale(config.factor, 1.0)


def yarn_mscale(factor: float, weight: float) -> float:
    """The factor of attention scores if positions are scaled by `factor` (https://arxiv.org/abs/2309.00071).

    DeepSeek multiplies both queries and keys by it (with weight `mscale_all_dim`), and so scores by its square.
    """
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
