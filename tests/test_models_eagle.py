"""EAGLE and EAGLE-3 heads compute what plain torch makes of the same tensors; what does not fit is refused in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from quire.errors import ConfigError
from quire.models.eagle import Eagle
from quire.models.eagle3 import Eagle3
from quire.models.model import AuxHiddenStates, Model
from quire.models.registry import load_model
from quire.ops import Kernels, KVCache, KVShape, RaggedBatch
from quire.speculate.load_draft import load_draft_model, load_eagle, load_eagle3
from tests.oracle import VOCAB, edit_json, load_reference, random_prompt, save_checkpoint
from tests.tokenizer_builders import byte_level_json

TOKENS = 70
PROMPT = random_prompt(TOKENS + 1)
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, DRAFT_VOCAB = 64, 96, 4, 2, 16, 60
THETA, EPS = 10000.0, 1e-5

Tensors = dict[str, torch.Tensor]


# Heads on disk


def layer_tensors(prefix: str, hidden: int, reads: int) -> Tensors:
    """A random Llama layer without the norm before its attention, which reads `reads` numbers a token."""
    shapes = {
        "self_attn.q_proj.weight": (HEADS * HEAD_DIM, reads),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_DIM, reads),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_DIM, reads),
        "self_attn.o_proj.weight": (hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": (INNER, hidden),
        "mlp.up_proj.weight": (INNER, hidden),
        "mlp.down_proj.weight": (hidden, INNER),
    }
    tensors = {prefix + name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}
    return tensors | {f"{prefix}post_attention_layernorm.weight": norm(hidden)}


def norm(size: int) -> torch.Tensor:
    return 1 + 0.3 * torch.randn(size)


def write(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 512,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        **fields,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def eagle_tensors(extra: str = "") -> Tensors:
    """A head as published, with one more part of those that some have."""
    torch.manual_seed(5)
    tensors = layer_tensors("layers.0.", HIDDEN, HIDDEN) | {"fc.weight": torch.randn(HIDDEN, 2 * HIDDEN) * 0.2}
    more = {
        "": {},
        "fc bias": {"fc.bias": torch.randn(HIDDEN)},
        "input norm": {"layers.0.input_layernorm.weight": norm(HIDDEN)},
        "own embedding": {"embed_tokens.weight": torch.randn(VOCAB, HIDDEN)},
        "head norms": {f"layers.0.self_attn.{name}_norm.weight": norm(HEAD_DIM) for name in "qk"},
        "biases": {
            f"layers.0.self_attn.{name}_proj.bias": torch.randn((HEADS if name == "q" else KV_HEADS) * HEAD_DIM)
            for name in "qkv"
        },
        "a copy of the output head": {"lm_head.weight": torch.randn(VOCAB, HIDDEN)},
    }
    return tensors | more[extra]


def eagle3_tensors(hidden: int = HIDDEN, own_embedding: bool = False, whole_vocabulary: bool = False) -> Tensors:
    """A head as published, under the name `midlayer`."""
    torch.manual_seed(6)
    drafted = VOCAB if whole_vocabulary else DRAFT_VOCAB
    tensors = layer_tensors("midlayer.", hidden, 2 * hidden) | {
        "midlayer.input_layernorm.weight": norm(hidden),
        "midlayer.hidden_norm.weight": norm(hidden),
        "fc.weight": torch.randn(hidden, 3 * HIDDEN) * 0.2,
        "norm.weight": norm(hidden),
        "lm_head.weight": torch.randn(drafted, hidden) * 0.2,
    }
    if own_embedding:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, hidden)
    if not whole_vocabulary:
        ids = torch.randperm(VOCAB)[:drafted].sort().values
        tensors["d2t"] = ids - torch.arange(drafted)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("target"), "llama", num_hidden_layers=8)


@pytest.fixture(scope="module")
def target(target_folder: Path) -> Model:
    return load_model(target_folder)


# The same in plain torch


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """x: [tokens, heads, head_dim]; token i stands at position i."""
    angles = torch.outer(torch.arange(len(x)), THETA ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def layer_reference(tensors: Tensors, prefix: str, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    """What the layer makes of x [tokens, reads], what its attention reads, and the residual."""

    def product(name: str, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, tensors[f"{prefix}{name}.weight"], tensors.get(f"{prefix}{name}.bias"))

    def head_norm(name: str, x: torch.Tensor) -> torch.Tensor:
        weight = tensors.get(f"{prefix}self_attn.{name}_norm.weight")
        return x if weight is None else rms(x, weight)

    q = turned(head_norm("q", product("self_attn.q_proj", x).view(-1, HEADS, HEAD_DIM)))
    k = turned(head_norm("k", product("self_attn.k_proj", x).view(-1, KV_HEADS, HEAD_DIM)))
    v = product("self_attn.v_proj", x).view(-1, KV_HEADS, HEAD_DIM)
    k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
    scores = scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), float("-inf"))
    mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
    residual = residual + product("self_attn.o_proj", mixed)
    x = rms(residual, tensors[f"{prefix}post_attention_layernorm.weight"])
    gated = F.silu(product("mlp.gate_proj", x)) * product("mlp.up_proj", x)
    return residual + product("mlp.down_proj", gated)


def eagle_reference(tensors: Tensors, table: torch.Tensor, hidden: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    embedded = tensors.get("embed_tokens.weight", table)[after]
    x = F.linear(torch.cat([embedded, hidden], dim=1), tensors["fc.weight"], tensors.get("fc.bias"))
    before = tensors.get("layers.0.input_layernorm.weight")
    return layer_reference(tensors, "layers.0.", x if before is None else rms(x, before), x)


def eagle3_reference(
    tensors: Tensors,
    table: torch.Tensor,
    hidden: torch.Tensor,
    after: torch.Tensor,
    norm_before_residual: bool = False,
) -> torch.Tensor:
    embedded = tensors.get("embed_tokens.weight", table)[after]
    x = rms(embedded, tensors["midlayer.input_layernorm.weight"])
    normalized = rms(hidden, tensors["midlayer.hidden_norm.weight"])
    residual = normalized if norm_before_residual else hidden
    return layer_reference(tensors, "midlayer.", torch.cat([x, normalized], dim=1), residual)


# Running ours


def batch_of(tokens: torch.Tensor, start: int, size: int = 16) -> RaggedBatch:
    """A span from position `start` on, of a request whose blocks are 1, 2, ..."""
    positions = torch.arange(start, start + len(tokens))
    blocks = -(-(start + len(tokens)) // size)
    return RaggedBatch(
        token_ids=tokens,
        positions=positions,
        slots=positions + size,
        row_starts=[0, len(tokens)],
        context_lens=[start + len(tokens)],
        block_tables=torch.arange(1, blocks + 1)[None],
        block_size=size,
    )


def run_model(model: Model, aux: AuxHiddenStates | None) -> torch.Tensor:
    with torch.inference_mode():
        return model.forward([batch_of(torch.tensor(PROMPT[:TOKENS]), 0)], model.new_caches([8], 16), aux)


def run_head(head: Eagle | Eagle3, hidden: torch.Tensor, chunk: int = TOKENS) -> torch.Tensor:
    """What a head makes of hidden states [TOKENS, hidden] of the prompt."""
    kv = KVCache(8, 1, 1, 6, 16, torch.float32, draft_kv=head.kv_shape).draft_kv
    assert kv is not None
    after, out = torch.tensor(PROMPT[1:]), []
    with torch.inference_mode():
        for i in range(0, TOKENS, chunk):
            out.append(head.forward(hidden[i : i + chunk], batch_of(after[i : i + chunk], i), kv))
    return torch.cat(out)


def features_of(target: Model, head: Eagle | Eagle3) -> torch.Tensor:
    """What the runner would give the head."""
    aux = AuxHiddenStates(head.aux_layers) if head.aux_layers else None
    hidden = run_model(target, aux)
    return hidden if aux is None else aux.features()


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


# AuxHiddenStates


@pytest.mark.quick(
    "chosen-llama",
    "chosen-qwen3_moe",
    "chosen-deepseek_v2",
    "torch-qwen2",
    "torch-qwen3",
    "torch-mistral",
    "torch-mixtral",
)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "deepseek_v2"])
@pytest.mark.parametrize("kernels", [None, Kernels()], ids=["chosen", "torch"])
def test_taps_are_what_enters_the_layers_and_change_nothing(
    architecture: str, kernels: Kernels | None, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, architecture)
    model, aux = load_model(folder, kernels=kernels), AuxHiddenStates((2, 0, 1))
    assert torch.equal(run_model(model, aux), run_model(model, None))
    with torch.inference_mode():
        ids = torch.tensor([PROMPT[:TOKENS]])
        entering = load_reference(folder)(ids, output_hidden_states=True).hidden_states
    assert_near(aux.features(), torch.cat([entering[layer][0] for layer in (2, 0, 1)], dim=1))


# Heads


@pytest.mark.parametrize(
    "extra", ["", "fc bias", "input norm", "own embedding", "head norms", "biases", "a copy of the output head"]
)
def test_an_eagle_head_computes_what_plain_torch_does(extra: str, target: Model, tmp_path: Path) -> None:
    tensors = eagle_tensors(extra)
    head = load_eagle(write(tmp_path, tensors), target)
    assert head.aux_layers == () and head.hidden_size == HIDDEN
    hidden = features_of(target, head)
    assert torch.equal(head.fuse(hidden), hidden)
    out = run_head(head, hidden)
    assert_near(out, eagle_reference(tensors, target.embedding.weight, hidden, torch.tensor(PROMPT[1:])))
    assert torch.equal(head.logits(out[-2:]), target.logits(out[-2:]))


@pytest.mark.parametrize("own_embedding", [False, True])
@pytest.mark.parametrize("name", ["midlayer.", "layers.0.", "model.layers.0."])
def test_an_eagle3_head_computes_what_plain_torch_does(
    own_embedding: bool, name: str, target: Model, tmp_path: Path
) -> None:
    tensors = eagle3_tensors(own_embedding=own_embedding)
    stored = {key.replace("midlayer.", name): tensor for key, tensor in tensors.items()}
    head = load_eagle3(write(tmp_path, stored, draft_vocab_size=DRAFT_VOCAB), target)
    assert head.aux_layers == (2, 4, 5) and head.hidden_size == HIDDEN
    features = features_of(target, head)
    hidden = head.fuse(features)
    assert_near(hidden, F.linear(features, tensors["fc.weight"]))
    out = run_head(head, hidden)
    assert_near(out, eagle3_reference(tensors, target.embedding.weight, hidden, torch.tensor(PROMPT[1:])))
    scores = F.linear(rms(out, tensors["norm.weight"]), tensors["lm_head.weight"])
    logits = head.logits(out)
    assert logits.shape == (TOKENS, VOCAB) and logits.dtype == torch.float32
    assert_near(logits[:, tensors["t2d"]], scores)
    assert (logits[:, ~tensors["t2d"]] == float("-inf")).all()


@pytest.mark.parametrize("before_fc", [False, True])
@pytest.mark.parametrize("before_residual", [False, True])
def test_a_head_of_the_speculators_library_computes_what_plain_torch_does(
    before_residual: bool, before_fc: bool, target: Model, tmp_path: Path
) -> None:
    """Its layer's fields are nested, and norms are where the configuration says."""
    tensors = eagle3_tensors(own_embedding=True)
    if before_fc:
        tensors["input_norm.weight"] = norm(3 * HIDDEN)
    stored = {key.replace("midlayer.", "layers.0."): tensor for key, tensor in tensors.items()}
    folder = write(tmp_path, stored)
    layer = json.loads((folder / "config.json").read_text())
    own = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": [1, 4, 6],
        "norm_before_residual": before_residual,
        "norm_before_fc": before_fc,
        "target_hidden_size": None,
    }
    (folder / "config.json").write_text(json.dumps(own | {"transformer_layer_config": layer}))
    head = load_eagle3(folder, target)
    assert head.aux_layers == (1, 4, 6)
    features = features_of(target, head)
    hidden = head.fuse(features)
    assert_near(
        hidden, F.linear(rms(features, tensors["input_norm.weight"]) if before_fc else features, tensors["fc.weight"])
    )
    kept = hidden.clone()
    out = run_head(head, hidden)
    assert torch.equal(hidden, kept)
    assert_near(out, eagle3_reference(tensors, torch.empty(0), hidden, torch.tensor(PROMPT[1:]), before_residual))


