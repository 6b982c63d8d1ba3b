"""LoadConfig: every option of `quire bench serve`, checked."""

from __future__ import annotations

import dataclasses
import math
import random
import re
from typing import Any, Literal, get_type_hints

import msgspec

from quire.address import Address
from quire.config import check_field, option
from quire.errors import ConfigError
from quire.tls import CACERT

MAX_TOKENS = 10_000_000
"""Largest length of an input or output."""

_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "input_len": ("random", "shared-prefix", "multi-turn"),
    "output_len": ("random", "shared-prefix", "multi-turn"),
    "num_requests": ("random", "shared-prefix", "trace"),
    "groups": ("shared-prefix",),
    "prefix_len": ("shared-prefix",),
    "conversations": ("multi-turn",),
    "turns": ("multi-turn",),
    "think_time": ("multi-turn",),
    "trace": ("trace",),
    "scale": ("trace",),
    "speedup": ("trace",),
}
_DEFAULTS: dict[str, Any] = {
    "input_len": "256",
    "output_len": "64",
    "groups": 4,
    "prefix_len": "512",
    "turns": "4",
    "think_time": "0",
    "scale": 1.0,
    "speedup": 1.0,
}
_OURS = ("model", "prompt", "messages", "stream", "stream_options", "max_tokens", "n")
"""Fields of a request that are set by an option, or that the measurement depends on."""

