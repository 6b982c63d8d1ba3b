"""Random engines under random load: every request gets, bit for bit, what it gets alone in a plain one.

A seed draws an engine from a table of dimensions, and requests that share prefixes, arrive over time, and are aborted
at times; a step fails now and then, or a byte that was to be kept changes. Whatever they get is compared with the same
request alone in an engine that never batches, caches, chunks, drafts or preempts. A new dimension is one more line of
`NUMBERS`, where bits may depend on it, or of `SWITCHES`, where they must not; each draws for itself, so that a seed
keeps its other choices when one is added.

    python -m tests.fuzz_engine 17         # run one seed, and show what it drew
    python -m tests.fuzz_engine 0 1000     # run so many; whatever fails is printed with the command that repeats it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import tokenizers
import torch
from msgspec.structs import replace

from quire import LLM, RequestOutput, SamplingParams
from quire.core.lockstep import Lockstep
from quire.core.pooling import PoolingParams
from quire.core.request import Status
from quire.core.scheduler import Scheduler
from quire.kv.tiers.cost import Costs
from quire.ops.cpu import library
from quire.runner.model_runner import LaunchedStep
from tests.forks import spawn_rank
from tests.http_tools import wait_until
from tests.local_directory import LocalDirectory, LocalStore
from tests.oracle import VOCAB, save_checkpoint
from tests.test_kv_pool import PoolNode
from tests.test_kv_prefill import Prefill
from tests.test_models_deepseek import save_with_mtp
from tests.test_models_eagle import eagle3_tensors, eagle_tensors, write
from tests.test_models_families import DETERMINED
from tests.test_models_hybrid import ENGINES
from tests.test_models_mxfp4 import packed_folder

CONTEXT = 112
"""Tokens of the longest request. The smallest pools hold hardly more, so that requests preempt one another."""

REQUESTS = 16
"""Prompts of one seed; each has one to three choices."""

LAYERS = ["sliding_attention", "full_attention", "sliding_attention"]
SHARED_KEYS = {**DETERMINED["gemma4_text-shared"], "sliding_window": 40}
GROWING = {
    "rope_type": "yarn",
    "rope_theta": 5000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 32,
    "llama_4_scaling_beta": 0.5,
}
MODELS: dict[str, Callable[[Path], object]] = {
    "qwen3": lambda folder: save_checkpoint(folder, "qwen3", dtype=torch.bfloat16, num_hidden_layers=2),
    "llama": lambda folder: save_checkpoint(folder, "llama", num_hidden_layers=7),
    "window": lambda folder: save_checkpoint(
        folder, "mistral", dtype=torch.bfloat16, num_hidden_layers=2, sliding_window=40
    ),
    "some windows": lambda folder: save_checkpoint(
        folder, "qwen2", use_sliding_window=True, sliding_window=40, max_window_layers=2
    ),
    "windows, norms after": lambda folder: save_checkpoint(
        folder, "exaone4", dtype=torch.bfloat16, sliding_window=40, layer_types=LAYERS
    ),
    "growing queries": lambda folder: save_checkpoint(
        folder, "ministral3", dtype=torch.bfloat16, num_hidden_layers=2, rope_parameters=GROWING
    ),
    "experts": lambda folder: save_checkpoint(folder, "qwen3_moe", dtype=torch.bfloat16, num_hidden_layers=2),
    "latent": lambda folder: save_with_mtp(folder, q_lora_rank=32, v_head_dim=16),  # sizes that int4 divides
    "sparse": lambda folder: save_with_mtp(folder, "deepseek_v32", q_lora_rank=32, v_head_dim=16, index_topk=40),
    "mxfp4": lambda folder: packed_folder(
        folder, dtype=torch.bfloat16, num_hidden_layers=2, sliding_window=40, layer_types=LAYERS[:2]
    ),
    "shared keys": lambda folder: save_checkpoint(folder, "gemma4_text", dtype=torch.bfloat16, **SHARED_KEYS),
}
RECURRENT: dict[str, Callable[[Path], object]] = {
    "convolutions": lambda folder: save_checkpoint(folder, "lfm2_moe", dtype=torch.bfloat16),
    "states": lambda folder: save_checkpoint(
        folder, "nemotron_h", dtype=torch.bfloat16, moe_latent_size=32, mamba_head_dim=16
    ),
    "delta": lambda folder: save_checkpoint(folder, "qwen3_next", dtype=torch.bfloat16),
    "delta, latent": lambda folder: save_checkpoint(
        folder, "kimi_linear", dtype=torch.bfloat16, v_head_dim=16, **ENGINES["kimi_linear"]
    ),
}
MODELS |= RECURRENT
DRAFT_MODELS: dict[str, Callable[[Path], object]] = {
    "draft_model": lambda folder: save_checkpoint(folder, "llama", num_hidden_layers=1),
    "eagle": lambda folder: write(folder, eagle_tensors()),
    "eagle3": lambda folder: write(folder, eagle3_tensors(), draft_vocab_size=len(eagle3_tensors()["lm_head.weight"])),
}

NUMBERS: dict[str, list[dict[str, Any]]] = {
    "weights": [{}, {}, {"quantization": "int8"}, {"quantization": "int4"}],
    "cache": [{}, {}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}],
    "kernels": [{}, {}, {}, {}, *({"cpu_kernels": name} for name in (*library.usable(), "torch"))],
    "types": [{}, {}, {}, {"dtype": "float16"}, {"dtype": "float32"}],
}
"""What bits may depend on: the plain engine has the same."""

SWITCHES: dict[str, list[dict[str, Any]]] = {
    "blocks": [{"block_size": 16}, {"block_size": 16}, {"block_size": 32}],
    "prefixes": [{"prefix_cache": "radix"}, {"prefix_cache": "hash"}, {"prefix_cache": "off"}],
    "chunks": [{"max_num_batched_tokens": tokens} for tokens in (24, 40, 100, 2048)],
    "parts": [{}, {"max_num_partial_prefills": 2}, {"long_prefill_token_threshold": 20}],
    "seats": [{"max_num_seqs": seats} for seats in (3, 8, 8)],
    "order": [{}, {"scheduling_policy": "priority"}],
    "overlap": [{"async_scheduling": False}, {"async_scheduling": True}],
    "pace": [{}, {}, {"target_itl_ms": 1.0}],
    "threads": [{"threads": 1}, {"threads": 1}, {"threads": 3}],
    "tiers": [{}, {"host_kv_memory": "256KiB"}, {"host_kv_memory": "4MiB"}, {"host_kv_memory": "4MiB"}],
    "disk": [{}, {}, {}, {"disk_kv_memory": "256KiB"}, {"disk_kv_memory": "64MiB"}],
    "neighbours": [*[{}] * 8, {"prefill_min_tokens": 16, "kv_role": "decode"}, {"kv_directory": "redis://nowhere"}],
    "ranks": [
        *[{}] * 8,
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"pipeline_parallel_size": 2},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 3},
        {"tensor_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 3},
        {"data_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 3},
    ],
    "copies": [{}, {}, {"num_redundant_experts": 2}],
}
"""What must change no bit."""

WITH_EXPERTS = ("experts", "latent", "sparse", "mxfp4", *RECURRENT)
WITHOUT_TREES = ("sparse",)
NO_DRAFTERS = ("mxfp4", "shared keys", *RECURRENT)
WITHOUT_STAGES = ("shared keys",)
FOR_TWO_RANKS = ("delta",)  # two key heads

POOLS = (0, 0, 0, 2, 30)
"""Blocks beyond those that the longest request needs."""

OWNERS = (1, 1, 3)
"""Tenants, who share no cached prefixes and take turns."""

DRAFTS: list[tuple[dict[str, Any], str]] = [
    *[({}, "")] * 4,
    *[({"method": "ngram", "prompt_lookup_min": 1}, "")] * 2,
    ({"method": "draft_model", "model": "itself"}, ""),
    ({"method": "draft_model", "model": "itself", "tree_width": 2, "num_speculative_tokens": 6}, ""),
    ({"method": "draft_model", "model": "draft_model"}, ""),
    ({"method": "eagle", "model": "eagle"}, "llama"),
    ({"method": "eagle3", "model": "eagle3", "tree_width": 2, "num_speculative_tokens": 6}, "llama"),
    ({"method": "mtp", "num_speculative_tokens": 2}, "latent"),
    ({"method": "mtp", "num_speculative_tokens": 2}, "sparse"),
]
"""How tokens are drafted, and the one model that it is for, if it is."""

MISHAPS = ("clear", "spoil", "memory", "fail", "fail", "interrupt")
"""What happens before or in a step: the prefix cache is emptied; a byte of each block of the host tier changes; memory
runs out while the step is planned; it fails; somebody presses Ctrl-C."""

SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "top_k": 20, "presence_penalty": 0.5},
    {"temperature": 1.2, "allowed_token_ids": list(range(40, 60))},
    {"temperature": 0.8, "logit_bias": {5: 2.0, 9: -3.0}, "bad_words": ["A", "BC"]},
]

FORMS: list[dict[str, Any]] = [
    {"regex": "([a-m]|[0-9.]{2}){2,9}!"},
    {"choice": ["def.", "define", "d"]},
    {"grammar": 'start: ("x" | "y." | "(" start ")")+'},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y."]}}}},
]
"""Of structured outputs."""

POOLED = [PoolingParams("last"), PoolingParams("mean"), PoolingParams("labels", (5, 9, 77))]


def fit(switches: dict[str, Any], model: str) -> None:
    """Leave out tiers where no prefix is cached, and experts' ranks where there are no experts."""
    left_out: list[str] = []
    if model not in WITH_EXPERTS:
        left_out += ["enable_expert_parallel", "data_parallel_size", "num_redundant_experts"]
    if "enable_expert_parallel" not in switches:
        left_out += ["num_redundant_experts"]
    if switches["prefix_cache"] == "off":
        left_out += ["host_kv_memory", "kv_role", "prefill_min_tokens", "kv_directory"]
    if "host_kv_memory" not in switches or "host_kv_memory" in left_out:
        left_out += ["disk_kv_memory"]
    if model in WITHOUT_STAGES:
        left_out += ["pipeline_parallel_size"]
    if model in FOR_TWO_RANKS and switches.get("tensor_parallel_size") == 4:
        switches["tensor_parallel_size"] = 2
    for name in left_out:
        switches.pop(name, None)
    if "kv_directory" in switches:
        switches["kv_role"] = "decode"


