"""Kernels: right against independent definitions, and each row's bits independent of the other rows."""

from __future__ import annotations

import pytest
import torch

from quire.errors import ConfigError
from quire.ops import BLOCK_SIZES, KVCache, PackedWeight, RaggedBatch, activate, rms_norm, rotate

DTYPES = [torch.float32, torch.bfloat16]
ROWS = [1, 2, 3, 5, 7, 8, 9, 10, 31, 64, 65, 200]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_product_equals_the_definition(dtype: torch.dtype, packed: bool, bias: bool) -> None:
    weight, b = draw(48, 80, dtype=dtype), draw(48, dtype=dtype, seed=1) if bias else None
    x = draw(17, 80, dtype=dtype, seed=2)
    exact = x.double() @ weight.double().T + (b.double() if b is not None else 0)
    out = PackedWeight(weight, b, packed=packed).matmul(x)
    assert out.dtype == dtype
    tolerance = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}[dtype]
    torch.testing.assert_close(out.double(), exact, atol=tolerance * 10, rtol=tolerance)


@pytest.mark.quick(every=5)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("inputs, outputs", [(64, 96), (3072, 40), (100, 33)])
def test_rows_of_a_product_do_not_know_of_one_another(
    inputs: int, outputs: int, dtype: torch.dtype, packed: bool, threads: int
) -> None:
    weight = PackedWeight(draw(outputs, inputs, dtype=dtype), draw(outputs, dtype=dtype), packed=packed)
    x = draw(300, inputs, dtype=dtype, seed=1)
    whole = weight.matmul(x)
    for rows in ROWS:
        for start in (0, 3, 97):
            part = weight.matmul(x[start : start + rows])
            assert torch.equal(part, whole[start : start + rows]), f"{rows} rows from {start}"


@pytest.mark.parametrize("packed", [True, False])
def test_products_of_more_rows_than_one_call_takes(packed: bool) -> None:
    weight = PackedWeight(draw(8, 16), packed=packed)
    x = draw(4097, 16, seed=1)
    assert torch.equal(weight.matmul(x)[4000:], weight.matmul(x[4000:]))
    assert weight.matmul(x[:0]).shape == (0, 8)


