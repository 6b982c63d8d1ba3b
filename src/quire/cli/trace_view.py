"""Prints the steps of `quire trace`: spans, the pool as a strip of blocks, and the prefix tree when it changes."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from quire.cli.terminal import visible
from quire.cli.trace_replay import Replay
from quire.core.prefix_cache import KEY_BYTES
from quire.core.prefix_node import Node
from quire.core.request import Request, Status
from quire.core.step import Span, StepPlan
from quire.errors import QuireError

COLORS = ("cyan", "green", "magenta", "yellow", "blue", "red")
SHARED, KEPT, FREE = "+", "-", "."
SHOWN = 28
"""Maximum characters of a text that are shown."""


class TraceView:
    """Runs a replay and prints each step."""

    def __init__(self, replay: Replay, console: Console) -> None:
        self._replay, self._scheduler, self._kv = replay, replay.scheduler, replay.kv
        self._console = console
        self._texts = {token: text for one in replay.traced for token, text in one.texts.items()}
        self._tree: list[str] = []
        self._preemptions = 0
        self._seen: set[int] = set()

    def show(self, apart: int) -> None:
        """Run all requests, with `apart` steps between two arrivals."""
        self._head()
        todo = list(range(len(self._replay.traced)))
        step = computed = 0
        while todo or not self._scheduler.idle:
            while todo and (not apart or step >= apart * todo[0]):
                self._replay.add(todo.pop(0))
            plan = self._replay.plan()
            step += 1
            if plan is None and not todo:
                raise QuireError(
                    "requests are waiting, but no step can be planned: this is a bug; please report how to reproduce it"
                )
            if plan is not None:
                computed += plan.num_tokens
                self._step(step, plan)
        self._foot(step, computed)

    # -- lines -------------------------------------------------------------------------------------------------

    def _print(self, *parts: tuple[str, str] | str) -> None:
        line = Text.assemble(*parts)
        if self._console.is_terminal:
            self._console.print(line, no_wrap=True, overflow="ellipsis")
        else:  # lines of a file may have any length
            self._console.print(line, soft_wrap=True)

    def _head(self) -> None:
        config, kv = self._scheduler.config, self._kv
        self._print(
            (f"Blocks of {kv.block_size} tokens, {kv.num_usable} of them; ", "bold"),
            (f"at most {config.max_num_batched_tokens} tokens a step; prefix cache: {config.prefix_cache}", "bold"),
        )
        for number, one in enumerate(self._replay.traced):
            text = self._quoted(one.prompt)
            self._print("  ", self._name(number), f"  {len(one.prompt):3} tokens  ", (text, "dim"))
        self._print(
            ("  pool: a letter is the block's holder, ", "dim"),
            (f"{SHARED} several, {KEPT} cached, {FREE} free", "dim"),
        )

    def _step(self, number: int, plan: StepPlan) -> None:
        budget = self._scheduler.config.max_num_batched_tokens
        self._print()
        self._print((f"step {number}", "bold"), (f"  {plan.num_tokens} of {budget} tokens", "dim"))
        self._preempted()
        for span in plan.spans:
            self._span(span, self._scheduler.requests[span.request])
        for request in self._scheduler.requests.values():
            if request.status is not Status.RUNNING:
                why = "what it begins with is being computed" if request.awaits else "there is no room in this step"
                self._print("  ", self._name(request.id), ("  waits     ", "dim"), (why, "dim"))
        ended = self._replay.commit(plan)
        self._print("  pool ", *self._strip())
        for request_id in ended:
            one = self._replay.traced[request_id]
            text = self._quoted(one.output)
            self._print("  ", self._name(request_id), (f"  ends      {one.finish_reason}: ", "dim"), text)
        self._show_tree()

    def _preempted(self) -> None:
        if self._scheduler.num_preemptions > self._preemptions:
            self._preemptions = self._scheduler.num_preemptions
            names = [
                request.id for request in self._scheduler.requests.values() if request.status is not Status.RUNNING
            ]
            back = [name for name in names if name in self._seen]
            for name in back:
                self._print(
                    "  ",
                    self._name(name),
                    ("  gives way ", "red"),
                    "its blocks go to others; it is computed again later",
                )
                self._seen.discard(name)

    def _span(self, span: Span, request: Request) -> None:
        if request.id not in self._seen and span.start:
            copied = [f", {tokens} copied from block {source} to {target}" for _, source, target, tokens in span.copies]
            found = f"{span.start} of {request.num_prompt} tokens are in the cache{''.join(copied)}"
            self._print("  ", self._name(request.id), ("  finds     ", "dim"), (found, "italic"))
        self._seen.add(request.id)
        end = span.start + len(span.tokens)
        decode = len(span.tokens) == 1 and end > request.num_prompt
        kind = "decode" if decode else "prefill" if end <= request.num_prompt else "recompute"
        if not decode and end < len(request.tokens):
            kind = "chunk"
        where = f"{span.start}" if len(span.tokens) == 1 else f"{span.start}-{end - 1}"
        new = ",".join(map(str, span.blocks[0])) if span.blocks and span.blocks[0] else ""
        text = self._quoted(request.tokens[span.start : end])
        one = self._replay.traced[request.id]
        sampled = one.output[len(request.tokens) - request.num_prompt :][:1] if span.num_sampled else []
        self._print(
            "  ",
            self._name(request.id),
            f"  {kind:9} at {where:7} ",
            (f"+{new:6} " if new else " " * 8, "dim"),
            (text, "dim"),
            (f" -> {self._quoted(sampled)}" if sampled else "", "bold"),
        )

    def _strip(self) -> list[tuple[str, str]]:
        """The pool, one character per block."""
        holders = self._holders()
        group = self._kv.groups[0]
        strip = []
        for block in range(1, group.num_usable + 1):
            if len(holders[block]) > 1:
                strip.append((SHARED, "bold"))
            elif holders[block]:
                strip.append((self._letter(holders[block][0]), self._color(holders[block][0])))
            else:
                strip.append((KEPT, "") if block in group.idle else (FREE, "dim"))
        return strip

    def _holders(self) -> dict[int, list[int]]:
        holders: dict[int, list[int]] = defaultdict(list)
        for request in self._scheduler.requests.values():
            for block in request.tables[0] if request.tables else ():
                holders[block].append(request.id)
        return holders

    def _show_tree(self) -> None:
        lines: list[str] = []
        for root in self._kv.cache.roots.values():
            self._branch(root, "  ", self._holders(), lines)
        if lines != self._tree:
            self._tree = lines
            for index, line in enumerate(lines):
                self._print("  tree " if not index else "       ", line)

    def _branch(self, node: Node, indent: str, holders: dict[int, list[int]], lines: list[str]) -> None:
        children = list(node.children.values())
        for child in children:
            last, blocks, tokens = child, list(child.blocks), _tokens(child)
            while len(last.children) == 1:  # a chain is one edge
                [following] = last.children.values()
                if holders[following.blocks[0]] != holders[last.blocks[0]]:
                    break
                last = following
                blocks += last.blocks
                tokens += _tokens(last)
            held = "".join(self._letter(one) for one in holders[last.blocks[0]]) or "kept"
            at_end = child is children[-1]
            numbers = ",".join(map(str, blocks))
            lines.append(f"{indent}{'└─' if at_end else '├─'} {self._quoted(tokens)}  blocks {numbers} ({held})")
            self._branch(last, indent + ("   " if at_end else "│  "), holders, lines)

    def _foot(self, steps: int, computed: int) -> None:
        prompts = sum(len(one.prompt) for one in self._replay.traced)
        outputs = sum(len(one.output) for one in self._replay.traced)
        self._print()
        cached = self._scheduler.num_cached_tokens
        self._print(
            (f"{steps} steps, {computed} tokens computed: ", "bold"),
            f"{prompts} of prompts, {cached} of them cached; {outputs} sampled; {self._preemptions} preemptions",
        )

    # -- names -------------------------------------------------------------------------------------------------

    def _letter(self, request: int) -> str:
        return self._replay.traced[request].letter

    def _color(self, request: int) -> str:
        return COLORS[request % len(COLORS)]

    def _name(self, request: int) -> tuple[str, str]:
        return self._letter(request), f"bold {self._color(request)}"

    def _quoted(self, tokens: Sequence[int]) -> str:
        text = visible("".join(self._texts[token] for token in tokens)).replace("\n", "\\n").replace("\t", "\\t")
        cut = text if len(text) <= SHOWN else f"{text[: SHOWN // 2]}…{text[-SHOWN // 2 :]}"
        return f'"{cut}"'


def _tokens(node: Node) -> list[int]:
    """The tokens of a node, which are its key here."""
    return [int.from_bytes(node.key[i : i + KEY_BYTES], sys.byteorder) for i in range(0, len(node.key), KEY_BYTES)]
