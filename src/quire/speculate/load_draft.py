"""Loads draft models and heads, and refuses those that do not fit the target."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from pathlib import Path

from quire.errors import CheckpointError, ConfigError, UnexpectedTensorError
from quire.models.checkpoint import Checkpoint
from quire.models.eagle import SKIPPED, TABLE, Eagle, HeadConfig
from quire.models.eagle3 import CHOSEN, MOVES, Eagle3, read_ids
from quire.models.fields import Fields, has_file
from quire.models.hub import TOKENIZER_FILE
from quire.models.model import Model
from quire.models.registry import load_model, read_config
from quire.models.weights import Weights, check_tensors

MAX_TOKENIZER_BYTES = 256 << 20
HEAD = "fc.weight"
"""A tensor that distinguishes heads from whole models."""
HIDDEN_NORM = "layers.0.hidden_norm.weight"
"""A tensor that distinguishes EAGLE-3 heads from older ones."""


def method_of(folder: Path | str) -> str:
    """The method with which a checkpoint drafts, by its tensors.

    Raises ConfigError: the folder holds no checkpoint.
    """
    with _refused(folder):
        names = _names(Checkpoint(Path(folder)))
    if HEAD not in names:
        return "draft_model"
    return "eagle3" if HIDDEN_NORM in names else "eagle"


def load_eagle(folder: Path | str, target: Model) -> Eagle:
    """An EAGLE or EAGLE-2 head, in the target's data type and on its device.

    Raises ConfigError: the folder holds none, it is not complete, or it was made for another model.
    """
    with _refused(folder):
        checkpoint = _open_head(Path(folder))
        if HIDDEN_NORM in checkpoint.entries:
            raise ConfigError("it is an EAGLE-3 head; say method: eagle3")
        config = Eagle.read_config(checkpoint.config, checkpoint.entries)
        _check_made_for(config, target)
        check_tensors(checkpoint, config.shapes, tied=False, skipped=SKIPPED)
        weights = Weights(checkpoint, config.shapes, target.dtype, target.kernels)
        return Eagle(config, weights, target)


def load_eagle3(folder: Path | str, target: Model) -> Eagle3:
    """An EAGLE-3 head, in the target's data type and on its device.

    Raises ConfigError: the folder holds none, it is not complete, or it was made for another model.
    """
    with _refused(folder):
        checkpoint = _open_head(Path(folder))
        if HIDDEN_NORM not in checkpoint.entries:
            raise ConfigError("it has no 'hidden_norm', so it is no EAGLE-3 head; for an older one say method: eagle")
        config = Eagle3.read_config(checkpoint.config, checkpoint.entries, target.config.num_layers)
        _check_made_for(config, target)
        tables = (MOVES, CHOSEN)
        check_tensors(checkpoint, config.shapes, tied=False, skipped=tables)
        weights = Weights(checkpoint, config.shapes, target.dtype, target.kernels)
        return Eagle3(config, weights, target, read_ids(checkpoint, config))


def load_draft_model(folder: Path | str, target: Model, target_folder: Path | None = None) -> Model:
    """A smaller model of the same vocabulary, on the target's device.

    Args:
        target_folder: that of the target's tokenizer: if both have one, the tokenizers must be equal, and vocabularies
            may then be padded to different sizes, as is common within a family of models.

    Raises ConfigError: the folder contains no model, or its tokens differ from the target's.
    """
    with _refused(folder):
        draft = read_config(*_fields(Path(folder)))
        if draft.recurrent_layers:
            raise ConfigError("it has recurrent layers, whose states have no place in the target's blocks yet")
        if not draft.layer.causal:
            raise ConfigError(
                "its tokens see those that follow them, so it is for embeddings and cannot continue a text"
            )
        compared = target_folder is not None and _check_tokenizers(Path(folder), target_folder)
        if draft.vocab_size != target.vocab_size and not compared:
            raise ConfigError(
                f"its vocabulary has {draft.vocab_size} tokens, the target's {target.vocab_size}, and without "
                f"{TOKENIZER_FILE} in both folders they may not mean the same; choose a draft model of the "
                "same family"
            )
        return load_model(folder, kernels=target.kernels, one_kv_group=True)


@contextlib.contextmanager
def _refused(folder: Path | str) -> Iterator[None]:
    """Turn any error into a ConfigError that names the folder and the option."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise ConfigError(f"speculative_config: model {str(folder)!r} cannot draft: {error}") from error


