"""`quire quantize`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.cli.main import main


def test_a_quantized_folder_is_used_like_any_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, text = str(tmp_path / "int4"), tmp_path / "text.jsonl"
    text.write_text(json.dumps({"text": Path(__file__).read_text()}) + "\n")
    calibrated = ["--calibrate", str(text), "--rounding", "gptq"]
    assert main(["quantize", "demo", "--to", "int4", "--output", output, *calibrated]) == 0
    told = capsys.readouterr()
    assert told.out == "" and "Weights, quantized to int4" in told.err
    options = ["--max-tokens", "4", "--temperature", "0", "--num-kv-blocks", "16", "--max-model-len", "64"]
    assert main(["generate", output, "def main(", "-v", *options]) == 0
    told = capsys.readouterr()
    assert told.out and "MiB, int4" in told.err
    assert main(["generate", output, "x", "--quantization", "int8", *options]) == 2
    assert "is quantized to int4, but int8 was asked for" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["demo"], 2, "required: --to, --output"),
        (["demo", "--to", "int5", "--output", "OUT"], 2, "invalid choice: 'int5'"),
        (["demo", "--to", "int4", "--output", ""], 2, "--output is empty"),
        (["demo", "--to", "int8", "--threads", "0", "--output", "OUT"], 2, "--threads 0 is out of range"),
        (["demo", "--to", "int8", "--calibrate", "x", "--output", "OUT"], 2, "changes nothing of int8"),
        (["demo", "--to", "gguf-q4_k", "--rounding", "gptq", "--output", "OUT.gguf"], 2, "needs --calibrate"),
        (["demo", "--to", "int4", "--calibrate", "no.txt", "--output", "OUT"], 2, "cannot be read as text"),
        (["demo", "--to", "gguf-q4_k", "--output", "OUT.gguf"], 2, "splits texts into words in a way that has no name"),
        (["demo", "--to", "gguf-q4_k", "--output", "OUT"], 2, "ends in .gguf"),
        (["nowhere/at-all/x", "--to", "int8", "--output", "OUT"], 2, "no checkpoint 'nowhere/at-all/x'"),
        (["demo", "--to", "int8", "--output", "."], 2, "nothing is overwritten"),
    ],
)
def test_what_cannot_be_done_is_said_and_leaves_nothing(
    arguments: list[str], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    given = [argument.replace("OUT", str(output)) for argument in arguments]
    assert main(["quantize", *given]) == code
    assert words in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
