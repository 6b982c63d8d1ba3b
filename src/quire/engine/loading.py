"""Loads a model and its drafter, as an engine's options say; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.core.sampling_params import NEUTRAL, SamplingParams
from quire.errors import ConfigError, ModelConfigError, SamplingParamsError
from quire.grammar.grammars import Grammars
from quire.grammar.vocabulary import Vocabulary
from quire.models.checkpoint import Checkpoint, content_hash
from quire.models.fields import Fields
from quire.models.hub import tokenizer_folder
from quire.models.model import Model
from quire.models.registry import load_model
from quire.models.sharing import Sharing
from quire.ops import choose_kernels
from quire.ops.cpu.group import SharedGroup
from quire.parallel.group import Group, OneRank
from quire.runner.device import Device
from quire.runner.proposer import Proposer, Speculation
from quire.runner.start import OnLoad
from quire.speculate.load_draft import method_of
from quire.speculate.methods import find, make_speculation

EARLIER = 0.8
"""Share of `collective_timeout_s` for ranks that share layers, so that they notice a silent one before the others."""

LEAST_TOP_P = 1e-6
"""So small that only the likeliest token is left."""

NOT_APPLIED: dict[str, tuple[Any, ...]] = {
    "bad_words_ids": ([],),
    "begin_suppress_tokens": ([],),
    "forced_bos_token_id": (),
    "forced_eos_token_id": (),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "no_repeat_ngram_size": (0,),
    "num_beams": (1,),
    "sequence_bias": ({},),
    "stop_strings": ([],),
    "suppress_tokens": ([],),
    "typical_p": (1,),
}
"""Fields of `generation_config.json` that would change tokens and are not applied, with values that ask for nothing;
others are named when the engine starts.
"""


def with_method(config: EngineConfig) -> EngineConfig:
    """The options with the method of `speculative_config`: if none was given, the one that its model is made for.

    Raises:
        ConfigError: there is no such model.
    """
    spec = config.speculation
    if spec is None or spec.method is not None:
        return config
    method = method_of(find(spec))
    return replace(config, speculative_config={**(config.speculative_config or {}), "method": method})


def contents(config: EngineConfig, path: Path) -> dict[str, str]:
    """A hash of each checkpoint that ranks read, by its option; `path`: the model's folder."""
    found, spec = {"model": content_hash(path)}, config.speculation
    if spec is not None and spec.model is not None:
        found["speculative_config"] = content_hash(find(spec))
    return found


def check_contents(config: EngineConfig, path: Path, expected: Mapping[str, str]) -> None:
    """Check that a rank's checkpoints are the first rank's.

    Raises:
        ConfigError: one differs.
    """
    for name, found in contents(config, path).items() if expected else ():
        if found != expected[name]:
            where = path if name == "model" else config.speculation and config.speculation.model
            raise ConfigError(
                f"{name}: the checkpoint {where} differs from the one on the first machine (hash {found[:8]}, there "
                f"{expected[name][:8]}); copy that one here"
            )


def join(
    config: EngineConfig,
    rank: int,
    device: Device,
    memory: int,
    stage_memory: int,
    store: int,
    bytes: int,
    bell: int = -1,
) -> tuple[Group, Group | None]:
    """A rank's place among all ranks, and among those that share its layers, see `Sharing`.

    Args:
        memory, stage_memory: of these two groups, see `SharedGroup`; the second only with several ranks of both kinds.
        store: see `TorchGroup`; -1 on a CPU.
        bytes: bytes of the largest matrix.
        bell: see `SharedGroup`.

    Raises:
        ConfigError: see `SharedGroup`.
    """
    timeout, size = config.collective_timeout_s, config.tensor_parallel_size
    everybody = SharedGroup(memory, bytes, rank, config.num_ranks, timeout, bell=bell)
    if device.asynchronous:
        from quire.parallel.torch_group import TorchGroup

        return TorchGroup(everybody, store, device.torch, timeout), None
    if size == config.num_ranks:
        return everybody, None
    if size == 1:
        return everybody, OneRank()
    place = rank % size
    return everybody, SharedGroup(stage_memory, bytes, place, size, EARLIER * timeout, first=rank - place, bell=bell)


