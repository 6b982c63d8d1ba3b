"""Every method of speculation through the whole engine: the output is the same, and something was drafted."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch

from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.core.step import StepPlan
from quire.engine.engine import Engine
from quire.engine.executor import InlineExecutor, PendingResult
from quire.errors import ConfigError
from quire.models.checkpoint import resolve
from quire.runner.host_forward import HostForward
from quire.runner.model_runner import ModelRunner
from quire.speculative_config import SpeculativeConfig
from quire.text.tokenizer import Tokenizer
from tests.oracle import save_checkpoint
from tests.test_models_deepseek import save_with_mtp
from tests.test_models_eagle import eagle3_tensors, eagle_tensors, write
from tests.test_speculation import Outcome, run

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1},
    "draft_model": {"method": "draft_model"},
    "draft_model, trees": {"method": "draft_model", "tree_width": 3, "num_speculative_tokens": 9},
    "eagle": {"method": "eagle"},
    "eagle, trees": {"method": "eagle", "tree_width": 4, "num_speculative_tokens": 12, "tree_depth": 4},
    "eagle3": {"method": "eagle3"},
    "eagle3, trees": {"method": "eagle3", "tree_width": 2, "num_speculative_tokens": 7},
    "mtp": {"method": "mtp", "num_speculative_tokens": 3},
    "mtp, trees": {"method": "mtp", "num_speculative_tokens": 8, "tree_width": 3},
}

TARGETS = {"eagle3": "deep", "mtp": "mtp"}
"""What some draft for; the others, for `target`."""

OVERLAPPED = ("draft_model", "eagle, trees", "eagle3", "mtp, trees")
"""Tested with steps in flight, the others without; `make test-slow` adds the rest."""


def target_of(method: str) -> str:
    return TARGETS.get(METHODS[method]["method"], "target")


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    """Targets and what drafts for them; DeepSeek's drafts for itself."""
    made = {name: tmp_path_factory.mktemp(name) for name in ("target", "deep", "draft_model", "eagle", "eagle3", "mtp")}
    save_checkpoint(made["target"], "llama", num_hidden_layers=2)
    save_checkpoint(made["deep"], "llama", num_hidden_layers=7)
    save_checkpoint(made["draft_model"], "llama", num_hidden_layers=1)
    write(made["eagle"], eagle_tensors())
    write(made["eagle3"], eagle3_tensors(), draft_vocab_size=len(eagle3_tensors()["lm_head.weight"]))
    save_with_mtp(made["mtp"])
    return {name: str(folder) for name, folder in made.items()}


def engine_of(folders: dict[str, str], method: str, drafted: bool = True, **more: Any) -> Engine:
    spec = {"adaptive": False, **METHODS[method]}
    if spec["method"] not in ("ngram", "mtp"):
        spec["model"] = folders[spec["method"]]
    options = {"threads": 1, "max_num_seqs": 16, "max_model_len": 200, "check_invariants": True} | more
    return Engine(
        EngineConfig(model=folders[target_of(method)], **options, speculative_config=spec if drafted else None)
    )


@pytest.fixture(scope="module")
def alone(folders) -> dict[str, list[Outcome]]:
    """What each request gets without drafts, by target."""
    outcomes = {}
    for method in ("ngram", "eagle3", "mtp"):
        engine = engine_of(folders, method, drafted=False, prefix_cache="off")
        outcomes[target_of(method)] = [run(engine, [index])[0] for index in range(16)]
    return outcomes


@pytest.mark.quick("False-draft_model, trees", "False-eagle", "False-mtp", "True-eagle3")
@pytest.mark.parametrize(
    ("overlap", "method"),
    [
        pytest.param(overlap, method, marks=() if overlap == (method in OVERLAPPED) else pytest.mark.slow)
        for overlap in (False, True)
        for method in METHODS
    ],
)
def test_a_methods_drafts_change_nothing(folders, alone, method, overlap):
    outcomes = alone[target_of(method)]
    cache = "hash" if overlap else "radix"
    engine = engine_of(folders, method, async_scheduling=overlap, prefix_cache=cache, max_num_batched_tokens=64)
    assert run(engine, range(16)) == outcomes
    assert run(engine, range(15, -1, -1), first_id=100, stagger=2) == outcomes, "warm"
    assert engine.stats.drafted > 100 and engine.stats.accepted > 0


@pytest.mark.quick("ngram", "draft_model, trees")
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.slow if i % 2 else ()) for i, name in enumerate(METHODS)]
)
def test_a_methods_drafts_change_nothing_while_requests_preempt_each_other(folders, alone, method):
    outcomes = alone[target_of(method)]
    engine = engine_of(folders, method, num_kv_blocks=20, max_num_batched_tokens=40, async_scheduling=True)
    assert run(engine, range(16)) == outcomes
    assert engine.stats.preemptions > 0 and engine.stats.drafted > 0