class Interrupted(KeyboardInterrupt):
    """A mishap's Ctrl-C, which is told apart from the user's."""


@dataclass
class Ask:
    """One request: its prompt, how it is sampled, the step at which it comes, and the one at which it is aborted."""

    prompt: list[int]
    params: SamplingParams
    arrives: int
    aborted: int | None = None
    owner: str = ""
    pooling: PoolingParams | None = None


@dataclass
class Case:
    """What a seed draws."""

    seed: int
    model: str
    numbers: dict[str, Any]
    switches: dict[str, Any]
    asks: list[Ask]
    mishaps: dict[int, str] = field(default_factory=dict)  # by step
    loads: bool = False  # whatever is in a tier is loaded, even if it were faster to compute it


class Fuzz:
    """Checkpoints, plain engines and counts of many seeds.

    Args:
        folder: where checkpoints are made as they are needed.

    Attributes:
        seen: how often things happened that a run is to meet: preemptions, hits, holds, drafts, ...
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: Counter[str] = Counter()
        self._plain: dict[str, LLM] = {}

    def close(self) -> None:
        for llm in self._plain.values():
            llm.close()

    # -- drawing -------------------------------------------------------------------------------------------

    def draw(self, seed: int) -> Case:
        """The case of a seed: always the same one."""

        def luck(what: str) -> random.Random:
            return random.Random(f"{seed}/{what}")

        model = luck("model").choice(list(MODELS))
        numbers = merged({name: luck(name).choice(each) for name, each in NUMBERS.items()})
        switches = merged({name: luck(name).choice(each) for name, each in SWITCHES.items()})
        spec, _ = luck("drafts").choice([each for each in DRAFTS if each[1] in ("", model)])
        refused = "tree_width" in spec and model in WITHOUT_TREES
        if spec and not refused and not (spec.get("model") == "itself" and model in NO_DRAFTERS):
            adaptive = luck("adaptive").random() < 0.3
            switches["speculative_config"] = {"adaptive": adaptive, **spec, **self._draft_model(spec, model)}
        fit(switches, model)
        switches["num_kv_blocks"] = 1 + CONTEXT // switches["block_size"] + 1 + luck("pool").choice(POOLS)
        asks = draw_asks(luck("requests"), switches.get("scheduling_policy") == "priority")
        owners = luck("owners")
        tenants = [f"tenant {number}" for number in range(owners.choice(OWNERS))]
        for ask in asks if len(tenants) > 1 else ():
            ask.owner = owners.choice(tenants)
        pooled = luck("pooled")
        for ask in asks:
            if pooled.random() < 0.1:
                ask.pooling = pooled.choice(POOLED)
                ask.params = SamplingParams(
                    max_tokens=0, priority=ask.params.priority, cache_salt=ask.params.cache_salt
                )
        steps = luck("mishaps")
        mishaps = {steps.randrange(60): steps.choice(MISHAPS) for _ in range(steps.choice([0, 0, 4]))}
        return Case(seed, model, numbers, switches, asks, mishaps, luck("loads").random() < 0.5)

    def _draft_model(self, spec: dict[str, Any], model: str) -> dict[str, Any]:
        name = spec.get("model")
        return {} if name is None else {"model": self.checkpoint(model if name == "itself" else name)}

    def checkpoint(self, name: str) -> str:
        """A folder with the model of this name, and with a tokenizer."""
        folder = self.folder / name
        if not folder.exists():
            folder.mkdir()
            (MODELS | DRAFT_MODELS)[name](folder)
            (folder / "tokenizer.json").write_text(letters().to_str())
            (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
        return str(folder)

    # -- running -------------------------------------------------------------------------------------------

    def check(self, seed: int) -> None:
        """Run a seed, and compare.

        Raises:
            AssertionError: some request got something else; the message has the command that repeats it.
        """
        case = self.draw(seed)
        try:
            for ask, output, aborted in self.run(case):
                compare(output, self.alone(case, ask), aborted)
        except Exception as error:
            raise AssertionError(
                f"{error}\nrepeat it with: python -m tests.fuzz_engine {seed}\n"
                f"  model {case.model}, {case.numbers | case.switches}, {len(case.asks)} requests"
            ) from error

    def run(self, case: Case) -> list[tuple[Ask, RequestOutput, bool]]:
        """All requests of a case: (request, what it got, whether it was aborted in time). They come together; where
        there is a disk, the second half of them come to another engine, which finds what the first one has left."""
        half = len(case.asks) // 2
        lives = [case.asks[:half], case.asks[half:]] if "disk_kv_memory" in case.switches else [case.asks]
        always = mock.patch.multiple(Costs, prefers_load=lambda *_: True, worth_saving=lambda *_: True)
        with always if case.loads else contextlib.nullcontext(), self._beside(case) as more:
            return [each for asks in lives for each in self._live(case, asks, {**case.switches, **more})]

    def _live(self, case: Case, asked: list[Ask], options: dict[str, Any]) -> list[tuple[Ask, RequestOutput, bool]]:
        """One engine, and what these requests get there."""
        llm = self._engine(case, **options)
        outputs: dict[str, RequestOutput] = {}
        asks: dict[str, Ask] = {}
        aborted: set[str] = set()
        todo, step = sorted(asked, key=lambda ask: ask.arrives), 0
        first = todo[0].arrives

        def take(changed: list[RequestOutput]) -> None:
            for output in changed:
                assert output.request_id not in outputs, "an output came after its end"
                if output.finished:
                    outputs[output.request_id] = output

        while todo or not llm.idle:
            while todo and todo[0].arrives - first <= step:
                ask = todo.pop(0)
                asks[submit(llm, ask).request_id] = ask
            for name, ask in asks.items():
                if ask.aborted is not None and ask.arrives - first + ask.aborted == step and name not in outputs:
                    aborted.add(name)
                    take(llm.abort(name))
            take(self._step(llm, case.mishaps.get(step, "")))
            self._look(llm)
            step += 1
            assert step < 5000, "it does not end"
        self._count(llm, asked, len(aborted))
        llm.close()
        assert outputs.keys() == asks.keys(), "some request has not ended"
        return [(ask, outputs[name], name in aborted) for name, ask in asks.items()]

    def _step(self, llm: LLM, mishap: str) -> list[RequestOutput]:
        """The next step, and what goes wrong in it; what changed."""
        scheduler, host, wait = llm._engine.scheduler, llm._engine.tiers.host, LaunchedStep.wait
        schedulers = scheduler.schedulers if isinstance(scheduler, Lockstep) else [scheduler]

        def failing(step: LaunchedStep) -> Any:
            """Who is alone in a step would be taken for the one that makes it fail."""
            computed = [request for each in schedulers for request in each.in_steps()]
            several = sum(request.status is not Status.FINISHED for request in computed) > 1
            if mishap == "interrupt" or (several and not scheduler.trials.on):
                self.seen[mishap] += 1
                raise Interrupted if mishap == "interrupt" else ValueError("bad luck")
            return wait(step)

        with contextlib.ExitStack() as stack:
            stack.enter_context(contextlib.suppress(Interrupted))  # from a thread it may come a step later
            if mishap == "clear":
                for kv in scheduler.kvs:
                    kv.cache.clear()
            elif mishap == "spoil" and host is not None:
                torch.frombuffer(host.region.memory, dtype=torch.uint8)[::200] ^= 1
            elif mishap == "memory":
                stack.enter_context(mock.patch.object(Scheduler, "_plan", side_effect=MemoryError))
                stack.enter_context(contextlib.suppress(MemoryError))
            elif mishap in ("fail", "interrupt"):
                stack.enter_context(mock.patch.object(LaunchedStep, "wait", failing))
            return llm.step()
        return []

    @contextlib.contextmanager
    def _beside(self, case: Case) -> Iterator[dict[str, Any]]:
        """The folder and the neighbour that a case's engines have; their further options."""
        kept = ("speculative_config", "block_size", "max_num_batched_tokens", "num_kv_blocks", "prefix_cache")
        own = {name: case.switches[name] for name in kept if name in case.switches}
        own |= {"model": self.checkpoint(case.model), "max_model_len": CONTEXT, "threads": 1, **case.numbers}
        key = self.folder / "key"
        key.touch(0o600)
        key.write_text("a secret of this cluster")
        own["cluster_key_file"] = str(key)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            more = {"disk_kv_path": folder} if "disk_kv_memory" in case.switches else {}
            if "kv_directory" in case.switches:
                yield from self._pool(case, own | {"kv_directory": case.switches["kv_directory"]}, more)
            elif "kv_role" in case.switches:
                prefill = Prefill(**own)
                yield {**more, "cluster_key_file": str(key), "prefill_url": prefill.address}
                self.seen["computed elsewhere"] += prefill.exported
                prefill.close()
            else:
                yield more

    def _pool(self, case: Case, own: dict[str, Any], more: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Another node, which has had half of the prompts before."""
        store = LocalStore()
        with mock.patch("quire.kv.directory.open_directory", lambda url, cluster: LocalDirectory(store, cluster)):
            node = PoolNode(**own)
            for ask in case.asks[::2]:
                if len(ask.prompt) < CONTEXT - 8:
                    salt = ask.params.cache_salt or ""
                    node.ask(ask.prompt, scope=f"{ask.owner}/{salt}" if ask.owner else salt)
            wait_until(lambda: node.agent.ready and not node.agent._changed)
            yield {**more, "cluster_key_file": own["cluster_key_file"]}
            node.close()

    def alone(self, case: Case, ask: Ask) -> RequestOutput:
        """What this request gets when nothing else is there, in a plain engine of the same numbers."""
        key = f"{case.model} {sorted(case.numbers.items())}"
        if key not in self._plain:
            self._plain[key] = self._engine(case, prefix_cache="off", max_num_seqs=1, num_kv_blocks=CONTEXT // 16 + 2)
        llm = self._plain[key]
        output = submit(llm, ask)
        while not llm.idle:
            llm.step()
        return output

    def _engine(self, case: Case, **options: Any) -> LLM:
        return LLM(
            self.checkpoint(case.model),
            max_model_len=CONTEXT,
            check_invariants=True,
            **case.numbers,
            **{"threads": 1, **options},
        )

    def _look(self, llm: LLM) -> None:
        """Count what only shows while it runs."""
        scheduler = llm._engine.scheduler
        self.seen["awaiting"] += any(each.status is Status.AWAITING for each in scheduler.requests.values())
        self.seen["partial prefill"] += any(each.num_remaining > 1 for each in scheduler.running)

    def _count(self, llm: LLM, asks: list[Ask], aborted: int) -> None:
        """Count what a run has met, and see that it gave back all it held."""
        while not llm._engine.idle:  # the last request was aborted while a step of it was in flight
            llm.step()
        stats = llm.stats
        for kv in llm._engine.scheduler.kvs:
            assert kv.num_available == kv.num_usable and not kv.num_deferred, "blocks are left over"
        self.seen["requests"] += sum(ask.params.n for ask in asks)
        self.seen["aborted"] += aborted
        self.seen["several owners"] += len({ask.owner for ask in asks}) > 1
        self.seen["pooled"] += sum(ask.pooling is not None for ask in asks)
        self.seen["preempted"] += stats.preemptions
        self.seen["cached tokens"] += stats.cached_tokens
        for tier, counts in stats.kv_tiers.items():
            self.seen[f"loaded from {tier}"] += counts.get("loaded", 0)
        self.seen["drafted"] += stats.drafted
        self.seen["accepted"] += stats.accepted


def merged(drawn: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The options of all dimensions."""
    return {name: value for options in drawn.values() for name, value in options.items()}


def letters() -> tokenizers.Tokenizer:
    """Tokens 0 to 94 are the printable characters of ASCII; those after them the first of these, and a full stop."""
    texts = [chr(32 + token) if token < 95 else chr(32 + token - 95) + "." for token in range(VOCAB)]
    model = tokenizers.models.WordLevel({text: token for token, text in enumerate(texts)}, unk_token=" ")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    return tokenizer


def submit(llm: LLM, ask: Ask) -> RequestOutput:
    """Queue a request; its output, which grows."""
    prepared = llm._frontend.prepare(ask.prompt, ask.params)
    if ask.pooling is not None:
        prepared = llm._frontend.pooled(prepared, ask.pooling)
    return llm._frontend.submit(prepared, tenant=ask.owner)


def draw_asks(luck: random.Random, priorities: bool) -> list[Ask]:
    """Requests of which most begin like another one, in some bursts."""
    texts = [luck.choices(range(3, VOCAB), k=CONTEXT) for _ in range(3)]
    asks, step = [], 0
    for index in range(REQUESTS):
        length = luck.choice([1, 5, 14, 16, 30, 31, 46, 62, 78])
        prompt = luck.choice(texts)[:length]
        if luck.random() < 0.7:
            prompt = [*prompt[:-1], luck.randrange(3, VOCAB)]
        step += luck.choice([0, 0, 0, 1, 5])
        aborted = luck.randrange(20) if luck.random() < 0.15 else None
        asks.append(Ask(prompt, draw_params(luck, index, CONTEXT - length, priorities), step, aborted))
    return asks


def draw_params(luck: random.Random, index: int, room: int, priorities: bool) -> SamplingParams:
    params = SamplingParams(
        **luck.choice(SAMPLING),
        n=luck.choice([1, 1, 1, 2, 3]),
        seed=luck.randrange(4) * 100 + index % 3,
        max_tokens=(most := min(room, luck.choice([1, 4, 12, 20, 34]))),
        logprobs=luck.choice([0, 0, 2]),
        prompt_logprobs=luck.choice([None, None, None, None, 0, 2]),
        stop=luck.choice([None, None, [".C", "m"]]),
        stop_token_ids=luck.choice([None, None, list(range(20, 28))]),
        ignore_eos=luck.random() < 0.5,
        priority=luck.randrange(-1, 2) if priorities else 0,
        cache_salt=luck.choice([None, None, None, "salt"]),
        speculate=luck.random() < 0.9,
        min_tokens=min(most, luck.choice([0, 0, 3, 9])),
        include_stop_str_in_output=luck.random() < 0.3,
    )
    if luck.random() < 0.15:
        return replace(
            params, structured_outputs=luck.choice(FORMS), ignore_eos=False, allowed_token_ids=None, min_tokens=0
        )
    return params


def compare(output: RequestOutput, alone: RequestOutput, aborted: bool) -> None:
    """Everything that a request got is what it gets alone; of one that was aborted, as far as it came.

    Raises:
        AssertionError: saying what differs.
    """
    if not aborted:
        assert output.prompt_logprobs == alone.prompt_logprobs, "log-probabilities of the prompt differ"
        assert output.pooled == alone.pooled, f"{len(output.prompt_token_ids)} tokens are pooled to something else"
    for choice, wanted in zip(output.outputs, alone.outputs, strict=True):
        made = len(choice.token_ids)
        where = f"prompt of {len(output.prompt_token_ids)} tokens, choice {choice.index}"
        assert choice.error is None, f"{where}: {choice.error}"
        assert choice.token_ids == wanted.token_ids[:made], f"{where}: {choice.token_ids}, not {wanted.token_ids}"
        assert choice.logprobs == (wanted.logprobs and wanted.logprobs[:made]), f"{where}: log-probabilities differ"
        if choice.finish_reason == "abort":
            cut = isinstance(wanted.stop_reason, str) and choice.text.startswith(
                wanted.text
            )  # what may begin a stop string
            assert aborted and (cut or wanted.text.startswith(choice.text)), (
                f"{where}: {choice.text!r}, {wanted.text!r}"
            )
            continue
        for name in ("text", "token_ids", "finish_reason", "stop_reason"):
            own, other = getattr(choice, name), getattr(wanted, name)
            assert own == other, f"{where}: {name} is {own!r}, not {other!r}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Random engines against one request at a time.")
    parser.add_argument("first", type=int, help="the seed")
    parser.add_argument("end", type=int, nargs="?", help="run all seeds below this one, too")
    given = parser.parse_args(arguments)
    if given.end is not None and given.end <= given.first:
        parser.error(f"the second number is {given.end}; allowed: above the first, which is {given.first}")
    failures = 0
    logging.disable(logging.ERROR)  # of steps that fail
    with tempfile.TemporaryDirectory() as folder, mock.patch("quire.child.spawn_beside", spawn_rank):
        fuzz = Fuzz(Path(folder))
        if given.end is None:
            case = fuzz.draw(given.first)
            print(f"model {case.model}, {case.numbers | case.switches}, loads {case.loads}, mishaps {case.mishaps}")
            for ask in case.asks:
                what = ask.pooling or ask.params
                print(f"step {ask.arrives}: {len(ask.prompt)} tokens, aborted after {ask.aborted}, {what}")
        for seed in range(given.first, given.end or given.first + 1):
            try:
                fuzz.check(seed)
            except AssertionError as error:
                failures += 1
                print(f"seed {seed}: {error}", flush=True)
        fuzz.close()
    print(f"{failures} seeds failed; seen: {dict(fuzz.seen)}")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
