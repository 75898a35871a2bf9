"""An agent's turns on kept KV: each one costs what it adds, not the whole conversation. Usage: agent_loop.py [URL]"""

import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

SYSTEM = "You are a travel agent. Use what the tools tell you, and answer in one short sentence. " * 12
TOOL_RESULTS = ["get_weather(Paris) = 18 degrees, light rain", "get_trains(Paris) = next at 9:12, platform 4"]


def new_turn(role: str, text: str) -> str:
    """What comes after an answer, as this model's chat template writes it."""
    return f"<|im_end|>\n<|im_start|>{role}\n{text}<|im_end|>\n<|im_start|>assistant\n"


reply = client.chat.completions.create(
    model=model,
    messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Plan my morning in Paris."}],
    temperature=0,
    max_tokens=40,
    extra_body={"keep_kv": 120},
)
for result in TOOL_RESULTS:
    print(f"{reply.choices[0].message.content!r} ({reply.usage.prompt_tokens} prompt tokens)")
    turn = {"continuation_of": reply.choices[0].continuation["id"], "continuation_suffix": new_turn("user", result)}
    reply = client.chat.completions.create(
        model=model, messages=[], temperature=0, max_tokens=40, extra_body={"keep_kv": 120, **turn}
    )
    source = reply.kvrelay["continuation"]
    print(f"{result} -> {source['computed_tokens']} tokens computed, {source['inherited_tokens']} from the {source['source']}")
print(repr(reply.choices[0].message.content))
