"""Finds a model's folder by name: an embedded model, a folder on disk, or a download from the Hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import CheckpointNotFoundError, ConfigError, DownloadError, TokenizerError
from quire.models.fields import has_file
from quire.models.gguf.hub import choose, types
from quire.models.gguf.parts import COMPANIONS, SUFFIX, has_model
from quire.models.identify import hub_name_of, identify

if TYPE_CHECKING:
    from quire.config import EngineConfig

EMBEDDED_MODELS = {
    "demo": "the embedded model: 4 million parameters, trained to complete Python; it is not an assistant",
    "demo-draft": "an embedded model that drafts for demo",
    "demo-eagle": "an embedded head that drafts for demo",
}
"""Descriptions of the embedded models."""
TOKENIZER_FILE = "tokenizer.json"
ASSETS = Path(__file__).resolve().parent.parent / "assets"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
WANTED_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt"]
HUB_FILE = re.compile(rf"({HUB_NAME.pattern}):([\w.-]{{1,64}})", re.ASCII)
"""A name with the type of a GGUF file."""
UNWANTED_FILES = ["[!0-9]*/*", "[0-9][!0-9_]*/*", "*/*/*", "consolidated*.safetensors"]
"""Folders of other formats, except modules of Sentence Transformers ("1_Pooling"), and Mistral's second copy of the
weights."""


def describe(folder: Path) -> str | None:
    """A description of an embedded checkpoint; None for others."""
    return EMBEDDED_MODELS.get(folder.name) if folder.parent == ASSETS else None


def resolve(
    model: str,
    revision: str | None = None,
    *,
    endpoint: str | None = None,
    cache_dir: Path | None = None,
    weights: bool = True,
) -> Path:
    """The folder of a checkpoint.

    Args:
        model: "demo" for the embedded model, "demo-draft" and "demo-eagle" for its draft models; else a folder, or a
            GGUF file (of which, as of a folder with such ones alone, `gguf.folder` makes the folder); else `org/name`
            on the Hugging Face Hub, or `org/name:TYPE` for one of its GGUF files, downloaded (with a progress bar)
            unless it is in the Hub's cache.
        revision: branch, tag or commit of a download.
        endpoint: a hub other than huggingface.co.
        cache_dir: folder of downloads; None for the hub library's default.
        weights: whether to download the weights.

    Raises:
        CheckpointNotFoundError: it is none of these; the message says what was tried.
        DownloadError: the Hub did not answer, or the download failed.
        ConfigError: a revision of something that is not downloaded.
    """
    local = ASSETS / model if model in EMBEDDED_MODELS else _expanded(model)
    if model and os.path.isdir(local):  # unlike Path.is_dir, not an error for a name that is too long
        if revision is not None:
            raise ConfigError(
                f"revision {revision!r} was given, but {model!r} is the folder {local}, which has no "
                "revisions. Leave the revision out."
            )
        return _of_gguf(local) if has_model(local) else local
    if HUB_NAME.fullmatch(model):
        folder = _download(model, revision, endpoint, cache_dir, weights)
        if not any(folder.glob("*.safetensors")):
            _check_format(model, _files(model, revision, endpoint, cache_dir))
        return folder
    if (found := HUB_FILE.fullmatch(model)) is not None:
        where = found[1], revision, endpoint, cache_dir
        if not (files := _files(*where)):
            _download(*where)  # says why there are none
        files = choose(files, found[2], found[1])
        return _of_gguf(_download(*where, wanted=[*files, *COMPANIONS]) / files[0])
    if (name := hub_name_of(model)) is not None:
        raise CheckpointNotFoundError(f"no checkpoint {model!r}: give {name} alone, without the rest of the URL")
    if os.path.isfile(local):
        if local.suffix == SUFFIX and revision is None:
            return _of_gguf(local)
        raise CheckpointNotFoundError(f"no checkpoint {model!r}: {identify(local)}")
    raise CheckpointNotFoundError(
        f"no checkpoint {model!r}: the folder {local.absolute()} does not exist, and a name on the hub has the form "
        f"org/name. Give a folder, org/name, or one of the embedded models: {', '.join(EMBEDDED_MODELS)}."
    )


def tokenizer_folder(config: EngineConfig, checkpoint: Path) -> Path:
    """The folder of the tokenizer and the chat templates: `config.tokenizer`'s, or else the checkpoint's.

    Raises:
        TokenizerError: there is no tokenizer.json in it.
        CheckpointNotFoundError, DownloadError, ConfigError: see `resolve`.
    """
    if config.tokenizer is None:
        return checkpoint
    local = _expanded(config.tokenizer)
    name = str(local.parent) if local.name == TOKENIZER_FILE and os.path.isfile(local) else config.tokenizer
    try:
        folder = resolve(name, config.tokenizer_revision, weights=False)
    except (CheckpointNotFoundError, DownloadError, ConfigError) as error:
        raise type(error)(f"tokenizer: {error}") from error
    if not has_file(folder / TOKENIZER_FILE, TokenizerError):
        raise TokenizerError(
            f"tokenizer={config.tokenizer}: {folder} has no {TOKENIZER_FILE}; save one there with transformers' "
            "save_pretrained, or leave the option out"
        )
    return folder


def _of_gguf(path: Path) -> Path:
    """See `gguf.folder.folder_of`, which is imported late: it needs numpy."""
    from quire.models.gguf.folder import folder_of

    return folder_of(path)


def _expanded(model: str) -> Path:
    try:
        return Path(model).expanduser()
    except RuntimeError as error:
        raise CheckpointNotFoundError(f"no checkpoint {model!r}: there is no such user's home folder") from error


def _check_format(model: str, files: Sequence[str]) -> None:
    """Check that a repository's weights are not in GGUF alone."""
    if not any(file.endswith(".safetensors") for file in files) and (kinds := types(files, model)):
        raise CheckpointNotFoundError(f"no checkpoint {model!r}: it has its weights in GGUF alone. {kinds}")