TARGETS = ("ttft", "tpot", "e2e")


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A range from which values are drawn uniformly; written LOW-HIGH, or as one number."""

    low: float
    high: float

    def whole(self, rng: random.Random) -> int:
        """Draw a whole number, ends included."""
        return rng.randint(int(self.low), int(self.high))

    def real(self, rng: random.Random) -> float:
        """Draw a number."""
        return rng.uniform(self.low, self.high)


def _span(name: str, text: str, low: int, high: int, whole: bool) -> Span:
    number = r"\d{1,9}" if whole else r"\d{1,9}(?:\.\d{1,9})?"
    match = re.fullmatch(f"({number})(?:-({number}))?", text.strip())
    if match:
        span = Span(float(match[1]), float(match[2] or match[1]))
        if low <= span.low <= span.high <= high:
            return span
    raise ConfigError(f"{name}={text!r} is not valid; give a number from {low} to {high}, or two as in 1-8")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """The load to send, to which server, and the latency targets.

    Options without a default here get one that depends on the workload: see the methods.

    Raises:
        ConfigError: an option has the wrong type, is out of range, or does not fit another one.
    """

    url: str = dataclasses.field(
        metadata={"help": "the server's URL, such as http://127.0.0.1:8000 (/v1 is added), or unix:PATH"}
    )
    model: str | None = option(None, "model name to request; default: the first that the server lists")
    api_key: str | None = dataclasses.field(
        default=None, repr=False, metadata={"help": "API key to send, or @FILE with the key in its first line"}
    )
    cacert: str | None = option(None, CACERT)
    endpoint: Literal["completions", "chat"] = option("completions", "/v1/completions or /v1/chat/completions")
    prompt_type: Literal["ids", "text"] | None = option(
        None, "prompts as token ids, or as common words of about one token each; default: ids if the workload allows"
    )
    workload: Literal["random", "shared-prefix", "multi-turn", "trace"] | None = option(
        None, "kind of prompts, see above; default: random, or trace with --trace"
    )
    input_len: str | None = option(
        None, "tokens of a prompt (after a shared prefix; of each turn): N or LOW-HIGH; default: 256"
    )
    output_len: str | None = option(None, "tokens to generate: N or LOW-HIGH; default: 64", short="--max-tokens")
    groups: int | None = option(None, "shared-prefix: number of prefixes; default: 4", low=1, high=10**6)
    prefix_len: str | None = option(None, "shared-prefix: tokens of a prefix: N or LOW-HIGH; default: 512")
    conversations: int | None = option(None, "multi-turn: number of conversations; default: 16", low=1, high=10**9)
    turns: str | None = option(None, "multi-turn: turns per conversation: N or LOW-HIGH; default: 4")
    think_time: str | None = option(
        None, "multi-turn: seconds between an answer and the next turn: X or LOW-HIGH; default: 0"
    )
    trace: str | None = option(
        None,
        "file of JSON lines to replay: timestamp (ms), input_length, output_length, hash_ids (a 512-token block each)",
    )
    scale: float | None = option(None, "trace: divide lengths and blocks by this; default: 1", low=1.0, high=512.0)
    speedup: float | None = option(None, "trace: divide times by this; default: 1", low=1e-6, high=1e9)
    concurrency: int | None = option(
        None, "closed loop: number of requests at a time; default: 8, unless --rate or --trace", low=1, high=10**5
    )
    rate: str | None = option(
        None, "open loop: new requests (or conversations) per second, regardless of those running; or inf"
    )
    burstiness: float | None = option(
        None,
        "with --rate: shape of the gamma distribution of the gaps between requests; default: 1, a Poisson process; "
        "lower is burstier",
        low=1e-3,
        high=1e6,
    )
    num_requests: int | None = option(
        None, "number of requests; default: 100, the whole trace, or unlimited with --duration", low=1, high=10**9
    )
    duration: float | None = option(
        None, "send no new requests after this many seconds; running ones finish", low=0.001, high=1e7
    )
    warmup: int = option(
        1, "requests sent first and not counted, with other prompts and at most 16 output tokens", low=0, high=10**6
    )
    timeout: float = option(600.0, "timeout of a request in seconds", low=0.001, high=1e7)
    connect_timeout: float = option(10.0, "timeout of opening a connection in seconds", low=0.001, high=1e7)
    wait: float = option(0.0, "seconds to wait for a server that is still starting", low=0.0, high=1e7)
    seed: int = option(
        0,
        "the same seed gives the same prompts, lengths and arrivals; a new one gives prompts that no cache has",
        low=0,
        high=2**63,
    )
    vocab_size: int = option(1000, "random token ids are between 100 and this (exclusive)", low=101, high=2**31)
    temperature: float = option(0.0, "sampling temperature", low=0.0, high=1e4)
    ignore_eos: bool = option(True, "generate exactly the output length, with the field ignore_eos")
    return_token_ids: bool = option(
        False, "request token ids with each chunk (Quire and vLLM can), to count a chunk's tokens exactly"
    )
    extra_body: str | None = option(None, "JSON object with additional fields of each request")
    goodput: tuple[str, ...] = dataclasses.field(
        default=(),
        metadata={"help": f"latency target NAME:MILLISECONDS for goodput; names: {', '.join(TARGETS)}"},
    )

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            if field.name != "goodput":
                check_field(field, hints[field.name], getattr(self, field.name))
        Address(self.url)
        if self.api_key is not None and not re.fullmatch(r"[!-~]+", self.api_key):
            raise ConfigError("api_key is empty, or has a character that no header could carry; give another one")
        self._check_workload()
        self._check_arrivals()
        for name in ("input_len", "output_len", "prefix_len", "turns", "think_time"):
            self.span(name)
        _ = self.targets, self.extra_fields

    def _check_workload(self) -> None:
        kind = self.kind
        for name, kinds in _ONLY_FOR.items():
            if getattr(self, name) is not None and kind not in kinds:
                flag = "--" + name.replace("_", "-")
                instead = "; use --conversations and --turns" if name == "num_requests" else ""
                raise ConfigError(
                    f"{flag} does not apply to the workload {kind!r}, only to {', '.join(kinds)}{instead}"
                )
        if kind == "trace" and self.trace is None:
            raise ConfigError("the workload 'trace' needs a file: --trace FILE")
        if self.endpoint == "chat" and self.prompt_type == "ids":
            raise ConfigError("--prompt-type ids does not work with --endpoint chat, whose messages are text")

    def _check_arrivals(self) -> None:
        if self.rate is not None and self.concurrency is not None:
            raise ConfigError("--rate (open loop) and --concurrency (closed loop) were both given; give one")
        if self.burstiness is not None and self.rate is None:
            raise ConfigError("--burstiness shapes the arrivals of --rate; give that too, or leave it out")
        if self.speedup is not None and (self.rate is not None or self.concurrency is not None):
            raise ConfigError("--speedup changes a trace's times, which --rate and --concurrency replace; leave it out")
        if self.rate is not None and not self.requests_per_second > 0:
            raise ConfigError(f"--rate {self.rate} is not valid; give requests per second above 0, or inf")

    @property
    def kind(self) -> str:
        """The workload."""
        return self.workload or ("random" if self.trace is None else "trace")

    @property
    def requests_per_second(self) -> float:
        """The requested rate: a number above 0, or infinity; NaN if it is neither."""
        if self.rate in ("inf", "infinity"):
            return math.inf
        try:
            rate = float(self.rate or "nan")
        except ValueError:
            return math.nan
        return rate if 1e-6 <= rate <= 1e6 else math.nan

    @property
    def at_a_time(self) -> int | None:
        """Requests at a time in a closed loop; None in an open loop."""
        open_loop = self.rate is not None or (self.kind == "trace" and self.concurrency is None)
        return None if open_loop else self.concurrency or 8

    @property
    def as_text(self) -> bool:
        """Whether prompts are words instead of token ids."""
        if self.prompt_type is not None:
            return self.prompt_type == "text"
        return self.endpoint == "chat" or self.kind == "multi-turn"

    @property
    def asks_token_ids(self) -> bool:
        """Whether to request token ids with chunks: by option, or for a conversation's next prompt."""
        return self.return_token_ids or (self.kind == "multi-turn" and not self.as_text)

    @property
    def limit(self) -> int | None:
        """Number of requests (or conversations) to send; None if only the trace or the duration limits it."""
        if self.kind == "multi-turn":
            return self.conversations or (None if self.duration else 16)
        endless = self.duration is not None or self.kind == "trace"
        return self.num_requests or (None if endless else 100)

    def number(self, name: str) -> Any:
        """An option's value, or its default for this workload."""
        value = getattr(self, name)
        return _DEFAULTS[name] if value is None else value

    def span(self, name: str) -> Span:
        """An option that is a number or a range."""
        if name == "think_time":
            return _span(name, self.number(name), 0, 10**6, whole=False)
        return _span(name, self.number(name), 1, MAX_TOKENS, whole=True)

    @property
    def targets(self) -> dict[str, float]:
        """The latency targets of --goodput in seconds, by name."""
        targets: dict[str, float] = {}
        for text in self.goodput:
            match = re.fullmatch(r"([a-z0-9]+):(\d{1,9}(?:\.\d{1,9})?)", text)
            if not match or match[1] not in TARGETS:
                raise ConfigError(
                    f"--goodput {text!r} is not valid; write NAME:MILLISECONDS, as in ttft:500, of {', '.join(TARGETS)}"
                )
            if match[1] in targets:
                raise ConfigError(f"--goodput names {match[1]} twice; remove one")
            targets[match[1]] = float(match[2]) / 1000
        return targets

    @property
    def extra_fields(self) -> dict[str, Any]:
        """Additional fields of each request."""
        if self.extra_body is None:
            return {}
        try:
            fields = msgspec.json.decode(self.extra_body)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise ConfigError(f"--extra-body is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise ConfigError(f"--extra-body must be a JSON object, as in '{{\"top_p\": 0.9}}'; it is {fields!r}")
        taken = [name for name in fields if name in _OURS]
        if taken:
            raise ConfigError(f"--extra-body may not set {', '.join(taken)}: the load generator sets them")
        return fields

    def settings(self) -> dict[str, Any]:
        """Every setting in effect, for a report, without the API key."""
        kind = self.kind
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in _DEFAULTS:
            values[name] = self.number(name) if kind in _ONLY_FOR[name] else None
        values["num_requests"] = None if kind == "multi-turn" else self.limit
        values["conversations"] = self.limit if kind == "multi-turn" else None
        values |= {
            "api_key": None if self.api_key is None else "given",
            "workload": kind,
            "prompt_type": "text" if self.as_text else "ids",
            "concurrency": self.at_a_time,
            "burstiness": self.burstiness or (None if self.rate is None else 1.0),
            "return_token_ids": self.asks_token_ids,
            "goodput": list(self.goodput),
        }
        if self.at_a_time is not None or self.rate is not None:
            values["speedup"] = None  # the trace's times are not used
        return values
