"""A tool: a function that the model calls, with arguments that meet its schema, and the answer to what it returns."""

import json
from typing import Any

from quire import LLM, SamplingParams


def temperature(city: str, unit: str) -> str:
    """What the tool does: no model is needed for that."""
    celsius = {"Oslo": 4, "Rome": 17}[city]
    return f"{celsius if unit == 'C' else celsius * 9 / 5 + 32} {unit}"


TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "temperature",
        "description": "How warm it is in a city.",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}, "unit": {"enum": ["C", "F"]}},
            "required": ["city", "unit"],
            "additionalProperties": False,
        },
    },
}


def main() -> None:
    with LLM("demo", tool_format="hermes") as llm:  # its template has no tools; those of most models do
        chat: list[dict[str, Any]] = [{"role": "user", "content": "How warm is it?"}]
        params = SamplingParams(seed=1, max_tokens=200)
        named = {"type": "function", "function": {"name": "temperature"}}
        [output] = llm.chat(chat, params, tools=[TOOL], tool_choice=named)
        [call] = output.outputs[0].reply.tool_calls
        arguments = json.loads(call.arguments)
        result = temperature(**arguments)
        print(f"{call.name}({arguments}) is {result}")

        said = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        chat.append({"role": "assistant", "content": "", "tool_calls": [said]})
        chat.append({"role": "tool", "tool_call_id": call.id, "content": result})
        [output] = llm.chat(chat, SamplingParams(seed=1, max_tokens=16), tools=[TOOL], tool_choice="none")
        print(f"and then it says: {output.outputs[0].reply.content!r}")


if __name__ == "__main__":
    main()
