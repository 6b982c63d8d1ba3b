"""vLLM's names of engine and server options, where Quire has the thing under another name or does it anyway.

A leaf: anyone may import it. What vLLM and Quire name alike is not here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOption:
    """What an option of vLLM's means here.

    Attributes:
        kind: type of its values.
        ours: the option of Quire's that it is; None: there is none.
        values: what its values are in `ours`. Others are the same there where `ours` has the same type.
        same: without `ours`: values that ask for what Quire does anyway; None: any of them changes nothing.
        why: without `ours`: why other values are refused.
        short: how its flag may be written, too.
    """

    kind: Any
    ours: str | None = None
    values: Mapping[Any, Any] = field(default_factory=dict)
    same: tuple[Any, ...] | None = ()
    why: str = ""
    short: tuple[str, ...] = ()


def _one(*short: str) -> VllmOption:
    return VllmOption(
        kind=int,
        same=(1,),
        why="set tensor_parallel_size, pipeline_parallel_size or data_parallel_size",
        short=short,
    )


def _off(why: str, *short: str) -> VllmOption:
    return VllmOption(kind=bool, same=(False,), why=why, short=short)


def _only(kind: Any, *same: Any, why: str) -> VllmOption:
    return VllmOption(kind=kind, same=same, why=why)


def _any(kind: Any) -> VllmOption:
    return VllmOption(kind=kind, same=None)


_OWN = "the checkpoint's is used"
_NO_SWAP = "preempted requests are recomputed, or loaded from host_kv_memory if that is set"
_NO_LORA = "LoRA adapters are not supported yet"
_TOOL_PARSERS = {
    name: name
    for name in (
        *("hermes", "qwen3_coder", "llama3_json", "mistral", "deepseek_v3", "deepseek_v31", "deepseek_v32"),
        *("glm45", "glm47", "granite", "minimax_m2", "kimi_k2", "gemma4"),
    )
} | {"openai": "harmony"}

VLLM_OPTIONS: dict[str, VllmOption] = {
    # the same under another name or value
    "api_server_count": VllmOption(kind=int, ours="api_workers", short=("-asc",)),
    "distributed_executor_backend": VllmOption(kind=str, ours="distributed_executor_backend", values={"uni": "mp"}),
    "disable_log_requests": VllmOption(kind=bool, ours="log_requests", values={True: False, False: True}),
    "dtype": VllmOption(kind=str, ours="dtype", values={"half": "float16", "float": "float32"}),
    "enable_log_requests": VllmOption(kind=bool, ours="log_requests", values={True: True, False: False}),
    "enable_prefix_caching": VllmOption(kind=bool, ours="prefix_cache", values={True: "radix", False: "off"}),
    "generation_config": VllmOption(kind=str, ours="generation_config", values={"vllm": "off"}),
    "kv_cache_dtype": VllmOption(kind=str, ours="kv_cache_dtype", values={"fp8_e4m3": "fp8"}),
    "kv_cache_memory_bytes": VllmOption(kind=str, ours="kv_cache_memory"),
    "num_gpu_blocks_override": VllmOption(kind=int, ours="num_kv_blocks"),
    "tool_call_parser": VllmOption(kind=str, ours="tool_format", values=_TOOL_PARSERS),
    # on several devices
    "data_parallel_size_local": _one("-dpl"),
    "decode_context_parallel_size": _one("-dcp"),
    "prefill_context_parallel_size": _one("-pcp"),
    "worker_use_ray": _off("ranks are started without Ray; see 'quire rank --help'"),
    # what changes nothing here
    "disable_custom_all_reduce": _any(bool),
    "enable_auto_tool_choice": _any(bool),  # where the model's template has tools
    "enable_prompt_tokens_details": _any(bool),  # cached tokens are always reported
    "enable_request_id_headers": _any(bool),
    "enable_server_load_tracking": _any(bool),
    "max_log_len": _any(int),  # prompts are not logged
    "reasoning_parser": _any(str),  # detected from the chat template
    "uvicorn_log_level": _any(str),
    "disable_log_stats": _any(bool),
    "enable_ssl_refresh": _any(bool),  # a certificate is read again when it changes
    "disable_uvicorn_access_log": _any(bool),
    "prefix_caching_hash_algo": _any(str),
    "served_model_name": _any(str),  # without a server
    "use_tqdm_on_load": _any(bool),
    "use_v2_block_manager": _any(bool),
    # what is not there
    "attention_backend": _only(str, why="kernels are chosen by the device; on a CPU see cpu_kernels"),
    "calculate_kv_scales": _off("an 8-bit cache has a scale for each token and head"),
    "chat_template_content_format": _only(str, "auto", why="it is detected from the chat template"),
    "code_revision": _only(str, why="Quire never runs code from a checkpoint"),
    "compilation_config": _only(Mapping[str, Any], {}, why="models are not compiled; see cuda_graphs"),
    "cpu_offload_gb": _only(float, 0, why="weights cannot be offloaded"),
    "default_chat_template_kwargs": _only(Mapping[str, Any], {}, why="set chat_template_kwargs in each request"),
    "disable_fastapi_docs": _off("with --api-key the API reference needs a key, too"),
    "download_dir": _only(str, why="downloads go to the cache of huggingface_hub; set HF_HOME"),
    "enable_force_include_usage": _off("requests set stream_options.include_usage"),
    "enable_lora": _off(_NO_LORA),
    "enable_sleep_mode": _off("an engine cannot release its memory and resume"),
    "hf_overrides": _only(Mapping[str, Any], {}, why="a checkpoint is used as it is; change its config.json"),
    "kv_transfer_config": _only(
        Mapping[str, Any],
        {},
        why="for disaggregated prefill set kv_role and prefill_url; see also kv_connector",
    ),
    "limit_mm_per_prompt": _only(Mapping[str, Any], {}, why="only text models are supported"),
    "load_format": _only(str, "auto", "safetensors", why="checkpoints are read from safetensors files"),
    "lora_modules": _only(str, why=_NO_LORA),
    "max_logprobs": _only(int, 20, why="the limit is 20"),
    "max_long_partial_prefills": _only(int, 1, why="see max_num_partial_prefills"),
    "num_scheduler_steps": _only(int, 1, why="every step is scheduled; async_scheduling hides the cost"),
    "override_generation_config": _only(Mapping[str, Any], {}, why="set sampling parameters in each request"),
    "guided_decoding_backend": _only(str, "auto", "guidance", why="llguidance enforces every form"),
    "preemption_mode": _only(str, "recompute", why=_NO_SWAP),
    "response_role": _only(str, "assistant", why="replies are the assistant's"),
    "rope_scaling": _only(Mapping[str, Any], {}, why=_OWN),
    "rope_theta": _only(float, why=_OWN),
    "runner": _only(str, "auto", "generate", why="the task is detected from the model"),
    "seed": _only(int, 0, why="each request has its own seed: SamplingParams(seed=...), or the field seed"),
    "skip_tokenizer_init": _off("it is not needed: token ids are always accepted as prompts"),
    "ssl_ca_certs": _only(str, why="clients are authenticated by API keys, not by certificates"),
    "ssl_cert_reqs": _only(int, 0, why="clients are authenticated by API keys, not by certificates"),
    "stream_interval": _only(int, 1, why="tokens are sent as they are generated"),
    "structured_outputs_config": _only(
        Mapping[str, Any], {}, {"backend": "auto"}, {"backend": "guidance"}, why="llguidance enforces every form"
    ),
    "swap_space": _only(float, 0, why=_NO_SWAP),
    "task": _only(str, "auto", "generate", why="the task is detected from the model"),
    "tokenizer_mode": _only(str, "auto", "hf", why="tokenizers are read from tokenizer.json"),
    "weight_transfer_config": _only(
        Mapping[str, Any], {}, why="weights do not change while an engine runs; save them, and start one with them"
    ),
    "trust_remote_code": _off("Quire never runs code from a checkpoint"),
}


VLLM_ARGUMENTS: dict[str, VllmOption] = {
    "use_tqdm": VllmOption(kind=bool, ours="progress"),
    "chat_template": _only(str, why="set it where the engine is made; it holds for all chats"),
    "chat_template_content_format": VLLM_OPTIONS["chat_template_content_format"],
    "lora_request": _only(object, why=_NO_LORA),
    "mm_processor_kwargs": _only(Mapping[str, Any], {}, why="only text models are supported"),
    "pooling_params": _only(object, why="the checkpoint says how it pools; see dimensions"),
    "priority": _only(Sequence[int], why="set SamplingParams(priority=...), one for each prompt"),
    "prompt_token_ids": _only(Sequence[int], why="prompts may be lists of token ids; pass them as prompts"),
    "tokenization_kwargs": _only(Mapping[str, Any], {}, why="give token ids as prompts, tokenized in another way"),
    "truncate_prompt_tokens": _only(int, why="shorten the prompts, or give token ids"),
}
"""The same for arguments of the methods of vLLM's `LLM`."""

