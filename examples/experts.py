"""Mixture of experts, on a tiny model with random weights: each token runs through a few experts of each layer."""

from quire import LLM, SamplingParams
from quire.models.random_checkpoint import model_config, random_checkpoint


def main() -> None:
    config = model_config("qwen3-moe-tiny")
    print(f"{config['num_experts']} experts a layer, {config['num_experts_per_tok']} of them a token")
    with random_checkpoint("qwen3-moe-tiny", None) as folder, LLM(str(folder)) as llm:
        llm.generate([[10 * i + j for j in range(40)] for i in range(4)], SamplingParams(max_tokens=20, temperature=0))
        for layer, load in llm.model.expert_loads.items():
            loads = load.tolist()
            most = max(loads) * len(loads) / sum(loads)
            print(f"layer {layer}: tokens of each expert {loads}; the busiest has {most:.2f} times the mean")


if __name__ == "__main__":
    main()
