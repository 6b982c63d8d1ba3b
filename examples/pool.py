"""The pool: three servers, one prefix of 512 tokens. It is computed once and fetched twice. (Needs `redis-server`.)"""

import os
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from servers import ask, free_port, serving

PREFIX = [100 + i % 1000 for i in range(512)]


def main() -> None:
    port = free_port()
    redis = subprocess.Popen(
        ["redis-server", "--port", str(port), "--save", "", "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL
    )
    try:
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            key = Path(folder) / "key"
            key.touch(0o600)
            key.write_text(os.urandom(16).hex())
            flags = (
                "--role",
                "both",
                "--kv-directory",
                f"redis://127.0.0.1:{port}",
                "--cluster-key-file",
                str(key),
                "--admin",
            )
            urls = [stack.enter_context(serving(*flags)) for _ in range(3)]
            texts = set()
            for number, url in enumerate(urls):
                asked = {"model": "demo", "prompt": [*PREFIX, 7], "max_tokens": 8, "temperature": 0}
                texts.add(ask(f"{url}/v1/completions", asked)["choices"][0]["text"])
                stats = ask(f"{url}/view")["stats"]
                fetched = 16 * stats["kv_tiers"]["remote"]["loaded"]
                computed = stats["prompt_tokens"] - stats["cached_tokens"]
                print(f"server {number}: {computed} tokens computed, {fetched} fetched")
                time.sleep(1.0)  # the directory hears of what is new
            print("the same text:", len(texts) == 1)
    finally:
        redis.terminate()
        redis.wait()


if __name__ == "__main__":
    main()
