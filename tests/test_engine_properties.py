"""The invariants of requests and numbers, and resumption (`quire.core.invariants`), under random operations, on a tiny
model behind `LLM`."""

from __future__ import annotations

import functools
import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from quire import LLM, SamplingParams
from tests.oracle import VOCAB, random_prompt, save_checkpoint

LENGTHS = (1, 5, 16, 40, 90, 200)


@functools.cache
def checkpoint() -> str:
    folder = Path(tempfile.mkdtemp(prefix="quire-test-"))
    return str(save_checkpoint(folder, "qwen3", num_hidden_layers=2))


@functools.cache
def reference() -> LLM:
    """An engine that never batches, caches, chunks or preempts."""
    return LLM(checkpoint(), prefix_cache="off", max_num_seqs=1)


def prompt(which: int) -> list[int]:
    """Six lengths, each with two tails behind the same head."""
    ids = random_prompt(LENGTHS[which % len(LENGTHS)])
    return ids if which < len(LENGTHS) else [*ids[:-1], 7]


@functools.cache
def expected(which: int, params_index: int) -> list[tuple[list[int], list[float]]]:
    [output] = reference().generate([prompt(which)], PARAMS[params_index])
    return [reported(choice) for choice in output.outputs]


def reported(choice) -> tuple[list[int], list[float]]:
    entries = choice.logprobs or []
    return choice.token_ids, [entry[token].logprob for token, entry in zip(choice.token_ids, entries, strict=True)]


PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=0, ignore_eos=True),
    SamplingParams(temperature=1.0, max_tokens=14, logprobs=0, seed=3, top_p=0.9),
    SamplingParams(temperature=1.3, max_tokens=6, logprobs=0, seed=4, n=3, frequency_penalty=0.5, prompt_logprobs=0),
    SamplingParams(temperature=0.8, max_tokens=11, logprobs=0, seed=5, allowed_token_ids=[3, 4, 5, 6, 7, 8, 9]),
]


class EngineMachine(RuleBasedStateMachine):
    """Requests come, go and are aborted; whoever stays gets what it would have got alone."""

    @initialize(
        block_size=st.sampled_from([16, 32]),
        blocks=st.integers(0, 12),
        cache=st.sampled_from(["radix", "hash", "off"]),
        budget=st.sampled_from([24, 64, 2048]),
        overlap=st.booleans(),
    )
    def start(self, block_size, blocks, cache, budget, overlap):
        self.llm = LLM(
            checkpoint(),
            block_size=block_size,
            num_kv_blocks=256 // block_size + blocks,
            max_model_len=256,
            prefix_cache=cache,
            max_num_batched_tokens=budget,
            max_num_seqs=8,
            async_scheduling=overlap,
            check_invariants=True,
        )
        self.asked: dict[str, tuple[int, int]] = {}
        self.aborted: set[str] = set()
        self.ends: list[str] = []
        self.outputs = {}

    @rule(which=st.integers(0, 2 * len(LENGTHS) - 1), params=st.integers(0, len(PARAMS) - 1))
    def add(self, which, params):
        request = self.llm.add_request(prompt(which), PARAMS[params])
        self.asked[request] = (which, params)

    @rule(which=st.integers(0, 100))
    def abort(self, which):
        if self.asked:
            request = list(self.asked)[which % len(self.asked)]
            outputs = self.llm.abort(request)
            self.take(outputs)
            self.aborted.update(output.request_id for output in outputs)

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.take(self.llm.step())

    @rule()
    def evict(self):
        self.llm._engine.scheduler.kv.cache.clear()

    def take(self, outputs):
        for output in outputs:
            assert output.request_id not in self.ends, "an output came after its end"
            self.outputs[output.request_id] = output
            if output.finished:
                self.ends.append(output.request_id)

    def teardown(self):
        if not hasattr(self, "llm"):
            return
        for _ in range(3000):
            if self.llm.idle:
                break
            self.take(self.llm.step())
        assert self.llm.idle and sorted(self.ends) == sorted(self.asked)
        kv = self.llm._engine.scheduler.kv
        assert kv.num_available == kv.num_usable, "blocks are left over"
        for request, (which, params) in self.asked.items():
            self.check_output(self.outputs[request], expected(which, params), request in self.aborted)
        self.llm.close()

    def check_output(self, output, wanted, aborted):
        for choice, (tokens, logprobs) in zip(output.outputs, wanted, strict=True):
            own_tokens, own_logprobs = reported(choice)
            assert all(0 <= token < VOCAB for token in own_tokens)
            assert all(math.isfinite(value) for value in own_logprobs)
            if aborted:
                count = len(own_tokens)
                assert (own_tokens, own_logprobs) == (tokens[:count], logprobs[:count])
            else:
                assert (own_tokens, own_logprobs) == (tokens, logprobs)
                assert choice.finish_reason in ("length", "stop")


EngineMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestEngineMachine = EngineMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestEngineMachineForLong(EngineMachine.TestCase):
    """The same, many times more often, and with other examples each time."""

    settings = settings(EngineMachine.TestCase.settings, max_examples=500, stateful_step_count=30, derandomize=False)
