"""An agent's tool calls on kept KV: each turn computes only what it adds to the conversation. Usage: agent_loop.py [URL]"""

import json
import sys

from openai import OpenAI

client = OpenAI(base_url=sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000/v1", api_key="none")
model = client.models.list().data[0].id

city = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
results = {"get_weather": "18 degrees, light rain", "get_trains": "the next one leaves at 9:12"}
tools = [{"type": "function", "function": {"name": name, "parameters": city}} for name in results]
usual = {"model": model, "temperature": 0, "max_tokens": 60}
keep = {"keep_kv": 120}  # seconds


def must_call(name: str) -> dict:
    return {"tools": tools, "tool_choice": {"type": "function", "function": {"name": name}}}


def suffix(reply, result: str) -> str:
    """What comes between two answers, as the chat template of this model writes it."""
    end = "<|im_end|>" if reply.choices[0].finish_reason == "length" else ""  # else the model wrote it
    return f"{end}\n<|im_start|>tool\n{result}<|im_end|>\n<|im_start|>assistant\n"


question = [{"role": "user", "content": "I am going to Paris. What is the weather there, and when does a train go?"}]
reply = client.chat.completions.create(messages=question, **usual, **must_call("get_weather"), extra_body=keep)
for name, next_turn in (("get_weather", must_call("get_trains")), ("get_trains", {})):
    choice = reply.choices[0]
    call = choice.message.tool_calls[0].function
    print(f"the model calls {call.name}({json.loads(call.arguments)})")
    turn = {"continuation_of": choice.continuation["id"], "continuation_suffix": suffix(reply, results[name])}
    reply = client.chat.completions.create(messages=[], **usual, **next_turn, extra_body={**keep, **turn})
    source = reply.kvrelay["continuation"]
    print(f"  next turn: {source['inherited_tokens']} tokens inherited, {source['computed_tokens']} computed")
print(reply.choices[0].message.content)
