"""Workloads: jobs to send, generated as they are needed, the same for the same seed.

A job is a conversation, which has one turn except in `multi-turn`. A prompt is a list of pieces, each with a name and a
length; a piece's content depends only on the seed and its name, so prompts with the same first pieces share a prefix.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from quire.bench.serve.config import MAX_TOKENS, LoadConfig
from quire.errors import ConfigError

BLOCK = 512
"""Tokens per hash id in a trace."""
MAX_TRACE_BYTES = 1 << 30
FIRST_ID = 100
"""Lowest random token id: many vocabularies begin with control tokens."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a prompt: the first `length` tokens of an endless sequence that belongs to the name."""

    name: str
    length: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What is added to the conversation, the tokens to generate, and the seconds to wait before."""

    pieces: tuple[Piece, ...]
    output: int
    think: float = 0.0

    @property
    def length(self) -> int:
        """Tokens that this turn adds."""
        return sum(piece.length for piece in self.pieces)


@dataclass(frozen=True, slots=True)
class Job:
    """A conversation. `at` is when it begins, in seconds, if the workload defines that."""

    turns: tuple[Turn, ...]
    at: float | None = None


def make_jobs(config: LoadConfig) -> Iterator[Job]:
    """The jobs of a configuration; endless if it has no limit.

    Raises:
        ConfigError: the trace cannot be read, or a line of it is not valid.
    """
    rng = random.Random(f"{config.seed}:lengths")
    jobs = {"random": _random, "shared-prefix": _shared_prefix, "multi-turn": _multi_turn, "trace": _trace}
    return itertools.islice(jobs[config.kind](config, rng), config.limit)


def make_warmup(config: LoadConfig) -> Iterator[Job]:
    """Warm-up requests with the workload's lengths but other contents, so that they do not fill the prefix cache.

    Raises:
        ConfigError: see `make_jobs`; raised here, not when the first one is taken.
    """
    jobs = itertools.islice(itertools.cycle(make_jobs(config)), config.warmup)
    turns = (job.turns[0] for job in jobs)
    return (
        Job((Turn((Piece(f"warm-up-{number}", turn.length),), min(turn.output, 16)),))
        for number, turn in enumerate(turns)
    )


def _random(config: LoadConfig, rng: random.Random) -> Iterator[Job]:
    input_len, output_len = config.span("input_len"), config.span("output_len")
    for number in itertools.count():
        own = Piece(f"own-{number}", input_len.whole(rng))
        yield Job((Turn((own,), output_len.whole(rng)),))


def _shared_prefix(config: LoadConfig, rng: random.Random) -> Iterator[Job]:
    lengths = config.span("prefix_len")
    groups: dict[int, Piece] = {}
    for job in _random(config, rng):
        [turn] = job.turns
        group = rng.randrange(config.number("groups"))
        if group not in groups:
            groups[group] = Piece(f"group-{group}", lengths.whole(rng))
        yield Job((Turn((groups[group], *turn.pieces), turn.output),))


def _multi_turn(config: LoadConfig, rng: random.Random) -> Iterator[Job]:
    input_len, output_len = config.span("input_len"), config.span("output_len")
    turns, think = config.span("turns"), config.span("think_time")
    for number in itertools.count():
        yield Job(
            tuple(
                Turn(
                    (Piece(f"conversation-{number}-{turn}", input_len.whole(rng)),),
                    output_len.whole(rng),
                    think.real(rng) if turn else 0.0,
                )
                for turn in range(turns.whole(rng))
            )
        )


@dataclass(frozen=True, slots=True)
class TraceLine:
    """A request of a trace: its time in seconds, lengths in tokens, and one id per block of the prompt."""

    at: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: str) -> list[TraceLine]:
    """Read a trace; returns its requests in order of time.

    Raises:
        ConfigError: the file cannot be read, is empty, or a line is not valid (the message has its number).
    """
    try:
        with Path(path).expanduser().open("rb") as file:
            content = file.read(MAX_TRACE_BYTES + 1)
    except (OSError, RuntimeError, ValueError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise ConfigError(f"--trace {path} cannot be read: {reason}") from error
    if len(content) > MAX_TRACE_BYTES:
        raise ConfigError(f"--trace {path} is larger than {MAX_TRACE_BYTES} bytes; is it a trace?")
    lines = []
    for number, line in enumerate(content.split(b"\n"), 1):
        if line.strip():
            try:
                lines.append(_trace_line(msgspec.json.decode(line)))
            except (ValueError, TypeError, LookupError) as error:  # msgspec's errors are ValueErrors
                raise ConfigError(f"--trace {path}, line {number}: {_reason(error)}") from error
    if not lines:
        raise ConfigError(f"--trace {path} has no requests; write one JSON object per line")
    return sorted(lines, key=lambda line: line.at)


def _reason(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _trace_line(content: Any) -> TraceLine:
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    at, ids = content["timestamp"], content["hash_ids"]
    lengths = content["input_length"], content["output_length"]
    if type(at) not in (int, float) or not 0 <= at <= 1e12:
        raise ValueError(f"timestamp is {at!r}; it must be milliseconds from 0 on")
    for name, length, low in zip(("input_length", "output_length"), lengths, (1, 0), strict=True):
        if type(length) is not int or not low <= length <= MAX_TOKENS:
            raise ValueError(f"{name} is {length!r}; it must be a whole number from {low} to {MAX_TOKENS}")
    if not isinstance(ids, list) or not all(type(item) is int for item in ids):
        raise ValueError("hash_ids must be a list of whole numbers")
    blocks = -(-lengths[0] // BLOCK)
    if len(ids) != blocks:
        raise ValueError(
            f"{len(ids)} hash_ids for {lengths[0]} tokens; there must be {blocks}, one per {BLOCK}-token block"
        )
    return TraceLine(at / 1000, lengths[0], lengths[1], tuple(ids))


def _trace(config: LoadConfig, rng: random.Random) -> Iterator[Job]:
    scale, speedup = config.number("scale"), config.number("speedup")
    return trace_jobs(read_trace(str(config.trace)), scale, speedup)


def trace_jobs(lines: list[TraceLine], scale: float, speedup: float) -> Iterator[Job]:
    """The jobs of a trace, with lengths divided by `scale` (at least 1) and times by `speedup`."""
    for line in lines:
        length = max(1, round(line.input_length / scale))
        ends = [min(length, round(BLOCK * (block + 1) / scale)) for block in range(len(line.hash_ids))]
        ends[-1] = length
        starts = [0, *ends]
        pieces = (
            Piece(f"block-{name}", end - start)
            for name, start, end in zip(line.hash_ids, starts, ends, strict=False)
            if end > start
        )
        yield Job((Turn(tuple(pieces), max(1, round(line.output_length / scale))),), at=line.at / speedup)


def token_ids(seed: int, piece: Piece, vocab_size: int) -> list[int]:
    """A piece as token ids from `FIRST_ID` to below `vocab_size`; a longer one of that name begins with these."""
    ids: list[int] = (_numbers(seed, piece) % (vocab_size - FIRST_ID) + FIRST_ID).tolist()
    return ids


def words(seed: int, piece: Piece) -> str:
    """A piece as words; each is about one token with the space before it."""
    return " ".join(_WORDS[number] for number in (_numbers(seed, piece) % len(_WORDS)).tolist())


def _numbers(seed: int, piece: Piece) -> Any:
    """32-bit numbers from an extendable-output hash: fast, and the same on every machine and version."""
    stream = hashlib.shake_128(f"{seed}:{piece.name}".encode()).digest(4 * piece.length)
    return np.frombuffer(stream, dtype="<u4")


_TEXT = (
    "the of and to in is that it was for on are with as his they be at one have this from or had by hot but some "
    "what there we can out other were all your when up use word how said an each she which do their time if will "
    "way about many then them would write like so these her long make thing see him two has look more day could "
    "go come did my sound no most number who over know water than call first people may down side been now find "
    "any new work part take get place made live where after back little only round man year came show every good "
    "me give our under name very through just form much great think say help low line before turn cause same mean "
    "differ move right boy old too does tell sentence set three want air well also play small end put home read "
    "hand port large spell add even land here must big high such follow act why ask men change went light kind "
    "off need house picture try us again animal point mother world near build self earth father head stand own "
    "page should country found answer school grow study still learn plant cover food sun four thought let keep "
    "eye never last door between city tree cross since hard start might story saw far sea draw left late run "
    "while press close night real life few stop"
)
_WORDS = _TEXT.split()
"""Common words, one token each in most vocabularies."""
