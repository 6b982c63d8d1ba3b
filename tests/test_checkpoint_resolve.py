"""From a name to a folder: embedded, on disk, or downloaded from a stand-in for the hub."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from quire.errors import INVALID, CheckpointNotFoundError, ConfigError, DownloadError
from quire.models.checkpoint import resolve
from tests.gguf_files import LLAMA, gguf_bytes, llama

COMMIT = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "merges.txt": b"a b",
    "README.md": b"not wanted",
    "modeling_custom.py": b"raise SystemExit",
    "pytorch_model.bin": b"not wanted",
    "consolidated.safetensors": b"the weights again",
    "original/params.json": b"not wanted",
    "8bit/model.safetensors": b"not wanted",
    "1_Pooling/config.json": b"{}",
    "1_Pooling/old/config.json": b"not wanted",
    "10_Dense/model.safetensors": b"of a module",
}
WANTED = {"config.json", "model.safetensors", "chat_template.jinja", "merges.txt", "1_Pooling/config.json"}
WANTED |= {"10_Dense/model.safetensors"}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs: one repository, `org/name`, with one commit."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in (f"/api/models/org/name/revision/{revision}" for revision in ("main", "v1", COMMIT)):
            self.answer_json({"id": "org/name", "sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]})
        elif path == f"/api/models/org/name/tree/{COMMIT}":
            self.answer_json(
                [
                    {"type": "file", "path": name, "size": len(body), "oid": name.encode().hex()}
                    for name, body in FILES.items()
                ]
            )
        elif (name := path.removeprefix(f"/org/name/resolve/{COMMIT}/")) in FILES:
            self.answer(FILES[name], {"ETag": f'"{name.encode().hex()}"', "X-Repo-Commit": COMMIT})
        else:
            self.answer(b"", {"X-Error-Code": "RepoNotFound"}, status=404)

    def answer_json(self, value: object) -> None:
        self.answer(json.dumps(value).encode(), {"Content-Type": "application/json"})

    def answer(self, body: bytes, headers: dict[str, str], status: int = 200) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.setenv(name, "127.0.0.1")
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_demo_is_the_embedded_model() -> None:
    folder = resolve("demo")
    assert (folder / "config.json").is_file()
    assert (folder / "model.safetensors").is_file()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve(str(tmp_path)) == tmp_path


def test_a_name_on_the_hub_is_downloaded_without_what_is_not_read(hub: str, tmp_path: Path) -> None:
    folder = resolve("org/name", endpoint=hub, cache_dir=tmp_path)
    found = {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    assert found == {name: FILES[name] for name in WANTED}


def test_a_revision_is_passed_on(hub: str, tmp_path: Path) -> None:
    assert resolve("org/name", "v1", endpoint=hub, cache_dir=tmp_path).name == COMMIT


@pytest.mark.parametrize(("name", "revision"), [("org/other", None), ("org/name", "no-such-branch")])
def test_what_the_hub_does_not_have_is_refused_with_what_was_tried(
    name: str, revision: str | None, hub: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointNotFoundError) as caught:
        resolve(name, revision, endpoint=hub, cache_dir=tmp_path)
    message = str(caught.value)
    assert repr(name) in message
    assert "no folder" in message
    assert "downloading it" in message
    assert revision is None or repr(revision) in message


def test_a_hub_that_does_not_answer_is_reported_as_something_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(DownloadError, match="downloading it failed") as caught:
        resolve("org/name", endpoint="http://127.0.0.1:9", cache_dir=tmp_path)
    assert not isinstance(caught.value, INVALID)


def test_without_the_hub_what_its_cache_has_is_found_and_else_said_what_to_do(tmp_path: Path) -> None:
    kept = tmp_path / "models--org--name"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text(COMMIT)
    (kept / "snapshots" / COMMIT).mkdir(parents=True)
    (kept / "snapshots" / COMMIT / "config.json").write_text("{}")
    nowhere = "http://127.0.0.1:9"
    folder = resolve("org/name", endpoint=nowhere, cache_dir=tmp_path, weights=False)
    assert folder == kept / "snapshots" / COMMIT
    with pytest.raises(DownloadError, match=r"has nothing of it.* the hub cannot be reached.* config.json here"):
        resolve("org/other", endpoint=nowhere, cache_dir=tmp_path, weights=False)


@pytest.mark.parametrize("name", ["", "demo2", "/no/such/folder", "a/b/c", "../x", "org/", "org/na me", "org/-"])
def test_what_is_neither_a_folder_nor_a_name_on_the_hub_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointNotFoundError) as caught:
        resolve(name)
    assert repr(name) in str(caught.value)
    assert "demo" in str(caught.value)


def test_a_file_is_refused_as_not_a_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(CheckpointNotFoundError, match=r"is one file of weights; give the folder"):
        resolve(str(file))


def test_a_gguf_file_under_another_name_is_refused_with_what_to_do(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(b"GGUF")
    with pytest.raises(CheckpointNotFoundError, match=r"is a GGUF file; give it a name that ends with \.gguf"):
        resolve(str(file))


def test_a_gguf_file_on_the_hub_is_named_by_its_type(hub: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "made"))
    for name, seed in (("m-Q4_K_M.gguf", 1), ("Q8_0/m-Q8_0.gguf", 2)):
        monkeypatch.setitem(FILES, name, gguf_bytes(LLAMA, llama(seed=seed)))
    for kind in ("Q4_K_M", "q8_0"):
        folder = resolve(f"org/name:{kind}", endpoint=hub, cache_dir=tmp_path / kind)
        [file] = folder.glob("*.gguf")
        assert kind.upper() in file.name and file.read_bytes().startswith(b"GGUF")
        assert len([*(tmp_path / kind).rglob("*.gguf")]) == 1  # the others are not downloaded
        assert resolve(f"org/name:{kind}", endpoint="http://127.0.0.1:9", cache_dir=tmp_path / kind) == folder
    with pytest.raises(CheckpointNotFoundError, match=r"no GGUF file of this type\. Give one of org/name:Q4_K_M, "):
        resolve("org/name:Q5_K_M", endpoint=hub, cache_dir=tmp_path)
    with pytest.raises(DownloadError, match="cannot be reached"):
        resolve("org/name:Q4_K_M", endpoint="http://127.0.0.1:9", cache_dir=tmp_path / "nothing")
    for name in (
        "model.safetensors",
        "consolidated.safetensors",
        "8bit/model.safetensors",
        "10_Dense/model.safetensors",
    ):
        monkeypatch.delitem(FILES, name)
    with pytest.raises(CheckpointNotFoundError, match=r"in GGUF alone\. Give one of org/name:Q4_K_M, org/name:Q8_0"):
        resolve("org/name", endpoint=hub, cache_dir=tmp_path / "alone")


@pytest.mark.parametrize("name", ["demo", "."])
def test_a_revision_of_what_is_not_downloaded_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="'v2'"):
        resolve(name, "v2")


@pytest.mark.parametrize("name", ["x" * 300, "~nobody-of-this-name/x", "a/" * 3000, "x\0y"])
def test_a_name_that_no_folder_can_have_is_a_checkpoint_not_found(name: str) -> None:
    with pytest.raises(CheckpointNotFoundError, match="no checkpoint"):
        resolve(name)
