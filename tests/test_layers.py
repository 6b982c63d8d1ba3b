"""Layers: equal to transformers' modules, and to their own parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from quire.errors import ModelConfigError
from quire.layers.attention import Attention
from quire.layers.embedding import Embedding
from quire.layers.linear import Linear
from quire.layers.norm import RMSNorm
from quire.layers.rotary import RopeConfig, RotaryEmbedding, inverse_frequencies
from quire.ops import Kernels, KVCache, RaggedBatch, choose_kernels, rotate
from quire.parallel.group import Group, OneRank, Split

ROPES: list[tuple[RopeConfig, dict[str, Any]]] = [
    (RopeConfig(64, 10000.0), {"rope_type": "default"}),
    (RopeConfig(128, 1e6), {"rope_type": "default"}),
    (RopeConfig(64, 10000.0, "linear", factor=4.0), {"rope_type": "linear", "factor": 4.0}),
    (
        RopeConfig(128, 500000.0, "llama3", 8.0, 1.0, 4.0, original_max_position_embeddings=8192),
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
    (
        RopeConfig(128, 1e6, "yarn", 4.0, original_max_position_embeddings=32768),
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    (
        RopeConfig(
            64,
            10000.0,
            "yarn",
            40.0,
            original_max_position_embeddings=4096,
            beta_fast=24.0,
            beta_slow=2.0,
            mscale=1.0,
            mscale_all_dim=0.7,
            truncate=False,
        ),
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "truncate": False,
        },
    ),
    (
        RopeConfig(64, 10000.0, "yarn", 2.0, original_max_position_embeddings=4096, attention_factor=0.9),
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "attention_factor": 0.9},
    ),
]


@pytest.fixture(params=["torch", "auto"])
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The reference, and what this machine chooses."""
    return choose_kernels(request.param)


@pytest.mark.parametrize("config, parameters", ROPES)
def test_rotary_tables_and_rotation_equal_transformers(config: RopeConfig, parameters: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    theirs = LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=4 * config.head_dim,
            num_attention_heads=4,
            head_dim=config.head_dim,
            max_position_embeddings=131072,
            rope_parameters={**parameters, "rope_theta": config.theta},
        )
    )
    ours = RotaryEmbedding(config)
    torch.testing.assert_close(ours.inverse_frequencies, theirs.inv_freq, atol=0, rtol=1e-6)
    positions = torch.tensor([0, 1, 7, 500, 4095, 100000])
    cos, sin = ours.tables(positions)
    their_cos, their_sin = theirs(torch.zeros(1), positions[None])
    torch.testing.assert_close(torch.cat([cos, cos], -1), their_cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(torch.cat([sin, sin], -1), their_sin[0], atol=1e-6, rtol=0)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(6, 4, config.head_dim, generator=generator)
    k = torch.randn(6, 2, config.head_dim, generator=generator)
    their_q, their_k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], their_cos, their_sin)
    for out, expected in zip((rotate(q, cos, sin), rotate(k, cos, sin)), (their_q, their_k), strict=True):
        torch.testing.assert_close(out, expected[0].transpose(0, 1), atol=1e-5, rtol=0)


def test_a_positions_table_does_not_depend_on_the_other_positions() -> None:
    rope = RotaryEmbedding(RopeConfig(80, 10000.0))
    positions = torch.arange(3000)
    whole = rope.tables(positions)
    for count in (1, 2, 3, 7, 33, 1000):
        some = rope.tables(positions[500 : 500 + count])
        assert all(torch.equal(a[500 : 500 + count], b) for a, b in zip(whole, some, strict=True))


