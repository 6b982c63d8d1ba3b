"""Checkpoints of a known model's shape with random weights: speed does not depend on what weights say.

So anybody can measure without a download. Such a folder has no tokenizer: prompts are token ids.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from quire.errors import CheckpointError, ConfigError
from quire.models.checkpoint import SINGLE_FILE, Checkpoint
from quire.models.fields import Fields
from quire.models.formats.quantizing import Quantization, Recipe
from quire.models.formats.quire import read_record
from quire.models.quantize import write_quantized
from quire.models.registry import read_config
from quire.models.safetensors_file import FLOAT_DTYPES, write_file
from quire.models.safetensors_header import TensorEntry

_COMMON = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "attention_bias": False, "dtype": "bfloat16"}

_QWEN3 = _COMMON | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
}

_QWEN3_MOE = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

_DEEPSEEK_V2 = _COMMON | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
}


def _mrope(sections: list[int]) -> dict[str, Any]:
    """Rotary embedding of Qwen3.5, whose sections are all the same for text."""
    how = {"rope_type": "default", "rope_theta": 10000000.0, "partial_rotary_factor": 0.25}
    return how | {"mrope_section": sections, "mrope_interleaved": True}


_GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "dtype": "bfloat16",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "tie_word_embeddings": True,
}

_QWEN3_5 = _COMMON | {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "tie_word_embeddings": True,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-8b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-14b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-tiny": _QWEN3
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
    },
    "qwen3-moe-1b": _QWEN3_MOE
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 8,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-30b-a3b": _QWEN3_MOE
    | {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
    "qwen3-moe-tiny": _QWEN3_MOE
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
    },
    "deepseek-v2-lite-1b": _DEEPSEEK_V2
    | {
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_routed_experts": 16,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
    },
    "deepseek-v2-tiny": _DEEPSEEK_V2
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 2,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "max_position_embeddings": 163840,
    },
    "gemma3-1b": _GEMMA3
    | {
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_hidden_layers": 26,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 512,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 32768,
    },
    "gemma3-tiny": _GEMMA3
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 6,
        "max_position_embeddings": 8192,
    },
    "qwen3.5-0.8b": _QWEN3_5
    | {
        "vocab_size": 248320,
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": _mrope([11, 11, 10]),
        "max_position_embeddings": 262144,
    },
    "qwen3.5-tiny": _QWEN3_5
    | {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "rope_parameters": _mrope([2, 1, 1]),
        "max_position_embeddings": 8192,
    },
}
"""The config.json of the models that the names say, and of tiny ones for trying things out.

`qwen3-moe-1b` has 8 of the 48 layers of Qwen3-30B-A3B, with 16 of its 128 experts and its 8 experts a token, and a tied
head; `deepseek-v2-lite-1b` has the first 4 of the 27 layers of DeepSeek-V2-Lite, with 16 of its 64 experts.
"""

SPREAD = 0.02
"""Standard deviation of the weights, as such models are initialised."""

TEMPORARY = "quire-random-"
"""How the names of temporary folders begin."""

ABANDONED = 60.0
"""Seconds after which whoever made a folder has locked it."""

Progress = Callable[[float], None]
"""Told the share done, from 0 to 1."""


def model_config(shape: str) -> dict[str, Any]:
    """The config.json of a shape.

    Raises:
        ConfigError: there is no such shape.
    """
    if shape not in SHAPES:
        raise ConfigError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")
    return dict(SHAPES[shape])


def weight_bytes(config: Mapping[str, Any], how: Quantization | None = None) -> int:
    """Bytes of such a model's weights in bf16, or quantized."""
    fields = read_config(Fields(config, "config.json"), Fields({}, "none"))
    shapes = fields.tensor_shapes()
    if how is None:
        return sum(2 * math.prod(shape) for shape in shapes.values())
    recipe = Recipe(how, fields.num_layers)
    return sum(recipe.num_bytes(name, shape) for name, shape in shapes.items())


