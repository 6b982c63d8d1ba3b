"""Safetensors files, indexes and folders: what is read, and what is refused with which words."""

from __future__ import annotations

import io
import itertools
import json
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quire.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptSafetensorsError,
    MissingTensorError,
    ModelConfigError,
    NoSafetensorsError,
    TensorDtypeError,
    UnexpectedTensorError,
)
from quire.models.checkpoint import Checkpoint, content_hash
from quire.models.registry import load_model
from quire.models.safetensors_file import map_tensor, read_ahead
from quire.models.safetensors_header import read_header
from tests.oracle import save_checkpoint

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def write_raw(file: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    """A safetensors file with whatever header; `length` is what the first eight bytes say."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes((len(raw) if length is None else length).to_bytes(8, "little") + raw + data)
    return file


def test_tensors_are_read_as_the_safetensors_library_reads_them(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    tensors = {
        "bf16": torch.randn(3, 5).bfloat16(),
        "fp16": torch.randn(7).half(),
        "fp32": torch.randn(2, 3, 4),
        "scalar": torch.tensor(1.5),
        "empty": torch.zeros(0, 4),
        "large": torch.randn(300, 300),  # its mapping begins on a page other than the first
    }
    save_file(tensors, file, metadata={"format": "pt"})
    expected = load_file(file)
    entries = read_header(file)
    assert entries.keys() == expected.keys()
    for name, tensor in expected.items():
        found = map_tensor(entries[name])
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found, tensor)


def test_a_header_of_odd_length_is_read(tmp_path: Path) -> None:
    data = torch.tensor([1.5, -2.0])
    header = json.dumps({"a": ENTRY}).encode()
    for padding in range(4):
        file = write_raw(tmp_path / f"{padding}.safetensors", header + b" " * padding, data.numpy().tobytes())
        assert torch.equal(map_tensor(read_header(file)["a"]), data)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such advice")
def test_loading_asks_the_system_to_read_the_whole_embedding_table_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []

    def advise(file: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED and 0 < size <= 128 << 10
        asked.append((start, start + size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    folder = save_checkpoint(tmp_path, "llama", vocab_size=1000)
    load_model(folder)
    table = read_header(folder / "model.safetensors")["model.embed_tokens.weight"]
    assert asked[0][0] == table.start and asked[-1][1] >= table.start + table.num_bytes
    assert all(ahead[1] == behind[0] for ahead, behind in itertools.pairwise(asked))


def test_a_file_that_is_gone_cannot_be_read_ahead_which_harms_nobody(tmp_path: Path) -> None:
    save_file({"a": torch.ones(4)}, tmp_path / "t.safetensors")
    entry = read_header(tmp_path / "t.safetensors")["a"]
    (tmp_path / "t.safetensors").unlink()
    read_ahead(entry)


def test_writing_to_a_mapped_tensor_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    file = write_raw(tmp_path / "x.safetensors", {"a": ENTRY}, bytes(8))
    before = file.read_bytes()
    map_tensor(read_header(file)["a"]).fill_(3.0)
    assert file.read_bytes() == before


BAD_FILES: dict[str, tuple[dict[str, Any], str]] = {
    "header longer than the file": ({"header": {"a": ENTRY}, "length": 5000}, "header of 5000 bytes"),
    "absurd header length": ({"header": {"a": ENTRY}, "length": 2**63}, f"header of {2**63} bytes"),
    "header cut off": ({"header": b'{"a": {"dtype"'}, "not valid JSON"),
    "header not UTF-8": ({"header": b'{"\xff": 1}'}, "not valid JSON"),
    "header nested too deep": ({"header": b"[" * 200_000}, "not valid JSON"),
    "header an array": ({"header": b"[]"}, "a JSON list"),
    "a name twice": ({"header": b'{"a": {}, "a": {}}'}, "twice"),
    "entry not an object": ({"header": {"a": 3}}, "not an object"),
    "dtype missing": ({"header": {"a": {**ENTRY, "dtype": None}}, "data": bytes(8)}, "dtype None"),
    "dtype unknown": ({"header": {"a": {**ENTRY, "dtype": "F31"}}, "data": bytes(8)}, "dtype 'F31'"),
    "negative dimension": ({"header": {"a": {**ENTRY, "shape": [-2]}}, "data": bytes(8)}, "shape [-2]"),
    "dimension true": ({"header": {"a": {**ENTRY, "shape": [True]}}, "data": bytes(8)}, "shape [True]"),
    "dimension a fraction": ({"header": {"a": {**ENTRY, "shape": [2.0]}}, "data": bytes(8)}, "shape [2.0]"),
    "too many dimensions": ({"header": {"a": {**ENTRY, "shape": [1] * 99}}, "data": bytes(8)}, "shape [1"),
    "offsets missing": ({"header": {"a": {"dtype": "F32", "shape": [2]}}, "data": bytes(8)}, "offsets None"),
    "offsets reversed": ({"header": {"a": {**ENTRY, "data_offsets": [8, 0]}}, "data": bytes(8)}, "offsets [8, 0]"),
    "offsets negative": ({"header": {"a": {**ENTRY, "data_offsets": [-8, 0]}}, "data": bytes(8)}, "[-8, 0]"),
    "offsets outside": ({"header": {"a": {**ENTRY, "data_offsets": [8, 16]}}, "data": bytes(8)}, "outside the 8"),
    "data cut off": ({"header": {"a": ENTRY}, "data": bytes(7)}, "outside the 7 bytes"),
    "shape larger than data": ({"header": {"a": {**ENTRY, "shape": [3]}}, "data": bytes(8)}, "12 bytes"),
    "shape overflows": ({"header": {"a": {**ENTRY, "shape": [2**62, 4]}}, "data": bytes(8)}, "span 8"),
    "empty, with no end of rows": (
        {"header": {"a": {"dtype": "F32", "shape": [2**62, 0, 0], "data_offsets": [0, 0]}}},
        "larger than the file",
    ),
    "tensors overlap": (
        {"header": {"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, "data": bytes(12)},
        "'b' at byte",
    ),
    "the same bytes twice": ({"header": {"a": ENTRY, "b": ENTRY}, "data": bytes(8)}, "overlaps 'a'"),
    "a hole": ({"header": {"a": {**ENTRY, "data_offsets": [8, 16]}}, "data": bytes(16)}, "leaves a hole"),
    "bytes left at the end": ({"header": {"a": ENTRY}, "data": bytes(9)}, "tensors end at byte"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_corrupt_file_is_refused_with_its_name_and_what_is_wrong(case: str, tmp_path: Path) -> None:
    content, words = BAD_FILES[case]
    file = write_raw(tmp_path / "model.safetensors", **content)
    with pytest.raises(CorruptSafetensorsError) as caught:
        read_header(file)
    assert str(file) in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("size", [0, 1, 7])
def test_a_file_too_short_for_a_header_length_is_refused(size: int, tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(bytes(size))
    with pytest.raises(CorruptSafetensorsError, match=f"it has {size} bytes"):
        read_header(file)


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_bytes_are_refused_or_stay_within_the_file(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "x.safetensors"
        save_file({"a": torch.ones(3, 4), "b": torch.ones(5).bfloat16()}, file)
        content = bytearray(file.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        content = content[: data.draw(st.integers(0, len(content)))] if data.draw(st.booleans()) else content
        file.write_bytes(content)
        try:
            entries = read_header(file)
        except CorruptSafetensorsError:
            return
        for entry in entries.values():
            assert entry.start + entry.num_bytes <= len(content)
            try:
                assert map_tensor(entry).nbytes == entry.num_bytes
            except TensorDtypeError:
                assert entry.dtype not in ("F32", "F16", "BF16")


def test_mapped_tensors_hold_no_descriptor_and_are_unmapped_with_the_last_view(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({str(number): torch.full((3,), float(number)) for number in range(100)}, file)
    opened = len(os.listdir("/proc/self/fd"))
    tensors = [map_tensor(entry) for entry in read_header(file).values()]
    assert len(os.listdir("/proc/self/fd")) == opened
    assert Path("/proc/self/maps").read_text().count(str(file)) > 0  # neighbours may be one line
    part = tensors[7][1:]
    expected = part.clone()
    del tensors
    assert torch.equal(part, expected) and str(file) in Path("/proc/self/maps").read_text()
    del part
    assert str(file) not in Path("/proc/self/maps").read_text()


def test_a_file_that_became_shorter_and_a_system_without_room_for_mappings_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4)}, file)
    entry = read_header(file)["a"]
    too_large = replace(entry, start=0, num_bytes=1 << 62)
    monkeypatch.setattr(os, "fstat", lambda fd: SimpleNamespace(st_size=1 << 63))
    with pytest.raises(CheckpointError, match=r"cannot be read: Cannot allocate memory; raise .*vm\.max_map_count"):
        map_tensor(too_large)
    monkeypatch.undo()
    os.truncate(file, entry.start + 8)
    with pytest.raises(CheckpointError, match="cannot be read: it ends before byte"):
        map_tensor(entry)


def test_a_type_that_weights_cannot_have_is_refused_when_it_is_mapped(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    save_file({"a": torch.ones(4, dtype=torch.int8)}, file)
    with pytest.raises(TensorDtypeError, match=r"'a' has dtype I8.*not quantized"):
        map_tensor(read_header(file)["a"])


def make_folder(folder: Path, shards: dict[str, list[str]], weight_map: Any) -> Path:
    """A folder of shards, each with the named tensors, and an index."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    for file, names in shards.items():
        save_file({name: torch.ones(2) for name in names}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def test_an_index_gathers_the_tensors_of_its_files(tmp_path: Path) -> None:
    shards = {"a.safetensors": ["x", "y"], "b.safetensors": ["z"]}
    weight_map = {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}
    checkpoint = Checkpoint(make_folder(tmp_path, shards, weight_map))
    assert {name: entry.file.name for name, entry in checkpoint.entries.items()} == weight_map


def test_a_file_that_the_index_does_not_name_is_not_read(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors"})
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    assert Checkpoint(folder).entries.keys() == {"x"}


@pytest.mark.parametrize(
    "name",
    ["../a.safetensors", "/etc/a.safetensors", "sub/a.safetensors", "..\\a.safetensors", "", ".", "..", "a.bin"],
)
def test_an_index_cannot_name_anything_but_a_weight_file_of_its_folder(name: str, tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    folder = make_folder(tmp_path / "model", {"a.safetensors": ["x"]}, {"x": name})
    with pytest.raises(CheckpointError, match="plain name"):
        Checkpoint(folder)


def test_a_missing_shard_is_named_with_a_tensor_of_its(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "y": "b.safetensors"})
    with pytest.raises(MissingTensorError, match=r"b\.safetensors.*'y'"):
        Checkpoint(folder)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, {"a.safetensors": ["x"]}, {"x": "a.safetensors", "y": "a.safetensors"})
    with pytest.raises(MissingTensorError, match=r"a\.safetensors holds 'y'"):
        Checkpoint(folder)


@pytest.mark.parametrize("weight_map", [None, {}, [], {"x": 3}])
def test_an_index_without_a_map_of_names_is_refused(weight_map: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint(make_folder(tmp_path, {"a.safetensors": ["x"]}, weight_map))


def test_without_an_index_all_files_are_read_and_a_repeated_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors")
    save_file({"y": torch.ones(2)}, tmp_path / "b.safetensors")
    assert Checkpoint(tmp_path).entries.keys() == {"x", "y"}
    save_file({"x": torch.ones(2)}, tmp_path / "c.safetensors")
    with pytest.raises(UnexpectedTensorError, match=r"'x' stands in a\.safetensors and again in c\.safetensors"):
        Checkpoint(tmp_path)


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointNotFoundError, match="none"):
        Checkpoint(tmp_path / "none")


def test_a_folder_without_config_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"no config\.json"):
        Checkpoint(tmp_path)


def test_a_folder_without_safetensors_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"code")
    with pytest.raises(NoSafetensorsError, match="save_pretrained"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", "3", '{"a": ' * 100_000])
def test_a_config_that_is_not_a_json_object_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelConfigError, match=r"config\.json"):
        Checkpoint(tmp_path)


