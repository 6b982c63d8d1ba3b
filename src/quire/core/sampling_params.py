"""How to sample one request: `SamplingParams`, and the limits of every field.

Imported from anywhere; imports nothing above it. Every value is checked when the object is made, so a `SamplingParams`
is always valid; only what depends on the model is left to `check_against`.
"""

from __future__ import annotations

import difflib
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec
from msgspec.structs import force_setattr, replace

from quire.core.structured_outputs import StructuredOutputsParams, structured_outputs
from quire.errors import SamplingParamsError, TokenOutOfRangeError

MAX_N = 128
MAX_TEMPERATURE = 100.0
GREEDY_TEMPERATURE = 1e-5
"""Below this temperature (0 included) the most likely token is taken: fp32 could not scale the logits."""
MAX_ADDITIVE_PENALTY = 2.0
MIN_REPETITION_PENALTY = 0.01
MAX_REPETITION_PENALTY = 100.0
MAX_LOGIT_BIAS = 100.0
MAX_LOGIT_BIAS_ENTRIES = 4096
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_ALLOWED_TOKEN_IDS = 1 << 20
MAX_BAD_WORDS = 256
MAX_BAD_WORD_LENGTH = 256
MAX_LOGPROBS = 20
MAX_KV_TRANSFER_PARAMS = 32
KV_TRANSFER_FIELDS = "do_remote_decode", "do_remote_prefill", "remote_engine_id", "remote_host"
"""The fields of `kv_transfer_params` that Quire uses."""

MAX_CACHE_SALT_LENGTH = 256
MAX_INT32 = (1 << 31) - 1
SEED_BITS = 53
"""Random seeds have this many bits, so that they survive programs whose numbers are doubles."""
MAX_INT64 = (1 << 63) - 1

NEUTRAL: dict[str, float | int] = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
"""Defaults of the fields that a checkpoint's `generation_config.json` can set, if it does not set them."""

SMALL_MODEL = 4_000_000_000
"""Parameters of a model that rambles at temperature 1."""


def suggested(num_parameters: int, defaults: Mapping[str, Any]) -> dict[str, float]:
    """Sampling parameters that suit people who chat with a model and set none; APIs keep the defaults.

    Args:
        defaults: those of the checkpoint's files.
    """
    return {"temperature": 0.7} if num_parameters <= SMALL_MODEL and "temperature" not in defaults else {}


UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "extra_args": ({},),
    "flat_logprobs": (False,),
    "guided_decoding": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "logprob_token_ids": (),
    "output_kind": (),
    "prompt_logprob_start": (),
    "prompt_logprob_token_ids": (),
    "repetition_detection": (),
    "skip_reading_prefix_cache": (False,),
    "spaces_between_special_tokens": (True,),
    "stream_interval": (1,),
    "use_beam_search": (False,),
}
"""vLLM's sampling parameters that Quire does not have, with the values (besides None) that have no effect."""


