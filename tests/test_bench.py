"""`quire bench offline`: what a cell measures, what the machine could do at best, and what is refused."""

from __future__ import annotations

import gc
import json
import math
import os
import re
import resource
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from quire import LLM, SamplingParams
from quire.bench import ceilings, cells
from quire.bench.ceilings import Ceilings, Cost, Machine, Work, measure_machine, record
from quire.bench.cells import CELLS, Cell, Timing, measure, parse_cells, refusal
from quire.cli.main import main
from quire.errors import BenchmarkError, ConfigError
from quire.models.fields import Fields
from quire.models.formats.quantizing import Quantization
from quire.models.model import ModelSizes
from quire.models.random_checkpoint import (
    SHAPES,
    _in_use,
    model_config,
    random_checkpoint,
    weight_bytes,
    write_checkpoint,
)
from quire.models.registry import load_model, read_config
from quire.ops import CodedWeight, choose_kernels
from quire.ops.coded import Scheme
from quire.ops.states import StateShape
from tests.oracle import save_checkpoint


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", model_config("qwen3-tiny"))


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), prefix_cache="off", threads=1, max_num_seqs=8, num_kv_blocks=40, max_model_len=640) as engine:
        yield engine


@pytest.fixture
def quick_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick look at the machine, and cells that run but whose seconds are made up: noise fails no test."""
    monkeypatch.setattr(ceilings, "READ_BYTES", 2**20)
    monkeypatch.setattr(ceilings, "SQUARE", 64)
    monkeypatch.setattr(ceilings, "INT8_SQUARE", 64)
    timed = cells._timed

    def steady(llm: LLM, cell: Cell, *more: Any) -> float:
        timed(llm, cell, *more)
        return 0.5 * cell.output

    monkeypatch.setattr(cells, "_timed", steady)


def work_of(quantization: Quantization | None = None, **changes: Any) -> Work:
    fields = Fields(model_config("qwen3-0.6b") | changes, "config.json")
    config = read_config(fields, Fields({}, "none"))
    return Work.of(ModelSizes(config, torch.bfloat16, quantization), kv_bytes_per_token=114_688)


# The work of a model, against figures counted by hand


def test_the_bytes_of_a_decode_step_are_weights_and_the_context_of_each_request() -> None:
    layer = 1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    weights = 2 * (151936 * 1024 + 28 * layer + 1024)
    assert work_of().step(batch=8, context=100).num_bytes == weights + 8 * 100 * 114_688


def test_the_operations_of_a_decode_step_are_two_a_parameter_and_four_a_head_dimension_and_key() -> None:
    layer = 1024 * (2048 + 1024 + 1024) + 2048 * 1024 + 3 * 1024 * 3072 + 2 * 1024 + 2 * 128
    parameters = 151936 * 1024 + 28 * layer + 1024
    cost = work_of().step(batch=3, context=50)
    assert (cost.products, cost.attention) == (3 * 2 * parameters, 3 * 50 * 28 * 4 * 16 * 128)


def test_a_prompt_multiplies_with_the_head_once() -> None:
    work = work_of()
    cost = work.prompts(batch=2, prompt=10)
    assert cost.products == 2 * (2 * 10 * work.body_parameters + 2 * 151936 * 1024)
    assert cost.attention == 2 * sum(range(1, 11)) * 28 * 4 * 16 * 128


def test_an_untied_table_is_neither_read_nor_multiplied() -> None:
    assert work_of(tie_word_embeddings=False) == work_of()


def test_a_window_bounds_what_a_token_attends_to() -> None:
    work = work_of(use_sliding_window=True, sliding_window=64, max_window_layers=20)
    assert work.seen(1000) == 20 * 1000 + 8 * 64
    assert work.seen(10) == 28 * 10


def test_the_slower_of_memory_and_matrix_units_bounds_a_step() -> None:
    work = Work(1000, 100, 10, kv_bytes=0, attention_ops=0, windows=(None,))
    machine = Machine(threads=1, read_rate=1000.0, matrix_rate=220.0, int8_rate=440.0)
    ceiling, one, two = Ceilings(work, machine), Cell("one", 1, 5, 4), Cell("two", 2, 5, 4)
    assert (ceiling.decode_seconds(one), ceiling.decode_bound(one)) == (3.0, "memory")
    assert (ceiling.decode_seconds(two), ceiling.decode_bound(two)) == (6.0, "compute")
    assert ceiling.prefill_seconds(two) == pytest.approx(2 * 2 * (5 * 100 + 10) / 220)


def test_a_quantized_models_products_have_the_rate_of_integers_and_attention_has_its_own() -> None:
    machine = Machine(1, read_rate=1e9, matrix_rate=10.0, int8_rate=20.0)
    cost = Cost(num_bytes=0, products=100, attention=50)
    assert Ceilings(work_of(), machine).seconds(cost) == 15.0
    assert Ceilings(work_of("int8"), machine).seconds(cost) == 10.0


def test_decode_steps_attend_to_a_context_that_grows() -> None:
    work = Work(0, 0, 0, kv_bytes=1, attention_ops=0, windows=(None,))
    ceiling = Ceilings(work, Machine(1, read_rate=1.0, matrix_rate=1.0, int8_rate=1.0))
    assert ceiling.decode_seconds(Cell("c", 2, prompt=10, output=4)) == 2 * (11 + 12 + 13)


def test_the_machine_is_measured_with_the_threads_in_use(quick_ceilings: None) -> None:
    machine = measure_machine(torch.bfloat16, threads=1, repeat=2)
    assert machine.threads == torch.get_num_threads()
    assert machine.read_rate > 0
    assert 0 < machine.matrix_rate <= machine.int8_rate


def test_a_step_of_one_token_reads_the_experts_that_it_is_sent_to() -> None:
    config = read_config(Fields(model_config("qwen3-moe-1b"), "config.json"), Fields({}, "none"))
    work = Work.of(ModelSizes(config, torch.bfloat16), kv_bytes_per_token=0)
    expert, attention = 3 * 2048 * 768, 2048 * (4096 + 2 * 512) + 4096 * 2048
    rest = 151936 * 2048 + 8 * (attention + 16 * 2048 + 2 * 2048 + 2 * 128) + 2048
    assert work.step(1, 100).num_bytes == 2 * (rest + 8 * 8 * expert)
    assert work.step(1, 0).products == 2 * (rest + 8 * 8 * expert)
    assert work.weights_read(32) == pytest.approx(2 * (rest + 8 * 16 * expert), rel=1e-6)


@pytest.mark.parametrize("seeing_all", [28, 14])
def test_a_pair_of_tokens_is_a_share_of_a_token_s_products_in_the_layers_that_see_all(seeing_all: int) -> None:
    windows = {"use_sliding_window": True, "max_window_layers": seeing_all, "sliding_window": 64}
    fields = Fields(model_config("qwen3-0.6b") | windows, "config.json")
    sizes = ModelSizes(read_config(fields, Fields({}, "none")), torch.bfloat16)
    work = Work.of(sizes, kv_bytes_per_token=0)
    assert sizes.pair_share == pytest.approx(seeing_all * work.attention_ops / (2 * work.body_parameters))


def test_recurrent_layers_read_states_and_attend_to_nothing(tmp_path: Path) -> None:
    model = load_model(save_checkpoint(tmp_path, "qwen3_5_text"))
    work = Work.of(model, 512)
    assert (work.windows, work.kv_bytes) == ((None,), 512), "one layer of three"
    assert work.attention_ops == 2 * 2 * model.config.layer.num_heads * model.config.layer.head_dim
    [shape] = [shape for shape in model.kv_shapes() if isinstance(shape, StateShape)]
    states = 2 * shape.heads * shape.key_dim * shape.value_dim  # of both
    more = work.step(3, 100).num_bytes - work.step(2, 100).num_bytes - 100 * 512
    assert 4 * states * 17 / 16 < more == work.state_bytes < 3 * 4 * states
    assert work.state_ops > 2 * 3 * states
    assert work.prompts(1, 50).attention - work.prompts(1, 49).attention == 50 * work.attention_ops + work.state_ops


def test_latent_attention_multiplies_with_the_rows_of_the_cache(tmp_path: Path) -> None:
    model = load_model(write_checkpoint(tmp_path / "tiny", model_config("deepseek-v2-tiny")))
    work = Work.of(model, model.kv_shape().bytes_per_token)
    latent, heads = 64, 4
    assert (work.kv_bytes, work.attention_ops) == (2 * (latent + 16), 2 * heads * (latent + 16 + latent))
    attention = 64 * heads * 32 + 64 * (latent + 16) + latent + latent * heads * 32 + heads * 16 * 64
    expert, router = 3 * 64 * 32, 8 * 64
    assert work.body_parameters == 2 * (attention + 2 * 64) + 3 * 64 * 128 + (2 + 2) * expert + router + 64


# Cells


def test_the_cells_are_those_that_other_engines_are_compared_in() -> None:
    assert [(cell.name, cell.batch, cell.prompt, cell.output) for cell in CELLS] == [
        ("decode-1", 1, 128, 48),
        ("decode-8", 8, 128, 32),
        ("decode-32", 32, 128, 32),
        ("prefill-1k", 1, 1024, 1),
    ]


def test_cells_are_named_or_written_as_a_shape() -> None:
    assert parse_cells("prefill-1k, 4x16+2") == [CELLS[3], Cell("4x16+2", 4, 16, 2)]


@pytest.mark.parametrize("text", ["decode-2", "", "decode-1,", "0x5+1", "4x16", "1x2+3x4", "1x99999999999+1"])
def test_what_is_no_cell_is_refused_with_those_that_are(text: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown cell .*decode-1, decode-8.*BATCHxPROMPT\+OUTPUT"):
        parse_cells(text)


def test_rates_count_prompts_in_the_first_run_and_later_tokens_in_the_rest() -> None:
    timing, cell = Timing(first=2.0, total=5.0), Cell("c", 4, 10, 7)
    assert timing.prefill_rate(cell) == 20.0
    assert timing.decode_rate(cell) == 8.0
    assert timing.decode_rate(cell.first) is None


def test_a_full_run_that_was_faster_than_its_first_token_is_an_error() -> None:
    with pytest.raises(BenchmarkError, match=r"took 1\.0000 s and 1 token 2\.0000 s.*--repeat"):
        Timing(first=2.0, total=1.0).decode_rate(Cell("c", 4, 10, 7))


def test_a_cell_runs_all_its_tokens_in_each_of_its_runs(llm: LLM) -> None:
    before = (llm.stats.prompt_tokens, llm.stats.output_tokens)
    seen: list[int] = []
    timing = measure(llm, Cell("c", 3, 20, 5), repeat=2, on_token=seen.append)
    after = (llm.stats.prompt_tokens, llm.stats.output_tokens)
    assert after == (before[0] + 4 * 60, before[1] + 2 * (3 + 15))
    assert min(timing.first, timing.total) > 0
    assert max(seen) == 15
    assert llm.stats.cached_tokens == 0


def test_an_engine_that_drops_tokens_is_not_reported_as_fast(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step = llm.step

    def impatient() -> list[Any]:
        outputs = step()
        for output in outputs:
            llm.abort(output.request_id)
        return outputs

    monkeypatch.setattr(llm, "step", impatient)
    with pytest.raises(BenchmarkError, match=r"2 requests ended with \d tokens, but 2 with 10"):
        measure(llm, Cell("c", 2, 20, 5))
    monkeypatch.undo()
    while not llm.idle:
        llm.step()


def test_a_record_holds_rates_and_shares_of_the_ceiling() -> None:
    work = Work(1000, 100, 0, kv_bytes=0, attention_ops=0, windows=())
    ceiling = Ceilings(work, Machine(1, read_rate=1000.0, matrix_rate=1e9, int8_rate=2e9))
    line = record(Cell("c", 2, 10, 4), Timing(first=4.0, total=10.0), ceiling)
    assert line == {
        "cell": "c",
        "batch": 2,
        "prompt": 10,
        "output": 4,
        "prefill_tok_s": 5.0,
        "prefill_share": 0.25,
        "total_s": 10.0,
        "decode_tok_s": 1.0,
        "decode_share": 0.5,
        "decode_bound": "memory",
    }


@pytest.mark.parametrize(
    ("weights", "first", "expected"),
    [
        (2 * 10**6, 1.5, {"prefill": "weights of 2 MiB may stay in caches"}),
        (10**12, 10**5, {"prefill": "slower while the rate of its memory was measured"}),
        (0, 0.01, {"prefill": "torch's matrix product"}),
        (2 * 10**6, 2.5, {}),
    ],
)
def test_a_share_above_the_ceiling_is_explained(weights: int, first: float, expected: dict[str, str]) -> None:
    work = Work(weights, 100, 0, kv_bytes=0, attention_ops=0, windows=())
    machine = Machine(1, read_rate=1e6, matrix_rate=1e4, int8_rate=1e4)
    above = record(Cell("c", 1, 10, 1), Timing(first, first), Ceilings(work, machine)).get("above_ceiling", {})
    assert above.keys() == expected.keys()
    assert all(text in above[name] for name, text in expected.items())


@pytest.mark.parametrize(
    ("cell", "reason"),
    [
        (Cell("long", 1, 640, 1), r"a context of 641 tokens, but this engine's is 640"),
        (Cell("wide", 9, 8, 1), r"9 requests at once, but max_num_seqs is 8; set --max-num-seqs 9"),
        (Cell("heavy", 8, 80, 1), r"48 KV blocks of 16 tokens, but the memory plan has 40; set --kv-cache-memory"),
    ],
)
def test_a_cell_that_does_not_fit_is_refused_with_what_to_change(llm: LLM, cell: Cell, reason: str) -> None:
    found = refusal(cell, llm)
    assert found is not None
    assert re.search(reason, found)


def test_a_cell_that_just_fits_is_not_refused(llm: LLM) -> None:
    assert refusal(Cell("full", 8, 79, 1), llm) is None


# Random checkpoints


def test_a_random_checkpoint_loads_and_runs(tiny: Path) -> None:
    model = load_model(tiny)
    assert (model.vocab_size, model.num_layers, model.dtype) == (512, 2, torch.bfloat16)
    with LLM(str(tiny), num_kv_blocks=8, threads=1) as engine:
        [output] = engine.generate([[1, 2, 3]])
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.endswith("-tiny")])
def test_a_tiny_shape_of_each_kind_runs_in_quire_as_in_transformers(shape: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / shape, model_config(shape))
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    assert sum(part.numel() for part in theirs.parameters()) == load_model(folder).num_parameters
    prompt = list(range(5, 45))
    with LLM(str(folder), dtype="float32", num_kv_blocks=8, threads=1) as engine:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, ignore_eos=True)
        [ours] = engine.generate([prompt], params)
    with torch.inference_mode():
        logprobs = theirs(torch.tensor([prompt])).logits[0].log_softmax(-1)
    expected = [logprobs[place, token].item() for place, token in enumerate(prompt[1:])]
    assert ours.prompt_logprobs is not None
    found = [one[token].logprob for one, token in zip(ours.prompt_logprobs[1:], prompt[1:], strict=True)]
    assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(("shape", "billions"), [("qwen3-moe-1b", 1.066), ("deepseek-v2-lite-1b", 1.009)])
def test_the_sparse_shapes_have_about_a_billion_parameters(shape: str, billions: float) -> None:
    config = read_config(Fields(model_config(shape), "config.json"), Fields({}, "none"))
    sizes = [math.prod(size) for size in config.tensor_shapes().values()]
    assert sum(sizes) / 1e9 == pytest.approx(billions, abs=0.001)


def test_random_checkpoints_are_the_same_every_time(tiny: Path, tmp_path: Path) -> None:
    again = load_file(write_checkpoint(tmp_path / "again", model_config("qwen3-tiny")) / "model.safetensors")
    first = load_file(tiny / "model.safetensors")
    assert first.keys() == again.keys()
    assert all(torch.equal(first[name], again[name]) for name in first)


def test_a_named_folder_keeps_the_checkpoint_and_a_temporary_one_does_not(tmp_path: Path) -> None:
    written: list[float] = []
    for _ in range(2):
        with random_checkpoint("qwen3-tiny", str(tmp_path), written.append) as kept:
            pass
    assert (kept / "model.safetensors").is_file()
    assert written.count(1.0) == 1  # the second time it was there
    assert [path.name for path in tmp_path.iterdir()] == ["qwen3-tiny"]
    with random_checkpoint("qwen3-tiny", None) as temporary:
        assert (temporary / "config.json").is_file()
    assert not temporary.parent.exists()


@pytest.mark.quick("qwen3-moe-tiny-int4", "deepseek-v2-tiny-int8", "gemma3-tiny-int4", "qwen3.5-tiny-int8")
@pytest.mark.parametrize("how", ["int8", "int4"])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape.endswith("-tiny")])
def test_a_random_checkpoint_may_be_quantized_and_has_the_size_that_was_reckoned(
    shape: str, how: Quantization, tmp_path: Path
) -> None:
    config = model_config(shape)
    with random_checkpoint(shape, str(tmp_path), how=how) as folder, LLM(str(folder), num_kv_blocks=8) as engine:
        output = engine.generate([[1, 2, 3]], SamplingParams(ignore_eos=True))[0].outputs[0]  # it may draw an end
        assert output.finish_reason == "length"
    size = (folder / "model.safetensors").stat().st_size
    assert weight_bytes(config, how) <= size < weight_bytes(config, how) + 64 * 1024  # and the header
    with random_checkpoint(shape, str(tmp_path)) as plain:
        assert plain != folder
    assert weight_bytes(config) <= (plain / "model.safetensors").stat().st_size


def test_what_does_not_fit_is_refused_with_the_numbers_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=1 << 30))
    words = r"the weights take 27\.5 GiB, and 1\.0 GiB are free where .*choose another --workdir, .*quantization=int4"
    with pytest.raises(ConfigError, match=words):
        write_checkpoint(tmp_path / "large", model_config("qwen3-14b"))
    with pytest.raises(ConfigError, match=r"the weights take 9\.0 GiB, .*choose another --workdir or a smaller shape$"):
        write_checkpoint(tmp_path / "large", model_config("qwen3-14b"), how="int4")
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("quire.runner.memory_plan.free_memory", lambda: 10 << 30)
    assert main(["bench", "offline", "--random", "qwen3-14b", "--workdir", str(tmp_path), "--device", "cpu"]) != 0
    words = (
        r"of qwen3-14b in bfloat16 take 27\.5 GiB, and 10 GiB of memory are free;.*int8 14\.\d GiB, int4 [89]\.\d+ GiB"
    )
    assert re.search(words, " ".join(capsys.readouterr().err.split()))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("how", [None, "int4"])
def test_whatever_ends_the_writing_leaves_nothing_behind(how: Quantization | None, tmp_path: Path) -> None:
    def interrupt(share: float) -> None:
        if share > 0.3:
            raise KeyboardInterrupt

    for workdir in (None, str(tmp_path)):
        with pytest.raises(KeyboardInterrupt), random_checkpoint("qwen3-tiny", workdir, interrupt, how):
            raise AssertionError("it was not interrupted")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))  # as if the disk were full then
    try:
        with pytest.raises(ConfigError, match=r"qwen3-tiny.* cannot be written: File too large; choose --workdir"):
            random_checkpoint("qwen3-tiny", str(tmp_path), None, how).__enter__()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(tmp_path.iterdir())


def test_a_quantized_checkpoint_is_written_weight_by_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a model may be larger than memory: at most one other weight is held while one is drawn and quantized."""
    kernels, alive = choose_kernels(), list[weakref.ref[torch.Tensor]]()
    quantize = kernels.quantize_groups

    def watched(weight: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> CodedWeight:
        gc.collect()
        assert all(made() is None for made in alive[:-1])  # the name of the last one is still there
        made = quantize(weight, scheme, importance=importance)
        alive.append(weakref.ref(made.codes))
        return made

    monkeypatch.setattr(kernels, "quantize_groups", watched)
    monkeypatch.setattr("quire.models.quantize.choose_kernels", lambda: kernels)
    write_checkpoint(tmp_path / "tiny", model_config("qwen3-tiny"), how="int4")
    assert len(alive) == 2 * 7 + 1  # of each layer, and the table, which is the head


def test_what_killed_processes_left_is_removed_and_what_others_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left, used, young = (tmp_path / f"quire-random-{name}" for name in ("left", "used", "young"))
    partial = tmp_path / "work" / "qwen3-tiny.1a2b.unfinished"
    for folder in (left, used, young, partial):
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        if folder != young:
            os.utime(folder, (0, 0))
    with _in_use(used):
        for workdir in (None, str(tmp_path / "work")):
            with random_checkpoint("qwen3-tiny", workdir):
                pass
    assert sorted(path.name for path in tmp_path.iterdir()) == [used.name, young.name, "work"]
    assert [path.name for path in (tmp_path / "work").iterdir()] == ["qwen3-tiny"]


def test_two_runs_may_write_the_same_checkpoint_at_once(tmp_path: Path) -> None:
    folder, config = tmp_path / "shape", model_config("qwen3-tiny")

    def other_run_is_faster(share: float) -> None:
        if not folder.exists():
            write_checkpoint(folder, config)

    assert write_checkpoint(folder, config, other_run_is_faster) == folder
    assert len(load_file(folder / "model.safetensors")) > 1
    assert [path.name for path in tmp_path.iterdir()] == ["shape"]


def test_a_folder_that_holds_something_else_is_not_touched(tmp_path: Path) -> None:
    mine = tmp_path / "qwen3-tiny" / "config.json"
    mine.parent.mkdir()
    mine.write_text("{}")
    with pytest.raises(ConfigError, match=r"exists and is no checkpoint of the shape qwen3-tiny"):
        random_checkpoint("qwen3-tiny", str(tmp_path)).__enter__()
    assert mine.read_text() == "{}"


def test_an_unknown_shape_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match=r"unknown shape 'gpt-2'; known: qwen3-0\.6b"):
        model_config("gpt-2")


