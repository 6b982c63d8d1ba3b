"""Sparse attention, of DeepSeek V3.2 and GLM-5: what an indexer chooses, and the contract with it."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.engine.engine import Engine
from quire.errors import ConfigError, ModelConfigError
from quire.models.quantize import quantize_folder
from quire.models.registry import check_ranks, load_model
from quire.ops import Kernels, KVCache, RaggedBatch, sparse
from quire.ops.kv_cache import KEY
from tests import test_determinism as product
from tests.oracle import (
    assert_parity,
    chunked_logits,
    random_prompt,
    save_checkpoint,
)
from tests.test_models_deepseek import YARN, rope, save_with_mtp
from tests.test_models_families import ORDER, each_alone

TORCH = Kernels()
PROMPT = random_prompt(90)
SHARED = {"indexer_types": ["full", "shared", "full"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "v32": ("deepseek_v32", {}),
    "v32-yarn": ("deepseek_v32", rope(**YARN)),
    "v32-one-position": ("deepseek_v32", {"index_topk": 1}),
    "v32-all-positions": ("deepseek_v32", {"index_topk": 2048}),
    "v32-published": ("deepseek_v32", {"edit": {"mlp_layer_types": ..., "layer_types": ..., "head_dim": ...}}),
    "glm": ("glm_moe_dsa", {}),
    "glm-shared": ("glm_moe_dsa", SHARED),
    "glm-pattern": ("glm_moe_dsa", {"edit": {"indexer_types": ..., "index_topk_pattern": "FSF"}, **SHARED}),
    "glm-frequency": (
        "glm_moe_dsa",
        {
            "edit": {"indexer_types": ..., "index_topk_freq": 2, "index_skip_topk_offset": 1},
            "indexer_types": ["full", "shared", "full"],
        },
    ),
}


@pytest.fixture
def lowest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.topk leaves open which of equal values it takes, and a relu makes many zeros: the lowest position here."""

    def topk(values: torch.Tensor, k: int, dim: int = -1, **_: Any) -> Any:
        found = torch.sort(values, dim=dim, descending=True, stable=True)
        return torch.return_types.topk((found.values.narrow(dim, 0, k), found.indices.narrow(dim, 0, k)))

    monkeypatch.setattr(torch.Tensor, "topk", topk)


@pytest.mark.parametrize("case", CASES)
def test_logits_and_greedy_tokens_are_those_of_transformers(case: str, tmp_path: Path, lowest_first: None) -> None:
    architecture, options = CASES[case]
    folder = save_checkpoint(tmp_path, architecture, **options)
    assert_parity(folder, PROMPT)


@pytest.mark.quick("bfloat16-chosen")
@pytest.mark.parametrize(
    ("dtype", "kernels"),
    [
        pytest.param(torch.bfloat16, None, id="bfloat16-chosen"),
        pytest.param(torch.float32, None, id="float32-chosen"),
        pytest.param(torch.bfloat16, Kernels(), id="bfloat16-torch"),
        pytest.param(torch.float32, Kernels(), id="float32-torch"),
    ],
)
def test_chunks_of_any_length_give_the_same_bits(dtype: torch.dtype, kernels: Kernels | None, tmp_path: Path) -> None:
    prompt = random_prompt(300)
    folder = save_checkpoint(tmp_path, "glm_moe_dsa", dtype=dtype, index_topk=130, **SHARED)
    model = load_model(folder, kernels=kernels)
    whole = chunked_logits(model, prompt, 300)
    for chunk in (1, 16, 129, 131):
        assert torch.equal(chunked_logits(model, prompt, chunk), whole)


