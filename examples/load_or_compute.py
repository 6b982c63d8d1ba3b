"""What loading costs against computing: prompts that were evicted to host memory come back from there."""

import time

from quire import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=1, temperature=0)
LENGTH = 1500


def main() -> None:
    prompts = [[100 + (i * 211 + j) % 1000 for j in range(LENGTH)] for i in range(4)]
    with LLM("demo", host_kv_memory="64MiB", num_kv_blocks=110, max_model_len=1600) as llm:  # room for one prompt

        def timed(prompt: list[int]) -> tuple[float, int]:
            begin = time.perf_counter()
            [output] = llm.generate(prompt, PARAMS)
            return time.perf_counter() - begin, output.cached_tokens

        for what in ("computed", "loaded"):
            times = []
            for prompt in prompts:
                times.append(timed(prompt))
                llm.generate([prompt] * 2, PARAMS)  # what is used again is worth keeping when it is evicted
            seconds, cached = (sum(each) / len(prompts) for each in zip(*times, strict=True))
            print(f"{what}: {seconds * 1000:.1f} ms a prompt of {LENGTH} tokens, of which {cached:.0f} were there")
        tier = llm.stats.kv_tiers["host"]
        print(
            f"host tier: {tier['stored']} blocks stored, {tier['loaded']} loaded, {llm.stats.kv_block_bytes} bytes each"
        )


if __name__ == "__main__":
    main()
