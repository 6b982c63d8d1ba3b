"""Every kernel that serves requests is compiled before the first one comes: in Triton's interpreter, which compiles
nothing, by what Triton would compile a launch anew for.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from triton.runtime import interpreter

from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.ops.triton import sampling
from quire.ops.triton.kernels import TritonKernels
from tests.oracle import save_checkpoint
from tests.test_triton_engine import prompts, small_steps, start  # noqa: F401  # for every test
from tests.triton_products import products_row_by_row  # noqa: F401  # for every test

pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")

Form = tuple[Any, ...]
"""What Triton compiles a launch anew for: the kernel, types and alignments of its arguments, and constants."""


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Form]]:
    """The forms of all launches so far."""
    found: set[Form] = set()
    run = interpreter.InterpretedFunction.run

    def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
        found.add(form_of(self, args, {name: kwargs[name] for name in kwargs if name not in ("grid", "warmup")}))
        return run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", seen)
    yield found


def form_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Form:
    constants = {
        name
        for name, parameter in inspect.signature(kernel.fn).parameters.items()
        if "constexpr" in str(parameter.annotation)
    }
    general = kernel.kwargs.get("do_not_specialize") or ()
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    options = kwargs.keys() - set(kernel.arg_names)
    parts = []
    for name, value in sorted(given.items()):
        if name in constants or name in options or value is None or isinstance(value, bool):
            parts.append((name, str(value)))
        elif isinstance(value, torch.Tensor):
            parts.append((name, str(value.dtype), value.data_ptr() % 16 == 0))
        elif isinstance(value, int) and name not in general:
            parts.append((name, value == 1, value % 16 == 0))
        else:
            parts.append((name, type(value).__name__))
    return kernel.fn.__name__, *parts


def test_what_triton_compiles_anew_for_is_told_apart(launched: set[Form]) -> None:
    from quire.ops.triton import rows

    for size in (16, 32):
        rows.finite_rows(torch.zeros(3, size))
    assert len(launched) == 2
    rows.finite_rows(torch.zeros(5, 32))
    assert len(launched) == 2
    rows.finite_rows(torch.zeros(5 * 32 + 1)[1:].view(5, 32))
    assert len(launched) == 3


def serve(engine: Engine, max_tokens: int) -> None:
    """Prompts of several lengths, alone and together, with all that requests ask for; one goes on in a cached block."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.8, "top_k": 5, "repetition_penalty": 1.2},
        {"temperature": 0.7, "prompt_logprobs": 2},
        {"temperature": 0.0, "logit_bias": {5: 1.0}, "allowed_token_ids": [4, 5, 6]},
    ]
    number = 0
    for together in (1, 3):
        for turn in range(0, len(kinds), together):
            for kind in kinds[turn : turn + together]:
                params = SamplingParams(seed=number, ignore_eos=True, **kind).resolved()
                engine.add(Request(number, prompts()[1 + number % 3], params, max_tokens=max_tokens))
                number += 1
            while not engine.idle:
                for update in engine.step():
                    assert update.error is None
    assert engine.stats.cached_tokens > 0


def drafting(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 3, "adaptive": False, **more}}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param("qwen3", {}, id="plain"),
        pytest.param("qwen3_moe", {}, id="experts", marks=pytest.mark.slow),
        pytest.param("deepseek_v3", {"first_k_dense_replace": 0}, id="latent attention", marks=pytest.mark.slow),
        pytest.param("lfm2", {}, id="short convolutions", marks=pytest.mark.slow),
        pytest.param("qwen3_next", {}, id="states", marks=pytest.mark.slow),
        pytest.param("lfm2", {"cuda_graphs": "off"}, id="without graphs", marks=pytest.mark.slow),
        pytest.param("qwen3", drafting("ngram", prompt_lookup_min=1), id="n-grams", marks=pytest.mark.slow),
        pytest.param("qwen3", drafting("draft_model"), id="a draft model", marks=pytest.mark.slow),
        pytest.param("qwen3", drafting("draft_model", tree_width=2), id="trees", marks=pytest.mark.slow),
    ],
)
def test_no_kernel_is_compiled_while_requests_wait(
    family: str, options: dict[str, Any], launched: set[Form], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonKernels, "warm_up", lambda kernels, vocab: sampling.warm_up(vocab, "cpu"))  # as on a GPU
    sizes = {name: value for name, value in options.items() if name not in ("speculative_config", "cuda_graphs")}
    options = {name: value for name, value in options.items() if name not in sizes}
    layers = {} if family in ("lfm2", "qwen3_next") else {"num_hidden_layers": 1}  # those have layers of two kinds
    folder = str(save_checkpoint(tmp_path, family, dtype=torch.float16, **layers, **sizes))
    spec = options.get("speculative_config", {})
    if spec.get("method") == "draft_model":
        options = {"speculative_config": spec | {"model": folder}}
    engine = start(folder, {"kv_cache_dtype": "int8" if layers else "auto", **options}, measured=True)
    before = set(launched)
    serve(engine, 6 if spec else 2)
    assert bool(engine.stats.drafted) == bool(spec)
    assert not launched - before, differences(launched - before, before)


def differences(late: set[Form], before: set[Form]) -> list[Any]:
    """Of each late launch, what no earlier one of the same kernel had."""
    known = {name: {part for form in before if form[0] == name for part in form[1:]} for name, *_ in late}
    return [(name, sorted(set(parts) - known[name], key=str)) for name, *parts in late]
