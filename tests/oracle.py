"""Tiny Hugging Face checkpoints with random weights, what transformers makes of them, and a bare loop for ours."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers

from quire.models.model import Model
from quire.models.quantize import quantize_folder
from quire.models.registry import load_model
from quire.ops import RaggedBatch

torch.set_num_threads(1)  # for matrices this small, a second thread only waits
transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
CLASSES = {
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "lfm2": ("Lfm2Config", "Lfm2ForCausalLM"),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM"),
    "lfm2_moe": ("Lfm2MoeConfig", "Lfm2MoeForCausalLM"),
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2_moe": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM"),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM"),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM"),
    "deepseek_v32": ("DeepseekV32Config", "DeepseekV32ForCausalLM"),
    "ernie4_5": ("Ernie4_5Config", "Ernie4_5ForCausalLM"),
    "exaone4": ("Exaone4Config", "Exaone4ForCausalLM"),
    "gemma3": ("Gemma3Config", "Gemma3ForConditionalGeneration"),
    "gemma3_model": ("Gemma3TextConfig", "Gemma3TextModel"),
    "gemma3_text": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
    "gemma4": ("Gemma4Config", "Gemma4ForConditionalGeneration"),
    "gemma4_text": ("Gemma4TextConfig", "Gemma4ForCausalLM"),
    "gemma4_unified": ("Gemma4UnifiedConfig", "Gemma4UnifiedForConditionalGeneration"),
    "gemma4_unified_text": ("Gemma4UnifiedTextConfig", "Gemma4UnifiedForCausalLM"),
    "glm4": ("Glm4Config", "Glm4ForCausalLM"),
    "glm4_moe": ("Glm4MoeConfig", "Glm4MoeForCausalLM"),
    "glm_moe_dsa": ("GlmMoeDsaConfig", "GlmMoeDsaForCausalLM"),
    "glm4_moe_lite": ("Glm4MoeLiteConfig", "Glm4MoeLiteForCausalLM"),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM"),
    "granite": ("GraniteConfig", "GraniteForCausalLM"),
    "granitemoehybrid": ("GraniteMoeHybridConfig", "GraniteMoeHybridForCausalLM"),
    "hunyuan_v1_dense": ("HunYuanDenseV1Config", "HunYuanDenseV1ForCausalLM"),
    "hy_v3": ("HYV3Config", "HYV3ForCausalLM"),
    "kimi_k25": ("Kimi_K25Config", "Kimi_K25ForConditionalGeneration"),
    "minimax_m2": ("MiniMaxM2Config", "MiniMaxM2ForCausalLM"),
    "ministral3": ("Ministral3Config", "Ministral3ForCausalLM"),
    "mistral3": ("Mistral3Config", "Mistral3ForConditionalGeneration"),
    "mistral4": ("Mistral4Config", "Mistral4ForCausalLM"),
    "nemotron_h": ("NemotronHConfig", "NemotronHForCausalLM"),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM"),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM"),
    "phi3": ("Phi3Config", "Phi3ForCausalLM"),
    "qwen2_5_vl": ("Qwen2_5_VLConfig", "Qwen2_5_VLForConditionalGeneration"),
    "qwen3_5": ("Qwen3_5Config", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
    "qwen3_5_moe_text": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM"),
    "qwen3_5_text": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM"),
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM"),
    "qwen3_vl": ("Qwen3VLConfig", "Qwen3VLForConditionalGeneration"),
    "seed_oss": ("SeedOssConfig", "SeedOssForCausalLM"),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM"),
}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
}
INDEXER = {"index_topk": 24, "index_n_heads": 8, "index_head_dim": 16}
HYBRID: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
HYBRID_EXPERTS = {
    **HYBRID,
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
}
EXPERTS: dict[str, dict[str, Any]] = {
    "qwen3_5_moe_text": HYBRID_EXPERTS,
    "qwen3_5_text": HYBRID,
    "qwen3_next": HYBRID_EXPERTS,
    "qwen2_moe": {
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {**LATENT, **INDEXER},
    "glm4_moe": {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "glm_moe_dsa": {**LATENT, **INDEXER},
    "glm4_moe_lite": {name: size for name, size in LATENT.items() if name != "first_k_dense_replace"},
    "gpt_oss": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "hy_v3": {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3},
    "kimi_linear": {
        **{
            name: size
            for name, size in LATENT.items()
            if name not in ("n_routed_experts", "first_k_dense_replace", "q_lora_rank")
        },
        "num_local_experts": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"], "block_multiple_of": 32},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
    },
    "mistral4": LATENT,
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "ssm_state_size": 24,
        "n_groups": 2,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "n_group": 4,
        "topk_group": 2,
        "time_step_min": 1e-9,  # transformers clamps prompts' steps by what is of initialization
    },
    "granitemoehybrid": {
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 24,
    },
}
"""Sizes of the architectures that have experts."""
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 28, "patch_size": 14, **VISION},
        "mm_tokens_per_image": 4,
    },
    "gemma4": {"vision_config": {**VISION, "num_key_value_heads": 2, "head_dim": 16}},
    "gemma4_unified": {},
    "kimi_k25": {"vision_config": VISION},
    "mistral3": {
        "vision_config": {"model_type": "pixtral", "head_dim": 16, "image_size": 28, "patch_size": 14, **VISION}
    },
    "qwen2_5_vl": {"vision_config": {**QWEN_VISION}},
    "qwen3_5": {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16}},
    "qwen3_5_moe": {"vision_config": {**QWEN_VISION, "num_position_embeddings": 16}},
    "qwen3_vl": {"vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}},
}
"""Architectures that nest the text model, which the option `text` names: what stands beside it."""
HEAD_DIM_16 = {
    "nemotron_h",
    "ernie4_5",
    "gemma3_model",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "seed_oss",
    "qwen3_vl_text",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
    "qwen3_moe",
    "glm4",
    "gpt_oss",
    "hy_v3",
    "minimax_m2",
    "ministral3",
    "hunyuan_v1_dense",
}
"""Architectures whose heads are another width than hidden_size / num_attention_heads unless said."""


def save_checkpoint(
    folder: Path,
    architecture: str,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
    edit: dict[str, Any] | None = None,
    seed: int = 3,
    text: str = "",
    **options: Any,
) -> Path:
    """Writes a tiny random model with transformers.

    Weights are large enough for logits of a few units, and norms and biases are random too, so that leaving any
    of them out shows; with this seed the best two logits of every parity test lie well apart. `options` go to
    transformers' config class; `edit` replaces fields of config.json after it was written (a field set to `...`
    is removed), for spellings that transformers no longer writes. Of a tower, `text` is the architecture of its
    text model, to whose configuration the options go.
    """
    config_name, model_name = CLASSES[architecture]
    options = copy.deepcopy(options)  # transformers writes into nested ones
    torch.manual_seed(seed)
    if architecture in TOWERS:
        text = {**sizes_of(text), **options, "model_type": text}
        tied = options.get("tie_word_embeddings", architecture.startswith("gemma"))
        config = getattr(transformers, config_name)(**TOWERS[architecture], text_config=text, tie_word_embeddings=tied)
    else:
        config = getattr(transformers, config_name)(**{**sizes_of(architecture), **options})
    model = getattr(transformers, model_name)(config)
    zero_centered = architecture.startswith(("gemma3", "qwen3_5", "qwen3_next"))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0, 0.5)
            elif "norm" in name:
                parameter.normal_(0 if zero_centered and "linear_attn" not in name else 1, 0.3)
            elif name.endswith("A_log"):
                parameter.uniform_(-4, 1)  # heads that forget at once, and heads that hardly do
            elif name.endswith(("sinks", "scale")):
                parameter.normal_(1, 1)
            elif "embed" in name:
                parameter.normal_(0, 0.1)  # small, so that the layers decide and not the last token alone
            else:
                parameter.normal_(0, 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith(("correction_bias", "expert_bias")):
                buffer.normal_(0, 0.2)
            if name.endswith("layer_scalar"):
                buffer.uniform_(0.5, 1.5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    if edit:
        edit_json(folder / "config.json", edit)
    return folder


def sizes_of(architecture: str) -> dict[str, Any]:
    """Of a tiny model."""
    head_dim = {"head_dim": 16} if architecture in HEAD_DIM_16 else {}
    return {**SIZES, **EXPERTS.get(architecture, {}), **head_dim}


def edit_json(file: Path, edit: dict[str, Any]) -> None:
    """Replaces fields of a JSON file; one set to `...` is removed."""
    fields = json.loads(file.read_text()) | edit
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not ...}))


def load_reference(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The checkpoint as transformers loads it, with its plainest attention."""
    name = json.loads((folder / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, name).from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    return model.eval()


def reference_logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] in fp32."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)])).logits[0].float()


