"""Activations in int8, and which weight of a model Quire quantizes how; schemes are in test_quantize_groups.py."""

from __future__ import annotations

import pytest
import torch

from quire.models.formats.quantizing import Recipe, layers_with_more
from quire.models.formats.quire import kind_of, parts_of
from quire.ops import choose_kernels
from quire.ops.activations import BLOCK, quantize_activations, quantize_rows
from quire.ops.cpu import library
from tests.quantized import coded
from tests.test_coded import draw


def test_rows_become_codes_by_their_own_scale() -> None:
    codes, scales = quantize_rows(torch.tensor([[127.0, 2.5, 3.5, -127.0], [0.0, 0.0, 0.0, 0.0], [1e-38, 0, 0, 0]]))
    assert codes.tolist() == [[127, 2, 4, -127], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert scales.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("inputs", [70, 256, 1000])
def test_each_block_of_a_row_has_its_own_scale(inputs: int) -> None:
    x = draw(3, inputs)
    x[1, inputs - 1] = 1000.0
    codes, scales = quantize_activations(x)
    assert codes.shape == (3, scales.shape[1] * BLOCK) and not codes[:, inputs:].any()
    for block in range(scales.shape[1]):
        part = slice(block * BLOCK, min((block + 1) * BLOCK, inputs))
        expected_codes, expected_scales = quantize_rows(x[:, part])
        assert torch.equal(codes[:, part], expected_codes)
        assert torch.equal(scales[:, block], expected_scales)


OUTLIERS = {30.0: 0.022, 100.0: 0.065, 300.0: 0.2}
"""Standard deviations of one input of 4,096, and the error of all other inputs' share of the result that is allowed.
One scale a row erred by 0.067, 0.23 and 0.67."""


@pytest.mark.parametrize("name", ["torch", *library.usable()])
@pytest.mark.parametrize("rows", [1, 40])
def test_an_outlier_spoils_its_own_block_alone(name: str, rows: int) -> None:
    weight = coded(draw(64, 4096), "int8")
    product, exact = choose_kernels(name).pack_coded([weight]), weight.restored()
    clean = draw(rows, 4096, seed=1)
    clean[:, 1000] = 0.0
    share = clean @ exact.T
    for size, allowed in OUTLIERS.items():
        x = clean.clone()
        x[:, 1000] = size
        error = (product.matmul(x) - size * exact[:, 1000] - share).norm() / share.norm()
        assert error < allowed, size


# Which weight is quantized how


SCHEMES = {
    ("int8", "model.layers.3.mlp.up_proj.weight"): "int8",
    ("int4", "model.layers.3.mlp.up_proj.weight"): "int4",
    ("int4", "model.layers.3.self_attn.q_proj.weight"): "int4",
    ("int4", "model.layers.3.self_attn.v_proj.weight"): "int6",
    ("int4", "model.layers.3.self_attn.k_proj.weight"): "int6",
    ("int4", "model.layers.0.mlp.down_proj.weight"): "int6",
    ("int4", "model.layers.2.mlp.down_proj.weight"): "int4",
    ("int4", "model.layers.0.mlp.experts.7.down_proj.weight"): "int6",
    ("int4", "model.layers.0.block_sparse_moe.experts.7.w2.weight"): "int6",
    ("int4", "lm_head.weight"): "int6",
    ("int4", "model.embed_tokens.weight"): "int8",
    ("int8", "model.layers.3.mlp.gate.weight"): None,
    ("int4", "model.layers.3.self_attn.kv_b_proj.weight"): None,
    ("int4", "model.layers.3.linear_attn.in_proj_a.weight"): None,
    ("int4", "model.layers.3.self_attn.indexer.wk.weight"): None,
}


@pytest.mark.parametrize(("how", "name"), SCHEMES)
def test_a_weights_scheme_follows_from_its_name(how: str, name: str) -> None:
    scheme = Recipe(how, 16).scheme(name, (64, 512))  # type: ignore[arg-type]
    assert (None if scheme is None else scheme.name) == SCHEMES[how, name]


def test_layers_with_more_bits_are_spread_over_the_model() -> None:
    assert layers_with_more(16) == [0, 1, 4, 7, 10, 13, 14, 15]
    assert layers_with_more(1) == []


@pytest.mark.parametrize(
    ("inputs", "groups"), [(576, (32, 192)), (704, (32, 64)), (4096, (32, 256)), (48, (16, 48)), (40, None), (0, None)]
)
def test_groups_and_blocks_divide_the_inputs(inputs: int, groups: tuple[int, int] | None) -> None:
    scheme = Recipe("int4", 1).scheme("model.layers.0.mlp.up_proj.weight", (64, inputs))
    assert (None if scheme is None else (scheme.group, scheme.block)) == groups


@pytest.mark.parametrize("name", ["model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.up_proj.weight"])
@pytest.mark.parametrize("how", ["int8", "int4"])
def test_bytes_are_those_of_the_tensors(name: str, how: str) -> None:
    recipe = Recipe(how, 16)  # type: ignore[arg-type]
    scheme = recipe.scheme(name, (24, 576))
    assert scheme is not None
    parts = parts_of(coded(draw(24, 576), scheme.name))
    assert sum(tensor.nbytes for tensor in parts.values()) == recipe.num_bytes(name, (24, 576))
    assert parts.keys() == kind_of(scheme).keys()
    assert recipe.num_bytes("model.norm.weight", (576,)) == 2 * 576
