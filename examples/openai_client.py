"""OpenAI's client, unmodified, with a server of ours: a completion, a stream, and a schema. (pip install openai)"""

import json

import openai
from servers import serving

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "maximum": 9}},
    "required": ["n"],
    "additionalProperties": False,
}


def main() -> None:
    with serving() as url, openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        asked = {"model": "demo", "prompt": "def add(a, b):", "max_tokens": 16, "temperature": 0}
        text = client.completions.create(**asked).choices[0].text
        parts = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
        print(f"{text!r}; streamed in {len(parts)} pieces, the same text: {''.join(parts) == text}")
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "How many?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "number", "schema": SCHEMA, "strict": True},
            },
            max_tokens=100,
        )
        print("meets the schema:", json.loads(answer.choices[0].message.content))


if __name__ == "__main__":
    main()
