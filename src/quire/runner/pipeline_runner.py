"""Pipeline parallelism: each stage has some of the layers, and steps pass through the stages one after the other.

All stages advance together. In the *slot* of plan k, stage s computes its layers for plan k - s, so the number of steps
in the pipeline is that of the stages. Then one collective exchanges the results: a stage's rows go to the next stage,
and the last stage's, which have passed all layers, to all stages. So all ranks sample every step, with a shard of the
head each, like ranks that share each layer.

A request's next token is computed when its last one is known, which takes as many slots as there are stages; the
scheduler distributes decoding requests over the steps. So when a step enters the pipeline, all ranks know its requests'
tokens and hidden states. The draft model is replicated on every rank, and drafts are the same on all of them.

All stages apply a plan's changes of blocks when its step enters: blocks that it allocates are in no step in the
pipeline, and blocks that it reads belong to steps that are through. The step keeps its block tables of that time.
"""

from __future__ import annotations

import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.core.step import Span, StepPlan
from quire.errors import RankLostError
from quire.grammar.grammars import Grammars
from quire.models.model import AuxHiddenStates, Model, stage_of
from quire.ops import KVCache, RaggedBatch
from quire.runner.device import Mark
from quire.runner.drafter import Drafter
from quire.runner.drafts import Drafts
from quire.runner.host_forward import Forwarded
from quire.runner.model_runner import IntArray, LaunchedStep, ModelRunner, Part, branches_of, check_complete
from quire.runner.proposer import Speculation

if TYPE_CHECKING:  # there may be no tiers
    from quire.kv.mover import Mover


class PipelinedStep(LaunchedStep):
    """A step in the pipeline. `wait` may be called once it is through.

    Args:
        spans: the plan's, with drafts filled in. drafts: by request.

    Attributes:
        rows: the row in the block tables of each span's request.
        row_starts: first row of each span, and the end of the last one.
        batches: the layers' input, one per KV group; empty without spans.
        aux: inputs of the layers that provide features for drafts.
    """

    def __init__(
        self,
        plan: StepPlan,
        spans: list[Span],
        drafts: Mapping[int, Drafts],
        rows: IntArray,
        begin: Mark,
        drafted: Mark,
    ) -> None:
        super().__init__(plan, [], begin, drafted, drafted)
        self.plan, self.spans, self.drafts, self.rows = plan, spans, drafts, rows
        self.row_starts: IntArray = np.cumsum([0, *(len(span.tokens) for span in spans)])
        self.batches: list[RaggedBatch] = []
        self.aux = AuxHiddenStates(())

    def ends(self, part: Part, end: Mark) -> None:
        """It has passed through all stages."""
        self.parts.append(part)
        self._end = self.settled = end


