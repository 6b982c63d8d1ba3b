"""The prompts of `quire generate`: from arguments, standard input, or a file of JSON lines."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from quire.cli.options import sampling_params
from quire.config import unknown_option
from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigError, RequestError

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")


@dataclass(frozen=True, kw_only=True)
class Job:
    """One prompt to complete.

    Attributes:
        prompt: a text or token ids; empty if there are `messages`.
        messages: of a chat, for the model's chat template.
        params: sampling parameters.
        id: the user's label, returned with the result.
        place: its source, for error messages; empty if it is the only prompt.
    """

    prompt: str | list[int] = ""
    messages: list[dict[str, Any]] | None = None
    params: SamplingParams
    id: Any = None
    place: str = ""

    @property
    def title(self) -> str:
        """The prompt as text, shown before its completion."""
        if self.messages is not None:
            return str(self.messages[-1].get("content", "")) + "\n"
        return self.prompt if isinstance(self.prompt, str) else f"{len(self.prompt)} token ids"


def text_jobs(texts: Sequence[str], sampling: Mapping[str, Any], chat: bool) -> list[Job]:
    """One job per text; with `chat`, each text is a user message.

    Raises:
        SamplingParamsError: a sampling parameter is not valid. RequestError: a text is not UTF-8.
    """
    params, several = sampling_params(sampling), len(texts) > 1
    jobs = []
    for index, text in enumerate(texts):
        place = f"prompt {index}" if several else ""
        _check_utf8(text, place or "the prompt")
        what = _as_message(text) if chat else {"prompt": text}
        jobs.append(Job(**what, params=params, id=index, place=place))
    return jobs


def _check_utf8(text: str, what: str) -> None:
    """Refuse text that is not UTF-8, which Python reads as surrogates in arguments and, with some locales, in files."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not text in UTF-8, at character {error.start}; convert it to UTF-8") from None


def need_stdin() -> None:
    """Check that standard input is open. Raises ConfigError if the caller closed it."""
    if sys.stdin is None:
        raise ConfigError(
            "standard input is closed, but prompts are read from it; pipe something in, or redirect it from /dev/null"
        )


def refuse_same_file(source: str, output: str) -> None:
    """Refuse to write results over the prompts. A source of `-` is standard input.

    Raises:
        ConfigError: both are the same regular file.
    """
    try:
        read = os.fstat(sys.stdin.fileno()) if source == "-" and sys.stdin else Path(source).stat()
        written = Path(output).stat()
    except (OSError, ValueError):  # one of them does not exist, or is no file at all
        return
    if stat.S_ISREG(written.st_mode) and os.path.samestat(read, written):
        raise ConfigError(f"--output {output} is also the input file; give another one")


def read_stdin(lines: bool) -> list[str]:
    """Standard input as one prompt (without its last line break), or as one prompt per line.

    Raises:
        ConfigError: it is closed.
        RequestError: it is empty, or not UTF-8.
    """
    need_stdin()
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise RequestError(f"standard input is not text in UTF-8: {error}") from error
    prompts = [line for line in text.split("\n") if line.strip()] if lines else [text.removesuffix("\n")]
    if not text.strip():
        raise RequestError("standard input is empty; give prompts as arguments, by --input FILE.jsonl, or pipe them in")
    return prompts


def read_jsonl(path: str, sampling: Mapping[str, Any], chat: bool) -> list[Job]:
    """One job per line; `-` is standard input. Blank lines and a byte order mark are skipped.

    A line is an object with `prompt`, `prompt_token_ids` or `messages`, and optionally `id` and sampling parameters,
    which take precedence over `sampling`.

    Raises:
        ConfigError: the file cannot be read.
        RequestError: a line is not valid; the message names it.
    """
    if not path:
        raise ConfigError("--input is empty; give a file of JSON lines, or - for standard input")
    if path == "-":
        need_stdin()
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--input {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--input {path} is not text in UTF-8: {error}") from error
    jobs = list(_jobs(text.removeprefix("\ufeff"), path, sampling, chat))
    if not jobs:
        raise RequestError(f"--input {path} has no prompts; give one JSON object per line")
    return jobs


def _jobs(text: str, path: str, sampling: Mapping[str, Any], chat: bool) -> Iterator[Job]:
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            place = f"{path}, line {number}"
            try:
                yield _job(line, number, place, sampling, chat)
            except RequestError as error:
                raise type(error)(f"{place}: {error}") from error
            except RecursionError as error:
                raise RequestError(f"{place}: lists or objects are nested too deeply") from error


def _job(line: str, number: int, place: str, sampling: Mapping[str, Any], chat: bool) -> Job:
    try:
        entry = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise RequestError(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RequestError(f'is a {type(entry).__name__}; it must be an object such as {{"prompt": "..."}}')
    label = entry.pop("id", number)
    kinds = [key for key in PROMPT_KEYS if key in entry]
    if len(kinds) != 1:
        raise RequestError(
            f"has {' and '.join(kinds) or 'no prompt'}; it must have exactly one of {', '.join(PROMPT_KEYS)}"
        )
    prompt = _checked_prompt(kinds[0], entry.pop(kinds[0]))
    for key in entry:
        if key not in SamplingParams.__struct_fields__:
            raise RequestError(unknown_option(key, ["id", *PROMPT_KEYS, *SamplingParams.__struct_fields__]))
    if kinds == ["prompt"] and chat:
        content = _as_message(prompt)
    else:
        content = {"messages" if kinds == ["messages"] else "prompt": prompt}
    return Job(**content, params=sampling_params({**sampling, **entry}), id=label, place=place)


def _as_message(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


def _checked_prompt(kind: str, value: Any) -> Any:
    """The value, checked to be of its key's type."""
    types = {"prompt": str, "prompt_token_ids": list[int], "messages": list[dict[str, Any]]}
    try:
        prompt = msgspec.convert(value, types[kind])
    except msgspec.ValidationError as error:
        raise RequestError(f"{kind}: {error}") from error
    if not prompt:
        raise RequestError(f"{kind} is empty; give at least one token")
    return prompt
