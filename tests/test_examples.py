"""The scripts in examples/ run, and show what they say."""

from __future__ import annotations

import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"
HERE = {
    "batch": r"72 tokens in 24 steps",
    "streams": r"in this order: [ABC]+\nthe same text as alone: True",  # whose prompt is tokenized first begins
    "chat": r"74 tokens of prompt, 5\d of them from the turn before",
    "by_hand": r"step 6: 3 running.*\n.*\naborted after 2 tokens",
    "prefix_cache": r"(request [23]: 512 of 515 tokens cached, 3 computed\n){2}computed in all: 521 of 1545",
    "radix_or_hash": r"64, hash : +28% .*\nblocks of 64, radix: +61%",
    "preemption": r"16 blocks, at most 16 in use: [1-9]\d* preemptions.*\nthe same texts: True",
    "speculation": r"64 tokens in 64 steps.*\n64 tokens in 1\d steps.*\nthe same text: True",
    "experts": r"layer 1: tokens of each expert",
    "latent_attention": r"320 bytes\nfull .* 192 numbers a layer: 2.4 times as many",
    "determinism": r"one result: True",
    "score": r"perplexity \d+\.\d\d over 29 tokens",
    "schema": r"temperature 2: \{'name': '(Ada|Grace)', 'born': 1\d\d\d, ",
    "tool": r"temperature\(\{'city': '(Oslo|Rome)', 'unit': '[CF]'\}\) is \d+(\.\d)? [CF]\nand then it says: '",
    "load_or_compute": r"loaded: .* 1488 were there\n",
    "kv_connector": r"first time: 0 of 2048 .*\nsecond time: 1920 of 2048",
    "chunked_prefill": r"2048 tokens a step: 1 steps .*\nat most 64 tokens a step: 24 steps",
}
"""Those that run in this process, and what they print."""
APART = {
    "ranks": r"equal sums: True",
    "balanced_experts": r"the busiest rank has 1\.\d+ times the mean to do, and would have 2\.00 times",
    "openai_client": r"the same text: True\nmeets the schema: \{'n': ",
    "prefill_decode": r"412 tokens of prompt: 400 came from the other server\nthe same text as one server's: True",
    "pool": r"0: 513 tokens computed, 0 fetched\n(server [12]: 1 tokens computed, 512 fetched\n){2}the same text: True",
    "load_test": r"40 requests a second",
}
"""Those that start processes."""
HELPERS = {"servers"}


@pytest.mark.quick(
    *("batch", "streams", "chat", "by_hand", "prefix_cache", "experts", "latent_attention", "score", "tool"),
    "kv_connector",
)
@pytest.mark.parametrize("name", HERE)
def test_an_example_shows_what_it_says(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert re.search(HERE[name], capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_an_example_with_processes_of_its_own_shows_what_it_says(name: str) -> None:
    if name == "pool" and shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    done = subprocess.run([sys.executable, EXAMPLES / f"{name}.py"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert re.search(APART[name], done.stdout), done.stdout


def test_every_example_is_run_listed_and_short() -> None:
    scripts = {path.stem: path.read_text() for path in EXAMPLES.glob("*.py")}
    assert set(scripts) == {*HERE, *APART, *HELPERS}
    listed = set(re.findall(r"\]\((\w+)\.py\)", (EXAMPLES / "README.md").read_text()))
    assert listed == set(scripts)
    assert {name for name, text in scripts.items() if text.count("\n") > 60} == set()
    assert {name for name, text in scripts.items() if not text.startswith('"""')} == set()