def _open_head(folder: Path) -> Checkpoint:
    """A head's checkpoint, with EAGLE-3's `midlayer` renamed to `layers.0`."""
    checkpoint = Checkpoint(folder)
    entries = {own: checkpoint.entries[name] for own, name in _names(checkpoint).items()}
    if len(entries) != len(checkpoint.entries):
        raise UnexpectedTensorError("tensors of the same name stand in it with and without 'model.' or 'midlayer.'")
    if HEAD not in entries:
        raise ConfigError("it holds no tensor 'fc.weight', so it is no EAGLE head; for a whole model say draft_model")
    checkpoint.entries = entries
    return checkpoint


def _names(checkpoint: Checkpoint) -> dict[str, str]:
    """Names of a head's tensors as Quire has them, and as they are in the file."""
    return {name.removeprefix("model.").replace("midlayer.", "layers.0."): name for name in checkpoint.entries}


def _check_made_for(config: HeadConfig, target: Model) -> None:
    hidden = target.config.layer.hidden_size
    if config.target_hidden_size != hidden:
        raise ConfigError(
            f"it was made for a model whose hidden size is {config.target_hidden_size}, and the target's is {hidden}"
        )
    if config.vocab_size != target.vocab_size:
        raise ConfigError(
            f"it was made for a vocabulary of {config.vocab_size} tokens, and the target's has {target.vocab_size}"
        )
    if TABLE not in config.shapes and config.layer.hidden_size != hidden:
        raise ConfigError(
            f"it has no embedding of its own, and the target's is {hidden} wide, not {config.layer.hidden_size}"
        )


def _fields(folder: Path) -> tuple[Fields, Fields]:
    checkpoint = Checkpoint(folder)
    return checkpoint.config, checkpoint.generation


def _check_tokenizers(folder: Path, target_folder: Path) -> bool:
    """Whether both have a tokenizer.json. Raises ConfigError if the tokens of some id differ."""
    files = (folder / TOKENIZER_FILE, target_folder / TOKENIZER_FILE)
    if not all(has_file(file) for file in files):
        return False
    if files[0].read_bytes() == files[1].read_bytes():
        return True
    own, targets = (_tokens(file) for file in files)
    different = {token for token, _ in own.items() ^ targets.items()}
    if different:
        first = min(different, key=lambda token: (targets.get(token, own.get(token, 0)), token))
        raise ConfigError(
            f"its tokenizer differs from the target's in {len(different)} tokens, such as {first!r}, which is "
            f"{own.get(first, 'none')} here and {targets.get(first, 'none')} there; "
            "choose a draft model of the same family"
        )
    return True


def _tokens(file: Path) -> dict[str, int]:
    """Id of each token in a tokenizer.json, including added ones.

    Parsed as JSON, since the tokenizers library may crash this process on an untrusted file.
    """
    fields = Fields.read(file, MAX_TOKENIZER_BYTES)
    vocabulary = fields.section("model").picked(["vocab"]).get("vocab", {})
    added = fields.picked(["added_tokens"]).get("added_tokens", [])
    try:
        if isinstance(vocabulary, list):  # pairs of text and score, in the order of ids
            vocabulary = {text: token for token, (text, _) in enumerate(vocabulary)}
        tokens = {**vocabulary, **{about["content"]: about["id"] for about in added}}
        return {text: operator.index(token) for text, token in tokens.items()}
    except (TypeError, KeyError, ValueError) as error:
        raise ConfigError(f"{file} has no valid vocabulary ({error!r}); download it again") from error