def load(
    config: EngineConfig,
    path: Path,
    device: Device,
    group: Group,
    stage: Group | None,
    report: OnLoad,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint,
    proposer: Proposer | None = None,
) -> tuple[Model, Speculation | None]:
    """The model, or this rank's part of it, and its drafter; `group` and `stage`: see `Sharing.ranks` and `of_layers`.

    Raises:
        ConfigError, CheckpointError: and what derives from them.
    """
    loading = f"quantizing weights to {config.quantization}" if config.quantization else "loading weights"
    spec = config.speculation
    model = load_model(
        path,
        config.dtype,
        lambda done, total: report(loading, done / total),
        choose_kernels(config.cpu_kernels, device.torch, config.deterministic),
        config.quantization,
        open_checkpoint,
        mtp=spec is not None and spec.method == "mtp",
        sharing=Sharing(group, stage, config.pipeline_parallel_size, config.redundant_experts),
        max_model_len=config.max_model_len,
    )
    linear = bool(model.config.recurrent_layers) or model.config.layer.index is not None
    if linear and spec is not None and spec.tree_width > 1:
        kind = "recurrent layers" if model.config.recurrent_layers else "sparse attention"
        raise ConfigError(
            f"speculative_config: tree_width={spec.tree_width}, but trees of drafts are not supported for a "
            f"model with {kind}; leave it out"
        )
    if proposer is not None:
        return model, Speculation(proposer, rejection=config.speculative_acceptance == "rejection")
    if spec is None:
        return model, None
    return model, make_speculation(spec, model, tokenizer_folder(config, path), config)


def for_whole_prompts(config: EngineConfig) -> EngineConfig:
    """Options for a model with bidirectional attention: each prompt is one span, computed at once, without prefix
    caching.

    Raises:
        ConfigError: an option cannot be used then.
    """
    if config.speculation is not None:
        raise ConfigError(
            "speculative_config is set, but this is an embedding model, which generates no tokens; leave it out"
        )
    return replace(config, enable_chunked_prefill=False, prefix_cache="off", target_itl_ms=None)


def open_grammars(path: Path, vocab_size: int) -> Grammars:
    """The grammar compiler of a model; the tokenizer, in the folder `path`, is loaded with the first grammar."""

    def vocabulary() -> Vocabulary | None:
        from quire.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load_if_present(path)
        return None if tokenizer is None else tokenizer.vocabulary(vocab_size)

    return Grammars(vocabulary)


def left_out(path: Path) -> list[str]:
    """A note about what a checkpoint's `generation_config.json` asks for beside that, and requests must set."""
    found = Fields.read(path / "generation_config.json").picked(NOT_APPLIED)
    names = [name for name, value in found.items() if value not in (None, *NOT_APPLIED[name])]
    if not names:
        return []
    return [
        f"generation_config.json sets {', '.join(names)}, which {'is' if len(names) == 1 else 'are'} not applied; "
        "requests have stop, min_tokens, bad_words and logit_bias"
    ]


def sampling_defaults(path: Path) -> dict[str, Any]:
    """Defaults of sampling parameters, from a checkpoint's `generation_config.json`.

    Raises:
        ModelConfigError: a value is not allowed.
    """
    file = path / "generation_config.json"
    defaults = Fields.read(file).picked(NEUTRAL)
    if defaults.get("top_p") == 0:  # in transformers: the likeliest token alone
        defaults["top_p"] = LEAST_TOP_P
    try:
        SamplingParams().resolved(defaults)
    except SamplingParamsError as error:
        raise ModelConfigError(f"{file} cannot be used: {error}") from error
    return defaults
