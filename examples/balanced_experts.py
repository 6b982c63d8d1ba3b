"""Experts out of balance: two ranks share the experts of each layer, some of which get most tokens. They are moved."""

import torch
from safetensors.torch import load_file, save_file

from quire import LLM, SamplingParams
from quire.core.expert_balance import imbalance
from quire.models.random_checkpoint import random_checkpoint


def favour(file: str) -> None:
    """All embeddings, and the router's rows of the first two experts, get a part in common."""
    weights = load_file(file)
    common = torch.ones(64)
    weights["model.embed_tokens.weight"] += common.to(torch.bfloat16)
    for name, weight in weights.items():
        if name.endswith("mlp.gate.weight"):
            weight[:2] += 0.01
    save_file(weights, file, metadata={"format": "pt"})


def main() -> None:
    prompts = [[7 * i + j for j in range(60)] for i in range(8)]
    params = SamplingParams(max_tokens=120, temperature=0, ignore_eos=True)
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "eplb_interval": 50, "threads": 1}
    with random_checkpoint("qwen3-moe-tiny", None) as folder:
        favour(str(folder / "model.safetensors"))
        with LLM(str(folder), **options) as llm:
            llm.generate(prompts, params)
            for number, layer in llm.model.expert_layers.items():
                load = llm.model.expert_loads[number].tolist()
                before, after = imbalance(load, range(len(load)), 2), imbalance(load, layer.slots, 2)
                print(f"layer {number}: tokens of each expert {load}; placed as {layer.slots}")
                print(f"  the busiest rank has {after:.2f} times the mean to do, and would have {before:.2f} times")


if __name__ == "__main__":
    main()