class PipelineRunner(ModelRunner):
    """See above. `launch` is the slot of a plan; if no plan follows, `drain` is a slot without one.

    Attributes:
        busy: seconds that each stage has computed since the start: its layers, its shard of the head, and sampling.
        seconds: total duration of all slots.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[KVCache],
        logit_rows: int,
        threads: int,
        speculation: Speculation | None = None,
        host: Mover | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(
            model, kv, logit_rows, threads, speculation=speculation, halves=False, host=host, grammars=grammars
        )
        self._pipe = model.ranks
        self._stage, self._stages = self._pipe.rank // model.stage.size, model.stages
        self._aux_layers = speculation.aux_layers if speculation else ()
        self.busy, self.seconds = [0.0] * self._stages, 0.0
        self._sampling = 0.0  # seconds in the last slot, not reported to the others yet

    def _forget(self) -> None:
        super()._forget()
        self._flow: deque[PipelinedStep | None] = deque()  # newest first: stage s computes index s
        # The input (x and residual) of this stage's next step; the hidden states of the step that is through.
        self._entering = self._hidden = torch.empty(0)

    def launch(self, plan: StepPlan) -> PipelinedStep:
        """See `ModelRunner.launch`: the plan's step enters the pipeline, and all others advance by a stage."""
        next_number, self._next_number = self._next_number, None
        try:
            if plan.number != next_number:
                check_complete(plan, next_number)
                for group in self.model.rank_groups:
                    group.resume(plan.number)
                self._forget()
            step = self._entered(plan)
            self._slot(step)
        except BaseException as error:
            self._give_up(plan.number, error)
            raise
        self._next_number = plan.number + 1
        return step

    @torch.inference_mode()
    def _entered(self, plan: StepPlan) -> PipelinedStep:
        """Make the plan's step, with its drafts."""
        begin, spans = self.device.mark(), plan.spans
        drafts: Mapping[int, Drafts] = {}
        moved = self._move_blocks(plan)
        self._take_in(plan)
        if plan.expert_loads:
            self._tell_loads()
        if isinstance(self._drafter, Drafter) and self._drafter.following:
            spans, drafts = self._drafter.resolve(spans)
        rows = np.array([self._requests[span.request].row for span in spans], np.int64)
        step = PipelinedStep(plan, spans, drafts, rows, begin, self.device.mark())
        step.moved, step.aux = moved, AuxHiddenStates(self._aux_layers)
        if spans:
            step.batches = self._forward.batches(spans, rows, step.row_starts, branches_of(spans, drafts))
        return step

    def _take_in_ends(self, plan: StepPlan) -> None:
        """Done in `_sample_all`, since earlier steps of ended requests may still be in the pipeline."""

    def _tell_loads(self) -> None:
        """Exchange the experts' token counts among the stages."""
        model, own = self.model, self.model.expert_layers
        for index in model.expert_loads:
            brings = index in own and model.stage.rank == 0
            parts = self._pipe.exchange([own[index].load] if brings else [], index)
            if index not in own:
                model.loads_elsewhere[index] = torch.cat(parts).view(torch.int64)

    def drain(self) -> None:
        """A slot without a plan: all steps in the pipeline advance by a stage. Raises what `launch` does.

        After a slot that failed on this rank, it does nothing: the first rank requested this slot before it knew, and
        gives up all steps in the pipeline.
        """
        next_number, self._next_number = self._next_number, None
        if next_number is None:
            return
        try:
            self._slot(None)
        except BaseException as error:
            self._give_up(next_number - 1, error)
            raise
        self._next_number = next_number

    def _give_up(self, number: int, error: BaseException) -> None:
        if isinstance(error, RankLostError):
            self._pipe.lose(error.rank)  # others wait for this rank, which waited for that one
        for group in self.model.rank_groups:
            group.give_up(number)

    def _slot(self, entering: PipelinedStep | None) -> None:
        with torch.inference_mode(), self.model.kernels.threads(self._threads):
            begin = time.monotonic()
            self.kv[0].pulse[0] += 1
            self._flow.appendleft(entering)
            own = self._flow[self._stage] if len(self._flow) > self._stage else None
            made = [] if own is None else self._through_layers(own)
            self._pass_on(made, time.monotonic() - begin + self._sampling)
            for layer in self._aux_layers:
                self._tell_features(layer)
            through = time.monotonic()
            last = self._flow.pop() if len(self._flow) == self._stages else None
            if last is not None:
                self._sample_all(last)
            end = time.monotonic()
            self._sampling, self.seconds = end - through, self.seconds + end - begin

    def _through_layers(self, own: PipelinedStep) -> list[Tensor]:
        """Compute this stage's layers of a step: returns x and residual, or in the last stage, the normed result."""
        model, batches = self.model, own.batches
        if not batches:
            return []
        x: Tensor | None
        x, residual = self._entering if self._stage else (None, model.embedding(batches[0].token_ids))
        x, residual = model.run_layers(x, residual, batches, self.kv, own.aux)
        if x is None:
            raise RuntimeError("a stage without layers")
        return [model.norm.with_residual(x, residual)[0]] if self._stage == self._stages - 1 else [x, residual]

    def _pass_on(self, made: list[Tensor], seconds: float) -> None:
        """Exchange all stages' rows, and the times that they have computed.

        Ranks of a stage have the same rows; the first of them sends them.
        """
        hidden, dtype, width = self.model.config.layer.hidden_size, self.model.dtype, self.model.stage.size
        rows = [int(step.row_starts[-1]) if step else 0 for step in self._flow]
        own = [] if self._pipe.rank % width else [torch.tensor([seconds], dtype=torch.float64), *made]
        parts = self._pipe.exchange(own, zlib.crc32(repr(rows).encode()))[::width]
        for stage, part in enumerate(parts):
            self.busy[stage] += part[:8].clone().view(torch.float64).item()
        if self._stage:
            self._entering = parts[self._stage - 1][8:].clone().view(dtype).view(2, -1, hidden)
        self._hidden = parts[-1][8:].clone().view(dtype).view(-1, hidden)

    def _tell_features(self, layer: int) -> None:
        """Send all stages this layer's input in the step that its stage has just computed."""
        stage = stage_of(layer, self._stages, self.model.config.num_layers)
        step = self._flow[stage] if stage < len(self._flow) else None
        if step is None or not step.batches:
            return
        brings = stage == self._stage and self.model.stage.rank == 0
        parts = self._pipe.exchange([step.aux.taken[layer]] if brings else [], layer)
        step.aux.taken[layer] = torch.cat(parts).view(self.model.dtype).view(step.row_starts[-1], -1)

    def _sample_all(self, step: PipelinedStep) -> None:
        """Sample a step that has passed all layers, on every stage."""
        hidden = self._hidden
        super()._take_in_ends(step.plan)
        features = step.aux.features() if self._aux_layers and step.batches else hidden
        made = Forwarded(hidden, self.model.kernels.finite_rows(hidden), features)
        step.ends(self._finish(step.spans, step.rows, step.row_starts, made, step.drafts), self.device.mark())
        self._pipe.check(step.digest())
        if self._drafter is not None and self._drafter.following:
            self._unsettled.append(step)
            self._settle()
            step.settled = self.device.mark()
