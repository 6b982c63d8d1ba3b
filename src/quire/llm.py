"""`LLM`, the Python interface: an engine in the calling thread, which runs a step when asked to."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from quire import calls
from quire.calls import end_of_prompt, params_list, prompt_list, vllm_names, weakly
from quire.config import EngineConfig, with_options, with_options_text
from quire.core.pooling import PoolingParams
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine
from quire.engine.frontend import Frontend, Prepared, Prompt
from quire.engine.interrupts import Interrupts
from quire.engine.outputs import EmbeddingOutput, RequestOutput
from quire.engine.stats import EngineStats
from quire.engine.thread_guard import ThreadGuard, unless_forked
from quire.errors import ChatTemplateError, ConcurrentUseError, ConfigError, EngineClosedError, RequestError
from quire.models.checkpoint import resolve
from quire.models.model import Model
from quire.models.pooling import PoolingConfig
from quire.runner.memory_plan import MemoryPlan
from quire.runner.start import OnLoad
from quire.text.reply_grammar import ReplyRequest, reply_request
from quire.text.tokenizer import NO_TOKENIZER, RenderedChat, Tokenizer
from quire.text.tokenizer_trial import TokenizerTrial

if TYPE_CHECKING:
    from quire.progress import Progress

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""One message of a chat: `role` and `content`, and what else the model's template reads."""


class LocalEngine:
    """An engine in this process with its frontend, and their properties: the base of `LLM` and `AsyncLLM`."""

    def __init__(self, model: str, preset: str | None, on_load: OnLoad | None, options: Mapping[str, Any]) -> None:
        self._closed, self._process = False, os.getpid()
        self.config = EngineConfig.from_options({"model": model, **options}, preset)
        with _telling(self.config.model, on_load) as told:
            self._engine, self.tokenizer = _load_engine(self.config, told)
        self.memory_plan: MemoryPlan = self._engine.memory_plan
        self.threads: int = self._engine.threads
        lacking = NO_TOKENIZER if self.tokenizer is None else self.tokenizer.no_chats
        self.notes: tuple[str, ...] = (*self._engine.notes, *filter(None, (lacking,)))
        loaded = self._engine.model
        self._frontend = Frontend(
            tokenizer=self.tokenizer,
            vocab_size=loaded.vocab_size,
            max_model_len=self._engine.max_model_len,
            eos_token_ids=loaded.eos_token_ids,
            defaults=self._engine.sampling_defaults,
            add=weakly(self._add),
            abort=weakly(self._abort),
            compile=self._engine.grammars.compile,
            causal=loaded.causal,
        )

    @property
    def default_params(self) -> SamplingParams:
        """The values of unset sampling parameters: from the checkpoint's `generation_config.json`, or neutral ones."""
        return self._frontend.default_params

    @property
    def max_model_len(self) -> int:
        """Longest context, prompt and output together, in tokens."""
        return self._frontend.max_model_len

    @property
    def model(self) -> Model:
        """The loaded model: its shape, data type and sizes."""
        self._check_open()
        return self._engine.model

    @property
    def stats(self) -> EngineStats:
        """Counters since the engine started."""
        return self._engine.stats

    def get_tokenizer(self) -> Tokenizer | None:
        """The checkpoint's tokenizer; None if it has none."""
        return self.tokenizer

    def __repr__(self) -> str:
        usable = not (self._closed or self._is_fork)
        what = f"{self.model.num_parameters:,} parameters, {self.model.precision}" if usable else "closed"
        return f"<{type(self).__name__} {self.config.model!r}: {what}, context {self.max_model_len:,}>"

    @vllm_names
    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> list[int]:
        """Token ids of a chat, rendered with the model's chat template, ending where the assistant's reply begins.

        Args:
            messages: each with `role` and `content`, as in OpenAI's API.
            add_generation_prompt, continue_final_message: see `LLM.chat`.
            template_variables: variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the checkpoint has no chat template, or it does not accept these messages or variables.
        """
        end = end_of_prompt(add_generation_prompt, continue_final_message)
        return self._render(messages, template_variables, end=end).token_ids

    def _render(
        self,
        messages: Sequence[Message],
        template_variables: Mapping[str, Any],
        reply: ReplyRequest | None = None,
        end: Mapping[str, bool] | None = None,
    ) -> RenderedChat:
        if self.tokenizer is None:
            raise ChatTemplateError(
                "this checkpoint has no tokenizer and so no chat template; use generate with token ids"
            )
        chat = self.tokenizer.apply_chat_template(messages, reply=reply, variables=template_variables, **(end or {}))
        for name, why in chat.loosened.items():
            logger.warning(
                "arguments of the tool %s may be any JSON object, since %s; strict: true refuses such tools", name, why
            )
        return chat

    def _add(self, request: Request) -> None:
        raise NotImplementedError

    def _abort(self, request: int, reason: str) -> list[RequestUpdate]:
        raise NotImplementedError

    @property
    def _is_fork(self) -> bool:
        """Whether this is a copy in another process (`os.fork`), which lacks the engine's threads, and shares with the
        engine itself what other processes see of it.
        """
        return os.getpid() != self._process

    def _check_open(self) -> None:
        if self._is_fork:
            raise EngineClosedError(
                f"this engine belongs to process {self._process}, and does not run in a fork of it; create an engine "
                "in this process, or start processes with multiprocessing's 'spawn'"
            )
        if self._closed:
            raise EngineClosedError("this engine was closed; create a new one")