class _VllmNames(msgspec.StructMeta):
    """Accepts parameters named in `UNSUPPORTED` if they have no effect, and otherwise refuses them by name."""

    def __call__(cls, *args: Any, **given: Any) -> Any:
        for name in given.keys() & UNSUPPORTED.keys():
            value, harmless = given.pop(name), UNSUPPORTED[name]
            if value is not None and not any(type(value) is type(one) and value == one for one in harmless):
                instead = " or ".join(["leave it out", *(f"set it to {one!r}" for one in harmless)])
                raise SamplingParamsError(f"{name} is {_shown(value)}, which is not supported; {instead}", param=name)
        for name in given.keys() - set(cls.__struct_fields__):
            near = difflib.get_close_matches(name, cls.__struct_fields__, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(cls.__struct_fields__)}"
            raise TypeError(f"SamplingParams has no parameter {name!r}; {hint}")
        return super().__call__(*args, **given)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, metaclass=_VllmNames):
    """How to sample one request. All fields are keyword arguments; sequences are stored as tuples.

    Names are vLLM's. Fields of vLLM's `SamplingParams` that are missing here are accepted with values that change
    nothing, and otherwise refused by name.

    The order of operations is: penalties; logit bias and masks; temperature; min_p; top_k; top_p.

    Attributes:
        n: number of completions per prompt, 1 to 128.
        temperature: from 0, which is greedy decoding, to 100; the logits are divided by it. None: the value in the
            checkpoint's `generation_config.json`, or 1.
        top_p: keep the smallest set of most likely tokens whose probabilities add up to at least this, above 0 to 1
            (nucleus sampling, Holtzman et al. 2019). None: the checkpoint's, or 1.
        top_k: keep this many of the most likely tokens; 0 and -1 turn it off. None: the checkpoint's, or 0.
        min_p: keep tokens with at least this fraction of the most likely token's probability, 0 to 1. None: the
            checkpoint's, or 0.
        presence_penalty: subtracted from the logits of tokens that occur in the output so far, -2 to 2.
        frequency_penalty: the same, times the number of occurrences, -2 to 2.
        repetition_penalty: logits of tokens in the prompt or output are divided by it if positive and multiplied by it
            if negative, 0.01 to 100 (Keskar et al. 2019). None: the checkpoint's, or 1.
        seed: 64-bit integer; the same request with the same seed gives the same tokens. None: a random one, which the
            output reports.
        stop: one or more strings at which the text ends.
        include_stop_str_in_output: keep the stop string in the text.
        stop_token_ids: token ids that end the request, in addition to the model's end-of-sequence tokens.
        min_tokens: before this many tokens, end-of-sequence and stop tokens are masked, and stop strings ignored.
        max_tokens: at most this many tokens, limited to the rest of the context. None: the rest of the context; 0 only
            scores the prompt.
        ignore_eos: do not end at the model's end-of-sequence tokens.
        logit_bias: token id to a number from -100 to 100, which is added to its logit.
        allowed_token_ids: mask all other token ids.
        bad_words: strings that must not be generated: the last token of each is masked when it would follow the others.
        logprobs: return the log-probabilities of the sampled token and of this many most likely ones, 0 to 20.
        prompt_logprobs: the same for the tokens of the prompt.
        skip_special_tokens: leave special tokens out of the text.
        priority: lower values run first, with `scheduling_policy="priority"`.
        cache_salt: prefix cache hits are limited to requests with the same salt.
        speculate: False turns speculative decoding off for this request; the tokens are the same, only speed changes.
        kv_transfer_params: for disaggregated prefill, in vLLM's spelling. `do_remote_decode`: compute the prompt on
            this engine, whatever its length; `do_remote_prefill`: have another engine compute it, whatever its length,
            `remote_engine_id`, or the one at `remote_host`, if that can be reached. The tokens are the same, only speed
            changes.
        structured_outputs: a form that the output must have (`json`, `regex`, `choice`, `grammar`, ...). The output
            ends when it is complete, unless a stop string, or a stop token that is text, ends it earlier.
        thinking_token_budget: most reasoning tokens of a chat reply; then its reasoning must end; -1 is no limit.
            None: no limit.
        truncate_prompt_tokens: so many of the prompt's last tokens are kept; -1: as many as the context has room for
            beside `max_tokens`. None: all, and a prompt that is too long is refused.

    Raises:
        SamplingParamsError: a value has the wrong type, is not finite, is out of range, or contradicts another field;
            `param` names the field.
        TypeError: there is no such field.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    min_tokens: int = 0
    max_tokens: int | None = None
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    priority: int = 0
    cache_salt: str | None = None
    speculate: bool = True
    kv_transfer_params: Mapping[str, Any] | None = None
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            try:
                force_setattr(self, name, check(name, value))
            except SamplingParamsError as error:
                error.param = name
                raise
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise SamplingParamsError(
                f"min_tokens is {self.min_tokens} but max_tokens is {self.max_tokens}; "
                "lower min_tokens or raise max_tokens",
                param="min_tokens",
            )
        if self.structured_outputs is not None and self.ignore_eos:
            raise SamplingParamsError(
                "ignore_eos and structured_outputs contradict each other, since the output must end when it is "
                "complete; leave one of them out",
                param="ignore_eos",
            )

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy. Only known once `temperature` is set (see `resolved`)."""
        return self.temperature is not None and self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return tuple(self.stop or ())

    def resolved(self, defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """A copy in which the fields named in `NEUTRAL` are set.

        Args:
            defaults: the checkpoint's `generation_config.json` (other keys are ignored); None: neutral values.

        Raises:
            SamplingParamsError: one of the checkpoint's values is invalid.
        """
        changes: dict[str, float | int] = {}
        for name, neutral in NEUTRAL.items():
            if getattr(self, name) is None:
                given = (defaults or {}).get(name)
                changes[name] = neutral if given is None else given
        if not changes:
            return self
        try:
            return replace(self, **changes)
        except SamplingParamsError as error:
            raise SamplingParamsError(
                f"the checkpoint's generation_config.json: {error}; set the parameter, or use generation_config='off'"
            ) from error

    def check_against(self, vocab_size: int) -> None:
        """Check what depends on the model.

        Raises:
            TokenOutOfRangeError: a token id is not below `vocab_size`.
        """
        named: dict[str, Iterable[int] | None] = {
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids,
            "logit_bias": self.logit_bias,
        }
        for name, ids in named.items():
            largest = max(ids or (0,))
            if largest >= vocab_size:
                raise TokenOutOfRangeError(
                    f"{name} has the token id {largest}, but the model's ids are 0 to {vocab_size - 1}", param=name
                )


def _shown(value: object) -> str:
    try:
        shown = repr(value)
    except ValueError:  # Python refuses to print integers of thousands of digits
        shown = f"a huge {type(value).__name__}"
    return shown if len(shown) <= 80 else shown[:77] + "..."


def _refuse(name: str, value: object, allowed: str, hint: str = "") -> SamplingParamsError:
    return SamplingParamsError(f"{name} is {_shown(value)}; it must be {allowed}" + (f" ({hint})" if hint else ""))


_Check = Callable[[str, Any], Any]


def _integer(low: int, high: int, hint: str = "") -> _Check:
    def check(name: str, value: Any) -> int:
        # bool is an Integral too, but True is not a count. numpy's integers are welcome.
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise _refuse(name, value, f"an integer from {low} to {high}", hint)
        number = operator.index(value)
        if not low <= number <= high:
            raise _refuse(name, value, f"an integer from {low} to {high}", hint)
        return number

    return check


def _top_k(name: str, value: Any) -> int:
    number: int = _integer(-1, MAX_INT32, "0 and -1 turn it off")(name, value)
    return max(0, number)


def _budget(name: str, value: Any) -> int | None:
    number: int = _integer(-1, MAX_INT32, "None and -1: no limit; 0: no reasoning")(name, value)
    return None if number == -1 else number


def _truncation(name: str, value: Any) -> int:
    number: int = _integer(-1, MAX_INT32, "-1: as many as there is room for")(name, value)
    if number == 0:
        raise _refuse(name, value, "-1 or at least 1")
    return number


def _number(low: float, high: float, hint: str = "", above_low: bool = False) -> _Check:
    allowed = f"a number above {low:g} and at most {high:g}" if above_low else f"a number from {low:g} to {high:g}"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise _refuse(name, value, allowed, hint)
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        # NaN fails every comparison, so it is refused here too.
        if not (low < number if above_low else low <= number) or not number <= high:
            raise _refuse(name, value, allowed, hint)
        return number

    return check


def _boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False")
    return value


def _text(name: str, value: Any, max_length: int) -> str:
    if not isinstance(value, str) or not 1 <= len(value) <= max_length:
        raise _refuse(name, value, f"a string of 1 to {max_length} characters")
    if any("\ud800" <= character <= "\udfff" for character in value):
        raise _refuse(name, value, "valid Unicode", "it has an unpaired surrogate")
    return value


def _salt(name: str, value: Any) -> str:
    return _text(name, value, MAX_CACHE_SALT_LENGTH)


def _sequence(name: str, value: Any, max_length: int, what: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise _refuse(name, value, f"a list of {what}")
    if len(value) > max_length:
        raise SamplingParamsError(f"{name} has {len(value)} entries; at most {max_length} are allowed")
    return value


def _texts(max_count: int, max_length: int) -> _Check:
    def check(name: str, value: Any) -> tuple[str, ...]:
        given = _sequence(name, [value] if isinstance(value, str) else value, max_count, "strings")
        return tuple(_text(f"{name}[{i}]", text, max_length) for i, text in enumerate(given))

    return check


_token_id = _integer(0, MAX_INT32)


def _token_ids(max_count: int, may_be_empty: bool = True) -> _Check:
    def check(name: str, value: Any) -> tuple[int, ...]:
        given = _sequence(name, value, max_count, "token ids")
        if not given and not may_be_empty:
            raise _refuse(name, value, "None or at least one token id", "an empty list would allow nothing")
        return tuple(_token_id(f"{name}[{i}]", token) for i, token in enumerate(given))

    return check


def _bias(name: str, value: Any) -> dict[int, float]:
    if not isinstance(value, dict):
        raise _refuse(name, value, "a dict from token id to a number")
    if len(value) > MAX_LOGIT_BIAS_ENTRIES:
        raise SamplingParamsError(f"{name} has {len(value)} entries; at most {MAX_LOGIT_BIAS_ENTRIES} are allowed")
    number = _number(-MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, "to forbid a token, use -100 or bad_words")
    return {_token_id(f"a key of {name}", key): number(f"{name}[{key}]", bias) for key, bias in value.items()}


def _kv_transfer(name: str, value: Any) -> dict[str, Any]:
    """Fields that Quire uses are checked; others belong to other engines."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _refuse(name, value, "a mapping with string keys, as in another engine's response")
    if len(value) > MAX_KV_TRANSFER_PARAMS:
        raise SamplingParamsError(f"{name} has {len(value)} entries; at most {MAX_KV_TRANSFER_PARAMS} are allowed")
    for key in ("do_remote_decode", "do_remote_prefill"):
        if value.get(key) is not None:
            _boolean(f"{name}[{key!r}]", value[key])
    if value.get("do_remote_decode") and value.get("do_remote_prefill"):
        raise SamplingParamsError(f"{name} has both do_remote_decode and do_remote_prefill; give one of them")
    for key in ("remote_engine_id", "remote_host"):
        if value.get(key) is not None:
            _text(f"{name}[{key!r}]", value[key], MAX_CACHE_SALT_LENGTH)
    return {key: value[key] for key in KV_TRANSFER_FIELDS if value.get(key) is not None}


_NOT_ALL = "the whole vocabulary, vLLM's -1, is not supported"

_CHECKS: dict[str, _Check] = {
    "n": _integer(1, MAX_N),
    "temperature": _number(0.0, MAX_TEMPERATURE, "0 is greedy decoding"),
    "top_p": _number(0.0, 1.0, "1 turns it off; for greedy decoding set temperature=0", above_low=True),
    "top_k": _top_k,
    "min_p": _number(0.0, 1.0, "0 turns it off"),
    "presence_penalty": _number(-MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY),
    "frequency_penalty": _number(-MAX_ADDITIVE_PENALTY, MAX_ADDITIVE_PENALTY),
    "repetition_penalty": _number(MIN_REPETITION_PENALTY, MAX_REPETITION_PENALTY, "1 turns it off"),
    "seed": _integer(-MAX_INT64 - 1, MAX_INT64),
    "stop": _texts(MAX_STOP_STRINGS, MAX_STOP_LENGTH),
    "stop_token_ids": _token_ids(MAX_STOP_TOKEN_IDS),
    "include_stop_str_in_output": _boolean,
    "min_tokens": _integer(0, MAX_INT32),
    "max_tokens": _integer(0, MAX_INT32, "None: the rest of the context; 0 only scores the prompt"),
    "ignore_eos": _boolean,
    "logit_bias": _bias,
    "allowed_token_ids": _token_ids(MAX_ALLOWED_TOKEN_IDS, may_be_empty=False),
    "bad_words": _texts(MAX_BAD_WORDS, MAX_BAD_WORD_LENGTH),
    "logprobs": _integer(0, MAX_LOGPROBS, f"0 returns only the sampled token's; {_NOT_ALL}"),
    "prompt_logprobs": _integer(0, MAX_LOGPROBS, f"0 returns only the prompt token's; {_NOT_ALL}"),
    "skip_special_tokens": _boolean,
    "priority": _integer(-MAX_INT32 - 1, MAX_INT32),
    "cache_salt": _salt,
    "speculate": _boolean,
    "kv_transfer_params": _kv_transfer,
    "structured_outputs": lambda name, value: structured_outputs(value),
    "thinking_token_budget": _budget,
    "truncate_prompt_tokens": _truncation,
}

_OPTIONAL = frozenset(
    name
    for name, default in zip(SamplingParams.__struct_fields__, SamplingParams.__struct_defaults__, strict=True)
    if default is None
)
