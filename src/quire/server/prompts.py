"""The prompts of a completion: texts or token ids, one or many, counted before they are built."""

from __future__ import annotations

from msgspec import Raw

from quire.core.sampling_params import MAX_INT32
from quire.server.body import decode, has_more_strings, shorten
from quire.server.errors import ApiError, invalid
from quire.server.limits import Limits

Prompt = str | list[int]

_ALLOWED = "a string, a list of strings, a list of token ids, or a list of lists of token ids"


def read_prompts(raw: Raw | None, limits: Limits, *, text_only: bool = False, where: str = "prompt") -> list[Prompt]:
    """The prompts in the JSON of the field `where`.

    Args:
        text_only: it must be one string.

    Raises:
        ApiError: it is missing, of another type, empty where it must not be, or too large.
    """
    if raw is None:
        raise invalid(f"{where} is missing; it must be {_ALLOWED}", where, "missing_parameter")
    data = bytes(raw)
    if data.startswith(b'"'):
        prompts: list[Prompt] = [str(decode(data, where=where))]
    elif text_only or not data.startswith(b"["):
        allowed = "a string" if text_only else _ALLOWED
        raise invalid(f"{where} must be {allowed}", where, "invalid_type")
    elif b'"' in data:
        prompts = _texts(data, limits, where)
    else:
        prompts = _id_lists(data, limits, where)
    _check_sizes(prompts, limits, where)
    return prompts


def read_token_ids(raw: Raw | None, where: str, limits: Limits) -> list[int]:
    """One list of token ids. Raises `ApiError`."""
    if raw is None:
        raise invalid(f"{where} is missing; it must be a list of token ids", where, "missing_parameter")
    data = bytes(raw)
    if not data.startswith(b"[") or b'"' in data or b"{" in data:
        raise invalid(f"{where} must be a list of token ids", where, "invalid_type")
    _check_count(data, where, limits)
    ids = decode(data, where=where)
    _check_ids(ids, where)
    return list(ids)


def _texts(data: bytes, limits: Limits, where: str) -> list[Prompt]:
    if has_more_strings(data, limits.prompts):
        raise invalid(f"{where} has more than {limits.prompts} prompts, which is not allowed", where)
    try:
        texts: list[Prompt] = decode(data, list[str], where=where)
    except ApiError as error:
        if error.code != "invalid_type":
            raise
        raise invalid(f"{where} must be {_ALLOWED}, all of one kind", where, "invalid_type") from None
    return texts


def _id_lists(data: bytes, limits: Limits, where: str) -> list[Prompt]:
    """Without a string in it, commas and brackets tell how much there is."""
    _check_count(data, where, limits)
    if data.count(b"[") > limits.prompts + 1:
        raise invalid(f"{where} has more than {limits.prompts} prompts, or nests too deeply", where)
    values = decode(data, where=where)
    if not values:
        raise invalid(f"{where} is an empty list; give at least one prompt", where, "empty_prompt")
    if not isinstance(values[0], list):
        _check_ids(values, where)
        return [values]
    for index, ids in enumerate(values):
        if not isinstance(ids, list):
            message = f"{where}[{index}] is {shorten(ids)}; it must be a list of token ids, as the first one is"
            raise invalid(message, where, "invalid_type")
        _check_ids(ids, f"{where}[{index}]")
    return list(values)


def _check_count(data: bytes, where: str, limits: Limits) -> None:
    count = data.count(b",") + 1
    if count > limits.token_ids:
        raise invalid(f"{where} has {count} token ids; at most {limits.token_ids} are allowed", where)


def _check_ids(values: list[object], where: str) -> None:
    """Token ids are non-negative integers; whether the model has them is checked later. `where` names the list."""
    if not values:
        return
    if set(map(type, values)) == {int} and min(values) >= 0 and max(values) <= MAX_INT32:  # type: ignore[type-var, operator]
        return
    for index, value in enumerate(values):
        if type(value) is not int or not 0 <= value <= MAX_INT32:
            message = f"{where}[{index}] is {shorten(value)}; a token id is an integer from 0 to {MAX_INT32}"
            raise invalid(message, where.partition("[")[0], "token_out_of_range")


def _check_sizes(prompts: list[Prompt], limits: Limits, where: str) -> None:
    if len(prompts) > limits.prompts:
        raise invalid(f"{where} has {len(prompts)} prompts; at most {limits.prompts} are allowed", where)
    if not prompts:
        raise invalid(f"{where} is an empty list; give at least one prompt", where, "empty_prompt")
    for index, prompt in enumerate(prompts):
        if isinstance(prompt, list) and not prompt:
            raise invalid(f"{where}[{index}] has no tokens; it needs at least one", where, "empty_prompt")
    size = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
    if size > limits.text:
        raise invalid(f"the prompts have {size} characters; at most {limits.text} are allowed", where)
