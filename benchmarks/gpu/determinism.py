"""The contract on the device: with deterministic=True a request's tokens and log-probabilities, bit for bit.

As `tests/test_determinism.py` on a CPU: what each prompt gives alone, in one chunk, without a cache or graphs, it must
give beside the others, at once and then one by one with a warm cache, whatever the block size, the cache, the chunks, a
pool so small that requests preempt each other, overlap, graphs and drafts. And an engine on the device must say of a
text what one on the CPU says in fp32.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from benchmarks.gpu.engines import engine
from benchmarks.gpu.job import Job
from benchmarks.gpu.rehearsal import engines_of
from benchmarks.replay import ReplayProposer
from quire.config import EngineConfig
from quire.core.request import Request
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.kv.tiers.tier import HOST
from quire.models.random_checkpoint import model_config
from quire.runner.proposer import Proposer

MAX_TOKENS = 12
VOCAB = 500
"""Prompts hold no larger ids; every model here has more."""


class Setting(NamedTuple):
    """A model and how it is computed: only within one of them must bits agree.

    Attributes:
        changes: to the config.json of `shape`; None: the embedded model.
        spread: of the weights: large enough that prompts lead to different tokens.
    """

    changes: Mapping[str, Any] | None
    options: Mapping[str, Any]
    spread: float = 0.1
    shape: str = "qwen3-tiny"


_PLAIN = {"hidden_size": 256, "intermediate_size": 704, "num_attention_heads": 4, "head_dim": 64, "vocab_size": 1024}
_WIDE = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 8192,
}
_EXPERTS = _PLAIN | {"moe_intermediate_size": 192, "num_experts": 16, "num_experts_per_tok": 4}
_LATENT = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "moe_intermediate_size": 192,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 64,
    "v_head_dim": 64,
    "vocab_size": 1024,
}
"""Rows of the cache as wide as those of DeepSeek's models, which decide the kernel's tiles."""

SETTINGS: dict[str, list[Setting]] = {
    "plain": [Setting(_PLAIN, {})],
    "wide": [Setting(_WIDE, {}, spread=0.04)],  # long sums, which tempt to be cut up by the number of rows
    "quantized": [
        Setting(_PLAIN, {"quantization": "int8", "kv_cache_dtype": "fp8"}),
        Setting(_PLAIN, {"quantization": "int4", "kv_cache_dtype": "int8"}),
    ],
    "experts": [
        Setting(_EXPERTS, {}, shape="qwen3-moe-tiny"),
        Setting(_EXPERTS, {"quantization": "int8"}, shape="qwen3-moe-tiny"),
    ],
    "latent": [
        Setting(_LATENT, {}, shape="deepseek-v2-tiny"),
        Setting(
            _LATENT,
            {"quantization": "int4", "kv_cache_dtype": "fp8"},
            shape="deepseek-v2-tiny",
        ),
    ],
    "demo": [Setting(None, {})],
}


class Switches(NamedTuple):
    """What must not change a bit. A small pool holds the longest request and little more."""

    block_size: int
    prefix_cache: str
    chunk: int
    small_pool: bool
    overlap: bool
    graphs: str


# Every value of a switch stands beside every value of each other one.
PRODUCT = (
    Switches(16, "radix", 40, True, True, "lazy"),
    Switches(16, "hash", 173, False, False, "off"),
    Switches(16, "off", 2048, True, True, "off"),
    Switches(32, "radix", 173, False, True, "lazy"),
    Switches(32, "hash", 2048, True, False, "lazy"),
    Switches(32, "off", 40, False, False, "lazy"),
    Switches(64, "radix", 2048, False, False, "off"),
    Switches(64, "hash", 40, True, True, "off"),
    Switches(64, "off", 173, True, True, "lazy"),
    Switches(32, "radix", 40, True, False, "off"),
)

Outcome = list[tuple[int, tuple[int, ...], tuple[float, ...]]]


def run(job: Job, name: str) -> None:
    """The product for one kind of model; for the embedded one also what it says of a text."""
    for setting in SETTINGS[name]:
        _compare(job, name, setting)
    if name == "demo":
        _agreement(job)


def _compare(job: Job, name: str, setting: Setting) -> None:
    title = ", ".join([name, *map(str, setting.options.values())])
    alone = _alone(job, setting)
    texts = {tuple(token for token, _, _ in outcome) for outcome in alone.values()}
    job.check(f"{title}: prompts that give the same tokens as another", len(alone) - len(texts), 0)
    cached, preempted = 0, 0
    blocks = {"stored": 0, "loaded": 0, "bad": 0}
    for switches in PRODUCT[:2] if job.rehearse else PRODUCT:
        job.check_time()
        with _engine(job, setting, **_options(switches)) as made:
            job.check(f"{title}: requests that differ with {_words(switches)}", _differing(made, alone), 0)
            cached, preempted = cached + made.stats.cached_tokens, preempted + made.stats.preemptions
            found = made.stats.kv_tiers.get(HOST, {})
            blocks = {event: count + found.get(event, 0) for event, count in blocks.items()}
    job.check(f"{title}: neither cached nor preempted anything", int(not cached) + int(not preempted), 0)
    job.check(f"{title}: no block was stored in the host tier", int(not blocks["stored"]), 0)
    job.check(f"{title}: blocks that came back from it as others, of {blocks['loaded']}", blocks["bad"], 0)


def _alone(job: Job, setting: Setting) -> dict[int, Outcome]:
    """What each prompt gives by itself, in one chunk."""
    alone: dict[int, Outcome] = {}
    with _engine(job, setting, prefix_cache="off", cuda_graphs="off", num_kv_blocks=400, max_model_len=320) as made:
        for index in range(len(prompts())):
            alone |= outcomes(made, [index], first_id=1000 * index)
    return alone


def _differing(made: Engine, alone: Mapping[int, Outcome]) -> int:
    """Requests that give something else beside the others, at once and then one by one."""
    order = list(alone)
    cold = outcomes(made, order)
    warm = outcomes(made, order[::-1], first_id=1000, stagger=2)
    return sum((cold[index] != alone[index]) + (warm[index] != alone[index]) for index in order)


def _options(switches: Switches) -> dict[str, Any]:
    size = switches.block_size
    tier = {"host_kv_memory": "256MiB"} if switches.small_pool and switches.prefix_cache != "off" else {}
    return {
        **tier,
        "block_size": size,
        "prefix_cache": switches.prefix_cache,
        "num_kv_blocks": 320 // size + 2 if switches.small_pool else 400,
        "max_model_len": 320,
        "max_num_batched_tokens": switches.chunk,
        "max_num_seqs": 8,
        "async_scheduling": switches.overlap,
        "cuda_graphs": switches.graphs,
    }


def _words(switches: Switches) -> str:
    parts = [f"blocks of {switches.block_size}", f"cache {switches.prefix_cache}", f"chunks of {switches.chunk}"]
    parts += ["a small pool above a host tier"] if switches.small_pool else []
    return ", ".join([*parts, f"overlap {'on' if switches.overlap else 'off'}", f"graphs {switches.graphs}"])


@contextmanager
def _engine(job: Job, setting: Setting, proposer: Proposer | None = None, **options: Any) -> Iterator[Engine]:
    options = {**setting.options, "deterministic": True, **options}
    if setting.changes is not None:
        config = model_config(setting.shape) | (dict(setting.changes) if not job.rehearse else {})
        with engine(job, config, spread=setting.spread, proposer=proposer, **options) as (made, _):
            yield made
        return
    with engines_of(job):
        made = Engine(EngineConfig.from_options({"model": "demo", "device": job.device, **options}))
    try:
        yield made
    finally:
        made.close()


def prompts() -> list[list[int]]:
    """Lengths around the borders of blocks and of attention's key tiles; three share a head of 150 tokens."""
    rnd = random.Random(5)
    head = [rnd.randrange(3, VOCAB) for _ in range(150)]
    own = [[rnd.randrange(3, VOCAB) for _ in range(n)] for n in (1, 16, 31, 250, 300)]
    return [*own, [*head, 5, 6, 7], [*head, 9], [*head[:133], 11, 12]]


