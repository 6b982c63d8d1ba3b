"""What the processes of a server say to each other: typed messages, msgpack, over ZeroMQ on Unix sockets.

Everything lies in one private folder, made anew for each server:

- `control.sock`: the supervisor's ROUTER. HTTP processes and engines connect a DEALER whose identity is their
  name ("http-0", "engine-0-1"). Lifecycle only: who is up, who died, who must go.
- `engine-{replica}-{boot}.sock`: an engine's ROUTER. HTTP processes connect a DEALER. Requests in, tokens out.
- `engine-{replica}-{boot}.board`: the engine's status board (see `board.py`), for whoever wants to know how it does
  even when it cannot answer. `http-{worker}.board`: an HTTP process's, of which the pulse alone is used.

A request is known by a number that its HTTP process made (worker index in the high bits), unique in the life of the
server, so that it survives the death of an engine. Names that clients see are labels, never keys.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from quire.core.pooling import PoolingParams
from quire.core.request import RequestUpdate
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import ReasoningBudget

WORKER_SHIFT = 40
"""A request's number is `worker << WORKER_SHIFT | count`."""


class EngineInfo(msgspec.Struct, kw_only=True):
    """What others must know of an engine that is ready.

    Attributes:
        boot: which engine of its replica it is, from 1 on.
        path: folder of the checkpoint.
        fingerprint: names what tokens depend on: checkpoint, data type, kernels.
        checkpoint: a hash of its content.
        kernels: the same kernels for people.
        sampling_defaults: what unset sampling parameters mean.
        memory_plan: rows of the plan, for people.
        full_length_requests: how many requests of `max_model_len` tokens the KV pool holds at once.
        config: every engine option, with what the engine made of those that were left to it.
        kv_transfer: where other engines may ask for prompts to be computed: `remote_engine_id`, `remote_host` and
            `remote_port`; empty: nowhere.
        causal: see `ModelSizes`.
    """

    boot: int
    path: str
    architecture: str
    dtype: str
    kernels: str
    fingerprint: str
    threads: int
    vocab_size: int
    max_model_len: int
    eos_token_ids: list[int]
    sampling_defaults: dict[str, Any]
    num_blocks: int
    block_size: int
    kv_bytes_per_token: int
    full_length_requests: int
    parameters: int
    weight_bytes: int
    notes: list[str]
    memory_plan: list[tuple[str, str]]
    config: dict[str, Any]
    kv_transfer: dict[str, Any] = {}
    checkpoint: str = ""
    causal: bool = True


# -- HTTP process to engine ----------------------------------------------------------------------------------


class Add(msgspec.Struct, tag="add", kw_only=True):
    """Run a request, or one choice of it.

    Attributes:
        number: this choice's number, unique in the life of the server.
        name: the id that the client sees; choices of one response share it.
        owner: the tenant it belongs to ("" where there is one only).
        params: with a seed and with every default filled in.
        output_token_ids: what it has produced already, when it resumes on a new engine.
        num_scored: prompt log-probabilities that were delivered already.
        pooling, reasoning: see `Request`.
        suspect: it was in the step that brought an engine down; it runs on probation.
        prompt_names: what a router calls the beginnings of the prompt, see `fleet/prompt.py`; empty: none has sent it.
        arrived: seconds on the monotonic clock of this machine. tokenize_seconds: what rendering and tokenizing took.
    """

    number: int
    name: str
    owner: str = ""
    prompt_token_ids: list[int]
    params: SamplingParams
    max_tokens: int
    choice: int = 0
    stop_token_ids: list[int] = []
    bad_words: list[list[int]] = []
    scope: str = ""
    arrived: float = 0.0
    tokenize_seconds: float = 0.0
    output_token_ids: list[int] = []
    num_scored: int = 0
    pooling: PoolingParams | None = None
    reasoning: ReasoningBudget | None = None
    suspect: bool = False
    prompt_names: bytes = b""


class Abort(msgspec.Struct, tag="abort"):
    """End one request. `reason` is "abort", or "stop" where a stop string was found."""

    number: int
    reason: str = "abort"


class Told(msgspec.Struct, tag="told"):
    """A request's text has been made: what the HTTP side knows of where its time went, for the live view."""

    number: int
    detokenize_seconds: float


