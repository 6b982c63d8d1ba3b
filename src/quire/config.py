"""EngineConfig: every engine option, in one frozen and validated dataclass.

Command-line flags, YAML keys and keyword arguments are all derived from its fields, so each option is defined once.
Names are vLLM's where vLLM has the same option; otherwise vLLM's names are accepted, too (`vllm_options.py`).
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import inspect
import math
import re
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from quire.devices import find_device
from quire.errors import ConfigError
from quire.other_options import OTHER_OPTIONS, explained
from quire.speculative_config import SpeculativeConfig
from quire.vllm_options import translated

PRESETS: dict[str, dict[str, Any]] = {
    "chat": {"max_num_seqs": 16, "max_num_batched_tokens": 512, "target_itl_ms": 100.0},
    "batch": {"max_num_seqs": 128, "max_num_batched_tokens": 4096},
    "long-context": {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 2048,
        "long_prefill_token_threshold": 1024,
        "max_num_partial_prefills": 2,
        "block_size": 64,
    },
}
"""`--preset`: low latency, throughput, or long prompts. Explicit options override a preset's."""

DEVICE_DEFAULTS: dict[str, dict[str, Any]] = {
    "cpu": {"async_scheduling": False},
    "cuda": {"max_num_seqs": 256, "max_num_batched_tokens": 8192},
}
"""A device's defaults, where they differ from those of `EngineConfig`."""

SIZES = ("kv_cache_memory", "host_kv_memory", "disk_kv_memory")
"""Options that are sizes in bytes."""

_SIZE_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "kib": 2**10, "m": 10**6, "mb": 10**6, "mib": 2**20}
_SIZE_UNITS |= {"g": 10**9, "gb": 10**9, "gib": 2**30, "t": 10**12, "tb": 10**12, "tib": 2**40}


def option(default: Any, help: str, *, low: float | None = None, high: float | None = None, short: str = "") -> Any:
    """A field of `EngineConfig`: its default, the help text and short form of its flag, and the range it is checked
    against.
    """
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high, "short": short})


def _template_text(given: str) -> str:
    """The text of a chat template: a file's, or this one line, where backslashes escape as in Python.

    Raises:
        ConfigError: it is neither.
    """
    if "{" in given:
        return given if "\n" in given else given.encode("ascii", "backslashreplace").decode("unicode_escape")
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
        message = f"chat_template={given[:200]} cannot be read ({why}); give a file, or a template in one line"
        raise ConfigError(message) from None
    if "{" not in text:
        raise ConfigError(f"chat_template={given[:200]} is a file without a chat template, which has braces: {{{{ }}}}")
    return text