def params(index: int) -> SamplingParams:
    """Every other request is greedy; the others differ in their filters. All report log-probabilities."""
    if index % 2 == 0:
        return SamplingParams(temperature=0.0, seed=0, logprobs=2, ignore_eos=True).resolved()
    return SamplingParams(
        temperature=0.9, top_p=0.95 if index % 4 == 1 else 1.0, seed=index, logprobs=2, repetition_penalty=1.1
    ).resolved()


def outcomes(made: Engine, indices: list[int], first_id: int = 0, stagger: int = 0) -> dict[int, Outcome]:
    """Token, reported ids and log-probabilities of each prompt; with `stagger`, one joins every so many steps."""
    todo = list(indices)
    found: dict[int, Outcome] = {index: [] for index in indices}
    step = 0
    while todo or not made.idle:
        if todo and (not stagger or step % stagger == 0):
            for index in todo if not stagger else todo[:1]:
                made.add(Request(first_id + index, prompts()[index], params(index), max_tokens=MAX_TOKENS))
            todo = todo[1:] if stagger else []
        for update in made.step():
            if update.error is not None:
                raise RuntimeError(f"request {update.request} failed: {update.error}")
            for token, entry in zip(update.tokens, update.logprobs or [], strict=True):
                found[update.request - first_id].append((token, tuple(entry.ids), tuple(entry.values)))
        step += 1
    return found