VLLM_METHODS: dict[str, str] = {
    "beam_search": "there is no beam search; SamplingParams(n=...) samples several outputs",
    "classify": "classifiers are not supported",
    "encode": "use embed, which returns an embedding for each prompt",
    "get_default_sampling_params": "use default_params",
    "get_metrics": "see stats",
    "llm_engine": "LLM is the engine: use add_request, step and abort",
    "reward": "reward models are not supported",
    "score": "start a server and use its /v1/score, or compare what embed returns",
    "sleep": "an engine cannot release its memory and resume; close it",
    "wake_up": "an engine cannot release its memory and resume; create another one",
}
"""What to use instead of members of vLLM's `LLM` that are not there."""

SPECULATIVE_OPTIONS: dict[str, VllmOption] = {"draft_tensor_parallel_size": _one()}
"""The same for the keys of `speculative_config`."""


def translated(
    options: Mapping[str, Any], known: Collection[str], table: Mapping[str, VllmOption] = VLLM_OPTIONS
) -> dict[str, Any]:
    """The options by Quire's names and values; what asks for what Quire does anyway is left out.

    Args:
        known: Quire's own names of what may be set. A name that is neither there nor in the table is left as it is.

    Raises:
        ConfigError: an option of vLLM's asks for what is not there, or one thing is set by two names.
    """
    result: dict[str, Any] = {}
    spelt: dict[str, str] = {}
    for name, value in options.items():
        option = table.get(name)
        ours = name
        if option is not None and option.ours in known:
            if value is None and name not in known:
                continue
            ours, value = option.ours or name, _value(name, option, value)
        elif option is not None and option.ours is None and name not in known:
            _refuse_other(name, option, value)
            continue
        if ours in spelt:
            raise ConfigError(f"{spelt[ours]} and {name} are the same option, {ours}; leave one of them out")
        result[ours], spelt[ours] = value, name
    return result


def _value(name: str, option: VllmOption, value: Any) -> Any:
    """The value in Quire's spelling."""
    for theirs, ours in option.values.items():
        if _equal(value, theirs):
            return ours
    if option.values and name != option.ours:
        raise ConfigError(f"{name}={value!r} is not supported; allowed: {', '.join(map(str, option.values))}")
    return value


def _refuse_other(name: str, option: VllmOption, value: Any) -> None:
    if option.same is None or value is None or any(_equal(value, one) for one in option.same):
        return
    instead = "".join(f", or set it to {one!r}" for one in option.same)
    raise ConfigError(f"{name}={value!r} is not supported: {option.why}; leave it out{instead}")


def _equal(value: Any, one: Any) -> bool:
    """True is not 1 here."""
    return isinstance(value, bool) == isinstance(one, bool) and bool(value == one)
