"""Latent attention (DeepSeek), on tiny models with random weights: what is cached a token, and what that saves."""

from quire import LLM, SamplingParams
from quire.models.random_checkpoint import model_config, random_checkpoint


def cached_bytes(shape: str) -> int:
    """Of each token, as an engine that ran says."""
    with random_checkpoint(shape, None) as folder, LLM(str(folder)) as llm:
        llm.generate([list(range(50))], SamplingParams(max_tokens=10, temperature=0))
        return llm.memory_plan.kv_bytes_per_token


def main() -> None:
    config = model_config("deepseek-v2-tiny")
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    row = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    latent = cached_bytes("deepseek-v2-tiny")
    print(f"{layers} layers, each caches one row of {row} numbers a token, for all {heads} heads: {latent} bytes")
    full = heads * (config["qk_nope_head_dim"] + config["qk_rope_head_dim"] + config["v_head_dim"])
    print(f"full keys and values would be {full} numbers a layer: {2 * layers * full / latent:.1f} times as many")
    print(f"for comparison, qwen3-tiny (2 heads of keys and values): {cached_bytes('qwen3-tiny')} bytes")


if __name__ == "__main__":
    main()
