"""`speculative_config`: how tokens are drafted and accepted.

Keys are vLLM's where vLLM has the same feature. Imports nothing of the engine.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire.errors import ConfigError
from quire.vllm_options import SPECULATIVE_OPTIONS, translated

METHODS: dict[str, int] = {"ngram": 8, "draft_model": 4, "eagle": 4, "eagle3": 4, "mtp": 1}
"""Methods of drafting, with the default maximum of drafts."""

TREE_NODES = 16
"""The default maximum of drafts in a tree."""

MOST_DRAFTS = 64
"""The maximum of `num_speculative_tokens`; more would not pay off."""

DEMOS = {"draft_model": "demo-draft", "eagle": "demo-eagle"}
"""Default draft models of the embedded demo model."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Speculative decoding of one engine.

    Attributes:
        method: one of `METHODS`; None for the one that `model` is made for, which its tensors tell (`load_draft.py`).
        model: folder of the draft model or head, org/name on the Hub, or the name of an embedded one.
        num_speculative_tokens: maximum drafts per request and step; with trees, nodes of a tree.
        adaptive: draft as many as pay off, down to none; False: always as many as fit.
        prompt_lookup_min, prompt_lookup_max: length of the suffix that ngram looks up.
        tree_width: branches of a node; 1 for a chain of drafts.
        tree_depth: maximum tokens on a path.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or does not apply to the method.
    """

    method: str | None
    num_speculative_tokens: int
    model: str | None = None
    adaptive: bool = True
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 5
    tree_width: int = 1
    tree_depth: int = 6

    def __post_init__(self) -> None:
        if self.method is not None and (not isinstance(self.method, str) or self.method not in METHODS):
            raise ConfigError(f"speculative_config: method is {_shown(self.method)}; allowed: {', '.join(METHODS)}")
        for name, low, high in (
            ("prompt_lookup_min", 1, 32),
            ("prompt_lookup_max", 1, 32),
            ("tree_width", 1, 16),
            ("tree_depth", 1, 16),
        ):
            _check_integer(name, getattr(self, name), low, high)
        _check_integer("num_speculative_tokens", self.num_speculative_tokens, 1, MOST_DRAFTS)
        if type(self.adaptive) is not bool:
            raise ConfigError(f"speculative_config: adaptive is {_shown(self.adaptive)}; it must be true or false")
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise ConfigError(
                f"speculative_config: prompt_lookup_min={self.prompt_lookup_min} is above "
                f"prompt_lookup_max={self.prompt_lookup_max}; lower it"
            )
        self._check_model()

    def _check_model(self) -> None:
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ConfigError(f"speculative_config: model is {_shown(self.model)}; it must be a folder or org/name")
        if self.model is not None and self.method in ("ngram", "mtp"):
            raise ConfigError(f"speculative_config: method {self.method} needs no other model; leave model out")
        if self.tree_width > 1 and self.method == "ngram":
            raise ConfigError("speculative_config: method ngram cannot draft trees; leave tree_width out")

    @classmethod
    def read(cls, given: Mapping[str, Any], model: str) -> SpeculativeConfig:
        """From `EngineConfig.speculative_config`; `model` is the target.

        Raises:
            ConfigError: a key is unknown (the message names the nearest one), or a value is not valid.
        """
        names = [field.name for field in fields(cls)]
        given = translated(given, names, SPECULATIVE_OPTIONS)
        for name in given:
            if name not in names:
                near = difflib.get_close_matches(str(name), names, n=1, cutoff=0.5)
                hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
                raise ConfigError(f"speculative_config: unknown key {_shown(name)}; {hint}")
        given = _with_method(given)
        own = cls(**{**_defaults(given["method"], given.get("tree_width"), model), **given})
        for name in given:
            if own.method != "ngram" and name.startswith("prompt_lookup"):
                theirs = own.method or "that of model"
                raise ConfigError(
                    f"speculative_config: {name} is for method ngram, but method is {theirs}; leave it out"
                )
            if own.tree_width == 1 and name == "tree_depth":
                raise ConfigError("speculative_config: tree_depth is for trees; set tree_width, or leave it out")
        if own.method not in ("ngram", "mtp"):
            own.named_model()
        return own

    def named_model(self) -> str:
        """`model`, for a method that needs one.

        Raises:
            ConfigError: none was named.
        """
        if self.model is None:
            what = "smaller checkpoint" if self.method == "draft_model" else "head made for this model"
            raise ConfigError(f"speculative_config: method {self.method} needs 'model', the folder of a {what}")
        return self.model

    def describe(self) -> str:
        """A description for the log."""
        what = self.method if self.model is None else f"{self.method} ({self.model})"
        shape = f"trees of {self.num_speculative_tokens} drafts" if self.tree_width > 1 else ""
        shape = shape or f"up to {self.num_speculative_tokens} drafts"
        return f"speculation: {what}, {shape} per step{'' if self.adaptive else ', always'}"


def _with_method(given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with "method", as vLLM finds it if it was left out: None for what is in the folder of "model".

    Raises:
        ConfigError: nothing says which it is.
    """
    if given.get("method") is not None:
        return dict(given)
    if given.get("model") in ("ngram", "[ngram]"):
        return {**given, "method": "ngram", "model": None}
    if given.get("model") is not None:
        return {**given, "method": None}
    if any(name.startswith("prompt_lookup") for name in given):
        return {**given, "method": "ngram"}
    raise ConfigError(f"speculative_config has no method; give one of {', '.join(METHODS)}, or a model")


def _defaults(method: Any, tree_width: Any, model: str) -> dict[str, Any]:
    """Defaults that depend on the method, on trees, and on the target."""
    known = method if isinstance(method, str) else "draft_model"  # heads have the same
    most = METHODS.get(known, 1) if tree_width in (None, 1) else TREE_NODES
    return {"num_speculative_tokens": most, "model": DEMOS.get(known) if model == "demo" else None}


def _check_integer(name: str, value: object, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"speculative_config: {name} is {_shown(value)}; it must be an integer from {low} to {high}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