def reference_greedy(model: Any, prompt: Sequence[int], steps: int) -> list[int]:
    """What transformers' own `generate` continues with, whatever ends a text."""
    model.generation_config = transformers.GenerationConfig(max_new_tokens=steps, do_sample=False)
    with torch.inference_mode():
        output = model.generate(torch.tensor([list(prompt)]))
    return output[0, len(prompt) :].tolist()


def reference_choices(model: Any, prompt: Sequence[int], output: Sequence[int]) -> list[int]:
    """What transformers finds likeliest at each place of an output: the output itself, where it is transformers' own.

    All in one pass, which takes a tenth of the time of `reference_greedy`.
    """
    return reference_logits(model, [*prompt, *output[:-1]])[len(prompt) - 1 :].argmax(-1).tolist()


def random_prompt(length: int, seed: int = 0, vocab: int = VOCAB) -> list[int]:
    """Token ids."""
    return random.Random(seed).choices(range(vocab), k=length)


class Driver:
    """One request driven by hand through a model: chunks of any length, then one token at a time."""

    def __init__(self, model: Model, capacity: int, block_size: int = 16) -> None:
        blocks = -(-capacity // block_size)
        self.model = model
        self.caches = model.new_caches([blocks + 1] * len(model.groups), block_size)
        order = list(range(1, blocks + 1))
        random.Random(0).shuffle(order)  # blocks lie anywhere
        self.table = torch.tensor(order)
        self.length = 0

    def feed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Runs the tokens as one span; returns their logits [tokens, vocabulary]."""
        size = self.caches[0].block_size
        positions = torch.arange(self.length, self.length + len(tokens))
        self.length += len(tokens)
        batch = RaggedBatch(
            token_ids=torch.tensor(list(tokens)),
            positions=positions,
            slots=self.table[positions // size] * size + positions % size,
            row_starts=[0, len(tokens)],
            context_lens=[self.length],
            block_tables=self.table[None, : -(-self.length // size)].contiguous(),
            block_size=size,
        )
        pulse = self.caches[0].pulse[0]
        with torch.inference_mode():
            logits = self.model.logits(self.model.forward([replace(batch) for _ in self.caches], self.caches))
        assert self.caches[0].pulse[0] == pulse + len(self.model.layers)
        return logits


def chunked_logits(model: Model, tokens: Sequence[int], chunk: int) -> torch.Tensor:
    """Logits of every token [tokens, vocabulary], the text fed in chunks."""
    sequence = Driver(model, len(tokens))
    return torch.cat([sequence.feed(tokens[i : i + chunk]) for i in range(0, len(tokens), chunk)])


def greedy(model: Model, prompt: Sequence[int], steps: int, chunk: int = 37) -> list[int]:
    """The likeliest continuation: the prompt in chunks, then token by token."""
    sequence = Driver(model, len(prompt) + steps)
    for i in range(0, len(prompt), chunk):
        logits = sequence.feed(prompt[i : i + chunk])
    output = [int(logits[-1].argmax())]
    while len(output) < steps:
        output.append(int(sequence.feed(output[-1:])[-1].argmax()))
    return output


def assert_parity(folder: Path, prompt: Sequence[int], rtol: float = 0.0) -> None:
    """A checkpoint's logits and greedy tokens are those of transformers, with the prompt in chunks."""
    reference, model = load_reference(folder), load_model(folder)
    expected = reference_logits(reference, prompt)
    assert expected.abs().max() > 0.5, "the logits tell models apart"
    torch.testing.assert_close(chunked_logits(model, prompt, 37), expected, rtol=rtol, atol=1e-4)
    output = greedy(model, prompt, 64)
    assert output == reference_choices(reference, prompt, output)


def assert_errs_no_more(folder: Path, prompt: Sequence[int], factor: float) -> None:
    """A checkpoint in bf16 is as near to exact logits as with transformers, or `factor` times as far at most."""
    exact = reference_logits(load_reference(folder), prompt)
    theirs = reference_logits(load_reference(folder, torch.bfloat16), prompt)
    ours = chunked_logits(load_model(folder, "bfloat16"), prompt, 37)
    assert (ours - exact).square().mean().sqrt() < factor * (theirs - exact).square().mean().sqrt()


def assert_same_when_quantized(folder: Path, output: Path, prompt: Sequence[int]) -> None:
    """A quantized copy gives the bits of the checkpoint that is quantized when it is loaded."""
    quantize_folder(folder, output, "int4")
    here = load_model(folder, quantization="int4")
    assert torch.equal(chunked_logits(load_model(output), prompt, 37), chunked_logits(here, prompt, 37))
