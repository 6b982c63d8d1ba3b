"""Prefill and decode apart: one server computes the prompt, another one reads its KV and writes the answer."""

import os
import tempfile
import time
from pathlib import Path

from servers import ask, serving

PROMPT = "\n".join(f"def f{i}(a, b):\n    return a + {i} * b\n" for i in range(24))
ASKED = {"model": "demo", "prompt": PROMPT, "max_tokens": 24, "temperature": 0.8, "seed": 11}


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        key = Path(folder) / "key"
        key.touch(0o600)
        key.write_text(os.urandom(16).hex())
        shared = "--cluster-key-file", str(key), "--admin"
        with (
            serving("--role", "prefill", *shared) as prefill,
            serving("--role", "decode", "--prefill-url", prefill, *shared) as decode,
        ):
            for _ in range(100):  # until they have met: before that, the decode server computes by itself
                answer = ask(f"{decode}/v1/completions", ASKED)
                loaded = ask(f"{decode}/view")["stats"]["kv_tiers"]["peer"]["loaded"]
                if loaded:
                    break
                ask(f"{decode}/reset_prefix_cache", {})
                time.sleep(0.1)
            print(f"{answer['usage']['prompt_tokens']} tokens of prompt: {16 * loaded} came from the other server")
            alone = ask(f"{prefill}/v1/completions", ASKED)
            print("the same text as one server's:", answer["choices"][0]["text"] == alone["choices"][0]["text"])


if __name__ == "__main__":
    main()