@contextmanager
def random_checkpoint(
    shape: str, workdir: str | None, progress: Progress | None = None, how: Quantization | None = None
) -> Iterator[Path]:
    """The folder of a checkpoint of that shape, in bf16 or quantized: `workdir`/shape (and how), which is kept and used
    again; else a temporary one.

    Raises:
        ConfigError: there is no such shape, or the folder holds something else or cannot be written.
    """
    config = model_config(shape)
    name = shape if how is None else f"{shape}-{how}"
    if workdir is None:
        _remove_abandoned(Path(tempfile.gettempdir()), f"{TEMPORARY}*")
        with tempfile.TemporaryDirectory(prefix=TEMPORARY) as temporary, _in_use(Path(temporary)):
            yield write_checkpoint(Path(temporary) / name, config, progress, how)
        return
    folder = Path(workdir) / name
    if not folder.exists():
        write_checkpoint(folder, config, progress, how)
    elif not _holds(folder, config, how):
        raise ConfigError(f"{folder} exists and is no checkpoint of the shape {name}; remove it, or choose --workdir")
    yield folder


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], progress: Progress | None = None, how: Quantization | None = None
) -> Path:
    """Write a checkpoint with random weights, in bf16 or quantized, to a folder that does not exist yet; returns it.

    It appears under its name only when it is complete. If another process has made it meanwhile, that one is kept.
    Tensors are drawn, quantized where that is asked for, and written one after the other.

    Raises:
        ConfigError: the folder cannot be written, or there is too little room for it.
    """
    partial = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.unfinished")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(folder.parent, f"{folder.name}.*.unfinished")
        partial.mkdir()
        with _in_use(partial):
            _write(partial, config, progress or (lambda share: None), how)
        partial.rename(folder)
    except OSError as error:
        if not _holds(folder, config, how):
            raise ConfigError(f"{folder} cannot be written: {error.strerror or error}; choose --workdir") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _write(folder: Path, config: Mapping[str, Any], report: Progress, how: Quantization | None) -> None:
    _check_room(folder, weight_bytes(config, how), how)
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    checkpoint = RandomCheckpoint(folder, as_published=how is None)
    if how is None:
        described = {name: _described(entry) for name, entry in checkpoint.entries.items()}
        write_file(folder / SINGLE_FILE, described, lambda done, total: report(done / total), checkpoint.tensor)
    else:
        write_quantized(checkpoint, folder, how, "random weights", lambda phase, share: report(share))


@contextmanager
def _in_use(folder: Path) -> Iterator[None]:
    """Locks a folder while this lasts, and at most as long as the process does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _remove_abandoned(parent: Path, pattern: str) -> None:
    """Removes what processes left that were killed: own folders, older than `ABANDONED`, that none has locked."""
    for folder in parent.glob(pattern):
        with suppress(OSError):  # somebody else's, or gone, or in use
            stat = folder.stat()
            if stat.st_uid != os.getuid() or time.time() - stat.st_mtime < ABANDONED:
                continue
            handle = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(handle)


def _check_room(folder: Path, needed: int, how: Quantization | None) -> None:
    free = shutil.disk_usage(folder).free
    if needed > free:
        choices = ["another --workdir", "a smaller shape"]
        if how != "int4":
            choices.append("quantization=int4")
        raise ConfigError(
            f"the weights take {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free where {folder.parent} is; "
            f"choose {', '.join(choices[:-1])} or {choices[-1]}"
        )


def _described(entry: TensorEntry) -> torch.Tensor:
    return torch.empty(entry.shape, dtype=FLOAT_DTYPES[entry.dtype], device="meta")


class RandomCheckpoint(Checkpoint):
    """A folder with a config.json alone, whose weights are drawn on a device when they are asked for.

    So a model is there in a second that would be written and read for a minute. A tensor is the same whenever it is
    asked for.

    Args:
        folder: holds config.json, of any architecture that Quire has.
        device: where the weights are made.
        spread: their standard deviation.
        as_published: tensors are those of published checkpoints, which may hold several of the model's.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device | str = "cpu",
        spread: float = SPREAD,
        as_published: bool = False,
    ) -> None:
        self.folder = folder
        self.config, self.generation = Fields.read(folder / "config.json"), Fields({}, "none")
        self.entries = {
            name: TensorEntry(name, "BF16", shape, folder, 0, 2 * math.prod(shape))
            for name, shape in tensor_shapes(self.config, as_published).items()
        }
        self._seeds = {name: seed for seed, name in enumerate(self.entries)}
        self._device, self._spread = device, spread

    def tensor(self, name: str, dtypes: Mapping[str, torch.dtype] = FLOAT_DTYPES) -> torch.Tensor:
        """A new tensor; `dtypes` plays no part."""
        generator = torch.Generator(self._device).manual_seed(self._seeds[name])
        return _drawn(self.entries[name].shape, generator, self._spread)


def _drawn(shape: tuple[int, ...], generator: torch.Generator, spread: float) -> torch.Tensor:
    """Norms are ones."""
    tensor = torch.empty(shape, dtype=torch.bfloat16, device=generator.device)
    return tensor.fill_(1.0) if len(shape) == 1 else tensor.normal_(0.0, spread, generator=generator)


def tensor_shapes(fields: Fields, as_published: bool) -> dict[str, tuple[int, ...]]:
    """Every tensor of a checkpoint by name; see `RandomCheckpoint`."""
    config = read_config(fields, Fields({}, "none"))
    shapes = config.tensor_shapes()
    layout = config.layout if as_published else None
    if layout is None:
        return shapes
    by_heads = [(end, parts) for end, _, parts in layout.by_heads]
    for end, parts in (*by_heads, *layout.joined):
        first = f"{parts[0][0]}.weight"
        for prefix in [name.removesuffix(first) for name in shapes if name.endswith(first)]:
            held = [shapes.pop(f"{prefix}{part}.weight") for part, _ in parts]
            shapes[f"{prefix}{end}.weight"] = (sum(shape[0] for shape in held), *held[0][1:])
    return shapes


def _holds(folder: Path, config: Mapping[str, Any], how: Quantization | None) -> bool:
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        record = read_record(folder)
    except (OSError, ValueError, CheckpointError):
        return False
    same = (record and record.quantization) == how
    return bool(found == dict(config)) and same and (folder / SINGLE_FILE).is_file()
