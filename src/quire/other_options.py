"""Options and commands of llama.cpp, Ollama and SGLang: those that mean the same are accepted on the command line, the
others are explained.

vLLM's are in `vllm_options.py`, since Quire's own names are vLLM's wherever both have the same thing; those of its
benchmark are here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class OtherOption:
    """An option of another engine.

    Attributes:
        engine: the engine's name.
        ours: Quire's option; None if there is none.
        why: how Quire's option differs, or what to do instead; None if both mean the same.
        values: values that Quire spells differently: theirs, and Quire's.
        short: its other flags.
    """

    engine: str
    ours: str | None
    why: str | None = None
    values: Mapping[str, str] = field(default_factory=dict)
    short: tuple[str, ...] = ()


LLAMA_CPP, OLLAMA, SGLANG, VLLM = "llama.cpp", "Ollama", "SGLang", "vLLM"
_UNBOUNDED = {"-1": "none", "-2": "none"}
_ONE_DEVICE = "a model is entirely on one device, cuda or cpu"
_BATCH = "the tokens of one step, for all requests together"
_DRAFTS = """a JSON object, as in '{"model": "org/name", "num_speculative_tokens": 4}'"""
_ALWAYS = "leave it out, it is always on"
_DETECTED = "leave it out, it is detected from the model"
_URL = "the server's whole URL, such as http://127.0.0.1:8000"
_WORKLOAD = "random, shared-prefix, multi-turn or trace"
_REPORT = "followed by the file's name"
_HOST_TIER = "the size of the host tier, such as 8GiB"

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
    "chat_template_file": OtherOption(LLAMA_CPP, "chat_template"),
    "model_path": OtherOption(LLAMA_CPP, "model", short=("-m",)),
    "parallel": OtherOption(LLAMA_CPP, "max_num_seqs", short=("-np",)),
    "system_prompt": OtherOption(LLAMA_CPP, "system", short=("-sys",)),
    "temp": OtherOption(LLAMA_CPP, "temperature"),
    "tokenizer_path": OtherOption(SGLANG, "tokenizer"),
    "context_length": OtherOption(SGLANG, "max_model_len"),
    "max_running_requests": OtherOption(SGLANG, "max_num_seqs"),
    "page_size": OtherOption(SGLANG, "block_size"),
    "tp_size": OtherOption(SGLANG, "tensor_parallel_size", short=("--tp",)),
    "pp_size": OtherOption(SGLANG, "pipeline_parallel_size", short=("--pp",)),
    "dp_size": OtherOption(SGLANG, "data_parallel_size", short=("--dp",)),
    "disaggregation_mode": OtherOption(SGLANG, "kv_role", values={"null": "none"}),
    "disaggregation_transfer_backend": OtherOption(SGLANG, "kv_transport"),
    "base_url": OtherOption(VLLM, "url"),
    "max_concurrency": OtherOption(VLLM, "concurrency"),
    "num_prompts": OtherOption(VLLM, "num_requests"),
    "num_warmups": OtherOption(VLLM, "warmup"),
    "random_input_len": OtherOption(VLLM, "input_len"),
    "random_output_len": OtherOption(VLLM, "output_len"),
    "request_rate": OtherOption(VLLM, "rate"),
    # similar
    "backend": OtherOption(VLLM, "endpoint", "completions or chat"),
    "dataset_name": OtherOption(VLLM, "workload", _WORKLOAD),
    "dataset_path": OtherOption(VLLM, "trace", "a file of lengths, shared prefixes and arrival times"),
    "host": OtherOption(VLLM, "url", _URL),
    "port": OtherOption(VLLM, "url", _URL),
    "percentile_metrics": OtherOption(VLLM, "json", "it has all of them"),
    "metric_percentiles": OtherOption(VLLM, "json", "it has p50, p90, p95 and p99"),
    "random_prefix_len": OtherOption(VLLM, "prefix_len", "with --workload shared-prefix"),
    "random_range_ratio": OtherOption(VLLM, "input_len", "a range such as 128-512; --output-len takes one, too"),
    "ready_check_timeout_sec": OtherOption(VLLM, "wait", "seconds to wait for a server that is still starting"),
    "save_result": OtherOption(VLLM, "json", _REPORT),
    "result_dir": OtherOption(VLLM, "json", _REPORT),
    "result_filename": OtherOption(VLLM, "json", _REPORT),
    "save_detailed": OtherOption(VLLM, "details", "beside --json"),
    "plot_timeline": OtherOption(VLLM, "plot", _REPORT),
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
    "chunked_prefill_size": OtherOption(SGLANG, "max_num_batched_tokens", _BATCH),
    "disable_cuda_graph": OtherOption(SGLANG, "cuda_graphs", "set it to off"),
    "disable_radix_cache": OtherOption(SGLANG, "prefix_cache", "set it to off"),
    "enable_hierarchical_cache": OtherOption(SGLANG, "host_kv_memory", _HOST_TIER),
    "hicache_size": OtherOption(SGLANG, "host_kv_memory", _HOST_TIER),
    "ep_size": OtherOption(SGLANG, "enable_expert_parallel", "ranks then hold whole experts", short=("--ep",)),
    "max_prefill_tokens": OtherOption(SGLANG, "max_num_batched_tokens", _BATCH),
    "max_total_tokens": OtherOption(SGLANG, "num_kv_blocks", "in blocks of block_size tokens"),
    "mem_fraction_static": OtherOption(
        SGLANG, "gpu_memory_utilization", "the share of a GPU's memory for everything; on a CPU see kv_cache_memory"
    ),
    "speculative_algorithm": OtherOption(SGLANG, "speculative_config", _DRAFTS),
    "speculative_draft_model_path": OtherOption(SGLANG, "speculative_config", _DRAFTS),
    "speculative_num_draft_tokens": OtherOption(SGLANG, "speculative_config", _DRAFTS),
    "repeat_penalty": OtherOption(LLAMA_CPP, "repetition_penalty", "it covers the whole prompt and output"),
    # not there, or not needed
    "cont_batching": OtherOption(LLAMA_CPP, None, _ALWAYS, short=("-cb",)),
    "conversation": OtherOption(
        LLAMA_CPP, None, "use 'quire chat' for a conversation, 'quire generate' for a completion", short=("-cnv",)
    ),
    "file": OtherOption(LLAMA_CPP, None, "pipe the prompt in, as in 'quire generate MODEL < FILE'", short=("-f",)),
    "flash_attn": OtherOption(LLAMA_CPP, None, "leave it out, attention always works that way", short=("-fa",)),
    "hf_repo": OtherOption(LLAMA_CPP, None, "give org/name as the model", short=("-hf", "-hfr")),
    "is_embedding": OtherOption(SGLANG, None, _DETECTED),
    "jinja": OtherOption(LLAMA_CPP, None, _ALWAYS),
    "keepalive": OtherOption(OLLAMA, None, "leave it out, the model stays loaded until the command ends"),
    "lora": OtherOption(LLAMA_CPP, None, "adapters are not supported; merge them into the checkpoint"),
    "mlock": OtherOption(LLAMA_CPP, None, "leave it out, weights are in the memory of the process"),
    "random_seed": OtherOption(SGLANG, None, "set seed in each request"),
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
    """The flags of an option of `OTHER_OPTIONS`."""
    return "--" + name.replace("_", "-"), *OTHER_OPTIONS[name].short


def explained(name: str, spelt: str, ours: str | None) -> str:
    """What to use instead of an option of `OTHER_OPTIONS`.

    Args:
        spelt: the option as it was given. ours: Quire's option in the same form; None if there is none.
    """
    option = OTHER_OPTIONS[name]
    why = option.why or "it means the same"
    return f"{option.engine}'s {spelt} is {ours} here: {why}" if ours else f"{option.engine}'s {spelt}: {why}"