def test_an_eagle3_head_may_be_narrower_than_its_target_and_draft_every_token(target: Model, tmp_path: Path) -> None:
    tensors = eagle3_tensors(hidden=32, own_embedding=True, whole_vocabulary=True)
    head = load_eagle3(write(tmp_path, tensors, hidden_size=32, target_hidden_size=HIDDEN), target)
    hidden = head.fuse(features_of(target, head))
    out = run_head(head, hidden)
    assert out.shape == (TOKENS, 32) == (TOKENS, head.hidden_size)
    assert_near(out, eagle3_reference(tensors, torch.empty(0), hidden, torch.tensor(PROMPT[1:])))
    assert_near(head.logits(out), F.linear(rms(out, tensors["norm.weight"]), tensors["lm_head.weight"]))


def test_a_drafted_token_is_the_draft_vocabularys_id_moved_by_its_entry(target: Model, tmp_path: Path) -> None:
    tensors = eagle3_tensors()
    head = load_eagle3(write(tmp_path, tensors, draft_vocab_size=DRAFT_VOCAB), target)
    out = torch.randn(20, HIDDEN)
    best = F.linear(rms(out, tensors["norm.weight"]), tensors["lm_head.weight"]).argmax(-1)
    assert head.logits(out).argmax(-1).tolist() == [int(i + tensors["d2t"][i]) for i in best]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("load", [load_eagle, load_eagle3])
