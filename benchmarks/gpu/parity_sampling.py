"""Parity of sampling: a sampler on the device and one on the reference, with the same requests and logits.

This goes through penalties, bias, masks, filters, noise and log-probabilities as the engine does. Logits are fp32
whatever the model's data type, so there is one such check.
"""

from __future__ import annotations

import math

import msgspec
import torch

from benchmarks.gpu.job import Job
from benchmarks.gpu.parity import Rig
from quire.core.sampling_params import SamplingParams
from quire.core.step import RequestInfo
from quire.ops import Kernels
from quire.runner.device import Device, open_device
from quire.runner.sampler import SampledRow, Sampler

LOGPROB_TOLERANCE = 1e-4
STEPS = 3

PARAMS = (
    SamplingParams(temperature=0.0, logprobs=5),
    SamplingParams(temperature=1.0, logprobs=0),
    SamplingParams(temperature=0.7, top_p=0.95),
    SamplingParams(temperature=1.5, top_k=50, logprobs=3),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.8, min_p=0.02),
    SamplingParams(temperature=1.2, min_p=0.1),
    SamplingParams(temperature=0.8, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.25, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, logit_bias={5: 4.0, 17: -3.0}),
    SamplingParams(temperature=1.0, allowed_token_ids=(3, 9, 27, 81), logprobs=1),
    SamplingParams(temperature=0.0, min_tokens=2),
    SamplingParams(temperature=0.001, top_p=0.999),
    SamplingParams(temperature=100.0, top_p=0.5),
)


def run(job: Job) -> None:
    """Logits from flat to peaked, some of them with equal, masked and broken entries."""
    vocab, rows = (300, 12) if job.rehearse else (151936, 96)
    rig = Rig(job, "fp32")
    wanted = _sampled(Sampler(vocab, Kernels(), Device()), Device(), rows, vocab)
    device = open_device(job.device)
    found = _sampled(Sampler(vocab, rig.kernels, device), device, rows, vocab)
    job.check("sampled tokens that differ", sum(_token(a) != _token(b) for a, b in zip(found, wanted, strict=True)), 0)
    worst = max(_logprob_difference(a, b) for a, b in zip(found, wanted, strict=True))
    job.check("log-probabilities: greatest difference", worst, LOGPROB_TOLERANCE)


@torch.inference_mode()
def _sampled(sampler: Sampler, device: Device, rows: int, vocab: int) -> list[SampledRow]:
    """All steps' rows, one step after the other."""
    with device.active():
        for number in range(rows):
            params = msgspec.structs.replace(PARAMS[number % len(PARAMS)], seed=number).resolved()
            prompt = [(7 * number + offset) % vocab for offset in range(20)]
            sampler.start(RequestInfo(number, params, 0, prompt, stop_token_ids=frozenset({2, 4})))
        answers: list[SampledRow] = []
        for step in range(STEPS):
            logits = _logits(rows, vocab, step).to(device.torch, copy=True)
            answers += sampler.sample(logits, [(number, 20 + step) for number in range(rows)])
    return answers


def _logits(rows: int, vocab: int, step: int) -> torch.Tensor:
    """[rows, vocab] fp32. A row that is not finite ends its request, so there is one in the last step only."""
    generator = torch.Generator().manual_seed(step)
    logits = torch.randn(rows, vocab, generator=generator) * torch.linspace(0.5, 8.0, rows).unsqueeze(1)
    logits[0] = logits[0].round()  # many equals
    logits[1, vocab // 2 :] = -math.inf
    logits[2] = 0.0
    if step == STEPS - 1:
        logits[3, 100] = math.nan
    return logits


def _token(row: SampledRow) -> tuple[int, str | None, list[int]]:
    return row.token, row.error, [] if row.logprobs is None else [*row.logprobs.ids, *row.logprobs.ranks]


def _logprob_difference(a: SampledRow, b: SampledRow) -> float:
    """Infinite where only one has log-probabilities."""
    if a.logprobs is None or b.logprobs is None:
        return 0.0 if a.logprobs is b.logprobs else math.inf
    pairs = zip(a.logprobs.values, b.logprobs.values, strict=True)
    return max((abs(x - y) for x, y in pairs if x != y), default=0.0)
