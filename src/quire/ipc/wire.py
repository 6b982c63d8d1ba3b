"""The messages between a server's processes: typed structs in msgpack, over ZeroMQ on Unix sockets.

All files are in one private folder, created for each server:

- `control.sock`: the supervisor's ROUTER. HTTP processes and engines connect a DEALER whose identity is their
  name ("http-0", "engine-0-1"). For lifecycle only: which processes are ready, have died, or must stop.
- `engine-{replica}-{boot}.sock`: an engine's ROUTER. HTTP processes connect a DEALER. Requests in, tokens out.
- `engine-{replica}-{boot}.board`: the engine's status board (see `board.py`), which others can read even if the engine
  does not answer. `http-{worker}.board`: an HTTP process's, of which only the pulse is used.

A request is identified by a number that its HTTP process assigns (with the worker index in the high bits). It is unique
for the lifetime of the server, so that the request survives the death of an engine. Names that clients see are labels,
never keys.
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
    """Describes an engine that is ready.

    Attributes:
        boot: number of this engine among those of its replica, from 1 on.
        path: folder of the checkpoint.
        fingerprint: identifies what tokens depend on: checkpoint, data type, kernels.
        checkpoint: a hash of the checkpoint's contents.
        kernels: a description of the kernels, for people.
        sampling_defaults: values of sampling parameters that are not set.
        memory_plan: rows of the plan, for people.
        full_length_requests: number of requests of `max_model_len` tokens that fit into the KV pool at once.
        config: every engine option; those left to the engine have the values that it chose.
        kv_transfer: the address at which other engines may request prefills: `remote_engine_id`, `remote_host` and
            `remote_port`; empty if there is none.
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
        number: this choice's number, unique for the lifetime of the server.
        name: the id that the client sees; the choices of a response share it.
        owner: the tenant it belongs to; "" if there is only one. queue: who takes turns, the owner in the engine.
        params: with a seed and with all defaults filled in.
        output_token_ids: tokens generated so far, if it resumes on another engine.
        num_scored: number of prompt log-probabilities that were delivered already.
        pooling, reasoning: see `Request`.
        suspect: it was in the step in which an engine died, so it runs on probation.
        prompt_names: a router's names of the prompt's prefixes, see `fleet/prompt.py`; empty without a router.
        arrived: time on this machine's monotonic clock. tokenize_seconds: duration of rendering and tokenizing.
    """

    number: int
    name: str
    owner: str = ""
    queue: str = ""
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
    """End one request. `reason` is "abort", or "stop" if a stop string was found."""

    number: int
    reason: str = "abort"


class Told(msgspec.Struct, tag="told"):
    """A request's detokenization time, which only the HTTP process knows, for the live view."""

    number: int
    detokenize_seconds: float


class AbortNamed(msgspec.Struct, tag="abort_named"):
    """End all choices of this owner's response with this name. Answered by a `Reply`: whether there was one."""

    ticket: int
    name: str
    owner: str


class Inspect(msgspec.Struct, tag="inspect"):
    """Answered by a `Reply` with a JSON document of `recorder.py`, or for "prompts", of `fleet/cached_prompts.py`."""

    ticket: int
    what: Literal["live", "requests", "steps", "stats", "prompts"]
    since: int = 0  # leave out steps, or events, before this number


class Life(msgspec.Struct, tag="life"):
    """How the time of the response with this name was spent; answered by a `Reply` with a JSON list of one document per
    choice, see `recorder.py`."""

    ticket: int
    name: str


class ResetPrefixCache(msgspec.Struct, tag="reset"):
    """Evict every cached block that no request uses. Answered by a `Reply`: the number of blocks."""

    ticket: int


ToEngine = Add | Abort | Told | AbortNamed | Inspect | Life | ResetPrefixCache


# -- engine to HTTP process ----------------------------------------------------------------------------------


class Updates(msgspec.Struct, tag="updates"):
    """A step's updates for the requests of this HTTP process; `request` is the number given in `Add`."""

    updates: list[RequestUpdate]


class Reply(msgspec.Struct, tag="reply"):
    """The answer to a question, as JSON."""

    ticket: int
    value: bytes


FromEngine = Updates | Reply


# -- control: supervisor and the others ----------------------------------------------------------------------


class Hello(msgspec.Struct, tag="hello"):
    """An HTTP process serves its socket, and wants to know the engine's state."""

    worker: int
    pid: int


class EngineState(msgspec.Struct, tag="state", kw_only=True):
    """The state of a replica, sent to every HTTP process whenever it changes.

    Attributes:
        replica: the replica's number, from 0 on.
        boot: number of its current engine.
        state: "loading", "ready", "restarting" (an engine died, `boot` is the next one) or "failed" (no more restarts).
        path: folder of the checkpoint, as soon as it is known, so that tokenizers can load.
        tokenizer: folder of the tokenizer; None if it is the same one.
        info: set when it is ready.
        cause: why the last engine died, for people.
        suspects: numbers of the requests in the step in which it died.
        culprit: number of the request on probation in that step, which must end; None if there was none.
        killed: it was probably killed from outside, so its suspects may go to other replicas.
    """

    replica: int = 0
    boot: int
    state: Literal["loading", "ready", "restarting", "failed"]
    path: str | None = None
    tokenizer: str | None = None
    info: EngineInfo | None = None
    cause: str | None = None
    suspects: list[int] = []
    culprit: int | None = None
    killed: bool = False


class Drain(msgspec.Struct, tag="drain"):
    """To every HTTP process: accept no new requests, end those that still run after `seconds`, then exit."""

    seconds: float


class Located(msgspec.Struct, tag="located"):
    """From an engine: the folders of the checkpoint and the tokenizer are known, see `EngineState`; loading goes on."""

    path: str
    tokenizer: str | None = None


class EngineReady(msgspec.Struct, tag="ready"):
    """From an engine: it accepts requests."""

    info: EngineInfo


class EngineFailed(msgspec.Struct, tag="failed"):
    """From an engine that cannot start, and exits.

    `invalid`: an option or the checkpoint is not valid, so a restart would not help.
    """

    message: str
    invalid: bool = False


class ClientGone(msgspec.Struct, tag="gone"):
    """To the engine: this HTTP process died; its requests have no reader."""

    worker: int


class Stop(msgspec.Struct, tag="stop"):
    """To the engine: exit."""


FromSupervisor = EngineState | Drain | ClientGone | Stop
ToSupervisor = Hello | Located | EngineReady | EngineFailed

_encoder = msgspec.msgpack.Encoder()
encode = _encoder.encode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
decode_from_supervisor = msgspec.msgpack.Decoder(FromSupervisor).decode
decode_to_supervisor = msgspec.msgpack.Decoder(ToSupervisor).decode


def control_address(directory: Path) -> str:
    """The supervisor's address."""
    return f"ipc://{directory}/control.sock"


def engine_name(replica: int, boot: int) -> str:
    """An engine's name, which is its identity on `control.sock`."""
    return f"engine-{replica}-{boot}"


def engine_address(directory: Path, replica: int, boot: int) -> str:
    """An engine's address."""
    return f"ipc://{directory}/{engine_name(replica, boot)}.sock"


def board_path(directory: Path, replica: int, boot: int) -> Path:
    """The file of an engine's status board."""
    return directory / f"{engine_name(replica, boot)}.board"


def http_board_path(directory: Path, worker: int) -> Path:
    """The file of an HTTP process's status board."""
    return directory / f"http-{worker}.board"