@pytest.mark.parametrize(
    "config, message",
    [
        (RopeConfig(63, 1e4), "head_dim is 63"),
        (RopeConfig(64, math.nan), "rope_theta is nan"),
        (RopeConfig(64, 1e4, "linear", factor=0.0), "factor is 0.0"),
        (RopeConfig(64, 1e4, "llama3", 8.0), "original_max_position_embeddings is None"),
        (
            RopeConfig(64, 1e4, "llama3", 8.0, 4.0, 4.0, original_max_position_embeddings=8192),
            "low_freq_factor is 4.0 and high_freq_factor 4.0",
        ),
        (RopeConfig(64, 1e4, "yarn", 8.0), "original_max_position_embeddings is None"),
        (RopeConfig(64, 1e4, "dynamic"), "'dynamic'; known are default, .* and proportional"),  # type: ignore[arg-type]
    ],
)
def test_rotary_settings_that_make_no_sense_are_refused(config: RopeConfig, message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        inverse_frequencies(config)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rounds_as_transformers_does(dtype: torch.dtype, kernels: Kernels) -> None:
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    theirs = LlamaRMSNorm(96, 1e-6).to(dtype)
    torch.nn.init.normal_(theirs.weight, generator=torch.Generator().manual_seed(0))
    ours = RMSNorm(theirs.weight.data, 1e-6, kernels)
    x, residual = torch.randn(2, 9, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    # The mean's last bit is its order of summing; in bf16 it may tip a rounding.
    tolerance = 0.0 if kernels.name == "torch" else {torch.float32: 1e-6, torch.bfloat16: 2**-7}[dtype]
    limits = {"rtol": tolerance, "atol": 0.0}
    torch.testing.assert_close(ours(x), theirs(x), **limits)
    normed, total = ours.with_residual(x.clone(), residual.clone())
    assert torch.equal(total, residual + x)
    torch.testing.assert_close(normed, theirs(residual + x), **limits)


def test_embedding_looks_rows_up_in_the_given_weight_itself(kernels: Kernels) -> None:
    weight = torch.arange(12.0).view(4, 3)
    embedding = Embedding(weight, torch.bfloat16, kernels)
    out = embedding(torch.tensor([3, 0, 3]))
    assert out.dtype == torch.bfloat16
    assert out.tolist() == [[9, 10, 11], [0, 1, 2], [9, 10, 11]]
    weight[0] = 5  # no copy was made: a mapped file's pages are touched only where they are read
    assert embedding(torch.tensor([0])).tolist() == [[5, 5, 5]]


class Identities:
    """Gives products that leave 4 heads' rows of 8 numbers as they are, or 2 heads' of an output."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.group: Group = OneRank()

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        raise KeyError(name)

    def linear(
        self, *names: str, bias: bool = False, split: Split = Split.NONE, heads: Sequence[int] | None = None
    ) -> Linear:
        assert not bias
        return Linear(self.kernels.pack([torch.eye(16 if names == ("self_attn.o_proj",) else 32)]))

    def norm(self, name: str, eps: float) -> RMSNorm:
        raise KeyError(name)


def test_attention_layer_stores_before_it_attends_and_writes_only_its_slots(kernels: Kernels) -> None:
    kv = KVCache(4, 2, 1, 8, 16, torch.float32)
    kv.data.fill_(7.0)
    batch = RaggedBatch(
        token_ids=torch.zeros(2, dtype=torch.int64),
        positions=torch.tensor([0, 1]),
        slots=torch.tensor([2 * 16, 2 * 16 + 1]),
        row_starts=[0, 2],
        context_lens=[2],
        block_tables=torch.tensor([[2]]),
        block_size=16,
    )
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 8, generator=generator) for heads in (2, 1, 1))
    still = torch.ones(2, 4), torch.zeros(2, 4)  # cos and sin of no turn at all
    attention = Attention(2, 1, 8, Identities(kernels), layer=1, window=None)
    out = attention(torch.cat([q, k, v], 1).flatten(1), still, kv, batch)
    assert out.shape == (2, 16)
    torch.testing.assert_close(out[0], v[0, 0].repeat(2))  # the first token sees itself alone
    expected = torch.full_like(kv.data, 7.0)
    expected[2, 1, 0, 0, :2], expected[2, 1, 0, 1, :2] = k[:, 0], v[:, 0]
    assert torch.equal(kv.data, expected)
