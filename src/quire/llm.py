"""`LLM`, the Python interface: an engine in the calling thread, which runs a step when asked to."""

from __future__ import annotations

import contextlib
import functools
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Self, TypeVar

import msgspec

from quire import calls
from quire.calls import end_of_prompt, params_list, prompt_list, vllm_names
from quire.config import with_options, with_options_text
from quire.core.pooling import PoolingParams
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.engine.frontend import Prepared
from quire.engine.interrupts import Interrupts
from quire.engine.outputs import EmbeddingOutput, RequestOutput
from quire.engine.prompts import Prompt
from quire.engine.thread_guard import ThreadGuard, unless_forked
from quire.errors import ConcurrentUseError, RequestError
from quire.local_engine import LocalEngine, Message
from quire.models.pooling import PoolingConfig
from quire.runner.start import OnLoad
from quire.text.reply_grammar import ReplyRequest, reply_request
from quire.text.tokenizer import RenderedChat
from quire.vllm_options import VLLM_METHODS

if TYPE_CHECKING:
    from quire.progress import Progress

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

    if not TYPE_CHECKING:  # for type checkers, what is not there is not there

        def __getattr__(self, name: str) -> Any:
            """Raise AttributeError, for vLLM's names with what to use instead."""
            why = f": {VLLM_METHODS[name]}" if name in VLLM_METHODS else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{why}", name=name, obj=self)

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
            tool_choice: "auto" (the default), "none", "required", a function or `allowed_tools`, in OpenAI's format.
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