class AbortNamed(msgspec.Struct, tag="abort_named"):
    """End all choices of the response with this name, of this owner. Answered by a `Reply`: true if there was one."""

    ticket: int
    name: str
    owner: str


class Inspect(msgspec.Struct, tag="inspect"):
    """Tell how things stand; answered by a `Reply` with a JSON document of `recorder.py`, or "prompts": of
    `fleet/cached_prompts.py`."""

    ticket: int
    what: Literal["live", "requests", "steps", "stats", "prompts"]
    since: int = 0  # steps, or events, before this number are known already


class Life(msgspec.Struct, tag="life"):
    """Tell where the time of the response with this name went; answered by a `Reply` with a JSON list, a document a
    choice, see `recorder.py`."""

    ticket: int
    name: str


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Forget every cached block that no request uses. Answered by a `Reply`: the number of blocks."""

    ticket: int


ToEngine = Add | Abort | Told | AbortNamed | Inspect | Life | ResetPrefixCache


# -- engine to HTTP process ----------------------------------------------------------------------------------


class Updates(msgspec.Struct, tag="updates"):
    """What a step yielded for the requests of this HTTP process; `request` is the number given in `Add`."""

    updates: list[RequestUpdate]


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a question, as JSON."""

    ticket: int
    value: bytes


FromEngine = Updates | Reply


# -- control: supervisor and the others ----------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello"):
    """An HTTP process is up (its socket is served) and wants to know the engine's state."""

    worker: int
    pid: int


class EngineState(msgspec.Struct, tag="state", kw_only=True):
    """How a replica does: to every HTTP process, whenever it changes.

    Attributes:
        replica: which one, from 0 on; a server of one engine has the first alone.
        boot: the engine that this is about.
        state: "loading", "ready", "restarting" (one died, `boot` is the next one) or "failed" (no more restarts).
        path: folder of the checkpoint, as soon as it is known, so that tokenizers can load.
        info: when ready.
        cause: why the last engine died, for people.
        suspects: numbers of the requests in the step that it died in.
        culprit: number of the request on probation in that step, which is ended for it; else None.
        killed: it was ended from outside, as far as anybody can tell, so that its suspects may go elsewhere.
    """

    replica: int = 0
    boot: int
    state: Literal["loading", "ready", "restarting", "failed"]
    path: str | None = None
    info: EngineInfo | None = None
    cause: str | None = None
    suspects: list[int] = []
    culprit: int | None = None
    killed: bool = False


class Drain(msgspec.Struct, tag="drain"):
    """To every HTTP process: take no new requests, end those that still run after `seconds`, then leave."""

    seconds: float


class Located(msgspec.Struct, tag="located"):
    """From an engine: the checkpoint's folder is known; loading goes on."""

    path: str


class EngineReady(msgspec.Struct, tag="ready"):
    """From an engine: it takes requests."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed"):
    """From an engine that cannot start; it leaves after this.

    `invalid`: since an option or the checkpoint is not valid, so that a restart would not help.
    """

    message: str
    invalid: bool = False


class ClientGone(msgspec.Struct, tag="gone"):
    """To the engine: this HTTP process died; its requests have no reader."""

    worker: int


class Stop(msgspec.Struct, tag="stop"):
    """To the engine: leave."""


FromSupervisor = EngineState | Drain | ClientGone | Stop
ToSupervisor = Hello | Located | EngineReady | EngineFailed

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode
decode_to_supervisor = msgspec.msgpack.Decoder(ToSupervisor).decode


def control_address(directory: Path) -> str:
    """Where the supervisor listens."""
    return f"ipc://{directory}/control.sock"


def engine_name(replica: int, boot: int) -> str:
    """What an engine is called on the wire."""
    return f"engine-{replica}-{boot}"


def engine_address(directory: Path, replica: int, boot: int) -> str:
    """Where an engine listens."""
    return f"ipc://{directory}/{engine_name(replica, boot)}.sock"


def board_path(directory: Path, replica: int, boot: int) -> Path:
    """An engine's status board."""
    return directory / f"{engine_name(replica, boot)}.board"


def http_board_path(directory: Path, worker: int) -> Path:
    """An HTTP process's status board."""
    return directory / f"http-{worker}.board"