P = ParamSpec("P")
R = TypeVar("R")


def _one_thread(method: Callable[Concatenate[LLM, P], R]) -> Callable[Concatenate[LLM, P], R]:
    """A method of `LLM` that is refused while another thread is in one."""

    @functools.wraps(method)
    def call(self: LLM, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._guard.entered(method.__name__):
            return method(self, *args, **kwargs)

    return call


class LLM(LocalEngine):
    """An engine for offline inference, which runs in the calling thread.

    Several threads may use it in turn; a call while another thread is inside one raises ConcurrentUseError. `AsyncLLM`
    is for concurrent callers. Close it with `close()` or a `with` block.

    Args:
        model: folder of a Hugging Face checkpoint, `org/name` on the Hub, or "demo" for the embedded model.
        preset: "chat" (low latency), "batch" (throughput) or "long-context"; sets a few options, which explicit ones
            override.
        on_load: called with (phase, fraction done) while loading; default: progress in the cell of a notebook.
        options: fields of `EngineConfig`, listed below; vLLM's names are accepted too.

    Raises:
        ConfigError: an option is unknown or invalid.
        CheckpointError: the checkpoint is missing, damaged or not supported.

    Example:
        >>> with LLM("demo") as llm:
        ...     [output] = llm.generate("def fib(n):", SamplingParams(max_tokens=64, seed=7))
        ...     print(output.outputs[0].text)
    """

    __doc__ = with_options_text(__doc__)
    __signature__ = with_options("preset", "on_load")

    def __init__(self, model: str, *, preset: str | None = None, on_load: OnLoad | None = None, **options: Any) -> None:
        super().__init__(model, preset, on_load, options)
        self._interrupts = Interrupts()
        self._engine.computing = self._interrupts.second_comes_through
        self._changed: dict[str, RequestOutput] = {}  # what grew and was not handed out yet
        self._streaming: set[str] = set()  # requests whose outputs go to `stream` alone
        self._left: deque[RequestOutput] = deque()  # of streams whose readers have left
        self._guard = ThreadGuard("LLM", "use AsyncLLM for many callers, or a lock around every call")
        self._close_engine = weakref.finalize(self, unless_forked(self._engine.close))
        self._close_engine.atexit = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- whole batches -------------------------------------------------------------------------------------

    @vllm_names
    @_one_thread
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts. Returns one output per prompt, in the order of the prompts.

        Args:
            prompts: one prompt or a list of them. A prompt is a string, a list of token ids, or a dictionary with
                `prompt` or `prompt_token_ids`, as in vLLM.
            sampling_params: one for all prompts, or a list with one per prompt; None: the checkpoint's defaults.
            progress: show a progress bar.

        Raises:
            RequestError: a prompt or its parameters are invalid; `index` says which. All prompts are checked before
                anything runs. A later failure ends only that request, with `finish_reason="error"` and a warning.
            EngineClosedError: the engine was closed.
        """
        self._check_open()
        many = prompt_list(prompts)
        prepared = self._frontend.prepare_all(many, params_list(sampling_params, len(many)))
        return _warn_of_errors(self._run_all(prepared, progress))

    def _run_all(self, prepared: list[Prepared], progress: bool) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        with self._interrupts.held():
            try:
                for item in prepared:
                    outputs.append(self._frontend.submit(item))
                self._run(outputs, progress)
            except BaseException:  # Ctrl-C too: nothing of this batch may go on behind the caller's back
                for output in outputs:
                    self._drop(output)
                raise
        return outputs

    @vllm_names
    @_one_thread
    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        prompt_name: str | None = None,
        progress: bool = False,
    ) -> list[EmbeddingOutput]:
        """Embed prompts, with the pooling that the checkpoint's Sentence Transformers files specify. Returns one output
        per prompt, in the order of the prompts.

        Args:
            prompts: as for `generate`.
            dimensions: truncate embeddings to this many components and normalize them again, for Matryoshka models.
            prompt_name: the checkpoint's prompt to put before each text, such as "query"; None: its default prompt, if
                it has one. Token ids never get a prompt.
            progress: show a progress bar.

        Raises:
            RequestError: a prompt, `prompt_name` or `dimensions` is invalid, or a prompt could not be embedded.
            ModelConfigError: the checkpoint uses an unsupported kind of pooling.
        """
        self._check_open()
        many, pooling = prompt_list(prompts), PoolingConfig.read(self._engine.path)
        pooling.check_dimensions(dimensions)
        many = pooling.prompted(many, prompt_name)
        checked = self._frontend.prepare_all(many, [SamplingParams(max_tokens=0, speculate=False)] * len(many))
        wanted = PoolingParams(pooling.method)
        outputs = self._run_all([self._frontend.pooled(prompt, wanted) for prompt in checked], progress)
        embeddings = []
        for index, output in enumerate(outputs):
            if output.pooled is None:
                raise RequestError(output.outputs[0].error or "the prompt could not be embedded").at(index)
            embedding = pooling.embedding(output.pooled, dimensions).tolist()
            embeddings.append(EmbeddingOutput(output.prompt, output.prompt_token_ids, embedding, output.cached_tokens))
        return embeddings

    @vllm_names
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        progress: bool = False,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Reply to one chat, or to a list of chats, rendered with the model's chat template; otherwise like `generate`.

        `outputs[i].reply` is the parsed reply: reasoning, content and tool calls. `structured_outputs` applies to the
        content.

        Args:
            messages: one chat, or a list of them; messages have `role` and `content`, as in OpenAI's API.
            sampling_params: one for all chats, or a list with one per chat; None: the checkpoint's defaults.
            tools: the functions that may be called, in OpenAI's format.
            tool_choice: "auto" (the default), "none", "required", or a function, in OpenAI's format.
            parallel_tool_calls: allow several calls in one reply.
            add_generation_prompt: end the prompt with the beginning of the assistant's reply; None: unless
                `continue_final_message`.
            continue_final_message: continue the last message instead.
            progress: show a progress bar.
            template_variables: variables of the template, such as `enable_thinking`.

        Raises:
            ChatTemplateError: the checkpoint has no chat template, or it does not accept these messages or variables.
            SamplingParamsError: the tools are invalid, or the template does not show how the model calls them.
            RequestError: as for `generate`.
        """
        one = not isinstance(messages, list | tuple) or not messages or isinstance(messages[0], Mapping)
        chats: Any = [messages] if one else messages
        asked = params_list(sampling_params, len(chats))
        wanted = reply_request(tools, tool_choice, parallel_tool_calls)
        end = end_of_prompt(add_generation_prompt, continue_final_message)
        return self._answer_chats(self._render_chats(chats, asked, wanted, template_variables, end), progress)

    def _render_chats(
        self,
        chats: Sequence[Sequence[Message]],
        params: Sequence[SamplingParams | None],
        wanted: ReplyRequest,
        template_variables: Mapping[str, Any],
        end: Mapping[str, bool],
    ) -> list[tuple[RenderedChat, SamplingParams]]:
        """Each chat, and how its reply is sampled: in the form that the chat's tools and parameters ask for."""
        rendered = []
        for chat, given in zip(chats, params, strict=True):
            each = given or SamplingParams()
            reply = msgspec.structs.replace(wanted, structured=each.structured_outputs)
            one = self._render(chat, template_variables, reply, end)
            rendered.append((one, msgspec.structs.replace(each, structured_outputs=one.structured)))
        return rendered

    def _prepare_chats(self, rendered: Sequence[tuple[RenderedChat, SamplingParams]]) -> list[Prepared]:
        self._check_open()
        chats, params = [chat for chat, _ in rendered], [each for _, each in rendered]
        return self._frontend.prepare_all([chat.token_ids for chat in chats], params, [chat.reply for chat in chats])

    @_one_thread
    def _answer_chats(
        self, rendered: Sequence[tuple[RenderedChat, SamplingParams]], progress: bool
    ) -> list[RequestOutput]:
        return _warn_of_errors(self._run_all(self._prepare_chats(rendered), progress))

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding its output whenever it has grown.

        It is the same object each time; `outputs[i].delta` is the new text. Leaving the loop early aborts the request.

        Raises:
            RequestError: the prompt or its parameters are invalid; raised by the call, before the first output.
        """
        self._check_open()
        return self._stream(self._frontend.prepare(prompt, sampling_params))

    def _stream(self, prepared: Prepared) -> Iterator[RequestOutput]:
        """Queued when the first output is asked for: an iterator that is never read costs nothing."""
        output: RequestOutput | None = None
        try:
            with self._interrupts.held():
                output = self._begin_stream(prepared)
            while self._advance_stream(output):
                yield self._frontend.hand_out(output)
        finally:
            if output is not None:
                with self._interrupts.held():
                    self._leave_stream(output)

    def _leave_stream(self, output: RequestOutput) -> None:
        self._streaming.discard(output.request_id)
        self._left.append(output)
        if self._guard.free:  # else the next step: it may be the garbage collector that ends this, amid a call
            with contextlib.suppress(ConcurrentUseError), self._guard.entered("stream"):
                self._drop_left()

    @_one_thread
    def _begin_stream(self, prepared: Prepared) -> RequestOutput:
        self._check_open()
        output = self._frontend.submit(prepared)
        self._streaming.add(output.request_id)
        return output

    @_one_thread
    def _advance_stream(self, output: RequestOutput) -> bool:
        """Run steps until the output has grown; False if it was handed out to its end."""
        while output.request_id not in self._changed and not output.finished:
            self._advance()
        return self._changed.pop(output.request_id, None) is not None

    def _drop_left(self) -> None:
        while self._left and not self._closed:
            self._drop(self._left.popleft())

    def _drop(self, output: RequestOutput) -> None:
        """This output is not waited for any more."""
        if self._changed.get(output.request_id) is output:
            del self._changed[output.request_id]
        self._frontend.drop(output)

    # -- by hand -------------------------------------------------------------------------------------------

    @_one_thread
    def add_request(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> str:
        """Queue a prompt, to be run by `step`. Returns its request id: the given one, or a new one.

        An id is in use until `step` or `abort` has returned the request's last output.

        Raises:
            RequestError: the prompt or its parameters are invalid, or the id is in use.
        """
        self._check_open()
        prepared = self._frontend.prepare(prompt, sampling_params)
        with self._interrupts.held():
            return self._frontend.submit(prepared, request_id).request_id

    @vllm_names
    def add_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        parallel_tool_calls: bool = True,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **template_variables: Any,
    ) -> str:
        """Queue one chat, to be run by `step`. Arguments and errors are those of `chat`; the id is as in `add_request`.

        `outputs[0].events` grows with the reply: reasoning, content and tool calls, in order.
        """
        wanted = reply_request(tools, tool_choice, parallel_tool_calls)
        end = end_of_prompt(add_generation_prompt, continue_final_message)
        rendered = self._render_chats([messages], [sampling_params], wanted, template_variables, end)
        return self._add_chat(rendered, request_id)

    @_one_thread
    def _add_chat(self, rendered: Sequence[tuple[RenderedChat, SamplingParams]], request_id: str | None) -> str:
        [prepared] = self._prepare_chats(rendered)
        with self._interrupts.held():
            return self._frontend.submit(prepared, request_id).request_id

    @_one_thread
    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs that changed, each once; a finished output is returned a last time."""
        self._advance()
        ready = [request_id for request_id in self._changed if request_id not in self._streaming]
        return [self._frontend.hand_out(self._changed.pop(request_id)) for request_id in ready]

    @_one_thread
    def abort(self, request_id: str) -> list[RequestOutput]:
        """End a request. Returns its last output in a list; an empty list if the id is not in use, or belongs to a
        `stream`, which then ends with that output.
        """
        self._check_open()
        with self._interrupts.held():
            self._note(self._frontend.abort(request_id))
            if request_id in self._streaming or request_id not in self._changed:
                return []
            return [self._frontend.hand_out(self._changed.pop(request_id))]

    def _advance(self) -> None:
        """Run one step, and note what changed until somebody asks for it."""
        self._check_open()
        with self._interrupts.held():
            self._drop_left()
            self._note(self._frontend.absorb(self._engine.step()))

    def _note(self, changed: list[RequestOutput]) -> None:
        self._changed.update((output.request_id, output) for output in changed)

    @property
    def idle(self) -> bool:
        """Whether nothing is queued or running, and `step` has returned all outputs."""
        return self._frontend.idle and self._changed.keys() <= self._streaming

    @_one_thread
    def close(self) -> None:
        """Free the model and its memory. Later calls that need them raise EngineClosedError. In a fork of the engine's
        process this does nothing.
        """
        self._closed = True
        self._close_engine()

    def _add(self, request: Request) -> None:
        self._engine.add(request)

    def _abort(self, request: int, reason: str) -> list[RequestUpdate]:
        self._engine.abort(request, reason)
        return self._engine.take_updates()

    def _run(self, outputs: list[RequestOutput], progress: bool) -> None:
        """Step until these outputs have finished; what others got meanwhile waits for `step`."""
        todo = {output.request_id for output in outputs}
        with _progress_bar(len(outputs), progress) as bar:
            while todo:
                self._advance()
                self._interrupts.deliver()
                mine = [self._changed.pop(request_id) for request_id in todo & self._changed.keys()]
                done = [self._frontend.hand_out(output) for output in mine if output.finished]
                todo -= {output.request_id for output in done}
                if bar is not None:
                    bar.update(len(outputs) - len(todo), self.stats.output_tokens)


def _telling(model: str, on_load: OnLoad | None) -> contextlib.AbstractContextManager[OnLoad | None]:
    """Who is told how far loading is: whom the caller named, or a notebook's cell."""
    if on_load is not None or "IPython" not in sys.modules:
        return contextlib.nullcontext(on_load)
    from quire.notebook import loading

    return loading(model)


def _load_engine(config: EngineConfig, on_load: OnLoad | None) -> tuple[Engine, Tokenizer | None]:
    """The engine, and the checkpoint's tokenizer, which is tried out while the weights are loaded.

    Raises:
        ConfigError: it is to compute prompts for others, and nobody would drive it between calls.
    """
    if config.prefills:
        raise ConfigError(
            f"kv_role={config.kv_role} needs a server, which computes prompts for other engines; start one with 'quire "
            f"serve {config.model} --role {config.kv_role}', or set kv_role=decode"
        )
    if on_load is not None:
        on_load("finding the checkpoint", 0.0)
    folder = resolve(config.model, config.revision)
    with TokenizerTrial(folder) as trial:
        engine = Engine(dataclasses.replace(config, model=str(folder), revision=None), on_load)
        try:
            trial.check()
            return engine, Tokenizer.load_if_present(engine.path, config.tool_format)
        except BaseException:
            engine.close()
            raise


def _warn_of_errors(outputs: list[RequestOutput]) -> list[RequestOutput]:
    """Warn of requests that ended with an error, since nobody may look at every `finish_reason`; the outputs."""
    failed = [index for index, output in enumerate(outputs) if any(one.error for one in output.outputs)]
    if not failed:
        return outputs
    [first, *_] = [one.error for one in outputs[failed[0]].outputs if one.error]
    warnings.warn(
        f"{len(failed)} of {len(outputs)} requests failed; the first is outputs[{failed[0]}]: {first}",
        RuntimeWarning,
        stacklevel=_levels_to_the_caller(),
    )
    return outputs


def _levels_to_the_caller() -> int:
    """So many frames stand between a warning and the code that called `LLM`."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__") in (__name__, calls.__name__):
        frame, levels = frame.f_back, levels + 1
    return levels


def _progress_bar(total: int, shown: bool) -> contextlib.AbstractContextManager[Progress | None]:
    if not shown:
        return contextlib.nullcontext()
    from quire.progress import batch_progress  # rich takes a while to import, and most callers show nothing

    return batch_progress(total)