def parse_size(text: str) -> int:
    """Bytes of a size such as "4GiB", "512MB" or "1000000".

    Raises:
        ConfigError: the text is not a number with one of the known units.
    """
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in _SIZE_UNITS:
        raise ConfigError(f"{text!r} is not a size; give a number of bytes, or a number with a unit such as '4GiB'")
    return int(float(match[1]) * _SIZE_UNITS[match[2].lower()])


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine, immutable. `EngineConfig.from_options` also accepts vLLM's names.

    Raises:
        ConfigError: an option has the wrong type, is out of range, or contradicts another one.
    """

    model: str = dataclasses.field(
        metadata={
            "help": "folder of a Hugging Face checkpoint, GGUF file, org/name (or org/name:TYPE) on the Hub, or 'demo'"
        }
    )
    revision: str | None = option(None, "branch, tag or commit of a downloaded model")
    tokenizer: str | None = option(
        None, "folder, tokenizer.json, GGUF file, or org/name on the Hub, whose tokenizer replaces the model's own"
    )
    tokenizer_revision: str | None = option(None, "branch, tag or commit of a downloaded tokenizer")
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = option(
        "auto", "data type of weights and KV cache; auto: the checkpoint's, or float32 where that is fp16 on a CPU"
    )
    quantization: Literal["int8", "int4"] | None = option(
        None, "quantize weights while loading (int4: where it costs most, to 6 or 8 bits); default: as stored"
    )
    device: Literal["auto", "cpu", "cuda"] = option("auto", "where the model runs; auto: on a GPU if there is one")
    cpu_kernels: Literal[
        "auto",
        "torch",
        "sse2",
        "avx2",
        "avx_vnni",
        "avx512",
        "avx512_vnni",
        "avx512_bf16",
        "amx",
        "neon",
        "neon_dot",
        "neon_bf16",
    ] = option(
        "auto", "instruction set of the compiled kernels, or torch for none of them; auto: the fastest on this machine"
    )
    threads: int | None = option(
        None, "threads per rank; default: one per core, divided among the ranks", low=1, high=1024
    )
    tensor_parallel_size: int = option(
        1,
        "ranks (processes) that share each layer; tokens do not depend on it",
        low=1,
        high=256,
        short="-tp",
    )
    pipeline_parallel_size: int = option(
        1,
        "pipeline stages (ranks), each with some of the layers; as many steps are in flight at once",
        low=1,
        high=256,
        short="-pp",
    )
    data_parallel_size: int = option(
        1,
        "engines of a server, each with the whole model; with expert parallelism: data-parallel attention in one "
        "engine, whose replicas have their own requests and KV and share the experts",
        low=1,
        high=256,
        short="-dp",
    )
    enable_expert_parallel: bool = option(
        False, "each rank holds some of a layer's experts, instead of a part of every expert", short="-ep"
    )
    num_redundant_experts: int = option(
        0,
        "with expert parallelism: how many of each layer's experts, the busiest, are on more than one rank",
        low=0,
        high=65536,
    )
    eplb_interval: int = option(
        3000, "with expert parallelism: steps between rebalancing experts across ranks; 0: never", low=0
    )
    distributed_executor_backend: Literal["mp", "ray", "external_launcher"] = option(
        "mp", "what starts the ranks: Quire (on other machines, 'quire rank'), Ray, or torchrun (one process per rank)"
    )
    nnodes: int = option(
        1, "number of machines for the ranks; the others join with 'quire rank --join'", low=1, high=256
    )
    master_addr: str = option("127.0.0.1", "address of the first machine (this one), where the others join")
    master_port: int = option(29501, "port at that address", low=1, high=65535)
    token_file: str | None = option(
        None, "with several machines: a file with a secret of at least 16 bytes, the same on all of them"
    )
    join_timeout_s: float = option(600.0, "seconds to wait for the other machines to join", low=0.1, high=86400.0)
    collective_timeout_s: float = option(
        30.0,
        "seconds after which a rank that does not answer counts as lost, which ends the engine",
        low=0.1,
        high=86400.0,
    )
    max_model_len: int | None = option(
        None, "longest context in tokens; default: the model's, or what fits in the KV cache", low=1, high=2**40
    )
    block_size: Literal[16, 32, 64, 128, 256] = option(16, "tokens per KV block")
    kv_cache_dtype: Literal["auto", "int8", "fp8"] = option(
        "auto", "data type of the KV cache: the model's, or 8 bits with a scale per token and head (fp8: e4m3)"
    )
    num_kv_blocks: int | None = option(
        None, "number of KV blocks, overriding the memory plan; with several KV groups, of the first", low=2, high=2**40
    )
    kv_cache_memory: str | None = option(
        None, "memory for the KV cache on each rank, e.g. 4GiB; default: a share of the free memory"
    )
    host_kv_memory: str | None = option(
        None, "host memory for KV blocks evicted from the KV cache, for all ranks together, e.g. 16GiB; default: none"
    )
    disk_kv_path: str | None = option(
        None, "folder for KV blocks that should survive a restart; needs host_kv_memory; default: none"
    )
    disk_kv_memory: str | None = option(None, "size limit of that folder, e.g. 100GiB; default: 16GiB")
    kv_role: Literal["prefill", "decode", "both"] | None = option(
        None,
        "prefill: compute prompts for other engines; decode: let another engine compute long prompts; both",
        short="--role",
    )
    prefill_url: str | None = option(
        None,
        "servers that compute prompts, comma-separated; dns+http://NAME:PORT for all addresses of a name, or "
        "HOST:KV_PORT of their engines; default: http://127.0.0.1:8000",
    )
    prefill_min_tokens: int = option(
        256,
        "smallest number of uncached prompt tokens for which another engine computes the prompt",
        low=1,
        high=2**40,
    )
    kv_directory: str | None = option(
        None,
        "where engines that share KV publish which blocks they have, e.g. redis://HOST:6379/0; needs kv_role",
    )
    kv_connector: str | None = option(
        None,
        "what keeps KV elsewhere, by the name of an installed connector (entry point of quire.kv_connectors), or "
        "MODULE:CLASS; instead of host_kv_memory and kv_role",
    )
    kv_connector_extra_config: Mapping[str, Any] | None = option(None, "the connector's own options, as JSON")
    kv_events_config: Mapping[str, Any] | None = option(
        None,
        "events of cached blocks over ZeroMQ, as vLLM has them, for routers that follow engines by these, e.g. "
        '\'{"enable_kv_cache_events": true, "endpoint": "tcp://*:5557"}\'; they have the text of prompts as token ids',
    )
    kv_transport: Literal["shared_memory", "socket", "mooncake", "nixl"] | None = option(
        None, "how KV is transferred from another engine; default: shared_memory on one machine, otherwise socket"
    )
    kv_host: str = option("127.0.0.1", "address where other engines fetch KV from this one (kv_role)")
    kv_port: int = option(
        0, "port at that address; 0: any free port, which is reported to the others", low=0, high=65535
    )
    cluster_key_file: str | None = option(
        None,
        "file with a secret of at least 16 bytes, the same for all engines that share KV; default: one per user",
    )
    gpu_memory_utilization: float = option(0.9, "share of a GPU's memory that Quire may use", low=0.01, high=1.0)
    prefix_cache: Literal["radix", "hash", "off"] = option(
        "radix", "prefix caching: token by token (radix), in whole blocks (hash), or off"
    )
    max_num_seqs: int = option(64, "most requests running at once; default on a GPU: 256", low=1, high=65536)
    max_num_batched_tokens: int = option(
        2048, "most tokens computed in a step; default on a GPU: 8192", low=1, high=2**20
    )
    min_chunk: int = option(16, "smallest number of tokens per step for the oldest partial prefill", low=1)
    enable_chunked_prefill: bool = option(True, "allow computing a prompt over several steps")
    max_num_partial_prefills: int = option(1, "most partially computed prompts at a time", low=1)
    long_prefill_token_threshold: int = option(0, "most tokens of one prompt per step; 0: no limit", low=0)
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs", "order of requests: by arrival (fcfs), or by priority (lower first), then arrival"
    )
    target_itl_ms: float | None = option(
        None,
        "inter-token latency in milliseconds that 99 of 100 steps should meet, reached by shrinking prefill chunks",
        low=1.0,
        high=600_000.0,
    )
    async_scheduling: bool = option(
        True, "schedule the next step while the current one runs; default on a CPU: off, since all cores compute"
    )
    cuda_graphs: Literal["lazy", "eager", "off"] = option(
        "lazy",
        "capture CUDA graphs: decodes at start and other steps when first needed (lazy), all at start (eager), or none",
    )
    enforce_eager: bool = option(False, "the same as cuda_graphs=off")
    deterministic: bool = option(True, "a request's tokens do not depend on other requests")
    generation_config: Literal["auto", "off"] = option(
        "auto", "sampling defaults: the checkpoint's generation_config.json (auto), or neutral values (off)"
    )
    tool_format: Literal[
        "auto",
        "off",
        "hermes",
        "qwen3_coder",
        "llama3_json",
        "mistral",
        "deepseek_v3",
        "deepseek_v31",
        "glm45",
        "deepseek_v32",
        "glm47",
        "minimax_m2",
        "kimi_k2",
        "lfm2",
        "granite",
        "gemma4",
        "harmony",
    ] = option("auto", "format of tool calls: detected from the chat template (auto), none (off), or a known format")
    chat_template: str | None = option(
        None, "a file with a chat template, or a template in one line, in place of the checkpoint's"
    )
    speculative_config: Mapping[str, Any] | None = option(
        None,
        "speculative decoding; JSON with method (ngram, draft_model, eagle, eagle3, mtp), model, ...",
    )
    speculative_acceptance: Literal["exact", "rejection"] = option(
        "exact",
        "accept drafts that equal the sampled tokens, or by rejection sampling, which keeps only the distribution",
    )
    profile: str | None = option(None, "folder for a timeline of the steps, for Perfetto")
    check_invariants: bool = option(False, "check the scheduler's bookkeeping after every step (slow; for debugging)")

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            check_field(field, hints[field.name], getattr(self, field.name))
        if not self.model:
            raise ConfigError("model is empty; give a folder, org/name, or 'demo'")
        for name in SIZES:
            if (size := getattr(self, name)) is not None:
                try:
                    parse_size(size)
                except ConfigError as error:
                    raise ConfigError(f"{name}: {error}") from None
        if self.enforce_eager and self.cuda_graphs == "eager":
            raise ConfigError(
                "enforce_eager=True turns CUDA graphs off, but cuda_graphs=eager captures all of them at start; leave "
                "one out"
            )
        if self.num_redundant_experts and not self.enable_expert_parallel:
            raise ConfigError(
                f"num_redundant_experts={self.num_redundant_experts} needs expert parallelism; set "
                "enable_expert_parallel, or leave it out"
            )
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", _template_text(self.chat_template))
        self._check_tokenizer()
        self._check_replicas()
        self._check_machines()
        self._check_pipeline()
        self._check_tiers()
        self._check_speculation()
        self._check_budgets()

    def _check_tokenizer(self) -> None:
        if self.tokenizer == "":
            raise ConfigError("tokenizer is empty; give a folder, a tokenizer.json or org/name, or leave it out")
        if self.tokenizer is None and self.tokenizer_revision not in (None, self.revision):
            raise ConfigError(
                f"tokenizer_revision={self.tokenizer_revision} needs tokenizer, a name on the Hub: without it, the "
                "tokenizer is the model's own, at its revision"
            )
        if self.nnodes > 1 and self.tokenizer not in (None, self.model):
            raise ConfigError(
                f"tokenizer={self.tokenizer} with nnodes={self.nnodes} is not supported yet; put its files into the "
                "model's folder on each machine instead"
            )

    def at(self, model: Path, tokenizer: Path) -> EngineConfig:
        """The same options, with the folders that the names stand for."""
        own = None if tokenizer == model else str(tokenizer)
        return dataclasses.replace(self, model=str(model), revision=None, tokenizer=own, tokenizer_revision=None)

    def _check_replicas(self) -> None:
        beside = {
            f"nnodes={self.nnodes}": self.nnodes > 1,
            f"distributed_executor_backend={self.distributed_executor_backend}": self.distributed_executor_backend
            != "mp",
            f"kv_role={self.kv_role}": self.prefills,  # others ask a server for one port
        }
        if self.replicas > 1 and (found := [name for name, there in beside.items() if there]):
            raise ConfigError(
                f"data_parallel_size={self.replicas} with {found[0]} is not supported yet; leave one of them out, or "
                f"start {self.replicas} servers instead of replicas"
            )

    def _check_machines(self) -> None:
        if self.nnodes > self.num_ranks:
            raise ConfigError(
                f"nnodes={self.nnodes} is more than the number of ranks, {self.num_ranks}, and each machine needs at "
                "least one; lower it, or raise tensor_parallel_size or pipeline_parallel_size"
            )
        launched = self.distributed_executor_backend == "external_launcher" and self.num_ranks > 1
        several = "distributed_executor_backend=external_launcher" if launched else f"nnodes={self.nnodes}"
        ray = self.distributed_executor_backend == "ray"
        if ray and self.nnodes == 1:
            raise ConfigError(
                "distributed_executor_backend=ray starts ranks on other machines, but nnodes=1; set nnodes to the "
                "number of machines, or leave Ray out: on one machine, ranks are started without it"
            )
        if (self.nnodes > 1 or launched) and not (self.token_file or ray):
            raise ConfigError(
                f"{several} needs token_file, a file with a secret that is the same on all machines; create one with "
                "'openssl rand -hex 32'"
            )
        if self.nnodes == 1 and not launched and self.token_file:
            raise ConfigError("token_file is for several machines; set nnodes, or leave it out")

    def _check_pipeline(self) -> None:
        stages = self.pipeline_parallel_size
        if stages > 1 and self.data_parallel_size > self.replicas:
            raise ConfigError(
                f"pipeline_parallel_size={stages} with enable_expert_parallel and data_parallel_size="
                f"{self.data_parallel_size} is not supported yet; leave one of them out"
            )

    def _check_tiers(self) -> None:
        if self.disk_kv_memory is not None and self.disk_kv_path is None:
            raise ConfigError(
                f"disk_kv_memory={self.disk_kv_memory} limits a folder, but there is none; set disk_kv_path too"
            )
        self._check_role()
        self._check_connector()
        if not self.host_kv_bytes:
            if self.disk_kv_path is not None:
                raise ConfigError(
                    f"disk_kv_path={self.disk_kv_path} needs host_kv_memory, since blocks go to disk and back through "
                    "host memory; set it too, such as host_kv_memory=1GiB"
                )
            return
        beside = {
            f"nnodes={self.nnodes}": self.nnodes > 1,
            "distributed_executor_backend=external_launcher": self.distributed_executor_backend == "external_launcher",
        }
        if found := [name for name, there in beside.items() if there]:
            raise ConfigError(
                f"{self._tier_option} with {found[0]} is not supported yet, since the host tier is memory of one "
                "machine; leave one of them out"
            )
        if self.prefix_cache == "off":
            raise ConfigError(
                f"{self._tier_option} needs the prefix cache, through which blocks are loaded, but prefix_cache=off; "
                "leave one of them out"
            )

    def _check_connector(self) -> None:
        if self.kv_connector is None:
            if self.kv_connector_extra_config is not None:
                raise ConfigError("kv_connector_extra_config is for a connector, but there is none; set kv_connector")
            return
        beside = {
            self._tier_option: bool(self.host_kv_bytes),
            f"{self.num_ranks} ranks": self.num_ranks > 1,
            "prefix_cache=off": self.prefix_cache == "off",
        }
        if found := [name for name, there in beside.items() if there]:
            raise ConfigError(
                f"kv_connector={self.kv_connector} with {found[0]} is not supported: a connector is for one rank, with "
                "a prefix cache and no other tier; leave one of them out"
            )

    def _check_role(self) -> None:
        if self.prefill_url is not None and not self.decodes:
            raise ConfigError(
                f"prefill_url={self.prefill_url} is for an engine whose prompts are computed elsewhere; set "
                "kv_role=decode (--role decode), or leave it out"
            )
        if self.decodes and not self.prefill_urls and (self.prefill_url is not None or self.kv_directory is None):
            raise ConfigError(
                f"prefill_url={self.prefill_url!r} names no server; give its URL, such as http://10.0.0.1:8000"
            )
        if self.kv_role == "both" and self.prefill_url is None and self.kv_directory is None:
            raise ConfigError(
                "kv_role=both needs kv_directory, where engines find each other's blocks, or prefill_url, the servers "
                "that compute prompts for this one; set one of them"
            )
        if self.kv_directory is not None and self.kv_role is None:
            raise ConfigError(
                "kv_directory needs kv_role, since it is for engines that share KV; set kv_role=both, or prefill if "
                "this engine only provides blocks, or decode if it only fetches them"
            )
        if self.cluster_key_file and not (self.kv_role or self.disk_kv_path or self.kv_connector):
            raise ConfigError(
                "cluster_key_file is for engines that share KV; set kv_role, disk_kv_path or kv_connector"
            )

    def _check_speculation(self) -> None:
        spec = self.speculation
        if spec is None and self.speculative_acceptance != "exact":
            raise ConfigError(
                f"speculative_acceptance={self.speculative_acceptance} needs speculative decoding; set "
                "speculative_config, or leave it out"
            )
        if spec is not None and spec.model is not None:  # found for the demo: a path in its place must not lose it
            object.__setattr__(self, "speculative_config", {**(self.speculative_config or {}), "model": spec.model})
        if spec is not None and spec.tree_width > 1 and self.speculative_acceptance == "rejection":
            raise ConfigError(
                "speculative_acceptance=rejection cannot verify trees of drafts; leave tree_width out, or use "
                "speculative_acceptance=exact"
            )

    def _check_budgets(self) -> None:
        """Refuse budgets under which decodes could starve a prompt, or a prompt could never be admitted."""
        if self.max_num_batched_tokens < self.max_num_seqs + self.min_chunk:
            raise ConfigError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs} "
                f"+ min_chunk={self.min_chunk}: decoding requests could starve a prompt; raise "
                f"max_num_batched_tokens to {self.max_num_seqs + self.min_chunk} or lower max_num_seqs"
            )
        if 0 < self.long_prefill_token_threshold < self.min_chunk:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is below "
                f"min_chunk={self.min_chunk}; raise it, or set it to 0 for no limit"
            )
        if not self.enable_chunked_prefill and self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} needs chunked prefill; "
                "leave enable_chunked_prefill on, or set the threshold to 0"
            )
        if not self.enable_chunked_prefill and self.target_itl_ms is not None:
            raise ConfigError(
                f"target_itl_ms={self.target_itl_ms} needs chunked prefill, since it shrinks prompt chunks; leave "
                "enable_chunked_prefill on, or leave the target out"
            )

    @functools.cached_property
    def speculation(self) -> SpeculativeConfig | None:
        """`speculative_config`, parsed; None without speculation."""
        given = self.speculative_config
        return None if given is None else SpeculativeConfig.read(given, self.model)

    @property
    def replicas(self) -> int:
        """Number of engines of a server with this configuration."""
        return 1 if self.enable_expert_parallel else self.data_parallel_size

    @property
    def num_ranks(self) -> int:
        """Processes that share the model, in one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size // self.replicas

    @property
    def redundant_experts(self) -> int | None:
        """See `models.sharing.Sharing`."""
        shared = self.tensor_parallel_size * self.data_parallel_size > 1
        return self.num_redundant_experts if self.enable_expert_parallel and shared else None

    @property
    def kv_cache_bytes(self) -> int | None:
        """`kv_cache_memory` in bytes, or None if the memory plan decides."""
        return None if self.kv_cache_memory is None else parse_size(self.kv_cache_memory)

    @property
    def host_kv_bytes(self) -> int:
        """`host_kv_memory` in bytes; 1 GiB by default for an engine with a role."""
        return parse_size(self.host_kv_memory or ("1GiB" if self.kv_role else "0"))

    @property
    def _tier_option(self) -> str:
        return "host_kv_memory" if self.host_kv_memory is not None else f"kv_role={self.kv_role}"

    @property
    def prefills(self) -> bool:
        """Whether other engines may have prompts computed here."""
        return self.kv_role in ("prefill", "both")

    @property
    def decodes(self) -> bool:
        """Whether prompts may be computed by other engines."""
        return self.kv_role in ("decode", "both")

    @property
    def prefill_urls(self) -> list[str]:
        """The URLs in `prefill_url`; empty for an engine with a directory and none given."""
        default = "http://127.0.0.1:8000" if self.kv_directory is None else ""
        return [each.strip() for each in (self.prefill_url or default).split(",") if each.strip()]

    @property
    def disk_kv_bytes(self) -> int:
        """`disk_kv_memory` in bytes."""
        return parse_size(self.disk_kv_memory or "16GiB")

    @classmethod
    def from_options(cls, options: Mapping[str, Any], preset: str | None = None) -> EngineConfig:
        """A configuration from options by name, as in keyword arguments or a YAML file.

        Device "auto" is resolved, and options that are not set get that device's defaults.

        Args:
            options: by Quire's or vLLM's names and values; None is the same as not given.
            preset: "chat", "batch" or "long-context"; `options` override it.

        Raises:
            ConfigError: an option or the preset is unknown (the message suggests the nearest one) or invalid.
        """
        if preset is not None and (not isinstance(preset, str) or preset not in PRESETS):
            raise ConfigError(f"unknown preset {preset!r}; known: {', '.join(PRESETS)}")
        hints = get_type_hints(cls)
        names = [field.name for field in dataclasses.fields(cls)]
        given = translated(options, names)
        for name in given:
            if name not in names:
                raise ConfigError(unknown_option(name, names))
        given = {
            name: value for name, value in given.items() if value is not None or type(None) in get_args(hints[name])
        }
        if "model" not in given:
            raise ConfigError("no model was given; give a folder, org/name, or 'demo'")
        for name in SIZES:
            if type(given.get(name)) is int:  # YAML reads a plain number of bytes as one
                given[name] = str(given[name])
        if given.get("device", "auto") == "auto":
            given["device"], _ = find_device()
        defaults = DEVICE_DEFAULTS.get(str(given["device"]), {})
        return cls(**defaults | (PRESETS[preset] if preset else {}) | given)


