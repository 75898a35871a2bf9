"""Structured output: the answer always fits the schema. Usage: json_schema.py [URL]"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "population_millions": {"type": "integer", "minimum": 0, "maximum": 40},
        "continent": {"enum": ["Africa", "America", "Asia", "Australia", "Europe"]},
    },
    "required": ["name", "population_millions", "continent"],
    "additionalProperties": False,
}
reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "Describe the city of Tokyo as JSON."}],
    response_format={"type": "json_schema", "json_schema": {"name": "city", "schema": schema, "strict": True}},
    temperature=0,
    max_tokens=100,
)
print(json.loads(reply.choices[0].message.content))
