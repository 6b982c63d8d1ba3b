"""A stage of a pipeline: each rank has some of the layers, and steps follow one another through them.

All stages move at once. In the *slot* of plan k, stage s computes its layers for plan k - s: so there are as many steps
on their way as there are stages. Then each brings what it has made, in one collective: a stage's rows go to the next
one, and the last one's, which are through all layers, to all of them. So all ranks have what a step has come to, and
sample all of it, as ranks do that share each layer: with a part of the head each.

A request's next token waits until its last one is known, as many slots later as there are stages; the scheduler deals
the requests that decode out over the steps. So where a step enters, all ranks know its requests' tokens, and what the
model made of them: what drafts is computed whole on each, which so have the same drafts.

What a plan says of blocks is done where its step enters, on all stages: blocks that it takes are in no step on its way,
and those that it reads are of steps that are through. Its block tables stay as they were then.
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
from quire.kv.host import HostTier
from quire.models.model import AuxHiddenStates, Model, stage_of
from quire.ops import KVCache, RaggedBatch
from quire.runner.device import Mark
from quire.runner.drafter import Drafter
from quire.runner.host_forward import Forwarded
from quire.runner.model_runner import IntArray, LaunchedStep, ModelRunner, Part, branches_of, check_complete
from quire.runner.proposer import Drafts, Speculation

if TYPE_CHECKING:
    from quire.grammar.grammars import Grammars


class PipelinedStep(LaunchedStep):
    """A step on its way; it may be waited for when it is through.

    Args:
        spans: the plan's, with their drafts. drafts: by request.

    Attributes:
        rows: of the block tables, one a span.
        row_starts: first row of each span, and one entry more.
        batches: what the layers are given, a KV group each; none where there are no spans.
        aux: what enters the layers of which features for drafts are made.
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
        """It is through."""
        self.parts.append(part)
        self._end = self.settled = end


class PipelineRunner(ModelRunner):
    """See above. `launch` is the slot of a plan; where none follows, `drain` is a slot without one.

    Attributes:
        busy: seconds that each stage has computed since the start: its layers, its part of the head, and tokens.
        seconds: of all slots.
    """

    def __init__(
        self,
        model: Model,
        kv: Sequence[KVCache],
        logit_rows: int,
        threads: int,
        speculation: Speculation | None = None,
        host: HostTier | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        super().__init__(
            model, kv, logit_rows, threads, speculation=speculation, halves=False, host=host, grammars=grammars
        )
        self._pipe = model.ranks
        self._stage, self._stages = self._pipe.rank // model.stage.size, model.stages
        self._aux_layers = speculation.aux_layers if speculation else ()
        self.busy, self.seconds = [0.0] * self._stages, 0.0
        self._sampling = 0.0  # seconds in the last slot, of which the others have not been told yet

    def _forget(self) -> None:
        super()._forget()
        self._flow: deque[PipelinedStep | None] = deque()  # the newest first: stage s computes what is at index s
        self._entering = self._hidden = torch.empty(
            0
        )  # x and residual of this stage's next step; of one that is through

    def launch(self, plan: StepPlan) -> PipelinedStep:
        """See `ModelRunner.launch`: the plan's step enters the pipeline, and all others go on by a stage."""
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
        """The plan's step, with its drafts."""
        begin, spans = self.device.mark(), plan.spans
        drafts: Mapping[int, Drafts] = {}
        bad_loads, loading = self._move_blocks(plan)
        bad_loads = self._bad_for_any(plan, bad_loads)
        self._take_in(plan)
        if plan.expert_loads:
            self._tell_loads()
        if isinstance(self._drafter, Drafter) and self._drafter.following:
            spans, drafts = self._drafter.resolve(spans)
        rows = np.array([self._requests[span.request].row for span in spans], np.int64)
        step = PipelinedStep(plan, spans, drafts, rows, begin, self.device.mark())
        step.bad_loads, step.loading, step.aux = bad_loads, loading, AuxHiddenStates(self._aux_layers)
        if spans:
            step.batches = self._forward.batches(spans, rows, step.row_starts, branches_of(spans, drafts))
        return step

    def _take_in_ends(self, plan: StepPlan) -> None:
        """Steps before it may still be on their way, of requests that have ended: see `_sample_all`."""

    def _tell_loads(self) -> None:
        """To all stages, how many tokens the experts of each have got."""
        model, own = self.model, self.model.expert_layers
        for index in model.expert_loads:
            brings = index in own and model.stage.rank == 0
            parts = self._pipe.exchange([own[index].load] if brings else [], index)
            if index not in own:
                model.loads_elsewhere[index] = torch.cat(parts).view(torch.int64)

    def drain(self) -> None:
        """A slot without a plan: what is on its way goes on by a stage. Raises what `launch` does.

        After a slot that failed here there is nothing on its way: what entered may not have come to this stage, and the
        first rank, which asked for this slot before it knew, gives all of it up.
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
            self._pipe.lose(error.rank)  # the others wait for this one, which waited for that one
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
        """This stage's layers of a step: x and residual, or what the last norm makes of them."""
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
        """All stages' rows to those who go on with them, and how long each has computed.

        Ranks that share layers have the same rows; the first of them brings them.
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
        """To all stages, what has entered this layer in the step that its stage has computed."""
        stage = stage_of(layer, self._stages, self.model.config.num_layers)
        step = self._flow[stage] if stage < len(self._flow) else None
        if step is None or not step.batches:
            return
        brings = stage == self._stage and self.model.stage.rank == 0
        parts = self._pipe.exchange([step.aux.taken[layer]] if brings else [], layer)
        step.aux.taken[layer] = torch.cat(parts).view(self.model.dtype).view(step.row_starts[-1], -1)

    def _sample_all(self, step: PipelinedStep) -> None:
        """What follows the forward pass of a step that is through all layers, on every stage."""
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