def unknown_option(name: str, known: list[str]) -> str:
    """The message for an unknown option, with the nearest name, or the equivalent of another engine's option."""
    if (other := OTHER_OPTIONS.get(name)) and (other.ours is None or other.ours in known):
        return f"unknown option {name!r}; {explained(name, name, other.ours)}"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"unknown option {name!r}; {hint}"


def check_field(field: dataclasses.Field[Any], hint: Any, value: Any) -> None:
    """Type and range of one option."""
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return
        [hint] = [arg for arg in get_args(hint) if arg is not type(None)]
    if get_origin(hint) is Literal:
        if not any(value == choice and type(value) is type(choice) for choice in get_args(hint)):
            allowed = ", ".join(str(choice) for choice in get_args(hint))
            raise ConfigError(f"{field.name}={value!r} is not supported; allowed: {allowed}")
        return
    if get_origin(hint) is Mapping:
        if not isinstance(value, Mapping):
            raise ConfigError(
                f"{field.name}={value!r} is of type {type(value).__name__}; it must be a mapping (a JSON object)"
            )
        return
    accepted = (int, float) if hint is float else hint
    if not isinstance(value, accepted) or (isinstance(value, bool) and hint is not bool):
        raise ConfigError(f"{field.name}={value!r} is of type {type(value).__name__}; it must be {hint.__name__}")
    if hint in (int, float):
        low, high = field.metadata.get("low"), field.metadata.get("high")
        if (
            (hint is float and not math.isfinite(value))
            or (low is not None and value < low)
            or (high is not None and value > high)
        ):
            bounds = f"from {low if low is not None else '-inf'} to {high if high is not None else 'any size'}"
            shown = repr(value) if abs(value) < 1e30 else "a huge number"
            raise ConfigError(f"{field.name}={shown} is out of range; allowed: {bounds}")


def with_options(*own: str) -> inspect.Signature:
    """A constructor's signature with `options` replaced by the fields of `EngineConfig`, for help() and notebooks."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    hints = get_type_hints(EngineConfig)
    return inspect.Signature(
        [
            inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=str),
            *(inspect.Parameter(name, keyword, default=None) for name in own),
            *(inspect.Parameter(f.name, keyword, default=f.default, annotation=hints[f.name]) for f in _options()),
        ]
    )


def with_options_text(docstring: str | None) -> str | None:
    """A constructor's docstring with the help of each option appended; None under `python -OO`."""
    if docstring is None:
        return None
    lines = [f"    {field.name}: {field.metadata['help']} (default: {field.default})" for field in _options()]
    return "\n".join([inspect.cleandoc(docstring), "", "Options:", *lines])


def _options() -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(EngineConfig) if field.name != "model"]
