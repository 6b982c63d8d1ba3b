"""The engine by hand: `add_request` queues, `step` runs one step, requests come and go between steps."""

from quire import LLM, SamplingParams


def main() -> None:
    params = SamplingParams(max_tokens=8, temperature=0)
    later = {3: "class Stack:", 5: "import os"}  # what arrives after which step
    with LLM("demo") as llm:
        llm.add_request("def add(a, b):", params, request_id="first")
        step = 0
        while not llm.idle or later:
            outputs = llm.step()
            step += 1
            state = {output.request_id: output.outputs[0].delta for output in outputs}
            print(f"step {step}: {llm.stats.running} running, {state}")
            if step in later:
                llm.add_request(later.pop(step), params, request_id=f"after step {step}")
            if step == 7:
                [aborted] = llm.abort("after step 5")
                print(f"aborted after {len(aborted.outputs[0].token_ids)} tokens")


if __name__ == "__main__":
    main()
