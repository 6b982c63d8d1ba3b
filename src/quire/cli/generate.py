"""Complete prompts.

The first argument is the model unless --model names it; the others are prompts. Without any, the prompt is read
from standard input. Text goes to standard output; with several prompts, each has a heading and follows its prompt.
Progress and a summary go to standard error; -v shows more."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.cli.inputs import Job, read_jsonl, read_stdin, refuse_same_file, text_jobs
from quire.cli.options import add_engine_options, add_sampling_options, given_options
from quire.cli.start import add_detail_options, detail, start
from quire.errors import ChatTemplateError, CheckpointNotFoundError, ConfigError, RequestError

if TYPE_CHECKING:
    from quire.cli.views import View
    from quire.engine.outputs import RequestOutput
    from quire.llm import LLM

DEMO_HEAD = '"""Small helpers, each with a test."""\n\nimport os\nimport re\nimport sys\n\n\n'
"""The common prefix of the demo prompts, for the prefix cache."""

DEMO_PROMPTS = tuple(
    DEMO_HEAD + prompt
    for prompt in (
        "def read_lines(path):\n",
        "class Stack:\n    def __init__(self):\n",
        "def test_split(self):\n    self.assertEqual(",
        "for name in os.listdir(path):\n",
        "try:\n    value = int(text)\nexcept",
        "if __name__ == '__main__':\n",
    )
)
DEMO_SAMPLING = {"max_tokens": 64, "temperature": 0.7, "repetition_penalty": 1.1, "seed": 7}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments and flags of `quire generate`."""
    parser.usage = "quire generate MODEL [PROMPT ...] [options]"
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL PROMPT",
        help="folder, GGUF file, org/name on the Hub, or 'demo'; then prompts",
    )
    parser.add_argument("--input", metavar="FILE.jsonl", help="read prompts from JSON lines; - for standard input")
    parser.add_argument("--lines", action="store_true", help="treat each line of standard input as a prompt")
    parser.add_argument("--chat", action="store_true", help="treat prompts as user messages, not as text to continue")
    parser.add_argument("--demo", action="store_true", help="complete the prompts that ship with Quire")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json-schema", metavar="FILE", help="constrain outputs to JSON that conforms to the schema in this file"
    )
    form.add_argument("--regex", metavar="TEXT", help="constrain outputs to this regular expression")
    form.add_argument("--grammar", metavar="FILE", help="constrain outputs to the grammar in this file (Lark or GBNF)")
    parser.add_argument(
        "--output", metavar="FILE.jsonl", help="write JSON lines as prompts finish; - for standard output"
    )
    add_detail_options(parser, "no notes and no progress")
    add_engine_options(parser)
    add_sampling_options(parser)


def run(args: argparse.Namespace) -> int:
    """Complete the prompts; returns 1 if any ended with an error."""
    words = list(args.words)
    model = words.pop(0) if words and not hasattr(args, "model") else None
    given = given_options(args, model or ("demo" if args.demo else None), sampling=True)
    if model is not None:
        _check_model(model)
    _check_files(args)
    jobs = _jobs(args, words, given.sampling | _form(args))

    from quire.cli.report import closing_line, closing_rows
    from quire.cli.terminal import note, print_table
    from quire.cli.views import choose_view

    logprobs = any(job.params.logprobs is not None or job.params.prompt_logprobs is not None for job in jobs)
    if logprobs and not args.output and not args.quiet:
        note("logprobs are only written as JSON lines; add --output FILE.jsonl, or --output -")
    # The view comes first: an output file that cannot be written is refused before the model is loaded.
    with choose_view(jobs, args.output, args.quiet) as view, start(given, detail(args)) as llm:
        began = time.monotonic()
        outputs = complete(llm, jobs, view)
        seconds = time.monotonic() - began
        view.close()
        if args.verbose:
            print_table("Summary", closing_rows(outputs, llm.stats, seconds))
        elif not args.quiet:
            note(closing_line(outputs, seconds))
    return int(any(choice.finish_reason == "error" for output in outputs for choice in output.outputs))


def _check_model(model: str) -> None:
    """Check the model before a prompt is read from standard input, in case the model was forgotten.

    Raises:
        CheckpointNotFoundError: the first argument is not a model.
        ConfigError: see `quire.models.hub.resolve`.
    """
    from quire.models.hub import HUB_NAME, resolve

    if not model:
        raise ConfigError("the first argument, the model, is empty; give a folder, org/name, or 'demo'")
    if HUB_NAME.fullmatch(model):  # a download: when the model is loaded
        return
    try:
        resolve(model)
    except (OSError, RuntimeError) as error:  # a prompt can also be too long for a path, or begin with ~
        raise CheckpointNotFoundError(f"the first argument must be the model, but {error}") from error


def _check_files(args: argparse.Namespace) -> None:
    if args.output == "":
        raise ConfigError("--output is empty; give a file, or - for standard output")
    if args.output not in (None, "-"):
        refuse_same_file("-" if args.input is None else args.input, args.output)


def _form(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling parameter that constrains outputs, if one of the short flags is given.

    Raises:
        ConfigError: a file cannot be read, or --structured-outputs was given, too.
    """
    given = {"json": args.json_schema, "regex": args.regex, "grammar": args.grammar}
    for name, value in given.items():
        if value is not None and hasattr(args, "structured_outputs"):
            flag = "json-schema" if name == "json" else name
            raise ConfigError(f"--{flag} and --structured-outputs were both given; give one of them")
        if value is not None:
            return {"structured_outputs": {name: value if name == "regex" else _read_text(value)}}
    return {}


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{path} cannot be read: {reason}") from error


def _jobs(args: argparse.Namespace, texts: Sequence[str], sampling: Mapping[str, Any]) -> list[Job]:
    """The prompts, from the one source that was given.

    Raises:
        ConfigError: several sources were given.
        RequestError: a prompt or a sampling parameter is not valid.
    """
    places = {"prompts as arguments": bool(texts), "--input": args.input is not None, "--demo": args.demo}
    chosen = [name for name, given in places.items() if given]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} were both given; give one of them")
    if args.lines and chosen:
        raise ConfigError(f"--lines is for standard input, but {chosen[0]} was given; remove one")
    if args.input is not None:
        return read_jsonl(args.input, sampling, args.chat)
    if args.demo:
        return text_jobs(DEMO_PROMPTS, {**DEMO_SAMPLING, **sampling}, args.chat)
    return text_jobs(texts or read_stdin(args.lines), sampling, args.chat)


def complete(llm: LLM, jobs: Sequence[Job], view: View) -> list[RequestOutput]:
    """Run all jobs, and update `view` at every change; returns the results in the order of the jobs.

    Raises:
        RequestError: a prompt is refused, before any has run. The message names it.
    """
    index_of = {_add(llm, job): index for index, job in enumerate(jobs)}
    results: dict[int, RequestOutput] = {}
    while len(results) < len(jobs):
        for output in llm.step():
            index = index_of[output.request_id]
            view.update(index, output)
            if output.finished:
                results[index] = output
    return [results[index] for index in range(len(jobs))]


def _add(llm: LLM, job: Job) -> str:
    try:
        prompt = job.prompt if job.messages is None else llm.render_chat(job.messages)
        return llm.add_request(prompt, job.params)
    except (RequestError, ChatTemplateError) as error:
        if not job.place:
            raise
        kind = type(error) if isinstance(error, RequestError) else RequestError
        raise kind(f"{job.place}: {error}") from error
