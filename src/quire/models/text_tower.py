"""The text model of a multimodal checkpoint: its configuration, and its tensors among the others'.

Such a checkpoint has the text model's configuration in `text_config` and its tensors under `language_model`, besides
those of other towers, which are counted and not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from quire.models.config import DecoderConfig, refuse_unsupported
from quire.models.fields import Fields
from quire.models.layout import Layout

ReadConfig = Callable[[Fields, Fields], DecoderConfig]

PREFIXES = (
    (r"^language_model\.lm_head\.", "lm_head."),
    (r"^language_model\.model\.", "model."),
    (r"^model\.language_model\.", "model."),
)
"""Prefixes of the text model's tensors, in published checkpoints and in transformers' memory."""


def read_text_tower(
    fields: Fields, generation: Fields, texts: Mapping[str, ReadConfig], others: tuple[str, ...]
) -> DecoderConfig:
    """Read the text model's configuration.

    Args:
        fields: of config.json.
        generation: of generation_config.json.
        texts: by `model_type` of the section, its `read_config`.
        others: prefixes of the tensors of other towers, and of what connects them to the text model.

    Raises:
        ModelConfigError: the section is missing, its type is another one, or a field has a value that is not supported.
    """
    refuse_unsupported(fields)
    section = fields.section("text_config")
    if not section.names():
        raise fields.error("text_config", "an object, the text model's configuration")
    read = texts[section.choice("model_type", texts)]
    section = section.with_defaults(fields.picked(["eos_token_id"]))
    section = section.updated(fields.picked(["tie_word_embeddings"]))  # if both are present, the outer one counts
    config = read(section, generation)
    layout = config.layout or Layout()
    skipped = tuple(prefix + other for prefix in ("", "model.") for other in others)
    return replace(
        config, layout=replace(layout, renamed=(*PREFIXES, *layout.renamed), skipped=(*layout.skipped, *skipped))
    )