def _files(model: str, revision: str | None, endpoint: str | None, cache_dir: Path | None = None) -> list[str]:
    """Paths of a repository's files; without the hub, of those in its cache."""
    from huggingface_hub import HfApi, constants

    try:
        found = HfApi(endpoint=endpoint).model_info(model, revision=revision or "main").siblings or []
        return [each.rfilename for each in found]
    except Exception:  # whatever it is, downloading fails too, and says why
        kept = (cache_dir or Path(constants.HF_HUB_CACHE)) / f"models--{model.replace('/', '--')}"
        reference = kept / "refs" / (revision or "main")
        commit = reference.read_text("utf-8") if reference.is_file() else revision or "main"
        snapshot = kept / "snapshots" / commit
        return [str(file.relative_to(snapshot)) for file in snapshot.rglob(f"*{SUFFIX}")]


def _download(
    model: str,
    revision: str | None,
    endpoint: str | None,
    cache_dir: Path | None,
    weights: bool = True,
    wanted: Sequence[str] | None = None,
) -> Path:
    from huggingface_hub import constants, snapshot_download  # imported late, since folders do not need it
    from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    at = f" at revision {revision!r}" if revision else ""
    unwanted = UNWANTED_FILES if weights else [*UNWANTED_FILES, "*.safetensors"]
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            endpoint=endpoint,
            cache_dir=cache_dir,
            allow_patterns=WANTED_FILES if wanted is None else [*wanted],
            ignore_patterns=unwanted if wanted is None else None,
        )
    except LocalEntryNotFoundError as error:
        offline = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{error.__cause__ or error}"[:200]
        needed = "a folder with its config.json" if not weights else "its folder"
        raise DownloadError(
            f"no checkpoint {model!r}: there is no folder {Path(model).absolute()}, the hub's cache "
            f"({cache_dir or constants.HF_HUB_CACHE}) has nothing of it, and downloading it{at} failed, "
            f"since the hub cannot be reached ({' '.join(offline.split())}). "
            f"Copy {needed} here and give that, or try again with a network."
        ) from error
    except Exception as error:  # any failure of the Hub, the network or the disk
        reason = " ".join(str(error).split())[:300]
        unknown = isinstance(error, RepositoryNotFoundError | RevisionNotFoundError)
        raise (CheckpointNotFoundError if unknown else DownloadError)(
            f"no checkpoint {model!r}: there is no folder {Path(model).absolute()}, and downloading it{at} "
            f"failed ({type(error).__name__}: {reason}). Check the name, the network, and for a gated model "
            "that you are logged in (hf auth login)."
        ) from error
    return Path(folder)
