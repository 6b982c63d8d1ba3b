"""A schema: every token that would not fit is masked, so what ends by itself is valid, whatever the model would say."""

import json

from quire import LLM, SamplingParams, StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"enum": ["Ada", "Grace"]},
        "born": {"type": "integer", "minimum": 1800, "maximum": 1950},
        "languages": {"type": "array", "items": {"enum": ["Python", "COBOL"]}, "maxItems": 2},
    },
    "required": ["name", "born", "languages"],
    "additionalProperties": False,
}


def main() -> None:
    with LLM("demo") as llm:
        for temperature in (0, 1, 2):
            params = SamplingParams(
                structured_outputs=StructuredOutputsParams(json=SCHEMA), temperature=temperature, seed=1, max_tokens=200
            )
            [output] = llm.generate("Ada is", params)
            print(f"temperature {temperature}: {json.loads(output.outputs[0].text)}")


if __name__ == "__main__":
    main()