# -- speculation ---------------------------------------------------------------------------------------------

RIGHT = 0.7
"""Share of drafts from a recording that are what comes next."""

DRAFTED: dict[str, tuple[str, dict[str, Any]]] = {
    "a recording": ("plain", {"method": "ngram", "num_speculative_tokens": 4}),  # in place of n-grams
    "demo-draft": ("demo", {"method": "draft_model"}),
    "demo-eagle": ("demo", {"method": "eagle"}),
    "demo-draft, in trees": ("demo", {"method": "draft_model", "tree_width": 3}),
    "demo-eagle, in trees": ("demo", {"method": "eagle", "tree_width": 3}),
}
"""What drafts, for which model."""


def speculation(job: Job) -> None:
    """Requests with drafts, in a line and in trees, against the same without."""
    settings = {model: SETTINGS[model][0] for model in ("plain", "demo")}
    alone = {model: _alone(job, setting) for model, setting in settings.items()}
    for source, (model, spec) in DRAFTED.items():
        wanted, accepted = alone[model], 0
        texts = [[*prompt, *(token for token, _, _ in wanted[i])] for i, prompt in enumerate(prompts())]
        for switches in PRODUCT[:2]:
            job.check_time()
            options = _options(switches) | {"speculative_config": spec | {"adaptive": False}}
            proposer = ReplayProposer(texts, RIGHT, VOCAB) if source == "a recording" else None
            with _engine(job, settings[model], proposer, **options) as made:
                what = f"drafts of {source}: requests that differ with {_words(switches)}"
                job.check(what, _differing(made, wanted), 0)
                accepted += made.stats.accepted
        job.check(f"drafts of {source}: none was accepted", int(not accepted), 0)


# -- against the CPU -----------------------------------------------------------------------------------------

MEAN_LOGPROB, WORST_LOGPROB = 0.05, 0.5
"""How far the embedded model's log-probabilities may be from those in fp32, on average and at worst: its weights are
bf16, and so are the device's activations. (A CPU that computes in bf16 is 0.022 and 0.09 away.)"""


def _agreement(job: Job) -> None:
    """The log-probabilities of a text of random tokens, on the device and on the CPU in fp32."""
    cpu = {"device": "cpu", "dtype": "float32", "cpu_kernels": "torch"}
    found, wanted = (_scores(options) for options in ({"device": job.device}, cpu))
    apart = [abs(a - b) for a, b in zip(found, wanted, strict=True)]
    job.check(
        "embedded model against fp32: mean difference of log-probabilities", sum(apart) / len(apart), MEAN_LOGPROB
    )
    job.check("embedded model against fp32: greatest difference of log-probabilities", max(apart), WORST_LOGPROB)


def _scores(options: Mapping[str, Any]) -> list[float]:
    made = Engine(EngineConfig.from_options({"model": "demo", "num_kv_blocks": 400, "max_model_len": 320, **options}))
    scoring = SamplingParams(prompt_logprobs=0, seed=0, temperature=0.0).resolved()
    made.add(Request(0, prompts()[4], scoring, max_tokens=1))
    values: list[float] = []
    while not made.idle:
        for update in made.step():
            values += [entry.values[0] for entry in update.prompt_logprobs or []]
    made.close()
    return values
