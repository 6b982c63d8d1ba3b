"""Creates the proposer of a `speculative_config`."""

from __future__ import annotations

from pathlib import Path

from quire.config import EngineConfig
from quire.errors import CheckpointError, ConfigError
from quire.models.checkpoint import content_hash, resolve
from quire.models.model import Model
from quire.runner.drafts import DraftingModel
from quire.runner.proposer import Speculation
from quire.speculate.device_drafting import DeviceDraftingProposer
from quire.speculate.drafting import CHUNK, DraftingProposer, DraftModel
from quire.speculate.load_draft import load_draft_model, load_eagle, load_eagle3
from quire.speculate.ngram import NgramProposer
from quire.speculate.tree import TreeShape
from quire.speculative_config import SpeculativeConfig


def make_speculation(spec: SpeculativeConfig, target: Model, folder: Path, config: EngineConfig) -> Speculation:
    """The proposer for `target`, with its model loaded, if it has one.

    Args:
        folder: of the target's tokenizer.

    Raises:
        ConfigError: the model was not found, or cannot draft for the target.
    """
    rejection = config.speculative_acceptance == "rejection"
    if spec.method == "ngram":
        return Speculation(NgramProposer(spec.prompt_lookup_min, spec.prompt_lookup_max), rejection=rejection)
    drafting, aux_layers, weight_bytes, fingerprint = _load(spec, target, folder)
    lead = int(spec.method != "draft_model")
    tree = TreeShape(spec.tree_width, spec.tree_depth) if spec.tree_width > 1 else None
    proposer: DraftingProposer | DeviceDraftingProposer = DraftingProposer(drafting, lead, tree, rejection)
    kept = CHUNK
    if target.kernels.reads_spans and tree is None and not rejection:
        proposer = DeviceDraftingProposer(drafting, lead, spec.num_speculative_tokens)
        kept = 2 * proposer.keeps  # of waiting requests, too
    return Speculation(
        proposer,
        model=drafting,
        aux_layers=aux_layers,
        weight_bytes=weight_bytes,
        kv_shape=drafting.kv_shape,
        bytes_per_request=lead * kept * target.config.layer.hidden_size * target.dtype.itemsize,
        needs_next_token=bool(lead),
        rejection=rejection,
        fingerprint=fingerprint,
    )


def find(spec: SpeculativeConfig) -> Path:
    """The folder of the draft model or head. Raises `ConfigError` if there is none."""
    try:
        return resolve(spec.named_model())
    except CheckpointError as error:
        raise ConfigError(f"speculative_config: {error}") from error


def _load(spec: SpeculativeConfig, target: Model, folder: Path) -> tuple[DraftingModel, tuple[int, ...], int, str]:
    """The drafting model, the target's layers whose input it takes, bytes of its own weights, and their name."""
    if spec.method == "mtp":
        if target.mtp is None:
            raise ValueError("the model has no multi-token-prediction layer: load it with mtp=True")
        return target.mtp, (), 0, "mtp"
    path = find(spec)
    if spec.method == "draft_model":
        model = load_draft_model(path, target, folder)
        return DraftModel(model, target.vocab_size), (), model.weight_bytes, content_hash(path)
    head = load_eagle(path, target) if spec.method == "eagle" else load_eagle3(path, target)
    return head, head.aux_layers, head.weight_bytes, content_hash(path)
