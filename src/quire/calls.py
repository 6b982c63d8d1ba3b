"""The arguments of `LLM`'s methods, and how vLLM calls them."""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Integral
from typing import Any, ParamSpec, TypeVar

from quire.core.sampling_params import SamplingParams
from quire.engine.prompts import Prompt
from quire.errors import ConfigError, RequestError, SamplingParamsError
from quire.vllm_options import VLLM_ARGUMENTS, translated

P = ParamSpec("P")
R = TypeVar("R")

VARIABLES = "chat_template_kwargs"


def weakly(method: Callable[P, R]) -> Callable[P, R]:
    """A bound method that does not keep its object, for what the object owns: so it is freed with its last user, and
    not when the garbage collector next looks for cycles. Once it is gone, a call raises ReferenceError.
    """
    found = weakref.WeakMethod(method)

    def call(*args: P.args, **given: P.kwargs) -> R:
        bound = found()
        if bound is None:
            raise ReferenceError("the object of this method is gone")
        return bound(*args, **given)

    return call


def vllm_names(method: Callable[P, R]) -> Callable[P, R]:
    """A method that takes vLLM's arguments, too: those in `VLLM_ARGUMENTS`, and `chat_template_kwargs` where it takes
    variables of the template. One that asks for what is not there is refused with RequestError.
    """
    parameters = inspect.signature(method).parameters.values()
    known = [each.name for each in parameters]
    variables = any(each.kind is each.VAR_KEYWORD for each in parameters)

    @functools.wraps(method)
    def call(*args: P.args, **given: P.kwargs) -> R:
        if given.keys() & VLLM_ARGUMENTS.keys() or (variables and VARIABLES in given):
            return method(*args, **_translated(given, known))
        return method(*args, **given)

    return call


def _translated(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    try:
        taken = translated(given, known, VLLM_ARGUMENTS)
    except ConfigError as error:
        raise RequestError(str(error)) from None
    variables = taken.pop(VARIABLES, None)
    if not isinstance(variables, Mapping | None):
        raise RequestError(f"{VARIABLES} is a {type(variables).__name__}; it must be a dictionary, or None")
    if twice := sorted(taken.keys() & (variables or {}).keys()):
        raise RequestError(f"{twice[0]} is given twice, once in {VARIABLES}; leave one of them out")
    return taken | dict(variables or {})


def end_of_prompt(opens: bool | None, goes_on: bool) -> dict[str, bool]:
    """How a chat's prompt ends, as `Tokenizer.apply_chat_template` takes it."""
    return {"add_generation_prompt": not goes_on if opens is None else opens, "continue_final_message": goes_on}


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many, as a list; a list of integers is one prompt of token ids.

    Raises:
        RequestError: it is something else.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise RequestError(
            f"prompts is a {type(prompts).__name__}; it must be a string, a list of strings, a list of token ids, "
            "or a list of such lists"
        )
    if prompts and all(isinstance(item, Integral) and not isinstance(item, bool) for item in prompts):
        return [prompts]
    return list(prompts)


def params_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams | None]:
    """One `SamplingParams` a prompt.

    Raises:
        RequestError: their number is not that of the prompts. SamplingParamsError: one is something else.
    """
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, list | tuple):
        raise SamplingParamsError(
            f"sampling_params is a {type(params).__name__}; it must be SamplingParams, or a list of them"
        )
    if len(params) != count:
        raise RequestError(
            f"{count} prompts came with {len(params)} sampling_params; give one for all prompts, or one per prompt"
        )
    for index, each in enumerate(params):
        if each is not None and not isinstance(each, SamplingParams):
            raise SamplingParamsError(
                f"sampling_params is a {type(each).__name__}; it must be SamplingParams or None"
            ).at(index)
    return list(params)