def small_folder(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    write_raw(folder / "model.safetensors", {"a": ENTRY}, bytes(8))
    return folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "model.safetensors"])
@pytest.mark.parametrize("damage", ["dangling", "looping", "folder"])
def test_what_stands_in_place_of_a_file_is_refused_not_taken_for_absent(tmp_path: Path, name: str, damage: str) -> None:
    file = small_folder(tmp_path) / name
    file.unlink(missing_ok=True)
    if damage == "folder":
        file.mkdir()
    else:
        file.symlink_to("nowhere" if damage == "dangling" else name)
    with pytest.raises(CheckpointError, match=f"{name} is there, but it is a broken link or"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_that_may_not_be_read_is_an_error_that_names_it(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = io.open

    def refuse(file: Any, *args: Any, **kwargs: Any) -> Any:
        if Path(file).name == name:
            raise PermissionError(13, "Permission denied")
        return real(file, *args, **kwargs)

    small_folder(tmp_path)
    monkeypatch.setattr(io, "open", refuse)  # what Path.open calls; a mode would not stop a superuser
    with pytest.raises(CheckpointError, match=f"{name} cannot be read: .*Permission denied"):
        Checkpoint(tmp_path)


def test_an_index_with_a_name_too_long_for_a_file_misses_it(tmp_path: Path) -> None:
    (small_folder(tmp_path) / "model.safetensors").unlink()
    index = {"weight_map": {"a": "x" * 300 + ".safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(MissingTensorError, match="which is not in the folder"):
        Checkpoint(tmp_path)


def test_a_change_in_any_one_tensor_changes_the_hash_of_a_checkpoint(tmp_path: Path) -> None:
    """Of a large one, a change such as training makes; of a small one, such as a norm's weight, any."""
    large = {f"layers.{index}.up_proj.weight": torch.randn(256, 256) for index in range(150)}
    tensors = large | {f"layers.{index}.norm.weight": torch.randn(1536).bfloat16() for index in range(150)}
    file = tmp_path / "model.safetensors"
    save_file(tensors, file)
    before = content_hash(tmp_path)
    for name, tensor in itertools.islice(tensors.items(), 0, None, 7):
        changed = tensor.clone()
        changed.view(-1)[slice(None) if name in large else 777] += 0.5
        save_file(tensors | {name: changed}, file)
        assert content_hash(tmp_path) != before, name
    save_file(tensors, file)
    assert content_hash(tmp_path) == before
    write_raw(file, b"{", b"")
    with pytest.raises(CorruptSafetensorsError, match="not valid JSON"):
        content_hash(tmp_path)
