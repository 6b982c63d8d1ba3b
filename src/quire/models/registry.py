"""The modules of all architectures, and the loading of a model from a folder."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.errors import ConfigError, ModelConfigError, UnknownArchitectureError
from quire.layers.decoder import LayerConfig
from quire.layers.experts import ExpertsConfig
from quire.models.checkpoint import Checkpoint, choose_dtype
from quire.models.config import DecoderConfig
from quire.models.fields import Fields
from quire.models.formats.choose import of_numbers
from quire.models.formats.quantizing import Quantization, QuantizingCheckpoint, Recipe, is_plain
from quire.models.formats.quire import choose_quantization, read_record
from quire.models.layout import TABLE, WITHOUT_HEAD, LaidOutCheckpoint
from quire.models.model import Model
from quire.models.sharing import Sharing
from quire.models.weights import Progress, Weights, check_tensors
from quire.ops import Kernels, choose_kernels
from quire.ops.memory import give_back
from quire.ops.threads import usable_threads
from quire.parallel.group import can_share

ARCHITECTURES = {
    "DeepseekV2ForCausalLM": "quire.models.deepseek_v2",
    "DeepseekV3ForCausalLM": "quire.models.deepseek_v3",
    "DeepseekV32ForCausalLM": "quire.models.deepseek_v32",
    "Ernie4_5ForCausalLM": "quire.models.ernie4_5",
    "Exaone4ForCausalLM": "quire.models.exaone4",
    "Gemma3ForCausalLM": "quire.models.gemma3",
    "Gemma3ForConditionalGeneration": "quire.models.gemma3",
    "Gemma3TextModel": "quire.models.gemma3",
    "Gemma4ForCausalLM": "quire.models.gemma4",
    "Gemma4ForConditionalGeneration": "quire.models.gemma4",
    "Gemma4UnifiedForCausalLM": "quire.models.gemma4",
    "Gemma4UnifiedForConditionalGeneration": "quire.models.gemma4",
    "Glm4ForCausalLM": "quire.models.glm4",
    "Glm4MoeForCausalLM": "quire.models.glm4_moe",
    "Glm4MoeLiteForCausalLM": "quire.models.glm4_moe_lite",
    "GlmMoeDsaForCausalLM": "quire.models.glm_moe_dsa",
    "GptOssForCausalLM": "quire.models.gpt_oss",
    "GraniteForCausalLM": "quire.models.granite",
    "GraniteMoeHybridForCausalLM": "quire.models.granitemoehybrid",
    "HunYuanDenseV1ForCausalLM": "quire.models.hunyuan_v1_dense",
    "HYV3ForCausalLM": "quire.models.hy_v3",
    "KimiK25ForConditionalGeneration": "quire.models.kimi_k25",
    "Kimi_K25ForConditionalGeneration": "quire.models.kimi_k25",
    "KimiLinearForCausalLM": "quire.models.kimi_linear",
    "Lfm2ForCausalLM": "quire.models.lfm2",
    "Lfm2MoeForCausalLM": "quire.models.lfm2_moe",
    "LlamaForCausalLM": "quire.models.llama",
    "MiniMaxM2ForCausalLM": "quire.models.minimax_m2",
    "Ministral3ForCausalLM": "quire.models.ministral3",
    "Mistral3ForConditionalGeneration": "quire.models.mistral3",
    "Mistral4ForCausalLM": "quire.models.mistral4",
    "MistralForCausalLM": "quire.models.mistral",
    "MixtralForCausalLM": "quire.models.mixtral",
    "NemotronHForCausalLM": "quire.models.nemotron_h",
    "Olmo2ForCausalLM": "quire.models.olmo2",
    "Olmo3ForCausalLM": "quire.models.olmo3",
    "Phi3ForCausalLM": "quire.models.phi3",
    "Qwen2ForCausalLM": "quire.models.qwen2",
    "Qwen2MoeForCausalLM": "quire.models.qwen2_moe",
    "Qwen2_5_VLForConditionalGeneration": "quire.models.qwen2_5_vl",
    "Qwen3ForCausalLM": "quire.models.qwen3",
    "Qwen3NextForCausalLM": "quire.models.qwen3_next",
    "Qwen3_5ForCausalLM": "quire.models.qwen3_5",
    "Qwen3_5ForConditionalGeneration": "quire.models.qwen3_5",
    "Qwen3_5MoeForCausalLM": "quire.models.qwen3_5_moe",
    "Qwen3_5MoeForConditionalGeneration": "quire.models.qwen3_5_moe",
    "Qwen3MoeForCausalLM": "quire.models.qwen3_moe",
    "Qwen3VLForConditionalGeneration": "quire.models.qwen3_vl",
    "SeedOssForCausalLM": "quire.models.seed_oss",
    "SmolLM3ForCausalLM": "quire.models.smollm3",
}
"""By name in config.json, the module whose `read_config` reads it, imported when needed."""
MAX_EXPERTS_OF_ALL = 1 << 17
"""Maximum of layers times experts: several times that of any model."""


def load_model(
    path: Path | str,
    dtype: str = "auto",
    progress: Progress | None = None,
    kernels: Kernels | None = None,
    quantization: Quantization | None = None,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint,
    mtp: bool = False,
    sharing: Sharing | None = None,
    one_kv_group: bool = False,
    max_model_len: int | None = None,
) -> Model:
    """Load a checkpoint's model.

    Args:
        path: its folder (see `checkpoint.resolve`).
        dtype: "auto" (the checkpoint's), "bfloat16", "float16" or "float32".
        progress: called with (bytes read, total bytes) during loading.
        kernels: by default, the best ones for this machine.
        quantization: quantizes its linear layers; None: as in the checkpoint, which may be quantized.
        open_checkpoint: opens the folder.
        mtp: also load the multi-token prediction layer.
        sharing: how ranks share it; None for a single one.
        one_kv_group: see `DecoderConfig`.
        max_model_len: the configured longest context, if any.

    Raises:
        CheckpointError: one of its kinds, for anything wrong with the folder.
        ConfigError: the quantization, or `mtp`, is not possible for this model.
    """
    checkpoint = open_checkpoint(Path(path))
    record = read_record(checkpoint.folder)
    how = choose_quantization(checkpoint.folder, record, quantization)
    if record is not None:
        record.check(checkpoint.folder)
    options = how, mtp, sharing, one_kv_group, max_model_len
    model = build_model(checkpoint, dtype, progress, kernels or choose_kernels(), *options)[0]
    give_back()
    return model


def build_model(
    checkpoint: Checkpoint,
    dtype: str,
    progress: Progress | None,
    kernels: Kernels,
    quantization: Quantization | None,
    mtp: bool = False,
    sharing: Sharing | None = None,
    one_kv_group: bool = False,
    max_model_len: int | None = None,
) -> tuple[Model, Weights]:
    """Make the model, and return it with its weights: see `load_model` and `Weights`."""
    stored, host, on_cpu = checkpoint, kernels, kernels.device.type == "cpu"
    checkpoint, config, notes = in_layout(checkpoint)
    # Quire's own folders say their type: scales are not of it.
    compute_dtype, note = choose_dtype(stored if checkpoint.quantization is None else checkpoint, dtype, on_cpu)
    notes = [note, _own_code_note(checkpoint.config), *notes]
    config = replace(config, one_kv_group=one_kv_group).within(max_model_len)
    if mtp:
        config = config.with_mtp()
    shapes, skipped = config.tensor_shapes(), config.skipped()
    if skipped and not mtp:
        notes.append(_mtp_note(checkpoint, skipped))
    check_tensors(checkpoint, shapes, config.tie_word_embeddings, skipped)
    if quantization is not None:
        recipe = Recipe(quantization, config.num_layers)
        host = choose_kernels()  # they quantize where the file is mapped, whatever device the model is on
        checkpoint = QuantizingCheckpoint(checkpoint, recipe, host)
        notes.append(_left_note(checkpoint, shapes))
    sharing, slots = sharing or Sharing(), 0
    if sharing.redundant_experts is not None and config.routing is not None:
        slots = config.routing.num_experts + sharing.redundant_experts
    weights = Weights(
        checkpoint,
        shapes,
        compute_dtype,
        kernels,
        progress,
        group=sharing.head,
        expert_slots=slots,
        expert_group=sharing.experts,
        norm_offset=config.norm_offset,
    )
    with kernels.threads(usable_threads()), host.threads(usable_threads()):
        model = Model(config, weights, sharing)
    model.architecture = _architecture(checkpoint.config)
    model.multiplies_bytes = weights.multiplies_bytes
    model.weight_bytes -= weights.bytes_saved()
    model.expert_bytes -= weights.bytes_saved(experts=True)
    if slots:
        weights.complete()
    model.notes = tuple(text for text in (*notes, _rope_note(config)) if text)
    return model, weights


def in_layout(checkpoint: Checkpoint) -> tuple[Checkpoint, DecoderConfig, list[str | None]]:
    """A checkpoint with plain weights, or such as Quire quantized, under the names that the model expects; its
    configuration; and notes for the user. Raises CheckpointError, one of its kinds."""
    checkpoint = of_numbers(checkpoint)
    notes: list[str | None] = list(checkpoint.notes)
    config = read_config(checkpoint.config, checkpoint.generation)
    layout = config.layout or (WITHOUT_HEAD if TABLE in checkpoint.entries else None)
    if layout is not None and checkpoint.quantization is None:
        checkpoint = LaidOutCheckpoint(checkpoint, layout)
        notes.append(_passed_over_note(checkpoint))
    return checkpoint, config, notes


def check_ranks(
    path: Path | str, size: int, redundant_experts: int | None = None, stages: int = 1, replicas: int = 1
) -> tuple[int, int]:
    """Check that `size` ranks can share each layer of a model, and `stages` its layers.

    Returns the most fp32 numbers per token that a collective gathers, and the least that it must have room for.

    Args:
        replicas: number of replicas, which share the experts.

    Raises:
        ConfigError: they cannot, since heads and layers are not split, and all ranks have the same number of experts.
    """
    checkpoint = of_numbers(Checkpoint(Path(path)))
    config = read_config(checkpoint.config, checkpoint.generation)
    layer = config.layer
    layers = [config.layer_at(index) for index in range(config.num_layers)]
    heads, counts = layer.num_heads, sorted({each.num_kv_heads for each in layers})
    allowed = [n for n in range(1, heads + 1) if all(can_share(heads, kv, n) for kv in counts)]
    net = config.recurrent
    if net is not None:
        allowed = [n for n in allowed if not net.cut_by(n)]
    if size not in allowed:
        kv_heads = " or ".join(map(str, counts))
        cut = "" if net is None else net.cut_by(size)
        recurrent = f", and {cut} of its recurrent layers" if cut else ""
        raise ConfigError(
            f"tensor_parallel_size={size}: so many ranks cannot share the model's {heads} attention heads ({kv_heads} "
            f"of keys and values){recurrent}; allowed: {', '.join(map(str, allowed))}"
        )
    _check_stages(config, layers, stages)
    if redundant_experts is not None:
        _check_slots(layer.experts, size * replicas, redundant_experts)
    values = layer.latent.v_head_dim if layer.latent else max(each.head_dim for each in layers)
    experts, turns = layer.experts, layer.experts.routing.top_k if layer.experts else 0
    dense = max(each.intermediate_size for each in layers)
    inner = dense if experts is None else experts.routing.top_k * experts.intermediate_size
    # In an exchange, ranks have equal parts of the room, for two matrices, or for rows and their destinations.
    passed_on = 2 * layer.hidden_size if stages > 1 else layer.hidden_size + 3 * turns if replicas > 1 else 0
    exchanged = size * stages * replicas * passed_on
    states = net.width if net else 0
    widest = max(layer.hidden_size, heads * values, states, dense, inner, exchanged)
    return widest, max(config.vocab_size, turns * layer.hidden_size)


def _check_stages(config: DecoderConfig, layers: Sequence[LayerConfig], stages: int) -> None:
    """Check that stages of a pipeline can share the layers."""
    if stages > 1 and any(each.index and each.index.shared for each in layers):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: some layers attend to what the one before them chose, which stages do "
            "not pass on; leave it out, or use tensor_parallel_size"
        )
    if stages > 1 and (config.per_layer_width or any(each.kv_source is not None for each in layers)):
        raise ConfigError(
            f"pipeline_parallel_size={stages}: the model's last layers read what earlier ones keep, and each gets "
            "inputs of its own, which stages do not pass on; leave it out, or use tensor_parallel_size"
        )
    if stages > config.num_layers:
        raise ConfigError(
            f"pipeline_parallel_size={stages} is more than the model's {config.num_layers} layers; lower it"
        )


def _check_slots(experts: ExpertsConfig | None, ranks: int, redundant: int) -> None:
    if experts is None:
        raise ConfigError("enable_expert_parallel=True, but the model has no experts; leave it out")
    count = experts.routing.num_experts
    if (count + redundant) % ranks or redundant > count * (ranks - 1):
        allowed = range(-count % ranks, count * (ranks - 1) + 1, ranks)
        shown = ", ".join(map(str, allowed[:3])) + (f" ... {allowed[-1]}" if len(allowed) > 3 else "")
        raise ConfigError(
            f"num_redundant_experts={redundant}: the {count} experts of a layer and these are shared out evenly among "
            f"{ranks} ranks; allowed: {shown}"
        )


def read_config(fields: Fields, generation: Fields) -> DecoderConfig:
    """Parse config.json and generation_config.json with the architecture's `read_config`.

    Raises:
        UnknownArchitectureError: the architecture is not supported.
        ModelConfigError: a field is missing, has the wrong type, or has a value that is not supported.
    """
    module: Any = importlib.import_module(ARCHITECTURES[_architecture(fields)])
    config: DecoderConfig = module.read_config(fields, generation)
    experts = config.routing.num_experts if config.routing else 0
    if config.num_layers * experts > MAX_EXPERTS_OF_ALL:  # each has a name and tensors, even before any is looked for
        raise ModelConfigError(
            f"{fields.source}: {config.num_layers} layers of {experts} experts; at most {MAX_EXPERTS_OF_ALL} experts "
            "of all layers together are supported"
        )
    return config


def _architecture(fields: Fields) -> str:
    names = fields.strings("architectures")
    if not names:
        raise fields.error("architectures", f"a list that holds one of {', '.join(ARCHITECTURES)}")
    for name in names:
        if name in ARCHITECTURES:
            return name
    if fields.picked(["speculators_model_type"]) == {"speculators_model_type": "eagle3"}:
        verifier = fields.section("speculators_config").section("verifier").picked(["name_or_path"])
        raise UnknownArchitectureError(
            f"{fields.source}: this checkpoint drafts for {verifier.get('name_or_path', 'another model')}. Load that "
            'one, with speculative_config={"method": "eagle3", "model": "..."} that names this one.'
        )
    family = [known for known in ARCHITECTURES if _family(known) == _family(names[0])]
    near = difflib.get_close_matches(names[0], family, n=1, cutoff=0.8)
    hint = f" Did you mean {near[0]}?" if near else ""
    code = " The checkpoint brings code of its own (auto_map), which is never run." if "auto_map" in fields else ""
    raise UnknownArchitectureError(
        f"{fields.source}: architecture {', '.join(names)} is not known. "
        f"Known are: {', '.join(ARCHITECTURES)}.{hint}{code}"
    )


def _family(architecture: str) -> tuple[str, bool]:
    """What two names must have in common for a suggestion: Gemma3ForCausalLM is not a misspelling of Qwen3 or Gemma4,
    nor a model with experts of one without."""
    match = re.match(r"[A-Za-z]+?(?=For|Moe|VL|Next|[0-9_]|$)[0-9_]*", architecture, re.IGNORECASE)
    return (match[0].lower() if match else architecture, "moe" in architecture.lower())


def _passed_over_note(checkpoint: LaidOutCheckpoint) -> str | None:
    entries = checkpoint.passed_over
    if not entries:
        return None
    size = sum(entry.num_bytes for entry in entries) / 2**20
    return (
        f"only the text model of this checkpoint is loaded: {len(entries)} tensors ({size:,.1f} MiB) of its other "
        f"parts are not, such as {entries[0].name!r}; requests with images are refused"
    )


def _left_note(checkpoint: QuantizingCheckpoint, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    left = [name for name, shape in shapes.items() if not is_plain(name, shape) and checkpoint.scheme(name) is None]
    if not left:
        return None
    return (
        f"{len(left)} weights, such as {left[0]!r} {list(shapes[left[0]])}, are not quantized, since groups of 32 or "
        "16 do not divide their inputs"
    )


def _mtp_note(checkpoint: Checkpoint, skipped: tuple[str, ...]) -> str | None:
    sizes = [entry.num_bytes for name, entry in checkpoint.entries.items() if name.startswith(skipped)]
    if not sizes:
        return None
    return (
        f"{len(sizes)} tensors ({sum(sizes) / 2**20:,.1f} MiB) of layers that predict further tokens are not loaded; "
        "speculative_config with method mtp uses such a layer, where there is one"
    )


def _rope_note(config: DecoderConfig) -> str | None:
    rope = config.rope
    if not rope.is_long:
        return None
    return (
        f"rotary factors are those of texts longer than {rope.original_max_position_embeddings:,} tokens, for all "
        "texts (longrope); a max_model_len of at most that chooses the others"
    )


def _own_code_note(fields: Fields) -> str | None:
    if "auto_map" not in fields:
        return None
    return "the checkpoint brings code of its own (auto_map), which is not run: Quire uses its own"
