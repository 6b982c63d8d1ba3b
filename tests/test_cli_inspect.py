"""What a path is that is no checkpoint which Quire runs, and `quire inspect`."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.errors import CheckpointError, CheckpointNotFoundError, UnknownArchitectureError
from quire.models.checkpoint import Checkpoint
from quire.models.fields import Fields
from quire.models.hub import ASSETS, resolve
from quire.models.identify import identify
from quire.models.model import ModelSizes
from quire.models.registry import load_model, read_config

DEMO = ASSETS / "demo"
POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4000\n"


def folder_of(tmp_path: Path, **files: str) -> Path:
    for name, text in files.items():
        path = tmp_path / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


KINDS = {
    "gguf": ({"m.gguf": "GGUF"}, r"has GGUF files alone; give the path of one, such as .*m\.gguf"),
    "lora": ({"adapter_config.json": '{"base_model_name_or_path": "a/b"}'}, "LoRA adapter of a/b.*merge"),
    "diffusers": ({"model_index.json": "{}", "config.json": "{}"}, "diffusers"),
    "hub-cache": ({"models--org--name__refs": ""}, "hub's cache; .*org/name"),
    "publishers-own": ({"params.json": "{}", "consolidated.safetensors": "x"}, "publisher's own format"),
    "one-level-too-high": ({"inner__config.json": "{}"}, "its subfolder inner has one"),
    "pickles": ({"config.json": "{}", "pytorch_model.bin": "x"}, "pickles of PyTorch's.*convert"),
    "git-lfs": ({"config.json": "{}", "model.safetensors": POINTER}, "pointer of Git LFS.*git lfs pull"),
    "onnx": ({"config.json": "{}", "model.onnx": "x"}, "another framework"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_that_is_something_else_is_recognised(kind: str, tmp_path: Path) -> None:
    files, expected = KINDS[kind]
    folder = folder_of(tmp_path, **files)
    with pytest.raises(CheckpointError, match=expected):
        Checkpoint(folder)


def test_the_hubs_cache_of_one_model_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "models--org--name" / "snapshots" / "abc").mkdir(parents=True)
    assert "give org/name" in str(identify(tmp_path / "models--org--name"))


def test_a_checkpoint_is_none_of_them() -> None:
    assert identify(DEMO) is None


@pytest.mark.parametrize("url", ["https://huggingface.co/org/name", "https://hf.co/org/name/tree/main"])
def test_a_url_of_the_hub_is_answered_with_the_name(url: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="give org/name alone"):
        resolve(url)


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("Qwen3ForCausalLm", "Qwen3ForCausalLM"),
        ("Qwen3MoEForCausalLM", "Qwen3MoeForCausalLM"),
        ("Gemma2ForCausalLM", None),
        ("Qwen2AudioForConditionalGeneration", None),
        ("Falcon3ForCausalLM", None),
        ("BertModel", None),
    ],
)
def test_a_near_name_is_suggested_within_one_family_alone(name: str, near: str | None, tmp_path: Path) -> None:
    with pytest.raises(UnknownArchitectureError) as caught:
        read_config(Fields({"architectures": [name]}, "config.json"), Fields({}, ""))
    assert (f"Did you mean {near}?" in str(caught.value)) if near else ("Did you mean" not in str(caught.value))


def test_inspect_counts_what_loading_finds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["inspect", "demo", "--json", "--memory", "1GiB"]) == 0
    found = json.loads(capsys.readouterr().out)
    model = load_model(DEMO, "bfloat16")
    assert found["parameters"] == model.num_parameters
    assert found["weight_bytes"]["bf16"] == model.weight_bytes
    assert found["weight_bytes"]["int8"] == load_model(DEMO, "bfloat16", quantization="int8").weight_bytes
    assert found["weight_bytes"]["int4"] == load_model(DEMO, "bfloat16", quantization="int4").weight_bytes
    assert found["kv_bytes_per_token"]["bf16"] == model.kv_shape().bytes_per_token
    assert isinstance(model, ModelSizes) and found["advice"] == "Fits as it is."


def test_inspect_needs_config_json_alone_and_says_what_would_make_it_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copy(DEMO / "config.json", tmp_path)
    assert main(["inspect", str(tmp_path), "--memory", "8MiB"]) == 0
    out = capsys.readouterr().out
    assert "config.json alone" in out and "none: prompts are token ids" in out
    assert "Fits with --quantization" in out
    assert main(["inspect", str(tmp_path), "--memory", "1KiB"]) == 0
    assert "Does not fit" in capsys.readouterr().out
    edited = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": {"quant_method": "hqq"}}
    (tmp_path / "config.json").write_text(json.dumps(edited))
    assert main(["inspect", str(tmp_path)]) == 2
    assert "HQQ weights" in capsys.readouterr().err


def test_a_folder_that_is_not_there_is_told_before_torch_is_imported() -> None:
    command = "main(['inspect', '/no/such/folder'])"
    code = f"import sys; from quire.cli.main import main; {command}; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n" and "/no/such/folder does not exist" in found.stderr


@pytest.mark.parametrize("length", [0, -5, -32])
def test_a_context_of_no_tokens_is_refused(length: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "demo", "--max-model-len", str(length)]) == 2
    assert f"--max-model-len {length} is out of range; allowed: 1 or more" in capsys.readouterr().err
