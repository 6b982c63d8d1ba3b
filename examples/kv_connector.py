"""A KV connector: what leaves the pool is kept in a dictionary, until there are `blocks` of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from quire import LLM, SamplingParams
from quire.core.external import Found, Loadable
from quire.core.prefix import Prefix
from quire.core.step import Move
from quire.kv.connector import Connector


class DictionaryConnector(Connector):
    """Keeps blocks in a dictionary."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.most = int(options.get("blocks", 1000))
        self.values: dict[bytes, bytes] = {}  # by name, the oldest first

    def lookup(self, prefix: Prefix, decoding: bool) -> Found | None:
        """The blocks with which the request begins farthest along its prompt, if there are any."""
        end = prefix.reach(self.values.__contains__)
        parts = prefix.missing(end)
        return Loadable(prefix.hashes[prefix.first : end], prefix, parts, end) if parts else None

    def evicted(self, name: bytes, group: int, block: int) -> None:
        """Save what is not here yet."""
        if name not in self.values:
            self.save(block, name, group)

    def loaded(self, found: Loadable, bad: Sequence[Move], seconds: float) -> None:
        """What came with other bytes is computed, and saved again."""
        for move in bad:
            self.values.pop(move.hash, None)

    def put(self, name: bytes, value: bytes) -> None:
        self.values[name] = value
        while len(self.values) > self.most:
            del self.values[next(iter(self.values))]

    def get(self, name: bytes) -> bytes | None:
        return self.values.get(name)


def main() -> None:
    prompts = [[number] * 256 for number in range(100, 108)]  # 17 blocks each, in a pool of 40
    with LLM("demo", num_kv_blocks=40, kv_connector="__main__:DictionaryConnector") as llm:
        for turn in ("first", "second"):
            outputs = [llm.generate([prompt], SamplingParams(max_tokens=4, temperature=0))[0] for prompt in prompts]
            cached = sum(output.cached_tokens for output in outputs)
            print(f"{turn} time: {cached} of {sum(map(len, prompts))} prompt tokens were not computed")


if __name__ == "__main__":
    main()