def test_chunks_of_any_length_give_the_same_bits_and_leave_their_input(
    dtype: str, load: Callable[..., Eagle | Eagle3], target_folder: Path, tmp_path: Path
) -> None:
    target = load_model(target_folder, dtype)
    tensors = eagle_tensors() if load is load_eagle else eagle3_tensors()
    head = load(write(tmp_path, tensors, draft_vocab_size=DRAFT_VOCAB), target)
    hidden = head.fuse(features_of(target, head))
    before = hidden.clone()
    whole = run_head(head, hidden)
    assert torch.equal(hidden, before) and whole.dtype == head.dtype == target.dtype
    for chunk in (1, 3, 16, 37):
        assert torch.equal(run_head(head, hidden, chunk), whole), f"chunks of {chunk}"


def test_a_head_tells_what_its_cache_and_weights_take(target: Model, tmp_path: Path) -> None:
    tensors = eagle_tensors("own embedding")
    head = load_eagle(write(tmp_path, tensors), target)
    assert head.kv_shape == KVShape(1, KV_HEADS, HEAD_DIM, head.dtype)
    numbers = sum(tensor.numel() for name, tensor in tensors.items() if name != "embed_tokens.weight")
    assert head.weight_bytes == 4 * numbers


@pytest.mark.parametrize(
    "fields",
    [
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}},
    ],
)
def test_layers_that_config_json_names_are_tapped_in_small_targets_too(fields: dict[str, Any], tmp_path: Path) -> None:
    target = load_model(save_checkpoint(tmp_path / "target", "llama", num_hidden_layers=4))
    folder = write(tmp_path / "head", eagle3_tensors(), draft_vocab_size=DRAFT_VOCAB, **fields)
    assert load_eagle3(folder, target).aux_layers == (1, 2, 3)