def test_a_draft_model_that_is_the_target_is_accepted_whatever_is_cached_or_chunked(folders):
    """Its keys and values lie in the target's blocks: where a prefix is found, its part is found too."""
    spec = {"method": "draft_model", "model": folders["target"], "adaptive": False, "num_speculative_tokens": 5}
    config = EngineConfig(
        model=folders["target"], threads=1, max_model_len=200, max_num_batched_tokens=48, max_num_seqs=4,
        speculative_config=spec,
    )  # fmt: skip
    engine = Engine(config)
    prompt = [5 + i * 7 % 90 for i in range(100)]
    for id in range(3):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=id, ignore_eos=True).resolved()
            engine.add(Request(2 * id + int(temperature), prompt, params, max_tokens=31))
            while not engine.idle:
                engine.step()
    stats = engine.stats
    assert stats.cached_tokens > 400
    assert stats.accepted == stats.drafted > 100


class Moving(InlineExecutor):
    """Before each step all blocks move: their bytes elsewhere, and their names with them."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.draw, self.places = torch.Generator().manual_seed(0), torch.arange(runner.kv[0].num_blocks)

    def submit(self, plan: StepPlan) -> PendingResult:
        """The plan's ids are the engine's, which knows nothing of it; block 0 stays the null block."""
        memory, forward = self._runner.kv[0].memory, self._runner._forward
        assert isinstance(forward, HostForward)
        moved = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randperm(len(memory) - 1, generator=self.draw) + 1])
        memory[moved] = memory.clone()
        forward._tables = moved.numpy()[forward._tables]
        self.places = moved[self.places]
        for span in plan.spans:
            span.blocks = [self.places[list(blocks)].tolist() for blocks in span.blocks]
            span.copies = [(0, *self.places[list(pair)].tolist(), tokens) for _, *pair, tokens in span.copies]
        return super().submit(plan)


@pytest.mark.quick("mtp")
@pytest.mark.parametrize(
    "method",
    [
        pytest.param(name, marks=() if name in ("draft_model, trees", "mtp") else pytest.mark.slow)
        for name in METHODS
        if name != "ngram"
    ],
)
def test_a_block_that_moves_as_one_range_brings_what_drafts_along(folders, alone, method):
    """Swapping and sending are such moves: tokens are the same, and as many drafts are accepted."""
    outcomes = alone[target_of(method)]
    accepted = []
    for moving in (False, True):
        engine = engine_of(folders, method, num_kv_blocks=40, max_num_batched_tokens=64, async_scheduling=False)
        if moving:
            engine.executor = Moving(engine.executor._runner)
        assert run(engine, range(16)) == outcomes
        assert run(engine, range(16), first_id=100, stagger=2) == outcomes, "warm"
        accepted.append((engine.stats.accepted, engine.stats.drafted, engine.stats.cached_tokens))
    assert accepted[0] == accepted[1] and min(accepted[0]) > 0


def test_heads_compute_one_position_again_behind_a_cached_head(folders):
    prompt = [5 + i * 7 % 90 for i in range(65)]
    for method, cached in (("draft_model", 64), ("eagle", 63)):
        engine = engine_of(folders, method)
        for id in range(2):
            engine.add(Request(id, prompt, SamplingParams(temperature=0.0, seed=0).resolved(), max_tokens=3))
            while not engine.idle:
                engine.step()
        assert engine.stats.cached_tokens == cached


def test_what_drafts_is_part_of_the_memory_plan(folders):
    with_head, without = engine_of(folders, "eagle").memory_plan, engine_of(folders, "eagle", False).memory_plan
    assert with_head.weights > without.weights
    own = with_head.draft_kv_bytes_per_token
    assert with_head.kv_bytes_per_token == without.kv_bytes_per_token + own and own > 0
    assert f"a token, {own} B of it for drafts)" in dict(with_head.table())["KV cache"]
    assert "drafts" not in dict(without.table())["KV cache"]
    engine = engine_of(folders, "eagle")
    assert engine.kv_cache[0].bytes_per_block == engine.config.block_size * with_head.kv_bytes_per_token


@pytest.mark.parametrize("method", ["draft_model", "eagle"])
def test_the_demo_has_its_own_and_drafts_well(method):
    engine = Engine(EngineConfig(model="demo", speculative_config={"method": method, "adaptive": False}, threads=1))
    assert engine.config.speculative_config == {"method": method, "adaptive": False, "model": f"demo-{method[:5]}"}
    tokenizer = Tokenizer.load(engine.path)
    for id, text in enumerate(("def read(self, size=-1):\n", "import os\nimport sys\n\nclass Parser:\n")):
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, seed=id, ignore_eos=True).resolved()
            engine.add(Request(2 * id + int(temperature), tokenizer.encode(text), params, max_tokens=100))
    while not engine.idle:
        engine.step()
    stats = engine.stats
    assert 0.35 < stats.accepted / stats.drafted < 0.8
    assert 0.55 < stats.accepted_by_position[0] / stats.verifications < 0.95


@pytest.mark.parametrize("method", ["draft_model", "eagle", "eagle3"])
def test_a_model_tells_the_method(folders, alone, method):
    spec = {"model": folders[method], "adaptive": False}
    engine = Engine(
        EngineConfig(model=folders[target_of(method)], threads=1, max_model_len=200, speculative_config=spec)
    )
    assert engine.config.speculation.method == method
    assert f"speculation: {method} ({folders[method]}), up to 4 drafts per step, always" in engine.notes
    assert run(engine, range(16)) == alone[target_of(method)] and engine.stats.drafted > 0


@pytest.mark.parametrize("spec", [{"prompt_lookup_max": 4}, {"model": "[ngram]"}, {"model": "ngram", "method": None}])
def test_what_is_for_ngram_alone_tells_the_method(spec):
    own = EngineConfig(model="m", speculative_config=spec).speculation
    assert own == SpeculativeConfig.read({"method": "ngram"} | spec | {"method": "ngram", "model": None}, "m")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"num_speculative_tokens": 3}, "has no method; give one of ngram, draft_model"),
        ({"model": "x", "prompt_lookup_min": 2}, "prompt_lookup_min is for method ngram, but method is that of model"),
        ({}, "has no method; give one of ngram, draft_model, eagle, eagle3, mtp"),
        ({"method": "medusa"}, "method is 'medusa'; allowed: ngram"),
        ({"method": ["ngram"]}, r"method is \['ngram'\]; allowed: ngram"),
        ({"method": "ngram", "num_speculative_token": 3}, "unknown key 'num_speculative_token'; did you mean"),
        ({"method": "ngram", "num_speculative_tokens": 65}, "it must be an integer from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": -1}, "it must be an integer from 1 to 64"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, "num_speculative_tokens is 2.0"),
        ({"method": "ngram", "prompt_lookup_min": 6}, "prompt_lookup_min=6 is above prompt_lookup_max=5"),
        ({"method": "ngram", "adaptive": 1}, "adaptive is 1; it must be true or false"),
        ({"method": "ngram", "tree_width": 2}, "ngram cannot draft trees"),
        ({"method": "ngram", "model": "x"}, "method ngram needs no other model"),
        ({"method": "draft_model"}, "needs 'model', the folder of a smaller checkpoint"),
        ({"method": "eagle3"}, "needs 'model', the folder of a head made for this model"),
        ({"method": "eagle", "model": 3}, "model is 3; it must be a folder"),
    ],
)
def test_what_speculative_config_cannot_say_is_refused(spec, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(model="m", speculative_config=spec)


def test_a_configuration_made_by_hand_without_a_model_is_refused_where_one_is_read():
    with pytest.raises(ConfigError, match="needs 'model', the folder of a head made for this model"):
        SpeculativeConfig(method="eagle", num_speculative_tokens=4).named_model()


@pytest.mark.quick("192")
@pytest.mark.parametrize("vocab_size", [96, 192])
def test_a_draft_model_of_the_same_tokenizer_may_be_padded_otherwise(folders, alone, tmp_path, caplog, vocab_size):
    """The targets' tokens from 96 on have no row in the smaller one, those from 160 on none in the target."""
    target, draft = tmp_path / "target", tmp_path / "draft"
    shutil.copytree(folders["target"], target)
    save_checkpoint(draft, "llama", num_hidden_layers=1, vocab_size=vocab_size)
    for folder in (target, draft):
        shutil.copy(resolve("demo") / "tokenizer.json", folder)
    for tree_width in (1, 2):
        spec = {"method": "draft_model", "model": str(draft), "adaptive": False, "tree_width": tree_width}
        options = {"threads": 1, "max_num_seqs": 16, "max_model_len": 200, "speculative_config": spec}
        engine = Engine(EngineConfig(model=str(target), **options))
        assert run(engine, range(16)) == alone["target"]
        assert engine.stats.drafted > 100
    assert "the proposer failed" not in caplog.text


def test_what_cannot_draft_for_a_model_is_refused_before_anything_runs(folders, tmp_path):
    def start(target: str, **spec: Any) -> None:
        Engine(EngineConfig(model=target, threads=1, speculative_config=spec))

    with pytest.raises(ConfigError, match="hidden size"):
        start("demo", method="eagle", model=folders["eagle"])
    with pytest.raises(ConfigError, match="its vocabulary has 160 tokens, the target's 4096"):
        start("demo", method="draft_model", model=folders["draft_model"])
    with pytest.raises(ConfigError, match="this one has 0"):
        start(folders["target"], method="mtp")
    with pytest.raises(ConfigError, match="cannot draft: it holds no tensor 'fc"):
        start(folders["target"], method="eagle", model=folders["draft_model"])
    with pytest.raises(ConfigError, match="num_speculative_tokens=8 does not fit in a context of 8 tokens"):
        Engine(EngineConfig(model=folders["target"], max_model_len=8, speculative_config={"method": "ngram"}))
    assert resolve("demo-draft").name == "demo-draft"
