"""`LocalEngine`, what `LLM` and `AsyncLLM` have in common: an engine in this process, and its frontend."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from quire.calls import end_of_prompt, vllm_names, weakly
from quire.config import EngineConfig
from quire.core.request import Request, RequestUpdate
from quire.core.sampling_params import SamplingParams, suggested
from quire.engine.engine import Engine
from quire.engine.frontend import Frontend
from quire.engine.stats import EngineStats
from quire.errors import ChatTemplateError, ConfigError, EngineClosedError, UnknownTemplateVariableError
from quire.models.hub import resolve, tokenizer_folder
from quire.models.model import Model
from quire.runner.memory_plan import MemoryPlan
from quire.runner.start import OnLoad
from quire.text.chat_template import ChatOptions
from quire.text.reply_grammar import ReplyRequest
from quire.text.tokenizer import NO_TOKENIZER, RenderedChat, Tokenizer
from quire.text.tokenizer_trial import TokenizerTrial

logger = logging.getLogger(__name__)

Message = Mapping[str, Any]
"""One message of a chat: `role` and `content`, and what else the model's template reads."""


class LocalEngine(ABC):
    """An engine in this process with its frontend, and their properties."""

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
    def sampling_suggestions(self) -> dict[str, float]:
        """Values for unset sampling parameters that suit people who chat: see `sampling_params.suggested`."""
        return suggested(self.model.num_parameters, self._engine.sampling_defaults)

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
        for name, why in chat.unused.items():
            raise UnknownTemplateVariableError(why, param=name)
        for name, why in chat.loosened.items():
            logger.warning(
                "arguments of the tool %s may be any JSON object, since %s; strict: true refuses such tools", name, why
            )
        return chat

    @abstractmethod
    def _add(self, request: Request) -> None:
        """Queue a request in the engine."""

    @abstractmethod
    def _abort(self, request: int, reason: str) -> list[RequestUpdate]:
        """End a request, for this reason; what changed."""

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
    chats = ChatOptions.of(vars(config))
    located = config.at(folder, tokens := tokenizer_folder(config, folder))
    with TokenizerTrial(tokens, chats) as trial:
        engine = Engine(located, on_load)
        try:
            no_chats = trial.check()
            tokenizer = Tokenizer.load_if_present(tokens, chats)
            if tokenizer is not None and no_chats:
                tokenizer.refuse_chats(no_chats)
            return engine, tokenizer
        except BaseException:
            engine.close()
            raise