# What does not fit

BAD_EAGLE: dict[str, tuple[Callable[[Tensors], object], dict[str, Any], str]] = {
    "another vocabulary": (lambda t: None, {"vocab_size": 161}, "a vocabulary of 161 tokens, and the target's has 160"),
    "another hidden size": (
        lambda t: None, {"hidden_size": 128}, "a model whose hidden size is 128, and the target's is 64"
    ),
    "a missing tensor": (lambda t: t.pop("layers.0.mlp.up_proj.weight"), {}, "missing: 'layers.0.mlp.up_proj.weight'"),
    "a tensor left over": (lambda t: t.update(odd=torch.zeros(2)), {}, "no place for 1 tensors: 'odd'"),
    "another shape": (
        lambda t: t.update({"fc.weight": torch.zeros(64, 64)}), {}, r"'fc.weight' is \[64, 64\], not \[64, 128\]"
    ),
    "no head": (lambda t: t.pop("fc.weight"), {}, "no tensor 'fc.weight', so it is no EAGLE head; .* say draft_model"),
    "several layers": (lambda t: None, {"num_hidden_layers": 2}, "'num_hidden_layers' must be 1"),
    "a field missing": (lambda t: None, {"intermediate_size": None}, "'intermediate_size' must be"),
    "EAGLE-3": (
        lambda t: t.update({"midlayer.hidden_norm.weight": torch.ones(64)}), {}, "EAGLE-3 head; say method: eagle3"
    ),
    "both spellings": (
        lambda t: t.update({"model.fc.weight": t["fc.weight"].clone()}), {}, "with and without 'model.'"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_EAGLE)
def test_an_eagle_head_that_does_not_fit_is_refused(case: str, target: Model, tmp_path: Path) -> None:
    edit, fields, words = BAD_EAGLE[case]
    tensors = eagle_tensors()
    edit(tensors)
    with pytest.raises(ConfigError, match=f"speculative_config: model '.*' cannot draft: .*{words}"):
        load_eagle(write(tmp_path, tensors, **fields), target)


def move(at: int, to: int) -> Callable[[Tensors], object]:
    """Draft token `at` becomes the target's `to`."""
    return lambda t: t["d2t"].__setitem__(at, to - at)


BAD_EAGLE3: dict[str, tuple[Callable[[Tensors], object], dict[str, Any], str]] = {
    "another target": (
        lambda t: None, {"target_hidden_size": 96}, "a model whose hidden size is 96, and the target's is 64"
    ),
    "no embedding": (
        lambda t: None, {"hidden_size": 32, "target_hidden_size": 64}, "no embedding of its own, .* 64 wide, not 32"
    ),
    "no table of ids": (lambda t: t.pop("d2t"), {}, r"'d2t' must have the shape \[60\], found nothing"),
    "a short table": (lambda t: t.update(d2t=t["d2t"][:-1]), {}, r"must have the shape \[60\], found \[59\]"),
    "an id outside": (move(59, 160), {}, "another one of 160; found ids from .* to 160, 60 of them"),
    "an id twice": (move(59, 3), {}, "ids from"),
    "tables at odds": (lambda t: t["t2d"].logical_not_(), {}, "'d2t' and 't2d' do not name the same tokens"),
    "a missing norm": (lambda t: t.pop("norm.weight"), {}, "missing: 'norm.weight'"),
    "an older head": (lambda t: t.pop("midlayer.hidden_norm.weight"), {}, "no EAGLE-3 head; .* say method: eagle"),
    "norms of the target's layers": (lambda t: None, {"fc_norm": True}, "'fc_norm' is True"),
    "a norm at the end": (lambda t: None, {"norm_output": True}, "'norm_output' is True"),
    "a norm that is missing": (lambda t: None, {"norm_before_fc": True}, "missing: 'input_norm.weight'"),
    "a norm that nobody asked for": (
        lambda t: t.update({"input_norm.weight": norm(3 * HIDDEN)}), {}, "input_norm.weight"
    ),
    "a layer that is not there": (lambda t: None, {"eagle_aux_hidden_state_layer_ids": [1, 8]}, "each from 0 to 7"),
    "more drafts than tokens": (lambda t: None, {"draft_vocab_size": 161}, "'draft_vocab_size' must be"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_EAGLE3)
def test_an_eagle3_head_that_does_not_fit_is_refused(case: str, target: Model, tmp_path: Path) -> None:
    edit, fields, words = BAD_EAGLE3[case]
    tensors = eagle3_tensors()
    edit(tensors)
    with pytest.raises(ConfigError, match=f"speculative_config: model '.*' cannot draft: .*{words}"):
        load_eagle3(write(tmp_path, tensors, **({"draft_vocab_size": DRAFT_VOCAB} | fields)), target)


def test_a_target_with_too_few_layers_is_refused_for_eagle3(tmp_path: Path) -> None:
    target = load_model(save_checkpoint(tmp_path / "target", "llama", num_hidden_layers=4))
    with pytest.raises(ConfigError, match="only 4 layers, and 7 are needed"):
        load_eagle3(write(tmp_path / "head", eagle3_tensors(), draft_vocab_size=DRAFT_VOCAB), target)


@pytest.mark.parametrize("load", [load_eagle, load_eagle3, load_draft_model])
def test_a_folder_without_a_checkpoint_is_refused(load: Callable[..., object], target: Model, tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "absent"):
        with pytest.raises(ConfigError, match=f"speculative_config: model '{folder}' cannot draft"):
            load(folder, target)


# Draft models


def test_a_draft_model_is_loaded_with_the_targets_kernels(target: Model, tmp_path: Path) -> None:
    draft = load_draft_model(save_checkpoint(tmp_path, "qwen3", dtype=torch.bfloat16), target)
    assert draft.dtype == torch.bfloat16 and draft.kernels is target.kernels


def test_a_draft_model_with_another_vocabulary_is_refused_before_its_weights_are_read(
    target: Model, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path, "llama")
    edit_json(folder / "config.json", {"vocab_size": 155})  # its weights would be refused too
    with pytest.raises(ConfigError, match="its vocabulary has 155 tokens, the target's 160"):
        load_draft_model(folder, target)


def test_a_model_that_is_for_embeddings_is_refused_as_a_draft_model(target: Model, tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, "gemma3_text", use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="its tokens see those that follow them"):
        load_draft_model(folder, target)


def test_a_draft_model_whose_tokenizer_spells_an_id_differently_is_refused(
    target: Model, target_folder: Path, tmp_path: Path
) -> None:
    folder = save_checkpoint(tmp_path / "draft", "llama")
    assert load_draft_model(folder, target, target_folder)  # nothing to compare
    shutil.copytree(target_folder, tmp_path / "target")
    for place in (folder, tmp_path / "target"):
        (place / "tokenizer.json").write_text(byte_level_json())
    assert load_draft_model(folder, target, tmp_path / "target")
    fields = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(fields, indent=3))  # the same in other bytes
    assert load_draft_model(folder, target, tmp_path / "target")
    vocabulary = fields["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "tokenizer.json").write_text(json.dumps(fields))
    with pytest.raises(ConfigError, match=r"differs from the target's in 2 tokens, such as '[ab]'"):
        load_draft_model(folder, target, tmp_path / "target")


def test_nothing_of_a_head_is_lost_in_loading(target: Model, tmp_path: Path) -> None:
    """Every tensor that is not skipped changes what comes out."""
    tensors = eagle3_tensors()
    folder = write(tmp_path, tensors, draft_vocab_size=DRAFT_VOCAB)

    def logits() -> torch.Tensor:
        head = load_eagle3(folder, target)
        return head.logits(run_head(head, head.fuse(features_of(target, head))))

    expected = logits()
    for name in tensors.keys() - {"d2t", "t2d"}:
        changed = load_file(folder / "model.safetensors") | {name: tensors[name].flip(0)}
        save_file(changed, folder / "model.safetensors")
        assert not torch.equal(logits(), expected), name
        save_file(tensors, folder / "model.safetensors")