# The command


def bench(*arguments: str) -> int:
    return main(["bench", "offline", *arguments, "--threads", "1"])


def test_json_lines_take_the_place_of_the_table(
    quick_ceilings: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = Machine(1, read_rate=1e8, matrix_rate=5e9, int8_rate=7e9)
    monkeypatch.setattr(ceilings, "measure_machine", lambda *args, **more: slow)
    assert bench("demo", "--cells", "2x8+3,1x8+1", "--json") == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["cell"] for line in lines] == ["2x8+3", "1x8+1"]
    for line in lines:
        assert line["prefill_tok_s"] > 0
        assert (line["model"], line["dtype"], line["threads"], line["engine"]) == ("demo", "bfloat16", 1, "quire")
        assert (line["read_gb_s"], line["matrix_gflop_s"], line["int8_gop_s"]) == (0.1, 5.0, 7.0)
        read = 8_001_024 / slow.read_rate  # the weights, once; what a short prompt adds is little
        assert line["prefill_share"] == pytest.approx(read / 0.5, rel=0.1)
    assert (lines[0]["prefill_tok_s"], lines[0]["decode_tok_s"]) == (32.0, 4.0)
    assert "decode_tok_s" not in lines[1]
    assert "decode tok/s" in err


def test_the_table_goes_to_standard_output_and_json_to_a_file(
    quick_ceilings: None, tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.jsonl"
    assert bench(str(tiny), "--cells", "2x8+3", "--json", str(file), "--dtype", "float32") == 0
    [line] = [json.loads(line) for line in file.read_text().splitlines()]
    assert (line["cell"], line["dtype"]) == ("2x8+3", "float32")
    out = capsys.readouterr().out
    assert "of ceiling" in out
    assert ("is above its ceiling: " in out) == ("above_ceiling" in line)
    assert f"{line['decode_tok_s']:,.1f}" in out


def test_a_refused_cell_is_a_line_of_its_own_and_the_others_run(
    quick_ceilings: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("demo", "--cells", "1x5000+1,1x8+2", "--json=-") == 1
    out, err = capsys.readouterr()
    first, second = [json.loads(line) for line in out.splitlines()]
    assert "context of 5001 tokens" in first["refused"]
    assert second["decode_tok_s"] > 0
    assert "1x5000+1         refused: it needs a context of 5001 tokens" in err


def test_a_shape_runs_without_a_checkpoint(
    quick_ceilings: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("--random", "qwen3-tiny", "--workdir", str(tmp_path), "--cells", "1x8+2", "--json=-") == 0
    assert json.loads(capsys.readouterr().out)["model"] == "qwen3-tiny"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_command_and_removes_its_checkpoint(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = list[str]()

    def started(given: Any) -> None:
        found.extend(path.name for path in tmp_path.glob("*/*"))
        os.kill(os.getpid(), number)

    monkeypatch.setattr("quire.cli.start.start", started)
    before = signal.getsignal(number)
    assert bench("--random", "qwen3-tiny") == 128 + number
    assert found == ["qwen3-tiny"] and not list(tmp_path.iterdir())
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no model was given; give a folder, org/name or 'demo', or --random qwen3-0.6b"),
        (["--json", "demo"], "--json took 'demo' as its file; write --json after the model"),
        (["demo", "other"], "unexpected argument 'other'"),
        (["demo", "--random", "qwen3-tiny"], "model 'demo' and --random qwen3-tiny were both given"),
        (["demo", "--workdir", "x"], "--workdir needs --random"),
        (["demo", "--repeat", "0"], "--repeat 0 is out of range; allowed: 1 or more"),
        (["demo", "--cells", "decode-3"], "unknown cell 'decode-3'"),
        (["demo", "--prefix-cache", "radix"], "prefix_cache='radix': the cells require 'off'"),
        (["--random", "gpt-2"], "unknown shape 'gpt-2'"),
    ],
)
def test_bad_arguments_are_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert out == ""


def test_what_to_measure_must_be_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "demo"]) == 2
    assert "choose what to measure: 'quire bench offline MODEL'" in capsys.readouterr().err


def test_a_json_file_that_cannot_be_written_is_refused_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("demo", "--json", str(tmp_path / "no" / "file")) == 2
    assert "cannot be written" in capsys.readouterr().err
