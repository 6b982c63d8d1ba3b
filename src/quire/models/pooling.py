"""Embeddings as specified by a checkpoint's files for Sentence Transformers, computed from pooled states.

`modules.json` lists the modules after the model: a pooling module, whose folder specifies the method, optional dense
layers, and an optional normalizing module. The default without it is that of vLLM: the last token's hidden state,
normalized. `config_sentence_transformers.json` has prompts, which are prepended to texts.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from quire.errors import ModelConfigError, RequestError
from quire.models.dense import Dense
from quire.models.fields import MAX_SIZE, Fields, has_file

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
MAX_MODULES = 16
FLAGS = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
"""Fields of a pooling module's config.json, with our method names."""
SIMILARITIES = ("cosine", "dot", "dot_product", "euclidean", "manhattan")
NAMES = {"lasttoken": "last", "last": "last", "mean": "mean"}
"""Values of `pooling_mode`, the newer field."""


@dataclass(frozen=True, slots=True)
class PoolingConfig:
    """How embeddings are computed.

    Attributes:
        width: dimensions of an embedding.
        method: see `PoolingParams`.
        normalizes: whether embeddings are normalized to length 1.
        declared: whether the checkpoint has these files, and so is an embedding model.
        matryoshka: the dimensions it was trained for, if specified.
        dense: layers after pooling, in order.
        prompts: text to prepend, by name.
        default_prompt: name of the default prompt; None if there is none.
        similarity: how embeddings are compared, as Sentence Transformers names it.
    """

    width: int
    method: Literal["last", "mean"] = "last"
    normalizes: bool = True
    declared: bool = False
    matryoshka: tuple[int, ...] = ()
    dense: tuple[Dense, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    similarity: str = "cosine"

    @classmethod
    def read(cls, folder: Path) -> PoolingConfig:
        """Read a checkpoint's folder.

        Raises:
            ModelConfigError, CheckpointError: its kind of embeddings is not supported, or a file cannot be read.
        """
        model = Fields.read(folder / "config.json")
        matryoshka = tuple(model.integers("matryoshka_dimensions", below=MAX_SIZE))
        width = (model.section("text_config") if "text_config" in model else model).integer("hidden_size")
        modules = _modules(folder / MODULES_FILE)
        if not modules:
            return cls(width, matryoshka=matryoshka)
        kinds = [kind for kind, _ in modules]
        layers = kinds[2:-1] if kinds[-1] == "Normalize" else kinds[2:]
        if kinds[:2] != ["Transformer", "Pooling"] or {*layers} - {"Dense"}:
            raise ModelConfigError(
                f"{folder / MODULES_FILE} has the modules {', '.join(kinds)[:200]}; embeddings are made of "
                "Transformer, Pooling, Dense ones and maybe Normalize, of Sentence Transformers"
            )
        pooling = Fields.read(folder / modules[1][1] / "config.json")
        Fields.read(folder / modules[0][1] / "sentence_bert_config.json").refuse(
            "do_lower_case", (False,), "texts in lower case"
        )
        dense: list[Dense] = []
        for _, path in modules[2 : 2 + len(layers)]:
            dense.append(Dense.read(folder / path, width))
            width = dense[-1].width
        made = width, _method(pooling), "Normalize" in kinds, True, matryoshka, tuple(dense)
        return cls(*made, *_prompts(Fields.read(folder / PROMPTS_FILE)))

    def prompt(self, name: str | None) -> str:
        """The prompt of this name; the default one, if any, for None.

        Raises:
            RequestError: the checkpoint has no prompt of that name.
        """
        name = self.default_prompt if name is None else name
        if name is not None and name not in self.prompts:
            known = ", ".join(map(repr, self.prompts)) or "none"
            raise RequestError(f"prompt_name is {name[:100]!r}; this model's prompts are: {known}", param="prompt_name")
        return "" if name is None else self.prompts[name]

    def prompted(self, prompts: Sequence[Any], name: str | None) -> list[Any]:
        """Prepend the prompt to texts; token ids are unchanged.

        Raises:
            RequestError: there is no such prompt, or one is requested for token ids.
        """
        prompt = self.prompt(name)
        if name is not None and not all(isinstance(one, str) for one in prompts):
            raise RequestError(
                "prompt_name is for texts; put its tokens before the others yourself", param="prompt_name"
            )
        return [prompt + one if isinstance(one, str) else one for one in prompts]

    @property
    def compares_by_cosine(self) -> bool:
        """Whether embeddings are compared by cosine similarity."""
        return self.similarity == "cosine" or (self.normalizes and self.similarity.startswith("dot"))

    def before(self, purpose: str) -> str:
        """The prompt for a query, or a document: the one of that name, if any."""
        return self.prompt(purpose if purpose in self.prompts else None)

    def embedding(self, pooled: Sequence[float], dimensions: int | None = None) -> array[float]:
        """An embedding in fp32, from a prompt's pooled state.

        Args:
            dimensions: truncate to this many, as for Matryoshka embeddings.
        """
        if self.dense:
            state = np.array(pooled, np.float32)
            for layer in self.dense:
                state = layer(state)
            pooled = state.tolist()
        values = pooled[:dimensions]
        length = math.sqrt(math.fsum(value * value for value in values)) if self.normalizes else 1.0
        return array("f", [value / (length or 1.0) for value in values])

    def check_dimensions(self, dimensions: int | None) -> None:
        """Raise RequestError if embeddings cannot be truncated to this many dimensions."""
        if dimensions is None:
            return
        allowed = ", ".join(map(str, self.matryoshka)) if self.matryoshka else f"1 to {self.width}"
        fine = dimensions in self.matryoshka if self.matryoshka else 1 <= dimensions <= self.width
        if type(dimensions) is not int or not fine:
            raise RequestError(f"dimensions is {str(dimensions)[:20]}; this model's embeddings may have {allowed}")


def _modules(file: Path) -> list[tuple[str, str]]:
    """Each module's class, without the package, and its folder; empty if there is no such file."""
    if not has_file(file):
        return []
    try:
        listed = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(listed, list) or not 2 <= len(listed) <= MAX_MODULES:
        raise ModelConfigError(f"{file} must hold a list of 2 to {MAX_MODULES} modules")
    found = []
    for number, module in enumerate(listed):
        if not isinstance(module, dict):
            raise ModelConfigError(f"{file}: module {number} must be an object")
        fields = Fields(module, f"{file}, module {number}")
        kind, path = fields.text("type"), Path(fields.text("path"))
        if not kind.startswith("sentence_transformers."):
            raise fields.error("type", "a class of sentence_transformers; no code from a checkpoint is run")
        if path.is_absolute() or ".." in path.parts:
            raise fields.error("path", "a folder of the checkpoint")
        found.append((kind.rpartition(".")[2], str(path)))
    return found


def _prompts(fields: Fields) -> tuple[dict[str, str], str | None, str]:
    """Prompts by name, the name of the default one, and how embeddings are compared."""
    prompts = fields.mapping("prompts") if fields.section("prompts").names() else {}
    default = fields.choice("default_prompt_name", prompts) if "default_prompt_name" in fields else None
    return prompts, default, fields.choice("similarity_fn_name", SIMILARITIES, default="cosine")


def _method(pooling: Fields) -> Literal["last", "mean"]:
    """The pooling method in a pooling module's config.json."""
    asked = [name for name in pooling.names() if name.startswith("pooling_mode_") and pooling.flag(name, default=False)]
    if not asked and "pooling_mode" in pooling:
        method = NAMES[pooling.choice("pooling_mode", NAMES)]
    elif len(asked) == 1 and asked[0] in FLAGS:
        method = FLAGS[asked[0]]
    else:
        found = ", ".join(sorted(asked))[:200] or "none"
        raise ModelConfigError(f"{pooling.source} asks for {found}; embeddings are made with one of {', '.join(FLAGS)}")
    if method == "mean":
        pooling.refuse("include_prompt", (True,), "a mean without the instruction's tokens")
        return "mean"
    return "last"
