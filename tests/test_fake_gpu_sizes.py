"""What models of real sizes launch on an H100: every kernel compiles, and takes no more shared memory than there is."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest

from quire.core.sampling_params import SamplingParams
from quire.core.step import FROM_PREVIOUS, RequestInfo, Span, StepPlan
from quire.models.fields import Fields
from quire.models.random_checkpoint import SHAPES
from quire.models.registry import read_config
from quire.runner.model_runner import ModelRunner
from tests import launches
from tests.fake_gpu import FakeGpu, gpu  # noqa: F401  # a fixture
from tests.test_fake_gpu import INT4, INT8, PARAMS, runner_of
from tests.triton_compile import compile_all

SHARED_MEMORY = 227 * 1024
LAYERS = 4
"""More have the same kernels."""
SIZES: dict[str, dict[str, Any]] = {
    **{name: shape for name, shape in SHAPES.items() if not name.endswith("-tiny")},
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * 12,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
    "deepseek-v3": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "max_position_embeddings": 163840,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "first_k_dense_replace": LAYERS - 1,
        "tie_word_embeddings": False,
    },
}

CASES = [
    *((name, {}) for name in SIZES),
    *((name, options) for name in ("qwen3-8b", "qwen3-30b-a3b", "deepseek-v3") for options in (INT8, INT4)),
    *((name, {"deterministic": False}) for name in ("qwen3-8b", "deepseek-v3")),
]


def without_numbers(folder: Path, config: dict[str, Any]) -> Path:
    """A checkpoint of that shape whose weights take no room on a disk: its file is a hole."""
    config = config | {"num_hidden_layers": LAYERS}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:LAYERS]
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    header, size = {}, 0
    for name, shape in read_config(Fields(config, "config.json"), Fields({}, "none")).tensor_shapes().items():
        end = size + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + size)
    return folder


class Steps:
    """Requests that join one another, and decode in between."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner, self._steps, self._blocks = runner, 0, 1
        self._lengths: list[int] = []

    def add(self, *lengths: int) -> None:
        """Prompts of these lengths, in a step with a token of all before."""
        spans, started = self._decodes(), []
        for length in lengths:
            number, prompt = len(self._lengths), [5 + i % 90 for i in range(length)]
            params: SamplingParams = PARAMS[number % len(PARAMS)]
            started.append(RequestInfo(number, params.resolved(), 0, prompt))
            span = Span(number, 0, prompt, num_sampled=1)
            own = range(self._blocks, self._blocks + -(-(length + 8) // 16))
            self._blocks, span.blocks, span.table_start = own.stop, [list(own)] * len(self._runner.kv), 0
            span.targets = prompt[1:] if params.prompt_logprobs is not None else []
            spans.append(span)
            self._lengths.append(length)
        self._launch(StepPlan(self._steps, spans, started=started))

    def decode(self) -> None:
        self._launch(StepPlan(self._steps, self._decodes()))

    def _decodes(self) -> list[Span]:
        spans = [Span(number, length, [FROM_PREVIOUS], 1) for number, length in enumerate(self._lengths)]
        self._lengths = [length + 1 for length in self._lengths]
        return spans

    def _launch(self, plan: StepPlan) -> None:
        self._runner.launch(plan)
        self._steps += 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_every_kernel_of_a_real_size_compiles_and_fits(
    name: str,
    options: dict[str, Any],
    gpu: FakeGpu,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = {"max_num_seqs": 64, "max_num_batched_tokens": 2048, "max_model_len": 4096, "num_kv_blocks": 400}
    steps = Steps(runner_of(gpu, without_numbers(tmp_path / name, SIZES[name]), **room, **options))
    for prompts in ([1500], [3, 40, 40], [20] * 44):
        steps.add(*prompts)
        steps.decode()
    file = tmp_path / "launches"
    file.write_text(json.dumps(list(gpu.launched)), "utf-8")
    monkeypatch.setenv(launches.FILE, str(file))
    compiled = compile_all("tests.launches", 90, 1500)
    assert len(compiled) > 20
    assert not [usage for usage in compiled if usage["shared"] > SHARED_MEMORY]
