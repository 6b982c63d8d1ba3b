"""Options and commands of llama.cpp and Ollama: on the command line what is the same is taken, the rest is explained.

vLLM's are in `vllm_options.py`, since Quire's own names are vLLM's wherever both have the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OtherOption:
    """An option of another engine.

    Attributes:
        engine: whose it is.
        ours: the name of the option here; None: there is none.
        why: how ours differs, or what to do; None: it means the same, and so do its values, but for `values`.
        values: theirs and ours, where they are spelt otherwise.
        short: how it is written in short.
    """

    engine: str
    ours: str | None
    why: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    short: tuple[str, ...] = ()


LLAMA_CPP, OLLAMA = "llama.cpp", "Ollama"
_UNBOUNDED = {"-1": "none", "-2": "none"}
_ONE_DEVICE = "a model is entirely on one device, cuda or cpu"
_BATCH = "the tokens of one step, for all requests together"
_DRAFTS = """a JSON object, as in '{"model": "org/name", "num_speculative_tokens": 4}'"""
_ALWAYS = "leave it out, it is always on"

OTHER_OPTIONS: dict[str, OtherOption] = {
    # the same
    "alias": OtherOption(LLAMA_CPP, "served_model_name", short=("-a",)),
    "ctx_size": OtherOption(LLAMA_CPP, "max_model_len", values={"0": "none"}, short=("-c",)),
    "n_ctx": OtherOption(LLAMA_CPP, "max_model_len", values={"0": "none"}),
    "num_ctx": OtherOption(OLLAMA, "max_model_len"),
    "n_predict": OtherOption(LLAMA_CPP, "max_tokens", values=_UNBOUNDED, short=("-n",)),
    "predict": OtherOption(LLAMA_CPP, "max_tokens", values=_UNBOUNDED),
    "num_predict": OtherOption(OLLAMA, "max_tokens", values=_UNBOUNDED),
    "n_threads": OtherOption(LLAMA_CPP, "threads", short=("-t",)),
    "num_thread": OtherOption(OLLAMA, "threads"),
    "model_path": OtherOption(LLAMA_CPP, "model", short=("-m",)),
    "parallel": OtherOption(LLAMA_CPP, "max_num_seqs", short=("-np",)),
    "system_prompt": OtherOption(LLAMA_CPP, "system", short=("-sys",)),
    "temp": OtherOption(LLAMA_CPP, "temperature"),
    # something like it
    "api_key_file": OtherOption(LLAMA_CPP, "api_key", "with @ before the file's name"),
    "batch_size": OtherOption(LLAMA_CPP, "max_num_batched_tokens", _BATCH, short=("-b",)),
    "ubatch_size": OtherOption(LLAMA_CPP, "max_num_batched_tokens", _BATCH, short=("-ub",)),
    "cache_type_k": OtherOption(LLAMA_CPP, "kv_cache_dtype", "int8 or fp8, for keys and values", short=("-ctk",)),
    "cache_type_v": OtherOption(LLAMA_CPP, "kv_cache_dtype", "int8 or fp8, for keys and values", short=("-ctv",)),
    "draft_max": OtherOption(LLAMA_CPP, "speculative_config", _DRAFTS, short=("--draft",)),
    "model_draft": OtherOption(LLAMA_CPP, "speculative_config", _DRAFTS, short=("-md",)),
    "format": OtherOption(OLLAMA, "structured_outputs", """'{"json_object": true}' for JSON"""),
    "gpu_layers": OtherOption(LLAMA_CPP, "device", _ONE_DEVICE, short=("-ngl",)),
    "n_gpu_layers": OtherOption(LLAMA_CPP, "device", _ONE_DEVICE),
    "num_gpu": OtherOption(OLLAMA, "device", _ONE_DEVICE),
    "repeat_penalty": OtherOption(LLAMA_CPP, "repetition_penalty", "it covers the whole prompt and output"),
    # nothing of the kind
    "cont_batching": OtherOption(LLAMA_CPP, None, _ALWAYS, short=("-cb",)),
    "conversation": OtherOption(
        LLAMA_CPP, None, "use 'quire chat' for a conversation, 'quire generate' for a completion", short=("-cnv",)
    ),
    "file": OtherOption(LLAMA_CPP, None, "pipe the prompt in, as in 'quire generate MODEL < FILE'", short=("-f",)),
    "flash_attn": OtherOption(LLAMA_CPP, None, "leave it out, attention always works that way", short=("-fa",)),
    "hf_repo": OtherOption(LLAMA_CPP, None, "give org/name as the model", short=("-hf", "-hfr")),
    "jinja": OtherOption(LLAMA_CPP, None, _ALWAYS),
    "keepalive": OtherOption(OLLAMA, None, "leave it out, the model stays loaded until the command ends"),
    "lora": OtherOption(LLAMA_CPP, None, "adapters are not supported; merge them into the checkpoint"),
    "mlock": OtherOption(LLAMA_CPP, None, "leave it out, weights are in the memory of the process"),
    "prompt": OtherOption(LLAMA_CPP, None, "put prompts after the model: quire generate MODEL PROMPT", short=("-p",)),
}

OTHER_COMMANDS = {
    "complete": "use 'quire generate MODEL PROMPT'",
    "show": "use 'quire inspect MODEL'",
    "pull": "not needed: models are downloaded when first used, or by 'hf download org/name'",
    "list": "use 'hf cache ls': models are in the Hub cache",
    "rm": "use 'hf cache rm': models are in the Hub cache",
    "collect-env": "use 'quire doctor'",
}
"""Commands of Ollama and vLLM, and what to do here."""


def flags_of(name: str) -> tuple[str, ...]:
    """How an option of `OTHER_OPTIONS` is written on a command line."""
    return "--" + name.replace("_", "-"), *OTHER_OPTIONS[name].short


def explained(name: str, spelt: str, ours: str | None) -> str:
    """What to do in place of an option of `OTHER_OPTIONS`.

    Args:
        spelt, ours: it and Quire's, as they are written here; None: Quire has none.
    """
    option = OTHER_OPTIONS[name]
    why = option.why or "it means the same"
    return f"{option.engine}'s {spelt} is {ours} here: {why}" if ours else f"{option.engine}'s {spelt}: {why}"