def cache_of(keys: torch.Tensor, stored: str = "auto", behind: int = 5) -> tuple[KVCache, RaggedBatch]:
    """A cache of one request, whose rows end with the index keys [tokens, width]; and what a decode of its last token
    knows of it."""
    tokens, width = keys.shape
    blocks = -(-tokens // 16)
    kv = KVCache(blocks + 1, 1, 1, behind + width, 16, torch.float32, stored, sides=1)  # type: ignore[arg-type]
    rows = torch.cat([torch.full((tokens, behind), 0.5), keys], dim=1)
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)) + 1
    slots = table[torch.arange(tokens) // 16] * 16 + torch.arange(tokens) % 16
    none = torch.zeros(1, dtype=torch.int64)
    batch = RaggedBatch(none, none + tokens - 1, slots, [0, 1], [tokens], table[None].contiguous(), 16)
    if kv.scales is None:
        kv.numbers[slots // 16, 0, 0, KEY, slots % 16] = rows
    else:
        from quire.ops.kv_cache import quantize

        codes, scales = quantize(rows, kv.stored_dtype)
        kv.numbers.view(torch.uint8)[slots // 16, 0, 0, KEY, slots % 16] = codes.view(torch.uint8)
        kv.scales[slots // 16, 0, 0, KEY, slots % 16] = scales
    return kv, batch


def chosen(
    q: torch.Tensor, weights: torch.Tensor, kv: KVCache, batch: RaggedBatch, top: int, kernels: Kernels = TORCH
) -> list[list[int]]:
    """Positions that rows attend to, the last ones of the context."""
    rows, none = torch.arange(len(q)), torch.zeros(len(q), dtype=torch.int64)
    step = replace(batch, token_ids=none, positions=rows + batch.context_lens[0] - len(q), row_starts=[0, len(q)])
    choice = sparse.choice(step, top)
    kernels.choose(choice.of_rows(q), choice.of_rows(weights), kv, step, 0, choice)
    positions = torch.full((kv.num_blocks * 16,), -1)
    positions[batch.slots] = torch.arange(len(batch.slots))
    return positions[choice.slots].tolist()


@pytest.mark.parametrize("top", [1, 7, 128, 299])
def test_the_best_positions_are_chosen_and_of_equal_ones_the_lowest(top: int) -> None:
    """Whole numbers, of which sums are exact, so that many scores are equal."""
    generator = torch.Generator().manual_seed(top)
    keys, q = (torch.randint(-2, 3, size, generator=generator).float() for size in ((320, 8), (20, 4, 8)))
    weights = torch.randint(-1, 3, (20, 4), generator=generator).float()
    found = chosen(q, weights, *cache_of(keys), top)
    ties = 0
    for row, positions in enumerate(found):
        seen = keys[: 301 + row]
        scores = [float((weights[row] * (q[row] @ key).relu()).sum()) for key in seen]
        best = sorted(range(len(seen)), key=lambda position: (-scores[position], position))
        assert positions == sorted(best[:top])
        ties += scores[best[top - 1]] == scores[best[top]]
    assert ties > 3 or top == 299


def test_what_is_chosen_depends_on_the_row_alone() -> None:
    """Not on how many rows are asked for at once, nor on what lies behind the context in its last block."""
    generator = torch.Generator().manual_seed(0)
    keys, q, weights = (torch.randn(size, generator=generator) for size in ((700, 16), (60, 8, 16), (60, 8)))
    kv, batch = cache_of(keys)
    whole = chosen(q, weights, kv, batch, 50)
    kv.numbers[0] = float("nan")
    for count in (1, 2, 17):
        for first in range(0, 60, 13):
            rows = slice(first, first + count)
            end = min(700, 640 + first + count)
            shorter, part = cache_of(keys[:end])
            assert chosen(q[rows], weights[rows], shorter, part, 50) == whole[rows]


@pytest.mark.parametrize("stored", ["int8", "fp8"])
def test_keys_of_a_quantized_cache_are_what_their_codes_stand_for(stored: str) -> None:
    generator = torch.Generator().manual_seed(0)
    keys, q, weights = (torch.randn(size, generator=generator) for size in ((200, 16), (1, 4, 16), (1, 4)))
    kv, batch = cache_of(keys, stored)
    assert kv.scales is not None
    slots = batch.slots
    codes = kv.numbers[slots // 16, 0, 0, KEY, slots % 16].float()
    numbers = (codes * kv.scales[slots // 16, 0, 0, KEY, slots % 16].unsqueeze(1))[:, -16:]
    assert chosen(q, weights, kv, batch, 30) == chosen(q, weights, *cache_of(numbers), 30)


FAST, EVERY = ["glm_moe_dsa"], ["glm_moe_dsa", "deepseek_v32"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    sizes = {"num_hidden_layers": 2, "index_topk": 100}
    more = {"glm_moe_dsa": {"indexer_types": ["full", "shared"]}, "deepseek_v32": {}}
    made = {}
    for name in EVERY:
        folder = tmp_path_factory.mktemp(name)
        made[name] = str(save_checkpoint(folder, name, dtype=torch.bfloat16, **sizes, **more[name]))
    return made


@pytest.mark.parametrize("name", [pytest.param(one, marks=() if one in FAST else pytest.mark.slow) for one in EVERY])
def test_nothing_around_a_request_changes_its_tokens(name: str, folders: dict[str, str]) -> None:
    setting = {"model": folders[name], "threads": 1}
    alone = each_alone(setting, ORDER)
    product.assert_switches_change_nothing(setting, alone, product.PART[: 1 if name in FAST else None])
    spec = {"method": "ngram", "adaptive": False, "prompt_lookup_min": 1}
    engine = product.engine_of(setting, product.PART[1], speculative_config=spec)
    assert product.run(engine, ORDER) == alone and engine.stats.drafted > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("options", [{"cpu_kernels": "torch"}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_nor_with_other_kernels_and_caches(name: str, options: dict[str, str], folders: dict[str, str]) -> None:
    setting = {"model": folders[name], "threads": 1, **options}
    alone = each_alone(setting, ORDER)
    product.assert_switches_change_nothing(setting, alone, product.PART[:1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("glm_moe_dsa", {"tensor_parallel_size": 2}),
        ("deepseek_v32", {"tensor_parallel_size": 4}),
        ("deepseek_v32", {"pipeline_parallel_size": 2}),
    ],
)
def test_ranks_change_nothing(name: str, ranks: dict[str, int], folders: dict[str, str]) -> None:
    setting = {"model": folders[name], "threads": 1}
    alone = each_alone(setting, ORDER)
    with contextlib.closing(product.engine_of(setting, product.PART[0], **ranks)) as engine:
        assert product.run(engine, ORDER) == alone


def test_the_layer_behind_the_last_drafts_and_changes_nothing(tmp_path: Path) -> None:
    folder, _, _ = save_with_mtp(tmp_path, "deepseek_v32", dtype=torch.bfloat16, index_topk=100)
    setting = {"model": str(folder), "threads": 1}
    alone = each_alone(setting, ORDER)
    spec = {"method": "mtp", "num_speculative_tokens": 2, "adaptive": False}
    engine = product.engine_of(setting, product.PART[0], speculative_config=spec)
    assert product.run(engine, ORDER) == alone and engine.stats.drafted > 0


def test_the_plan_counts_index_keys(folders: dict[str, str]) -> None:
    engine = Engine(EngineConfig(model=folders["deepseek_v32"], threads=1, num_kv_blocks=40, max_model_len=320))
    assert engine.memory_plan.kv_bytes_per_token == 2 * (32 + 8 + 16) * 2  # layers, numbers of a row, bytes


def test_a_quantized_folder_gives_the_bits_of_quantizing_at_load(folders: dict[str, str], tmp_path: Path) -> None:
    """Of which the indexer's products stay as they are."""
    quantize_folder(Path(folders["glm_moe_dsa"]), tmp_path / "quantized", "int8")
    stored, made = load_model(tmp_path / "quantized"), load_model(folders["glm_moe_dsa"], quantization="int8")
    prompt = random_prompt(150)
    assert torch.equal(chunked_logits(stored, prompt, 150), chunked_logits(made, prompt, 70))


def test_what_is_not_there_is_refused_by_name(folders: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="sparse attention"):
        drafting = {"method": "draft_model", "model": folders["glm_moe_dsa"]}
        spec = {**drafting, "tree_width": 2, "num_speculative_tokens": 4}
        Engine(EngineConfig(model=folders["glm_moe_dsa"], threads=1, speculative_config=spec))
    with pytest.raises(ConfigError, match="pipeline_parallel_size=2: some layers attend to what the one before"):
        check_ranks(folders["glm_moe_dsa"], 1, stages=2)


@pytest.mark.parametrize(
    ("architecture", "edit", "message"),
    [
        ("deepseek_v32", {"index_topk": 0}, "'index_topk' must be"),
        ("deepseek_v32", {"index_head_dim": 4}, "'index_head_dim' must be at least qk_rope_head_dim"),
        ("deepseek_v32", {"q_lora_rank": ...}, "'q_lora_rank' must be"),
        ("deepseek_v32", {"layer_types": ["full_attention"] * 3}, "'layer_types' must be absent"),
        ("deepseek_v32", {"indexer_rope_interleave": True}, "'indexer_rope_interleave' is True"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "the first of which is full"),
        ("glm_moe_dsa", {"indexer_types": ["full"]}, "3 of full and shared"),
        ("glm_moe_dsa", {"indexer_types": ..., "index_topk_pattern": "FXF"}, "full and shared"),
    ],
)
def test_bad_fields_are_named(architecture: str, edit: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, architecture, edit=edit)
    with pytest.raises(ModelConfigError, match=message):
        load_model(folder)