def test_packing_does_not_keep_the_given_weight() -> None:
    given, x = draw(8, 16), draw(3, 16, seed=1)
    for packed in (True, False):
        weight = PackedWeight(given, packed=packed)
        before = weight.matmul(x)
        kept = given.clone()
        given.zero_()
        assert torch.equal(weight.matmul(x), before)
        given.copy_(kept)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norm_equals_the_definition(dtype: torch.dtype) -> None:
    x, weight = draw(5, 96, dtype=dtype) * 3, draw(96, dtype=dtype, seed=1)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    torch.testing.assert_close(rms_norm(x, weight, 1e-5).double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gate_equals_the_definition(dtype: torch.dtype) -> None:
    x = torch.cat([draw(5, 70, dtype=dtype) * 30, draw(5, 70, dtype=dtype, seed=1)], dim=1)
    gate, up = x.double().chunk(2, dim=1)
    tolerance = 1e-6 if dtype == torch.float32 else 2**-7
    silu, gelu = torch.nn.functional.silu(gate), torch.nn.functional.gelu(gate, approximate="tanh")
    torch.testing.assert_close(activate(x, "silu").double(), silu * up, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(activate(x, "gelu_tanh").double(), gelu * up, atol=tolerance, rtol=tolerance)


def test_gate_is_finite_for_large_inputs() -> None:
    gate = torch.tensor([[-200.0, 200.0, 1.0, 1.0]])
    assert activate(gate, "silu").tolist() == [[0.0, 200.0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 100, 1024])
def test_rows_of_norm_gate_and_rotation_do_not_know_of_one_another(size: int, dtype: torch.dtype, threads: int) -> None:
    # Over 600 rows of 1024, which are worked on in parts and by several threads.
    x, weight = draw(601, 2 * size, dtype=dtype) * 4, draw(size, dtype=dtype, seed=1)
    heads = x.view(601, 2, size)
    angles = draw(601, size // 2, seed=2)
    cos, sin = angles.cos(), angles.sin()
    whole = (rms_norm(heads, weight, 1e-6), activate(x, "silu"), activate(x, "gelu_tanh"), rotate(heads, cos, sin))
    for rows in ROWS:
        part = slice(300, 300 + rows)
        parts = (
            rms_norm(heads[part], weight, 1e-6),
            activate(x[part], "silu"),
            activate(x[part], "gelu_tanh"),
            rotate(heads[part], cos[part], sin[part]),
        )
        for all_rows, some in zip(whole, parts, strict=True):
            assert torch.equal(all_rows[part], some), f"{rows} rows"


def test_rotation_turns_pairs_by_their_angle() -> None:
    x, angles = draw(3, 2, 8), draw(3, 4, seed=1)
    out = rotate(x, angles.cos(), angles.sin())
    pairs = torch.complex(x[..., :4].double(), x[..., 4:].double()) * torch.exp(1j * angles.double())[:, None]
    torch.testing.assert_close(out.double(), torch.cat([pairs.real, pairs.imag], -1), atol=1e-6, rtol=1e-5)


def test_rotation_takes_a_part_of_a_wider_row() -> None:
    wide, angles = draw(5, 6, 8), draw(5, 4, seed=1)
    cos, sin = angles.cos(), angles.sin()
    assert torch.equal(rotate(wide[:, 2:4], cos, sin), rotate(wide[:, 2:4].contiguous(), cos, sin))


@pytest.mark.parametrize("block_size", [0, 1, 8, 24, 512])
def test_a_block_size_that_does_not_fit_a_key_tile_is_refused(block_size: int) -> None:
    with pytest.raises(ConfigError, match=f"block_size is {block_size};.*16, 32, 64, 128, 256"):
        KVCache(4, 1, 1, 8, block_size, torch.float32)


def test_a_pool_of_the_null_block_alone_is_refused() -> None:
    with pytest.raises(ConfigError, match="has 1 blocks; it needs at least 2"):
        KVCache(1, 1, 1, 8, 16, torch.float32)


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_a_block_is_one_range_of_bytes(block_size: int) -> None:
    kv = KVCache(3, 2, 5, 8, block_size, torch.bfloat16)
    assert kv.bytes_per_block == 2 * 5 * 2 * block_size * 8 * 2
    assert kv.data[1].is_contiguous()
    assert kv.data[2].data_ptr() - kv.data[1].data_ptr() == kv.bytes_per_block


def test_copies_take_a_blocks_head_in_all_layers_and_nothing_else() -> None:
    kv = KVCache(5, 3, 2, 4, 16, torch.float32)
    kv.data.copy_(draw(*kv.data.shape))
    before = kv.data.clone()
    kv.copy([(1, 2, 5), (2, 3, 16), (4, 1, 0)])
    assert torch.equal(kv.data[2, :, :, :, :5], before[1, :, :, :, :5])
    assert torch.equal(kv.data[2, :, :, :, 5:], before[2, :, :, :, 5:])
    assert torch.equal(kv.data[3], kv.data[2])  # in order: the second copy sees the first
    assert torch.equal(kv.data[[0, 1, 4]], before[[0, 1, 4]])


def test_what_a_step_shares_is_made_once_for_each_key() -> None:
    empty = torch.zeros(0, dtype=torch.int64)
    batch = RaggedBatch(empty, empty, empty, [0], [], empty.view(0, 0), 16)
    made: list[str] = []

    def make(name: str) -> str:
        made.append(name)
        return name

    assert [batch.once(name, lambda name=name: make(name)) for name in "abaab"] == list("abaab")
    assert made == ["a", "b"]
